"""Words and phonemes of a context as messages of the protocol, with the input's own spelling."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Literal

from realtime.server import events
from realtime.server.wire import Message
from realtime.words import TimedPhoneme, TimedWord, by_character


class Teller:
    """Keeps the input, for spellings, and in `char` mode how far its characters have been told."""

    def __init__(self, ctx: str, mode: Literal["none", "word", "char"], *, is_estimate: bool) -> None:
        self._ctx = ctx
        self._mode = mode
        self._is_estimate = is_estimate
        self._deltas: list[str] = []
        self._told_c = 0
        self._told_ms = 0.0

    @property
    def text(self) -> str:
        """The input so far."""
        if len(self._deltas) != 1:
            self._deltas = ["".join(self._deltas)]
        return self._deltas[0]

    def add(self, delta: str) -> None:
        self._deltas.append(delta)

    def tell(self, words: Sequence[TimedWord], phonemes: Sequence[TimedPhoneme]) -> list[Message]:
        """One message per segment and kind; words only in a mode that wants them."""
        told: list[Message] = []
        if self._mode != "none":
            for seg, group in groupby(words, lambda word: word.seg):
                told.append(self._words(seg, list(group)))
        for seg, runs in groupby(phonemes, lambda run: run.seg):
            told.append(events.phonemes(self._ctx, seg, [(r.symbol, r.start_ms, r.end_ms) for r in runs]))
        return told

    def rest(self, seg: int) -> list[Message]:
        """The characters behind the last word, when all has been spoken."""
        if self._mode != "char" or self._told_c >= len(self.text):
            return []
        rest = by_character([], self._told_c, len(self.text), self._told_ms, seg)
        self._told_c = len(self.text)
        return [self._message(seg, rest)]

    def _words(self, seg: int, words: list[TimedWord]) -> Message:
        if self._mode == "char":
            characters = by_character(words, self._told_c, words[-1].c1, self._told_ms, seg)
            if words[-1].is_final:  # a guess will be told again
                self._told_c, self._told_ms = words[-1].c1, words[-1].end_ms
            words = characters
        return self._message(seg, words)

    def _message(self, seg: int, words: Sequence[TimedWord]) -> Message:
        text = self.text
        entries = [(text[word.c0 : word.c1], word.start_ms, word.end_ms, word.c0, word.c1) for word in words]
        return events.words(
            self._ctx,
            seg,
            entries,
            is_final=all(word.is_final for word in words),
            is_estimate=self._is_estimate,
        )
