"""Cancel, replace, pause, leave: at any moment, and nothing stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
from collections.abc import AsyncIterator, Iterator

import pytest
from websockets.exceptions import ConnectionClosed

from realtime.models.base import Bundle
from realtime.server.settings import Limits
from realtime.server.wire import AudioFrame
from tests.fakes import FakeBackbone
from tests.server_fakes import DEADLINE_S, Client, Served, bundle, client, run, served, until

TEXT = "Hello there, my friend. This is the second sentence of three. Good bye!"
LONG = TEXT * 15


class Gate:
    """Lets the engine's steps pass, or holds them."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.num_waiting = 0

    def model(self) -> Bundle:
        return bundle(FakeBackbone(before_decode=self._pass))

    def _pass(self) -> None:
        self.num_waiting += 1
        self._open.wait(DEADLINE_S)
        self.num_waiting -= 1

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()


async def solo(server: Served, text: str, **fields: object) -> bytes:
    async with client(server) as speaker:
        await speaker.say(text, **fields)
        await speaker.done("0")
    return speaker.pcm()


def after(speaker: Client, message: dict[str, object]) -> list[object]:
    return [item for item in speaker.log[speaker.log.index(message) + 1 :]]


# ---- cancel


def test_cancel_is_a_barrier() -> None:
    async def main() -> None:
        async with served() as server, client(server) as speaker:
            await speaker.say(LONG, "a")
            await speaker.audio("a", 5)
            await speaker.send("cancel", ctx="a", reason="barge-in")
            done = await speaker.done("a")
            assert done["reason"] == "cancelled"
            assert done["samples"] == sum(frame.num_samples for frame in speaker.frames("a"))
            await until(lambda: not server.runtime.streams)
            await speaker.pong()
            assert all(not isinstance(item, AudioFrame) for item in after(speaker, done))

    run(main())


def test_cancel_before_the_first_frame_is_answered_while_the_engine_is_busy() -> None:
    async def main() -> None:
        gate = Gate()
        async with served(gate.model()) as server, client(server) as speaker:
            with gate.closed():
                await speaker.say(LONG, "a")
                await until(lambda: gate.num_waiting)
                await speaker.send("cancel", ctx="a")
                done = await speaker.done("a")  # nobody waited for the step
                assert (done["reason"], done["samples"]) == ("cancelled", 0)
            await until(lambda: not server.runtime.streams)
            await speaker.pong()
            assert not speaker.find("ctx.started") and not speaker.frames("a")

    run(main())


def test_cancel_of_a_context_that_waits_for_a_free_stream() -> None:
    async def main() -> None:
        gate = Gate()
        async with served(gate.model(), max_streams=1) as server, client(server) as speaker:
            with gate.closed():
                await speaker.say(TEXT, "a")
                await speaker.say(TEXT, "b")
                await speaker.pong()
                await until(lambda: len(server.runtime.streams) == 2)
                await speaker.send("cancel", ctx="b")
                assert (await speaker.done("b"))["samples"] == 0
                await until(lambda: len(server.runtime.streams) == 1)
            assert (await speaker.done("a"))["reason"] == "completed"

    run(main())


def test_cancel_of_a_context_whose_text_has_run_out() -> None:
    async def main() -> None:
        async with served() as server, client(server) as speaker:
            await speaker.send("text", ctx="a", text="The text stops here in the ")
            await until(lambda: any(r.starved_since_s for r in server.runtime.engine.scheduler.rows.values()))
            await speaker.send("cancel", ctx="a")
            await speaker.done("a")

    run(main())


def test_cancel_is_harmless_before_and_after_a_context_and_twice() -> None:
    async def main() -> None:
        async with served() as server, client(server) as speaker:
            for type in ("cancel", "flush", "end", "pause", "resume"):
                await speaker.send(type, ctx="never")
            await speaker.send("playout", ctx="never", samples=5)
            await speaker.say(LONG, "a")
            await speaker.audio("a")
            await speaker.send("cancel", ctx="a")
            await speaker.send("cancel", ctx="a")
            await speaker.say("Hello there.", "b")
            await speaker.done("a", "b")
            for type in ("cancel", "flush", "end", "pause", "resume"):
                await speaker.send(type, ctx="b")
            await speaker.send("playout", ctx="b", samples=5)
            await speaker.pong()
            assert len(speaker.find("ctx.done")) == 2
            assert not speaker.find("error") and not speaker.find("warn")

    run(main())


