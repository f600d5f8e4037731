"""Routes: the WebSocket, health, models. The composition root hands in a Runtime."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from dataclasses import replace
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from realtime import __version__, metrics
from realtime.config import ServerConfig
from realtime.runtime import Runtime
from realtime.server.session import Session
from realtime.server.settings import Limits, Settings
from realtime.server.static import page_routes
from realtime.server.wire import auth_token, choose_subprotocol

RETRY_AFTER_S = 1
STREAM_PATH = "/v1/tts/stream"


class App:
    """The routes and the sessions that are open."""

    def __init__(self, runtime: Runtime, config: ServerConfig, limits: Limits) -> None:
        self._runtime = runtime
        self._config = config
        self._limits = replace(limits, max_connections=config.max_connections)
        self._sessions: set[Session] = set()
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def routes(self) -> list[Route | WebSocketRoute]:
        return [
            *page_routes(otherwise=self._about),
            Route("/healthz", self._health),
            Route("/readyz", self._ready),
            Route("/metrics", self._metrics),
            Route("/v1/models", self._models),
            Route("/v1/voices", self._voices),
            WebSocketRoute(STREAM_PATH, self._stream),
        ]

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def drain(self, deadline_s: float) -> None:
        """Tells every client that the server is about to stop; contexts may finish."""
        for session in list(self._sessions):
            session.drain(deadline_s)

    async def closed(self, timeout_s: float) -> None:
        """Waits until every connection is over, at most `timeout_s`; new ones have to be kept out."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_empty.wait(), timeout_s)

    async def _about(self, request: Request) -> Response:
        return JSONResponse(
            {
                "server": f"realtime/{__version__}",
                "stream": STREAM_PATH,
                "models": "/v1/models",
                "health": "/healthz",
                "ready": "/readyz",
            }
        )

    async def _health(self, request: Request) -> Response:
        """The process is alive."""
        return JSONResponse({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        """It can speak now: the model is loaded and warm, and the server is not about to stop."""
        if self._runtime.ready:
            return JSONResponse({"status": "ready"})
        status = "draining" if self._runtime.draining else "loading"
        return JSONResponse({"status": status}, 503, {"Retry-After": str(RETRY_AFTER_S)})

    async def _metrics(self, request: Request) -> Response:
        """For Prometheus."""
        if not _same_token(self._config.token, auth_token([], request.query_params, request.headers)):
            return JSONResponse({"error": "unauthorized"}, 401)
        return Response(metrics.exposition(), media_type=metrics.CONTENT_TYPE)

    async def _models(self, request: Request) -> Response:
        if not _same_token(self._config.token, auth_token([], request.query_params, request.headers)):
            return JSONResponse({"error": "unauthorized"}, 401)
        if not self._runtime.ready:
            return await self._ready(request)
        spec = self._runtime.spec
        return JSONResponse(
            {
                "object": "list",
                "data": [
                    {
                        "id": spec.name,
                        "object": "model",
                        "sample_rate": spec.sample_rate,
                        "channels": spec.channels,
                        "frame_ms": 1000 / spec.frame_rate,
                        "voices": list(spec.voices),
                        "languages": list(spec.languages),
                    }
                ],
                "defaults": Settings().as_dict(),
                "limits": self._limits.as_dict(),
            }
        )

    async def _voices(self, request: Request) -> Response:
        if not _same_token(self._config.token, auth_token([], request.query_params, request.headers)):
            return JSONResponse({"error": "unauthorized"}, 401)
        if not self._runtime.ready:
            return await self._ready(request)
        voices = self._runtime.voices
        return JSONResponse(
            {
                "voices": [
                    {
                        "voice_id": name,
                        "name": name,
                        "category": "cloned" if voices is not None and name in voices else "premade",
                    }
                    for name in self._runtime.spec.voices
                ]
            }
        )

    async def _stream(self, socket: WebSocket) -> None:
        offered = socket.scope.get("subprotocols", [])
        if not _allowed_origin(socket.headers, self._config.allowed_origins):
            return await _refuse(socket, 403, "this origin is not allowed")
        if not _same_token(self._config.token, auth_token(offered, socket.query_params, socket.headers)):
            return await _refuse(socket, 401, "a token is needed and was missing or wrong")
        if not self._runtime.ready:
            status = "is about to stop" if self._runtime.draining else "is loading its model"
            return await _refuse(socket, 503, f"the server {status}")
        if len(self._sessions) >= self._limits.max_connections:
            limit = self._limits.max_connections
            return await _refuse(socket, 503, f"all {limit} connections are taken")
        session = Session(socket, self._runtime, self._limits)
        self._sessions.add(session)
        self._is_empty.clear()
        try:
            await session.serve(choose_subprotocol(offered))
        finally:
            self._sessions.discard(session)
            if not self._sessions:
                self._is_empty.set()


def create_app(runtime: Runtime, config: ServerConfig, limits: Limits | None = None) -> tuple[Starlette, App]:
    app = App(runtime, config, limits or Limits())
    return Starlette(routes=app.routes()), app


async def _refuse(socket: WebSocket, status: int, message: str) -> None:
    """Answers the upgrade itself, so that nothing has to be opened to learn why."""
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else {}
    await socket.send_denial_response(JSONResponse({"error": message}, status, headers))


def _same_token(expected: str, given: str | None) -> bool:
    if not expected:
        return True
    return given is not None and secrets.compare_digest(given.encode(), expected.encode())


def _allowed_origin(headers: Headers, allowed: tuple[str, ...]) -> bool:
    """Browsers name the page's origin: the server's own and those allowed may connect. A client
    that names none is no browser."""
    origin = headers.get("origin")
    if origin is None or "*" in allowed or origin in allowed:
        return True
    try:
        return origin != "null" and urlsplit(origin).netloc == headers.get("host")
    except ValueError:  # no URL at all
        return False
