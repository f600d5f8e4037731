"""Code points to the few characters the rest of the pipeline knows, each with its place in the input.

What comes out is printable ASCII, a handful of symbols that have a spoken name, a space, a line
break, or `GAP` where something that can't be spoken stood. One code point is looked at at a time, so
the split of the text into deltas cannot matter. Knows nothing of words or markup.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from functools import lru_cache

Char = tuple[str, int, int]  # a character and the code points c0, c1 of the input it came from

GAP = "\0"  # stands for dropped characters between two words; no control character survives cleaning
MARK = ""  # a combining mark: belongs to the character before it and makes no sound

# Symbols beyond ASCII that the spoken forms know by name.
NAMED = frozenset("€£¥¢°×÷±≈≤≥≠§©№→–—•²³⁄√∞αβγδθλμπσωΩΔ")

_SAME = {
    **dict.fromkeys("‘’‛′ʼ＇`´", "'"),
    **dict.fromkeys("“”„‟″«»‹›「」『』【】《》〈〉", '"'),
    **dict.fromkeys("‐‑−﹣－", "-"),
    **dict.fromkeys("‒–", "–"),
    **dict.fromkeys("—―⸺⸻", "—"),
    **dict.fromkeys("。।۔", "."),
    **dict.fromkeys("、،", ","),
    **dict.fromkeys("●▪‣◦∙", "•"),
    **dict.fromkeys("⇒⟶", "→"),
    **dict.fromkeys("¿¡®", ""),
    **{"؟": "?", "؛": ";", "∕": "/", "∗": "*", "〜": "~", "～": "~", "․": "."},
    **{"ß": "ss", "ẞ": "SS", "æ": "ae", "Æ": "AE", "œ": "oe", "Œ": "OE"},
    **{"ø": "o", "Ø": "O", "ł": "l", "Ł": "L", "đ": "d", "Đ": "D", "ð": "d", "Ð": "D"},
    **{"þ": "th", "Þ": "Th", "ı": "i", "ħ": "h", "Ħ": "H"},
}
del _SAME["`"]  # a code mark, not a quote

# Sentence marks that no white space follows in the scripts that use them.
_WIDE_STOPS = frozenset("。！？｡؟।۔")
_LINE_BREAKS = frozenset("\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029")


@lru_cache(maxsize=4096)
def clean_char(char: str) -> str:
    """The speakable form of one code point: possibly several characters, `GAP` where it has none."""
    if " " < char <= "~":
        return char
    if char in _LINE_BREAKS:
        return "\n"
    if char.isspace():
        return " "
    category = unicodedata.category(char)
    if category in ("Cc", "Cf"):
        return ""
    if char in _SAME:
        return _SAME[char]
    out = ""
    for part in char if char in NAMED else unicodedata.normalize("NFKD", char):
        if " " < part <= "~" or part in NAMED:
            out += part
        elif part in _SAME:
            out += _SAME[part]
        elif part.isdecimal():
            out += str(unicodedata.decimal(part))
        elif not part.isspace() and unicodedata.category(part)[0] != "M":
            return GAP
    if "⁄" in out:
        return GAP + out  # 1½ is not 11/2
    return out or GAP


class Cleaner:
    """Deltas in, `Char`s out. Counts what was received and what could not be spoken."""

    def __init__(self) -> None:
        self.num_chars = 0
        self.num_dropped = 0
        self.has_text = False
        self._high: str | None = None  # first half of a surrogate pair

    @property
    def is_holding(self) -> bool:
        return self._high is not None

    def push(self, delta: str) -> Iterator[Char]:
        for char in delta:
            c1 = self.num_chars = self.num_chars + 1
            c0 = c1 - 1
            if "\ud800" <= char <= "\udfff":
                if char < "\udc00":
                    self.flush()
                    self._high = char
                    continue
                if self._high is None:
                    self.num_dropped += 1
                    continue
                char = (self._high + char).encode("utf-16", "surrogatepass").decode("utf-16")
                self._high = None
                c0 -= 1
            elif self._high is not None:
                self.flush()
            yield from self._clean(char, c0, c1)

    def flush(self) -> None:
        """Half a pair that nothing completes is dropped."""
        if self._high is not None:
            self._high = None
            self.num_dropped += 1

    def _clean(self, char: str, c0: int, c1: int) -> Iterator[Char]:
        if " " < char <= "~":
            self.has_text = True
            yield char, c0, c1
            return
        if unicodedata.category(char)[0] == "M":
            yield MARK, c0, c1
            return
        spoken = clean_char(char)
        if spoken and spoken not in " \n":
            self.has_text = True
            if spoken == GAP:
                self.num_dropped += 1
        for part in spoken:
            yield part, c0, c1
        if char in _WIDE_STOPS:
            yield " ", c1, c1
