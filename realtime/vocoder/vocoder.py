"""The vocoder stage: frames in, sound out, several slots per codec call."""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

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
    Started,
    StreamEvent,
    StreamId,
    VocoderMessage,
)
from realtime.models.base import CodecDecoder, ModelSpec
from realtime.vocoder.cost import CostModel
from realtime.vocoder.policy import STEP_FRAMES, ChunkPolicy, SlotView, plan
from realtime.vocoder.slot import Slot

LOAD_WINDOW_S = 1.0
RUNNING_SHARE = 0.75  # of a frame's length: frames of a running stream come closer together than that

logger = logging.getLogger(__name__)


class Vocoder:
    """`handle` and `step` are called by one thread only (or by a test, with no thread at all).

    A slot opens on a stream's first frames and is free again when `Closed` leaves. The codec state
    of a slot is reset before it is used; if that fails, the slot is never used again and `Closed`
    says so.
    """

    def __init__(
        self,
        spec: ModelSpec,
        decoder: CodecDecoder,
        num_slots: int,
        policy: ChunkPolicy,
        emit: Callable[[list[StreamEvent]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spec = spec
        self.slots: dict[StreamId, Slot] = {}
        self.cost = CostModel()
        self.num_steps = 0
        self.quarantined: list[int] = []
        self._decoder = decoder
        self._state: Any = decoder.new_state(num_slots)
        self._free = list(range(num_slots))
        self._policy = policy
        self._emit = emit
        self._clock = clock
        self._interval_s = policy.frame_s / 4
        self._last_frames: tuple[float, frozenset[StreamId]] = (0.0, frozenset())
        self._busy_s = 0.0  # of the last LOAD_WINDOW_S, decayed
        self._busy_at_s = clock()
        self._decoding: list[Slot] = []
        self._events: list[StreamEvent] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def handle(self, message: VocoderMessage) -> None:
        match message:
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
        now = self._clock()
        views = [self._view(slot, now) for slot in self.slots.values()]
        chosen = plan(views, self._interval_s, self._load(now), self._policy, self.cost)
        if not chosen.slots:
            return chosen.wait_s
        by_index = {slot.index: slot for slot in self.slots.values()}
        self._decoding = [by_index[index] for index in chosen.slots]
        self._decode(chosen.num_frames)
        self._decoding = []
        self._send()
        return 0.0

    def fail(self, error: Exception) -> None:
        """Closes the streams of the step that raised."""
        failure = StageFailed("the vocoder failed on this step")
        decoding, self._decoding = self._decoding, []
        for slot in decoding:
            if self.slots.get(slot.stream_id) is slot:
                self._close(slot, "failed", failure, 0)
        self._send()

    def close(self) -> None:
        """Nothing outlives the thread."""

    def warm_up(self) -> None:
        """Runs every step size, alone and in company, so that the first stream finds memory, kernels
        and the cost model warm."""
        slots = list(range(min(len(self._free), 4)))
        for width in sorted({1, len(slots)}):
            for frames in STEP_FRAMES[:6]:
                for repeat in range(2):
                    for index in slots[:width]:
                        self._decoder.reset(self._state, index, 0)
                    codes = torch.zeros(width, self._num_codebooks, frames, dtype=torch.int64)
                    start = self._clock()
                    self._run(codes, torch.arange(width))
                    if repeat:
                        self.cost.observe(width, frames, self._clock() - start)

    # ---- in

    @property
    def _num_codebooks(self) -> int:
        return len(range(self.spec.num_codebooks)[self.spec.codec_codebooks])

    def _take(self, message: Frames) -> None:
        now = self._clock()
        self._learn_interval(now, message)
        for stream_id, codes, started in zip(message.stream_ids, message.codes, message.started, strict=True):
            slot = self._open(stream_id, started, now) if started is not None else self.slots.get(stream_id)
            if slot is None:
                continue  # closed here while its last frames were on their way
            own = codes[self.spec.codec_codebooks]
            if not ((own >= 0) & (own < self.spec.codebook_size)).all():
                error = StageFailed("the model made codes that the codec does not have")
                logger.error("stream %d: codes out of range: %s", stream_id, own.tolist())
                self._close(slot, "failed", error, 0)
                continue
            if not slot.pending:
                slot.oldest_pending_s = now
            slot.pending.append(codes)

    def _open(self, stream_id: StreamId, started: Started, now: float) -> Slot | None:
        """A slot equal to a fresh one; one whose reset fails is put aside, and only its stream closes."""
        assert stream_id not in self.slots, stream_id
        assert self._free, ("more streams than slots", stream_id)
        index = heapq.heappop(self._free)
        try:
            self._decoder.reset(self._state, index, started.seed)
        except Exception:  # here and not in the worker: the other streams of the message go on
            logger.exception("slot %d could not be reset and is put aside", index)
            self.quarantined.append(index)
            failure = StageFailed("the vocoder could not start this stream")
            self._events.append(Closed(stream_id, "failed", failure, quarantined=True))
            return None
        slot = self.slots[stream_id] = Slot(stream_id, index, started.timing, now)
        return slot

    def _learn_interval(self, now: float, message: Frames) -> None:
        """Time between two frames of one stream, while it runs: a gap of about a frame's length or more
        is missing text, or a stream that waits for its listener."""
        last_s, last_ids = self._last_frames
        interval_s = now - last_s
        if interval_s < RUNNING_SHARE * self._policy.frame_s and last_ids & set(message.stream_ids):
            self._interval_s += 0.1 * (interval_s - self._interval_s)
        self._last_frames = (now, frozenset(message.stream_ids))

    # ---- one step

    def _view(self, slot: Slot, now: float) -> SlotView:
        lead_s = slot.lead_s(now, self._policy.frame_s)
        since_s = slot.timing.trigger_s if lead_s is None else slot.oldest_pending_s
        num_pending = len(slot.pending)
        boundary = slot.next_boundary()
        if boundary is not None:  # a chunk ends where a segment does: what follows may be a pause
            num_pending = min(num_pending, boundary - slot.num_decoded)
        return SlotView(
            slot.index,
            num_pending,
            lead_s,
            now - since_s,
            now - slot.oldest_pending_s,
            closing=slot.finish is not None or boundary is not None,
        )

    def _decode(self, num_frames: int) -> None:
        start = self._clock()
        for slot in self._decoding:
            if slot.num_decoded == 0:
                slot.timing = replace(slot.timing, chunk_full_s=start)
        taken = [[slot.pending.popleft() for _ in range(num_frames)] for slot in self._decoding]
        frames = np.array(taken, np.int64)  # [n, T, K]
        codes = torch.from_numpy(frames[..., self.spec.codec_codebooks]).transpose(1, 2).contiguous()
        pcm = self._run(codes, torch.tensor([slot.index for slot in self._decoding]))
        now = self._clock()
        self._account(start, now, len(taken), num_frames)
        marks = frames[..., : self.spec.codec_codebooks.start].astype(np.int16)
        for slot, sound, marked in zip(self._decoding, pcm, marks, strict=True):
            timing = None
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

    @torch.inference_mode()
    def _run(self, codes: torch.Tensor, slots: torch.Tensor) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
        """codes [n, C, T] -> per slot float32 [T * hop, channels]."""
        pcm = self._decoder.decode(codes, self._state, slots)
        return [sound.t().contiguous().numpy() for sound in pcm]

    def _account(self, start: float, now: float, width: int, num_frames: int) -> None:
        self.num_steps += 1
        self.cost.observe(width, num_frames, now - start)
        self._decay(now)
        self._busy_s += now - start

    def _decay(self, now: float) -> None:
        self._busy_s *= max(0.0, 1 - (now - self._busy_at_s) / LOAD_WINDOW_S)
        self._busy_at_s = now

    def _load(self, now: float) -> float:
        self._decay(now)
        return min(1.0, self._busy_s / LOAD_WINDOW_S)

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
        if slot.finish is not None and not slot.pending:
            assert not slot.notes, slot.notes
            self._close(slot, slot.finish.reason, None, slot.finish.text_pads)

    def _close(self, slot: Slot, reason: CloseReason, error: TTSError | None, text_pads: int) -> None:
        del self.slots[slot.stream_id]
        heapq.heappush(self._free, slot.index)
        self._events.append(Closed(slot.stream_id, reason, error, slot.num_decoded, text_pads))

    def _send(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self._emit(events)
