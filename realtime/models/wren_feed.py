"""Incremental text to the segments and tokens of a model that is shown its text through a window.

Turns the words of `realtime.text` into tokens, decides where segments end and when they may start, and
remembers which part of the input each token came from. Knows nothing of rows, frames or audio.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import tokenizers

from realtime.messages import EndSegment, EndText, EngineMessage, Prompt, SpeechRequest, StreamId, Tokens
from realtime.models.base import WindowedText
from realtime.text import Cut, Item, Pause, Span, TextPipeline, Word
from realtime.words import SpokenWord

CLAUSE_TOKENS = 40  # from this many on, the next clause mark ends a segment

_Token = tuple[int, Span | None]


@dataclass(slots=True)
class _Segment:
    """Text that is spoken from one prompt, or a pause."""

    ids: list[int] = field(default_factory=list)
    spans: list[Span | None] = field(default_factory=list)
    words: list[SpokenWord] = field(default_factory=list)
    silence_ms: int = 0
    closed: bool = False
    num_sent: int = 0

    def add(self, word: Word | None, tokens: Sequence[_Token]) -> None:
        """`word` is None for a mark that no input stands for."""
        assert not self.closed
        first = len(self.ids)
        for token_id, span in tokens:
            self.ids.append(token_id)
            self.spans.append(span)
        if word is None or word.text == "-":
            return  # a spaced dash is no word
        spoken = SpokenWord(first, len(self.ids), word.c0, word.c1)
        # Words that overlap in the input, or come in another order there, are one; so is a mark with
        # the word that it stands behind.
        while self.words and (spoken.c0 < self.words[-1].c1 or (word.glued and spoken.first_token == first)):
            before = self.words.pop()
            c0, c1 = min(before.c0, spoken.c0), max(before.c1, spoken.c1)
            spoken = SpokenWord(before.first_token, spoken.last_token, c0, c1)
        self.words.append(spoken)


class WrenFeed:
    """The text of one stream, on the event loop's thread."""

    def __init__(
        self,
        stream_id: StreamId,
        request: SpeechRequest,
        text: WindowedText,
        tokenizer: tokenizers.Tokenizer,
        num_codebooks: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_chars = 0
        self.num_segments = 0
        self.num_dropped = 0  # visible characters that this voice can't speak
        self.has_text = False  # anything but white space and invisible characters has come
        self._stream_id = stream_id
        self._request = request
        self._window = text
        self._clock = clock
        self._no_rows = np.zeros((0, len(text.offsets) + num_codebooks), np.int32)
        self._pipeline = TextPipeline(request.normalize, request.join_sentences)
        self._encode = _word_encoder(tokenizer)
        self._queue: deque[_Segment] = deque()  # not yet sent in full; only the last can be open
        self._opened: list[_Segment] = []
        self._is_open = False  # the first of the queue has been opened
        self._ended = False

    @property
    def pending_chars(self) -> int:
        """Code points received that no message has been made of."""
        for segment in self._queue:
            for span in segment.spans[segment.num_sent :]:
                if span is not None:
                    return self.num_chars - span[0]
        return self.num_chars - self._pipeline.settled

    def spans(self, segment: int) -> Sequence[Span | None]:
        return self._opened[segment].spans

    def words(self, segment: int) -> Sequence[SpokenWord]:
        return self._opened[segment].words

    def text(self, delta: str) -> list[EngineMessage]:
        assert not self._ended
        self._add(self._pipeline.push(delta))
        return self._release(final=False)

    def flush(self) -> list[EngineMessage]:
        self._add(self._pipeline.flush())
        self._close()
        return self._release(final=True)

    def end(self) -> list[EngineMessage]:
        """The rest of the text; nothing at all where no segment was ever opened."""
        messages = self.flush()
        self._ended = True
        if self._opened:
            messages.append(EndText(self._stream_id))
        return messages

    # ---- words to segments

    def _add(self, items: list[Item]) -> None:
        self.num_chars = self._pipeline.num_chars
        self.num_dropped = self._pipeline.num_dropped
        self.has_text = self._pipeline.has_text
        for unit in _units(items):
            if isinstance(unit, Cut):
                self._close()
            elif isinstance(unit, Pause):
                self._close()
                self._queue.append(_Segment(spans=[(unit.c0, unit.c1)], silence_ms=unit.ms, closed=True))
            else:
                self._add_words(unit)

    def _add_words(self, words: list[Word]) -> None:
        """Words of one construct: they stay in one segment if they fit into one."""
        limit = self._window.max_segment_tokens
        parts = [part for word in words for part in self._parts(word)]
        if self._num_tokens() + sum(len(tokens) for _, tokens in parts) > limit:
            self._close()
        for word, tokens in parts:
            if self._num_tokens() + len(tokens) > limit:
                self._close()
            if not self._num_tokens() and (word.glued or word.text == "-"):
                continue  # a mark that nothing precedes has no sound
            self._newest().add(word, tokens)
            if self._num_tokens() >= CLAUSE_TOKENS and word.text[-1] in ",;:-":
                self._close()

    def _parts(self, word: Word) -> Iterator[tuple[Word, list[_Token]]]:
        """The word with its tokens; where they are too many for a segment, its halves."""
        tokens = self._tokens(word)
        if len(tokens) <= self._window.max_segment_tokens:
            yield word, tokens
            return
        half = len(word.text) // 2
        for text, spans in (
            (word.text[:half], word.spans[:half]),
            (word.text[half:], word.spans[half:]),
        ):
            yield from self._parts(Word(text, spans))

    def _tokens(self, word: Word) -> list[_Token]:
        return [
            (token_id, (word.spans[start][0], word.spans[end - 1][1]))
            for token_id, start, end in self._encode(word.text, word.glued)
        ]

    def _num_tokens(self) -> int:
        return len(self._queue[-1].ids) if self._queue and not self._queue[-1].closed else 0

    def _newest(self) -> _Segment:
        if not self._queue or self._queue[-1].closed:
            self._queue.append(_Segment())
        return self._queue[-1]

    def _close(self) -> None:
        if not self._queue or self._queue[-1].closed:
            return
        segment = self._queue[-1]
        if len(segment.ids) == 1:
            segment.add(None, [(token_id, None) for token_id, _, _ in self._encode(".", True)])
        segment.closed = True

    # ---- segments to messages

    def _release(self, final: bool) -> list[EngineMessage]:
        """Everything that may go out by now, in order."""
        messages: list[EngineMessage] = []
        while self._queue:
            segment = self._queue[0]
            if not self._is_open:
                if not self._may_open(segment, final):
                    break
                messages.append(self._open(segment))
            if segment.num_sent < len(segment.ids):
                messages.append(Tokens(self._stream_id, tuple(segment.ids[segment.num_sent :])))
                segment.num_sent = len(segment.ids)
            if not segment.closed:
                break
            if not segment.silence_ms:
                messages.append(EndSegment(self._stream_id))
            self._queue.popleft()
            self._is_open = False
        return messages

    def _may_open(self, segment: _Segment, final: bool) -> bool:
        trigger = self._request.trigger
        if final:
            return True
        if trigger.mode == "manual":
            return False
        if trigger.mode == "eager" and not self._opened and self.num_chars < trigger.min_chars:
            return False
        needed = self._window.min_lookahead + 1
        return segment.closed or trigger.mode == "eager" and len(segment.ids) >= needed

    def _open(self, segment: _Segment) -> Prompt:
        index = self.num_segments
        self.num_segments += 1
        self._opened.append(segment)
        self._is_open = True
        return Prompt(
            self._stream_id,
            segment=index,
            inputs=self._no_rows,
            sampling=self._request.sampling,
            trigger_s=self._clock(),
            priority=self._request.priority,
            max_lead_s=self._request.max_lead_s,
            silence_ms=segment.silence_ms,
            whole=self._request.whole,
        )


def _units(items: list[Item]) -> Iterator[Cut | Pause | list[Word]]:
    """Items in order, words whose places in the input overlap together."""
    words: list[Word] = []
    for item in items:
        if isinstance(item, Word) and words and item.c0 < words[-1].c1:
            words.append(item)
            continue
        if words:
            yield words
        words = [item] if isinstance(item, Word) else []
        if not isinstance(item, Word):
            yield item
    if words:
        yield words


@lru_cache(maxsize=4)  # one per loaded model: streams share the words they have in common
def _word_encoder(tokenizer: tokenizers.Tokenizer) -> Callable[[str, bool], list[tuple[int, int, int]]]:
    """Token id, start and end in the word of each of its tokens.

    A token never crosses a space and carries the space before its word, so words are encoded alone;
    a mark that is glued to a word already sent is its own token without that space.
    """

    @lru_cache(maxsize=2048)
    def encode(text: str, glued: bool) -> list[tuple[int, int, int]]:
        if glued:
            return [(_mark_id(tokenizer, mark), i, i + 1) for i, mark in enumerate(text)]
        encoding = tokenizer.encode(text, add_special_tokens=False)
        return [
            (token_id, start, max(end, start + 1))
            for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)
        ]

    return encode


def _mark_id(tokenizer: tokenizers.Tokenizer, mark: str) -> int:
    token_id = tokenizer.token_to_id(mark)
    assert token_id is not None, mark
    return int(token_id)
