"""Runs the server: socket, uvicorn, signals, and the order in which things stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from realtime.config import Config, as_dict
from realtime.errors import ConfigError, StageFailed
from realtime.runtime import Runtime
from realtime.server.app import STREAM_PATH, App, create_app
from realtime.server.settings import Limits

NOTSENT_LOWAT_BYTES = 16_384  # 170 ms of 48 kHz mono s16: what a cancel can't recall
USER_TIMEOUT_MS = 30_000  # a peer that acknowledges nothing for so long is gone
BACKLOG = 2048
LAST_WORDS_S = 1.0  # for the `ctx.done` and close frames of what was cancelled at the deadline
GRACE_S = 2  # for connections that linger once every stream is over

logger = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    """uvicorn closes every WebSocket at a signal; here streams finish first, so it gets none."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Http(HttpToolsProtocol):
    """uvicorn drops what comes in one packet with an upgrade: the first text of an eager client."""

    _packet = b""

    def data_received(self, data: bytes) -> None:
        self._packet = data
        super().data_received(data)

    def handle_websocket_upgrade(self) -> None:
        upgrade = sys.exception()  # of the parser; it tells where the request ends
        assert upgrade is not None
        super().handle_websocket_upgrade()
        rest = self._packet[upgrade.args[0] :]
        if rest:
            self.transport.get_protocol().data_received(rest)  # type: ignore[attr-defined]


class _WebSocket(WebSocketsSansIOProtocol):
    """uvicorn logs an error for an upgrade that was refused, as if it had not been answered."""

    async def send(self, message: Any) -> None:
        await super().send(message)
        self.handshake_complete = self.handshake_complete or self.close_sent


def http_server(asgi: Starlette) -> uvicorn.Server:
    """Serves the routes on sockets that `listen` made."""
    return _Server(
        uvicorn.Config(
            asgi,
            http=_Http,
            ws=_WebSocket,
            ws_max_size=Limits().max_message_bytes,
            ws_per_message_deflate=False,  # audio does not shrink, and compression costs memory
            ws_ping_interval=20.0,
            ws_ping_timeout=None,  # a client that does not read can't pong: the stall limit is for it
            lifespan="off",
            log_config=None,
            log_level="warning",  # it would log every request's query, which may hold the token
            access_log=False,
            timeout_graceful_shutdown=GRACE_S,
        )
    )


def listen(host: str, port: int) -> socket.socket:
    """A listening socket whose options the accepted ones inherit. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in (("TCP_NOTSENT_LOWAT", NOTSENT_LOWAT_BYTES), ("TCP_USER_TIMEOUT", USER_TIMEOUT_MS)):
        option = getattr(socket, name, None)  # Linux has both
        if option is not None:
            listener.setsockopt(socket.IPPROTO_TCP, option, value)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"can't listen on {host}:{port}: {error.strerror or error}") from error
    return listener


async def _drain(runtime: Runtime, app: App, drain_s: float) -> None:
    """Streams finish and their audio is written; what has not by then is cancelled and told so."""
    ends_s = time.monotonic() + drain_s
    await runtime.drain(drain_s)
    await app.closed(max(ends_s - time.monotonic(), LAST_WORDS_S))


async def serve(config: Config) -> None:
    """Returns after SIGTERM or SIGINT, when streams have finished or `drain_s` is over. A second
    signal ends the wait. Raises ConfigError and ModelError, and StageFailed when a stage could not go on."""
    began_s = time.monotonic()
    listener = listen(config.server.host, config.server.port)
    host, port = listener.getsockname()[:2]
    logger.info("settings: %s", as_dict(config))
    runtime = Runtime(config)
    asgi, app = create_app(runtime, config.server)
    server = http_server(asgi)
    stopping = asyncio.Event()
    hurrying = asyncio.Event()

    def on_signal() -> None:
        (hurrying if stopping.is_set() else stopping).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        async with runtime:
            logger.info(
                "ready after %.1f s: %s, %d streams at once, ws://%s:%d%s",
                time.monotonic() - began_s,
                runtime.spec.name,
                config.engine.max_streams,
                host,
                port,
                STREAM_PATH,
            )
            stopped = asyncio.create_task(stopping.wait())
            broken = asyncio.create_task(runtime.broken.wait())
            await asyncio.wait((serving, stopped, broken), return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            broken.cancel()
            drain_s = 0.0 if runtime.broken.is_set() else config.server.drain_s
            logger.info("stopping: %d streams may finish within %.0f s", len(runtime.streams), drain_s)
            runtime.ready = False
            app.drain(drain_s)
            draining = asyncio.create_task(_drain(runtime, app, drain_s))
            hurry = asyncio.create_task(hurrying.wait())
            await asyncio.wait((draining, hurry), return_when=asyncio.FIRST_COMPLETED)
            draining.cancel()
            hurry.cancel()
    finally:
        server.should_exit = True
        await serving
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        listener.close()
    if runtime.broken.is_set():
        raise StageFailed("a stage could not go on: the log has why; start again")
