"""What a vocoder step costs, learned from the steps that were run."""

from __future__ import annotations

from realtime.cost import OnlineFit

MEMORY = 0.9  # of the usual step: about the last ten
UNIT_FRAMES, UNIT_LANES = 8, 4  # an ordinary step: they bring the features to the order of one


class CostModel:
    """`fixed + per_frame * T + per_lane_frame * T * width` seconds. Measured from the moment a step is
    wanted to the moment its sound is there, so waiting for a shared device is part of it."""

    def __init__(self, fixed_s: float = 0.002, per_frame_s: float = 0.0005, per_lane_frame_s: float = 0.001):
        self._fit = OnlineFit(
            (fixed_s, per_frame_s * UNIT_FRAMES, per_lane_frame_s * UNIT_FRAMES * UNIT_LANES)
        )
        self.usual_s = self.step_s(1, 1)
        self.usual_width = 1.0

    def step_s(self, width: int, num_frames: int) -> float:
        fixed, per_frame, per_lane = self._fit.weights
        units = num_frames / UNIT_FRAMES
        return fixed + units * (per_frame + per_lane * width / UNIT_LANES)

    @property
    def fixed_s(self) -> float:
        return self._fit.weights[0]

    @property
    def jitter_s(self) -> float:
        return self._fit.jitter_s

    def observe(self, width: int, num_frames: int, took_s: float) -> None:
        units = num_frames / UNIT_FRAMES
        self._fit.observe((1.0, units, units * width / UNIT_LANES), took_s)
        self.usual_s = MEMORY * self.usual_s + (1 - MEMORY) * took_s
        self.usual_width = MEMORY * self.usual_width + (1 - MEMORY) * width
