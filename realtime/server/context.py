"""One context of a connection: what is queued for the wire, and the account of what was written.

Knows the protocol's messages and audio frames, not sockets. `seq`, `t` and the account are given
when a piece is taken for writing, not when it is queued.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from realtime.audio import SAMPLE_BYTES, PcmEncoder, Samples
from realtime.messages import Audio, Closed, Note, Timing
from realtime.models.base import ModelSpec
from realtime.narration import Narration
from realtime.runtime import Flushed, Stream
from realtime.server import events
from realtime.server.settings import Settings
from realtime.server.teller import Teller
from realtime.server.wire import (
    FLAG_FIRST,
    FLAG_LAST,
    FLAG_SEGMENT_LAST,
    FLAG_SILENCE,
    AudioFrame,
    Message,
    Utf8Joiner,
)

MIN_AUDIO_MS = 100  # non-blank text always yields this much
AUDIBLE = 0.003  # -50 dB of full scale: where sound begins for a listener


@dataclass(slots=True)
class Piece:
    """Audio of at most one wire frame, encoded and not yet written."""

    payload: bytes
    num_samples: int
    seg: int
    flags: int


@dataclass(frozen=True, slots=True)
class Done:
    """The place of `ctx.done` in the queue; the message is made when everything before it is written."""

    reason: events.DoneReason
    closed: Closed


@dataclass(slots=True)
class Clocks:
    """Times of a context's life, monotonic seconds; None = not yet."""

    text_s: float | None = None  # its first text byte: zero of every stamp
    first_written_s: float | None = None
    last_written_s: float | None = None
    closed_s: float | None = None  # the stages were done with it
    paused_since_s: float | None = None
    paused_s: float = 0.0


