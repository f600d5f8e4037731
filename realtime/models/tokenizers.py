"""The tokenizers of the official families: `tokenizer.json` and SentencePiece's `tokenizer.model`.

Each knows two ways to read a text. `template` reads what a family's own prompt is written in, where
`<|im_end|>` and its like stand for their ids; `plain` reads what a user wrote, where nothing does: such
strings are ordinary text, and no control id ever comes out. Texts without them give the same ids in both.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import sentencepiece
import tokenizers

from realtime.errors import ModelError

Span = tuple[int, int]


class TextTokenizer(Protocol):
    def __hash__(self) -> int: ...

    def template(self, text: str) -> list[int]: ...

    def plain(self, text: str) -> list[int]: ...


class BpeTokenizer:
    """`tokenizer.json`. Its `plain` half is the same tokenizer without its added tokens."""

    def __init__(self, path: Path) -> None:
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ModelError(f"{path} is missing or can't be read: the folder needs this file") from error
        try:
            self._template = tokenizers.Tokenizer.from_str(text)
            without = json.loads(text) | {"added_tokens": []}
            self._plain = tokenizers.Tokenizer.from_str(json.dumps(without))
        except Exception as error:  # the library raises plain Exception for a broken file
            raise ModelError(f"{path} can't be read: {error}") from error
        self._path = path
        self.control_ids = frozenset(self._template.get_added_tokens_decoder())
        self.num_ids = int(self._template.get_vocab_size())
        for added in self._template.get_added_tokens_decoder().values():
            if self.control_ids & set(self.plain(added.content)):
                raise ModelError(f"{path}: {added.content!r} can't be told from the same letters in a text")

    def template(self, text: str) -> list[int]:
        return list(self._template.encode(text, add_special_tokens=False).ids)

    def plain(self, text: str) -> list[int]:
        return list(self._plain.encode(text, add_special_tokens=False).ids)

    def spans(self, text: str) -> list[tuple[int, Span]]:
        """`plain` with the characters of `text` that each token came from."""
        encoding = self._plain.encode(text, add_special_tokens=False)
        return list(zip(encoding.ids, encoding.offsets, strict=True))

    def id_of(self, token: str) -> int:
        token_id = self._template.token_to_id(token)
        if token_id is None:
            raise ModelError(f"{self._path}: there is no token {token!r}")
        return int(token_id)


class SentencePieceTokenizer:
    """`tokenizer.model`. Its `plain` half is the same model with its user-defined symbols out of use; its
    own special pieces (`<s>`) are no text to it in either."""

    def __init__(self, path: Path) -> None:
        try:
            model = path.read_bytes()
        except OSError as error:
            raise ModelError(f"{path} is missing or can't be read: the folder needs this file") from error
        try:
            if not model:  # it would be taken as a model without pieces
                raise ValueError("the file is empty")
            self._template = sentencepiece.SentencePieceProcessor(model_proto=model)
            self._plain = sentencepiece.SentencePieceProcessor(model_proto=_without_symbols(model))
        except (RuntimeError, ValueError, IndexError) as error:
            raise ModelError(f"{path} can't be read: {error}") from error
        self.control_ids = frozenset(
            index for index, (_, kind) in enumerate(_pieces(model)) if kind in (CONTROL, USER_DEFINED)
        )
        for index in self.control_ids:
            symbol = self._template.id_to_piece(index)
            if self.control_ids & set(self.plain(symbol)):
                raise ModelError(f"{path}: {symbol!r} can't be told from the same letters in a text")

    def template(self, text: str) -> list[int]:
        return list(self._template.encode(text))

    def plain(self, text: str) -> list[int]:
        return list(self._plain.encode(text))


# ---- SentencePiece's model file, a protocol buffer: field 1 is a piece, of which field 3 is the kind

CONTROL, USER_DEFINED, UNUSED = 3, 4, 5
_PIECE, _KIND = (1 << 3) | 2, 3 << 3  # tags: a message of known length, an integer


def _without_symbols(model: bytes) -> bytes:
    """The same model, whose user-defined symbols never come out."""
    changed = bytearray(model)
    for place, kind in _pieces(model):
        if kind == USER_DEFINED:
            changed[place] = UNUSED  # both kinds are one byte
    return bytes(changed)


def _pieces(model: bytes) -> Iterator[tuple[int, int]]:
    """Of each piece: where its kind stands in the file, and the kind (1, the default, has no place)."""
    at = 0
    while at < len(model):
        tag, at = _varint(model, at)
        end = _skip(model, at, tag)
        if tag == _PIECE:
            _, at = _varint(model, at)
            place, kind = -1, 1
            while at < end:
                inner, at = _varint(model, at)
                if inner == _KIND:
                    place, kind = at, model[at]
                at = _skip(model, at, inner)
            yield place, kind
        at = end


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
        if data[at - 1] < 0x80:
            return value, at


def _skip(data: bytes, at: int, tag: int) -> int:
    """Behind the value of a field that starts at `at`."""
    match tag & 7:
        case 0:
            return _varint(data, at)[1]
        case 1:
            return at + 8
        case 2:
            length, at = _varint(data, at)
            return at + length
        case 5:
            return at + 4
        case kind:
            raise ValueError(f"no field has wire type {kind}")


class HeldBack:
    """A text that is still being written, to the tokens of the whole of it.

    The last tokens may change with what follows and are held back; the others are given as they come. A
    merge that reaches further back would be a token that was given and is none any more: then what
    follows it is read anew, so that nothing is lost or said twice.
    """

    NUM_HELD = 3
    MAX_WINDOW = 512  # characters that are read again with each push, where they can be told apart
    MAX_SEARCH = 200  # tokens back

    def __init__(self, tokenizer: BpeTokenizer) -> None:
        self._tokenizer = tokenizer
        self._text = ""
        self._start = 0  # of the window in the text
        self._given: list[tuple[int, Span]] = []  # of the window

    def push(self, text: str) -> list[tuple[int, Span]]:
        """Tokens that are certain by now, each with the characters of the whole text it came from."""
        self._text += text
        return self._give(self.NUM_HELD)

    def flush(self) -> list[tuple[int, Span]]:
        """The rest."""
        return self._give(0)

    def _give(self, num_held: int) -> list[tuple[int, Span]]:
        tokens = self._tokenizer.spans(self._text)
        num_given = len(self._given)
        if [token_id for token_id, _ in tokens[:num_given]] != [token_id for token_id, _ in self._given]:
            self._move(self._given[-1][1][1], [])
            tokens, num_given = self._tokenizer.spans(self._text), 0
        fresh = tokens[num_given : max(len(tokens) - num_held, num_given)]
        start = self._start
        self._given += fresh
        if len(self._text) > self.MAX_WINDOW:
            self._shorten(tokens)
        return [(token_id, (start + c0, start + c1)) for token_id, (c0, c1) in fresh]

    def _shorten(self, tokens: list[tuple[int, Span]]) -> None:
        """Starts the window at a place between words that gives the same tokens."""
        ids = [token_id for token_id, _ in tokens]
        for index in range(len(self._given) - 1, max(len(self._given) - self.MAX_SEARCH, 0), -1):
            start = self._given[index][1][0]
            is_apart = self._text[start].isspace() or not self._text[start - 1].isalnum()
            if is_apart and tokens[index - 1][1][1] == start:
                rest = self._tokenizer.spans(self._text[start:])
                if [token_id for token_id, _ in rest] == ids[index:]:
                    self._move(start, rest[: len(self._given) - index])
                    return

    def _move(self, start: int, given: list[tuple[int, Span]]) -> None:
        self._start += start
        self._text = self._text[start:]
        self._given = given
