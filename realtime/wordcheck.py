"""Whether the `words` messages of one utterance are what the protocol promises."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from realtime.client import Event

MARKUP = re.compile(r"\[pause[^\]]*\]|<[^>]*>|\]\([^)]*\)|https?://|&\w+;", re.IGNORECASE)
MS = 0.11  # times are rounded to a tenth of a millisecond


def check_words(text: str, events: Sequence[Event], sample_rate: int) -> list[str]:
    """What is wrong, in words; nothing is right.

    Order: starts and ends ascend and lie within the audio. Spans: entries are disjoint, ascending, and
    spell the input. Audio first: the audio that holds an entry's end came before it, and `ctx.done`
    after it. Coverage: every letter and digit of the input lies in a final entry, once, but for those
    of markup, which has no sound.
    """
    text_only = MARKUP.sub(lambda markup: " " * len(markup[0]), text)
    problems: list[str] = []
    final: list[tuple[str, float, float, int, int]] = []
    sent_samples = 0
    is_done = False
    for event in events:
        if event.frame is not None:
            sent_samples = event.frame.pts + event.frame.num_samples
        elif event.type == "ctx.done":
            is_done = True
        elif event.type == "words":
            if is_done:
                problems.append("words came after ctx.done")
            entries = _entries(event.message)
            if event.message.get("final") is True:
                final += entries
            for spelled, _, end_ms, _, _ in entries:
                if end_ms > sent_samples / sample_rate * 1000 + MS:
                    problems.append(f"{spelled!r} was told before its audio")
    place, at_ms = 0, 0.0
    for spelled, start_ms, end_ms, c0, c1 in final:
        if start_ms < at_ms - MS or end_ms < start_ms - MS:
            problems.append(f"{spelled!r} is out of order: {start_ms} to {end_ms} ms after {at_ms} ms")
        if c0 < place or c1 <= c0 or c1 > len(text):
            problems.append(f"{spelled!r} has the span {c0} to {c1} after {place}")
        elif text[c0:c1] != spelled:
            problems.append(f"{spelled!r} is spelled {text[c0:c1]!r} in the input")
        lost = [char for char in text_only[place:c0] if char.isalnum()]
        if lost:
            problems.append(f"{''.join(lost)!r} before {spelled!r} lies in no entry")
        place, at_ms = max(place, c1), max(at_ms, end_ms)
    lost = [char for char in text_only[place:] if char.isalnum()]
    if lost:
        problems.append(f"{''.join(lost)!r} at the end lies in no entry")
    return problems


def _entries(message: Mapping[str, object]) -> list[tuple[str, float, float, int, int]]:
    return [tuple(entry) for entry in cast(list[list[Any]], message.get("w", []))]
