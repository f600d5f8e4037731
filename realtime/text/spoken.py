"""One stretch of text without white space (or a few that belong together) as spoken words.

A lexer with an ordered list of patterns: the first that matches at the current place says what is
spoken there. Pure functions of the stretch and the little context in `Context`; where a stretch ends
and whether a sentence ends with it is decided in `joins` and `pipeline`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from realtime.text import lexicon as lex
from realtime.text import numbers

CLOSERS = "\"')]}>*_`|\0"
OPENERS = "\"'([{*_`\0"


@dataclass(frozen=True, slots=True)
class Piece:
    """What is spoken for `text[start:end]`: one word, a dash, or one mark of `. , ; : ! ?`.

    `exact`: the word is that very text, letter for letter.
    """

    text: str
    start: int
    end: int
    exact: bool = False


@dataclass(frozen=True, slots=True)
class Context:
    """What the words before, and the first letter after, say about a stretch."""

    normalize: bool = True
    line_start: bool = False
    after_month: bool = False
    after_number: bool = False
    after_capital: bool = False
    ends_sentence: bool = False
    digits_follow: bool = False
    is_part: bool = False  # a part of a longer stretch: what digits it has are read singly
    is_url: bool = False  # a part of a longer URL


_NUMBER = r"(?:\d+(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+,\d{1,2}(?![\d,])|\d+(?:\.\d+)?|(?<![\w.])\.\d+)"
_SCALE = r"(?i:hundred|thousand|(?:m|b|tr)illion|mio\.?|mrd\.?|mn|bn)"
_CODE = "|".join(lex.CODES)
_CURRENCIES = {**lex.SIGNS, **lex.CODES}
_UNIT = "|".join(re.escape(unit) for unit in sorted({**lex.UNITS, **lex.FIXED_UNITS}, key=len, reverse=True))
_HALF = r"(?P<half>[aApP])\.?[mM]\b\.?"

Say = Callable[[re.Match[str], Context], str | None]


def _say_date(m: re.Match[str], _: Context) -> str | None:
    return numbers.date(m[1], m[2], m[3])


def _half(m: re.Match[str]) -> str:
    return f"{m['half'].lower()} m" if m["half"] else ""


def _say_clock(m: re.Match[str], _: Context) -> str | None:
    if int(m[1]) > 24 or int(m[2]) > 59 or int(m[3] or 0) > 59:
        return None
    return numbers.clock(m[1], m[2], m[3], _half(m))


def _say_hour(m: re.Match[str], _: Context) -> str | None:
    return f"{numbers.cardinal(m[1])} {_half(m)}"


def _say_groups(m: re.Match[str], _: Context) -> str:
    """Version numbers and IP addresses."""
    groups = m[0].lstrip("vV").split(".")
    is_ip = len(groups) == 4 and all(len(group) <= 3 for group in groups)
    read, mark = (numbers.singly, " dot ") if is_ip else (numbers.cardinal, " point ")
    return ("v " if m[0][0] in "vV" else "") + mark.join(read(group) for group in groups)


def _scale(m: re.Match[str]) -> str:
    text = (m["scale"] or "").strip()
    return lex.ATTACHED_SCALES.get(text) or lex.SCALES.get(text.lower(), text)


def _say_money(m: re.Match[str], _: Context) -> str:
    return numbers.money(m["num"], _scale(m), *_CURRENCIES[m["cur"].strip()])


def _say_phone(m: re.Match[str], _: Context) -> str:
    return " ".join(numbers.singly(group) for group in m[0].split("-"))


def _say_ordinal(m: re.Match[str], _: Context) -> str:
    return numbers.ordinal(m[1].replace(",", ""))


def _say_decade(m: re.Match[str], _: Context) -> str | None:
    return numbers.decade(m[1])


def _say_fraction(m: re.Match[str], _: Context) -> str | None:
    return numbers.fraction(m[1], m[2])


def _say_mixed(m: re.Match[str], _: Context) -> str | None:
    spoken = numbers.fraction(m[2], m[3])
    if spoken is None:
        return None
    return f"{numbers.cardinal(m[1])} and {spoken.replace('one', 'a', 1)}"


def _say_ratio(m: re.Match[str], _: Context) -> str:
    return f"{numbers.cardinal(m[1])} {'to' if m[2] == ':' else 'by'} {numbers.cardinal(m[3])}"


def _say_number(m: re.Match[str], context: Context) -> str:
    if context.is_part:
        return numbers.singly(re.sub(r"\D", "", m[0]))
    if numbers.is_year(m[0]):
        return numbers.year(m[0])
    if context.after_month and len(m[0]) <= 2 and 1 <= int(m[0]) <= 31:
        return numbers.ordinal(m[0].lstrip("0"))
    return numbers.decimal(m[0])


# Tried in order where a number may start; a None from the right side lets the next one try.
_NUMBER_RULES: list[tuple[re.Pattern[str], Say]] = [
    (re.compile(r"(\d{4})[-/](\d{1,2})[-/](\d{1,2})(?!\d)"), _say_date),
    (re.compile(rf"(\d{{1,2}}):(\d\d)(?::(\d\d))?(?![\d:])(?:\s?{_HALF})?"), _say_clock),
    (re.compile(rf"(\d{{1,2}})\s?{_HALF}"), _say_hour),
    (re.compile(r"[vV]?\d+(?:\.\d+){2,}"), _say_groups),
    (
        re.compile(
            rf"(?:US|CA|AU|HK|NZ|[CA](?=\$))?(?P<cur>[$€£¥]|(?<![A-Za-z])(?:{_CODE})\s?)"
            rf"(?P<num>{_NUMBER})(?P<scale>[kKmMbB](?![A-Za-z0-9])|\s?{_SCALE}(?![A-Za-z]))?"
        ),
        _say_money,
    ),
    (
        re.compile(rf"(?P<num>{_NUMBER})(?P<scale>\s?{_SCALE})?\s?(?P<cur>[€£¥$¢]|(?:{_CODE})(?![A-Za-z]))"),
        _say_money,
    ),
    (re.compile(r"\d+(?:-\d+){2,}|\d{3}-\d{4}(?!\d)"), _say_phone),
    (re.compile(r"(\d+(?:,\d{3})*)(?:st|nd|rd|th)(?![A-Za-z])"), _say_ordinal),
    (re.compile(r"(\d{4}|\d0)'?s(?![A-Za-z])"), _say_decade),
    (re.compile(r"(\d+)[/⁄](\d+)(?![/\d])"), _say_fraction),
    (re.compile(r"(\d+)\0(\d+)⁄(\d+)"), _say_mixed),
    (re.compile(r"(\d+)([:x×])(\d+)(?![\d:x×A-Za-z])"), _say_ratio),
    (re.compile(_NUMBER), _say_number),
]
_NUMBER_START = re.compile(rf"\d|\.\d|[$€£¥]\.?\d|[vV]\d|(?:US|CA|AU|HK|NZ|[CA])[$€£¥]\.?\d|(?:{_CODE})\s?\d")
_UNIT_AFTER = re.compile(rf"\s?(?P<unit>{_UNIT})(?![A-Za-z])")
_SCALE_AFTER = re.compile(rf"\s?(?P<scale>{_SCALE})(?![A-Za-z])")

_POWERS = {"²": "square", "³": "cubic"}

_LETTERS = re.compile(r"[A-Za-z]+(?:['-][A-Za-z]+)*")
_PLAIN = re.compile(r"([a-z]+(?:'[a-z]+)?)([,;:]?)")
_INITIALS = re.compile(r"(?:[A-Za-z]\.){2,}(?:[A-Za-z](?![A-Za-z]))?|(?<![\w'])[A-Z]\.(?=$|[A-Z\"')\]])")
_PUNCTUATION = re.compile(r"[.,;:!?]+")
_DASH = re.compile(r"[-–—]{2,}|[–—]")
LIST_MARK = re.compile(r"(\d{1,3})[.)]")
_LINE_MARK = re.compile(r"#{1,6}|>+|[-*+•]|`{3,}.*|~{3,}.*|\[[ xX]\]")
_RULER = re.compile(r"[-|:=_*]{3,}")

_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?\.)+"
_TLD = r"(?:com|org|net|edu|gov|mil|int|info|io|ai|dev|app|co|uk|de|fr|eu|ch|us|me|tv|example|test|local)"
_URL = re.compile(
    rf"[a-zA-Z][a-zA-Z+.-]*://\S+|(?:www\.|mailto:)\S+|[\w.+-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*"
    rf"|localhost(?::\d+)?(?:/\S*)?|\d+(?:\.\d+){{3}}:\d+(?:/\S*)?"
    rf"|{_HOST}(?:{_TLD}(?![\w.-])|{_TLD}(?=\.?$))(?::\d+)?(?:[/?#]\S*)?"
    rf"|{_HOST}[a-z]{{2,}}(?::\d+(?:/\S*)?|/\S*)"
)
_URL_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z+.-]*://|mailto:")
_URL_PART = re.compile(r"[A-Za-z]+|\d|[^A-Za-z\d]")
_ABBREVIATION = re.compile(r"([A-Za-z][A-Za-z.]*?)\.")


def is_url_start(text: str) -> bool:
    """Whether the first part of an overlong stretch is a URL."""
    return _URL_SCHEME.match(text.lstrip(OPENERS)) is not None or text.startswith("www.")


def abbreviation(text: str) -> tuple[str, str] | None:
    """The key of the abbreviation, and its spoken form, that `text` (with its full stop) is."""
    match = _ABBREVIATION.fullmatch(text)
    if match is None:
        return None
    key = match[1].lower()
    spoken = lex.ALWAYS_WITHIN.get(key) or lex.MAYBE_LAST.get(key)
    if spoken is None or key in lex.CAPITAL_ONLY and match[1][0].islower():
        return None
    return key, spoken


def is_spelled(word: str) -> bool:
    """Capitals that are read letter by letter."""
    stem = word[:-1] if word.endswith("s") else word
    if len(stem) < 2 or not stem.isupper():
        return False
    return stem in lex.SPELLED or len(stem) <= 5 and not set(stem) & set("AEIOUY")


class _Lexer:
    """Collects the pieces of one stretch."""

    def __init__(self, text: str, context: Context) -> None:
        self.text, self.context = text, context
        self.pos = 0
        self.pieces: list[Piece] = []

    def say(self, spoken: str, end: int) -> None:
        self.pieces += [Piece(word, self.pos, end) for word in spoken.split()]
        self.pos = end

    def keep(self, end: int) -> None:
        """The text up to `end` is a word as it is, or several letter by letter."""
        word = self.text[self.pos : end]
        if is_spelled(word):
            self.spell(end)
        elif "-" in word and any(is_spelled(part) for part in word.split("-")):
            for part in word.split("-"):
                self.keep(self.pos + len(part))
                self.pos = min(self.pos + 1, end)
        else:
            self.pieces.append(Piece(word, self.pos, end, exact=True))
        self.pos = end

    def spell(self, end: int) -> None:
        """The letters up to `end` one by one; a plural s stays with the last."""
        for index in range(self.pos, end):
            if self.text[index].isupper() or self.text[index] != "s" and self.text[index].isalpha():
                self.pieces.append(Piece(self.text[index], index, index + 1, exact=True))
            elif self.text[index] == "s":
                self.pieces[-1] = Piece(self.pieces[-1].text + "'s", index - 1, index + 1)
        self.pos = end

    def run(self) -> list[Piece]:
        text, context = self.text, self.context
        if context.is_url or not context.is_part:
            opened = len(text) - len(text.lstrip(OPENERS)) if context.normalize else 0
            self.pos = opened
            self._whole()
            self.pos = 0 if self.pos == opened else self.pos
        while self.pos < len(text):
            self._step()
        end = len(text.rstrip(CLOSERS))
        is_marked = any(piece.text in ".!?" and piece.end >= end for piece in self.pieces)
        if context.ends_sentence and self.pieces and not is_marked:  # an abbreviation took the full stop
            index = sum(piece.start < end for piece in self.pieces)
            self.pieces.insert(index, Piece(".", end - 1, end))
        return self.pieces

    def _whole(self) -> None:
        """What a stretch can be as a whole, its closing marks aside."""
        core = self.text[self.pos :].rstrip(CLOSERS)
        if self.context.is_url:
            return self._url(self.pos + len(core.rstrip(".,;:!?")))
        bare = core.rstrip(".,;:!?")
        if bare in lex.BARE_TITLES:
            return self.say(lex.BARE_TITLES[bare], self.pos + len(bare) + core[len(bare) :].startswith("."))
        for stop in (core, core.rstrip(",;:!?")):
            if self.context.digits_follow and stop.endswith(".") and stop[:-1].lower() in lex.NUMBERED:
                return self.say(lex.NUMBERED[stop[:-1].lower()], self.pos + len(stop))
            if stop in ("St.", "St"):
                spoken = "street" if self.context.after_capital else "saint"
                return self.say(spoken, self.pos + len(stop))
            if (found := abbreviation(stop)) is not None:
                return self.say(found[1], self.pos + len(stop))
        if core == "vs":
            return self.say("versus", self.pos + 2)
        match = _URL.match(self.text, self.pos)
        if match is not None:
            url = match[0].rstrip(CLOSERS + ".,;:!?")
            if self.pos + len(url) >= self.pos + len(bare.rstrip(CLOSERS)):
                self._url(self.pos + len(url))

    def _url(self, end: int) -> None:
        scheme = _URL_SCHEME.match(self.text, self.pos)
        if scheme is not None:
            self.pos = scheme.end()
        while self.pos < end:
            part = _URL_PART.match(self.text, self.pos, end)
            assert part is not None
            if part[0].isalpha() and part[0].isascii():
                if part[0].lower() == "www":
                    self.spell(part.end())
                else:
                    self.keep(part.end())
            elif part[0].isdecimal():
                self.say(numbers.DIGITS[int(part[0])], part.end())
            else:
                self.say(lex.URL_SYMBOLS.get(part[0]) or lex.SYMBOLS.get(part[0], ""), part.end())

    def _step(self) -> None:
        text, pos = self.text, self.pos
        before = text[pos - 1] if pos else " "
        if (
            _NUMBER_START.match(text, pos)
            and (not before.isalpha() or text[pos].isdecimal())
            and self._number()
        ):
            return
        for pattern in (_INITIALS, _LETTERS):
            if (match := pattern.match(text, pos)) is None:
                continue
            if pattern is _LETTERS:
                return self.keep(match.end())
            if not (self.context.ends_sentence and match.end() - pos == 2):
                return self.spell(match.end())
        self._symbol(before)

    def _number(self) -> bool:
        rules = _NUMBER_RULES[-1:] if self.context.is_part else _NUMBER_RULES
        for pattern, say in rules:
            match = pattern.match(self.text, self.pos)
            spoken = match and say(match, self.context)
            if not match or not spoken:
                continue
            if say is _say_number and not self.context.is_part:
                if (match_unit := _UNIT_AFTER.match(self.text, match.end())) is not None:
                    return self._quantity(match[0], match.end(), match_unit)
                if (scale := _SCALE_AFTER.match(self.text, match.end())) is not None:
                    self.say(numbers.decimal(match[0]), match.end())
                    self.say(lex.SCALES[scale["scale"].lower()], scale.end())
                    return True
            self.say(spoken, match.end())
            return True
        return False

    def _quantity(self, number: str, end: int, match: re.Match[str]) -> bool:
        unit = match["unit"]
        self.say(numbers.decimal(number), end)
        name = lex.FIXED_UNITS.get(unit)
        if name is None:
            name = lex.UNITS[unit] + ("" if numbers.is_one(number) else "s")
        power = _POWERS.get(self.text[match.end() : match.end() + 1], "")
        self.say(f"{power} {name}", match.end() + bool(power))
        return True

    def _symbol(self, before: str) -> None:
        text, pos, normalize = self.text, self.pos, self.context.normalize
        char = text[pos]
        after = text[pos + 1] if pos + 1 < len(text) else " "
        between_digits = (before.isdecimal() or before in "%€°") and (after.isdecimal() or after in "$€£¥")
        if (match := _DASH.match(text, pos)) is not None and not (match[0] == "–" and between_digits):
            if pos > 0 or match.end() == len(text):
                self.pieces.append(Piece("-", pos, match.end()))
            self.pos = match.end()
        elif char in "-–":
            if between_digits:
                self.say("to", pos + 1)
            elif before in " (=<>\"'[:*/,+" and re.match(r"[$€£¥]?\.?\d", text[pos + 1 : pos + 4]):
                self.say("minus", pos + 1)
            elif len(text) == 1:
                self.pieces.append(Piece("-", pos, pos + 1))
            self.pos = pos + 1
        elif (match := _PUNCTUATION.match(text, pos)) is not None:
            self._punctuation(match, before, after)
        elif char in lex.SYMBOLS:
            self.say(lex.SYMBOLS[char], pos + 1)
        elif normalize and char == "|":
            self.pieces.append(Piece(",", pos, pos + 1))
            self.pos = pos + 1
        elif not normalize:
            self.say(lex.RAW_MARKS.get(char, ""), pos + 1)
        else:
            self.say(
                lex.MARKS[char] if char in lex.MARKS and self._is_operator(char, before, after) else "",
                pos + 1,
            )

    def _is_operator(self, char: str, before: str, after: str) -> bool:
        """Whether a mark stands where arithmetic has it, and not markup."""
        if char in "~#":
            return after.isdecimal() or after in "$€£¥"
        if len(self.text) == 1:
            return self.context.after_number
        if char in "<>":
            return after.isalnum() and (before.isalnum() or before == " ")
        return before.isalnum() and after.isdecimal()

    def _punctuation(self, match: re.Match[str], before: str, after: str) -> None:
        """A run of marks is spoken as one: the strongest."""
        run = match[0]
        mark = next((strong for strong in "?!." if strong in run), run[0])
        if run == "." and (after.islower() and before.isalnum() or after.isalpha() and before == " "):
            return self.say("dot", match.end())
        if not (run == "!" and after == "["):  # the mark of a Markdown image
            self.pieces.append(Piece(mark, match.start(), match.end()))
        self.pos = match.end()


def speak(text: str, context: Context) -> list[Piece]:
    """The pieces of one stretch, in the order they are spoken; no piece for what has no sound."""
    if (plain := _PLAIN.fullmatch(text)) is not None and not context.is_url and text != "vs":
        pieces = [Piece(plain[1], 0, plain.end(1), exact=True)]
        if plain[2]:
            pieces.append(Piece(plain[2], plain.start(2), plain.end(2)))
        return pieces
    if context.line_start and context.normalize:
        if (match := LIST_MARK.fullmatch(text)) is not None:
            words = numbers.cardinal(match[1]).split()
            return [Piece(word, 0, match.end(1)) for word in words] + [Piece(",", match.end(1), len(text))]
        if is_line_mark(text):
            return []
    return _Lexer(text, context).run()


def is_line_mark(text: str) -> bool:
    """A heading, quote, bullet, fence or rule mark: what starts a line and isn't spoken."""
    return _LINE_MARK.fullmatch(text) is not None or _RULER.fullmatch(text) is not None
