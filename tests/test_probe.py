from __future__ import annotations

import argparse
import asyncio
import io
import json
import wave
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

import pytest
from fake_tts import FRAME_SAMPLES, RATE, STAMPS_US, FakeTTS, Item, frame, speak
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from realtime import probe
from realtime.client import Event
from realtime.errors import Overloaded
from realtime.probe import ProbeOptions, ProbeReport, Turn, measure, run_probe
from realtime.server import events, protocol
from realtime.server.settings import Format

STARTED = Event(9.0, events.ctx_started("a", 1, Format(sample_rate=RATE), STAMPS_US))
OPTIONS = ProbeOptions(text="One two three.", tokens_per_s=0, repeat=2, sample_rate=RATE, timeout_s=20)


def done(reason: events.DoneReason = "completed", **metrics: float) -> Event:
    return Event(99.0, events.ctx_done("a", reason, samples=0, c_spoken=0, metrics=metrics))


def received(*at_s: float) -> list[Event]:
    return [Event(s, frame=frame(1, seq)) for seq, s in enumerate(at_s)]


# ---- arithmetic


def test_stages_add_up_to_the_time_to_first_audio() -> None:
    turn = measure(0, 0, 10.0, [STARTED, *received(10.05), done(rtf=0.5)])

    assert turn.ttfa_ms == pytest.approx(50)
    assert turn.server_ms == pytest.approx(36)
    assert turn.residence_ms == pytest.approx(35)
    assert turn.stages_ms == pytest.approx(
        {
            "text wait": 1,
            "queue": 2,
            "prefill": 3,
            "AR start": 4,
            "AR fill": 5,
            "vocoder": 6,
            "post": 7,
            "egress": 8,
            "network+client": 14,
        }
    )
    assert sum(turn.stages_ms.values()) == pytest.approx(turn.ttfa_ms)


def test_underrun_is_the_worst_lateness_against_playback_from_the_first_frame() -> None:
    # 80 ms each: due at 1.00, 1.08, 1.16, 1.24
    turn = measure(0, 0, 0.5, [STARTED, *received(1.0, 1.05, 1.2, 1.25), done()])

    assert turn.underrun_ms == pytest.approx(40)
    assert turn.max_gap_ms == pytest.approx(150)
    assert turn.audio_s == pytest.approx(0.32)
    assert turn.num_frames == 4


def test_a_boundary_lasts_from_the_last_frame_of_a_segment_to_the_next_one() -> None:
    # 1.0 1.1 | 1.35 | (nothing heard of the second) 1.5
    frames = received(1.0, 1.1, 1.35, 1.5)
    ends = [Event(s, events.seg_done("a", seg, 0, 0)) for seg, s in enumerate((1.1, 1.36, 1.37, 1.5))]
    told = [STARTED, *frames[:2], ends[0], frames[2], ends[1], ends[2], frames[3], ends[3], done()]
    turn = measure(0, 0, 0.5, told)

    assert turn.boundary_ms == pytest.approx([250, 150])
    assert measure(0, 0, 0.5, [STARTED, *frames, done()]).boundary_ms == ()
    report = ProbeReport(OPTIONS, {}, (turn, turn))
    assert report.summary()["boundary_ms"]["p95"] == pytest.approx(250)


def test_audio_that_is_early_has_no_underrun() -> None:
    turn = measure(0, 0, 0.5, [STARTED, *received(1.0, 1.01, 1.02), done()])

    assert turn.underrun_ms == 0


def test_rtf_is_the_servers_or_comes_from_its_stamps() -> None:
    told = measure(0, 0, 0.0, [STARTED, *received(1.0, 1.1), done(rtf=0.5)])
    computed = measure(0, 0, 0.0, [STARTED, *received(1.0, 1.1), done()])

    assert told.rtf == 0.5
    assert computed.rtf == pytest.approx((56_000 - 1000) / 1e6 / 0.16)


def test_without_stamps_what_is_known_is_told() -> None:
    started = Event(9.0, events.ctx_started("a", 1, Format(sample_rate=RATE), None))
    turn = measure(0, 0, 1.0, [started, *received(1.05), done()])

    assert turn.error is None and turn.residence_ms is None
    assert turn.stages_ms == pytest.approx({"egress": 36, "network+client": 14})


@pytest.mark.parametrize(
    ("received_events", "words"),
    [
        ([Event(1.0, events.error(Overloaded("full"), "ctx", ctx="a"))], "overloaded: full"),
        ([STARTED, *received(1.0), done("timeout")], "reason timeout"),
        ([STARTED, done()], "without audio"),
        ([done()], "without audio"),
    ],
)
def test_a_turn_that_went_wrong_says_why(received_events: list[Event], words: str) -> None:
    error = measure(0, 0, 0.0, received_events).error

    assert error is not None and words in error


def test_percentiles_are_measured_values() -> None:
    assert probe.percentiles([3.0]) == {"p50": 3.0, "p95": 3.0, "p99": 3.0}
    assert probe.percentiles([4.0, 1.0, 3.0, 2.0]) == {"p50": 2.0, "p95": 4.0, "p99": 4.0}
    assert probe.percentiles(list(range(1, 101))) == {"p50": 50, "p95": 95, "p99": 99}


@given(text=st.text(), unit=st.sampled_from(["words", "chars"]))
def test_deltas_are_the_text(text: str, unit: Literal["words", "chars"]) -> None:
    assert "".join(probe.deltas(text, unit)) == text


