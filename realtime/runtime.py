"""The Runtime builds the stages, routes what they say to streams, and hands out permits.

Everything here runs on the event loop's thread, except where a stage calls `_emit`. A stream that
was sent to the engine leaves in one way only: the stages say `Closed`, and its permit returns.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import numpy as np
import torch

from realtime import metrics, models
from realtime.admission import Admission
from realtime.config import Config
from realtime.engine.device_runner import DeviceRunner
from realtime.engine.engine import Engine, Runner
from realtime.engine.runner import ModelRunner
from realtime.engine.scheduler import Pacing
from realtime.errors import BadRequest, ConfigError, Draining, ModelError, Overloaded, StageFailed, TTSError
from realtime.graphs import CudaRecorder, Graphs
from realtime.messages import (
    Abort,
    Audio,
    Closed,
    EngineMessage,
    Note,
    Pace,
    Prompt,
    SamplingParams,
    SpeechRequest,
    StreamEvent,
    StreamId,
    Timing,
    Tokens,
    VocoderMessage,
    VoiceCodes,
)
from realtime.models.base import Bundle, ModelSpec, PushedText, WindowedText
from realtime.preprocess.encoder import MAX_BATCH, Encoder
from realtime.preprocess.voices import Encode, Encoded, Voices, scan
from realtime.vocoder.policy import ChunkPolicy
from realtime.vocoder.runner import CodecRunner
from realtime.vocoder.vocoder import Vocoder
from realtime.words import SpokenWord
from realtime.worker import Worker

SILENCE_MS = 100  # what text without anything to speak sounds like
TEXT_SLICE_CHARS = 256  # processed without a pause for the other streams: well under a millisecond
WORKER_STOP_S = 5.0
WARM_UP_STEPS = 4  # with every row of a width
WARM_UP_POSITIONS = 64  # of a prompt, where the model has one
SWITCH_INTERVAL_S = 0.001  # how long a thread may keep another one from the interpreter

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Flushed:
    """All audio for the text up to code point `c1` has passed; answers `Stream.flush(id)`."""

    stream_id: StreamId
    id: str | int | None
    c1: int


class Permits:
    """As many as there are rows and slots. Streams wait by priority and in the order of arrival; one
    that replaces another gets that one's permit. Below the limit that admission sets they need not."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.free = count
        self._reserve = 0  # kept free: the machine can't carry more now
        self._waiting: dict[StreamId, asyncio.Future[None]] = {}
        self._priorities: dict[StreamId, int] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_free(self) -> bool:
        return self.free > self._reserve

    def set_limit(self, limit: int) -> None:
        """How many may be held at once from now on."""
        self._reserve = max(self.count - limit, 0)
        self._grant()

    async def take(self, stream_id: StreamId, wait_s: float, priority: int = 5) -> None:
        """Raises Overloaded after `wait_s`."""
        if self.is_free:  # then whoever waited has been granted one
            self.free -= 1
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[stream_id] = granted
        self._priorities[stream_id] = priority
        try:
            # Not wait_for: it may swallow a cancellation that comes in the turn of the grant.
            async with asyncio.timeout(wait_s):
                await granted
        except TimeoutError:
            if not granted.done() or granted.cancelled():  # else it was granted at the last moment
                raise Overloaded(f"no stream became free within {wait_s * 1000:.0f} ms") from None
        except asyncio.CancelledError:
            # Cancelled in the same turn in which it was granted: it goes to the next one.
            if granted.done() and not granted.cancelled():
                self.give()
            raise
        finally:
            self._waiting.pop(stream_id, None)
            self._priorities.pop(stream_id, None)

    def __contains__(self, stream_id: StreamId) -> bool:
        """The stream waits for one, or was granted one that it has not taken yet."""
        return stream_id in self._waiting

    def give(self) -> None:
        """Returns one: to who waits with the highest priority, the longest of those, else to the pool."""
        self.free += 1
        self._grant()

    def _grant(self) -> None:
        for stream_id in sorted(self._waiting, key=lambda stream_id: -self._priorities[stream_id]):
            if not self.is_free:
                return
            if self.give_to(stream_id):
                self.free -= 1

    def give_to(self, stream_id: StreamId) -> bool:
        """Hands one over, if that stream is waiting."""
        granted = self._waiting.get(stream_id)
        if granted is None or granted.done():
            return False
        granted.set_result(None)
        return True


