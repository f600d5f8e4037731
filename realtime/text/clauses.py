"""Incremental text, as it is, to clauses that are spoken one after the other.

Everything is decided one code point at a time, so any split of a text into deltas gives the same clauses,
and a clause once given never changes. What is cut is never a number with its unit, an abbreviation with
what it stands before, a URL, or something in brackets or between slashes, unless it alone is too long.
Knows no model; how many tokens a word has it is told.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from typing import Literal

from realtime.text.clean import Char
from realtime.text.joins import ends_sentence, joins
from realtime.text.verbatim import LINE_BREAKS

Mode = Literal["eager", "sentence", "manual"]
Span = tuple[int, int]

MIN_CLAUSE = 24  # letters before a clause mark ends the first clause, or a sentence another one
MAX_FIRST_TOKENS = 30  # an eager first clause does not wait for its end any longer
LONG_TOKENS = 40  # from this many on, the next clause mark ends a clause
MAX_STRETCH = 64  # characters that belong together without a space
MAX_STRETCH_AND_MARKS = 96  # the accents and closing marks of the last one included
MAX_WIDE_STRETCH = 16  # of a script that has no spaces
MAX_BRACKETS = 64  # characters an unclosed "[" or "/" is held together
WIDE_LETTERS = 3  # letters that one of a script without spaces counts for

STOPS, MARKS = ".!?", ",;:"  # where a space follows
WIDE_STOPS, WIDE_MARKS = "。！？｡؟।۔", "，；：、،؛"
WIDE = WIDE_STOPS + WIDE_MARKS
CLOSERS = "\"')]}>*_`”’»›）】」』》〉"
OPENERS = "\"'([{<*_`“‘«‹（【「『《〈"
_NO_PHONEMES = "/.!?,;" + WIDE  # before a space; a colon may be a long vowel's
_AS_ASCII = str.maketrans({**dict.fromkeys("”“„»«", '"'), **dict.fromkeys("’‘›‹", "'"), "…": "..."})


class End(IntEnum):
    """How good a place to cut the end of a stretch is."""

    NONE = 0
    SPACE = 1
    MARK = 2
    SENTENCE = 3


@dataclass(slots=True)
class _Stretch:
    """Characters without a space between them, and the white space in front."""

    lead: str = ""
    chars: list[str] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    at_line_start: bool = False
    breaks: bool = False  # more of the same word follows
    in_brackets: bool = False  # as it ended
    end: End = End.NONE
    num_tokens: int = 0

    @property
    def text(self) -> str:
        return "".join(self.chars)

    @property
    def is_speakable(self) -> bool:
        return any(is_speakable(char) for char in self.chars)


@dataclass(frozen=True, slots=True)
class Clause:
    """`lead` is the white space in front. `spans` has for each character of `text` the code points c0, c1
    of the input it came from (white space inside has those around it)."""

    lead: str
    text: str
    spans: tuple[Span, ...]
    num_tokens: int


class Clauses:
    """Characters in, clauses out.

    `eager` gives the first clause at a sentence's end or at a mark behind a few words, `sentence` at a
    sentence's end; in both, sentences after that are clauses if they are not very short. `manual` gives
    nothing before `flush`, and as much in one clause as `max_tokens` allow.
    """

    def __init__(self, num_tokens: Callable[[str], int], max_tokens: int, mode: Mode) -> None:
        self._num_tokens = num_tokens
        self._max_tokens = max_tokens
        self._mode = mode
        self._open = _Stretch(at_line_start=True)
        self._held: list[_Stretch] = []  # complete; what follows may tell whether a sentence ended
        self._clause: list[_Stretch] = []
        self._size = 0  # tokens of it
        self._out: list[Clause] = []
        self._bracket = 0  # characters since an unclosed "[", or "/" before phonemes
        self._closer = ""  # of that
        self._last = " "  # character
        self._is_first = True  # since the start, or a flush
        self._after_capital = False
        self.num_dropped = 0  # marks without a word, too many to be spoken with one

    def push(self, chars: Iterator[Char] | Sequence[Char]) -> list[Clause]:
        for char in chars:
            self._char(*char)
            self._last = char[0]
        return self._take()

    def flush(self) -> list[Clause]:
        """Everything that came is final. What can't be spoken without a word waits for one."""
        self._end_stretch()
        self._settle(final=True)
        self._close(len(self._clause))
        self._is_first = True
        return self._take()

    def _take(self) -> list[Clause]:
        out, self._out = self._out, []
        return out

    # ---- characters to stretches

    def _char(self, char: str, c0: int, c1: int) -> None:
        stretch = self._open
        if char.isspace():
            if self._closer == "/" and stretch.chars and stretch.chars[-1] in _NO_PHONEMES:
                self._bracket = 0  # a lone slash, or a path at the end of a sentence
            self._end_stretch()
            self._open.lead += char
            if char in LINE_BREAKS:
                self._settle(final=True)
                self._end_line()
                self._open.at_line_start = True
                self._bracket = 0
            return
        if stretch.chars and self._starts_another(char):
            self._end_stretch(breaks=True)
            stretch = self._open
        if char == "[":
            self._bracket, self._closer = 1, "]"
        elif self._bracket:
            is_over = char == self._closer or self._bracket > MAX_BRACKETS
            self._bracket = 0 if is_over else self._bracket + 1
        elif char == "/" and _may_open(self._last):
            self._bracket, self._closer = 1, "/"
        stretch.chars.append(char)
        stretch.spans.append((c0, c1))
        if self._held:
            self._settle(final=False)

    def _starts_another(self, char: str) -> bool:
        """Whether a character that no space precedes begins a new stretch: behind the marks of scripts
        without spaces, or where the stretch is too long."""
        chars = self._open.chars
        if len(chars) >= MAX_STRETCH_AND_MARKS:
            return True
        if char in CLOSERS or char in WIDE or _belongs(char) or _belongs(chars[-1]):
            return False
        core = self._open.text.rstrip(CLOSERS)
        if core and core[-1] in WIDE:
            return not (char.isdecimal() and core[-2:-1].isdecimal())  # 1，000
        if is_wide(char):
            is_marked = core[-1:] in MARKS + STOPS and core[-2:-1] != "" and is_wide(core[-2])
            return (
                is_marked or all(map(is_wide, chars[-MAX_WIDE_STRETCH:])) and len(chars) >= MAX_WIDE_STRETCH
            )
        return len(chars) >= MAX_STRETCH

    def _end_stretch(self, breaks: bool = False) -> None:
        stretch = self._open
        if not stretch.chars:
            return
        stretch.breaks = breaks
        stretch.in_brackets = self._bracket > 0
        self._open = _Stretch()
        self._held.append(stretch)
        self._settle(final=False)

    # ---- stretches to clauses

    def _settle(self, final: bool) -> None:
        """Adds the held stretches whose ends are known to the clause."""
        while self._held:
            stretch = self._held[0]
            after = self._held[1] if len(self._held) > 1 else self._open
            end = self._end_of(stretch, after.text, final)
            if end is None:
                return
            stretch.end = end
            stretch.num_tokens = self._num_tokens(stretch.text)
            del self._held[0]
            self._add(stretch)

    def _end_of(self, stretch: _Stretch, after: str, final: bool) -> End | None:
        if stretch.in_brackets:
            return End.NONE
        text = stretch.text
        core = text.rstrip(CLOSERS)
        last = core[-1:] or " "
        if last in WIDE_STOPS:
            return End.SENTENCE
        if last in WIDE_MARKS:
            return End.MARK
        if stretch.breaks:
            if is_wide(core[-2:-1] or " ") and last in STOPS + MARKS:
                return End.SENTENCE if last in STOPS else End.MARK
            return End.SPACE if is_wide(text[-1]) else End.NONE
        if last in MARKS or core in ("-", "–", "—"):
            return End.MARK
        plain = text.translate(_AS_ASCII)
        bare = plain.rstrip(CLOSERS)
        if bare.endswith(".") and bare[:-1].isdecimal() and len(bare) <= 3:
            return End.SPACE  # 3. Oktober, or the number of a list's item
        ends = ends_sentence(
            plain,
            after.translate(_AS_ASCII),
            final,
            line_start=stretch.at_line_start,
            sentence_empty=not self._clause or self._clause[-1].end is End.SENTENCE,
            after_capital=self._after_capital,
        )
        if ends is None:
            return None
        self._after_capital = text[0].isupper() and text.isalpha()
        return End.SENTENCE if ends else End.SPACE

    def _add(self, stretch: _Stretch) -> None:
        while self._clause and self._size + stretch.num_tokens > self._limit:
            if not self._make_room(stretch):
                break
        self._clause.append(stretch)
        self._size += stretch.num_tokens
        if self._is_complete(stretch.end):
            self._close(len(self._clause))

    def _end_line(self) -> None:
        self._after_capital = False
        if self._clause:
            self._clause[-1].end = End.SENTENCE
            if self._is_complete(End.SENTENCE):
                self._close(len(self._clause))

    @property
    def _limit(self) -> int:
        hurries = self._mode == "eager" and self._is_first
        return min(MAX_FIRST_TOKENS, self._max_tokens) if hurries else self._max_tokens

    def _is_complete(self, end: End) -> bool:
        if self._mode == "manual":
            return False
        num_letters = sum(_letters(char) for part in self._clause for char in [*part.lead, *part.chars])
        if end is End.SENTENCE:
            return self._is_first or num_letters >= MIN_CLAUSE
        if end is End.MARK:
            if self._is_first and self._mode == "eager":
                return num_letters >= MIN_CLAUSE
            return self._size >= LONG_TOKENS
        return False

    def _make_room(self, after: _Stretch) -> bool:
        """A full clause is cut at the best kind of place, the last of it; where there is no word, nothing
        of it can be spoken. What belongs together stays so while the model can take it: False."""
        first = next((i for i, stretch in enumerate(self._clause) if stretch.is_speakable), None)
        if first is None:
            self.num_dropped += sum(len(stretch.chars) for stretch in self._clause)
            self._clause, self._size = [], 0
            return True
        ends = self._places(after)[first:]
        best = max(ends)
        if best is End.NONE:
            if self._size + after.num_tokens <= self._max_tokens:
                return False
            size = len(ends)
        else:
            size = len(ends) - ends[::-1].index(best)
        self._close(first + size)
        return True

    def _places(self, after: _Stretch) -> list[End]:
        """How good a place the end of each stretch of the clause is, now that the next one is known."""
        ends: list[End] = []
        head = ""  # with the stretches before that the newest one belongs to
        for stretch, following in zip(self._clause, [*self._clause[1:], after], strict=True):
            text = stretch.text.translate(_AS_ASCII)
            head = f"{head} {text}" if head else text
            keeps = stretch.end is End.SPACE and _keeps(head, following.text.translate(_AS_ASCII))
            ends.append(End.NONE if keeps else stretch.end)
            head = head if keeps else ""
        return ends

    def _close(self, size: int) -> None:
        """The first `size` stretches are a clause, if there is a word among them."""
        stretches = self._clause[:size]
        if not any(stretch.is_speakable for stretch in stretches):
            return
        self._clause = self._clause[size:]
        num_tokens = sum(stretch.num_tokens for stretch in stretches)
        self._size -= num_tokens
        self._is_first = False
        text, spans = "", list[Span]()
        for stretch in stretches:
            lead = stretch.lead if text else ""
            place = spans[-1][1] if spans else 0
            spans += [(place, place)] * len(lead) + stretch.spans
            text += lead + stretch.text
        self._out.append(Clause(stretches[0].lead, text, tuple(spans), num_tokens))


