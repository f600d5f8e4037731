"""Models by the name they have on a hub, fetched with the real client from a small hub on loopback."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest

from realtime.errors import ModelError
from realtime.models import hub

SHA = "0123456789abcdef0123456789abcdef01234567"
FILES = {"config.json": b"{}", "model.safetensors": b"weights", "modeling.py": b"raise SystemExit"}


class FakeHub(BaseHTTPRequestHandler):
    """One public repository, one gated one; nothing else is there."""

    requests: list[str] = []

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, with_body: bool) -> None:
        self.requests.append(self.path)
        path = self.path.partition("?")[0]
        headers = {"X-Repo-Commit": SHA}
        status, body = 404, b"{}"
        if path.startswith("/api/models/org/tiny/tree/"):
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in FILES.items()
            ]
            status, body = 200, json.dumps(entries).encode()
        elif path.startswith("/api/models/org/tiny"):
            status, body = 200, json.dumps({"id": "org/tiny", "sha": SHA, "siblings": []}).encode()
        elif path.startswith("/org/tiny/resolve/"):
            body = FILES[path.rpartition("/")[2]]
            status, headers = 200, {**headers, "ETag": f'"{hashlib.sha1(body).hexdigest()}"'}
        elif "/org/gated" in path:
            status, headers = 403, {"X-Error-Code": "GatedRepo"}
        else:
            headers = {"X-Error-Code": "RepoNotFound"}
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


CLOSED = "http://127.0.0.1:9"  # nothing listens there
FIND = """
import sys
from realtime.errors import ModelError
from realtime.models import hub
try:
    print(hub.find(sys.argv[1]))
except ModelError as error:
    sys.exit(error.message)
"""


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def fetch(name: str, endpoint: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Finds a model in a process of its own: the client reads its settings when it is imported."""
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home / "cache"), "HF_HUB_OFFLINE": "0"}
    path = str(Path(__file__).parent.parent)
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", FIND, name],
        cwd=home,
        env={**os.environ, **settings, "PYTHONPATH": path, "NO_PROXY": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=60,
    )


def fetched(name: str, endpoint: str, home: Path) -> Path:
    done = fetch(name, endpoint, home)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def not_fetched(name: str, endpoint: str, home: Path) -> str:
    done = fetch(name, endpoint, home)
    assert done.returncode == 1
    return done.stderr.strip().splitlines()[-1]


def refused(name: str) -> str:
    with pytest.raises(ModelError) as caught:
        hub.find(name)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_a_folder_needs_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "org" / "tiny"
    folder.mkdir(parents=True)
    assert hub.find(str(folder)) == folder
    assert hub.find("org/tiny").resolve() == folder  # filled by hand where the message says


def test_what_a_model_names_is_in_its_folder_or_next_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "m" / "model"
    inside, sibling = model / "codec", tmp_path / "m" / "Codec-v2"
    for folder in (inside, sibling, tmp_path / "codec"):
        folder.mkdir(parents=True)
    assert hub.find("codec", model) == inside
    assert hub.find("org/Codec-v2", model) == sibling
    assert hub.find("../Codec-v2", model).resolve() == sibling
    assert hub.find("codec").resolve() == tmp_path / "codec"


def test_a_repository_is_fetched_without_its_code_and_then_needs_no_hub(
    tmp_path: Path, endpoint: str
) -> None:
    folder = fetched("org/tiny", endpoint, tmp_path)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        name: FILES[name] for name in ("config.json", "model.safetensors")
    }
    assert fetched("org/tiny", CLOSED, tmp_path) == folder


def test_an_unreachable_hub_names_the_folder_to_fill(tmp_path: Path) -> None:
    message = not_fetched("org/tiny", CLOSED, tmp_path)
    assert message.startswith("org/tiny can't be downloaded: the hub can't be reached (")
    assert message.endswith(f"hf download org/tiny --local-dir {tmp_path / 'org' / 'tiny'}")


@pytest.mark.parametrize(
    ("name", "reason"),
    [("org/none", "no such repository, or it is private"), ("org/gated", "terms must be accepted")],
)
def test_a_repository_that_is_missing_or_gated_is_told_as_that(
    tmp_path: Path, endpoint: str, name: str, reason: str
) -> None:
    assert reason in not_fetched(name, endpoint, tmp_path)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_full_disk_is_told_as_that(monkeypatch: pytest.MonkeyPatch, wrapped: bool) -> None:
    def full(*args: object, **options: object) -> str:
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError as error:
            if not wrapped:
                raise
            raise RuntimeError("transfer failed") from error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    assert "no space left in /" in refused("org/full")


@pytest.mark.parametrize("name", ["none", "/none", "./org/tiny", "a/b/c", "org/../tiny", "-x/y"])
def test_a_name_that_is_no_id_is_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "is no folder" in refused(name)
