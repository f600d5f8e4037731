"""What may follow a finished word and change how it is read, and where a sentence is over.

Each answer is yes, no, or None while the text that came does not tell; it is given on the shortest
text that settles it, so that nothing waits longer than it must.
"""

from __future__ import annotations

import re

from realtime.text import lexicon as lex
from realtime.text.spoken import CLOSERS, LIST_MARK, OPENERS, abbreviation

_NUMBER_HEAD = re.compile(r"[^\w.$€£¥]*(?P<sign>[A-Z]{0,3}[$€£¥])?(?:\d[\d,.:]*)?\d[\"')\]]*")
_SCALED = re.compile(r".*\d\s?(?:" + "|".join(re.escape(scale) for scale in lex.SCALES) + ")", re.I)
_CODE_HEAD = re.compile(r"[^\w]*(?:" + "|".join(lex.CODES) + ")")
_INITIAL = re.compile(r"[A-Z]\.|(?:[A-Za-z]\.){2,}")

_CURRENCIES = frozenset([*lex.CODES, *lex.SIGNS])
_SCALES = frozenset([*lex.SCALES, *(scale.capitalize() for scale in lex.SCALES)])
_AFTER_NUMBER = _SCALES | _CURRENCIES | {*lex.UNITS, *lex.FIXED_UNITS, *lex.HALVES}
_STARTS = {
    words: frozenset(word[:n] for word in words for n in range(len(word) + 1))
    for words in (_SCALES, _CURRENCIES, _AFTER_NUMBER)
}
_TRAILING = CLOSERS + ".,;:!?²³"


def joins(head: str, after: str, complete: bool) -> bool | None:
    """Whether the word `after`, of which the start or (`complete`) all has come, belongs to `head`."""
    if head[-1].islower() and _SCALED.fullmatch(head) is None:
        return False
    if _CODE_HEAD.fullmatch(head) is not None:
        if after and not after[0].isdecimal() or complete and not after:
            return False
        return True if complete else None
    if _SCALED.fullmatch(head) is not None:
        words = _CURRENCIES
    elif (match := _NUMBER_HEAD.fullmatch(head)) is not None:
        words = _SCALES if match["sign"] else _AFTER_NUMBER
    else:
        return False
    core = after.rstrip(_TRAILING)
    if complete:
        return core in words
    return None if core in _STARTS[words] else False


def ends_sentence(
    text: str, after: str, final: bool, *, line_start: bool, sentence_empty: bool, after_capital: bool
) -> bool | None:
    """Whether the sentence is over with `text`, a finished stretch that `after` follows.

    `final`: nothing more of this line comes; the answer then only decides whether a full stop is said.
    """
    core = text.rstrip(CLOSERS)
    if not core or core[-1] not in ".!?":
        return False
    word = core.rsplit(" ", 1)[-1].lstrip(OPENERS)
    if core[-1] != "." or word == core[-1]:
        return True
    if line_start and LIST_MARK.fullmatch(word):
        return False
    found = abbreviation(word)
    if found is not None and found[0] in lex.ALWAYS_WITHIN or word == "St." and not after_capital:
        return False
    if _INITIAL.fullmatch(word) and found is None and not (word == "I." and not sentence_empty):
        return False
    is_numbered = word[:-1].lower() in lex.NUMBERED
    if found is not None or is_numbered or word == "St." or word.endswith(".."):
        letter = after.lstrip(OPENERS)[:1]
        if not letter:
            return True if final else None
        if is_numbered:
            return not letter.isdecimal()
        return letter.isupper()
    return True
