"""Pause tags, HTML tags, entities and link targets: what spans several characters and is not spoken.

A possible construct is held from its first character until it is complete, impossible or too long;
then it is acted on, or passed on as the text it is. Marks that need no holding (emphasis, headings,
bullets) are left to the words.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable

from realtime.text.clean import Char, clean_char

MAX_PAUSE_MS = 30_000
DEFAULT_PAUSE_MS = 500
MAX_PAUSE_TAG = 32  # characters an unclosed "[pause" is held
MAX_TAG = 128  # characters an unclosed "<name" is held
MAX_LINK = 256  # characters an unclosed "](" is held

_PAUSE = re.compile(r"\[\s*pause(?:[\s:=]+(?:(\d+(?:\.\d*)?|\.\d+)\s*(ms|sec|s)?\s*)?)?\]", re.I)
_PAUSE_REST = re.compile(r"(?:[\s:=]+(?:(?:\d+(?:\.\d*)?|\.\d*)\s*(?:ms|m|sec|se|s)?\s*)?)?", re.I)
_ENTITY_START = re.compile(r"&(?:#(?:\d{0,7}|[xX][0-9a-fA-F]{0,6})|[a-zA-Z][a-zA-Z0-9]{0,9})?")
_TAG_NAME = re.compile(r"</?([a-z][a-z0-9]*)", re.I)

_BLOCK_TAGS = frozenset(
    "p div br hr ul ol li dl dt dd h1 h2 h3 h4 h5 h6 table thead tbody tfoot tr td th caption pre blockquote"
    " section article header footer nav main aside details summary figure figcaption form title body head"
    " html script style".split()
)
_INLINE_TAGS = frozenset(
    "a abbr b big button cite code del dfn em font i img input ins kbd label link mark meta option q s samp"
    " select small source span strike strong sub sup svg tt u var video audio wbr".split()
)
_TAGS = _BLOCK_TAGS | _INLINE_TAGS
_TAG_STARTS = frozenset(name[:n] for name in _TAGS for n in range(len(name) + 1))

_Verdict = bool | None  # complete, impossible, or not known yet


def pause_ms(tag: str) -> int | None:
    """The length a complete tag asks for, or None where it is no pause tag."""
    match = _PAUSE.fullmatch(tag)
    if match is None:
        return None
    number, unit = match.groups()
    if number is None:
        return DEFAULT_PAUSE_MS
    value = float(number) * (1 if (unit or "s").lower() == "ms" else 1000)
    return round(min(value, MAX_PAUSE_MS))


def _pause(text: str) -> _Verdict:
    if text[-1] == "]":
        return pause_ms(text) is not None
    body = text[1:].lstrip().lower()
    if len(text) > MAX_PAUSE_TAG or "\n" in text:
        return False
    if len(body) <= len("pause"):
        return None if "pause".startswith(body) else False
    ok = body.startswith("pause") and _PAUSE_REST.fullmatch(body, len("pause"))
    return None if ok else False


def _tag(text: str) -> _Verdict:
    last = text[-1]
    if text.startswith("<!--"):
        return True if text.endswith("-->") else None if len(text) <= MAX_TAG else False
    if text in ("<!", "<!-"):
        return None
    if last in "<\n" and len(text) > 1 or len(text) > MAX_TAG:
        return False
    match = _TAG_NAME.match(text)
    if match is None:
        return None if text in ("<", "</") else False
    if match.end() == len(text):
        return None if match[1].lower() in _TAG_STARTS else False
    if match[1].lower() not in _TAGS or text[match.end()] not in " />":
        return False
    return True if last == ">" else None


def _entity(text: str) -> _Verdict:
    if text[-1] == ";":
        return html.unescape(text) != text
    return None if _ENTITY_START.fullmatch(text) else False


def _link(text: str) -> _Verdict:
    if text == "]":
        return None
    if text[1] != "(" or len(text) > MAX_LINK or text[-1] in " \n[]":
        return False
    return True if text[-1] == ")" else None


class Markup:
    """Characters in; plain characters and pauses out through the two callbacks.

    With `normalize` off only pause tags are recognised.
    """

    def __init__(
        self,
        normalize: bool,
        char: Callable[[str, int, int], None],
        pause: Callable[[int, int, int], None],
    ) -> None:
        self._openers = "[<&]" if normalize else "["
        self._char = char
        self._pause = pause
        self._held: list[Char] = []
        self._text = ""
        self._in_label = False  # a "[" came, so "](" may end a link's label

    @property
    def held_from(self) -> int | None:
        """Where in the input the held construct starts."""
        return self._held[0][1] if self._held else None

    def push(self, char: str, c0: int, c1: int) -> None:
        if not self._held and (char not in self._openers or not char or char == "]" and not self._in_label):
            self._in_label = self._in_label and char != "\n"
            self._char(char, c0, c1)
            return
        self._held.append((char, c0, c1))
        self._text += char
        verdict = _CONSTRUCTS[self._text[0]](self._text)
        if verdict:
            self._accept()
        elif verdict is False:
            self._reject()

    def flush(self) -> None:
        """What is held can no longer become a construct."""
        while self._held:
            self._reject()

    def _accept(self) -> None:
        text, c0, c1 = self._text, self._held[0][1], self._held[-1][2]
        self._held, self._text = [], ""
        if text[0] == "[":
            ms = pause_ms(text)
            assert ms is not None, text
            self._pause(ms, c0, c1)
        elif text[0] == "&":
            for decoded in html.unescape(text):
                for char in clean_char(decoded):
                    self._char(" " if char == "\n" else char, c0, c1)
        elif text[0] == "<":
            match = _TAG_NAME.match(text)
            if match is not None and match[1].lower() in _BLOCK_TAGS:
                self._char("\n", c0, c1)
        else:
            self._in_label = False

    def _reject(self) -> None:
        (first, c0, c1), *rest = self._held
        self._held, self._text = [], ""
        self._in_label = first == "[" and self._openers != "["
        self._char(first, c0, c1)
        for char in rest:
            self.push(*char)


_CONSTRUCTS: dict[str, Callable[[str], _Verdict]] = {"[": _pause, "<": _tag, "&": _entity, "]": _link}
