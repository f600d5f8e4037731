"""The probe's judgement of `words` messages: each promise, broken once."""

from __future__ import annotations

from typing import Any

import pytest

from realtime.client import Event
from realtime.server.wire import AudioFrame
from realtime.wordcheck import check_words

TEXT = "Hello, big world."


def audio(until_ms: int) -> Event:
    return Event(0.0, frame=AudioFrame("pcm_s16le", 0, 1, 0, 0, 0, until_ms * 48, 0, b""))


def words(*entries: list[Any], final: bool = True) -> Event:
    return Event(0.0, {"type": "words", "w": list(entries), "final": final})


HELLO, BIG, WORLD = ["Hello,", 10, 300, 0, 6], ["big", 300, 500, 7, 10], ["world.", 500, 900, 11, 17]
DONE = Event(0.0, {"type": "ctx.done"})


def test_what_is_right_is_not_complained_about() -> None:
    assert check_words(TEXT, [audio(400), words(HELLO), audio(900), words(BIG, WORLD), DONE], 48_000) == []
    guess = words(["Hello,", 0, 200, 0, 6], final=False)
    assert check_words(TEXT, [audio(900), guess, words(HELLO, BIG, WORLD), DONE], 48_000) == []


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        ([audio(900), words(HELLO, WORLD), DONE], "'big' before 'world.' lies in no entry"),
        ([audio(900), words(HELLO, BIG), DONE], "'world' at the end lies in no entry"),
        ([audio(900), words(HELLO, WORLD, BIG), DONE], "out of order"),
        ([audio(900), words(HELLO, HELLO, BIG, WORLD), DONE], "has the span"),
        ([audio(900), words(HELLO, ["bug", 300, 500, 7, 10], WORLD), DONE], "is spelled 'big'"),
        ([audio(400), words(HELLO, BIG), audio(900), words(WORLD), DONE], "before its audio"),
        ([audio(900), words(HELLO, BIG), DONE, words(WORLD)], "after ctx.done"),
    ],
)
def test_each_broken_promise_is_named(events: list[Event], problem: str) -> None:
    assert any(problem in found for found in check_words(TEXT, events, 48_000))
