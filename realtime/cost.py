"""What work costs, learned from the work that was done: least squares with forgetting.

Plain Python over two or three numbers: it is asked far more often than it is told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

FORGETTING = 0.98  # a step's weight halves after about 35 steps: follows load, ignores one hiccup
FLOOR = 0.03  # steps' worth of trust that each weight keeps, so that it does not drift while unseen
ERROR_WINDOW = 128
MIN_JITTER_S = 0.005  # a shared machine is never more exact than this
SHORTEST_S = 0.001

Vector = Sequence[float]


def _dot(a: Vector, b: Vector) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


class OnlineFit:
    """`took = weights . features`, no weight below zero, and how late it was at most in 95 of 100.

    What is known fades towards `FLOOR`, not to nothing: with plain forgetting a thousand steps of one
    shape unlearn what the other shapes cost. Features should be of the order of one.
    """

    def __init__(self, weights: Vector) -> None:
        self.weights = [float(weight) for weight in weights]  # as they are used: none is negative
        self.jitter_s = MIN_JITTER_S
        self._raw = list(self.weights)
        size = range(len(weights))
        self._known = [[FLOOR * (i == j) for j in size] for i in size]  # how well: the information matrix
        self._late: deque[float] = deque(maxlen=ERROR_WINDOW)

    def predict(self, features: Vector) -> float:
        return _dot(self.weights, features)

    def observe(self, features: Vector, took_s: float) -> None:
        expected_s = self.predict(features)
        # Only being late hurts: a step that was shorter than foretold counts as exact.
        self._late.append(max(took_s - expected_s, 0.0))
        self.jitter_s = max(MIN_JITTER_S, sorted(self._late)[int(0.95 * (len(self._late) - 1))])
        # One outlier (a page fault, a busy neighbour) must not bend the fit: it counts as at most twice.
        took_s = min(took_s, 2 * expected_s + MIN_JITTER_S)
        size = range(len(features))
        # Errors grow with what they are errors of: short steps count more.
        trust = 1 / (1 + expected_s / SHORTEST_S)
        for i in size:
            for j in size:
                faded = FORGETTING * self._known[i][j] + (1 - FORGETTING) * FLOOR * (i == j)
                self._known[i][j] = faded + trust * features[i] * features[j]
        error_s = took_s - _dot(self._raw, features)
        gain = _solve(self._known, features)
        self._raw = [w + g * trust * error_s for w, g in zip(self._raw, gain, strict=True)]
        self.weights = [max(weight, 0.0) for weight in self._raw]


def _solve(matrix: Sequence[Vector], vector: Vector) -> list[float]:
    """x of `matrix x = vector`, for a positive definite matrix of two or three rows."""
    size = len(vector)
    rows = [[*row, value] for row, value in zip(matrix, vector, strict=True)]
    for i in range(size):
        for k in range(i + 1, size):
            factor = rows[k][i] / rows[i][i]
            rows[k] = [x - factor * y for x, y in zip(rows[k], rows[i], strict=True)]
    x = [0.0] * size
    for i in reversed(range(size)):
        x[i] = (rows[i][size] - sum(rows[i][j] * x[j] for j in range(i + 1, size))) / rows[i][i]
    return x
