"""An asyncio client of the native protocol.

    async with connect("ws://localhost:8000/v1/tts/stream") as tts:
        speech = tts.context(voice="en_1")
        await speech.send("Hello ")
        await speech.send("there.", end=True)
        async for frame in speech.audio():
            player.write(frame.payload)

Nothing here waits for the server before it may speak: text follows the handshake at once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal, Self, cast

from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as connect_socket
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI
from websockets.typing import Subprotocol

from realtime.errors import TTSError
from realtime.server.wire import FRAME_VERSION, JSON, MSGPACK, AudioFrame, Codec, Message, ProtocolError

logger = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 10.0
MAX_MESSAGE_BYTES = 1024 * 1024  # the server's own limit is a quarter of it
_CODECS: dict[str, Codec] = {"json": JSON, "msgpack": MSGPACK}


class SpeechError(TTSError):
    """The server refused something; `code` and the words are the server's."""

    def __init__(self, error: Mapping[str, object]) -> None:
        code = error.get("code")
        super().__init__(str(error.get("message")), code=code if isinstance(code, str) else None)
        self.retryable = error.get("retryable") is True
        retry_after_ms = error.get("retry_after_ms")
        self.retry_after_ms = retry_after_ms if isinstance(retry_after_ms, int) else None


class ConnectionFailed(TTSError):
    """No connection, or none any more; the words are the server's where it said something."""

    code = "connection_failed"
    retryable = True


@dataclass(frozen=True, slots=True)
class Event:
    """Something the server said about a context: a message, or a frame of audio.

    `received_s` is the client's clock when it was read from the socket.
    """

    received_s: float
    message: Message = field(default_factory=dict)
    frame: AudioFrame | None = None

    @property
    def type(self) -> str:
        return "audio" if self.frame else str(self.message.get("type"))


class Context:
    """One utterance; iterating over it gives its events. One task may read while another sends."""

    def __init__(self, session: Session, id: str, opening: Message, *, is_explicit: bool) -> None:
        self.id = id
        self.started: Message | None = None  # `ctx.started`, once it came
        self.done: Message | None = None  # `ctx.done`, once it came
        self._session = session
        self._opening: Message | None = opening  # until it is sent
        self._is_explicit = is_explicit
        self._is_cancelled = False
        # Unbounded, so that one slow reader can't stop the others: they share a socket. The server sends
        # a context no faster than `max_lead_ms` ahead of real time, so only what its reader left lies here.
        self._events: asyncio.Queue[Event | TTSError] = asyncio.Queue()

    async def send(self, text: str, *, flush: bool = False, end: bool = False) -> None:
        """Appends text as it is; white space between two pieces is the caller's."""
        message: Message = {"type": "text", "text": text}
        if flush:
            message["flush"] = True
        if end:
            message["end"] = True
        if self._opening is not None and not self._is_explicit:
            message |= self._opening  # the first text opens the context: no message before it
            self._opening = None
        await self._send(message)

    async def flush(self, id: str | int | None = None) -> None:
        """Has everything sent so far spoken; a `flush.done` with the same `id` follows its audio."""
        await self._send({"type": "flush"} if id is None else {"type": "flush", "id": id})

    async def end(self) -> None:
        """No more text: the context finishes what it has."""
        await self._send({"type": "end"})

    async def cancel(self, played_samples: int | None = None) -> None:
        """Stops at once. Audio still on its way is dropped; the events go on with `ctx.done`.

        With `played_samples`, how much of the audio was played, `ctx.done` tells what was heard.
        """
        self._is_cancelled = True
        message: Message = {"type": "cancel"}
        if played_samples is not None:
            message["played_samples"] = played_samples
        await self._send(message)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        """Everything about this context in order, up to and including `ctx.done`.

        Raises SpeechError for an error about the whole session, ConnectionFailed when it is lost.
        """
        if self.done is not None and self._events.empty():
            raise StopAsyncIteration
        event = await self._events.get()
        if isinstance(event, TTSError):
            self._events.put_nowait(event)  # whoever asks again gets the same answer
            raise event
        return event

    async def audio(self) -> AsyncIterator[AudioFrame]:
        """The audio alone, until the context is done; raises SpeechError for any error about it."""
        async for event in self:
            if event.frame is not None:
                yield event.frame
            elif event.type == "error":
                raise SpeechError(event.message)

    async def _send(self, message: Message) -> None:
        if self._opening is not None:
            opening, self._opening = self._opening, None
            await self._session.send({"type": "open", "ctx": self.id, **opening})
        await self._session.send({**message, "ctx": self.id})

    def _receive(self, event: Event) -> None:
        if event.frame is not None and self._is_cancelled:
            return
        if event.type == "ctx.started":
            self.started = event.message
        elif event.type == "ctx.done":
            self.done = event.message
        self._events.put_nowait(event)

    def _fail(self, error: TTSError) -> None:
        self._events.put_nowait(error)


