"""Who prefills, who decodes, who parks. Plain Python over plain values: no torch, no clock of its own.

A row is never run on a guess: it parks until the text that its next frame needs is known, and goes
on when it comes. While newcomers make their first frames, rows that are far ahead of their listeners
sit out: a step costs less the fewer rows it has. What happens at a place in a stream (a segment ended,
text ran out, a pause) is told as a Note that carries the number of frames before it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from realtime.engine.cost import StepCost
from realtime.engine.row import PREFILL_TILE, Row, Segment
from realtime.engine.text import Codes, policy_of
from realtime.errors import StageFailed
from realtime.messages import (
    Drop,
    EndSegment,
    EndText,
    Finish,
    Frames,
    Note,
    Pace,
    Prime,
    Prompt,
    Started,
    StreamId,
    Timing,
    Tokens,
    VocoderMessage,
)
from realtime.models.base import ModelSpec

INTERVAL_MEMORY = 0.95  # about the last twenty steps


@dataclass(frozen=True, slots=True)
class Pacing:
    """How far ahead of its listener a row must be to sit out while newcomers start: its lead covers the
    making of a largest chunk, and `turnaround_s()`, what it then takes to become sound (a vocoder step in
    flight and its own). A row is a newcomer until the vocoder's first chunk of it is full; that has
    `first_frames()` frames."""

    first_frames: Callable[[], int] = lambda: 2
    chunk_frames: int = 25
    turnaround_s: Callable[[], float] = lambda: 0.12


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows in ascending order that make their next frame together. A prefill has a single one and takes
    positions `start` .. `end`-1 of its prompt; only the last part makes a frame."""

    rows: tuple[Row, ...]
    phase: Literal["prefill", "decode"]
    start: int = 0
    end: int = 0

    @property
    def is_partial(self) -> bool:
        return self.phase == "prefill" and self.end < self.rows[0].segments[0].inputs.shape[0]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What the model answered, a line per row of a batch: codes int64 [n, K]; ok bool [n], False where
    its numbers were not finite; stop bool [n], True where it ended the segment and made no frame.
    Nothing (n = 0) of a partial prefill."""

    codes: npt.NDArray[np.int64]
    ok: npt.NDArray[np.bool_]
    stop: npt.NDArray[np.bool_]

    @classmethod
    def nothing(cls, num_codebooks: int) -> StepOutput:
        none = np.zeros(0, np.bool_)
        return cls(np.zeros((0, num_codebooks), np.int64), none, none)


class Scheduler:
    """Owns the rows. `next` chooses, `commit` books what the model answered; both only talk to the
    rest of the world through `outbox`, vocoder messages in the order in which they must be sent."""

    def __init__(self, spec: ModelSpec, num_rows: int, pacing: Pacing | None = None) -> None:
        self.spec = spec
        self.num_rows = num_rows
        self.policy = policy_of(spec.text, spec.codebook_size)
        self.pacing = pacing or Pacing()
        self.cost = StepCost()
        self.interval_s = 0.0  # between two frames of a running row, of late
        self.rows: dict[StreamId, Row] = {}
        self.outbox: list[VocoderMessage] = []
        self.parked: list[str] = []  # why rows left the batch, since somebody looked
        self._free = list(range(num_rows))
        self._prefilled_last = False
        self._prompts: list[Row] = []  # that wait to be prefilled

    @property
    def num_free(self) -> int:
        return len(self._free)

    # ---- what comes in

    def add(self, prompt: Prompt, now: float) -> Row | None:
        """Opens a segment; returns the row if the stream is new."""
        row = self.rows.get(prompt.stream_id)
        new = row is None
        if row is None:
            if prompt.segment > 0:
                return None  # ended here (failed, at its limit) while more of its text was on its way
            assert self._free, ("more streams than rows", prompt.stream_id, self.num_rows)
            row = Row(
                prompt.stream_id,
                heapq.heappop(self._free),  # lowest first: a batch is a short prefix of the pool
                prompt.sampling,
                prompt.priority,
                prompt.max_lead_s,
                Timing(prompt.trigger_s, admit_s=now, prefill_s=now),
                self.spec.first_codes,
                whole=prompt.whole,
            )
            self.rows[prompt.stream_id] = row
            if prompt.prime is not None and len(prompt.prime):
                started = Started(row.timing, row.sampling.seed, row.priority, row.whole)
                self.outbox.append(Prime(row.stream_id, prompt.prime, started))
                row.is_primed = True
        elif row.segments and not row.segments[-1].closed:
            row.segments[-1].closed = True  # a new segment ends the one before
        row.segments.append(
            Segment(
                prompt.segment,
                prompt.inputs,
                prompt.silence_ms,
                prompt.continued,
                prompt.max_frames,
                closed=prompt.silence_ms > 0,
            )
        )
        self._settle(row)
        return row if new else None

    def feed(self, tokens: Tokens) -> None:
        row = self.rows.get(tokens.stream_id)
        if row is not None and row.segments:
            row.segments[-1].tokens.extend(tokens.ids)
            self._settle(row)

    def end_segment(self, message: EndSegment) -> None:
        row = self.rows.get(message.stream_id)
        if row is not None and row.segments:
            row.segments[-1].closed = True
            self._settle(row)

    def end_text(self, message: EndText) -> None:
        row = self.rows.get(message.stream_id)
        if row is None:
            return
        if row.segments:
            row.segments[-1].closed = True
        row.text_ended = True
        self._settle(row)

    def pace(self, message: Pace) -> None:
        row = self.rows.get(message.stream_id)
        if row is None:
            return
        row.held = message.hold
        if message.played_s is not None:
            row.played = (message.played_s, message.at_s)

    def remove(self, stream_id: StreamId) -> Row | None:
        """Forgets a stream and frees its row; harmless for one that is gone."""
        row = self.rows.pop(stream_id, None)
        if row is not None:
            heapq.heappush(self._free, row.index)
        return row

    # ---- what runs next

    def next(self, now: float) -> tuple[Batch | None, float | None]:
        """The batch to run now, or None and the seconds after which to ask again (None: only a
        message can change anything)."""
        decode: list[Row] = []
        prefill: list[Row] = []
        wait_s: float | None = None
        for row in self.rows.values():
            segment = row.segments[0] if row.segments else None
            if segment is None or row.held or not segment.begun:
                self._park(row, "hold" if row.held else "text")
                continue
            if not self.policy.is_known(segment):
                self._park(row, "text")
                if segment.num_frames and row.starved_since_s is None:
                    row.starved_since_s = now
                continue
            ahead_s = self._over_lead_s(row, now)
            if ahead_s > 0:
                self._park(row, "lead")
                wait_s = ahead_s if wait_s is None else min(wait_s, ahead_s)
            elif segment.inputs.shape[0] > segment.num_prefilled:
                prefill.append(row)
            else:
                decode.append(row)
        batch = self._prefill(prefill, decode, now) if prefill else None
        self._prefilled_last = batch is not None
        self._prompts = [row for row in prefill if batch is None or row not in batch.rows]
        if batch is None and decode:
            running = self._paced(decode, now)
            for row in running:
                self._note_starved(row, now)
            batch = Batch(tuple(sorted(running, key=lambda row: row.index)), "decode")
        if batch is None:
            return None, wait_s
        for row in batch.rows:
            if row.is_parked:
                row.is_parked = False
                row.since_s = now
        return batch, None

    def _prefill(self, prefill: Sequence[Row], decode: Sequence[Row], now: float) -> Batch | None:
        """As much of the first newcomer's prompt as the most urgent running row's slack covers. Between
        two decode steps there is always some: about as long as one of them, when nobody has slack."""
        first = min(prefill, key=lambda row: self._prompt_key(row, now))
        segment = first.segments[0]
        missing = segment.inputs.shape[0] - segment.num_prefilled
        if decode:
            step_s = self.cost.decode_s(len(decode))
            slack_s = min((self._slack_s(row, now) for row in decode), default=0.0) - step_s
            if self._prefilled_last and slack_s < self.cost.prefill_s(missing):
                return None
            within = self.cost.positions_within(max(slack_s, step_s))
            missing = min(missing, max(within // PREFILL_TILE, 1) * PREFILL_TILE)
        return Batch((first,), "prefill", segment.num_prefilled, segment.num_prefilled + missing)

    def _prompt_key(self, row: Row, now: float) -> tuple[int, float, float, int]:
        """The order of prompts: whose listener would wait, newcomers by priority and age, the rest."""
        if not row.num_frames:
            return 1, -row.priority, row.timing.trigger_s, row.stream_id
        slack_s = self._slack_s(row, now) - self._missing_s(row) - self.cost.decode_s(len(self.rows))
        return 0 if slack_s <= 0 else 2, slack_s, 0.0, row.stream_id

    def _missing_s(self, row: Row) -> float:
        """What the rest of its prompt will take."""
        if not row.segments:
            return 0.0
        segment = row.segments[0]
        return self.cost.prefill_s(max(segment.inputs.shape[0] - segment.num_prefilled, 0))

    def _park(self, row: Row, why: str) -> None:
        if not row.is_parked:
            row.is_parked = True
            self.parked.append(why)

    def _slack_s(self, row: Row, now: float) -> float:
        """How long a row's next frame may take. Before its first chunk can be out nobody hears it: the
        prompts of those who came with it go first, and all of them share steps from then on."""
        if not row.is_heard and row.first_frame_s is not None:
            first = self.pacing.first_frames()
            row.is_heard = row.num_frames >= first or now - row.first_frame_s > first * self.spec.frame_s
        if row.whole or not row.is_heard:
            return math.inf
        return row.lead_s(now, self.spec.frame_s) - self.pacing.turnaround_s()

    def _paced(self, decode: list[Row], now: float) -> list[Row]:
        """While somebody makes its first frames, without the rows that are far ahead of their listeners."""
        pacing, first = self.pacing, self.pacing.first_frames()
        if all(row.num_frames >= first for row in decode):
            return decode
        enough_s = pacing.chunk_frames * self.cost.decode_s(len(decode)) + pacing.turnaround_s()
        running = []
        for row in decode:
            far = row.num_frames >= first and row.lead_s(now, self.spec.frame_s) > enough_s
            if far and not row.whole:
                self._park(row, "pace")
            else:
                running.append(row)
        return running

    def _over_lead_s(self, row: Row, now: float) -> float:
        if row.max_lead_s is None:
            return 0.0
        return row.lead_s(now, self.spec.frame_s) - row.max_lead_s

    def _note_starved(self, row: Row, now: float) -> None:
        since_s, row.starved_since_s = row.starved_since_s, None
        if since_s is not None and now - since_s > self.spec.frame_s:
            waited_ms = round((now - since_s) * 1000)
            segment = row.segments[0]
            self.outbox.append(Note(row.stream_id, segment.index, row.num_frames, "starved", waited_ms))

    # ---- what came of it

    def learn(self, batch: Batch, took_s: float) -> None:
        """How long the batch took, from when it was chosen to when its numbers were there."""
        if batch.phase == "decode":
            self.cost.observe_decode(len(batch.rows), took_s)
        else:
            self.cost.observe_prefill(batch.end - batch.start, took_s)

    def commit(self, batch: Batch, out: StepOutput, now: float) -> None:
        """Books a frame for each row of the batch: text moves on, segments and streams end."""
        if batch.phase == "prefill":
            (row,) = batch.rows
            row.segments[0].num_prefilled = batch.end
            if batch.is_partial:
                return
        spoke: list[Row] = []
        frames: list[Codes] = []
        started: list[Started | None] = []
        intervals_s: list[float] = []
        settled: list[Row] = []
        for row, codes, ok, stop in zip(
            batch.rows, out.codes.tolist(), out.ok.tolist(), out.stop.tolist(), strict=True
        ):
            if not ok:
                self._fail(row, StageFailed("the model's numbers were not finite"))
                continue
            settled.append(row)
            row.catch_up(now, self.spec.frame_s)
            heard = self._book(row, batch, tuple(codes), stop)
            if heard is not None:
                spoke.append(row)
                frames.append(heard)
                started.append(self._started(row, now) if row.num_frames == 1 else None)
                intervals_s.append(now - row.since_s)
            row.since_s = now
        if spoke:
            interval_s = sum(intervals_s) / len(intervals_s)
            self.interval_s = INTERVAL_MEMORY * self.interval_s + (1 - INTERVAL_MEMORY) * interval_s
            ids = tuple(row.stream_id for row in spoke)
            self.outbox.append(
                Frames(
                    ids,
                    np.array(frames, np.int16),
                    tuple(started),
                    tuple(intervals_s),
                    sum(self._missing_s(row) for row in self._prompts),
                )
            )
        for row in settled:  # after the frames: nothing may follow a Finish
            limit = row.sampling.max_frames
            if limit is not None and row.num_frames >= limit:
                self._limit(row)
            else:
                self._settle(row)

    def fail(self, batch: Batch, error: StageFailed) -> None:
        """Closes every stream of a batch whose step raised."""
        for row in batch.rows:
            self._fail(row, error)

    def _fail(self, row: Row, error: StageFailed) -> None:
        if self.remove(row.stream_id) is not None:
            self.outbox.append(Drop(row.stream_id, "failed", error, row.text_pads))

    def _book(self, row: Row, batch: Batch, codes: Codes, stop: bool) -> Codes | None:
        """Advances a row by one step; what the vocoder gets of its frame, None if it makes no sound."""
        segment = row.segments[0]
        row.position = segment.start + batch.end if batch.phase == "prefill" else row.position + 1
        if stop:
            self._stop(row)
            return None
        if self.policy.is_full(segment):
            # The step beyond the cap was only the chance to end by itself.
            self._cap(row)
            return None
        heard = self.policy.advance(row, codes)
        segment.num_frames += 1
        row.codes = codes
        if heard is not None:
            row.num_frames += 1
        elif self.policy.is_lost(segment):
            self._stop(row)
        return heard

    def _stop(self, row: Row) -> None:
        """The head segment ended by itself. If that was before its text did, a new part has the rest."""
        rest = self.policy.rest(row.segments[0])
        if rest is not None:
            row.segments.insert(1, rest)
        self._end_part(row)

    def _cap(self, row: Row) -> None:
        segment = row.segments[0]
        capped = self.policy.capped(segment)
        if capped == "limit":
            self._limit(row)
            return
        if capped == "again":
            again = Segment(
                segment.index,
                segment.inputs,
                offset=segment.offset + segment.spoken,
                frames_before=segment.frames_before + segment.num_frames,
                tokens=segment.tokens[segment.spoken :],
                closed=segment.closed,
            )
            row.segments.insert(1, again)
        self._end_part(row)

    def _limit(self, row: Row) -> None:
        """Ends the stream here; what was made is still decoded."""
        row.segments.clear()
        if self.remove(row.stream_id) is not None:
            self.outbox.append(Finish(row.stream_id, "limit", row.text_pads))

    def _end_part(self, row: Row) -> None:
        """Takes the head segment off and makes the row ready for the next one."""
        segment = row.segments.popleft()
        if segment.begun:  # else it turned out to have no text
            row.before = segment
            row.num_parts += 1
        row.codes = self.spec.first_codes
        row.starved_since_s = None
        if not (row.segments and row.segments[0].index == segment.index):
            num_frames = segment.frames_before + segment.num_frames - segment.num_mute
            self.outbox.append(Note(row.stream_id, segment.index, row.num_frames, "segment_end", num_frames))

    def _settle(self, row: Row) -> None:
        """Takes pauses and parts without text off the head of the queue; a row with nothing left and
        no more text finishes."""
        if self.rows.get(row.stream_id) is not row:
            return
        while row.segments and row.segments[0].is_silent:
            if not row.segments[0].silence_ms:
                self._end_part(row)
                continue
            segment = row.segments.popleft()
            row.silence_s += segment.silence_ms / 1000
            self.outbox += [
                Note(row.stream_id, segment.index, row.num_frames, "silence", segment.silence_ms),
                Note(row.stream_id, segment.index, row.num_frames, "segment_end", 0),
            ]
        if row.segments and not row.segments[0].begun:
            if self.policy.may_begin(row.segments[0]):
                self._begin(row)
        elif row.text_ended and not row.segments:
            self.remove(row.stream_id)
            self.outbox.append(Finish(row.stream_id, "done", row.text_pads))

    def _begin(self, row: Row) -> None:
        """The head segment's turn has come: what is prefilled depends on what the one before has left."""
        segment = row.segments[0]
        own = segment.inputs
        segment.inputs, segment.start = self.policy.opening(row, segment)
        segment.num_prefilled = self.policy.num_kept(row, segment)
        if segment.origin is None:
            segment.origin = own
        segment.begun = True
        row.position = segment.start
        missing = segment.start + segment.inputs.shape[0] - self.spec.text.max_positions
        if missing >= 0:
            self._fail(row, StageFailed(f"the prompt is {missing + 1} positions too long for the model"))

    def _started(self, row: Row, now: float) -> Started:
        row.first_frame_s = now
        row.timing = replace(row.timing, first_frame_s=now)
        return Started(row.timing, row.sampling.seed, row.priority, row.whole, row.is_primed)
