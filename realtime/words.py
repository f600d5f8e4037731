"""When each word of a context's input was spoken, and with which sounds.

Pure bookkeeping over what the model says of itself: each frame tells how many tokens it finished and
which phonemes it holds. Times are milliseconds from the context's first sample; places are code points
of the context's input. Knows no protocol and no audio.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

STRESS = ("ˈ", "ˌ")  # no sound of their own: their cell takes the next one's
MAX_RUN_MS = 1000.0  # a longer run of one sound is told in parts


@dataclass(frozen=True, slots=True)
class SpokenWord:
    """The tokens first_token .. last_token-1 of a segment speak the input's c0 .. c1-1; words whose
    places overlap or change order ("$5 million") are one."""

    first_token: int
    last_token: int
    c0: int
    c1: int


@dataclass(frozen=True, slots=True)
class TimedWord:
    """`is_final` is False for an estimate that a later one replaces."""

    start_ms: float
    end_ms: float
    c0: int
    c1: int
    seg: int
    is_final: bool = True


@dataclass(frozen=True, slots=True)
class TimedPhoneme:
    """`symbol` is IPA, "" for silence."""

    symbol: str
    start_ms: float
    end_ms: float
    seg: int


@dataclass(slots=True)
class _Segment:
    """The segment being spoken: token ends and silent cells, in frames of the context."""

    start: float
    token_ends: list[float] = field(default_factory=list)
    num_told: int = 0


class Timeline:
    """Frames of the context to milliseconds: the codec's delay, and silence that was inserted."""

    def __init__(self, frame_ms: float, delay_ms: float) -> None:
        self.frame_ms = frame_ms
        self.delay_ms = delay_ms
        self.inserted_ms = 0.0

    def ms(self, frames: float) -> float:
        return frames * self.frame_ms + self.delay_ms + self.inserted_ms


class WordTimes:
    """From the pace of each frame to the times of words.

    The n tokens that a frame finishes end evenly spread; a token starts where the one before ends, the
    first at its segment's start; what is unfinished when a segment ends, ends with it. (The last tokens
    of a frame end up to half a frame after it, so where a segment stops right there the next one's first
    token starts then.) Silent cells (half frames) at a word's start and end are trimmed, unless nothing
    would be left.
    """

    def __init__(self, timeline: Timeline, lag_frames: float = 0.0) -> None:
        """`lag_frames`: how much later than the sound the model counts a token as finished."""
        self._timeline = timeline
        self._lag_frames = lag_frames
        self._segment: _Segment | None = None
        self._num_frames = 0
        self._last_end = 0.0
        self._silent: dict[int, bool] = {}  # by cell of the context, of the running segment

    def frame(
        self, seg: int, num_finished: int, silent: tuple[bool, bool], words: Sequence[SpokenWord]
    ) -> list[TimedWord]:
        """Books one frame; returns the words it finished. `words` are those known of the segment."""
        frame = self._num_frames
        segment = self._running()
        self._silent[2 * frame], self._silent[2 * frame + 1] = silent
        for j in range(1, num_finished + 1):
            segment.token_ends.append(frame + 0.5 + (j - 0.5) / num_finished)
        self._num_frames += 1
        return self._finished(seg, words)

    def end_segment(self, seg: int, words: Sequence[SpokenWord]) -> list[TimedWord]:
        """The words that were unfinished: they end where the segment does."""
        segment = self._running()
        num_tokens = words[-1].last_token if words else 0
        end = max(float(self._num_frames), *segment.token_ends[-1:], 0.0)
        segment.token_ends += [end] * (num_tokens - len(segment.token_ends))
        told = self._finished(seg, words)
        self._last_end = max(self._last_end, *segment.token_ends[-1:], 0.0)
        self._segment = None
        self._silent.clear()
        return told

    def _running(self) -> _Segment:
        if self._segment is None:
            self._segment = _Segment(max(float(self._num_frames), self._last_end))
        return self._segment

    def _finished(self, seg: int, words: Sequence[SpokenWord]) -> list[TimedWord]:
        segment = self._running()
        told = []
        while segment.num_told < len(words):
            word = words[segment.num_told]
            if word.last_token > len(segment.token_ends):
                break
            first = word.first_token
            start = segment.token_ends[first - 1] if first else segment.start
            start, end = self._trimmed(start, segment.token_ends[word.last_token - 1])
            start_ms, end_ms = (self._timeline.ms(self._heard_at(place)) for place in (start, end))
            told.append(TimedWord(start_ms, end_ms, word.c0, word.c1, seg))
            segment.num_told += 1
        return told

    def _heard_at(self, place: float) -> float:
        """Less the lag; within twice the lag of the segment's start half of it, so that order stays and
        no word loses its length."""
        start = self._running().start
        return max(place - self._lag_frames, (start + place) / 2) if self._lag_frames else place

    def _trimmed(self, start: float, end: float) -> tuple[float, float]:
        """Without the silent half frames at both ends."""
        first, last = start, end
        while first < end and self._silent.get(int(first * 2), False):
            first = (int(first * 2) + 1) / 2
        while last > first and self._silent.get(_cell_before(last), False):
            last = _cell_before(last) / 2
        return (first, last) if first < last else (start, end)


