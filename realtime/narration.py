"""One stream's words and phonemes as its audio is made: what was said until when.

Fed in the order of the stream (`audio`, `end_segment`, `silence`); asked by those who tell a listener
(`due`) and by those who must know what a listener has heard (`heard`). Times are milliseconds from
the stream's first sample, places are code points of its input.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from realtime.messages import Audio
from realtime.models.base import ModelSpec
from realtime.words import (
    EstimatedTimes,
    PhonemeTimes,
    SpokenWord,
    TimedPhoneme,
    TimedWord,
    Timeline,
    WordTimes,
)


class Words(Protocol):
    """Where the words of a stream are known."""

    def words(self, segment: int) -> Sequence[SpokenWord]: ...


class Narration:
    """Keeps every word, for `heard`; phonemes only where they are wanted and the model tells them."""

    def __init__(self, spec: ModelSpec, source: Words, *, phonemes: bool) -> None:
        self._spec = spec
        self._source = source
        self._timeline = Timeline(1000 * spec.frame_s, spec.delay_ms)
        self._times = (
            WordTimes(self._timeline, spec.pace_lag_frames)
            if spec.tells_pace
            else EstimatedTimes(self._timeline)
        )
        self._phonemes = PhonemeTimes(self._timeline, spec.phonemes) if phonemes and spec.phonemes else None
        self._num_frames = 0
        self._words: list[TimedWord] = []  # final, but for guesses of the running segment at the end
        self._due_words: deque[TimedWord] = deque()
        self._due_phonemes: deque[TimedPhoneme] = deque()

    # ---- what was made

    def audio(self, seg: int, event: Audio) -> None:
        """A chunk of segment `seg`."""
        words = self._source.words(seg)
        for marks in event.marks.tolist():
            pace, codes = (marks[0], marks[1:]) if self._spec.tells_pace else (0, marks)
            silent = (False, False)
            if self._spec.phonemes:
                first, second = codes
                silent = (not self._spec.phonemes[first], not self._spec.phonemes[second])
                if self._phonemes is not None:
                    self._due_phonemes += self._phonemes.frame(seg, (first, second))
            self._book(self._times.frame(seg, pace, silent, words))
            self._num_frames += 1

    def end_segment(self, seg: int) -> None:
        words = self._source.words(seg)
        if words:
            self._book(self._times.end_segment(seg, words))
        if self._phonemes is not None:
            self._due_phonemes += self._phonemes.end_segment(seg)

    def silence(self, seg: int, silence_ms: float) -> None:
        """Silence was put behind what was made so far."""
        self._timeline.inserted_ms += silence_ms
        if self._phonemes is not None:
            self._due_phonemes += self._phonemes.silence(seg, self._timeline.ms(self._num_frames))

    def _book(self, words: list[TimedWord]) -> None:
        if words and words[0].is_final:  # replaces what was guessed of its segment, told or not
            for guesses in (self._words, self._due_words):
                while guesses and not guesses[-1].is_final:
                    guesses.pop()
        self._words += words
        self._due_words += words

    # ---- what to tell

    def due(self, queued_ms: float) -> tuple[list[TimedWord], list[TimedPhoneme]]:
        """What ends within the first `queued_ms` and was not told yet."""
        words: list[TimedWord] = []
        phonemes: list[TimedPhoneme] = []
        while self._due_words and self._due_words[0].end_ms <= queued_ms:
            words.append(self._due_words.popleft())
        while self._due_phonemes and self._due_phonemes[0].end_ms <= queued_ms:
            phonemes.append(self._due_phonemes.popleft())
        return words, phonemes

    def finish(self, total_ms: float) -> tuple[list[TimedWord], list[TimedPhoneme]]:
        """What is left when the stream is `total_ms` long; nothing ends beyond its last sample."""
        self._words = [_within(word, total_ms) for word in self._words]
        words = [_within(word, total_ms) for word in self._due_words]
        phonemes = [
            replace(run, start_ms=min(run.start_ms, total_ms), end_ms=min(run.end_ms, total_ms))
            for run in self._due_phonemes
        ]
        self._due_words.clear()
        self._due_phonemes.clear()
        return words, [run for run in phonemes if run.end_ms > run.start_ms]

    # ---- what was heard

    def heard(self, position_ms: float) -> tuple[int, int]:
        """The code point up to which, and the number of words that, a listener at `position_ms` has
        heard: a word is heard when its end is at most the position."""
        ends = [word.c1 for word in self._words if word.end_ms <= position_ms]
        return max(ends, default=0), len(ends)


def _within(word: TimedWord, total_ms: float) -> TimedWord:
    return replace(word, start_ms=min(word.start_ms, total_ms), end_ms=min(word.end_ms, total_ms))
