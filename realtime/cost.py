"""What work costs, learned from the work that was done: least squares with forgetting.

Plain Python over two or three numbers: it is asked far more often than it is told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

FORGETTING = 0.95  # per direction: follows a change of load within tens of steps, ignores one hiccup
ERROR_WINDOW = 128
MIN_JITTER_S = 0.005  # a shared machine is never more exact than this
SHORTEST_S = 0.001
FIRST_DOUBT = 1.0  # of the first weights, squared: any measurement outweighs them

Vector = Sequence[float]


def _dot(a: Vector, b: Vector) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


class OnlineFit:
    """`took = weights . features`, no weight below zero, and how late it was at most in 95 of 100.

    Forgetting is directional (Cao and Schwartz, 2000): a step makes room only for what it teaches, so
    a thousand steps of one shape don't unlearn what the other shapes cost. Features should be of the
    order of one.
    """

    def __init__(self, weights: Vector) -> None:
        self.weights = [float(weight) for weight in weights]  # as they are used: none is negative
        self.jitter_s = MIN_JITTER_S
        self._raw = list(self.weights)
        size = range(len(weights))
        self._known = [[float(i == j) / FIRST_DOUBT for j in size] for i in size]  # information ...
        self._doubt = [[float(i == j) * FIRST_DOUBT for j in size] for i in size]  # ... and its inverse
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
        # Errors grow with what they are errors of: all steps count alike when each is measured by its own
        # length.
        scale = 1 / max(expected_s, SHORTEST_S)
        self._learn([scale * x for x in features], scale * took_s)

    def _learn(self, features: Vector, took_s: float) -> None:
        known, doubt = self._known, self._doubt
        size = range(len(features))
        known_x = [_dot(row, features) for row in known]
        amount = _dot(known_x, features)
        for i in size:  # forget along `features`
            for j in size:
                known[i][j] -= (1 - FORGETTING) * known_x[i] * known_x[j] / amount
                doubt[i][j] += (1 / FORGETTING - 1) * features[i] * features[j] / amount
        doubt_x = [_dot(row, features) for row in doubt]
        scale = 1 + _dot(doubt_x, features)
        error = took_s - _dot(self._raw, features)
        for i in size:  # learn along it
            self._raw[i] += doubt_x[i] / scale * error
            for j in size:
                known[i][j] += features[i] * features[j]
                doubt[i][j] -= doubt_x[i] * doubt_x[j] / scale
        self.weights = [max(weight, 0.0) for weight in self._raw]
