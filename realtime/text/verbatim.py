"""Code points as they came, for models that read any text themselves, each with its place in the input.

Left out is what no text needs: control characters, invisible format characters that have no say in how a
word is written, and halves of a surrogate pair without the other half. One code point is looked at at a
time, so the split of the text into deltas cannot matter.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator

from realtime.text.clean import Char

JOINERS = frozenset("\u200c\u200d")  # part of the spelling in Persian and Hindi, and of emoji
LINE_BREAKS = frozenset("\n\v\f\r\x1c\x1d\x1e\x85\u2028\u2029")


class Verbatim:
    """Deltas in, `Char`s out. Counts what was received and what could not be spoken."""

    def __init__(self, join_sentences: bool = False) -> None:
        """`join_sentences` treats each delta as a sentence of its own: a space is put between deltas."""
        self.num_chars = 0
        self.num_dropped = 0
        self.has_text = False
        self._join_sentences = join_sentences
        self._high: str | None = None  # first half of a surrogate pair

    def push(self, delta: str) -> Iterator[Char]:
        if self._join_sentences and delta and self.num_chars and not "\udc00" <= delta[0] <= "\udfff":
            yield " ", self.num_chars, self.num_chars
        for char in delta:
            c1 = self.num_chars = self.num_chars + 1
            c0 = c1 - 1
            if "\ud800" <= char < "\udc00":
                self.flush()
                self._high = char
                continue
            if "\udc00" <= char <= "\udfff":
                if self._high is None:
                    self.num_dropped += 1
                    continue
                char = (self._high + char).encode("utf-16", "surrogatepass").decode("utf-16")
                self._high = None
                c0 -= 1
            elif self._high is not None:
                self.flush()
            if char in LINE_BREAKS or char == "\t":
                yield char, c0, c1
            elif unicodedata.category(char) not in ("Cc", "Cf") or char in JOINERS:
                self.has_text = self.has_text or not (char.isspace() or char in JOINERS)
                yield char, c0, c1

    def flush(self) -> None:
        """Half a pair that nothing completes is dropped."""
        if self._high is not None:
            self._high = None
            self.num_dropped += 1