def test_cancel_of_everything() -> None:
    async def main() -> None:
        async with served() as server, client(server) as speaker:
            for ctx in "abcdef":
                await speaker.say(LONG, ctx)
            await speaker.audio("a")
            await speaker.send("cancel", ctx="*")
            await speaker.done(*"abcdef")
            assert {done["reason"] for done in speaker.find("ctx.done")} == {"cancelled"}
            await speaker.say("Hello there.", "g")
            assert (await speaker.done("g"))["reason"] == "completed"

    run(main())


def test_what_starts_in_the_moment_of_a_cancel_equals_itself_alone() -> None:
    async def main() -> None:
        async with served(max_streams=1) as server:
            format = {"sample_rate": 22_050}  # its filter has a memory, too
            alone = await solo(server, TEXT, format=format, seed=3)
            for _ in range(20):
                async with client(server) as speaker:
                    await speaker.say(LONG, "a", format=format, seed=1)
                    await speaker.audio("a", 3)
                    await speaker.send("cancel", ctx="a")
                    await speaker.say(TEXT, "b", format=format, seed=3)
                    await speaker.done("a", "b")
                    assert speaker.pcm("b") == alone

    run(main())


def test_start_cancel_start_twenty_times_on_one_connection() -> None:
    async def main() -> None:
        async with served(max_streams=1) as server:
            alone = await solo(server, TEXT)
            async with client(server) as speaker:
                for number in range(20):
                    await speaker.say(LONG, f"a{number}", seed=number)
                    await speaker.audio(f"a{number}", 1 + number % 4)
                    await speaker.send("cancel", ctx=f"a{number}")
                    await speaker.say(TEXT, f"b{number}")
                    await speaker.done(f"b{number}")
                    assert speaker.pcm(f"b{number}") == alone

    run(main())


# ---- replace


def test_replace_a_list_or_everything() -> None:
    async def main() -> None:
        async with served() as server:
            alone = await solo(server, TEXT)
            async with client(server) as speaker:
                for ctx in "abc":
                    await speaker.say(LONG, ctx)
                await speaker.audio("c")
                await speaker.send("open", ctx="d", replaces=["a", "b", "nobody"], seed=7)
                await speaker.done("a", "b")
                await speaker.say(TEXT, "d")
                await speaker.done("d")
                assert not speaker.find("ctx.done", "c")
                await speaker.send("open", ctx="e", replaces="*", seed=7)
                await speaker.say(TEXT, "e")
                await speaker.done("c", "e")
            reasons = {done["ctx"]: done["reason"] for done in speaker.find("ctx.done")}
            assert reasons == {c: "replaced" for c in "abc"} | {"d": "completed", "e": "completed"}
            assert speaker.pcm("d") == speaker.pcm("e") == alone

    run(main())


def test_an_id_may_replace_itself_again_and_again() -> None:
    async def main() -> None:
        async with served() as server, client(server) as speaker:
            await speaker.say(LONG)
            await speaker.audio()
            for _ in range(3):
                await speaker.send("open", ctx="0", replaces="*", seed=7)
                await speaker.say(LONG)
                await speaker.next()
            await speaker.send("open", ctx="0", replaces=["0"], seed=7)
            await speaker.say(TEXT)
            await speaker.wait("ctx.done", reason="completed")
            await speaker.say(TEXT)  # ended by the client itself: like a new one
            while len(speaker.find("ctx.done", reason="completed")) < 2:
                await speaker.next()
            assert not speaker.find("warn") and not speaker.find("error")
            assert [d["reason"] for d in speaker.find("ctx.done")] == ["replaced"] * 4 + ["completed"] * 2

    run(main())


def test_what_replaces_at_full_capacity_gets_that_permit() -> None:
    async def main() -> None:
        async with served(max_streams=1) as server, client(server) as speaker:
            await speaker.say(LONG, "a")
            await speaker.audio("a")
            await speaker.say(TEXT, "queued")
            await speaker.send("open", ctx="b", replaces=["a"], seed=7)
            await speaker.say(TEXT, "b")
            await speaker.done("b", "queued")
            order = [message["ctx"] for message in speaker.find("ctx.started")]
            assert order == ["a", "b", "queued"]

    run(main())


