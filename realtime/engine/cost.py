"""What the engine's steps cost, learned from the steps that were run."""

from __future__ import annotations

from realtime.cost import OnlineFit

UNIT_ROWS, UNIT_POSITIONS = 8, 64  # they bring the features to the order of one


class StepCost:
    """Decode: `fixed + per_row * n`; prefill: `fixed + per_position * T`. Seconds."""

    def __init__(self, fixed_s: float = 0.008, per_row_s: float = 0.001, prefill_s: float = 0.01) -> None:
        self._decode = OnlineFit((fixed_s, per_row_s * UNIT_ROWS))
        self._prefill = OnlineFit((prefill_s, 0.0))

    @property
    def jitter_s(self) -> float:
        return self._decode.jitter_s

    def decode_s(self, num_rows: int) -> float:
        fixed, per_row = self._decode.weights
        return fixed + per_row * num_rows / UNIT_ROWS

    def prefill_s(self, num_positions: int) -> float:
        fixed, per_unit = self._prefill.weights
        return fixed + per_unit * num_positions / UNIT_POSITIONS

    def positions_within(self, time_s: float) -> int:
        """How much of a prompt fits into a time; 0 when not even the start of a step does."""
        fixed, per_unit = self._prefill.weights
        if time_s <= fixed:
            return 0
        return int(min((time_s - fixed) / max(per_unit / UNIT_POSITIONS, 1e-9), 1e9))

    def observe_decode(self, num_rows: int, took_s: float) -> None:
        self._decode.observe((1.0, num_rows / UNIT_ROWS), took_s)

    def observe_prefill(self, num_positions: int, took_s: float) -> None:
        self._prefill.observe((1.0, num_positions / UNIT_POSITIONS), took_s)
