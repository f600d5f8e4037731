"""How a segment's text meets its frames: one policy for each kind of text that `models.base` knows.

A policy says from which rows a segment starts, when a row's next frame has the text it needs, which
text ids that step shows, and what a frame did to the text. It sends nothing and knows no tensor.
"""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from realtime.engine.row import PREFILL_TILE, Row, Segment
from realtime.models.base import PushedText, TextPolicy, WholeText, WindowedText

MAX_FRAMES_AFTER_TEXT = 12  # of one windowed segment, once all its tokens are spoken

Codes = tuple[int, ...]
Capped = Literal["over", "again", "limit"]


class Policy(Protocol):
    def opening(self, row: Row, segment: Segment) -> tuple[npt.NDArray[np.int32], int]:
        """The rows that a segment's prefill takes, and the position of the first of them."""
        ...

    def num_kept(self, row: Row, segment: Segment) -> int:
        """How many of the rows that `opening` gave are in the KV already, at their positions."""
        ...

    def may_begin(self, segment: Segment) -> bool:
        """The text that its prompt needs is there."""
        ...

    def is_known(self, segment: Segment) -> bool:
        """The text that the next frame needs is there."""
        ...

    def ids(self, segment: Segment) -> list[int]:
        """The text ids of the next decode step."""
        ...

    def may_stop(self, segment: Segment) -> bool: ...

    def is_full(self, segment: Segment) -> bool:
        """The next frame would be beyond the most it may have."""
        ...

    def capped(self, segment: Segment) -> Capped:
        """What becomes of a full one that did not stop: it is over; what it has not spoken becomes a new
        part; or the stream ends at its limit."""
        ...

    def advance(self, row: Row, codes: Codes) -> Codes | None:
        """The head segment made a frame. What the vocoder gets of it, None if it makes no sound."""
        ...

    def is_lost(self, segment: Segment) -> bool:
        """It made so many frames without sound that nothing is to be expected of it."""
        ...

    def rest(self, segment: Segment) -> Segment | None:
        """What the model was not shown of one that ended, as a new part."""
        ...


def policy_of(text: TextPolicy, codebook_size: int) -> Policy:
    match text:
        case WindowedText():
            return Windowed(text)
        case PushedText():
            return Pushed(text, codebook_size)
        case WholeText():
            return Whole(text)


class Windowed:
    """A pace codebook tells how many tokens each frame finished; the window moves with it."""

    def __init__(self, text: WindowedText) -> None:
        self._text = text

    def opening(self, row: Row, segment: Segment) -> tuple[npt.NDArray[np.int32], int]:
        return segment.inputs, 0

    def num_kept(self, row: Row, segment: Segment) -> int:
        return 0

    def may_begin(self, segment: Segment) -> bool:
        return True

    def is_known(self, segment: Segment) -> bool:
        return segment.closed or len(segment.tokens) >= segment.spoken + self._text.min_lookahead + 1

    def ids(self, segment: Segment) -> list[int]:
        return window_ids(segment, self._text)

    def may_stop(self, segment: Segment) -> bool:
        """When the last token is being spoken and two frames are out."""
        return segment.closed and segment.spoken >= len(segment.tokens) - 1 and segment.num_frames >= 2

    def is_full(self, segment: Segment) -> bool:
        cap = self._text.frame_cap(len(segment.tokens), segment.closed)
        return segment.num_frames >= cap or (
            segment.closed and segment.frames_after_text >= MAX_FRAMES_AFTER_TEXT
        )

    def capped(self, segment: Segment) -> Capped:
        if segment.spoken == 0:
            return "limit"
        return "again" if segment.spoken < len(segment.tokens) or not segment.closed else "over"

    def advance(self, row: Row, codes: Codes) -> Codes:
        segment, text = row.segments[0], self._text
        known = len(segment.tokens)
        if not segment.closed and segment.spoken + text.offsets[-1] >= known:
            row.text_pads += 1
        if segment.closed and segment.spoken >= known:
            segment.frames_after_text += 1
        num_finished = min(codes[text.pace_codebook], known - segment.spoken)
        segment.spoken += num_finished
        return (*codes[: text.pace_codebook], num_finished, *codes[text.pace_codebook + 1 :])

    def is_lost(self, segment: Segment) -> bool:
        return False

    def rest(self, segment: Segment) -> Segment | None:
        return None  # it stops when all was said


