"""Running it: health, who may connect, stopping, the commands, and the embedded voice behind a socket."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import wave
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.typing import Subprotocol

from realtime import cli, models
from realtime import serve as serve_module
from realtime.config import Config, EngineConfig, ServerConfig
from realtime.errors import StageFailed
from realtime.models.base import Bundle
from realtime.runtime import Runtime
from realtime.serve import http_server, listen
from realtime.server.app import create_app
from realtime.server.settings import Limits
from realtime.server.wire import FLAG_SEGMENT_LAST
from realtime.worker import MAX_FAILED
from tests.fakes import FakeBackbone
from tests.server_fakes import RATE, Client, Records, bundle, client, run, served, until

TEXT = "Hello there, my friend. This is the second sentence of three. Good bye!"


async def refused(url: str, **options: object) -> tuple[int, httpx.Headers, str]:
    """The answer to an upgrade that is not granted."""
    with pytest.raises(InvalidStatus) as caught:
        async with connect(url, **options):  # type: ignore[arg-type]
            pass
    response = caught.value.response
    return response.status_code, httpx.Headers(list(response.headers.raw_items())), response.body.decode()


# ---- health


def test_health_and_models_of_a_ready_server() -> None:
    async def main() -> None:
        async with served() as server:
            assert (await server.get("/healthz")).json() == {"status": "ok"}
            assert (await server.get("/readyz")).json() == {"status": "ready"}
            (model,) = (await server.get("/v1/models")).json()["data"]
            assert (model["id"], model["sample_rate"], model["voices"]) == ("fake", RATE, ["fake"])
            assert (await server.get("/")).json()["stream"] == "/v1/tts/stream"
            assert (await server.get("/nothing")).status_code == 404

    run(main())


def test_nothing_but_health_answers_while_the_model_loads() -> None:
    loading = threading.Event()

    def load(path: str) -> Bundle:
        assert loading.wait(20)
        return bundle()

    async def main() -> None:
        listener = listen("127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        runtime = Runtime(Config(), load)
        server = http_server(create_app(runtime, ServerConfig())[0])
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        entering = asyncio.create_task(runtime.__aenter__())
        try:
            async with httpx.AsyncClient() as http:
                assert (await http.get(f"{url}/healthz")).status_code == 200
                for path in ("/readyz", "/v1/models"):
                    answer = await http.get(url + path)
                    assert (answer.status_code, answer.json()["status"]) == (503, "loading")
                    assert answer.headers["Retry-After"]
                stream = url.replace("http", "ws") + "/v1/tts/stream"
                status, headers, body = await refused(stream)
                assert (status, headers["Retry-After"]) == (503, "1") and "loading" in body
                loading.set()
                await entering
                assert (await http.get(f"{url}/readyz")).status_code == 200
                async with client(stream) as speaker:
                    await speaker.say(TEXT)
                    await speaker.done("0")
        finally:
            loading.set()
            await entering
            await runtime.__aexit__(None, None, None)
            server.should_exit = True
            await serving
            listener.close()

    run(main())


# ---- who may connect


def test_a_token_may_come_in_a_header_in_the_query_or_as_a_subprotocol() -> None:
    token = "sécret/+"
    encoded = base64.urlsafe_b64encode(token.encode()).decode().rstrip("=")

    async def main() -> None:
        async with served(server=ServerConfig(token=token)) as server:
            for options in (
                {},
                {"additional_headers": {"Authorization": "Bearer wrong"}},
                {"additional_headers": {"Authorization": "Basic x"}},
                {"subprotocols": [Subprotocol("tts1.auth.d3Jvbmc"), Subprotocol("tts1.json")]},
                {"subprotocols": [Subprotocol("tts1.auth.x"), Subprotocol("tts1.json")]},
            ):
                status, _, body = await refused(server.url, **options)
                assert status == 401 and token not in body
            assert (await refused(server.url + "?token=wrong"))[0] == 401
            assert (await server.get("/v1/models")).status_code == 401
            assert (await server.get("/v1/models?token=s%C3%A9cret/%2B")).status_code == 200
            assert (await server.get("/healthz")).status_code == 200

            async with client(server, query="?token=s%C3%A9cret/%2B") as speaker:
                await speaker.wait("session.ready")
            offered = [Subprotocol(f"tts1.auth.{encoded}"), Subprotocol("tts1.msgpack")]
            async with connect(server.url, subprotocols=offered) as socket:
                assert socket.subprotocol == "tts1.msgpack"
        async with served(server=ServerConfig(token="plain")) as server:
            headers = {"Authorization": "bearer plain"}
            async with client(server, additional_headers=headers) as speaker:
                await speaker.wait("session.ready")

    run(main())


def test_a_token_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        caplog.set_level(logging.INFO)
        async with served(server=ServerConfig(token="s3cret")) as server:
            async with client(server, query="?token=s3cret") as speaker:
                await speaker.say(TEXT)
                await speaker.done("0")
            await refused(server.url + "?token=s3cret-not")
        assert caplog.records and "s3cret" not in caplog.text and "friend" not in caplog.text

    run(main())


def test_browsers_of_other_pages_are_kept_out() -> None:
    async def main() -> None:
        async with served(server=ServerConfig(allowed_origins=("https://friend.example",))) as server:
            own = f"http://127.0.0.1:{server.port}"
            for origin in ("https://evil.example", "null", "http://[", f"http://127.0.0.1:{server.port + 1}"):
                assert (await refused(server.url, origin=origin))[0] == 403, origin
            for origin in (own, "https://friend.example", None):
                async with client(server, origin=origin) as speaker:
                    await speaker.wait("session.ready")
        async with served(server=ServerConfig(allowed_origins=("*",))) as server:
            async with client(server, origin="https://anyone.example") as speaker:
                await speaker.wait("session.ready")

    run(main())


def test_one_connection_too_many_is_told_to_come_back() -> None:
    async def main() -> None:
        async with served(server=ServerConfig(max_connections=2)) as server:
            async with client(server) as first, client(server) as second:
                assert (await first.wait("session.ready"))["limits"]["max_connections"] == 2  # type: ignore
                await second.wait("session.ready")
                status, headers, body = await refused(server.url)
                assert (status, headers["Retry-After"]) == (503, "1") and "2 connections" in body
            await until(lambda: not server.app.num_sessions)
            async with client(server) as third:
                await third.wait("session.ready")

    run(main())


def test_an_unknown_subprotocol_is_not_chosen() -> None:
    async def main() -> None:
        async with served() as server:
            offered = [Subprotocol("other"), Subprotocol("tts1.msgpack"), Subprotocol("tts1.json")]
            async with connect(server.url, subprotocols=offered) as socket:
                assert socket.subprotocol == "tts1.msgpack"
            async with client(server, None) as speaker:
                assert speaker.socket.subprotocol is None
                await speaker.wait("session.ready")

    run(main())


# ---- stopping


@contextlib.asynccontextmanager
async def served_until_a_signal(
    monkeypatch: pytest.MonkeyPatch, model: Bundle, drain_s: float, limits: Limits | None = None
) -> AsyncIterator[tuple[str, asyncio.Task[None]]]:
    """The product's own `serve` with another model; the block gets the URL."""
    monkeypatch.setattr(serve_module, "Runtime", partial(Runtime, load=lambda path: model))
    if limits is not None:
        monkeypatch.setattr(serve_module, "create_app", partial(create_app, limits=limits))
    log = Records()
    log.setLevel(logging.INFO)
    logging.getLogger().addHandler(log)
    logging.getLogger("realtime").setLevel(logging.INFO)
    config = Config(server=ServerConfig(port=0, drain_s=drain_s), engine=EngineConfig(8, queue_s=10))
    serving = asyncio.create_task(serve_module.serve(config))
    try:
        urls: list[str] = []
        await until(lambda: urls.extend(_urls(log)) or urls or serving.done())
        yield urls[0], serving
        await asyncio.wait_for(serving, 30)
        assert not [text for text in log.errors() if "graceful shutdown exceeded" not in text]
    finally:
        logging.getLogger().removeHandler(log)