def _cell_before(frames: float) -> int:
    """The cell that ends at, or holds, the moment just before `frames`."""
    cell = int(frames * 2)
    return cell - 1 if cell == frames * 2 else cell


class EstimatedTimes:
    """For models that do not tell their pace: a segment's tokens are spread evenly over its audio.

    While a segment runs, words are guessed from the pace of the segments before it and are not final;
    at its end all of them are told again from its length.
    """

    FIRST_FRAMES_PER_TOKEN = 4.0  # about three tokens a second, until a segment has told better

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._num_frames = 0
        self._first_frame = 0
        self._num_told = 0
        self._tokens = 0
        self._token_frames = 0

    def frame(
        self, seg: int, num_finished: int, silent: tuple[bool, bool], words: Sequence[SpokenWord]
    ) -> list[TimedWord]:
        self._num_frames += 1
        pace = self._token_frames / self._tokens if self._tokens else self.FIRST_FRAMES_PER_TOKEN
        told = []
        while self._num_told < len(words):
            word = words[self._num_told]
            if self._first_frame + word.last_token * pace > self._num_frames:
                break
            told.append(self._word(seg, word, pace, is_final=False))
            self._num_told += 1
        return told

    def end_segment(self, seg: int, words: Sequence[SpokenWord]) -> list[TimedWord]:
        num_tokens = words[-1].last_token if words else 0
        num_frames = self._num_frames - self._first_frame
        told = []
        if num_tokens:
            told = [self._word(seg, word, num_frames / num_tokens, is_final=True) for word in words]
            self._tokens += num_tokens
            self._token_frames += num_frames
        self._first_frame = self._num_frames
        self._num_told = 0
        return told

    def _word(self, seg: int, word: SpokenWord, pace: float, *, is_final: bool) -> TimedWord:
        start = self._timeline.ms(self._first_frame + word.first_token * pace)
        end = self._timeline.ms(self._first_frame + word.last_token * pace)
        return TimedWord(start, end, word.c0, word.c1, seg, is_final)


class PhonemeTimes:
    """Cells of half a frame to runs of one sound that tile the context without a gap."""

    def __init__(self, timeline: Timeline, symbols: Sequence[str]) -> None:
        self._timeline = timeline
        self._symbols = symbols
        self._num_cells = 0
        self._stressed = 0  # cells that wait for the sound they stress
        self._run: TimedPhoneme | None = None
        self._end_ms = 0.0  # told or running up to here
        self._out: list[TimedPhoneme] = []

    def frame(self, seg: int, codes: tuple[int, int]) -> list[TimedPhoneme]:
        """Books the two cells of a frame; returns the runs that have ended."""
        if self._end_ms == 0.0:
            self._add("", self._timeline.ms(0.0), seg)  # the codec's delay
        for code in codes:
            self._num_cells += 1
            symbol = self._symbols[code]
            if symbol in STRESS:
                self._stressed += 1
                continue
            for late in range(self._stressed, -1, -1):
                self._add(symbol, self._timeline.ms((self._num_cells - late) / 2), seg)
            self._stressed = 0
        return self._take()

    def end_segment(self, seg: int) -> list[TimedPhoneme]:
        if self._stressed:
            self._add("", self._timeline.ms(self._num_cells / 2), seg)
            self._stressed = 0
        self._close()
        return self._take()

    def silence(self, seg: int, until_ms: float) -> list[TimedPhoneme]:
        """Silence was inserted up to `until_ms`."""
        self._close()
        self._add("", until_ms, seg)
        self._close()
        return self._take()

    def _add(self, symbol: str, end_ms: float, seg: int) -> None:
        run = self._run
        if run is not None and (run.symbol != symbol or end_ms - run.start_ms > MAX_RUN_MS):
            self._close()
            run = None
        if run is None:
            self._run = TimedPhoneme(symbol, self._end_ms, end_ms, seg)
        else:
            self._run = replace(run, end_ms=end_ms)
        self._end_ms = end_ms

    def _close(self) -> None:
        if self._run is not None:
            self._out.append(self._run)
            self._run = None

    def _take(self) -> list[TimedPhoneme]:
        out, self._out = self._out, []
        return out


def by_character(
    words: Sequence[TimedWord], covered: int, until: int, previous_ms: float, seg: int = 0
) -> list[TimedWord]:
    """Each code point from `covered` to `until` once: a word's time is divided evenly over its
    characters, the others have no length, at the end of the word before (`previous_ms` at first)."""
    characters = []
    place = covered
    for word in words:
        for c in range(place, word.c0):
            characters.append(replace(word, start_ms=previous_ms, end_ms=previous_ms, c0=c, c1=c + 1))
        step_ms = (word.end_ms - word.start_ms) / (word.c1 - word.c0)
        for c in range(word.c0, word.c1):
            start_ms = word.start_ms + (c - word.c0) * step_ms
            characters.append(replace(word, start_ms=start_ms, end_ms=start_ms + step_ms, c0=c, c1=c + 1))
        place, previous_ms = word.c1, word.end_ms
    if place < until:
        last = words[-1] if words else TimedWord(0, 0, 0, 0, seg)
        for c in range(place, until):
            characters.append(replace(last, start_ms=previous_ms, end_ms=previous_ms, c0=c, c1=c + 1))
    return characters
