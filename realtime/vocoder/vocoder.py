"""The vocoder stage: frames in, sound out, several slots per codec call."""

from __future__ import annotations

import heapq
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from realtime import metrics
from realtime.errors import StageFailed, TTSError
from realtime.messages import (
    Audio,
    Closed,
    CloseReason,
    Drop,
    Finish,
    Frames,
    Note,
    Pace,
    Prime,
    Started,
    StreamEvent,
    StreamId,
    VocoderMessage,
)
from realtime.models.base import ModelSpec
from realtime.vocoder.cost import CostModel
from realtime.vocoder.policy import (
    MIN_WAIT_S,
    STEP_FRAMES,
    ChunkPolicy,
    Planner,
    Recent,
    SlotView,
    first_frames,
    plan,
)
from realtime.vocoder.slot import COMMON_MEMORY, Interval, Slot

LOAD_WINDOW_S = 1.0
AHEAD_S = 0.004  # before a step in flight ends: what choosing and launching the next one takes
FIRST_INTERVAL_SHARE = 0.25  # of a frame's length, before anything is known

logger = logging.getLogger(__name__)


class Codec(Protocol):
    """A CodecRunner is one. Up to `num_ahead` steps may be launched before the one before is collected."""

    num_ahead: int

    def reset(self, slot: int, seed: int) -> None: ...

    def launch(self, frames: npt.NDArray[np.int64], slots: list[int]) -> Any: ...

    def collect(self, launched: Any) -> list[npt.NDArray[np.float32]]: ...


@dataclass(frozen=True, slots=True)
class Work:
    """A step that has begun: frames [n, T, K] of `slots`."""

    slots: tuple[Slot, ...]
    frames: npt.NDArray[np.int64]
    began_s: float