@lru_cache(maxsize=4096)
def is_wide(char: str) -> bool:
    """A letter of a script that has no spaces between words (Korean has)."""
    is_hangul = "\uac00" <= char <= "\ud7a3"
    return char.isalpha() and not is_hangul and unicodedata.east_asian_width(char) in "WF"


@lru_cache(maxsize=4096)
def is_speakable(char: str) -> bool:
    """Something to say by itself: a letter, a digit, a currency sign."""
    return unicodedata.category(char)[0] in "LN" or unicodedata.category(char) == "Sc"


@lru_cache(maxsize=4096)
def _belongs(char: str) -> bool:
    """A mark or joiner that is part of the character before it."""
    return unicodedata.category(char)[0] == "M" or char in "\u200c\u200d"


def _may_open(char: str) -> bool:
    """A slash behind this character is not within a word."""
    return char.isspace() or char in OPENERS or char in WIDE or is_wide(char)


def _keeps(head: str, after: str) -> bool:
    """Whether a space within a sentence is no place to cut at: behind an abbreviation, an initial or an
    ordinal, within a number, and between a number and what it counts."""
    core = head.rstrip(CLOSERS)
    if core.endswith(".") and not core.endswith(".."):
        return True
    if head[-1:].isdecimal() and after[:1].isdecimal():
        return True
    return joins(head, after, complete=True) is True


def _letters(char: str) -> int:
    return WIDE_LETTERS if is_wide(char) else 1