def _urls(log: Records) -> list[str]:
    return [url for record in log.records for url in re.findall(r"ws://\S+", record.getMessage())]


def test_a_signal_lets_streams_finish_and_tells_the_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with (
            served_until_a_signal(monkeypatch, bundle(), 2.0) as (url, _),
            client(url) as speaking,
            client(url) as typing,
            client(url) as idle,
        ):
            await speaking.say(TEXT * 10)
            await typing.send("text", text=TEXT, seed=7)
            await idle.wait("session.ready")
            await typing.audio("0")
            os.kill(os.getpid(), signal.SIGTERM)
            drains = [await speaker.wait("session.draining") for speaker in (speaking, typing, idle)]
            assert {message["deadline_ms"] for message in drains} == {2000}
            status, headers, body = await refused(url)
            assert status == 503 and headers["Retry-After"] and "stop" in body
            await typing.send("text", ctx="new", text=TEXT)
            assert (await typing.wait("error", "new"))["code"] == "draining"
            await typing.send("text", text=" More of it.")  # this turn may finish, but never does
            for speaker in (speaking, typing, idle):
                assert (await speaker.rest())[0] == 1012
            assert speaking.find("ctx.done")[0]["reason"] == "completed"
            assert typing.find("ctx.done", "0")[0]["reason"] == "closed"

    run(main())