class Context:
    """Between a stream and the writer. `outgoing` keeps messages and audio in the order of the wire."""

    def __init__(self, id: str, handle: int, settings: Settings, stream: Stream, spec: ModelSpec) -> None:
        self.id = id
        self.handle = handle
        self.settings = settings
        self.stream = stream
        self.joiner = Utf8Joiner()
        self.outgoing: deque[Piece | Message | Done] = deque()
        self.task: asyncio.Task[None] | None = None
        self.timers: dict[str, asyncio.TimerHandle] = {}
        self.clocks = Clocks()
        self.ended = False  # by the client, or for want of text
        self.timed_out = False
        self.done = False
        self.is_held = False  # generation was told to wait
        self.is_throttled = False  # its client was told to stop sending text
        self.num_chars = 0  # received
        self.num_unsent_samples = 0
        self.num_unsent_bytes = 0
        self.num_written_samples = 0
        self.min_lead_ms = 0.0
        self.ttfa_us: int | None = None
        self._spec = spec
        format = settings.format
        self._encoder = PcmEncoder(
            spec.sample_rate, spec.channels, format.sample_rate, format.channels, format.encoding
        )
        self._sample_bytes = SAMPLE_BYTES[format.encoding] * format.channels
        self._seg = 0
        self._audio_seg = 0  # of the newest audio
        self._seq = 0
        self._has_audio = False
        self._has_segment_audio = False
        self._spoken_char = 0
        self._num_queued_samples = 0
        self._playout: tuple[float, float] | None = None  # reported position, and the clock less pauses
        self._narration = Narration(spec, stream, phonemes=settings.phonemes)
        self._teller = Teller(id, settings.words, is_estimate=not spec.tells_pace)
        self._onset_native: int | None = None
        self._timing: Timing | None = None
        self._gaps_ms: list[float] = []

    # ---- state

    @property
    def is_paused(self) -> bool:
        return self.clocks.paused_since_s is not None

    @property
    def num_pending_chars(self) -> int:
        """Received and not yet spoken."""
        return self.num_chars - self._spoken_char

    @property
    def unsent_s(self) -> float:
        return self.num_unsent_samples / self.settings.format.sample_rate

    def lead_s(self, now: float) -> float:
        """Written audio ahead of real-time playing; a context that has not begun comes first."""
        first_s = self.clocks.first_written_s
        if first_s is None:
            return -math.inf
        return self.num_written_samples / self.settings.format.sample_rate - self._elapsed_s(first_s, now)

    def pause(self, now: float) -> None:
        if self.clocks.paused_since_s is None:
            self.clocks.paused_since_s = now

    def resume(self, now: float) -> None:
        if self.clocks.paused_since_s is not None:
            self.clocks.paused_s += now - self.clocks.paused_since_s
            self.clocks.paused_since_s = None

    def playout(self, played_s: float, now: float) -> None:
        """The client says what it has played."""
        self._playout = (played_s, self._elapsed_s(0.0, now))

    def cancel_timers(self) -> None:
        for timer in self.timers.values():
            timer.cancel()
        self.timers.clear()

    def _elapsed_s(self, since_s: float, now: float) -> float:
        """Wall time less pauses."""
        paused_s = self.clocks.paused_s
        if self.clocks.paused_since_s is not None:
            paused_s += now - self.clocks.paused_since_s
        return now - since_s - paused_s

    def _since_text_us(self, at_s: float) -> int:
        zero_s = self.clocks.text_s
        return 0 if zero_s is None else max(0, round((at_s - zero_s) * 1e6))

    # ---- from the stream to the queue

    def add_text(self, text: str) -> None:
        """Input that was accepted."""
        self.num_chars += len(text)
        self._teller.add(text)

    def take(self, event: Audio | Note | Flushed, now: float) -> None:
        """Queues what an event means on the wire."""
        match event:
            case Audio():
                if event.timing is not None:
                    self._timing = event.timing
                self._find_onset(event.pcm)
                self._narration.audio(self._seg, event)
                self._queue_audio(self._encoder.encode(event.pcm), 0, now)
            case Flushed():
                self._spoken_char = max(self._spoken_char, event.c1)
                self.outgoing.append(events.flush_done(self.id, event.id, self._pts(), event.c1))
            case Note(kind="silence"):
                self._narration.silence(event.segment, event.value)
                self._queue_silence(event.value, now)
            case Note(kind="segment_end"):
                if self._has_segment_audio:
                    self._mark(FLAG_SEGMENT_LAST)
                self._has_segment_audio = False
                self._spoken_char = max(self._spoken_char, self.stream.segment_end_char(event.segment))
                self._narration.end_segment(event.segment)
                self._tell()
                self._seg = event.segment + 1
                self.outgoing.append(events.seg_done(self.id, event.segment, self._pts(), self._spoken_char))
            case Note(kind="starved"):
                self.outgoing.append(events.starved(self.id, self._pts(), event.value))

    def finish(self, closed: Closed, now: float) -> None:
        """The stream is over by itself: the rest of the audio and `ctx.done` are queued."""
        self.clocks.closed_s = now
        self._seg = self._audio_seg  # what the filter still holds belongs to the last segment
        feed = self.stream.feed
        if closed.reason == "done" and feed.has_text:
            missing_ms = MIN_AUDIO_MS - self._encoder.num_samples_in / self._spec.sample_rate * 1000
            if missing_ms > 0:
                self._narration.silence(self._seg, missing_ms)
                self._queue_silence(missing_ms, now)
        self._queue_audio(self._encoder.flush(), 0, now)
        if self._has_audio:
            self._mark(FLAG_LAST)
        self.outgoing += self._teller.tell(*self._narration.finish(self._queued_ms))
        if closed.reason == "done":
            self.outgoing += self._teller.rest(self._seg)
        if feed.num_dropped:
            text = f"{feed.num_dropped} characters can't be spoken by this voice and were left out"
            self.outgoing.append(events.warn("unsupported", text, self.id))
        finished: events.DoneReason = "timeout" if self.timed_out else "completed"
        self.outgoing.append(Done("limit" if closed.reason == "limit" else finished, closed))

    def done_message(
        self,
        reason: events.DoneReason,
        closed: Closed | None,
        now: float,
        *,
        played_s: float | None = None,
        cancelled_s: float | None = None,
    ) -> Message:
        """`ctx.done`; counts what was written. `played_s` is the position a client cancels at,
        `cancelled_s` when its cancel was read."""
        num_samples = self.num_written_samples
        rate = self.settings.format.sample_rate
        written_s = num_samples / rate
        heard, unheard = None, None
        if reason != "completed":
            heard_s = min(self._played_s(now) if played_s is None else played_s, written_s)
            c1, num_words = self._narration.heard(heard_s * 1000)
            text = self._teller.text
            heard, unheard = events.heard(text[:c1], c1, num_words, is_estimate=played_s is None), text[c1:]
        frames = closed.frames if closed is not None else self._encoder.num_samples_in // self._spec.hop
        return events.ctx_done(
            self.id,
            reason,
            samples=num_samples,
            c_spoken=self.num_chars if reason == "completed" else self._narration.heard(written_s * 1000)[0],
            heard=heard,
            unheard_text=unheard,
            usage=events.usage(
                num_chars=self.num_chars, audio_ms=round(num_samples / rate * 1000), model_frames=frames
            ),
            metrics=self._metrics(closed, now, cancelled_s) if self.settings.metrics != "off" else None,
        )

    def _played_s(self, now: float) -> float:
        """Where a listener is: as last reported, or playing since the first frame, less pauses."""
        if self._playout is not None:
            played_s, at_s = self._playout
            return played_s + self._elapsed_s(0.0, now) - at_s
        first_s = self.clocks.first_written_s
        return 0.0 if first_s is None else self._elapsed_s(first_s, now)

    @property
    def _queued_ms(self) -> float:
        return self._num_queued_samples / self.settings.format.sample_rate * 1000

    def _tell(self) -> None:
        """Words and phonemes that end within the audio queued so far."""
        self.outgoing += self._teller.tell(*self._narration.due(self._queued_ms))

    def _pts(self) -> int:
        """Where the stream is now, at the output rate."""
        rate = self.settings.format.sample_rate
        return round(self._encoder.num_samples_in * rate / self._spec.sample_rate)

    def _find_onset(self, pcm: Samples) -> None:
        if self._onset_native is None:
            loud = np.flatnonzero(np.abs(pcm).max(axis=1) > AUDIBLE)
            if loud.size:
                self._onset_native = self._encoder.num_samples_in + int(loud[0])

    def _queue_silence(self, silence_ms: float, now: float) -> None:
        num_samples = round(silence_ms * self._spec.sample_rate / 1000)
        self._queue_audio(self._encoder.silence(num_samples), FLAG_SILENCE, now)

    def _mark(self, flag: int) -> None:
        """Flags the newest frame; where that has left, an empty one carries the mark."""
        for item in reversed(self.outgoing):
            if isinstance(item, Piece):
                item.flags |= flag
                return
        self.outgoing.append(Piece(b"", 0, self._seg, flag))

    def _queue_audio(self, pcm: bytes, flags: int, now: float) -> None:
        """Cuts encoded samples into wire frames; the first of a context follows `ctx.started`."""
        format = self.settings.format
        frame_bytes = format.sample_rate * format.frame_ms // 1000 * self._sample_bytes
        for start in range(0, len(pcm), frame_bytes):
            payload = pcm[start : start + frame_bytes]
            num_samples = len(payload) // self._sample_bytes
            first = 0
            if not self._has_audio:
                self._has_audio = True
                first = FLAG_FIRST
                self.outgoing.append(events.ctx_started(self.id, self.handle, format, self._stamps(now)))
            self._has_segment_audio = True
            self._audio_seg = self._seg
            self.outgoing.append(Piece(payload, num_samples, self._seg, flags | first))
            self.num_unsent_samples += num_samples
            self.num_unsent_bytes += len(payload)
            self._num_queued_samples += num_samples
            self._tell()

    def _stamps(self, now: float) -> dict[str, int] | None:
        """Ends of the stages in microseconds since the first text byte."""
        if self.settings.metrics == "off":
            return None
        timing = self._timing
        if timing is None:  # silence comes first: no stage has run
            return {"post": self._since_text_us(now)}
        stages = {
            "trigger": timing.trigger_s,
            "admit": timing.admit_s,
            "prefill": timing.prefill_s,
            "ar1": timing.first_frame_s,
            "arN": timing.chunk_full_s,
            "voc": timing.first_pcm_s,
            "post": now,
        }
        return {name: self._since_text_us(at_s) for name, at_s in stages.items()}

    # ---- from the queue to the wire

    def write(self, piece: Piece, now: float) -> AudioFrame:
        """The next frame; from here on it counts as sent."""
        clocks = self.clocks
        if clocks.first_written_s is None:
            clocks.first_written_s = now
            self.ttfa_us = self._since_text_us(now)
        else:
            lead_ms = self.lead_s(now) * 1000
            self.min_lead_ms = min(self.min_lead_ms, lead_ms)
            if clocks.last_written_s is not None and self.settings.metrics == "full":
                self._gaps_ms.append((now - clocks.last_written_s) * 1000)
        clocks.last_written_s = now
        frame = AudioFrame(
            self.settings.format.encoding,
            piece.flags,
            self.handle,
            self._seq,
            piece.seg,
            self.num_written_samples,
            piece.num_samples,
            self._since_text_us(now),
            piece.payload,
        )
        self._seq += 1
        self.num_written_samples += piece.num_samples
        self.num_unsent_samples -= piece.num_samples
        self.num_unsent_bytes -= len(piece.payload)
        return frame

    def _metrics(self, closed: Closed | None, now: float, cancelled_s: float | None) -> dict[str, object]:
        metrics: dict[str, object] = {"underrun_ms": round(abs(self.min_lead_ms), 1)}
        if self.ttfa_us is not None:
            metrics["ttfa_us"] = self.ttfa_us
        if self._onset_native is not None:
            silence_ms = self._onset_native / self._spec.sample_rate * 1000
            metrics["lead_silence_ms"] = round(silence_ms, 1)
            if self.ttfa_us is not None:
                metrics["onset_us"] = self.ttfa_us + round(silence_ms * 1000)
        if cancelled_s is not None:
            metrics["cancel_us"] = max(0, round((now - cancelled_s) * 1e6))
        if closed is not None:
            metrics["frames"] = closed.frames
            metrics["text_pads"] = closed.text_pads
        if self._timing is not None and self.num_written_samples:
            audio_s = self.num_written_samples / self.settings.format.sample_rate
            made_s = now if self.clocks.closed_s is None else self.clocks.closed_s
            metrics["rtf"] = round((made_s - self._timing.trigger_s) / audio_s, 4)
        if self._gaps_ms:
            ordered = sorted(self._gaps_ms)
            metrics["gap_ms"] = {
                "p50": round(ordered[len(ordered) // 2], 1),
                "p95": round(ordered[int(0.95 * (len(ordered) - 1))], 1),
                "max": round(ordered[-1], 1),
            }
        return metrics
