"""One stream's generation state. How its text meets its frames is in `engine.text`."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from realtime.messages import SamplingParams, StreamId, Timing

PREFILL_TILE = 32  # parts of a prompt are cut at multiples: a smaller one would cost about as much


@dataclass(slots=True)
class Segment:
    """A piece of text with its own prompt. `spoken` of its `tokens` are finished (pushed text: shown to
    the model) after `num_frames` frames. A pause is a segment of silence without text."""

    index: int  # as the text feed counts them
    inputs: npt.NDArray[np.int32]  # once it has begun: what is prefilled, from position `start`
    silence_ms: int = 0
    continued: npt.NDArray[np.int32] | None = None  # instead of `inputs`, behind frames of the one before
    max_frames: int | None = None
    begun: bool = False
    origin: npt.NDArray[np.int32] | None = None  # its own prompt once it has begun; of a rest, its part's
    start: int = 0
    offset: int = 0  # tokens of the feed's segment that an earlier, capped part has spoken
    frames_before: int = 0  # of such parts
    tokens: list[int] = field(default_factory=list)
    closed: bool = False
    num_prefilled: int = 0  # positions of `inputs` that are in the KV
    spoken: int = 0
    num_frames: int = 0  # that the model made, also those without sound
    num_mute: int = 0  # that made no sound
    mute_run: int = 0  # of them, the newest in a row
    frames_after_text: int = 0
    frames: list[tuple[int, ...]] = field(default_factory=list)  # kept where the next one continues them

    @property
    def is_silent(self) -> bool:
        """A pause, or what is left of a capped segment that turned out to have no more text."""
        return self.silence_ms > 0 or (self.closed and not self.tokens and not self.inputs.shape[0])


@dataclass(slots=True, eq=False)
class Row:
    """A stream in the decode-state pool, at `index`."""

    stream_id: StreamId
    index: int
    sampling: SamplingParams
    priority: int
    max_lead_s: float | None
    timing: Timing
    codes: tuple[int, ...]  # of the frame before: the next step's input
    segments: deque[Segment] = field(default_factory=deque)
    before: Segment | None = None  # the one that ended last
    text_ended: bool = False
    held: bool = False
    position: int = 0  # of the next decode step's input in the KV
    num_parts: int = 0  # segments begun, capped parts counted singly: what the noise is drawn for
    num_frames: int = 0  # that made a sound
    silence_s: float = 0.0
    text_pads: int = 0
    starved_since_s: float | None = None
    first_frame_s: float | None = None
    whole: bool = False  # nobody listens before the end
    is_primed: bool = False  # its slot is open, with a reference's frames in front
    is_heard: bool = False  # its first chunk may be out
    is_parked: bool = True  # could not run, or was not let, when it was last looked at
    since_s: float = 0.0  # since when it works on its next frame
    played: tuple[float, float] | None = None  # reported play position and when, seconds

    def lead_s(self, now: float, frame_s: float) -> float:
        """Seconds of audio made but not yet played; without reports, playing began with the first frame."""
        made = self.num_frames * frame_s + self.silence_s
        if self.played is not None:
            position, at_s = self.played
            return made - position - (now - at_s)
        return made - (now - self.first_frame_s) if self.first_frame_s is not None else 0.0

    def catch_up(self, now: float, frame_s: float) -> None:
        """A frame is about to be added: a listener who ran dry goes on with it, nothing is owed."""
        late_s = -self.lead_s(now, frame_s)
        if late_s <= 0:
            return
        if self.played is not None:
            self.played = (self.played[0] - late_s, self.played[1])
        elif self.first_frame_s is not None:
            self.first_frame_s += late_s
