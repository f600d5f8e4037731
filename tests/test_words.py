"""Times of words and phonemes from the codes of frames: no model, no protocol."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from realtime.words import (
    EstimatedTimes,
    PhonemeTimes,
    SpokenWord,
    TimedWord,
    Timeline,
    WordTimes,
    by_character,
)

GOLDEN = Path(__file__).parent / "golden" / "wren"
LOUD = (False, False)


def timeline() -> Timeline:
    return Timeline(80.0, 10.0)


def one_per_token(num_tokens: int) -> list[SpokenWord]:
    return [SpokenWord(i, i + 1, i, i + 1) for i in range(num_tokens)]


@pytest.mark.parametrize("case", range(len(json.loads((GOLDEN / "golden.json").read_text()))))
def test_golden_pace_codes_give_the_golden_token_ends(case: int) -> None:
    tensors = load_file(GOLDEN / "golden.safetensors")
    codes, known = tensors[f"{case}.codes"], tensors[f"{case}.known"]
    words = one_per_token(len(tensors[f"{case}.ids"]))
    times = WordTimes(timeline())
    told: list[TimedWord] = []
    spoken = 0
    for frame, num_known in zip(codes, known, strict=False):
        finished = min(spoken + int(frame[0]), int(num_known)) - spoken
        spoken += finished
        told += times.frame(0, finished, LOUD, words)
    told += times.end_segment(0, words)
    ends = [(word.end_ms - 10) / 80 for word in told]
    np.testing.assert_allclose(ends, tensors[f"{case}.token_end"], atol=1e-4)
    assert [word.start_ms for word in told] == [10.0, *[word.end_ms for word in told[:-1]]]


def test_a_word_spans_its_tokens_and_silence_at_its_ends_is_trimmed() -> None:
    words = [SpokenWord(0, 2, 0, 5), SpokenWord(2, 3, 6, 9)]
    times = WordTimes(timeline())
    assert times.frame(0, 0, (True, True), words) == []
    assert times.frame(0, 1, (True, False), words) == []
    told = times.frame(0, 1, (False, True), words)
    # Token 0 ends at 2.0, token 1 at 3.0; cells 0, 1, 2 and 5 are silent.
    assert told == [TimedWord(10 + 1.5 * 80, 10 + 2.5 * 80, 0, 5, 0)]
    told = times.frame(0, 1, (True, True), words)
    assert told == [TimedWord(10 + 3 * 80, 10 + 4 * 80, 6, 9, 0)], "nothing would be left: untrimmed"
    assert times.end_segment(0, words) == []


def test_tokens_unfinished_at_the_end_of_a_segment_end_with_it_and_the_next_starts_there() -> None:
    times = WordTimes(timeline())
    words = one_per_token(2)
    times.frame(0, 1, LOUD, words)
    times.frame(0, 0, LOUD, words)
    assert [word.end_ms for word in times.end_segment(0, words)] == [10 + 2 * 80]
    later = times.frame(1, 1, LOUD, [SpokenWord(0, 1, 3, 5)])
    assert later == [TimedWord(10 + 2 * 80, 10 + 3 * 80, 3, 5, 1)]


def test_inserted_silence_moves_what_comes_after_it_and_nothing_before() -> None:
    line = timeline()
    times = WordTimes(line)
    first = times.frame(0, 1, LOUD, one_per_token(1))
    times.end_segment(0, one_per_token(1))
    line.inserted_ms += 500
    second = times.frame(2, 1, LOUD, [SpokenWord(0, 1, 9, 10)])
    assert first[0].end_ms == 90 and second[0].start_ms == 590


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(0, 20))
@settings(max_examples=100, derandomize=True, deadline=None)
def test_whatever_the_pace_words_are_in_order_and_each_is_told_once(paces: list[int], extra: int) -> None:
    words = one_per_token(sum(paces) + extra)
    times = WordTimes(timeline())
    told = [word for pace in paces for word in times.frame(0, pace, LOUD, words)]
    told += times.end_segment(0, words)
    assert [word.c0 for word in told] == list(range(len(words)))
    edges = [edge for word in told for edge in (word.start_ms, word.end_ms)]
    assert edges == sorted(edges)


def test_without_a_pace_estimates_come_first_and_the_segments_length_decides() -> None:
    times = EstimatedTimes(timeline())
    words = one_per_token(4)
    guessed = [word for _ in range(10) for word in times.frame(0, 0, LOUD, words)]
    assert [word.c0 for word in guessed] == [0, 1] and not any(word.is_final for word in guessed)
    final = times.end_segment(0, words)
    assert all(word.is_final for word in final)
    assert [(word.start_ms, word.end_ms) for word in final] == [
        (10 + 200 * i, 10 + 200 * (i + 1)) for i in range(4)
    ]
    assert times.end_segment(1, []) == []


def test_phonemes_tile_the_context_and_stress_takes_the_next_sound() -> None:
    symbols = ["", "a", "b", "ˈ"]
    line = timeline()
    phonemes = PhonemeTimes(line, symbols)
    told = phonemes.frame(0, (0, 1)) + phonemes.frame(0, (1, 3)) + phonemes.frame(0, (2, 2))
    told += phonemes.frame(0, (2, 3)) + phonemes.end_segment(0)
    line.inserted_ms += 300
    told += phonemes.silence(1, line.ms(4)) + phonemes.frame(2, (1, 1)) + phonemes.end_segment(2)
    assert [(run.symbol, run.start_ms, run.end_ms) for run in told] == [
        ("", 0, 50),
        ("a", 50, 130),
        ("b", 130, 290),
        ("", 290, 330),
        ("", 330, 630),
        ("a", 630, 710),
    ]


def test_a_long_run_of_one_sound_is_told_in_parts() -> None:
    phonemes = PhonemeTimes(timeline(), ["", "a"])
    told = [run for _ in range(30) for run in phonemes.frame(0, (0, 0))] + phonemes.end_segment(0)
    assert all(run.end_ms - run.start_ms <= 1000 for run in told)
    assert [run.start_ms for run in told[1:]] == [run.end_ms for run in told[:-1]]
    assert told[0].start_ms == 0 and told[-1].end_ms == 30 * 80 + 10


def test_every_character_appears_once_and_a_words_time_is_divided_evenly() -> None:
    words = [TimedWord(100, 200, 1, 3, 0), TimedWord(300, 600, 4, 7, 0)]
    characters = by_character(words, 0, 9, 0.0)
    assert [(c.c0, c.c1) for c in characters] == [(i, i + 1) for i in range(9)]
    assert [(c.start_ms, c.end_ms) for c in characters] == [
        (0, 0),
        (100, 150),
        (150, 200),
        (200, 200),
        (300, 400),
        (400, 500),
        (500, 600),
        (600, 600),
        (600, 600),
    ]


def test_a_lag_of_the_codes_is_taken_back_and_words_at_the_segments_start_keep_a_length() -> None:
    times = WordTimes(timeline(), lag_frames=1.0)
    words = one_per_token(3)
    told = [word for _ in range(3) for word in times.frame(0, 1, LOUD, words)]
    assert [(word.start_ms, word.end_ms) for word in told] == [(10, 50), (50, 90), (90, 170)]
