"""How the page's files are served, and that they are found and shipped."""

from __future__ import annotations

import asyncio
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from realtime.server import static

ROOT = Path(__file__).parent.parent
PAGE_TYPES = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


async def about(request: Request) -> Response:
    return JSONResponse({"server": "here"})


class Client:
    """The routes without a socket."""

    def __init__(self) -> None:
        self._app = Starlette(routes=static.page_routes(otherwise=about))

    def get(self, path: str, headers: dict[str, str] | None = None) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self._app)
            async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
                return await client.get(path, headers=headers)

        return asyncio.run(ask())


@pytest.fixture
def client() -> Iterator[Client]:
    yield Client()


def test_browsers_get_the_page_and_programs_the_addresses(client: Client) -> None:
    page = client.get("/", PAGE_TYPES)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "<title>Realtime playground</title>" in page.text
    told = client.get("/")
    assert told.json() == {"server": "here"}
    assert page.headers["vary"] == told.headers["vary"] == "Accept"


@pytest.mark.parametrize(
    ("name", "media_type"),
    [("app.js", "text/javascript"), ("player.js", "text/javascript"), ("style.css", "text/css")],
)
def test_files_have_types_that_browsers_accept_and_are_asked_for_anew(
    client: Client, name: str, media_type: str
) -> None:
    answer = client.get(f"/{name}")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == f"{media_type}; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-content-type-options"] == "nosniff"
    again = client.get(f"/{name}", {"If-None-Match": answer.headers["etag"]})
    assert again.status_code == 304 and again.content == b""


def test_the_page_may_load_and_connect_to_nothing_but_its_own_server(client: Client) -> None:
    policy = client.get("/", PAGE_TYPES).headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy and "*" not in policy
    assert "connect-src 'self'" in policy and "script-src 'self'" in policy


@pytest.mark.parametrize(
    "path", ["/../pyproject.toml", "/%2e%2e/pyproject.toml", "/web/app.js", "/.gitignore"]
)
def test_no_other_file_can_be_reached(client: Client, path: str) -> None:
    assert client.get(path).status_code == 404


def test_nothing_in_the_page_comes_from_elsewhere_or_is_built_from_text() -> None:
    unsafe = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\("
    for path in (path for path in (ROOT / "web").iterdir() if path.suffix in static.MEDIA_TYPES):
        content = path.read_text()
        assert not re.search(r"(src|href|from|import)\W{1,3}https?://", content), path
        if path.suffix == ".js":
            assert not re.search(unsafe, content), path


def test_every_module_that_is_imported_is_there() -> None:
    for path in (ROOT / "web").glob("*.js"):
        for name in re.findall(r'from "\./([^"]+)"', path.read_text()):
            assert (path.parent / name).is_file(), (path, name)


def test_the_files_are_found_in_a_checkout_and_shipped_inside_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert static.web_folder() == ROOT / "web"
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["force-include"]["web"] == "realtime/web"
    installed = tmp_path / "site-packages" / "realtime"
    for folder in (installed / "server", installed / "web"):
        folder.mkdir(parents=True)
    (installed / "web" / static.PAGE).touch()
    monkeypatch.setattr(static, "__file__", str(installed / "server" / "static.py"))
    assert static.web_folder() == installed / "web"


def test_an_installation_without_the_files_still_answers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(static, "__file__", str(tmp_path / "realtime" / "server" / "static.py"))
    assert Client().get("/", PAGE_TYPES).json() == {"server": "here"}
