"""A browser, a real server, and a scripted one for what a real server does only on bad days.

Both serve the real page. The scripted server plays a tone, whose smoothness makes every click visible.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import uvicorn
from playwright.sync_api import Browser, Page, WebSocket, sync_playwright
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket as ServerSocket
from starlette.websockets import WebSocketDisconnect

from realtime.server.static import page_routes
from realtime.server.wire import FLAG_FIRST, FLAG_LAST, AudioFrame, auth_token

CHROMIUM = Path("/usr/bin/chromium")
INSECURE_HOST = "lan.test"  # resolves to this machine, but is no secure context
CHROMIUM_ARGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    f"--host-resolver-rules=MAP {INSECURE_HOST} 127.0.0.1",
]
RATE = 48_000
TIMEOUT_S = 30.0
FRAME_SAMPLES = 3840


# ---- the browser


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """The system's browser with its own autoplay rules: a page is silent until somebody touches it."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGS)
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Playground:
    """The page as a test sees it, with everything that went over its sockets."""

    page: Page
    received: list[str | bytes] = field(default_factory=list)
    sent: list[str | bytes] = field(default_factory=list)

    @classmethod
    def open(cls, browser: Browser, url: str, **options: Any) -> Self:
        options.setdefault("viewport", {"width": 1280, "height": 900})
        context = browser.new_context(permissions=["clipboard-read", "clipboard-write"], **options)
        self = cls(context.new_page())
        self.page.set_default_timeout(TIMEOUT_S * 1000)
        self.page.on("websocket", self._watch)
        self.page.on("pageerror", self._fail)
        self.page.goto(url)
        return self

    def _watch(self, websocket: WebSocket) -> None:
        websocket.on("framereceived", lambda data: self.received.append(data))
        websocket.on("framesent", lambda data: self.sent.append(data))

    def _fail(self, error: Exception) -> None:
        raise AssertionError(f"the page failed: {error}")

    def close(self) -> None:
        self.page.context.close()

    def js(self, expression: str) -> Any:
        return self.page.evaluate(expression)

    def until(self, expression: str, timeout_s: float = TIMEOUT_S) -> Any:
        """The value of a JavaScript expression once it is true; the deadline tells what it was."""
        deadline_s = time.monotonic() + timeout_s
        while not (value := self.js(expression)):
            assert time.monotonic() < deadline_s, (expression, value, self.page.inner_text("#error"))
            self.page.wait_for_timeout(20)
        return value

    def ready(self) -> Self:
        self.until("playground.connection.isReady && playground.speaker.isOpen")
        return self

    def speak(self, text: str) -> None:
        """Types and presses Enter, as a person does."""
        self.page.fill("#text", text)
        self.page.press("#text", "Enter")

    def turn(self, expression: str, index: int = -1) -> Any:
        return self.js(f"(turn => ({expression}))(playground.speech.turns.at({index}))")

    def until_turn(self, expression: str, index: int = -1, timeout_s: float = TIMEOUT_S) -> Any:
        return self.until(f"(turn => turn && ({expression}))(playground.speech.turns.at({index}))", timeout_s)

    def capture(self) -> None:
        self.js("playground.speaker.capture(true)")

    def rendered(self) -> tuple[np.ndarray, int]:
        """Every sample the player has put out since `capture`, and the audio clock of the first."""
        self.js("playground.speaker.capture(false)")
        self.until("!playground.speaker.isCapturing")
        parts = self.js(
            """playground.speaker.captured.map(({frame, samples}) => {
                const bytes = new Uint8Array(samples.buffer);
                return [frame, btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""))];
            })"""
        )
        assert parts, "nothing was rendered"
        pieces = [np.frombuffer(base64.b64decode(data), np.float32) for _, data in parts]
        ends = np.cumsum([piece.size for piece in pieces])
        starts = np.array([frame for frame, _ in parts]) - parts[0][0]
        assert np.array_equal(starts[1:], ends[:-1]), "the capture has holes"
        return np.concatenate(pieces), parts[0][0]

    def pcm(self, ctx: str) -> np.ndarray:
        """What the server sent for a turn, read from the socket and not from the page."""
        handle = next(m["h"] for m in self.messages("ctx.started") if m["ctx"] == ctx)
        frames = [AudioFrame.unpack(data) for data in self.received if isinstance(data, bytes)]
        payload = b"".join(frame.payload for frame in frames if frame.handle == handle)
        return np.frombuffer(payload, np.int16).astype(np.float32) / np.float32(32768)

    def messages(self, kind: str) -> list[dict[str, Any]]:
        return [m for m in _parsed(self.received) if m["type"] == kind]

    def requests(self, *kinds: str) -> list[dict[str, Any]]:
        return [m for m in _parsed(self.sent) if m["type"] in kinds]


