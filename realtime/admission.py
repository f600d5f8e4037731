"""Whether a stream that comes now would be heard in time. Plain arithmetic; knows no thread and no clock.

Two limits. Rows: with s at a frame's length or more no chunking is free of gaps, so there are never
more streams than the stages, at their measured costs, make well faster than sound. Time: who would have
to wait longer than the first-audio budget is refused at once and told when to come back.
"""

from __future__ import annotations

import math

from realtime.engine.cost import StepCost
from realtime.vocoder.cost import CostModel

# F frames start a stream without a gap while v + jitter is at most F * (frame - s). One that starts
# earlier than with fixed chunks of five may have four, so s may be at most frame - (v + jitter) / 4.
START_FRAMES = 4
MOST, LEAST = 0.7, 0.4  # of a frame, whatever was measured: starts come in bursts
LONG_FRAMES = 25  # of a step that is as cheap per frame as can be while anybody listens
FIRST_HOLD_S = 2.0  # how long a stream keeps its permit, before one has given it back
MEMORY = 0.95
MARGIN = 2.33  # standard deviations: 99 in 100
MIN_RETRY_S = 0.1
MIN_STARTING = 5  # starts at once are never held back below this


class Admission:
    """`max_streams` permits; a first-audio budget in seconds. `hold_s` and `first_s` are what streams
    took of late: from permit to return, and from permit to first audio."""

    def __init__(self, max_streams: int, budget_s: float, frame_s: float, lanes: int = 1) -> None:
        self.max_streams = max_streams
        self.budget_s = budget_s
        self.hold_s = FIRST_HOLD_S
        self.first_s = 0.0
        self.room_s = MOST * frame_s  # the most that s may be, as last measured
        self._num_returned = 0
        self._frame_s = frame_s
        self._lanes = lanes  # of a full vocoder step

    def returned(self, held_s: float) -> None:
        """A stream gave its permit back."""
        self._num_returned += 1
        learn = max(1 / (1 + self._num_returned), 1 - MEMORY)  # the guess counts as one stream
        self.hold_s += learn * (held_s - self.hold_s)

    def heard(self, first_s: float) -> None:
        """A stream's first audio left so long after its permit was granted."""
        self.first_s = MEMORY * self.first_s + (1 - MEMORY) * first_s

    def carried(self, engine: StepCost, vocoder: CostModel) -> int:
        """How many streams each of the stages makes faster than sound, at least one."""
        self.room_s = self._room_s(vocoder)
        room_s = self.room_s
        fixed_s = engine.decode_s(0)
        by_engine = (room_s - fixed_s) / max(engine.decode_s(1) - fixed_s, 1e-9)
        lane_frame_s = vocoder.step_s(self._lanes, LONG_FRAMES) / LONG_FRAMES / self._lanes
        by_vocoder = room_s / max(lane_frame_s, 1e-9)
        return max(1, int(min(by_engine, by_vocoder, self.max_streams)))

    def _room_s(self, vocoder: CostModel) -> float:
        own_s = vocoder.step_s(max(round(vocoder.usual_width), self._lanes), 1)
        turn_s = vocoder.usual_s + own_s + vocoder.jitter_s
        return min(max(self._frame_s - turn_s / START_FRAMES, LEAST * self._frame_s), MOST * self._frame_s)

    def is_slow(self, interval_s: float) -> bool:
        """Frames come hardly faster than sound, whatever was foretold."""
        return interval_s > MOST * self._frame_s

    def limit(self, num_held: int, num_starting: int, interval_s: float, carried: int) -> int:
        """How many streams may run now, of which `num_starting` are not heard yet: no more than are
        `carried`, and none on top while frames already come too slowly or many starts, each of which
        takes short steps, are under way. Never below half of what is carried: it must come to rest."""
        is_slow = self.is_slow(interval_s)
        is_crowded = num_starting >= max(MIN_STARTING, num_held // 8)
        return min(carried, max(num_held, carried // 2, 1)) if is_slow or is_crowded else carried

    def wait_s(self, num_waiting: int, limit: int) -> float:
        """The time for a permit behind `num_waiting` others, kept in 99 of 100 cases: with n streams that
        hold theirs for h, the k-th comes back after k * h / n, give or take the root of k."""
        k = num_waiting + 1
        return (k + MARGIN * math.sqrt(k)) * self.hold_s / max(limit, 1)

    def retry_s(self, num_waiting: int, limit: int, num_open: int = 0) -> float | None:
        """None if a stream that has to wait is worth queueing; else the seconds after which the queue
        will be short enough. `num_open` permits are only held back until others have started: those
        in front of the queue wait for first audio, and not for permits to come back."""
        if num_waiting < num_open:
            wait_s = self.first_s * (1 + num_waiting / MIN_STARTING)
        else:
            wait_s = self.wait_s(num_waiting - num_open, limit)
        return self.late_s(wait_s)

    def late_s(self, wait_s: float = 0.0) -> float | None:
        """None if a stream with a permit after `wait_s` is expected to be heard within the budget, else
        how much later, and so when to come back."""
        late_s = wait_s + self.first_s - self.budget_s
        return None if late_s <= 0 else max(late_s, MIN_RETRY_S)