def test_deltas_have_the_size_of_tokens() -> None:
    assert probe.deltas("One two, three. ", "words") == ["One", " two,", " three.", " "]
    assert probe.deltas("One two.", "chars") == ["One ", "two."]


# ---- against a server


def run(tts: FakeTTS, options: ProbeOptions) -> ProbeReport:
    async def inside() -> ProbeReport:
        async with tts.running() as url:
            return await run_probe(replace(options, url=url))

    return asyncio.run(inside())


def test_every_turn_of_every_stream_is_measured() -> None:
    report = run(FakeTTS(), replace(OPTIONS, streams=3, stagger_ms=1, codec="msgpack"))

    assert report.server["model"] == "fake"
    assert not report.failed
    assert [(turn.stream, turn.index) for turn in report.turns] == [
        (s, i) for s in range(3) for i in range(2)
    ]
    for turn in report.turns:
        assert (turn.num_frames, turn.rtf, turn.residence_ms) == (3, 0.25, 35.0)
        assert turn.audio_s == pytest.approx(0.24)
    assert (
        report.pcm
        == bytes([1, 0]) * FRAME_SAMPLES + bytes([1, 1]) * FRAME_SAMPLES + bytes([1, 2]) * FRAME_SAMPLES
    )
    assert report.summary()["rtf"] == {"p50": 0.25, "p95": 0.25, "p99": 0.25}
    assert report.waterfall_ms()["vocoder"] == pytest.approx(6)


def test_text_goes_out_in_deltas_and_the_last_one_ends_it() -> None:
    tts = FakeTTS()
    run(tts, replace(OPTIONS, tokens_per_s=1000, jitter=0.5, repeat=1, voice="en_1"))
    texts = [m for m in tts.received if isinstance(m, protocol.Text)]

    assert isinstance(tts.received[0], protocol.SessionMessage)
    assert tts.received[0].fields["voice"] == "en_1"
    assert [(t.data, t.end) for t in texts] == [("One", False), (" two", False), (" three.", True)]


def test_a_refused_turn_fails_with_the_servers_words_and_the_next_goes_on() -> None:
    answers = iter([True, False])

    def refuse_first(ctx: str, handle: int, text: str) -> Sequence[Item]:
        if next(answers):
            error = events.error(Overloaded("no room"), "ctx", ctx=ctx)
            return [error, events.ctx_done(ctx, "error", samples=0, c_spoken=0)]
        return speak(ctx, handle, text)

    report = run(FakeTTS(refuse_first), OPTIONS)

    assert [turn.error for turn in report.turns] == ["overloaded: no room", None]


def test_a_silent_server_fails_the_turn_in_time() -> None:
    report = run(FakeTTS(lambda ctx, handle, text: []), replace(OPTIONS, repeat=1, timeout_s=0.2))

    assert [turn.error for turn in report.turns] == ["not done after 0.2 s"]


def test_a_lost_connection_ends_its_stream() -> None:
    report = run(FakeTTS(lambda ctx, handle, text: [b"bye"]), OPTIONS)

    assert [turn.error for turn in report.turns] == [
        "connection_failed: the connection closed with 4400: bye"
    ]


# ---- output


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    probe.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    "words",
    [("--repeat", "0"), ("--streams", "x"), ("--jitter", "1.5"), ("--tokens-per-s", "nan"), ("--delta", "x")],
)
def test_arguments_out_of_range_are_refused(
    words: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        arguments(*words)

    assert words[0] in capsys.readouterr().err


def test_the_defaults_of_the_command_line_are_those_of_the_options() -> None:
    args = arguments()

    assert all(getattr(args, name) == value for name, value in asdict(ProbeOptions()).items())


def test_a_failed_connection_is_told_and_gives_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    status = probe.main(arguments("ws://127.0.0.1:9/", "--json", "-"))
    out, err = capsys.readouterr()

    assert status == 1
    assert json.loads(out)["num_failed"] == 1
    assert "connection_failed" in err and "ws://127.0.0.1:9/" in err


def test_files_hold_the_audio_and_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = run(FakeTTS(), replace(OPTIONS, token="secret"))

    async def replay(options: ProbeOptions) -> ProbeReport:
        return report

    monkeypatch.setattr(probe, "run_probe", replay)
    status = probe.main(arguments("--json", str(tmp_path / "r.json"), "--wav", str(tmp_path / "a.wav")))
    numbers = json.loads((tmp_path / "r.json").read_text())

    assert status == 0
    assert numbers["summary"]["residence_ms"]["p50"] == 35.0
    assert len(numbers["turns"]) == 2
    assert "secret" not in (tmp_path / "r.json").read_text()
    with wave.open(str(tmp_path / "a.wav")) as wav:
        assert (wav.getframerate(), wav.getnframes()) == (RATE, 3 * FRAME_SAMPLES)


def test_the_table_shows_percentiles_stages_and_failures() -> None:
    good = measure(0, 0, 10.0, [STARTED, *received(10.05, 10.3), done(rtf=0.5)])
    report = ProbeReport(OPTIONS, {"model": "wren"}, (good, Turn(0, 1, error="overloaded: [full]")))
    file = io.StringIO()
    probe.render(report, Console(file=file, width=120))
    text = file.getvalue()

    assert "stream 0 turn 1 failed: overloaded: [full]" in text
    for words in ("TTFA ms", "50.0", "RTF", "0.500", "worst underrun ms", "170.0", "network+client", "█"):
        assert words in text