class Vocoder:
    """`handle` and `step` are called by one thread only (or by a test, with no thread at all).

    A slot opens on a stream's first frames and is free again when `Closed` leaves. The codec state
    of a slot is reset before it is used; if that fails, the slot is never used again and `Closed`
    says so. `step` is `begin`, the codec, `complete`: a simulation puts its own time in between.
    """

    def __init__(
        self,
        spec: ModelSpec,
        codec: Codec,
        num_slots: int,
        policy: ChunkPolicy,
        emit: Callable[[list[StreamEvent]], None],
        clock: Callable[[], float] = time.monotonic,
        planner: Planner = plan,
    ) -> None:
        self.spec = spec
        self.slots: dict[StreamId, Slot] = {}
        self.cost = CostModel()
        self.num_steps = 0
        self.quarantined: list[int] = []
        self._codec = codec
        self._free = list(range(num_slots))
        self._policy = policy
        self._emit = emit
        self._clock = clock
        self._planner = planner
        # Of all streams: a new one's is like it.
        self._interval = Interval(policy.frame_s * FIRST_INTERVAL_SHARE, memory=COMMON_MEMORY)
        self._busy_s = 0.0  # of the last LOAD_WINDOW_S, decayed
        self._busy_at_s = clock()
        self._began_s = -math.inf  # the last step
        self._ended_s = -math.inf  # the last one that is complete
        self._launched: deque[tuple[Work, Any]] = deque()
        self._prompts_s = 0.0  # what waits in front of the next frames
        self._decoding: tuple[Slot, ...] = ()
        self._events: list[StreamEvent] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def turnaround_s(self) -> float:
        """From a frame to its sound, a step in flight included; other threads may ask."""
        return self.cost.usual_s + self.cost.step_s(1, 1) + self.cost.jitter_s + self._interval.jitter_s

    @property
    def first_frames(self) -> int:
        """How many frames a stream's first chunk would have now; other threads may ask."""
        return first_frames(self._interval.mean_s, self.turnaround_s, self._policy)

    def handle(self, message: VocoderMessage) -> None:
        match message:
            case Prime():
                slot = self._open(message.stream_id, message.started, self._clock())
                if slot is not None:
                    slot.num_prime = message.codes.shape[0]
                    slot.pending.extend(message.codes)
            case Frames():
                self._take(message)
            case Note():
                slot = self.slots.get(message.stream_id)
                if slot is None:
                    self._events.append(message)  # nothing has been spoken yet
                else:
                    slot.notes.append(message)
                    self._tell(slot)
            case Pace():
                slot = self.slots.get(message.stream_id)
                if slot is not None:
                    slot.held = message.hold
                    if message.played_s is not None:
                        slot.played = (message.played_s, message.at_s)
            case Finish():
                slot = self.slots.get(message.stream_id)
                if slot is None:
                    self._events.append(Closed(message.stream_id, message.reason, None, 0, message.text_pads))
                else:
                    slot.finish = message
                    self._close_if_drained(slot)
            case Drop():
                slot = self.slots.get(message.stream_id)
                if slot is None:
                    self._events.append(
                        Closed(message.stream_id, message.reason, message.error, 0, message.text_pads)
                    )
                else:
                    self._close(slot, message.reason, message.error, message.text_pads)
        self._send()

    def step(self) -> float | None:
        """Where the codec can run ahead, the next step is launched shortly before the one in flight ends:
        no sooner, since whoever is ready by then shares it."""
        wait_s = self._until_end_s(self._launched[0][0]) - AHEAD_S if self._launched else 0.0
        if wait_s > MIN_WAIT_S:
            return wait_s
        work = self.begin()
        if isinstance(work, Work):
            launched = self._codec.launch(work.frames, [slot.index for slot in work.slots])
            self._launched.append((work, launched))
            if len(self._launched) <= self._codec.num_ahead:
                self._decoding = ()  # it is in hand again when it is collected
                return 0.0
        elif not self._launched:
            return work
        work, launched = self._launched.popleft()
        self._decoding = work.slots
        self.complete(work, self._codec.collect(launched))
        return 0.0

    def begin(self) -> Work | float | None:
        """Takes the frames of the step to run now; or the seconds after which to ask again, None if
        only a message can change anything."""
        now = self._clock()
        views = [self._view(slot, now) for slot in self.slots.values()]
        recent = Recent(self.load(now), now - self._began_s, self._prompts_s)
        chosen = self._planner(views, recent, self._policy, self.cost)
        if not chosen.slots:
            return chosen.wait_s
        by_index = {slot.index: slot for slot in self.slots.values()}
        self._began_s = now
        self._decoding = tuple(by_index[index] for index in chosen.slots)
        for slot in self._decoding:
            if slot.num_decoded == slot.num_prime == slot.num_flying == 0:
                slot.timing = replace(slot.timing, chunk_full_s=now)
            slot.num_flying += chosen.num_frames
        taken = [[slot.pending.popleft() for _ in range(chosen.num_frames)] for slot in self._decoding]
        return Work(self._decoding, np.array(taken, np.int64), now)

    def complete(self, work: Work, pcm: Sequence[npt.NDArray[np.float32]]) -> None:
        """Hands out the sound [T * hop, channels] of each slot of the step."""
        self._decoding = ()
        now = self._clock()
        num_frames = work.frames.shape[1]
        # One that waited for another step on the device took as long as it had that for itself.
        self._account(max(work.began_s, self._ended_s), now, len(work.slots), num_frames)
        self._ended_s = now
        marks = work.frames[..., : self.spec.codec_codebooks.start].astype(np.int16)
        for slot, sound, marked in zip(work.slots, pcm, marks, strict=True):
            slot.num_flying -= num_frames
            if self.slots.get(slot.stream_id) is not slot:
                continue  # dropped while its step ran
            if slot.num_prime:  # a chunk ends where they do
                slot.num_prime -= num_frames
                slot.oldest_pending_s = now
                self._close_if_drained(slot)
                continue
            timing = None
            lead_s = slot.lead_s(now, self._policy.frame_s)
            if lead_s is not None and lead_s < math.inf and not slot.whole:
                slot.min_lead_s = min(slot.min_lead_s, lead_s)
                metrics.VOCODER_SLACK.observe(lead_s)
                metrics.UNDERRUNS.inc(lead_s < 0)
            if slot.first_sent_s is None:
                slot.first_sent_s = now
                timing = replace(slot.timing, first_pcm_s=now)
            slot.catch_up(now, self._policy.frame_s)
            if not slot.pending:
                slot.oldest_pending_s = now
            self._events.append(Audio(slot.stream_id, sound, marked, slot.num_decoded, timing))
            slot.num_decoded += num_frames
            self._tell(slot)
            self._close_if_drained(slot)
        self._send()

    def fail(self, error: Exception) -> None:
        """Closes the streams of the step that raised."""
        failure = StageFailed("the vocoder failed on this step")
        decoding, self._decoding = self._decoding, ()
        for slot in decoding:
            if self.slots.get(slot.stream_id) is slot:
                self._close(slot, "failed", failure, 0)
        self._send()

    def close(self) -> None:
        """Nothing outlives the thread."""

    def warm_up(self) -> None:
        """Runs every step size, alone and in company, so that the first stream finds memory, kernels
        and the cost model warm."""
        slots = list(range(len(self._free)))
        widths = self._policy.buckets or sorted({1, min(len(slots), 4)})
        for width in widths:
            for frames in STEP_FRAMES if self._policy.buckets else STEP_FRAMES[:6]:
                for repeat in range(2):
                    for index in slots[:width]:
                        self._codec.reset(index, 0)
                    codes = np.zeros((width, frames, self.spec.num_codebooks), np.int64)
                    start = self._clock()
                    self._codec.collect(self._codec.launch(codes, slots[:width]))
                    if repeat:
                        self.cost.observe(self._policy.lanes(width), frames, self._clock() - start)

    def load(self, now: float) -> float:
        """The busy share of about the last second."""
        self._decay(now)
        return min(1.0, self._busy_s / LOAD_WINDOW_S)

    # ---- in

    def _take(self, message: Frames) -> None:
        now = self._clock()
        self._prompts_s = message.prompts_s
        for i, stream_id in enumerate(message.stream_ids):
            started, codes = message.started[i], message.codes[i]
            slot = self.slots.get(stream_id)
            if started is not None:
                if slot is not None:
                    slot.timing = started.timing  # it has been primed meanwhile
                elif not started.is_primed:
                    slot = self._open(stream_id, started, now)
            if slot is None:
                continue  # closed here while its last frames were on their way
            own = codes[self.spec.codec_codebooks]
            if own.min() < 0 or own.max() >= self.spec.codebook_size:
                error = StageFailed("the model made codes that the codec does not have")
                logger.error("stream %d: codes out of range: %s", stream_id, own.tolist())
                self._close(slot, "failed", error, 0)
                continue
            if started is None:
                slot.interval.observe(message.intervals_s[i])
                self._interval.observe(message.intervals_s[i])
            if not slot.pending:
                slot.oldest_pending_s = now
            slot.newest_s = now
            slot.pending.append(codes)

    def _open(self, stream_id: StreamId, started: Started, now: float) -> Slot | None:
        """A slot equal to a fresh one; one whose reset fails is put aside, and only its stream closes."""
        assert stream_id not in self.slots, stream_id
        assert self._free, ("more streams than slots", stream_id)
        index = heapq.heappop(self._free)
        try:
            self._codec.reset(index, started.seed)
        except Exception:  # here and not in the worker: the other streams of the message go on
            logger.exception("slot %d could not be reset and is put aside", index)
            self.quarantined.append(index)
            failure = StageFailed("the vocoder could not start this stream")
            self._events.append(Closed(stream_id, "failed", failure, quarantined=True))
            return None
        interval = Interval(self._interval.mean_s, self._interval.error_s)
        slot = Slot(
            stream_id, index, started.timing, now, interval, priority=started.priority, whole=started.whole
        )
        self.slots[stream_id] = slot
        return slot

    # ---- one step

    def _view(self, slot: Slot, now: float) -> SlotView:
        lead_s = slot.lead_s(now, self._policy.frame_s)
        if slot.num_flying and not slot.num_prime:  # it will be there before what is launched now
            lead_s = (lead_s or 0.0) + slot.num_flying * self._policy.frame_s
        since_s = slot.timing.trigger_s if lead_s is None else slot.oldest_pending_s
        num_pending = len(slot.pending)
        boundary = slot.next_boundary()
        if boundary is not None:  # a chunk ends where a segment does: what follows may be a pause
            num_pending = min(num_pending, boundary - slot.num_decoded - slot.num_flying)
        return SlotView(
            slot.index,
            num_pending,
            lead_s,
            now - since_s,
            now - slot.oldest_pending_s,
            slot.finish is not None or boundary is not None,
            slot.interval.mean_s,
            slot.interval.jitter_s,
            slot.priority,
            slot.whole,
            now - slot.newest_s,
        )

    def _until_end_s(self, work: Work) -> float:
        """Of a step in flight, as far as its cost is known."""
        width, num_frames = self._policy.lanes(len(work.slots)), work.frames.shape[1]
        began_s = max(work.began_s, self._ended_s)
        return began_s + self.cost.step_s(width, num_frames) - self._clock()

    def _account(self, start: float, now: float, width: int, num_frames: int) -> None:
        self.num_steps += 1
        metrics.VOCODER_STEP.observe(now - start)
        metrics.VOCODER_FRAMES.observe(num_frames)
        metrics.VOCODER_WIDTH.observe(width)
        metrics.VOCODER_FIXED.inc(min(self.cost.fixed_s, now - start))
        self.cost.observe(self._policy.lanes(width), num_frames, now - start)
        self._decay(now)
        self._busy_s += now - start

    def _decay(self, now: float) -> None:
        self._busy_s *= max(0.0, 1 - (now - self._busy_at_s) / LOAD_WINDOW_S)
        self._busy_at_s = now

    # ---- out

    def _tell(self, slot: Slot) -> None:
        """Hands on the notes whose place in the audio has been reached."""
        while slot.notes and slot.notes[0].frame <= slot.num_decoded:
            note = slot.notes.popleft()
            if note.kind == "silence":
                slot.catch_up(self._clock(), self._policy.frame_s)
                slot.silence_s += note.value / 1000
            self._events.append(note)

    def _close_if_drained(self, slot: Slot) -> None:
        if slot.finish is not None and not slot.pending and not slot.num_flying:
            assert not slot.notes, slot.notes
            self._close(slot, slot.finish.reason, None, slot.finish.text_pads)

    def _close(self, slot: Slot, reason: CloseReason, error: TTSError | None, text_pads: int) -> None:
        del self.slots[slot.stream_id]
        if slot.min_lead_s < math.inf:
            metrics.LEAD_MIN.observe(slot.min_lead_s)
        heapq.heappush(self._free, slot.index)
        self._events.append(Closed(slot.stream_id, reason, error, slot.num_decoded, text_pads))

    def _send(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self._emit(events)
