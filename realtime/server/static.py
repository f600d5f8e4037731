"""The playground's files: beside the package in a checkout, inside it in an installed wheel.

Only the files that are there when the server starts are served, by their exact names: no path of a
request ever reaches the file system.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

Endpoint = Callable[[Request], Awaitable[Response]]

PAGE = "index.html"
MEDIA_TYPES = {  # spelt out: the machine's own table may call a script text/plain, which no browser runs
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Cache-Control": "no-cache",  # asked for anew each time, and answered by 304 while nothing changed
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; worker-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def web_folder() -> Path | None:
    """Where the page lies; None in an installation that left it out."""
    package = Path(__file__).resolve().parent.parent
    return next((f for f in (package / "web", package.parent / "web") if (f / PAGE).is_file()), None)


def page_routes(otherwise: Endpoint) -> list[Route]:
    """The page at `/` for browsers, its files beside it. `otherwise` answers `/` for programs."""
    folder = web_folder()
    if folder is None:
        return [Route("/", otherwise)]

    async def front(request: Request) -> Response:
        wants_page = "text/html" in request.headers.get("accept", "")
        response = _file(folder / PAGE, request) if wants_page else await otherwise(request)
        response.headers["Vary"] = "Accept"
        return response

    names = sorted(path.name for path in folder.iterdir() if path.suffix in MEDIA_TYPES)
    return [Route("/", front), *(Route(f"/{name}", _serving(folder / name)) for name in names)]


def _serving(path: Path) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        return _file(path, request)

    return endpoint


def _file(path: Path, request: Request) -> Response:
    """Read at each request, a few kilobytes: an edit shows with the next reload."""
    content = path.read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    headers = {**HEADERS, "ETag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=MEDIA_TYPES[path.suffix])