def test_a_refused_replacement_replaces_nothing() -> None:
    async def main() -> None:
        async with served() as server, client(server) as speaker:
            await speaker.say(TEXT, "a")
            await speaker.send("open", ctx="b", replaces=["a"], voice="nobody")
            await speaker.send("open", ctx="c", replaces=[3])
            done = await speaker.done("b", "a")
            assert done["reason"] == "completed"
            assert speaker.find("ctx.done", "b")[0]["reason"] == "error"
            codes = [error["code"] for error in speaker.find("error")]
            assert codes == ["voice_not_found", "invalid_param"]

    run(main())


# ---- pause


def test_pause_holds_and_resume_loses_nothing() -> None:
    async def main() -> None:
        async with served() as server:
            alone = await solo(server, TEXT * 4)
            async with client(server) as speaker:
                await speaker.say(TEXT * 4, "a")
                await speaker.audio("a", 3)
                await speaker.send("pause", ctx="a")
                await speaker.send("pause", ctx="a", ttl_ms=60_000)
                await speaker.pong()
                num_frames = len(speaker.frames("a"))
                await speaker.say(TEXT, "b")
                await speaker.done("b")
                assert len(speaker.frames("a")) == num_frames < 100
                assert not speaker.find("ctx.done", "a")
                await speaker.send("resume", ctx="a")
                await speaker.done("a")
            assert speaker.pcm("a") == alone

    run(main())


def test_a_paused_context_is_cancelled_when_its_time_is_over() -> None:
    async def main() -> None:
        async with served() as server, client(server) as speaker:
            await speaker.say(LONG, "a")
            await speaker.audio("a", 3)
            await speaker.send("pause", ctx="a", ttl_ms=50)
            assert (await speaker.done("a"))["reason"] == "cancelled"

    run(main())


def test_a_context_paused_before_it_speaks_stays_silent() -> None:
    async def main() -> None:
        async with served() as server:
            alone = await solo(server, TEXT)
            async with client(server) as speaker:
                await speaker.send("open", ctx="a", seed=7)
                await speaker.send("pause", ctx="a", ttl_ms=60_000)
                await speaker.say(TEXT, "a")
                await speaker.say(TEXT, "b")
                await speaker.done("b")
                assert not speaker.frames("a")
                await speaker.send("resume", ctx="a")
                await speaker.done("a")
            assert speaker.pcm("a") == alone

    run(main())


# ---- idle


def test_a_context_without_text_or_activity_ends_by_itself() -> None:
    async def main() -> None:
        async with served() as server, client(server) as speaker:
            await speaker.send("session", ctx_idle_ms=100)
            await speaker.send("open", ctx="empty")
            await speaker.send("text", ctx="half", text="A sentence that stops in the mid")
            assert (await speaker.done("empty"))["samples"] == 0
            done = await speaker.done("half")
            assert done["samples"] and done["c_spoken"] == 32
            assert {message["reason"] for message in speaker.find("ctx.done")} == {"timeout"}
            await speaker.say("More of it.", "half")
            await speaker.wait("warn", "half", code="ctx_ended")
            await speaker.send("open", ctx="half")
            await speaker.say("More of it.", "half")
            await speaker.wait("ctx.done", "half", reason="completed")

    run(main())


def test_a_context_that_still_speaks_or_waits_for_its_turn_is_not_idle() -> None:
    async def main() -> None:
        gate = Gate()
        async with served(gate.model(), max_streams=1) as server, client(server) as speaker:
            await speaker.send("session", ctx_idle_ms=100)
            with gate.closed():
                await speaker.send("text", ctx="a", text="This is a whole sentence, spoken slowly. ")
                await speaker.send("text", ctx="b", text="This one waits for a free stream. ")
                await until(lambda: gate.num_waiting)
                await asyncio.sleep(0.3)  # what is looked for is that nothing happens
                await speaker.pong()
                assert not speaker.find("ctx.done")
                await speaker.send("text", ctx="a", text="And more.", end=True)
                await speaker.send("text", ctx="b", text="And more.", end=True)
                await speaker.pong()
            await speaker.done("a", "b")
            assert {message["reason"] for message in speaker.find("ctx.done")} == {"completed"}
            assert not speaker.find("warn")

    run(main())


# ---- slow readers


