"""What a vocoder step costs, learned from the steps that were run."""

from __future__ import annotations

from collections import deque

import numpy as np

FORGETTING = 0.98  # a step's weight halves after about 35 steps: follows load, ignores one hiccup
ERROR_WINDOW = 128
MIN_JITTER_S = 0.005  # a shared machine is never more exact than this


class CostModel:
    """`fixed + per_frame * T + per_lane_frame * T * width` seconds, by recursive least squares, and
    how far off it was (p95 of the last steps)."""

    def __init__(self, fixed_s: float = 0.002, per_frame_s: float = 0.0005, per_lane_frame_s: float = 0.001):
        self._weights = np.array([fixed_s, per_frame_s, per_lane_frame_s])
        self._covariance = np.eye(3) * 1e-2
        self._errors: deque[float] = deque(maxlen=ERROR_WINDOW)
        self._jitter_s = MIN_JITTER_S

    def step_s(self, width: int, num_frames: int) -> float:
        fixed, per_frame, per_lane = self._weights
        return float(max(fixed, 0.0) + num_frames * (max(per_frame, 0.0) + max(per_lane, 0.0) * width))

    @property
    def fixed_s(self) -> float:
        return float(max(self._weights[0], 0.0))

    @property
    def jitter_s(self) -> float:
        return self._jitter_s

    def observe(self, width: int, num_frames: int, took_s: float) -> None:
        self._errors.append(abs(took_s - self.step_s(width, num_frames)))
        self._jitter_s = max(MIN_JITTER_S, sorted(self._errors)[int(0.95 * (len(self._errors) - 1))])
        x = np.array([1.0, num_frames, num_frames * width])
        px = self._covariance @ x
        gain = px / (FORGETTING + x @ px)
        # One outlier (a page fault, a busy neighbour) must not bend the fit: it counts as at most twice.
        target = min(took_s, 2 * self.step_s(width, num_frames) + MIN_JITTER_S)
        self._weights = self._weights + gain * (target - x @ self._weights)
        self._covariance = (self._covariance - np.outer(gain, px)) / FORGETTING
        self._covariance = np.clip(self._covariance, -1.0, 1.0)  # no wind-up while nothing new is learned
