"""What is heard: formats, order on the wire, text however it comes, flush and end."""

from __future__ import annotations

import asyncio
import json
import random
import threading

import pytest
from websockets.frames import Frame, Opcode

from realtime.audio import SAMPLE_BYTES, SAMPLE_RATES
from realtime.server.settings import Limits
from realtime.server.wire import FLAG_LAST, FLAG_SEGMENT_LAST, FLAG_SILENCE, AudioFrame
from tests.fakes import FakeBackbone
from tests.server_fakes import HOP, RATE, Client, Served, bundle, client, ctx_of, run, served, until

TEXT = "Hello there, my friend. This is the second sentence of three. Good bye!"


async def solo(server: Served, text: str, codec: str = "json", **fields: object) -> Client:
    """A context alone on its connection, from its first message to its end."""
    async with client(server, codec) as speaker:
        await speaker.say(text, **fields)
        await speaker.done("0")
    return speaker


def num_frames(done: dict[str, object]) -> int:
    usage = done["usage"]
    assert isinstance(usage, dict)
    return int(usage["model_frames"])


# ---- formats


@pytest.mark.parametrize("codec", ["json", "msgpack"])
@pytest.mark.parametrize("audio", ["header", "inline"])
def test_every_format_has_exactly_the_models_samples_converted(codec: str, audio: str) -> None:
    async def main() -> None:
        async with served() as server:
            for rate in SAMPLE_RATES:
                for encoding in ("pcm_s16le", "pcm_f32le"):
                    for channels in (1, 2):
                        format = {"sample_rate": rate, "encoding": encoding, "channels": channels}
                        speaker = await solo(server, TEXT, codec, format=format, audio=audio)
                        (done,) = speaker.find("ctx.done")
                        (started,) = speaker.find("ctx.started")
                        assert started["format"] == format
                        assert done["samples"] == round(num_frames(done) * HOP * rate / RATE)
                        unit = SAMPLE_BYTES[encoding] * channels
                        for frame in speaker.frames():
                            assert len(frame.payload) == frame.num_samples * unit
                            assert frame.num_samples <= rate * 80 // 1000

    run(main())


def test_header_and_inline_audio_and_both_codecs_carry_the_same_bytes() -> None:
    async def main() -> None:
        async with served() as server:
            heard = {
                (await solo(server, TEXT, codec, audio=audio)).pcm()
                for codec in ("json", "msgpack")
                for audio in ("header", "inline")
            }
            assert len(heard) == 1

    run(main())


def test_stereo_is_mono_twice() -> None:
    async def main() -> None:
        async with served() as server:
            mono = (await solo(server, TEXT)).pcm()
            stereo = (await solo(server, TEXT, format={"channels": 2})).pcm()
            assert stereo[::4] == mono[::2] == stereo[2::4]

    run(main())


@pytest.mark.parametrize("frame_ms", [10, 500])
def test_frame_ms_is_the_most_audio_in_a_frame(frame_ms: int) -> None:
    async def main() -> None:
        async with served() as server:
            format = {"frame_ms": frame_ms, "channels": 2, "encoding": "pcm_f32le"}
            speaker = await solo(server, TEXT * 3, "json", audio="inline", format=format)
            longest = max(frame.num_samples for frame in speaker.frames())
            assert 48 * min(frame_ms, 240) <= longest <= 48 * frame_ms
            usual = await solo(server, TEXT * 3, format={"channels": 2, "encoding": "pcm_f32le"})
            assert speaker.pcm() == usual.pcm()

    run(main())


