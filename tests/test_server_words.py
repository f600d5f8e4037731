"""Word times, phonemes and the account of what was heard, over real sockets."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from realtime.client import Event
from realtime.models import load
from realtime.server.wire import AudioFrame
from realtime.wordcheck import check_words
from tests.server_fakes import Client, Served, bundle, client, run, served

TEXT = (
    "Hello there. Dr. Smith paid $5 million, **really**, on 2024-05-01! [pause 500ms]"
    " It is 98.6 \U0001f600 now."
)
SPOKEN = [
    *("Hello", "there.", "Dr.", "Smith", "paid", "$5 million,", "really**,", "on", "2024-05-01!"),
    *("It", "is", "98.6", "now."),
]


def entries(speaker: Client, ctx: str = "0", *, final: bool = True) -> list[list[Any]]:
    return [entry for message in speaker.find("words", ctx, final=final) for entry in listed(message["w"])]


def listed(value: object) -> list[Any]:
    assert isinstance(value, list)
    return value


def problems(speaker: Client, text: str, rate: int = 48_000, ctx: str = "0") -> list[str]:
    log = [
        Event(0.0, frame=item) if isinstance(item, AudioFrame) else Event(0.0, item)
        for item in speaker.of(ctx)
    ]
    return check_words(text, log, rate)


async def spoken(server: Served, text: str, *, pieces: Sequence[str] = (), **fields: object) -> Client:
    async with client(server) as speaker:
        await speaker.send("open", ctx="0", seed=7, **fields)
        for piece in pieces or [text]:
            await speaker.send("text", ctx="0", text=piece)
        await speaker.send("end", ctx="0")
        await speaker.done("0")
    return speaker


@pytest.mark.parametrize("rate", [48_000, 22_050, 8_000])
def test_words_keep_the_inputs_spelling_and_come_behind_their_audio(rate: int) -> None:
    async def main() -> None:
        async with served() as server:
            speaker = await spoken(server, TEXT, words="word", format={"sample_rate": rate})
            assert [entry[0] for entry in entries(speaker)] == SPOKEN
            assert problems(speaker, TEXT, rate) == []
            (done,) = speaker.find("ctx.done")
            assert done["c_spoken"] == len(TEXT) and "heard" not in done and "unheard" not in done

    run(main())


def test_a_split_of_the_text_changes_no_word_and_no_time() -> None:
    async def main() -> None:
        async with served() as server:
            whole = await spoken(server, TEXT, words="word", trigger={"mode": "manual"})
            for seed in range(3):
                rng = random.Random(seed)
                cuts = sorted(rng.sample(range(1, len(TEXT)), 20))
                pieces = [TEXT[a:b] for a, b in zip([0, *cuts], [*cuts, len(TEXT)], strict=True)]
                cut = await spoken(server, TEXT, pieces=pieces, words="word", trigger={"mode": "manual"})
                assert entries(cut) == entries(whole)

    run(main())


def test_characters_each_appear_once_and_words_are_divided_evenly() -> None:
    async def main() -> None:
        async with served() as server:
            speaker = await spoken(server, TEXT, words="char")
            told = entries(speaker)
            assert "".join(entry[0] for entry in told) == TEXT
            assert [(entry[3], entry[4]) for entry in told] == [(c, c + 1) for c in range(len(TEXT))]
            edges = [edge for entry in told for edge in entry[1:3]]
            assert all(b >= a - 0.11 for a, b in zip(edges, edges[1:], strict=False))
            assert told[5][1] == told[5][2], "white space has no length"
            last = speaker.of("0")[-1]
            assert isinstance(last, dict) and last["type"] == "ctx.done"

    run(main())


def test_nobody_who_did_not_ask_gets_words_or_phonemes() -> None:
    async def main() -> None:
        async with served() as server:
            speaker = await spoken(server, TEXT)
            assert not speaker.find("words") and not speaker.find("phonemes")

    run(main())


def test_inserted_silence_and_a_client_that_pauses_keep_times_exact() -> None:
    # A pause tag moves what follows by its length; a pause of the client is not speech and moves nothing.
    async def main() -> None:
        async with served() as server:
            plain = await spoken(server, "One two. Three four.", words="word", trigger={"mode": "manual"})
            tag = await spoken(
                server, "One two.[pause 700ms] Three four.", words="word", trigger={"mode": "manual"}
            )
            starts = [entry[1] for entry in entries(plain)]
            moved = [entry[1] for entry in entries(tag)]
            assert moved[:2] == starts[:2]
            assert [b - a for a, b in zip(starts[2:], moved[2:], strict=True)] == pytest.approx([700] * 2)
            async with client(server) as speaker:
                await speaker.send("open", ctx="0", seed=7, words="word", trigger={"mode": "manual"})
                await speaker.send("text", ctx="0", text="One two. Three four.")
                await speaker.send("pause", ctx="0")
                await speaker.send("end", ctx="0")
                await speaker.pong()
                await speaker.send("resume", ctx="0")
                await speaker.done("0")
            assert entries(speaker) == entries(plain)

    run(main())


def test_a_model_without_phonemes_says_so_once() -> None:
    async def main() -> None:
        async with served() as server, client(server) as speaker:
            for ctx in ("a", "b"):
                await speaker.say("Hello.", ctx, phonemes=True)
            await speaker.done("a", "b")
            (warning,) = speaker.find("warn", code="unsupported")
            assert "phonemes" in str(warning["message"])

    run(main())


def test_a_model_without_a_pace_is_estimated_and_says_so() -> None:
    async def main() -> None:
        model = bundle()
        model = replace(model, spec=replace(model.spec, tells_pace=False))
        async with served(model) as server:
            speaker = await spoken(server, TEXT, words="word")
            assert [entry[0] for entry in entries(speaker)] == SPOKEN
            assert problems(speaker, TEXT) == []
            told = speaker.find("words")
            assert all(message["estimated"] is True for message in told)
            finals = [message["seg"] for message in told if message["final"]]
            guesses = [message["seg"] for message in told if not message["final"]]
            assert guesses and set(guesses) <= set(finals)
            for seg in set(guesses):
                order = [message["final"] for message in told if message["seg"] == seg]
                assert order == sorted(order), "nothing is guessed after the truth"

    run(main())


# ---- what was heard


@pytest.mark.parametrize("seed", range(4))
def test_an_interrupted_context_accounts_for_its_input_at_the_position_reported(seed: int) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        async with served() as server:
            whole = await spoken(server, TEXT, words="word", trigger={"mode": "manual"})
            words = entries(whole)
            for kind in ("played_samples", "played_ms", "playout"):
                async with client(server) as speaker:
                    # The lead keeps it from being over before it is cancelled.
                    pacing, trigger = {"max_lead_ms": 1500}, {"mode": "manual"}
                    await speaker.send("open", ctx="0", seed=7, trigger=trigger, pacing=pacing)
                    await speaker.send("text", ctx="0", text=TEXT, end=True)
                    await speaker.audio("0", rng.randint(1, 16))
                    received = speaker.frames()[-1]
                    last_ms = (received.pts + received.num_samples) / 48
                    position_ms = round(rng.uniform(0, last_ms), 1)
                    if kind == "playout":
                        await speaker.send("playout", ctx="0", samples=round(position_ms * 48))
                        await speaker.send("cancel", ctx="0")
                    elif kind == "played_ms":
                        await speaker.send("cancel", ctx="0", played_ms=position_ms)
                    else:
                        await speaker.send("cancel", ctx="0", played_samples=round(position_ms * 48))
                    done = await speaker.done("0")
                heard = done["heard"]
                assert isinstance(heard, dict)
                assert heard.get("estimate") is (True if kind == "playout" else None)
                assert heard["text"] + done["unheard"]["text"] == TEXT  # type: ignore[index, call-overload]
                if kind != "playout":
                    expected = [word for word in words if word[2] <= position_ms]
                    assert abs(heard["num_words"] - len(expected)) <= 1  # a rounded end may fall either way
                    if expected and heard["num_words"] == len(expected):
                        assert heard["c1"] == expected[-1][4]
                written_ms = int(str(done["samples"])) / 48
                written = [word for word in words if word[2] <= written_ms - 0.11]
                assert int(str(done["c_spoken"])) >= (written[-1][4] if written else 0)
                assert int(str(done["c_spoken"])) >= heard["c1"]

    run(main())


def test_a_context_that_was_never_heard_has_heard_nothing() -> None:
    async def main() -> None:
        async with served() as server, client(server) as speaker:
            await speaker.send("open", ctx="0", trigger={"mode": "manual"})
            await speaker.send("text", ctx="0", text="Not spoken.")
            await speaker.pong()
            await speaker.send("cancel", ctx="0", played_samples=48_000)
            done = await speaker.done("0")
            assert done["heard"] == {"text": "", "c1": 0, "num_words": 0}
            assert done["unheard"] == {"text": "Not spoken."} and done["c_spoken"] == 0

    run(main())


@pytest.mark.parametrize("ending", ["replaced", "closed", "timeout"])
def test_every_other_ending_accounts_for_the_input_too(ending: str) -> None:
    async def main() -> None:
        async with served() as server, client(server) as speaker:
            text = "Hello there, this is said."
            await speaker.send("open", ctx="0", ctx_idle_ms=100)
            await speaker.send("text", ctx="0", text=text)
            await speaker.audio()
            if ending == "replaced":
                await speaker.send("open", ctx="next", replaces="*")
            elif ending == "closed":
                await speaker.send("close", drain=False)
            done = await speaker.done("0")
            assert done["reason"] == ending
            heard, unheard = done["heard"], done["unheard"]
            assert isinstance(heard, dict) and isinstance(unheard, dict)
            assert heard["text"] + unheard["text"] == text and heard["estimate"] is True
            if ending == "replaced":
                await speaker.send("cancel", ctx="next")
                await speaker.done("next")

    run(main())


def test_sixteen_interleaved_contexts_keep_their_own_words() -> None:
    async def main() -> None:
        async with served(max_streams=16) as server, client(server) as speaker:
            texts = {f"c{i}": f"Number {i} says {i * 7} times. {TEXT}" for i in range(16)}
            for ctx in texts:
                await speaker.send("open", ctx=ctx, words="word", seed=3)
            for start in range(0, 120, 7):
                for ctx, text in texts.items():
                    if text[start : start + 7]:
                        await speaker.send("text", ctx=ctx, text=text[start : start + 7])
            for ctx in texts:
                await speaker.send("end", ctx=ctx)
            await speaker.done(*texts)
            for ctx, text in texts.items():
                assert problems(speaker, text[:126], ctx=ctx) == []

    run(main())


def test_phonemes_of_the_embedded_voice_tile_the_context_without_a_gap() -> None:
    async def main() -> None:
        model = load("wren")
        async with served(model) as server:
            speaker = await spoken(server, "Hello there. [pause 300ms] Good bye.", phonemes=True)
            runs = [run for message in speaker.find("phonemes", "0") for run in listed(message["p"])]
            (done,) = speaker.find("ctx.done")
            total_ms = int(str(done["samples"])) / 48
            assert runs[0][1] == 0 and runs[-1][2] == pytest.approx(total_ms, abs=0.1)
            assert [run[1] for run in runs[1:]] == [run[2] for run in runs[:-1]]
            assert all(0 < run[2] - run[1] <= 1000 for run in runs)
            symbols = {run[0] for run in runs}
            assert symbols <= set(model.spec.phonemes) - {"ˈ", "ˌ"} and "" in symbols and len(symbols) > 5
            assert problems(speaker, "") == []

    run(main())