@contextlib.asynccontextmanager
async def slow_client(server: Served, query: str) -> AsyncIterator[Client]:
    """Its socket takes next to nothing while nobody reads."""
    narrow = socket.socket()
    narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    narrow.setblocking(False)
    await asyncio.get_running_loop().sock_connect(narrow, ("127.0.0.1", server.port))
    async with client(server, "json", query, sock=narrow, max_queue=1, close_timeout=0.5) as speaker:
        yield speaker


WIDE = "?encoding=pcm_f32le&channels=2"


def test_a_slow_reader_holds_its_own_stream_only_and_is_still_read() -> None:
    async def main() -> None:
        limits = Limits(max_unsent_ms=1000)
        async with served(limits=limits) as server, slow_client(server, WIDE) as slow:
            await slow.say(LONG, "a")
            await until(lambda: any(r.held for r in server.runtime.engine.scheduler.rows.values()))
            (row,) = server.runtime.engine.scheduler.rows.values()
            (session,) = server.app._sessions
            (context,) = session._contexts.values()
            assert 1.0 < context.unsent_s < 1.0 + 2.5, "the limit, and what was on its way"
            num_frames = row.num_frames
            for _ in range(3):
                await solo(server, TEXT)  # the others keep their pace
            assert row.num_frames == num_frames
            await slow.send("cancel", ctx="a")  # read, though not a byte can be written
            await until(lambda: not server.runtime.streams)
            assert (await slow.done("a"))["reason"] == "cancelled"

    run(main())


def test_a_slow_reader_that_goes_on_loses_nothing() -> None:
    async def main() -> None:
        async with served(limits=Limits(max_unsent_ms=500)) as server:
            alone = await solo(server, LONG[:600], format={"encoding": "pcm_f32le", "channels": 2})
            async with slow_client(server, WIDE) as slow:
                await slow.say(LONG[:600], "a")
                await until(lambda: any(r.held for r in server.runtime.engine.scheduler.rows.values()))
                await slow.done("a")
            assert slow.pcm("a") == alone

    run(main())


def test_all_contexts_go_on_when_the_connections_backlog_shrinks() -> None:
    """Each of them had too little unsent to be looked at again by its own frames."""

    async def main() -> None:
        limits = Limits(max_unsent_bytes=400_000)
        async with served(limits=limits, max_streams=8) as server, slow_client(server, WIDE) as slow:
            ctxs = [f"c{i}" for i in range(8)]
            for ctx in ctxs:
                await slow.say(TEXT * 2, ctx)
            rows = server.runtime.engine.scheduler.rows
            await until(lambda: sum(row.held for row in list(rows.values())) >= 4)
            await slow.done(*ctxs)
            assert {done["reason"] for done in slow.find("ctx.done")} == {"completed"}

    run(main())


def test_a_client_that_reads_nothing_for_too_long_is_closed_with_4008() -> None:
    async def main() -> None:
        limits = Limits(max_unsent_ms=1000, stall_ms=200)
        async with served(limits=limits) as server, slow_client(server, WIDE) as slow:
            await slow.say(LONG, "a")
            async with client(server) as other:
                await other.say(TEXT)
                await other.done("0")
            await until(lambda: any("nothing was read" in r.getMessage() for r in server.log.records))
            assert (await slow.rest())[0] == 4008
            await until(lambda: not server.runtime.streams)

    run(main())


def test_a_client_that_asks_more_than_it_reads_is_closed() -> None:
    """It reads now and then, so it is never stalled; what it has not read must not grow for ever."""

    async def main() -> None:
        limits = Limits(max_unread_messages=300, stall_ms=600_000)
        async with served(limits=limits) as server, slow_client(server, "") as slow:
            reading = asyncio.create_task(_read_a_little(slow))
            try:
                await slow.pong()
                with contextlib.suppress(ConnectionClosed):
                    while server.app.num_sessions:
                        await slow.send("ping", id="x" * 64)
                        await asyncio.sleep(0)
                assert any("answers" in record.getMessage() for record in server.log.records)
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)

    run(main())


async def _read_a_little(slow: Client) -> None:
    while True:
        await asyncio.sleep(0.2)
        await slow.next()


# ---- anything, anywhere