def test_query_shortcuts_set_the_defaults_of_a_connection() -> None:
    async def main() -> None:
        query = "?sample_rate=16000&encoding=pcm_f32le&channels=2&frame_ms=20&metrics=off&audio=inline&x=1"
        async with served() as server, client(server, None, query) as speaker:
            ready = await speaker.wait("session.ready")
            assert isinstance(ready["defaults"], dict)
            assert ready["defaults"]["format"] == {
                "encoding": "pcm_f32le",
                "sample_rate": 16_000,
                "channels": 2,
                "frame_ms": 20,
            }
            await speaker.say("Hello there.")
            done = await speaker.done("0")
            assert "metrics" not in done and "t" not in speaker.find("ctx.started")[0]
            assert all(frame.num_samples <= 320 for frame in speaker.frames())

    run(main())


def test_session_settings_hold_for_later_contexts_only() -> None:
    async def main() -> None:
        async with served() as server, client(server) as speaker:
            await speaker.send("text", ctx="a", text="Half a")
            await speaker.send("session", format={"sample_rate": 8000})
            await speaker.send("session", format={"channels": 2})
            await speaker.say(" sentence.", "a")
            await speaker.say("Another one.", "b")
            await speaker.say("A third.", "c", format={"sample_rate": 44_100})
            await speaker.done("a", "b", "c")
            formats = {message["ctx"]: message["format"] for message in speaker.find("ctx.started")}
            rates = {ctx: (f["sample_rate"], f["channels"]) for ctx, f in formats.items()}  # type: ignore
            assert rates == {"a": (48_000, 1), "b": (8_000, 2), "c": (44_100, 2)}

    run(main())


def test_a_bad_session_message_changes_nothing() -> None:
    async def main() -> None:
        async with served() as server, client(server) as speaker:
            await speaker.send("session", format={"sample_rate": 8000}, voice="nobody", ref="r1")
            error = await speaker.wait("error")
            assert (error["scope"], error["code"], error["ref"]) == ("message", "voice_not_found", "r1")
            await speaker.say("Hello there.")
            await speaker.done("0")
            assert speaker.find("ctx.started")[0]["format"]["sample_rate"] == 48_000  # type: ignore[index]

    run(main())


# ---- order on the wire


def test_segments_end_behind_their_audio_and_the_last_frame_is_marked() -> None:
    async def main() -> None:
        async with served() as server:
            speaker = await solo(server, TEXT, format={"sample_rate": RATE})
            ends = speaker.find("seg.done")
            assert [end["seg"] for end in ends] == [0, 1, 2]
            assert [end["c1"] for end in ends] == [23, 61, len(TEXT)]
            for end in ends:
                frames = frames_of(speaker, int(str(end["seg"])))
                check_marks(frames)
                assert frames[-1].pts + frames[-1].num_samples == end["pts_end"]
                at = speaker.log.index(end)
                assert speaker.log.index(frames[-1]) < at
            assert speaker.find("ctx.done")[0]["c_spoken"] == len(TEXT)

    run(main())


def frames_of(speaker: Client, seg: int) -> list[AudioFrame]:
    """Of a segment, without the empty one that may only carry the mark of the context's end."""
    return [frame for frame in speaker.frames() if frame.seg == seg and frame.flags != FLAG_LAST]


def check_marks(frames: list[AudioFrame]) -> None:
    marks = [bool(frame.flags & FLAG_SEGMENT_LAST) for frame in frames]
    assert marks == [False] * (len(frames) - 1) + [True]


def test_a_segments_last_frame_is_marked_also_when_it_was_sent_before_the_end_was_known() -> None:
    never = threading.Event()
    model = FakeBackbone(before_decode=lambda: never.wait(0.1) and None)  # so slow that nothing waits

    async def main() -> None:
        async with served(bundle(model)) as server:
            speaker = await solo(server, "Hello there. So long.", format={"sample_rate": RATE})
            for seg in range(2):
                check_marks(frames_of(speaker, seg))

    run(main())


