from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal

import pytest
from fake_tts import RATE, FakeTTS, Item, frame, speak

from realtime.client import ConnectionFailed, SpeechError, connect
from realtime.errors import BadRequest, Overloaded
from realtime.server import events, protocol
from realtime.server.settings import Format

CODECS: list[Literal["json", "msgpack"]] = ["json", "msgpack"]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("audio", ["header", "inline"])
def test_text_goes_out_and_audio_comes_back(codec: Literal["json", "msgpack"], audio: str) -> None:
    async def run() -> None:
        tts = FakeTTS(audio=audio)
        async with tts.running() as url, connect(url, codec) as session:
            speech = session.context("t1", voice="en_1")
            await speech.send("Hello ")
            await speech.send("there.", end=True)
            frames = [received async for received in speech.audio()]

        assert frames == [frame(1, seq) for seq in range(3)]
        assert speech.done is not None and speech.done["reason"] == "completed"
        assert tts.received == [
            protocol.Text("t1", "Hello ", fields={"voice": "en_1"}),
            protocol.Text("t1", "there.", end=True),
        ]

    asyncio.run(run())


def test_session_defaults_and_token_are_sent_first() -> None:
    async def run() -> None:
        tts = FakeTTS()
        async with tts.running() as url, connect(url, token="secret", voice="en_1") as session:
            assert (await session.ready())["native_rate"] == RATE
            first, second = session.context(), session.context()
            await first.send("a", end=True)
            await second.end()
            assert [event.type async for event in second][-1] == "ctx.done"

        assert tts.headers[0]["Authorization"] == "Bearer secret"
        assert tts.received == [
            protocol.SessionMessage({"voice": "en_1"}),
            protocol.Text("c1", "a", end=True),
            protocol.Open("c2", {}),
            protocol.End("c2"),
        ]

    asyncio.run(run())


def test_contexts_share_a_socket_and_get_only_their_own() -> None:
    async def run() -> None:
        async with FakeTTS().running() as url, connect(url) as session:
            first, second = session.context(), session.context()
            await first.send("one", end=True)
            await second.send("two", end=True)
            # The first one is never read while the second one is.
            assert [f.handle async for f in second.audio()] == [2, 2, 2]
            kinds = [event.type async for event in first]
            assert kinds == ["ctx.started", "audio", "audio", "audio", "ctx.done"]
            assert [event async for event in first] == []

    asyncio.run(run())


def test_the_clock_stamps_what_is_received() -> None:
    async def run() -> None:
        ticks = iter(range(100))
        async with FakeTTS().running() as url, connect(url, clock=lambda: float(next(ticks))) as session:
            speech = session.context()
            await speech.send("one", end=True)
            assert [event.received_s async for event in speech] == [1.0, 2.0, 3.0, 4.0, 5.0]  # 0: ready

    asyncio.run(run())


def test_after_cancel_only_the_end_is_told() -> None:
    def endless(ctx: str, handle: int, text: str) -> Sequence[Item]:
        return speak(ctx, handle, text)[:-1]

    async def run() -> None:
        tts = FakeTTS(endless)
        async with tts.running() as url, connect(url) as session:
            speech = session.context("a")
            await speech.send("one", end=True)
            async for _ in speech.audio():
                break
            await speech.cancel(played_samples=480)
            kinds = [event.type async for event in speech]
            assert kinds[-1] == "ctx.done"
            assert tts.received[-1] == protocol.Cancel("a", played_samples=480)
            session.context("a")  # the id is free again

    asyncio.run(run())


def test_a_barge_in_replaces_in_one_message() -> None:
    async def run() -> None:
        tts = FakeTTS()
        async with tts.running() as url, connect(url) as session:
            session.context("a")
            with pytest.raises(ValueError, match="'a' is not done"):
                session.context("a")
            second = session.context("b", replaces="*", seed=1)
            await second.send("two", end=True)
            async for _ in second:
                pass
        assert tts.received == [protocol.Open("b", {"seed": 1}, "*"), protocol.Text("b", "two", end=True)]

    asyncio.run(run())