async def stop_reading(url: str) -> tuple[Client, contextlib.AsyncExitStack]:
    """A client with hardly any buffer, in the middle of a long text, whose audio nobody reads."""
    stack = contextlib.AsyncExitStack()
    narrow = socket.socket()
    narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    narrow.setblocking(False)
    port = int(url.split(":")[2].split("/")[0])
    await asyncio.get_running_loop().sock_connect(narrow, ("127.0.0.1", port))
    options = {"sock": narrow, "max_queue": 1, "close_timeout": 0.2}
    speaker = await stack.enter_async_context(
        client(url, query="?encoding=pcm_f32le&channels=2", check=False, **options)
    )
    return speaker, stack


def test_audio_that_is_made_is_also_sent_before_the_server_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream is over long before its client has read what it said."""

    async def main() -> None:
        async with served_until_a_signal(monkeypatch, bundle(), 15.0) as (url, _):
            speaker, stack = await stop_reading(url)
            async with stack:
                await speaker.say(TEXT * 3)
                async with client(url) as other:
                    await other.say(TEXT * 3)
                    await other.done("0")
                os.kill(os.getpid(), signal.SIGTERM)
                await speaker.audio("0", 5)
                while not speaker.find("ctx.done"):
                    await asyncio.sleep(0.005)  # reads slowly
                    await speaker.next()
                assert (await speaker.rest())[0] == 1012
                assert speaker.find("ctx.done")[0]["reason"] == "completed"
                assert len(speaker.pcm()) == len(other.pcm()) * 4

    run(main())


def test_a_client_that_does_not_read_does_not_hold_the_exit_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with served_until_a_signal(monkeypatch, bundle(), 0.5) as (url, serving):
            speaker, stack = await stop_reading(url)
            async with stack:
                await speaker.say(TEXT * 30)
                await speaker.audio("0", 2)
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.wait_for(asyncio.shield(serving), 20)

    run(main())


def test_a_second_signal_hurries(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with served_until_a_signal(monkeypatch, bundle(), 600.0) as (url, _), client(url) as speaker:
            await speaker.send("text", text=TEXT, seed=7)
            await speaker.audio("0")
            os.kill(os.getpid(), signal.SIGTERM)
            await speaker.wait("session.draining")
            os.kill(os.getpid(), signal.SIGINT)
            assert (await speaker.done("0"))["reason"] == "closed"
            assert (await speaker.rest())[0] == 1012

    run(main())


def test_a_dead_engine_does_not_hold_the_exit_up(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = threading.Event()
    monkeypatch.setattr("realtime.runtime.WORKER_STOP_S", 0.3)
    calls: list[int] = []

    def hang() -> None:
        calls.append(1)
        if len(calls) > 20:  # not in the warm-up
            stuck.wait(20)

    async def main() -> None:
        log: list[str] = []
        monkeypatch.setattr("realtime.worker.logger.error", lambda text, *args: log.append(text % args))
        model = bundle(FakeBackbone(before_decode=hang))
        async with served_until_a_signal(monkeypatch, model, 0.2) as (url, _), client(url) as speaker:
            await speaker.say(TEXT * 30)
            await until(lambda: len(calls) > 20)
            os.kill(os.getpid(), signal.SIGTERM)
            assert (await speaker.rest())[0] == 1012
        assert any("engine did not stop" in line for line in log)

    try:
        run(main())
    finally:
        stuck.set()


@pytest.mark.parametrize("fault", ["CUDA error: an illegal memory access was encountered", "no reason"])
def test_a_broken_device_ends_the_process_with_an_error(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # FAULT-2: a fatal error at once, any other one when nothing but failures comes
    calls: list[int] = []

    def fail() -> None:
        calls.append(1)
        if len(calls) > 20:  # not in the warm-up
            raise RuntimeError(fault)

    async def main() -> None:
        monkeypatch.setattr(serve_module, "Runtime", partial(Runtime, load=lambda path: model))
        model = bundle(FakeBackbone(before_decode=fail))
        log = Records()
        log.setLevel(logging.INFO)
        logging.getLogger().addHandler(log)
        logging.getLogger("realtime").setLevel(logging.INFO)
        config = Config(server=ServerConfig(port=0, drain_s=20), engine=EngineConfig(8, queue_s=10))
        serving = asyncio.create_task(serve_module.serve(config))
        try:
            urls: list[str] = []
            await until(lambda: urls.extend(_urls(log)) or urls)
            async with client(urls[0]) as speaker:
                for turn in range(4 * MAX_FAILED):
                    with contextlib.suppress(ConnectionClosed):
                        await speaker.say(TEXT * 3, str(turn))
                    await asyncio.wait([serving], timeout=0.05)
                with pytest.raises(StageFailed):
                    await asyncio.wait_for(serving, 10)
                assert len(calls) <= 20 + MAX_FAILED, "nothing runs on it any more"
        finally:
            logging.getLogger().removeHandler(log)
        assert any(record.levelno == logging.CRITICAL for record in log.records)

    run(main())


# ---- the commands


def test_settings_that_cant_be_used_exit_with_2(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["serve", "--set", "engine.max_stream=3"]) == 2
    assert "did you mean 'max_streams'?" in capfd.readouterr().err
    assert cli.main(["serve", "--port", "70000"]) == 2
    assert "65535" in capfd.readouterr().err
    assert cli.main(["serve", str(tmp_path / "none.toml")]) == 2
    assert "can't be read" in capfd.readouterr().err
    assert cli.main(["serve", "--port", "0", "--host", "no such host"]) == 2
    assert "can't listen" in capfd.readouterr().err
    assert cli.main(["serve", "--port", "0", "--set", f"model.path={tmp_path}"]) == 2
    assert "config.json" in capfd.readouterr().err


def test_a_port_that_is_taken_exits_with_2(capfd: pytest.CaptureFixture[str]) -> None:
    taken = listen("127.0.0.1", 0)
    try:
        port = taken.getsockname()[1]
        assert cli.main(["serve", "--port", str(port)]) == 2
        assert f"127.0.0.1:{port}" in capfd.readouterr().err
    finally:
        taken.close()


@pytest.fixture
def fake_voice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "load", lambda path: bundle())
    monkeypatch.setattr(
        Runtime.__init__, "__defaults__", (lambda path: bundle(), *Runtime.__init__.__defaults__[1:])
    )  # type: ignore


def frames_of(path: Path) -> int:
    with wave.open(str(path)) as file:
        return file.getnframes()


@pytest.mark.usefixtures("fake_voice")
def test_say_writes_a_wav(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "hello.wav"
    assert cli.main(["say", TEXT, "-o", str(out), "--seed", "3", "--rate", "16000", "--channels", "2"]) == 0
    with wave.open(str(out)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (16_000, 2, 2)
        assert file.getnframes() > 8000 and any(file.readframes(8000))
    assert "seed 3" in capfd.readouterr().err
    again = tmp_path / "again.wav"
    assert cli.main(["say", TEXT, "-o", str(again), "--seed", "3", "--rate", "16000", "--channels", "2"]) == 0
    assert again.read_bytes() == out.read_bytes()


@pytest.mark.usefixtures("fake_voice")
@pytest.mark.parametrize("text", ["", "   ", "\n"])
def test_say_of_nothing_is_an_empty_wav(text: str, tmp_path: Path) -> None:
    out = tmp_path / "nothing.wav"
    assert cli.main(["say", text, "-o", str(out)]) == 0
    assert frames_of(out) == 0


@pytest.mark.usefixtures("fake_voice")
def test_say_refuses_what_cant_be_done(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["say", "Hello.", "-o", str(tmp_path / "none" / "a.wav")]) == 1
    assert "can't be written" in capfd.readouterr().err
    assert cli.main(["say", "Hello.", "-o", str(tmp_path)]) == 1
    assert "can't be written" in capfd.readouterr().err
    assert cli.main(["say", "Hello.", "-o", "/dev/full"]) == 1
    error = capfd.readouterr().err
    assert "can't be written" in error and "Traceback" not in error
    assert cli.main(["say", "Hello.", "-o", str(tmp_path / "a.wav"), "--voice", "nobody"]) == 1
    assert "voice_not_found" in capfd.readouterr().err


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "realtime", *words]


def test_say_pipes_the_embedded_voice_and_ends_quietly_when_nobody_listens() -> None:
    piped = subprocess.run(command("say", "-"), input=b"Hello there.", capture_output=True, timeout=100)
    assert piped.returncode == 0, piped.stderr
    header, pcm = piped.stdout[:44], piped.stdout[44:]
    assert header[:4] == b"RIFF" and len(pcm) > 48_000 and any(pcm)
    with subprocess.Popen(
        command("say", "This takes a while to say. " * 4), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as deaf:
        assert deaf.stdout and deaf.stderr
        deaf.stdout.read(44)
        deaf.stdout.close()
        error = deaf.stderr.read().decode()
        assert deaf.wait(100) == 1
    assert "Traceback" not in error, error


def test_say_does_not_write_sound_to_a_terminal() -> None:
    ours, theirs = pty.openpty()
    try:
        answer = subprocess.run(
            command("say", "Hello."), stdout=theirs, stderr=subprocess.PIPE, timeout=60, check=False
        )
        assert answer.returncode == 1 and b"is a terminal" in answer.stderr
    finally:
        os.close(ours)
        os.close(theirs)


# ---- the embedded voice behind a socket


@pytest.fixture(scope="module")
def wren_url() -> Iterator[str]:
    """`realtime serve` as a process; at the end it is stopped with streams open, and must obey."""
    words = command("serve", "--port", "0", "--set", "server.drain_s=3", "--set", "engine.max_streams=4")
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        lines: list[str] = []
        for line in process.stderr:
            lines.append(line)
            if "ready after" in line:
                break
        found = re.search(r"ws://\S+", lines[-1])
        try:
            assert found, "".join(lines)
            reading = threading.Thread(target=lambda: lines.extend(process.stderr or []))
            reading.start()
            yield found[0]
            run(_stop_with_open_streams(found[0], process))
            reading.join(10)
            assert process.wait(20) == 0
            assert not [line for line in lines if " ERROR " in line or "Traceback" in line], lines
        finally:
            process.kill()


async def _stop_with_open_streams(url: str, process: subprocess.Popen[str]) -> None:
    deaf, stack = await stop_reading(url)
    async with stack, client(url) as speaking, client(url) as typing:
        await deaf.say(TEXT * 4)
        await speaking.say("Hello there.")
        await typing.send("text", text="Hello there. And then ", seed=7)
        await typing.audio("0")
        process.send_signal(signal.SIGTERM)
        assert (await speaking.rest())[0] == 1012 and (await typing.rest())[0] == 1012
        assert speaking.find("session.draining") and typing.find("session.draining")
        assert speaking.find("ctx.done")[0]["reason"] == "completed"
        assert typing.find("ctx.done")[0]["reason"] == "closed"


def test_wren_speaks_the_same_alone_and_in_company(wren_url: str) -> None:
    async def main() -> None:
        texts = {"a": "Hello there.", "b": "How are you today?", "c": "So long."}
        alone = {}
        for ctx, text in texts.items():
            async with client(wren_url) as speaker:
                await speaker.say(text, ctx, seed=5)
                done = await speaker.done(ctx)
                assert done["samples"] == done["usage"]["model_frames"] * 3840  # type: ignore[index]
                assert done["metrics"]["text_pads"] == 0  # type: ignore[index]
                assert any(frame.flags & FLAG_SEGMENT_LAST for frame in speaker.frames(ctx))
            alone[ctx] = speaker.pcm(ctx)
        async with client(wren_url, "msgpack", "?audio=inline") as speaker:
            for ctx, text in texts.items():
                await speaker.say(text, ctx, seed=5)
            await speaker.done(*texts)
        assert {ctx: speaker.pcm(ctx) for ctx in texts} == alone

    run(main())


def test_wren_is_cancelled_and_replaced_and_is_whole_again(wren_url: str) -> None:
    async def main() -> None:
        async with client(wren_url) as speaker:
            await speaker.say("Hello there.", "alone", seed=5)
            await speaker.done("alone")
            for number in range(3):
                await speaker.say(TEXT, f"long {number}")
                await speaker.audio(f"long {number}")
                await speaker.send("open", ctx=f"new {number}", replaces="*", seed=5)
                await speaker.say("Hello there.", f"new {number}", seed=5)
                await speaker.done(f"long {number}", f"new {number}")
                assert speaker.pcm(f"new {number}") == speaker.pcm("alone")

    run(main())