def test_contexts_interleave_and_each_equals_itself_alone() -> None:
    async def main() -> None:
        async with served(max_streams=8) as server:
            texts = {f"c{i}": f"{TEXT} {'And more of it. ' * i}" for i in range(8)}
            alone = {ctx: (await solo(server, text, seed=i)).pcm() for i, (ctx, text) in _numbered(texts)}
            async with client(server) as speaker:
                for i, (ctx, text) in _numbered(texts):
                    await speaker.say(text, ctx, seed=i)
                await speaker.done(*texts)
            for ctx in texts:
                assert speaker.pcm(ctx) == alone[ctx], ctx
            turns = [ctx_of(item, speaker.handles) for item in speaker.log if isinstance(item, AudioFrame)]
            first_half = turns[: len(turns) // 2]
            assert set(first_half) == set(texts), "nobody waits until the others are done"

    run(main())


def _numbered(texts: dict[str, str]) -> list[tuple[int, tuple[str, str]]]:
    return list(enumerate(texts.items()))


def test_the_context_with_the_least_audio_ahead_goes_first() -> None:
    async def main() -> None:
        async with served() as server, client(server) as speaker:
            await speaker.say(TEXT * 8, "long")
            await speaker.audio("long", 20)
            await speaker.say("Hello there.", "short")
            await speaker.done("short")
            assert not speaker.find("ctx.done", "long")
            await speaker.done("long")

    run(main())


def test_the_same_seed_gives_the_same_samples_and_another_one_others() -> None:
    async def main() -> None:
        async with served() as server:
            one, two, other = [(await solo(server, TEXT, seed=seed)).pcm() for seed in (1, 1, 2)]
            assert one == two != other

    run(main())


def test_metrics_tell_what_was_asked_for() -> None:
    async def main() -> None:
        async with served() as server:
            full = (await solo(server, TEXT, metrics="full")).find("ctx.done")[0]["metrics"]
            first = (await solo(server, TEXT)).find("ctx.done")[0]["metrics"]
            assert isinstance(full, dict) and isinstance(first, dict)
            assert set(full) - set(first) == {"gap_ms"}
            assert first["text_pads"] == 0 and first["ttfa_us"] <= first["onset_us"]
            assert first["underrun_ms"] >= 0 and str(first["underrun_ms"])[0] != "-"

    run(main())


# ---- text


@pytest.mark.parametrize("trigger", ["sentence", "manual"])
@pytest.mark.parametrize("codec", ["json", "msgpack"])
def test_any_split_of_the_text_gives_the_same_samples(codec: str, trigger: str) -> None:
    text = "Grüße, 你好 \U0001f600 and a naïve café. It costs $3.50 (v2.0.1). [pause 120ms] **Bold** end."

    def pieces(seed: int) -> list[str | bytes]:
        rng = random.Random(seed)
        whole: str | bytes = text.encode() if codec == "msgpack" else _as_utf16_units(text)
        cuts = sorted(rng.sample(range(1, len(whole)), 12)) if seed else []
        return [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]

    async def main() -> None:
        async with served() as server:
            heard = set()
            for seed in range(6):
                async with client(server, codec) as speaker:
                    for piece in pieces(seed):
                        await speaker.send(
                            "text",
                            text=piece,
                            seed=7,
                            trigger={"mode": trigger},
                            format={"sample_rate": RATE},
                        )
                    await speaker.send("end")
                    done = await speaker.done("0")
                    assert done["usage"]["chars"] == len(text)  # type: ignore[index]
                    assert done["metrics"]["text_pads"] == 0  # type: ignore[index]
                    heard.add(speaker.pcm())
            assert len(heard) == 1 and heard != {b""}

    run(main())


def _as_utf16_units(text: str) -> str:
    """Astral characters as two surrogates, as a JavaScript string holds them."""
    units = text.encode("utf-16-le")
    return "".join(chr(int.from_bytes(units[i : i + 2], "little")) for i in range(0, len(units), 2))


def test_text_in_the_packet_of_the_upgrade_is_heard() -> None:
    async def main() -> None:
        async with served() as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            request = (
                "GET /v1/tts/stream HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n"
                "Connection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
                "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: tts1.json\r\n\r\n"
            )
            first = {"type": "text", "text": "Hello ", "seed": 7}
            second = {"type": "text", "text": "there.", "end": True}
            packet = request.encode()
            for message in (first, second):
                packet += Frame(Opcode.TEXT, json.dumps(message).encode()).serialize(mask=True)
            writer.write(packet)
            answer = b""
            while b"ctx.done" not in answer:
                piece = await asyncio.wait_for(reader.read(65536), 10)
                assert piece, answer[-200:]
                answer += piece
            assert b"session.ready" in answer
            heard = (await solo(server, "Hello there.")).pcm()
            assert heard[:2000] in answer
            writer.close()
            await writer.wait_closed()

    run(main())


def test_text_sent_before_session_ready_is_read_is_heard() -> None:
    async def main() -> None:
        async with served() as server, client(server) as speaker:
            await speaker.say("Hello there.")
            first = await speaker.next()
            assert isinstance(first, dict) and first["type"] == "session.ready"
            await speaker.done("0")

    run(main())


@pytest.mark.parametrize("text", ["\U0001f600", "!!!", "\U0001f600 \U0001f680", "Hi"])
def test_text_that_is_not_blank_gives_at_least_100_ms(text: str) -> None:
    async def main() -> None:
        async with served() as server:
            for rate in SAMPLE_RATES:
                speaker = await solo(server, text, format={"sample_rate": rate})
                (done,) = speaker.find("ctx.done")
                assert done["reason"] == "completed"
                assert done["samples"] >= rate // 10  # type: ignore[operator]
                silent = [frame for frame in speaker.frames() if frame.flags & FLAG_SILENCE]
                assert bool(silent) == (num_frames(done) < 2)
                for frame in silent:
                    assert not any(frame.payload) or num_frames(done)

    run(main())


@pytest.mark.parametrize("text", ["", " ", "\n\n \t"])
def test_blank_text_completes_without_audio(text: str) -> None:
    async def main() -> None:
        async with served() as server:
            speaker = await solo(server, text)
            (done,) = speaker.find("ctx.done")
            assert (done["reason"], done["samples"]) == ("completed", 0)
            assert not speaker.frames() and not speaker.find("ctx.started")

    run(main())


def test_a_pause_is_silence_of_its_length() -> None:
    async def main() -> None:
        async with served() as server:
            speaker = await solo(server, "[pause 1.5s]", format={"sample_rate": RATE})
            assert sum(frame.num_samples for frame in speaker.frames()) == 1.5 * RATE
            assert all(frame.flags & FLAG_SILENCE for frame in speaker.frames() if frame.num_samples)
            assert not any(speaker.pcm())
            between = await solo(server, "One, [pause 0.333s] two.", format={"sample_rate": RATE})
            silence = sum(frame.num_samples for frame in between.frames() if frame.flags & FLAG_SILENCE)
            assert silence == round(0.333 * RATE)

    run(main())


def test_what_cant_be_spoken_is_told_once() -> None:
    async def main() -> None:
        async with served() as server:
            speaker = await solo(server, "Hello 世界 \U0001f600 there.", format={"sample_rate": RATE})
            (warning,) = speaker.find("warn")
            assert warning["code"] == "unsupported" and warning["ctx"] == "0"

    run(main())


# ---- flush and end


def test_flush_speaks_what_came_and_never_closes() -> None:
    async def main() -> None:
        async with served() as server, client(server) as speaker:
            await speaker.send("text", text="This is one hal", seed=3, format={"sample_rate": RATE})
            await speaker.send("flush", id="first")
            first = await speaker.wait("flush.done", id="first")
            assert first["c1"] == 15 and first["pts"] == sum(f.num_samples for f in speaker.frames())
            assert speaker.frames()
            await speaker.send("flush", id=2)  # nothing is pending
            second = await speaker.wait("flush.done", id=2)
            assert (second["pts"], second["c1"]) == (first["pts"], 15)
            await speaker.send("text", text="f and more of it.", flush=True)
            third = await speaker.wait("flush.done", c1=32)
            assert "id" not in third and third["pts"] > first["pts"]  # type: ignore[operator]
            await speaker.send("text", text=" The end.", end=True)
            done = await speaker.done("0")
            assert done["samples"] > third["pts"] and done["reason"] == "completed"  # type: ignore[operator]

    run(main())


def test_flushes_are_answered_in_order_and_each_behind_its_audio() -> None:
    async def main() -> None:
        async with served() as server, client(server) as speaker:
            for number in range(10):
                await speaker.send("text", text=f"Sentence {number}, short.", seed=3)
                await speaker.send("flush", id=number)
            await speaker.send("flush", id=10)
            await speaker.send("end")
            await speaker.done("0")
            assert [answer["id"] for answer in speaker.find("flush.done")] == list(range(11))

    run(main())


def test_a_flush_before_any_text_is_answered_at_once() -> None:
    async def main() -> None:
        async with served() as server, client(server) as speaker:
            await speaker.send("open", ctx="a")
            await speaker.send("flush", ctx="a", id="x")
            answer = await speaker.wait("flush.done", "a")
            assert (answer["pts"], answer["c1"]) == (0, 0)
            await speaker.send("end", ctx="a")
            await speaker.done("a")

    run(main())


def test_text_of_a_flush_does_not_depend_on_what_follows() -> None:
    async def main() -> None:
        async with served() as server:
            alone = await solo(server, "This is one.", format={"sample_rate": RATE})
            async with client(server) as speaker:
                await speaker.send(
                    "text", text="This is one.", flush=True, seed=7, format={"sample_rate": RATE}
                )
                await speaker.send("text", text=" This is two.", end=True)
                await speaker.done("0")
            assert speaker.pcm().startswith(alone.pcm()[: alone.frames()[-1].pts * 2])
            assert len(speaker.pcm()) > len(alone.pcm())

    run(main())


def test_manual_waits_for_a_flush_and_sentence_for_a_sentence() -> None:
    async def main() -> None:
        async with served() as server, client(server) as speaker:
            await speaker.send("text", ctx="m", text=TEXT, trigger={"mode": "manual"})
            await speaker.send("text", ctx="s", text="This is a half sen", trigger={"mode": "sentence"})
            await speaker.say("This one is whole.", "other")
            await speaker.done("other")
            assert not speaker.find("ctx.started", "m") and not speaker.find("ctx.started", "s")
            await speaker.send("flush", ctx="m", id=1)
            await speaker.wait("flush.done", "m", c1=len(TEXT))
            await speaker.send("text", ctx="s", text="tence. And")
            await speaker.wait("seg.done", "s")
            await speaker.send("end", ctx="m")
            await speaker.send("end", ctx="s")
            await speaker.done("m", "s")

    run(main())


def test_max_wait_ms_acts_as_a_flush_that_nobody_asked_for() -> None:
    async def main() -> None:
        async with served() as server, client(server) as speaker:
            trigger = {"mode": "manual", "max_wait_ms": 30}
            await speaker.send("text", text="Wait for it", trigger=trigger)
            await speaker.wait("seg.done", "0")
            await speaker.send("text", text=" and again")
            await speaker.wait("seg.done", "0", seg=1)
            assert not speaker.find("flush.done")
            await speaker.send("end")
            await speaker.done("0")

    run(main())


def test_min_chars_hold_the_first_segment_back_for_a_second_at_most() -> None:
    async def main() -> None:
        async with served() as server, client(server) as speaker:
            trigger = {"min_chars": 60}
            await speaker.send("text", ctx="a", text="Hello there, my friend, what a day. ", trigger=trigger)
            await speaker.say("This one is whole.", "other")
            await speaker.done("other")
            assert not speaker.find("ctx.started", "a")
            await speaker.send("text", ctx="a", text="It is good to see you here again today.")
            await speaker.audio("a")
            await speaker.send("end", ctx="a")
            await speaker.done("a")
            await speaker.send("text", ctx="b", text="Hi there.", trigger=trigger)
            await speaker.wait("seg.done", "b")  # by the time limit that a minimum always has
            await speaker.send("end", ctx="b")
            await speaker.done("b")

    run(main())


def test_a_stall_in_the_text_is_told_and_loses_nothing() -> None:
    async def main() -> None:
        async with served() as server, client(server) as speaker:
            await speaker.send(
                "text", text="The stall comes here right ", seed=7, format={"sample_rate": RATE}
            )
            await speaker.audio("0", 2)
            await until(lambda: _starved_for(server, 0.2), "the row has waited long enough to tell")
            await speaker.say("in the middle of it.")
            done = await speaker.done("0")
            (starved,) = speaker.find("starved")
            assert starved["waited_ms"] >= 80  # type: ignore[operator]
            assert done["samples"] == num_frames(done) * HOP

    run(main())


def _starved_for(server: Served, seconds: float) -> bool:
    rows = list(server.runtime.engine.scheduler.rows.values())
    now = server.runtime.clock()
    return any(row.starved_since_s is not None and now - row.starved_since_s > seconds for row in rows)


# ---- pacing


def test_generation_stays_within_the_lead() -> None:
    async def main() -> None:
        async with served() as server, client(server) as speaker:
            await speaker.say(TEXT * 10, pacing={"max_lead_ms": 1000})
            await speaker.audio("0", 5)
            (row,) = server.runtime.engine.scheduler.rows.values()
            for _ in range(10):
                await speaker.next()
                assert row.lead_s(server.runtime.clock(), 0.08) <= 1.0 + 0.08
            await speaker.send("cancel")
            await speaker.done("0")

    run(main())


def test_a_playout_report_moves_the_lead() -> None:
    async def main() -> None:
        async with served() as server, client(server) as speaker:
            await speaker.say(TEXT * 4, pacing={"max_lead_ms": 400}, format={"sample_rate": RATE})
            played = 0
            while not speaker.find("ctx.done"):
                await speaker.next()
                if speaker.frames() and speaker.frames()[-1].pts > played:
                    played = speaker.frames()[-1].pts
                    await speaker.send("playout", samples=played)  # a listener who is faster than time
            done = await speaker.done("0")
            assert done["reason"] == "completed" and done["samples"] == num_frames(done) * HOP

    run(main())


def test_flow_tells_to_pause_and_to_go_on() -> None:
    async def main() -> None:
        limits = Limits(max_pending_chars=400)
        async with served(limits=limits) as server, client(server) as speaker:
            await speaker.send("text", text="Ten chars. " * 20, trigger={"mode": "manual"})
            await speaker.pong()
            assert not speaker.find("flow")
            await speaker.send("text", text="Ten chars. " * 10)
            pause = await speaker.wait("flow")
            assert (pause["state"], pause["pending_chars"]) == ("pause", 330)
            await speaker.send("text", text="Ten chars. " * 10, ref="too much")
            error = await speaker.wait("error")
            assert (error["code"], error["scope"], error["ctx"]) == ("text_overflow", "message", "0")
            assert error["ref"] == "too much"
            await speaker.send("flush", id=1)
            await speaker.wait("flow", state="ok")
            await speaker.wait("flush.done", "0")
            await speaker.send("text", text="Ten chars. " * 30)
            await speaker.send("end")
            done = await speaker.done("0")
            assert done["usage"]["chars"] == 660  # type: ignore[index]
            assert [flow["state"] for flow in speaker.find("flow")][:3] == ["pause", "ok", "pause"]

    run(main())
