"""Text as it comes in, spoken words as soon as they are certain.

Everything is decided one code point at a time from what came before it, so any split of a text into
deltas gives the same items, and an item once given never changes. Only `flush` and `end` change what
is said, by making everything pending final. Knows nothing of tokens or models.
"""

from __future__ import annotations

from dataclasses import dataclass

from realtime.text.clean import GAP, Cleaner
from realtime.text.joins import ends_sentence, joins
from realtime.text.markup import Markup
from realtime.text.numbers import MONTHS
from realtime.text.spoken import Context, Piece, is_line_mark, is_url_start, speak

MAX_WORD = 64  # characters an unfinished word is held

Span = tuple[int, int]
_MARKS = frozenset(".,;:!?")
_MONTHS = frozenset([*MONTHS, *(month[:3] for month in MONTHS), "Sept"])


@dataclass(frozen=True, slots=True)
class Word:
    """A word to speak with the punctuation behind it, `-` for a spaced dash.

    `spans` has for each character the code points c0, c1 of the input it came from. A word that is
    `glued` is punctuation that belongs to the word before it, without a space.
    """

    text: str
    spans: tuple[Span, ...]
    glued: bool = False

    @property
    def c0(self) -> int:
        return min(span[0] for span in self.spans)

    @property
    def c1(self) -> int:
        return max(span[1] for span in self.spans)


@dataclass(frozen=True, slots=True)
class Cut:
    """The words since the last cut are complete in themselves: a sentence, a line."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Silence that a tag at c0..c1 asked for; what came before it is complete."""

    ms: int
    c0: int
    c1: int