class Session:
    """A connection. Made by `connect`."""

    def __init__(self, socket: ClientConnection, codec: Codec, clock: Callable[[], float]) -> None:
        self.notices: deque[Message] = deque(maxlen=100)  # messages about no context we know, newest last
        self._socket = socket
        self._codec = codec
        self._clock = clock
        self._contexts: dict[str, Context] = {}
        self._handles: dict[int, Context] = {}
        self._numbers = itertools.count(1)
        self._ready: Message = {}
        self._is_ready = asyncio.Event()  # or never will be: see `_failure`
        self._failure: TTSError | None = None
        self._reader = asyncio.create_task(self._read())

    def context(
        self, id: str | None = None, *, replaces: Sequence[str] | Literal["*"] = (), **settings: object
    ) -> Context:
        """A new context; nothing is sent before its first text, flush or end.

        `replaces` cancels other contexts in the same step (barge-in); their audio is dropped from now
        on. `settings` are the fields of the protocol's `open`, such as `voice` or
        `format={"sample_rate": 24000}`.
        """
        name = f"c{next(self._numbers)}" if id is None else id
        if name in self._contexts:
            raise ValueError(f"context {name!r} is not done yet")
        opening: Message = dict(settings)
        if replaces:
            opening["replaces"] = replaces if replaces == "*" else list(replaces)
            for other in list(self._contexts) if replaces == "*" else replaces:
                if other in self._contexts:
                    self._contexts[other]._is_cancelled = True
        context = Context(self, name, opening, is_explicit=bool(replaces))
        self._contexts[name] = context
        if self._failure is not None:
            context._fail(self._failure)
        return context

    async def ready(self) -> Message:
        """`session.ready`: what the server is, its defaults and limits. Nobody has to wait for it."""
        await self._is_ready.wait()
        if self._failure is not None and not self._ready:
            raise self._failure
        return self._ready

    async def send(self, message: Message) -> None:
        """Sends any client message of the protocol as it is."""
        try:
            await self._socket.send(self._codec.encode(message))
        except ConnectionClosed:
            # The server's last words may still lie unread: they say why.
            await asyncio.wait([self._reader])
            raise self._failure or ConnectionFailed("the connection is closed") from None

    async def close(self) -> None:
        """Closes the connection; contexts that are not done are cancelled by the server."""
        await self._socket.close()
        await asyncio.wait([self._reader])

    async def _read(self) -> None:
        try:
            async for data in self._socket:
                self._route(data, self._clock())
        except ConnectionClosed:
            pass
        except ProtocolError as error:
            self._fail(ConnectionFailed(f"the server sent what can't be understood: {error.message}"))
        finally:
            reason = self._socket.close_reason or "no reason given"
            self._fail(ConnectionFailed(f"the connection closed with {self._socket.close_code}: {reason}"))

    def _route(self, data: str | bytes, received_s: float) -> None:
        if isinstance(data, bytes) and data[:1] == bytes([FRAME_VERSION]):
            frame = AudioFrame.unpack(data)
            if frame.handle in self._handles:  # else it was on its way when its context was cancelled
                self._handles[frame.handle]._receive(Event(received_s, frame=frame))
            return
        message = self._codec.decode(data)
        context = self._contexts.get(str(message.get("ctx")))
        match message.get("type"):
            case "session.ready":
                self._ready = message
                self._is_ready.set()
            case "error" if "ctx" not in message:
                self.notices.append(message)
                self._fail(SpeechError(message))
            case _ if context is None:
                logger.debug("no context for %s", message)
                self.notices.append(message)
            case "audio":
                frame = AudioFrame.from_message(message, _encoding(context))
                context._receive(Event(received_s, frame=frame))
            case "ctx.started":
                self._handles[cast(int, message.get("h"))] = context
                context._receive(Event(received_s, message))
            case "ctx.done":
                del self._contexts[context.id]
                self._handles = {h: other for h, other in self._handles.items() if other is not context}
                context._receive(Event(received_s, message))
            case _:
                context._receive(Event(received_s, message))

    def _fail(self, error: TTSError) -> None:
        # The first words count: what follows is only the consequence.
        if self._failure is None:
            self._failure = error
            self._is_ready.set()
            for context in self._contexts.values():
                context._fail(error)


def _encoding(context: Context) -> str:
    announced = (context.started or {}).get("format")
    return str(announced["encoding"]) if isinstance(announced, dict) else "pcm_s16le"


@asynccontextmanager
async def connect(
    url: str,
    codec: Literal["json", "msgpack"] = "json",
    *,
    token: str | None = None,
    clock: Callable[[], float] = time.perf_counter,
    **defaults: object,
) -> AsyncIterator[Session]:
    """A session on `url`; `defaults` are the fields of the protocol's `session` message.

    Leaving the block closes the connection. Raises ConnectionFailed when there is no way in.
    """
    chosen = _CODECS[codec]
    try:
        socket = await connect_socket(
            url,
            subprotocols=[Subprotocol(chosen.subprotocol)],
            additional_headers={"Authorization": f"Bearer {token}"} if token else None,
            compression=None,  # audio does not shrink, and it costs both ends time
            open_timeout=OPEN_TIMEOUT_S,
            max_size=MAX_MESSAGE_BYTES,
        )
    except InvalidStatus as error:
        body = (error.response.body or b"").decode(errors="replace").strip()[:500]
        status = f"{error.response.status_code} {error.response.reason_phrase}"
        raise ConnectionFailed(f"{url} answered {status}: {body or 'no reason given'}") from None
    except (OSError, TimeoutError, InvalidHandshake, InvalidURI) as error:
        raise ConnectionFailed(f"can't connect to {url}: {str(error) or 'timed out'}") from error
    session = Session(socket, chosen, clock)
    try:
        if defaults:
            await session.send({"type": "session", **defaults})
        yield session
    finally:
        await session.close()