def test_an_error_about_a_context_is_raised_with_the_servers_words() -> None:
    def refuse(ctx: str, handle: int, text: str) -> Sequence[Item]:
        if text == "fine":
            return speak(ctx, handle, text)
        error = Overloaded("no room before 900 ms", retry_after_ms=900)
        return [
            events.error(error, "ctx", ctx=ctx),
            events.ctx_done(ctx, "error", samples=0, c_spoken=0),
        ]

    async def run() -> None:
        async with FakeTTS(refuse).running() as url, connect(url) as session:
            speech, other = session.context(), session.context()
            await speech.send("one", end=True)
            with pytest.raises(SpeechError, match="no room before 900 ms") as caught:
                async for _ in speech.audio():
                    pass
            assert (caught.value.code, caught.value.retryable) == ("overloaded", True)
            assert caught.value.retry_after_ms == 900
            await other.send("fine", end=True)  # which goes on
            assert len([f async for f in other.audio()]) == 3

    asyncio.run(run())


def test_an_error_about_the_session_is_told_to_every_context() -> None:
    def refuse(ctx: str, handle: int, text: str) -> Sequence[Item]:
        return [events.error(BadRequest("no such voice", code="voice_not_found"), "message")]

    async def run() -> None:
        async with FakeTTS(refuse).running() as url, connect(url, voice="x") as session:
            speech = session.context()
            await speech.send("one", end=True)
            for context in (speech, speech, session.context()):
                with pytest.raises(SpeechError, match="no such voice"):
                    async for _ in context:
                        pass

    asyncio.run(run())


@pytest.mark.parametrize("with_words", [True, False])
def test_a_lost_connection_is_raised_with_the_servers_last_words(with_words: bool) -> None:
    def leave(ctx: str, handle: int, text: str) -> Sequence[Item]:
        words = events.error(BadRequest("twenty in a row", code="bad_message"), "connection")
        return [*speak(ctx, handle, text)[:2], *([words] if with_words else []), b"go away"]

    async def run() -> None:
        async with FakeTTS(leave).running() as url, connect(url) as session:
            speech = session.context()
            await speech.send("one", end=True)
            words = "twenty in a row" if with_words else "closed with 4400: go away"
            kind = SpeechError if with_words else ConnectionFailed
            with pytest.raises(kind, match=words):
                async for _ in speech.audio():
                    pass
            with pytest.raises(kind, match=words):
                await speech.send("more")

    asyncio.run(run())


def test_junk_from_the_server_is_a_failed_connection() -> None:
    def junk(ctx: str, handle: int, text: str) -> Sequence[Item]:
        started = events.ctx_started(ctx, handle, Format(sample_rate=RATE), None)
        return [started, {"type": "audio", "ctx": ctx, "data": "?"}]

    async def run() -> None:
        async with FakeTTS(junk).running() as url, connect(url) as session:
            speech = session.context()
            await speech.send("one", end=True)
            with pytest.raises(ConnectionFailed, match="can't be understood"):
                async for _ in speech:
                    pass

    asyncio.run(run())


def test_no_server_is_a_failed_connection() -> None:
    async def run(url: str) -> None:
        async with connect(url):
            pass

    with pytest.raises(ConnectionFailed, match="can't connect to ws://127.0.0.1:9/"):
        asyncio.run(run("ws://127.0.0.1:9/"))
    with pytest.raises(ConnectionFailed, match="can't connect"):
        asyncio.run(run("no url"))


def test_a_refused_upgrade_tells_the_servers_words() -> None:
    async def run() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            body = b"too many connections"
            head = f"HTTP/1.1 503 Busy\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            writer.write(head.encode() + body)
            await writer.drain()
            writer.close()
            await writer.wait_closed()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            with pytest.raises(ConnectionFailed, match="503 Busy: too many connections"):
                async with connect(f"ws://127.0.0.1:{port}/"):
                    pass

    asyncio.run(run())
