"""Subtitles: cues cut at words, times as the formats want them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from realtime import cli
from realtime.errors import BadRequest
from realtime.subtitles import MAX_CUE_CHARS, cues, format_of, render
from realtime.words import TimedWord

TEXT = "Hello there. Dr. Smith paid $5 million & left,\nand nobody ever saw him again in that town. Bye."


def timed(text: str, each_ms: float = 300.0) -> list[TimedWord]:
    words, place, seg = [], 0, 0
    for number, word in enumerate(text.split()):
        c0 = text.index(word, place)
        place = c0 + len(word)
        words.append(TimedWord(10 + number * each_ms, 10 + (number + 1) * each_ms, c0, place, seg))
        seg += word in ("there.", "town.")
    return words


def test_cues_are_short_hold_every_word_once_and_do_not_cross_segments() -> None:
    words = timed(TEXT)
    found = cues(TEXT, words)
    assert " ".join(cue.text for cue in found) == " ".join(TEXT.split())
    assert all(len(cue.text) <= MAX_CUE_CHARS for cue in found)
    assert found[0].text == "Hello there." and found[-1].text == "Bye."
    assert [cue.start_ms for cue in found] == sorted(cue.start_ms for cue in found)


def test_a_cue_lasts_at_most_five_seconds_but_for_a_single_word() -> None:
    found = cues(TEXT, timed(TEXT, each_ms=2000.0))
    assert all(cue.end_ms - cue.start_ms <= 5000 for cue in found)
    (long,) = cues("Word", [TimedWord(0, 9000, 0, 4, 0)])
    assert long.end_ms == 9000


def test_srt_vtt_and_json() -> None:
    words = [TimedWord(10, 1234.5, 0, 5, 0), TimedWord(3_723_004, 3_723_999.6, 6, 9, 1)]
    text = "Hello A&B"
    assert render("srt", text, words) == (
        "1\n00:00:00,010 --> 00:00:01,234\nHello\n\n2\n01:02:03,004 --> 01:02:04,000\nA&B\n"
    )
    assert render("vtt", text, words).startswith("WEBVTT\n\n1\n00:00:00.010 --> 00:00:01.234\nHello\n")
    assert "A&amp;B" in render("vtt", text, words)
    assert json.loads(render("json", text, words))["words"][1] == {
        "text": "A&B",
        "start_ms": 3_723_004,
        "end_ms": 3_723_999.6,
        "c0": 6,
        "c1": 9,
        "seg": 1,
    }


def test_a_name_of_no_format_is_refused_with_the_list() -> None:
    assert format_of("a/b.SRT") == "srt"
    with pytest.raises(BadRequest, match=r"\.json, \.srt, \.vtt"):
        format_of("words.txt")


def test_say_writes_a_wav_and_subtitles_of_all_its_words(tmp_path: Path) -> None:
    wav, srt = tmp_path / "out.wav", tmp_path / "out.srt"
    text = "Hello there. It is 3.14 now."
    assert cli.main(["say", text, "-o", str(wav), "--seed", "1", "--words", str(srt)]) == 0
    shown = srt.read_text(encoding="utf-8")
    assert [line for line in shown.splitlines() if line and not line[0].isdigit()] == [
        "Hello there.",
        "It is 3.14 now.",
    ]
    assert wav.stat().st_size > 48_000


def test_say_refuses_a_name_of_no_format_before_it_speaks(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["say", "Hello.", "-o", "unused.wav", "--words", "words.txt"]) == 1
    assert ".srt" in capsys.readouterr().err
    assert not Path("unused.wav").exists()