async def abuse(server: Served, rng: random.Random) -> None:
    """One connection that ends somehow, somewhere."""
    codec = rng.choice(["json", "msgpack"])
    async with client(server, codec, rng.choice(["", "?audio=inline", "?sample_rate=8000"])) as speaker:
        ctxs = [f"c{i}" for i in range(rng.randint(1, 3))]
        for ctx in ctxs:
            await speaker.say(TEXT * rng.randint(1, 2), ctx, end=rng.random() < 0.7)
        with contextlib.suppress(TimeoutError):  # nothing more may come where the text has no end
            async with asyncio.timeout(0.05):
                for _ in range(rng.choice([0, 0, 1, 3, 10, 25])):
                    await speaker.next()
        match rng.randrange(8):
            case 0:
                speaker.socket.transport.abort()
            case 1:
                await speaker.socket.close()
            case 2:
                await speaker.send("close", drain=False)
                await speaker.rest()
            case 3:
                for ctx in ctxs:
                    await speaker.send("cancel", ctx=ctx)
                await speaker.done(*ctxs)
            case 4:
                await speaker.send("open", ctx="new", replaces="*")
                await speaker.say(TEXT, "new")
                await speaker.done(*ctxs, "new")
            case 5:
                await speaker.send("cancel", ctx="*")
                speaker.socket.transport.abort()
            case 6:
                await speaker.send("close", drain=True)
                assert (await speaker.rest())[0] == 1000
                assert len(speaker.find("ctx.done")) == len(ctxs)
            case 7:
                await speaker.send("pause", ctx=ctxs[0], ttl_ms=rng.randint(1, 20))


def test_five_hundred_aborts_leave_nothing_behind() -> None:
    async def main() -> None:
        async with served(max_streams=3, queue_s=60) as server:
            before = await solo(server, TEXT)

            async def worker(seed: int) -> None:
                rng = random.Random(seed)
                for _ in range(50):
                    await abuse(server, rng)

            await asyncio.gather(*(worker(seed) for seed in range(10)))
            await until(server.is_idle, "everything is free")
            assert await solo(server, TEXT) == before
            # The block's end looks for tasks, and at the log.

    run(main())


def test_an_error_inside_one_context_is_told_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with served() as server, client(server) as speaker:
            server.expected_errors.append("ZeroDivisionError")
            await speaker.say(LONG, "a")
            await speaker.say(TEXT, "b")
            await speaker.audio("a", 2)
            for session in server.app._sessions:
                monkeypatch.setattr(session._contexts["a"], "_find_onset", lambda pcm: 1 // 0)
            done = await speaker.done("a")
            assert done["reason"] == "error"
            error = speaker.find("error", "a")[0]
            assert (error["scope"], error["code"], error["retryable"]) == ("ctx", "engine_error", True)
            assert "ZeroDivision" not in str(error["message"])
            assert (await speaker.done("b"))["reason"] == "completed"

    run(main())


def test_a_failing_step_ends_its_streams_only_and_says_how_much_was_sent() -> None:
    async def main() -> None:
        model = FakeBackbone()
        async with served(bundle(model)) as server, client(server) as speaker:
            server.expected_errors += ["step failed", "boom"]
            await speaker.say(LONG, "a", pacing={"max_lead_ms": 500})
            await speaker.audio("a", 5)
            model.error = RuntimeError("boom")
            done = await speaker.done("a")
            (error,) = speaker.find("error")
            assert (error["scope"], error["ctx"], error["code"]) == ("ctx", "a", "engine_error")
            assert error["samples"] == done["samples"] and error["retryable"] is True
            assert done["reason"] == "error" and "boom" not in str(error)
            await speaker.say(TEXT, "b")
            assert (await speaker.done("b"))["reason"] == "completed"

    run(main())


def test_a_full_server_says_so_after_the_wait() -> None:
    async def main() -> None:
        gate = Gate()
        async with served(gate.model(), max_streams=1, queue_s=0.05) as server, client(server) as speaker:
            with gate.closed():
                await speaker.say(TEXT, "a")
                await until(lambda: gate.num_waiting)
                await speaker.say(TEXT, "b")
                done = await speaker.done("b")
                (error,) = speaker.find("error", "b")
                assert (error["code"], error["scope"]) == ("overloaded", "ctx") and done["reason"] == "error"
                assert error["retry_after_ms"] and error["samples"] == 0
            assert (await speaker.done("a"))["reason"] == "completed"
            await speaker.say(TEXT, "c")
            await speaker.done("c")

    run(main())
