"""One stream's place in the vocoder: pending frames, clocks, and how it is going to end."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from realtime.messages import Finish, Note, StreamId, Timing

OWN_MEMORY = 0.9  # about the last ten frames: a batch changes its width within that many
COMMON_MEMORY = 0.99  # of all streams together: a few frames of each
P95 = 2.0  # mean absolute errors: 1.65 standard deviations, each of 1.25 mean absolute ones


class Interval:
    """Seconds between two frames of a running stream, and how much longer one in twenty is."""

    def __init__(self, mean_s: float, error_s: float = 0.0, memory: float = OWN_MEMORY) -> None:
        self.mean_s = mean_s
        self.error_s = error_s
        self._memory = memory

    @property
    def jitter_s(self) -> float:
        return P95 * self.error_s

    def observe(self, took_s: float) -> None:
        keep, learn = self._memory, 1 - self._memory
        self.error_s = keep * self.error_s + learn * abs(took_s - self.mean_s)
        self.mean_s = keep * self.mean_s + learn * took_s


@dataclass(slots=True, eq=False)
class Slot:
    stream_id: StreamId
    index: int
    timing: Timing
    opened_s: float
    interval: Interval
    priority: int = 5
    whole: bool = False
    pending: deque[npt.NDArray[np.int16]] = field(default_factory=deque)  # [C] each
    notes: deque[Note] = field(default_factory=deque)
    finish: Finish | None = None
    num_decoded: int = 0
    num_flying: int = 0  # frames in steps that have begun and are not complete
    num_prime: int = 0  # of the pending frames, those in front that are decoded unheard
    silence_s: float = 0.0
    first_sent_s: float | None = None
    oldest_pending_s: float = 0.0  # when the oldest pending frame came
    newest_s: float = 0.0  # when the newest frame came
    held: bool = False
    played: tuple[float, float] | None = None  # reported play position and when, seconds
    min_lead_s: float = math.inf  # of all chunks after the first, before they were sent

    def lead_s(self, now: float, frame_s: float) -> float | None:
        """Seconds of audio sent ahead of the listener; None before the first audio, and nobody is
        waiting while the client holds."""
        if self.first_sent_s is None:
            return None
        if self.held:
            return float("inf")
        sent = self.num_decoded * frame_s + self.silence_s
        if self.played is not None:
            position, at_s = self.played
            return sent - position - (now - at_s)
        return sent - (now - self.first_sent_s)

    def catch_up(self, now: float, frame_s: float) -> None:
        """Sound is about to be added: a listener who ran dry goes on with it, nothing is owed."""
        late_s = -(self.lead_s(now, frame_s) or 0.0)
        if late_s <= 0:
            return
        if self.played is not None:
            self.played = (self.played[0] - late_s, self.played[1])
        elif self.first_sent_s is not None:
            self.first_sent_s += late_s

    def next_boundary(self) -> int | None:
        """The frame count at which the next segment end or pause that is known lies."""
        if self.num_prime:
            return self.num_decoded + self.num_prime
        for note in self.notes:
            if note.kind in ("segment_end", "silence"):
                return note.frame
        return None