class Pushed:
    """Each decode step shows the next token, and padding once the text is over. `spoken` tokens were
    shown; those in the prompt are not among `tokens`."""

    def __init__(self, text: PushedText, codebook_size: int) -> None:
        self._text = text
        self._codebook_size = codebook_size

    def opening(self, row: Row, segment: Segment) -> tuple[npt.NDArray[np.int32], int]:
        """Behind everything that the segments before have left in the KV, while there is room. A rest has
        the prompt of the part before, with its own text at the end: what that left led nowhere."""
        if segment.origin is not None:
            num_before = max(len(segment.origin) - self._text.lookahead, 0)
            first = segment.tokens[: self._text.lookahead]
            segment.tokens = segment.tokens[len(first) :]
            shown = np.repeat(segment.origin[-2:][:1], len(first), axis=0)
            shown[-1] = segment.origin[-1]
            shown[:, 0] = first
            return np.concatenate([segment.origin[:num_before], shown]), 0
        if segment.continued is not None and _left_frames(row):
            end = row.position + segment.continued.shape[0]
            if end + self._text.max_segment_frames <= self._text.max_positions:
                return segment.continued, row.position
        return segment.inputs, 0

    def num_kept(self, row: Row, segment: Segment) -> int:
        return 0

    def may_begin(self, segment: Segment) -> bool:
        is_enough = segment.closed or len(segment.tokens) >= self._text.lookahead
        return segment.origin is None or is_enough

    def is_known(self, segment: Segment) -> bool:
        return segment.num_frames == 0 or segment.closed or segment.spoken < len(segment.tokens)

    def ids(self, segment: Segment) -> list[int]:
        is_over = segment.spoken >= len(segment.tokens)
        return [self._text.pad_id if is_over else segment.tokens[segment.spoken]]

    def may_stop(self, segment: Segment) -> bool:
        return True

    def is_full(self, segment: Segment) -> bool:
        cap = self._text.frame_cap(self._text.lookahead + len(segment.tokens), segment.closed)
        return segment.num_frames >= _lowest(cap, segment, self._text.max_positions)

    def capped(self, segment: Segment) -> Capped:
        return "limit"

    def advance(self, row: Row, codes: Codes) -> Codes | None:
        """The first frame came from the prompt, whatever was said meanwhile is still to be shown."""
        segment = row.segments[0]
        if segment.num_frames and segment.spoken < len(segment.tokens):
            segment.spoken += 1
        if max(codes) < self._codebook_size:
            segment.mute_run = 0
            return codes
        segment.num_mute += 1
        segment.mute_run += 1
        return None

    def is_lost(self, segment: Segment) -> bool:
        return segment.mute_run >= self._text.max_invalid_frames

    def rest(self, segment: Segment) -> Segment | None:
        """At least the lookahead is shown of each part: there is an end to them."""
        if segment.closed and segment.spoken >= len(segment.tokens):
            return None
        return Segment(
            segment.index,
            segment.inputs[:0],
            origin=segment.origin,
            frames_before=segment.frames_before + segment.num_frames - segment.num_mute,
            tokens=segment.tokens[segment.spoken :],
            closed=segment.closed,
        )


class Whole:
    """All text is in the prompt; every decode step shows the same id."""

    def __init__(self, text: WholeText) -> None:
        self._text = text

    def opening(self, row: Row, segment: Segment) -> tuple[npt.NDArray[np.int32], int]:
        """The frames of the segment before follow its text, as if the model had just made them."""
        before = row.before
        if segment.continued is not None and before is not None and before.frames:
            made = np.array([(self._text.slot_id, *codes) for codes in before.frames], np.int32)
            inputs = np.concatenate([segment.continued, made])
            if inputs.shape[0] + self._text.max_segment_frames <= self._text.max_positions:
                return inputs, 0
        return segment.inputs, 0

    def num_kept(self, row: Row, segment: Segment) -> int:
        """What both begin with: the system's text and the reference. Whole tiles of it, since a prompt's
        numbers depend on where it is cut; and a row is left to make the frame from."""
        before = row.before
        if before is None:
            return 0
        assert before.start == segment.start == 0
        num_rows = min(len(before.inputs), len(segment.inputs) - 1)
        is_same = (before.inputs[:num_rows] == segment.inputs[:num_rows]).all(1)
        num_same = num_rows if is_same.all() else int(is_same.argmin())
        return num_same // PREFILL_TILE * PREFILL_TILE

    def may_begin(self, segment: Segment) -> bool:
        return True

    def is_known(self, segment: Segment) -> bool:
        return True

    def ids(self, segment: Segment) -> list[int]:
        return [self._text.slot_id]

    def may_stop(self, segment: Segment) -> bool:
        return True

    def is_full(self, segment: Segment) -> bool:
        cap = self._text.frame_cap(len(segment.tokens), segment.closed)
        return segment.num_frames >= _lowest(cap, segment, self._text.max_positions)

    def capped(self, segment: Segment) -> Capped:
        return "limit"

    def advance(self, row: Row, codes: Codes) -> Codes:
        row.segments[0].frames.append(codes)
        return codes

    def is_lost(self, segment: Segment) -> bool:
        return False

    def rest(self, segment: Segment) -> Segment | None:
        return None  # all of it was shown


def window_ids(segment: Segment, text: WindowedText) -> list[int]:
    """The text ids around the token being spoken."""
    known = len(segment.tokens)
    beyond = text.end_id if segment.closed else text.pad_id
    ids = []
    for offset in text.offsets:
        k = segment.spoken + offset
        ids.append(text.start_id if k < 0 else segment.tokens[k] if k < known else beyond)
    return ids


def _left_frames(row: Row) -> bool:
    return row.before is not None and row.before.num_frames > 0


def _lowest(cap: int, segment: Segment, max_positions: int) -> int:
    """Of the model's cap, the prompt's own, and what fits behind the prompt: the frame after the last
    is made too, as the chance to stop."""
    room = max_positions - segment.start - len(segment.inputs)
    return min(cap, room, cap if segment.max_frames is None else segment.max_frames)
