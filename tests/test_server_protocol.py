"""What a client may get wrong, and the rules of ids, limits and closing."""

from __future__ import annotations

import asyncio
import json

import msgpack
import pytest

from realtime.server import protocol
from realtime.server.settings import Limits
from realtime.server.wire import AudioFrame
from tests.server_fakes import RATE, Client, Served, client, run, served

TEXT = "Hello there, my friend. This is the second sentence of three. Good bye!"


async def say_on(server: Served) -> bytes:
    """A whole utterance on a connection of its own."""
    async with client(server) as speaker:
        await speaker.say(TEXT)
        assert (await speaker.done("0"))["reason"] == "completed"
    return speaker.pcm()


# ---- what can't be understood

JUNK = [
    "",
    "x",
    "{",
    "[]",
    "null",
    "5",
    '"text"',
    '{"type": 5}',
    "{}",
    "[" * 100_000,
    '{"a":' * 5000,
    "NaN",
    '{"type": NaN}',
    b"{}",
    " " * 1_000_000,
    '{"type":"text","text":"\\ud83d',
    '{"\\ud83d":' + "[" * 50_000,
]
PACKED_JUNK = [
    b"",
    b"\xc1",
    b"\x80\x80",
    b"\x93\x01\x02\x03",
    b"\xdf\xff\xff\xff\xff",
    b"\xdd\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\x91" * 100_000,
    b"\x81\x01\x02",
    b"\x81\xa1a",
    b"\x81\xa1\xff\x01",
    "{}",
    b"\x01" * 64,
    b" " * 1_000_000,
]


@pytest.mark.parametrize(("codec", "junk"), [("json", JUNK), ("msgpack", PACKED_JUNK)])
def test_junk_is_refused_message_by_message(codec: str, junk: list[str | bytes]) -> None:
    async def main() -> None:
        async with served() as server, client(server, codec) as speaker:
            await speaker.say(TEXT, "a")
            for number, frame in enumerate(junk, 1):
                await speaker.socket.send(frame)
                while len(speaker.find("error")) < number:
                    await speaker.next()
                error = speaker.find("error")[-1]
                assert (error["code"], error["scope"]) == ("bad_message", "message"), frame[:40]
                assert len(str(error["message"])) < 300
            assert (await speaker.done("a"))["reason"] == "completed"

    run(main())


WRONG = [
    ({"type": "sing"}, "unknown_type"),
    ({"type": "text"}, "invalid_param"),
    ({"type": "text", "text": 5}, "invalid_param"),
    ({"type": "text", "text": "a", "ctx": 5}, "invalid_param"),
    ({"type": "text", "text": "a", "ctx": ""}, "invalid_param"),
    ({"type": "text", "text": "a", "ctx": "x" * 65}, "invalid_param"),
    ({"type": "text", "text": "a", "ctx": "*"}, "invalid_param"),
    ({"type": "text", "text": "a", "ctx": "\ud83d"}, "invalid_param"),
    ({"type": "text", "text": "a", "end": 1}, "invalid_param"),
    ({"type": "text", "text": "\udc00 second half first"}, "bad_message"),
    ({"type": "text", "text": "x" * 65_537}, "payload_too_large"),
    ({"type": "text", "text": "x" * 30_000}, "text_overflow"),
    ({"type": "cancel", "played_ms": -1}, "invalid_param"),
    ({"type": "playout"}, "invalid_param"),
    ({"type": "pause", "ttl_ms": 0}, "invalid_param"),
    ({"type": "ping", "t": "now"}, "invalid_param"),
    ({"type": "ping", "id": [1]}, "invalid_param"),
    ({"type": "session", "format": []}, "invalid_param"),
    ({"type": "session", "format": {"sample_rate": 12_345}}, "format_unsupported"),
    ({"type": "session", "speed": "fast", "seed": 2**60}, "invalid_param"),
    ({"type": "session", "model": "another"}, "invalid_param"),
    ({"type": "session", "language": "xx"}, "language_unsupported"),
    ({"type": "resume_session", "token": "t", "ctxs": {}}, "resume_failed"),
    ({"type": "resume_session"}, "invalid_param"),
]


def test_a_message_that_is_wrong_has_no_effect() -> None:
    async def main() -> None:
        async with served() as server, client(server) as speaker:
            await speaker.say(TEXT, "a")
            for number, (message, code) in enumerate(WRONG):
                await speaker.raw({**message, "ref": number})
                error = await speaker.wait("error", ref=number)
                assert (error["code"], error["scope"]) == (code, "message"), message
            await speaker.done("a")
            await speaker.pong()
            assert len(speaker.find("ctx.done")) == 1, "none of them opened a context"
            (session,) = server.app._sessions
            assert not session._contexts

    run(main())