def _parsed(frames: list[str | bytes]) -> list[dict[str, Any]]:
    return [json.loads(frame) for frame in frames if isinstance(frame, str)]


# ---- a real server


class RealServer:
    """`realtime serve` as a process, with the embedded voice."""

    def __init__(self) -> None:
        self.port = 0
        self.start()

    def start(self) -> None:
        """Once more on the same port, after a `stop`."""
        command = [sys.executable, "-m", "realtime", "serve", "--port", str(self.port)]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr
        seen = []
        for line in self._process.stderr:
            seen.append(line)
            if found := re.search(r"ready after .* ws://127\.0\.0\.1:(\d+)/", line):
                self.port = int(found[1])
                break
        else:
            raise AssertionError("the server did not start:\n" + "".join(seen))
        self._log = threading.Thread(target=self._process.stderr.read, daemon=True)
        self._log.start()  # or the pipe fills up

    @property
    def url(self) -> str:
        return f"http://localhost:{self.port}/"

    def stop(self, sign: signal.Signals = signal.SIGTERM) -> None:
        self._process.send_signal(sign)
        self._process.wait(TIMEOUT_S)
        self._log.join(TIMEOUT_S)
        assert self._process.stderr
        self._process.stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self.stop(signal.SIGKILL)


# ---- a network with a mind of its own


class Relay:
    """A TCP relay to a server on this machine; `pace` decides when a piece from the server goes on."""

    def __init__(self, port: int, pace: Callable[[int], Awaitable[None]]) -> None:
        self._target = port
        self._pace = pace
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop
        ).result(TIMEOUT_S)
        self.port: int = self._server.sockets[0].getsockname()[1]
        self.is_slow = False  # the page itself comes at once

    @property
    def url(self) -> str:
        return f"http://localhost:{self.port}/"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._target)
        await asyncio.gather(
            self._pump(reader, back, is_paced=False), self._pump(there, writer, is_paced=True)
        )

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_paced: bool
    ) -> None:
        try:
            while data := await reader.read(1000):
                if is_paced and self.is_slow:
                    await self._pace(len(data))
                writer.write(data)
                await writer.drain()
        except OSError:
            pass  # one side has gone; so does the other
        finally:
            writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        async def close() -> None:
            self._server.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0)  # for transports to notice that they are closed

        asyncio.run_coroutine_threadsafe(close(), self._loop).result(TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(TIMEOUT_S)
        self._loop.close()


# ---- a scripted server


def tone(seconds: float, hertz: float = 440.0, level: float = 0.5) -> np.ndarray:
    """A sine as s16, from zero on."""
    t = np.arange(round(seconds * RATE)) / RATE
    return np.round(level * 32767 * np.sin(2 * np.pi * hertz * t)).astype(np.int16)


class Peer:
    """One connection of the scripted server; pings are answered by themselves."""

    def __init__(self, socket: ServerSocket, pong_after_s: Callable[[], float] = lambda: 0.0) -> None:
        self.socket = socket
        self.inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._pong_after_s = pong_after_s
        self._pong_due_s = 0.0
        self._pongs: set[asyncio.Task[None]] = set()
        self._handle = 0

    async def read(self) -> None:
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):
            while True:
                message = await self.socket.receive_json()
                if message["type"] == "ping":
                    now = time.monotonic()
                    self._pong_due_s = max(self._pong_due_s, now + self._pong_after_s())  # in order
                    self._pongs.add(asyncio.create_task(self._pong(message["t"], self._pong_due_s - now)))
                else:
                    self.inbox.put_nowait(message)

    async def _pong(self, t: float, after_s: float) -> None:
        await asyncio.sleep(after_s)
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):
            await self.say("pong", t=t, rx_us=0, tx_us=0)

    async def next(self, *kinds: str) -> dict[str, Any]:
        """The next message of these kinds; others are passed over."""
        while True:
            message = await self.inbox.get()
            if message["type"] in kinds:
                return message

    async def say(self, kind: str, **fields: Any) -> None:
        await self.socket.send_json({"type": kind, **fields})

    async def play(self, ctx: str, pcm: np.ndarray, due_s: Callable[[int], float] = lambda k: 0.0) -> int:
        """Sends `ctx.started` and the frames, frame k when `due_s(k)` has passed; returns the handle."""
        self._handle += 1
        handle = self._handle
        began_s = time.monotonic()
        for k, start in enumerate(range(0, pcm.size, FRAME_SAMPLES)):
            await asyncio.sleep(max(0.0, began_s + due_s(k) - time.monotonic()))
            if k == 0:
                stamps = {"trigger": 1000, "admit": 2000, "prefill": 2000, "ar1": 5000, "arN": 6000}
                format = {"encoding": "pcm_s16le", "sample_rate": RATE, "channels": 1}
                await self.say(
                    "ctx.started", ctx=ctx, h=handle, format=format, t={**stamps, "voc": 9000, "post": 9500}
                )
            piece = pcm[start : start + FRAME_SAMPLES]
            flags = FLAG_FIRST * (k == 0) | FLAG_LAST * (start + FRAME_SAMPLES >= pcm.size)
            t_us = round((time.monotonic() - began_s) * 1e6) + 10_000
            frame = AudioFrame(
                "pcm_s16le", flags, handle, k, 0, start, piece.size, t_us, piece.astype("<i2").tobytes()
            )
            await self.socket.send_bytes(frame.pack())
        return handle

    async def done(self, ctx: str, samples: int, reason: str = "completed", **fields: Any) -> None:
        await self.say("ctx.done", ctx=ctx, reason=reason, samples=samples, metrics={}, **fields)


