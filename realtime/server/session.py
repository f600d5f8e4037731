"""One connection: a reader that never waits, a writer that picks what goes next, a task per context.

The reader only parses and calls methods that return at once. The writer is the only one that sends:
control messages first, then the context with the least lead. A context's task moves its stream's
events to its queue. Whatever ends the connection, leaving `serve` cancels what is left.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import replace

from starlette.websockets import WebSocket, WebSocketDisconnect

from realtime import __version__
from realtime.errors import BadRequest, Draining, IdleTimeout, SlowClient, StageFailed, TTSError
from realtime.messages import (
    Audio,
    Closed,
    Note,
    SamplingParams,
    SpeechRequest,
    StreamEvent,
    StreamId,
    Trigger,
)
from realtime.runtime import Flushed, Runtime
from realtime.server import events, protocol
from realtime.server.context import Context, Done, Piece
from realtime.server.settings import Limits, Settings, unsupported_fields
from realtime.server.wire import AudioFrame, Codec, Message, ProtocolError, Tag, Utf8Joiner, codec_for

CLOSE_NORMAL = 1000
CLOSE_SERVER_BUG = 1011
CLOSE_RESTART = 1012
CLOSE_SLOW = 4008
CLOSE_BAD_MESSAGES = 4400
CLOSE_WAIT_S = 1.0  # for a close frame to leave; a client that does not read won't see it anyway
MAX_REASON_BYTES = 123  # of a close frame
TURN_S = 0.001  # how long a client's messages may keep the event loop from everybody else's
TAKE_S = 0.24  # of audio: that much is encoded within TURN_S, and makes three frames of the usual 80 ms
CHUNK_GAP_MS = 3000  # a stream that speaks is never silent for longer: chunks hold 2 s at most
WATCH_S = 0.5  # how often a connection looks for a stall and for idleness
FLOW_PAUSE, FLOW_OK = 0.75, 0.5  # shares of the pending-text limit

logger = logging.getLogger(__name__)


class Session:
    """Serves one accepted WebSocket until it closes."""

    def __init__(
        self,
        socket: WebSocket,
        runtime: Runtime,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._socket = socket
        self._runtime = runtime
        self._limits = limits
        self._clock = clock
        self._settings = Settings()
        self._codec: Codec
        self._contexts: dict[str, Context] = {}  # live: until their `ctx.done` is queued or written
        self._barred: OrderedDict[str, None] = OrderedDict()  # ids that take no text without an `open`
        # Bounded: `_watch` ends a connection that leaves too many of them unread.
        self._control: deque[Message] = deque()
        self._wake = asyncio.Event()
        self._next_handle = 0
        self._warned: set[str] = set()
        self._num_bad = 0
        self._closing: tuple[int, str] | None = None
        self._sending_since_s: float | None = None
        self._active_s = clock()
        self._tokens = float(limits.max_messages_per_s)
        self._tokens_s = clock()

    # ---- the connection

    async def serve(self, subprotocol: str | None) -> None:
        """Accepts, and returns when the connection is over."""
        self._codec = codec_for(subprotocol)
        await self._socket.accept(subprotocol)
        try:
            self._settings = Settings.from_query(self._socket.query_params)
            self._check(self._settings)
        except BadRequest as error:
            self._fail_connection(error, CLOSE_BAD_MESSAGES)
        else:
            spec = self._runtime.spec
            self._say(
                events.session_ready(
                    session=secrets.token_hex(8),
                    server=f"realtime/{__version__}",
                    model=spec.name,
                    native_rate=spec.sample_rate,
                    defaults=self._settings,
                    limits=self._limits,
                    voices_url="/v1/voices",
                )
            )
            self._warn_unsupported({"phonemes": self._settings.phonemes})
        tasks = [asyncio.create_task(job()) for job in (self._read, self._write, self._watch)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except WebSocketDisconnect:
            pass
        except Exception:
            logger.exception("connection failed")
            self._closing = (CLOSE_SERVER_BUG, "internal error")
        finally:
            for task in tasks:
                task.cancel()
            for context in list(self._contexts.values()):
                self._stop(context, "closed")
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._close_socket()

    def drain(self, deadline_s: float) -> None:
        """The server is about to stop: what is being spoken may finish, then the connection closes."""
        if self._closing is None:
            self._say(events.session_draining(round(deadline_s * 1000), reconnect_after_ms=0))
            self._closing = (CLOSE_RESTART, "the server restarts")
            self._wake.set()

    async def _close_socket(self) -> None:
        code, reason = self._closing or (CLOSE_NORMAL, "")
        try:
            await asyncio.wait_for(self._socket.close(code, reason), CLOSE_WAIT_S)
        except (TimeoutError, RuntimeError, WebSocketDisconnect, OSError):
            pass  # gone already, or not reading

    def _fail_connection(self, error: TTSError, code: int) -> None:
        """Says why, ends every context, and lets the writer close."""
        self._say(events.error(error, "connection"))
        for context in list(self._contexts.values()):
            self._stop(context, "closed")
        reason = error.message.encode()[:MAX_REASON_BYTES].decode(errors="ignore")
        self._closing = (code, reason)
        self._wake.set()

    async def _watch(self) -> None:
        """Ends connections whose client reads nothing, or says and hears nothing."""
        while True:
            await asyncio.sleep(WATCH_S)
            now = self._clock()
            since_s = self._sending_since_s
            is_stalled = since_s is not None and now - since_s > self._limits.stall_ms / 1000
            if is_stalled or len(self._control) > self._limits.max_unread_messages:
                limits = self._limits
                limit = f"for {limits.stall_ms} ms" if is_stalled else f"of {len(self._control)} answers"
                error = SlowClient(f"nothing was read {limit}")
                logger.warning("closing a connection: %s", error.message)
                self._closing = (CLOSE_SLOW, error.message)
                return
            if self._contexts:
                self._active_s = now
            elif self._closing is None and now - self._active_s > self._limits.connection_idle_ms / 1000:
                limit_ms = self._limits.connection_idle_ms
                self._fail_connection(IdleTimeout(f"nothing was said for {limit_ms} ms"), CLOSE_NORMAL)

    # ---- reading

    async def _read(self) -> None:
        turn_s = self._clock()
        while True:
            received = await self._socket.receive()
            if received["type"] == "websocket.disconnect":
                return
            now = self._clock()
            self._active_s = now
            wait_s = self._rate(now)
            frame = received.get("text")
            self._handle(received["bytes"] if frame is None else frame, now)
            # Many messages come in one packet: receiving them does not wait.
            if wait_s > 0 or self._clock() - turn_s > TURN_S:
                await asyncio.sleep(max(wait_s, 0.0))
                turn_s = self._clock()

    def _rate(self, now: float) -> float:
        """Seconds to wait before the next message, so that they stay under the limit."""
        rate = self._limits.max_messages_per_s
        self._tokens = min(float(rate), self._tokens + (now - self._tokens_s) * rate) - 1
        self._tokens_s = now
        if self._tokens >= 0:
            return 0.0
        self._warn_once("rate_limited", f"more than {rate} messages per second: reading slows down")
        return -self._tokens / rate

    def _handle(self, frame: str | bytes, now: float) -> None:
        try:
            message = protocol.parse(self._codec.decode(frame), self._limits)
        except ProtocolError as error:
            self._say(events.error(error, "message", ctx=error.ctx, ref=error.ref))
            self._num_bad = self._num_bad + 1 if error.code == "bad_message" else 0
            if self._num_bad >= self._limits.max_bad_messages and self._closing is None:
                last = BadRequest(f"{self._num_bad} unparsable messages in a row", code="bad_message")
                self._fail_connection(last, CLOSE_BAD_MESSAGES)
            return
        self._num_bad = 0
        try:
            self._act(message, now)
        except TTSError as error:
            ctx = getattr(message, "ctx", None)
            self._say(events.error(error, "message", ctx=ctx, ref=message.ref))

    def _act(self, message: protocol.ClientMessage, now: float) -> None:
        """Raises TTSError for a message that has had no effect."""
        match message:
            case protocol.Text():
                self._text(message, now)
            case protocol.Open():
                self._open(message)
            case protocol.Cancel():
                self._cancel(message, now)
            case protocol.SessionMessage():
                settings = self._settings.updated(message.fields)
                self._check(settings)
                self._warn_unsupported(message.fields)
                self._settings = settings
            case protocol.Ping():
                us = round(now * 1e6)
                self._say(events.pong(message.id, message.t, us, round(self._clock() * 1e6)))
            case protocol.Close():
                if not message.drain:
                    for context in list(self._contexts.values()):
                        self._stop(context, "closed")
                for context in self._contexts.values():
                    self._end(context)
                self._closing = self._closing or (CLOSE_NORMAL, "")
                self._wake.set()
            case protocol.ResumeSession():
                raise BadRequest("sessions can't be resumed on this server", code="resume_failed")
            case _:
                self._act_on_context(message, now)

    def _act_on_context(self, message: protocol.ClientMessage, now: float) -> None:
        """Messages that are no-ops for a context that is over or was never opened."""
        assert not isinstance(message, protocol.SessionMessage | protocol.Ping | protocol.Close)
        assert not isinstance(message, protocol.ResumeSession)
        context = self._contexts.get(message.ctx)
        if context is None:
            return
        self._touch(context)
        match message:
            case protocol.Flush():
                if not context.ended:
                    self._stop_timer(context, "wait")
                    context.stream.flush(message.id)
            case protocol.End():
                self._end(context)
            case protocol.Pause():
                context.pause(now)
                self._hold(context)
                self._start_timer(context, "ttl", message.ttl_ms, lambda: self._stop(context, "cancelled"))
            case protocol.Resume():
                context.resume(now)
                self._stop_timer(context, "ttl")
                self._hold(context)
                self._wake.set()
            case protocol.Playout():
                played_s = message.samples / context.settings.format.sample_rate
                context.playout(played_s, now)
                self._hold(context, played_s=played_s)

    # ---- contexts

    def _check(self, settings: Settings) -> None:
        """Raises BadRequest if the model can't do this."""
        spec = self._runtime.spec
        if settings.model is not None and settings.model != spec.name:
            raise BadRequest(f"model {settings.model!r} is not loaded; loaded: {spec.name}")
        self._runtime.check(settings.voice, settings.language)

    def _open(self, message: protocol.Open) -> None:
        replaced = self._replaced(message.replaces)
        if message.ctx in self._contexts and message.ctx not in {context.id for context in replaced}:
            raise BadRequest(f"context {message.ctx!r} is live", code="bad_message")
        self._create(message.ctx, message.fields, replaced, message.ref)

    def _replaced(self, names: tuple[str, ...] | str) -> list[Context]:
        if names == "*":
            return list(self._contexts.values())
        return [self._contexts[name] for name in dict.fromkeys(names) if name in self._contexts]

    def _create(
        self, ctx: str, fields: Mapping[str, object], replaced: list[Context], ref: Tag
    ) -> Context | None:
        """A new context; a refusal ends it at once, so that deltas on their way find a closed door
        instead of opening it with other settings."""
        try:
            if self._closing is not None or self._runtime.draining:
                raise Draining("the connection is about to close and takes no new contexts")
            settings = self._settings.updated(fields)
            self._check(settings)
            staying = [context for context in self._contexts.values() if context not in replaced]
            num_live = sum(not context.ended for context in staying)
            if num_live >= self._limits.max_contexts:
                limit = self._limits.max_contexts
                raise BadRequest(
                    f"at most {limit} contexts of a connection are live, this is one more", code="ctx_limit"
                )
            self._warn_unsupported(fields)
            request = self._request(settings, tuple(context.stream.id for context in replaced))
            stream = self._runtime.open(request)  # first: one that is refused replaces nothing
            for context in replaced:
                self._stop(context, "replaced", abort=False)
        except TTSError as error:
            self._say(events.error(error, "ctx", ctx=ctx, ref=ref))
            self._say(events.ctx_done(ctx, "error", samples=0))
            self._bar(ctx)
            return None
        self._next_handle += 1
        context = Context(ctx, self._next_handle, settings, stream, self._runtime.spec)
        self._contexts[ctx] = context
        self._barred.pop(ctx, None)  # after the contexts it replaces, one of which may have had its id
        context.task = asyncio.create_task(self._run(context))
        self._touch(context)
        return context

    def _request(self, settings: Settings, replaces: tuple[StreamId, ...]) -> SpeechRequest:
        seed = secrets.randbits(53) if settings.seed is None else settings.seed
        return SpeechRequest(
            voice=settings.voice,
            language=settings.language,
            sampling=SamplingParams(
                settings.temperature, settings.top_k, settings.top_p, settings.repetition_penalty, seed
            ),
            trigger=Trigger(settings.trigger.mode, settings.trigger.min_chars),
            normalize=settings.normalize,
            join_sentences=settings.join == "sentence",
            priority=settings.priority,
            max_lead_s=settings.max_lead_ms / 1000,
            replaces=replaces,
            style=settings.style,
            token_count=settings.token_count,
        )

    def _text(self, message: protocol.Text, now: float) -> None:
        context = self._contexts.get(message.ctx)
        if (context is not None and context.ended) or (context is None and message.ctx in self._barred):
            self._say(events.warn("ctx_ended", f"context {message.ctx!r} takes no more text", message.ctx))
            return
        joiner = Utf8Joiner() if context is None else context.joiner
        held = joiner.state
        text = joiner.feed(message.data)
        limit = self._limits.max_pending_chars
        num_pending = 0 if context is None else context.num_pending_chars
        if num_pending + len(text) > limit:
            joiner.state = held
            raise BadRequest(
                f"{num_pending} characters are still unspoken, {len(text)} more pass the limit of {limit}",
                code="text_overflow",
            )
        if context is None:
            context = self._create(message.ctx, message.fields, [], message.ref)
            if context is None:
                return
            context.joiner = joiner
        self._touch(context)
        if text:
            if context.clocks.text_s is None:
                context.clocks.text_s = now
            context.add_text(text)
            context.stream.text(text)
            wait_ms = context.settings.trigger.wait_ms
            if wait_ms:
                flush = context.stream.flush
                self._start_timer(context, "wait", wait_ms, lambda: flush(answered=False))
            if not context.is_throttled and context.num_pending_chars >= FLOW_PAUSE * limit:
                context.is_throttled = True
                self._say(events.flow(context.id, "pause", context.num_pending_chars))
        if message.flush:
            context.stream.flush(None)
        if message.end:
            self._end(context)

    def _end(self, context: Context) -> None:
        """No more text; what is there is spoken."""
        if not context.ended:
            context.ended = True
            self._stop_timer(context, "idle")
            self._stop_timer(context, "wait")
            context.stream.end()

    def _cancel(self, message: protocol.Cancel, now: float) -> None:
        if message.ctx == protocol.ALL_CONTEXTS:
            for context in list(self._contexts.values()):
                self._stop(context, "cancelled", cancelled_s=now)
        elif message.ctx in self._contexts:
            context = self._contexts[message.ctx]
            played_s: float | None = None
            if message.played_samples is not None:
                played_s = message.played_samples / context.settings.format.sample_rate
            elif message.played_ms is not None:
                played_s = message.played_ms / 1000
            self._stop(context, "cancelled", played_s=played_s, cancelled_s=now)

    def _stop(
        self,
        context: Context,
        reason: events.DoneReason,
        *,
        abort: bool = True,
        played_s: float | None = None,
        cancelled_s: float | None = None,
    ) -> None:
        """The barrier: nothing of this context is written after this but one `ctx.done`.
        `abort` is False where the stream that replaces it cancels it; `played_s` is where the client
        says its listener was, `cancelled_s` when it said so."""
        if context.done:
            return
        context.outgoing.clear()
        if abort:
            context.stream.cancel()
        self._bar(context.id)
        now = self._clock()
        self._say(context.done_message(reason, None, now, played_s=played_s, cancelled_s=cancelled_s))
        self._forget(context, reason)

    def _forget(self, context: Context, reason: str) -> None:
        context.done = True
        context.cancel_timers()
        if self._contexts.get(context.id) is context:
            del self._contexts[context.id]
        self._hold_again()
        self._wake.set()
        rate = context.settings.format.sample_rate
        logger.info(
            "stream %d: %s, %d characters, %.2f s of audio, first audio after %s ms, least lead %.0f ms",
            context.stream.id,
            reason,
            context.num_chars,
            context.num_written_samples / rate,
            "-" if context.ttfa_us is None else round(context.ttfa_us / 1000),
            context.min_lead_ms,
        )

    def _bar(self, ctx: str) -> None:
        self._barred[ctx] = None
        self._barred.move_to_end(ctx)
        while len(self._barred) > self._limits.max_ended_ids:
            self._barred.popitem(last=False)

    async def _run(self, context: Context) -> None:
        """Moves a stream's events to the context's queue, up to and including its end."""
        async with context.stream as stream:
            try:
                async for event in stream:
                    await self._take(context, event)
            except Exception:
                logger.exception("stream %d: its events could not be handled", stream.id)
                self._stopped_by_stages(context, Closed(stream.id, "failed"))

    async def _take(self, context: Context, event: StreamEvent | Flushed) -> None:
        parts = self._parts(event) if isinstance(event, Audio) else [event]
        for number, part in enumerate(parts):
            if number:
                await asyncio.sleep(0)
            if context.done:
                return  # cancelled here; only its `Closed` is still awaited
            now = self._clock()
            if not isinstance(part, Closed):
                context.take(part, now)
                self._after_take(context)
            elif part.reason in ("done", "limit"):
                if not context.ended:  # at its limit: deltas on their way must not open it again
                    context.ended = True
                    self._bar(context.id)
                context.finish(part, now)
            else:
                self._stopped_by_stages(context, part)
            self._wake.set()

    def _parts(self, audio: Audio) -> list[Audio | Flushed | Note | Closed]:
        """Not more at once than the event loop may be kept busy with."""
        size = round(TAKE_S * self._runtime.spec.sample_rate)
        return [
            replace(audio, pcm=audio.pcm[start : start + size], timing=None, marks=audio.marks[:0])
            if start
            else replace(audio, pcm=audio.pcm[:size])
            for start in range(0, len(audio.pcm), size)
        ]

    def _after_take(self, context: Context) -> None:
        self._touch(context)
        self._hold(context)
        limit = self._limits.max_pending_chars
        if context.is_throttled and context.num_pending_chars <= FLOW_OK * limit:
            context.is_throttled = False
            self._say(events.flow(context.id, "ok", context.num_pending_chars))

    def _stopped_by_stages(self, context: Context, closed: Closed) -> None:
        """The stream failed, was refused, or was cancelled from outside (a server that stops)."""
        if closed.reason == "failed":
            error = closed.error or StageFailed("the stream failed")
            samples = context.num_written_samples
            context.outgoing.clear()
            if not context.done:
                self._say(events.error(error, "ctx", ctx=context.id, samples=samples))
            self._stop(context, "error")
        else:
            self._stop(context, "closed")

    # ---- pacing

    def _num_unsent_bytes(self) -> int:
        return sum(context.num_unsent_bytes for context in self._contexts.values())

    def _hold(self, context: Context, num_bytes: int | None = None, played_s: float | None = None) -> None:
        """Generation waits while the client paused or leaves its audio unread. `num_bytes`: unsent on
        the whole connection, where it is known."""
        held = (
            context.is_paused
            or context.unsent_s * 1000 > self._limits.max_unsent_ms
            or (self._num_unsent_bytes() if num_bytes is None else num_bytes) > self._limits.max_unsent_bytes
        )
        if held != context.is_held or played_s is not None:
            context.is_held = held
            context.stream.pace(held, played_s)

    def _hold_again(self) -> None:
        """The connection has less to send: that may have been what a context waits for, and nothing of
        its own may be left to notice it by."""
        held = [context for context in self._contexts.values() if context.is_held]
        num_bytes = self._num_unsent_bytes() if held else 0
        for context in held:
            self._hold(context, num_bytes)

    def _touch(self, context: Context) -> None:
        """Something happened: the time without anything starts again."""
        if not context.ended and not context.done:
            idle_ms = context.settings.ctx_idle_ms
            self._start_timer(context, "idle", idle_ms, lambda: self._idle(context))

    def _idle(self, context: Context) -> None:
        rest_ms = CHUNK_GAP_MS - context.settings.ctx_idle_ms
        if context.is_held or context.stream.is_waiting:
            self._touch(context)  # a pause, a client that does not read and a queue have their own limits
        elif context.stream.is_speaking and rest_ms > 0:
            self._start_timer(context, "idle", rest_ms, lambda: self._time_out(context))
        else:
            self._time_out(context)

    def _time_out(self, context: Context) -> None:
        if not context.ended:
            context.timed_out = True
            self._bar(context.id)
            self._end(context)

    def _start_timer(self, context: Context, name: str, delay_ms: int, action: Callable[[], None]) -> None:
        self._stop_timer(context, name)
        context.timers[name] = asyncio.get_running_loop().call_later(delay_ms / 1000, action)

    def _stop_timer(self, context: Context, name: str) -> None:
        timer = context.timers.pop(name, None)
        if timer is not None:
            timer.cancel()

    # ---- writing

    def _say(self, message: Message) -> None:
        self._control.append(message)
        self._wake.set()

    def _warn_unsupported(self, fields: Mapping[str, object]) -> None:
        spec = self._runtime.spec
        for name in unsupported_fields(fields, has_phonemes=bool(spec.phonemes), has_style=spec.has_controls):
            self._warn_once("unsupported", f"the model can't honour {name!r}; it is ignored")

    def _warn_once(self, code: str, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self._say(events.warn(code, text))

    async def _write(self) -> None:
        """Returns when the connection is to be closed and nothing is left to say."""
        while True:
            if self._control:
                await self._send(self._codec.encode(self._control.popleft()))
                continue
            context = self._next_context()
            if context is not None:
                await self._write_one(context)
                continue
            if self._closing is not None and not self._contexts:
                return
            self._wake.clear()
            await self._wake.wait()

    def _next_context(self) -> Context | None:
        """The one with the least audio ahead of its listener."""
        now = self._clock()
        ready = [context for context in self._contexts.values() if context.outgoing and not context.is_paused]
        if not ready:
            return None
        return min(
            ready, key=lambda context: (context.lead_s(now), -context.settings.priority, context.handle)
        )

    async def _write_one(self, context: Context) -> None:
        item = context.outgoing.popleft()
        if isinstance(item, Piece):
            frame = context.write(item, self._clock())
            self._hold_again()
            await self._send(self._audio(context, frame))
        elif isinstance(item, Done):
            message = context.done_message(item.reason, item.closed, self._clock())
            self._forget(context, item.reason)
            await self._send(self._codec.encode(message))
        else:
            await self._send(self._codec.encode(item))

    def _audio(self, context: Context, frame: AudioFrame) -> str | bytes:
        if context.settings.audio == "inline":
            return self._codec.encode(frame.as_message(context.id, self._codec))
        return frame.pack()

    async def _send(self, data: str | bytes) -> None:
        """Waits while the transport holds more than its limit: that is the only back-pressure."""
        self._sending_since_s = self._clock()
        if isinstance(data, str):
            await self._socket.send_text(data)
        else:
            await self._socket.send_bytes(data)
        self._sending_since_s = None