def test_a_refused_text_takes_no_half_character_with_it() -> None:
    async def main() -> None:
        limits = Limits(max_pending_chars=100)
        async with served(limits=limits) as server, client(server) as speaker:
            await speaker.send("text", text="One \ud83d", trigger={"mode": "manual"})
            await speaker.send("text", text="\ude00" + "x" * 100, ref="refused")
            error = await speaker.wait("error", ref="refused")
            assert error["code"] == "text_overflow"
            await speaker.send("text", text="\ude00 two.", end=True)
            done = await speaker.done("0")
            assert done["usage"]["chars"] == len("One X two.")  # type: ignore[index]
            assert len(speaker.find("error")) == 1

    run(main())


def test_a_wrong_setting_fails_its_context_and_closes_the_door_behind_it() -> None:
    cases = [
        ({"voice": "nobody"}, "voice_not_found"),
        ({"voice": {"audio": "", "text": ""}}, "invalid_param"),
        ({"language": "xx-YY"}, "language_unsupported"),
        ({"model": "another"}, "invalid_param"),
        ({"format": {"encoding": "opus"}}, "format_unsupported"),
        ({"format": {"channels": 3}}, "format_unsupported"),
        ({"trigger": {"mode": "never"}}, "invalid_param"),
        ({"ctx_idle_ms": 5}, "invalid_param"),
        ({"pacing": {"max_lead_ms": 50}}, "invalid_param"),
        ({"priority": 10}, "invalid_param"),
    ]

    async def main() -> None:
        async with served() as server, client(server) as speaker:
            for number, (fields, code) in enumerate(cases):
                for type in ("text", "open"):
                    ctx = f"{type}{number}"
                    await speaker.raw({"type": type, "ctx": ctx, "text": "Hello.", "ref": ctx, **fields})
                    await speaker.send("text", ctx=ctx, text=" And more.")
                    done = await speaker.done(ctx)
                    (error,) = speaker.find("error", ctx)
                    assert (error["code"], error["scope"], error["ref"]) == (code, "ctx", ctx)
                    assert (done["reason"], done["samples"]) == ("error", 0)
                    await speaker.wait("warn", ctx, code="ctx_ended")
            await speaker.send("open", ctx="text0")
            await speaker.say(TEXT, "text0")
            await speaker.wait("ctx.done", "text0", reason="completed")

    run(main())


def test_a_text_frame_that_is_not_utf_8_closes_with_1007() -> None:
    async def main() -> None:
        async with served() as server, client(server) as speaker:
            server.expected_errors.append("Invalid UTF-8")
            async with client(server) as broken:
                await broken.say(TEXT)
                await broken.socket.send(b'{"type":"ping","id":"\xff"}', text=True)
                assert (await broken.rest())[0] == 1007
            await speaker.say(TEXT)
            await speaker.done("0")

    run(main())


def test_a_message_above_the_limit_closes_with_1009_and_one_at_it_does_not() -> None:
    async def main() -> None:
        async with served() as server, client(server) as speaker:
            await speaker.socket.send(json.dumps({"type": "ping", "id": "big"}).ljust(2**20))
            await speaker.wait("pong", id="big")
            await speaker.socket.send(" " * (2**20 + 1))
            assert (await speaker.rest())[0] == 1009

    run(main())


def test_twenty_unparsable_messages_in_a_row_close_with_4400() -> None:
    async def main() -> None:
        async with served() as server, client(server) as other, client(server) as speaker:
            await other.say(TEXT)
            for _ in range(3):  # a good one in between starts the count again
                for _ in range(19):
                    await speaker.socket.send("?")
                await speaker.pong()
            for _ in range(30):
                await speaker.socket.send("?")
            assert (await speaker.rest())[0] == 4400
            last = speaker.find("error", scope="connection")
            assert [error["code"] for error in last] == ["bad_message"]
            assert (await other.done("0"))["reason"] == "completed"

    run(main())


def test_ten_thousand_tiny_messages_are_all_answered() -> None:
    async def main() -> None:
        async with served() as server, client(server) as flood, client(server) as other:
            sending = asyncio.create_task(_ping(flood, 10_000))
            await other.say(TEXT)
            await other.done("0")
            await flood.wait("pong", id=9_999)
            await sending
            assert [pong["id"] for pong in flood.find("pong")] == list(range(10_000))
            (warning,) = flood.find("warn")
            assert warning["code"] == "rate_limited"

    run(main())


async def _ping(speaker: Client, count: int) -> None:
    for id in range(count):
        await speaker.send("ping", id=id)