Script = Callable[[Peer], Awaitable[None]]


class ScriptedServer:
    """Serves the page and runs `script` for each connection; not `ready` = it loads its model."""

    def __init__(self, script: Script, pong_after_s: Callable[[], float] = lambda: 0.0) -> None:
        self.script = script
        self.is_ready = True
        self.token = ""  # what clients must present
        self._pong_after_s = pong_after_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        routes = [
            *page_routes(otherwise=self._readyz),
            Route("/readyz", self._readyz),
            Route("/v1/models", self._models),
            WebSocketRoute("/v1/tts/stream", self._stream),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes), ws="websockets-sansio", log_level="error", lifespan="off"
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._listener]}, daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://localhost:{self.port}/"

    async def _readyz(self, request: Request) -> Response:
        return JSONResponse(
            {"status": "ready" if self.is_ready else "loading"}, 200 if self.is_ready else 503
        )

    async def _models(self, request: Request) -> Response:
        if self.token and auth_token([], {}, request.headers) != self.token:
            return JSONResponse({"error": "unauthorized"}, 401)
        data = [{"id": "tone", "voices": ["low", "high"], "languages": ["en", "de"]}]
        return JSONResponse({"object": "list", "data": data})

    async def _stream(self, socket: ServerSocket) -> None:
        if not self.is_ready:
            await socket.send_denial_response(JSONResponse({"error": "loading"}, 503))
            return
        if self.token and auth_token(socket.scope["subprotocols"], {}, {}) != self.token:
            await socket.send_denial_response(JSONResponse({"error": "unauthorized"}, 401))
            return
        await socket.accept("tts1.json")
        limits = {"max_lead_ms": 20_000, "max_pending_chars": 20_000}
        peer = Peer(socket, self._pong_after_s)
        facts = {"session": "s", "server": "scripted", "model": "tone", "native_rate": RATE, "limits": limits}
        await peer.say("session.ready", **facts)
        async with _reading(peer):
            with contextlib.suppress(WebSocketDisconnect, RuntimeError):
                await self.script(peer)
                await asyncio.Event().wait()  # until the browser goes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join(TIMEOUT_S)
        self._listener.close()


@contextlib.asynccontextmanager
async def _reading(peer: Peer) -> AsyncIterator[None]:
    """Reads beside the script; when the browser has gone, the script is over."""
    script = asyncio.current_task()
    assert script
    reader = asyncio.create_task(peer.read())
    reader.add_done_callback(lambda _: script.cancel())
    try:
        yield
    except asyncio.CancelledError:
        pass
    finally:
        reader.cancel()