class Stream:
    """One utterance: an async context manager and an async iterator of its events, which end with
    one `Closed`. None of its methods waits; leaving the scope cancels what is left."""

    def __init__(self, runtime: Runtime, stream_id: StreamId, request: SpeechRequest) -> None:
        self.id = stream_id
        self.request = request
        self.closed = False
        self.feed = runtime.bundle.feed(stream_id, request)
        self._runtime = runtime
        self._inputs: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()  # bounded by the edge's text limit
        self._events: asyncio.Queue[StreamEvent | Flushed] = asyncio.Queue()  # bounded by the lead limit
        self._marks: deque[tuple[int, Flushed]] = deque()
        self._last_ended = -1
        self._pump: asyncio.Task[None] | None = None
        self.has_permit = False
        self.granted_s = 0.0
        self.trigger_s: float | None = None  # once it was heard
        self._in_ring = False
        self._cancelled = False
        self._held = False
        self._awaits_voice = False
        self._rest: str | None = None  # of a long text that is being fed in slices
        self.error: TTSError | None = None
        self.heir: StreamId | None = None  # the stream that gets this one's permit

    async def __aenter__(self) -> Stream:
        self._pump = asyncio.create_task(self._run_pump())
        self._pump.add_done_callback(self._pump_ended)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
        if self._pump is not None:
            self._pump.cancel()

    def text(self, delta: str) -> None:
        if delta:
            self._inputs.put_nowait(("text", delta))

    def flush(self, flush_id: str | int | None = None, *, answered: bool = True) -> None:
        """Everything received so far is spoken; `Flushed` follows its last audio, if `answered`."""
        self._inputs.put_nowait(("flush" if answered else "quiet flush", flush_id))

    def end(self) -> None:
        self._inputs.put_nowait(("end", None))

    def cancel(self) -> None:
        """Nothing of this stream comes out of the iterator after this but its `Closed`."""
        if self.closed or self._cancelled:
            return
        self._cancelled = True
        if self._pump is not None:
            self._pump.cancel()
        while not self._events.empty():
            self._events.get_nowait()
        if self._in_ring:
            self._runtime.to_engine(Abort(self.id))
        else:
            self._runtime.leave(self, Closed(self.id, "cancelled"))

    def pace(self, hold: bool, played_s: float | None = None) -> None:
        """Parks or resumes generation; `played_s` is the position the client reports to be playing."""
        self._held = hold
        if self._in_ring and not self.closed:
            self._runtime.to_engine(Pace(self.id, hold, played_s, self._runtime.clock()))

    @property
    def is_waiting(self) -> bool:
        """There is something to speak, and no free permit yet, or its voice is not known yet."""
        return self._awaits_voice or self.id in self._runtime.permits

    @property
    def is_speaking(self) -> bool:
        """A segment has begun whose end has not been heard of: it speaks, or its text has run out."""
        return self.feed.num_segments - 1 > self._last_ended

    def words(self, segment: int) -> Sequence[SpokenWord]:
        """The words of a segment known so far."""
        return self.feed.words(segment)

    def segment_end_char(self, segment: int) -> int:
        """The code point of the input at which a segment's text ends."""
        ends = [span[1] for span in self.feed.spans(segment) if span is not None]
        return max(ends, default=0)

    async def __aiter__(self) -> AsyncIterator[StreamEvent | Flushed]:
        while True:
            event = await self._events.get()
            yield event
            if isinstance(event, Closed):
                return

    # ---- called by the runtime

    def push(self, event: StreamEvent) -> None:
        if isinstance(event, Closed):
            self.closed = True
            if self._pump is not None:
                self._pump.cancel()  # no more of its text goes to the stages
            if self.error is not None:
                event = replace(event, reason="failed", error=self.error)
        elif self._cancelled:
            return
        self._events.put_nowait(event)
        if isinstance(event, Note) and event.kind == "segment_end":
            self._last_ended = event.segment
            while self._marks and self._marks[0][0] <= event.segment:
                self._events.put_nowait(self._marks.popleft()[1])

    # ---- text to the engine

    async def _run_pump(self) -> None:
        """The only task that feeds text and that waits for a permit; the reader never does.

        What is queued together reaches the engine together: what is spoken of a text that came whole
        must not depend on where a step fell. Long texts go in slices, between which others have their turn.
        """
        num_fresh = 0  # characters processed since then
        try:
            await self._take_voice()
            while True:
                messages: list[EngineMessage] = []
                marks: list[tuple[int, Flushed]] = []
                is_ended = False
                while not is_ended:
                    kind, value = await self._next_input()
                    if kind == "text" and self.feed.num_chars == 0 and not self.has_permit:
                        self._runtime.refuse_late(self)  # before its text has cost the others anything
                    if kind == "text":
                        messages += self.feed.text(value)
                        num_fresh += max(len(value), TEXT_SLICE_CHARS // 16)  # a delta has its own cost
                    elif kind == "end":
                        messages += self.feed.end()
                        is_ended = True
                    else:
                        messages += self.feed.flush()
                        if kind == "flush":
                            newest = self.feed.num_segments - 1
                            marks.append((newest, Flushed(self.id, value, self.feed.num_chars)))
                    if num_fresh >= TEXT_SLICE_CHARS or (self._rest is None and self._inputs.empty()):
                        break
                await self._deliver(messages)
                for segment, flushed in marks:
                    self._mark(segment, flushed)
                if is_ended:
                    self._ended()
                    return
                if num_fresh >= TEXT_SLICE_CHARS:
                    num_fresh = 0
                    await asyncio.sleep(0)
        except TTSError as error:
            if self._in_ring:
                self.error = error
                self.cancel()
            else:
                self._runtime.leave(self, Closed(self.id, "failed", error))

    async def _take_voice(self) -> None:
        """What comes meanwhile waits in the queue: the feed, made anew with the voice, has heard nothing."""
        self._awaits_voice = True
        request, voice = await self._runtime.voiced(self.request)
        self._awaits_voice = False
        if voice is not None:
            self.feed = self._runtime.bundle.feed(self.id, request, voice)

    async def _next_input(self) -> tuple[str, Any]:
        """The next thing to do; of a long text its next slice."""
        kind, value = "text", self._rest
        if value is None:
            kind, value = await self._inputs.get()
            if kind != "text":
                return kind, value
        assert value is not None
        self._rest = value[TEXT_SLICE_CHARS:] or None
        return kind, value[:TEXT_SLICE_CHARS]

    def _pump_ended(self, pump: asyncio.Task[None]) -> None:
        error = None if pump.cancelled() else pump.exception()
        if error is not None:
            logger.error("stream %d: text processing failed", self.id, exc_info=error)
            self.error = StageFailed("text processing failed")
            self.cancel()

    async def _deliver(self, messages: list[EngineMessage]) -> None:
        if not messages:
            return
        if not self.has_permit:
            await self._runtime.take_permit(self)
            self._runtime.granted(self)
        entering, self._in_ring = not self._in_ring, True
        self._runtime.to_engine(*messages)
        if entering and self._held:
            self.pace(hold=True)

    def _mark(self, segment: int, flushed: Flushed) -> None:
        """`flushed` is told when that segment has ended."""
        if segment <= self._last_ended:
            self._events.put_nowait(flushed)
        else:
            self._marks.append((segment, flushed))

    def _ended(self) -> None:
        """All text was fed. Where nothing of it could be spoken no stage knows of the stream: it is
        answered here, non-blank text with marked silence."""
        if self._in_ring:
            return
        if self.feed.has_text:
            self.push(Note(self.id, 0, 0, "silence", SILENCE_MS))
        self._runtime.leave(self, Closed(self.id, "done"))


class Runtime:
    """Async context manager: entering loads and warms up the model and starts the workers, leaving
    waits for streams at most `drain_s`, then stops them."""

    def __init__(
        self,
        config: Config,
        load: Callable[[str], Bundle] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.clock = clock
        self.ready = False
        self.broken = asyncio.Event()  # a stage can't go on; the process should end
        self.draining = False
        self.streams: dict[StreamId, Stream] = {}
        self.num_stale_events = 0
        self.permits = Permits(config.engine.max_streams)
        self._num_open = 0  # permits that wait only for others to have started
        self._starting: dict[StreamId, float] = {}  # not heard yet, and when the permit was granted
        self._load = load or self._load_model
        self._next_id = 0
        self.voices: Voices | None = None  # those of the configured folder
        self._encoder_worker: Worker[Encode] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def spec(self) -> ModelSpec:
        return self.bundle.spec

    async def __aenter__(self) -> Runtime:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        try:
            await asyncio.to_thread(self._build)
        except torch.OutOfMemoryError as error:
            raise ModelError(
                f"the device ran out of memory ({str(error).partition('. GPU')[0]}): others use it, or"
                f" engine.max_streams, now {self.config.engine.max_streams}, is too large"
            ) from error
        self._loop = asyncio.get_running_loop()
        self._vocoder_worker.start()
        self._engine_worker.start()
        if self._encoder_worker is not None:
            self._encoder_worker.start()
        self.ready = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.drain(0.0)
        if self._encoder_worker is not None:
            await asyncio.to_thread(self._encoder_worker.stop, WORKER_STOP_S)
        await asyncio.to_thread(self._engine_worker.stop, WORKER_STOP_S)
        await asyncio.to_thread(self._vocoder_worker.stop, WORKER_STOP_S)

    async def drain(self, timeout_s: float) -> None:
        """Takes nothing new, waits for the streams, and cancels what is left after `timeout_s`."""
        self.draining = True
        self.ready = False
        for wait_s in (timeout_s, WORKER_STOP_S):
            try:
                await asyncio.wait_for(self._idle.wait(), wait_s)
                return
            except TimeoutError:
                for stream in list(self.streams.values()):
                    stream.cancel()

    def open(self, request: SpeechRequest) -> Stream:
        """A stream that holds no capacity yet. Raises BadRequest for what the model can't do, or Draining."""
        if self.draining or self.broken.is_set():
            raise Draining("the server is about to stop and takes no new streams")
        self.check(request.voice, request.language)
        if request.token_count is not None and not self.spec.has_controls:
            raise BadRequest(f"{self.spec.name} can't be told how long a text is to be: token_count")
        if (request.history or request.user) and not isinstance(self.spec.text, PushedText):
            raise BadRequest(f"{self.spec.name} speaks texts, not conversations: history and user")
        self._next_id += 1
        if self.config.vocoder.whole:
            request = replace(request, whole=True)
        stream = Stream(self, StreamId(self._next_id), request)
        self.streams[stream.id] = stream
        self._idle.clear()
        for old in request.replaces:
            if old in self.streams:
                self.streams[old].heir = stream.id
                self.streams[old].cancel()
        return stream

    def check(self, voice: str | None, language: str | None) -> None:
        """Raises BadRequest for a voice or language that the model does not have; one that lists no
        languages takes any."""
        spec = self.spec
        if voice is not None and voice not in spec.voices:
            known = ", ".join(spec.voices) or "none"
            raise BadRequest(f"voice {voice!r} is not known; known: {known}", code="voice_not_found")
        if language and spec.languages and language.split("-")[0].lower() not in spec.languages:
            raise BadRequest(
                f"language {language!r} is not spoken; spoken: {', '.join(spec.languages)}",
                code="language_unsupported",
            )

    def to_engine(self, *messages: EngineMessage) -> None:
        """No step comes between messages given together."""
        self._engine_worker.put(*messages)

    async def take_permit(self, stream: Stream) -> None:
        """Raises Overloaded: at once where the wait would be too long, else when it turned out to be."""
        began_s = self.clock()
        limit = self.refuse_late(stream)
        with metrics.STREAMS.labels("waiting").track_inprogress():
            try:
                await self.permits.take(stream.id, self.config.engine.queue_s, stream.request.priority)
            except Overloaded as error:
                retry_s = self.admission.wait_s(self.permits.num_waiting, limit)
                error.retry_after_ms = math.ceil(retry_s * 1000)
                raise
        metrics.PERMIT_WAIT.observe(self.clock() - began_s)

    def refuse_late(self, stream: Stream) -> int:
        """Raises Overloaded where a stream that spoke now would be heard too late, else how many may run."""
        limit, retry_s = self._update_limit(), None
        if not self.permits.is_free and not any(old in self.streams for old in stream.request.replaces):
            retry_s = self.admission.retry_s(self.permits.num_waiting, limit, self._num_open)
        elif self.admission.budget_s > 0 and self.permits.free < self.permits.count:
            retry_s = self.admission.late_s()
        if retry_s is not None:
            raise Overloaded(
                f"first audio would come later than after {self.admission.budget_s * 1000:.0f} ms",
                retry_after_ms=math.ceil(retry_s * 1000),
            )
        return limit

    def _update_limit(self) -> int:
        """What the machine carries now; called whenever that may have changed."""
        scheduler, now = self.engine.scheduler, self.clock()
        most = self.admission.carried(scheduler.cost, self.vocoder.cost)
        # One that has not been heard for so long waits for its text, and is not about to start.
        recent_s = now - self.admission.budget_s
        num_starting = sum(granted_s > recent_s for granted_s in self._starting.values())
        num_held = self.permits.count - self.permits.free
        self._num_open = 0 if self.admission.is_slow(scheduler.interval_s) else max(most - num_held, 0)
        limit = self.admission.limit(num_held, num_starting, scheduler.interval_s, most)
        self.permits.set_limit(limit)
        return limit

    def granted(self, stream: Stream) -> None:
        """A stream has its permit from here on, until `_release`."""
        stream.has_permit = True
        stream.granted_s = self.clock()
        if not stream.request.whole:  # that is not heard before its end
            self._starting[stream.id] = stream.granted_s
        metrics.STREAMS.labels("running").inc()

    def leave(self, stream: Stream, closed: Closed) -> None:
        """The end of a stream that the stages know nothing of."""
        self.dispatch([closed])

    def dispatch(self, events: list[StreamEvent]) -> None:
        """Routes events to their streams; called on the event loop's thread."""
        for event in events:
            stream = self.streams.get(event.stream_id)
            if stream is None:
                self.num_stale_events += 1
                metrics.STALE_EVENTS.inc()
                continue
            if isinstance(event, Audio) and event.timing is not None:
                self._heard(stream, event.timing)
            if isinstance(event, Closed):
                del self.streams[event.stream_id]
                if event.reason == "failed" and stream.has_permit:
                    # Where the vocoder failed, the engine still has it: its row goes before its permit.
                    self.to_engine(Abort(event.stream_id))
                self._count(stream, event)
                self._release(stream, event)
                self._update_limit()
            stream.push(event)
        if not self.streams:
            self._idle.set()

    def _heard(self, stream: Stream, timing: Timing) -> None:
        """Its first sound is here."""
        metrics.TTFA.observe(timing.first_pcm_s - timing.trigger_s)
        stream.trigger_s = timing.trigger_s
        if self._starting.pop(stream.id, None) is not None:
            self.admission.heard(timing.first_pcm_s - stream.granted_s)
            self._update_limit()

    def _count(self, stream: Stream, closed: Closed) -> None:
        metrics.CLOSED.labels(closed.reason).inc()
        error = stream.error or closed.error
        if error is not None:
            metrics.ERRORS.labels(error.code).inc()
        if stream.trigger_s is not None and closed.frames and closed.reason in ("done", "limit"):
            metrics.RTF.observe((self.clock() - stream.trigger_s) / (closed.frames * self.spec.frame_s))

    def _release(self, stream: Stream, closed: Closed) -> None:
        """The permit goes back, or on to the stream that replaces this one: at once if it waits for
        it or is still collecting text."""
        if not stream.has_permit:
            return
        metrics.STREAMS.labels("running").dec()
        self._starting.pop(stream.id, None)
        if closed.quarantined:
            metrics.QUARANTINED.labels("slots").inc()
            self.permits.count -= 1
            return
        self.admission.returned(self.clock() - stream.granted_s)
        heir = self.streams.get(stream.heir) if stream.heir is not None else None
        if heir is not None and not heir.has_permit:
            if self.permits.give_to(heir.id):
                return
            if heir.id not in self.permits:
                self.granted(heir)
                return
        self.permits.give()

    def _emit(self, events: list[StreamEvent]) -> None:
        """Called by the vocoder's thread."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self.dispatch, events)

    async def voiced(self, request: SpeechRequest) -> tuple[SpeechRequest, VoiceCodes | None]:
        """The request with what is said in its voice's reference, and the reference's codes, once they are
        known. Raises BadRequest and StageFailed."""
        if request.voice is None or self.voices is None:
            return request, None
        codes = await self.voices.codes(request.voice)
        return replace(request, voice_text=self.voices.text(request.voice)), codes

    def _broke(self, name: str, error: Exception) -> None:
        """Called by the thread of a stage that is of no use any more."""
        logger.critical("the %s can't go on: %s", name, error)
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._give_up)

    def _give_up(self) -> None:
        self.ready = False
        self.broken.set()

    def _encoded(self, answers: list[Encoded]) -> None:
        """Called by the encoder's thread."""
        loop, voices = self._loop, self.voices
        if loop is not None and voices is not None and not loop.is_closed():
            loop.call_soon_threadsafe(voices.encoded, answers)

    # ---- start

    def _load_model(self, path: str) -> Bundle:
        model = self.config.model
        return models.load(
            path,
            device=model.device,
            dtype=model.dtype,
            codec=model.codec,
            num_streams=self.config.engine.max_streams,
            num_references=MAX_BATCH if self.config.voices.folder else 0,
        )

    def _with_voices(self, bundle: Bundle) -> Bundle:
        """The model with the recordings of the configured folder among its voices, if it can clone."""
        folder, spec = self.config.voices.folder, bundle.spec
        if not folder:
            return bundle
        if bundle.encoder is None:
            known = ", ".join(spec.voices)
            raise ConfigError(
                f"voices.folder is {folder!r}, but {spec.name} has its own voices only: {known}"
            )
        voices = scan(folder)
        logger.info("%d voices from %s: %s", len(voices), folder, ", ".join(voices))
        worker = Worker("encoder", Encoder(spec, bundle.encoder, bundle.prepare, self._encoded))
        self.voices, self._encoder_worker = Voices(voices, worker.put), worker
        return replace(bundle, spec=replace(spec, voices=(*spec.voices, *voices)))

    def _build(self) -> None:
        torch.set_num_threads(1)  # one core per stage; two threads inside a step collapse under load
        self.bundle = self._with_voices(self._load(self.config.model.path))
        num_streams = self.config.engine.max_streams
        spec, device = self.bundle.spec, torch.device(self.bundle.device)
        runner = _runner(self.bundle, num_streams)
        codec = CodecRunner(spec, self.bundle.decoder, num_streams, device)
        if device.type == "cuda" and isinstance(runner, DeviceRunner):
            # Two pools: the stages run side by side.
            runner.record(Graphs(CudaRecorder(device)))
            codec.record(Graphs(CudaRecorder(device)))
            torch.cuda.synchronize(device)  # each stage has a stream of its own from here on
        vocoder = Vocoder(
            spec,
            codec,
            num_streams,
            ChunkPolicy(
                spec.frame_s,
                max_frames=self.config.vocoder.max_frames,
                buckets=codec.widths if device.type == "cuda" else (),
            ),
            self._emit,
            self.clock,
        )
        self._vocoder_worker: Worker[VocoderMessage] = Worker("vocoder", vocoder, self._broke)
        engine = Engine(
            spec,
            runner,
            num_streams,
            self._vocoder_worker.put,
            self.clock,
            Pacing(lambda: vocoder.first_frames, turnaround_s=lambda: vocoder.turnaround_s),
        )
        self._engine_worker: Worker[EngineMessage] = Worker("engine", engine, self._broke)
        self.engine, self.vocoder = engine, vocoder
        lanes = codec.widths[-1] if device.type == "cuda" else 1
        self.admission = Admission(num_streams, self.config.engine.queue_s, spec.frame_s, lanes)
        metrics.watch_stages(self._stages)
        self._warm_up()

    def _stages(self) -> list[tuple[str, int, float]]:
        workers = (self._engine_worker, self._vocoder_worker, self._encoder_worker)
        return [(worker.name, worker.depth, worker.cpu_s) for worker in workers if worker is not None]

    def _warm_up(self) -> None:
        """Sends made-up streams round the whole ring, alone and at full width, before any thread
        runs: memory, kernels and the vocoder's cost model are warm when the first real one comes."""
        engine, vocoder, hops = self.engine, self.vocoder, self._vocoder_worker
        vocoder.warm_up()
        num_streams = self.config.engine.max_streams
        has_prompts = not isinstance(self.spec.text, WindowedText)
        inputs = np.zeros((WARM_UP_POSITIONS if has_prompts else 0, 1 + self.spec.num_codebooks), np.int32)
        for width in sorted({1, num_streams}):
            ids = [StreamId(-1 - i) for i in range(width)]
            for stream_id in ids:
                engine.handle(Prompt(stream_id, 0, inputs, SamplingParams(seed=-stream_id), self.clock()))
                engine.handle(Tokens(stream_id, (0,) * 20))
            for _ in range(WARM_UP_STEPS + 2 * width * has_prompts):
                engine.step()
                hops.run_queued()
            for stream_id in ids:
                engine.handle(Abort(stream_id))
            hops.run_queued()
        assert engine.scheduler.num_free == vocoder.num_free == num_streams


def _runner(bundle: Bundle, num_rows: int) -> Runner:
    if isinstance(bundle.spec.text, WindowedText):
        return ModelRunner(bundle, num_rows)
    return DeviceRunner(bundle, num_rows, torch.device(bundle.device))