def test_many_messages_in_one_packet_do_not_keep_the_loop_from_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        turns = 0

        def turn() -> None:
            nonlocal turns
            turns += 1
            asyncio.get_running_loop().call_soon(turn)

        seen: dict[int, int] = {}
        parse = protocol.parse

        def counted(*args: object) -> protocol.ClientMessage:
            seen[turns] = seen.get(turns, 0) + 1
            return parse(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(protocol, "parse", counted)
        async with served(limits=Limits(max_messages_per_s=100_000)) as server, client(server) as speaker:
            await speaker.pong()
            with pytest.raises(asyncio.CancelledError):
                asyncio.get_running_loop().call_soon(turn)
                ping = json.dumps({"type": "ping", "id": "x"})
                speaker.socket.transport.set_write_buffer_limits(high=2**22)
                await asyncio.gather(*(speaker.socket.send(ping) for _ in range(1000)))
                for _ in range(1000):
                    await speaker.next()
                raise asyncio.CancelledError
            turn_of_most = max(seen.values())
            assert turn_of_most < 400, "of 1,000"

    asyncio.run(main())


# ---- ids


def test_text_after_end_is_refused_until_the_context_is_done() -> None:
    async def main() -> None:
        async with served() as server, client(server) as speaker:
            await speaker.say(TEXT)
            await speaker.send("text", text="More.")
            await speaker.wait("warn", "0", code="ctx_ended")
            first = await speaker.done("0")
            assert first["usage"]["chars"] == len(TEXT)  # type: ignore[index]
            await speaker.say(TEXT)  # like a new one
            while len(speaker.find("ctx.done")) < 2:
                await speaker.next()
            assert [frame.seq for frame in speaker.frames("0")][0] == 0
            assert len(speaker.handles) == 2

    run(main())


def test_a_cancelled_id_takes_no_text_before_an_open() -> None:
    async def main() -> None:
        async with served() as server, client(server) as speaker:
            await speaker.send("text", ctx="a", text=TEXT)
            await speaker.send("cancel", ctx="a")
            await speaker.send("text", ctx="a", text="late")
            await speaker.wait("warn", "a", code="ctx_ended")
            await speaker.send("open", ctx="a")
            await speaker.say(TEXT, "a")
            await speaker.wait("ctx.done", "a", reason="completed")
            assert len(speaker.find("warn")) == 1

    run(main())


def test_open_of_a_live_id_is_refused_and_changes_nothing() -> None:
    async def main() -> None:
        async with served() as server, client(server) as speaker:
            await speaker.send("text", ctx="a", text=TEXT[:30], seed=7)
            await speaker.send("text", ctx="b", text=TEXT)
            await speaker.send("open", ctx="a", replaces=["b"], ref="r")
            error = await speaker.wait("error")
            assert (error["code"], error["scope"], error["ctx"]) == ("bad_message", "message", "a")
            assert error["ref"] == "r"
            await speaker.say(TEXT[30:], "a")
            await speaker.send("end", ctx="b")
            await speaker.done("a", "b")
            assert {done["reason"] for done in speaker.find("ctx.done")} == {"completed"}

    run(main())


def test_one_context_too_many_is_refused_and_an_end_makes_room() -> None:
    async def main() -> None:
        async with served() as server, client(server) as speaker:
            for number in range(32):
                await speaker.send("open", ctx=f"c{number}")
            await speaker.send("text", ctx="c32", text="Hello.")
            error = await speaker.wait("error", "c32")
            assert (error["code"], error["scope"]) == ("ctx_limit", "ctx")
            assert (await speaker.done("c32"))["reason"] == "error"
            await speaker.say(TEXT, "c0")  # ended, though still speaking
            await speaker.say(TEXT, "fits")
            await speaker.send("text", ctx="33rd", text="Hello.")
            await speaker.pong()
            assert not speaker.find("error", "33rd")
            # The one that is replaced has ended: it makes no room a second time.
            await speaker.send("open", ctx="too many", replaces=["c0"])
            await speaker.wait("error", "too many", code="ctx_limit")
            await speaker.send("open", ctx="instead", replaces=["c1"])
            await speaker.done("c1", "fits", "c0")
            await speaker.send("close", drain=False)
            await speaker.rest()
            assert not speaker.find("error", "instead")

    run(main())


def test_a_thousand_contexts_on_one_connection() -> None:
    async def main() -> None:
        async with served(queue_s=60) as server, client(server, "msgpack") as speaker:
            for first in range(0, 1000, 25):
                ctxs = [f"c{first + i}" for i in range(25)]
                for ctx in ctxs:
                    await speaker.say("Hi.", ctx, format={"sample_rate": RATE})
                await speaker.done(*ctxs)
            done = speaker.find("ctx.done")
            assert len(done) == 1000 == len(speaker.handles)
            assert {message["reason"] for message in done} == {"completed"}
            (session,) = server.app._sessions
            assert not session._contexts and not session._barred

    run(main())


def test_only_the_last_ended_ids_are_remembered() -> None:
    async def main() -> None:
        limits = Limits(max_ended_ids=3)
        async with served(limits=limits) as server, client(server) as speaker:
            for ctx in "abcd":
                await speaker.send("open", ctx=ctx)
                await speaker.send("cancel", ctx=ctx)
            await speaker.say("Hello there.", "d")
            await speaker.say("Hello there.", "a")
            await speaker.wait("ctx.done", "a", reason="completed")
            assert [warning["ctx"] for warning in speaker.find("warn")] == ["d"]

    run(main())


# ---- small talk


def test_ping_is_answered_with_what_it_brought() -> None:
    async def main() -> None:
        async with served() as server, client(server) as speaker:
            for id, t in ((1, 12.5), ("x", 10**12), (None, None)):
                await speaker.send("ping", id=id, t=t)
                pong = await speaker.wait("pong", id=id)
                assert (pong.get("id"), pong.get("t")) == (id, t)
                assert 0 < pong["rx_us"] <= pong["tx_us"]  # type: ignore[operator]

    run(main())


def test_a_field_that_cant_be_honoured_is_warned_of_once() -> None:
    async def main() -> None:
        async with served() as server, client(server, query="?words=word&phonemes=true") as speaker:
            for number in range(3):
                await speaker.say("Hello.", f"c{number}", style="sad", speed=1.5, phonemes=True)
            await speaker.say("Hello.", "plain", style=None, speed=1, words="none", phonemes=False)
            await speaker.done("c0", "c1", "c2", "plain")
            warned = [str(warning["message"]) for warning in speaker.find("warn", code="unsupported")]
            assert len(warned) == 3
            for name in ("style", "speed", "phonemes"):
                assert sum(f"'{name}'" in text for text in warned) == 1

    run(main())


def test_unknown_fields_and_parameters_are_ignored() -> None:
    async def main() -> None:
        async with served() as server, client(server, query="?colour=red&seed=x") as speaker:
            await speaker.say("Hello there.", colour="red", format={"shape": 3})
            assert (await speaker.done("0"))["reason"] == "completed"
            assert not speaker.find("warn") and not speaker.find("error")

    run(main())


@pytest.mark.parametrize("query", ["?sample_rate=x", "?voice=" + "%E4%BD%A0" * 100, "?words=maybe"])
def test_a_wrong_query_is_told_and_closes(query: str) -> None:
    async def main() -> None:
        async with served() as server, client(server, query=query) as speaker:
            code, reason = await speaker.rest()
            (error,) = speaker.find("error")
            assert error["scope"] == "connection" and code == 4400
            assert str(error["message"]).startswith(reason) and reason

    run(main())


# ---- closing


def test_close_with_drain_finishes_what_is_there() -> None:
    async def main() -> None:
        async with served() as server:
            alone = await say_on(server)
            async with client(server) as speaker:
                await speaker.send("text", ctx="open", text=TEXT, seed=7)
                await speaker.say(TEXT, "ended")
                await speaker.send("close")
                await speaker.say(TEXT, "late")
                assert (await speaker.rest())[0] == 1000
                reasons = {done["ctx"]: done["reason"] for done in speaker.find("ctx.done")}
                assert reasons == {"open": "completed", "ended": "completed", "late": "error"}
                assert speaker.find("error", "late")[0]["code"] == "draining"
                assert speaker.pcm("open") == speaker.pcm("ended") == alone

    run(main())


def test_close_without_drain_ends_everything_at_once() -> None:
    async def main() -> None:
        async with served() as server, client(server) as speaker:
            await speaker.say(TEXT * 30, "a")
            await speaker.send("open", ctx="b")
            await speaker.audio("a")
            await speaker.send("close", drain=False)
            assert (await speaker.rest())[0] == 1000
            assert [done["reason"] for done in speaker.find("ctx.done")] == ["closed", "closed"]

    run(main())


def test_a_connection_where_nothing_is_said_closes() -> None:
    async def main() -> None:
        limits = Limits(connection_idle_ms=100)
        async with served(limits=limits) as server, client(server) as speaker:
            assert (await speaker.rest())[0] == 1000
            (error,) = speaker.find("error")
            assert (error["code"], error["scope"]) == ("idle_timeout", "connection")

    run(main())


def test_a_binary_control_message_never_looks_like_audio() -> None:
    async def main() -> None:
        async with served() as server, client(server, "msgpack") as speaker:
            await speaker.say(TEXT, metrics="full")
            await speaker.done("0")
            for item in speaker.log:
                if not isinstance(item, AudioFrame):
                    assert msgpack.packb(item)[0] != 1
            assert speaker.frames()

    run(main())