Item = Word | Cut | Pause


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Characters between white space, or a part of too many of them."""

    text: str
    spans: tuple[Span, ...]
    line_start: bool
    is_cut: bool  # more of the word follows
    is_part: bool  # its digits are, or may be, part of a longer run
    is_url: bool


class TextPipeline:
    """Deltas in, words, cuts and pauses out.

    `join_sentences` treats each delta as a sentence of its own: a space is put between deltas. With
    `normalize` off, markup is read out by the names of its characters.
    """

    def __init__(self, normalize: bool = True, join_sentences: bool = False) -> None:
        self._normalize = normalize
        self._join_sentences = join_sentences
        self._cleaner = Cleaner()
        self._markup = Markup(normalize, self._char, self._pause)
        self._out: list[Item] = []
        self._text: list[str] = []  # the unfinished stretch
        self._spans: list[Span] = []
        self._part_of: str | None = None  # it goes on after a part: "url", "digits" or "word"
        self._held: list[_Stretch] = []  # finished, but what follows may change them
        self._line_start = True
        self._num_words = 0  # since the last cut
        self._last_word = ""
        self._after_month = self._after_number = self._after_capital = False

    @property
    def num_chars(self) -> int:
        """Code points received."""
        return self._cleaner.num_chars

    @property
    def num_dropped(self) -> int:
        """Visible characters that could not be spoken."""
        return self._cleaner.num_dropped

    @property
    def has_text(self) -> bool:
        """Whether anything but white space and invisible characters has come."""
        return self._cleaner.has_text

    @property
    def settled(self) -> int:
        """Code points of the input, from its start, that nothing held back comes from."""
        if self._held:
            return self._held[0].spans[0][0]
        if self._spans:
            return self._spans[0][0]
        if (held_from := self._markup.held_from) is not None:
            return held_from
        return self.num_chars - self._cleaner.is_holding

    def push(self, delta: str) -> list[Item]:
        """What has become certain with `delta`, in the order of the text."""
        if self._join_sentences and delta and self.num_chars and not "\udc00" <= delta[0] <= "\udfff":
            self._markup.push(" ", self.num_chars, self.num_chars)
        for char in self._cleaner.push(delta):
            self._markup.push(*char)
        return self._take()

    def flush(self) -> list[Item]:
        """Everything that came is final: a half word is a word, and the sentence is over."""
        self._cleaner.flush()
        self._markup.flush()
        self._end_line()
        return self._take()

    def _take(self) -> list[Item]:
        out, self._out = self._out, []
        return out

    # ---- characters to stretches

    def _char(self, char: str, c0: int, c1: int) -> None:
        if char == " ":
            self._end_stretch()
        elif char == "\n":
            self._end_line()
            self._line_start = True
        elif char == "":
            if self._spans and self._spans[-1][1] == c0:
                self._spans[-1] = (self._spans[-1][0], c1)
        elif char == GAP and self._text and self._text[-1] == GAP:
            pass
        else:
            if len(self._text) == MAX_WORD:
                self._end_stretch(is_part=True)
            self._text.append(char)
            self._spans.append((c0, c1))
            if self._held:
                self._settle()

    def _pause(self, ms: int, c0: int, c1: int) -> None:
        self._end_line()
        if ms > 0:
            self._out.append(Pause(ms, c0, c1))

    def _end_line(self) -> None:
        self._end_stretch()
        self._settle(final=True)
        self._cut()
        self._part_of = None

    def _end_stretch(self, is_part: bool = False) -> None:
        part_of, self._part_of = self._part_of, None
        if not self._text:
            return
        text = "".join(self._text)
        is_url = part_of == "url" or is_part and part_of is None and is_url_start(text)
        if is_part:
            self._part_of = "url" if is_url else "digits" if text[-1].isdecimal() else "word"
        in_run = is_part or part_of == "digits"
        self._held.append(_Stretch(text, tuple(self._spans), self._line_start, is_part, in_run, is_url))
        self._line_start = self._line_start and self._normalize and is_line_mark(text)
        self._text, self._spans = [], []
        self._settle(final=is_part)

    # ---- stretches to words

    def _settle(self, final: bool = False) -> None:
        """Speak the held stretches that nothing can change any more."""
        while self._held:
            group = self._group(final)
            if group is None:
                return
            after = self._after(len(group))
            text = " ".join(stretch.text for stretch in group)
            ends: bool | None = False
            if not group[-1].is_cut:
                ends = ends_sentence(
                    text,
                    after,
                    final,
                    line_start=group[0].line_start,
                    sentence_empty=not self._num_words,
                    after_capital=self._after_capital,
                )
            if ends is None:
                return
            del self._held[: len(group)]
            self._speak(text, group, after, ends)
            if ends:
                self._cut()

    def _after(self, index: int) -> str:
        return self._held[index].text if index < len(self._held) else "".join(self._text)

    def _group(self, final: bool) -> list[_Stretch] | None:
        """The first held stretches that are read together; None while that is not known."""
        size = 1
        while not self._held[0].is_part:
            head = " ".join(stretch.text for stretch in self._held[:size])
            complete = final or size < len(self._held)
            verdict = joins(head, self._after(size), complete)
            if verdict is None:
                return None
            if not verdict or size == len(self._held):
                break
            size += 1
        return self._held[:size]

    def _speak(self, text: str, group: list[_Stretch], after: str, ends: bool) -> None:
        spans: list[Span] = []
        for stretch in group:
            if spans:
                spans.append((spans[-1][1], spans[-1][1]))  # the space between them
            spans += stretch.spans
        context = Context(
            normalize=self._normalize,
            line_start=group[0].line_start,
            after_month=self._after_month,
            after_number=self._after_number,
            after_capital=self._after_capital,
            ends_sentence=ends,
            digits_follow=after[:1].isdecimal(),
            is_part=group[0].is_part,
            is_url=group[0].is_url,
        )
        pieces = speak(text, context)
        self._emit(pieces, spans)
        self._after_month = text.strip("\"'()[],.") in _MONTHS
        self._after_number = text[-1].isdecimal()
        self._after_capital = text[0].isupper() and text.isalpha()

    def _emit(self, pieces: list[Piece], spans: list[Span]) -> None:
        words: list[Word] = []
        for piece in pieces:
            covered = spans[piece.start : piece.end]
            union = (covered[0][0], covered[-1][1])
            if piece.text in _MARKS:
                if self._last_word[-1:] in _MARKS or self._last_word == "-" or not self._num_words:
                    continue
                if words:
                    words[-1] = Word(words[-1].text + piece.text, (*words[-1].spans, union), words[-1].glued)
                else:
                    words.append(Word(piece.text, (union,), glued=True))
                self._last_word = words[-1].text
                continue
            if piece.text == "-" and (not self._num_words or self._last_word == "-"):
                continue
            words.append(Word(piece.text, tuple(covered) if piece.exact else (union,) * len(piece.text)))
            self._num_words += 1
            self._last_word = piece.text
        self._out += words

    def _cut(self) -> None:
        if self._num_words:
            self._out.append(Cut())
        self._num_words = 0
        self._last_word = ""
        self._after_month = self._after_number = self._after_capital = False
