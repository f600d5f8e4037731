"""Incremental text to tokens that are pushed one per frame: the text feed of MOSS-TTS-Realtime.

`functools.partial(TokenFeed, prompts=RealtimePrompts(...), text=PushedText(...))` makes one for
`(stream_id, request, voice)`. A segment is a turn: all text up to a flush or the end (with the trigger
`sentence`, up to a sentence's end). Its `Prompt` goes out when as many tokens are known as the text is
ahead of the sound, and holds exactly these; the others follow as `Tokens`. `continued`, for turns after
the first, goes behind what the stream has left in the context: it has neither instructions nor voice.
Turns of the conversation before the stream (`request.history`) stand in the prompt as rows of their own.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from realtime.errors import BadRequest
from realtime.messages import (
    EndSegment,
    EndText,
    EngineMessage,
    Prompt,
    SpeechRequest,
    StreamId,
    Tokens,
    VoiceCodes,
)
from realtime.models.base import PushedText, longest_frames
from realtime.models.clause_feed import token_counter, word_places
from realtime.models.realtime_prompt import RealtimePrompts
from realtime.models.tokenizers import HeldBack, Span
from realtime.text.clauses import CLOSERS, WIDE, WIDE_STOPS, Clause, Clauses, is_speakable
from realtime.text.clean import Char
from realtime.text.markup import Markup
from realtime.text.verbatim import Verbatim
from realtime.words import SpokenWord

MAX_WORD = 32  # characters after which any place is as good as one with a space
# The part of a turn's frames that its text may take, and of that text the part from which on the end of a
# sentence ends the turn.
FULL_SHARE, ENOUGH_SHARE = 0.8, 0.75
SENTENCE_ENDS = ".!?…" + WIDE_STOPS


@dataclass(slots=True)
class _Turn:
    """Text that is spoken from one prompt, or a pause."""

    held_back: HeldBack | None = None  # None: a pause
    text: str = ""
    places: list[Span] = field(default_factory=list)  # of each character in the input
    num_read: int = 0  # characters the tokenizer has seen
    ids: list[int] = field(default_factory=list)
    chars: list[Span] = field(default_factory=list)  # of each token in the text
    is_speakable: bool = False
    size: int = 0  # tokens, counted word by word
    silence_ms: int = 0
    closed: bool = False
    num_sent: int = 0
    words: list[SpokenWord] = field(default_factory=list)
    words_of: tuple[int, bool] = (0, False)  # the tokens they were made of, and if those were all

    def read(self) -> None:
        """The tokens that are certain; of a closed turn, all of them."""
        if self.held_back is None:
            return
        tokens = self.held_back.push(self.text[self.num_read :]) if self.num_read < len(self.text) else []
        self.num_read = len(self.text)
        if self.closed:
            tokens += self.held_back.flush()
        self.ids += [token_id for token_id, _ in tokens]
        self.chars += [chars for _, chars in tokens]

    def spans(self) -> list[Span]:
        return [self._place(*chars) for chars in self.chars] or self.places

    def update_words(self) -> None:
        """Of an open turn the last word may go on."""
        if self.words_of == (len(self.ids), self.closed):
            return
        self.words_of = (len(self.ids), self.closed)
        known = self.chars[-1][1] if self.chars else 0
        ends = [end for _, end in self.chars]
        starts = [start for start, _ in self.chars]
        words: list[SpokenWord] = []
        for start, end in word_places(self.text[:known]):
            if end == known and not self.closed:
                break
            word = SpokenWord(bisect_right(ends, start), bisect_left(starts, end), *self._place(start, end))
            if words and word.first_token < words[-1].last_token:  # a token of both
                before = words.pop()
                word = SpokenWord(before.first_token, word.last_token, before.c0, word.c1)
            words.append(word)
        self.words = words

    def _place(self, start: int, end: int) -> Span:
        """Where in the input some characters are, without the space before them."""
        while start + 1 < end and self.text[start].isspace():
            start += 1
        return self.places[start][0], self.places[max(end, start + 1) - 1][1]


class TokenFeed:
    """The text of one stream, on the event loop's thread."""

    def __init__(
        self,
        stream_id: StreamId,
        request: SpeechRequest,
        voice: VoiceCodes | None = None,
        *,
        prompts: RealtimePrompts,
        text: PushedText,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_segments = 0
        self._stream_id = stream_id
        self._request = request
        self._prompts = prompts
        self._lookahead = text.lookahead
        self._max_tokens = round(FULL_SHARE * text.max_segment_frames)
        self._clock = clock
        self._start = prompts.conversation(request, None if voice is None else voice.codes)
        missing = len(self._start) + 2 * text.lookahead - text.max_positions
        if missing > 0:
            raise BadRequest(
                f"{len(self._start)} positions of a conversation (voice and turns) leave no room for an"
                f" answer among the {text.max_positions} that the model has: {missing} are missing"
            )
        self._num_tokens = token_counter(prompts.tokenizer)
        self._verbatim = Verbatim(request.join_sentences)
        self._clauses = Clauses(self._num_tokens, self._max_tokens, "sentence")
        self._markup = Markup(False, self._add, self._add_pause)
        self._queue: deque[_Turn] = deque()  # not yet sent in full; only the last can be open
        self._opened: list[_Turn] = []
        self._is_open = False  # the first of the queue has been opened
        self._lead: list[Char] = []  # white space that a turn has only inside
        self._word = ""  # since its size was counted

    @property
    def num_chars(self) -> int:
        return self._verbatim.num_chars

    @property
    def num_dropped(self) -> int:
        return self._verbatim.num_dropped + self._clauses.num_dropped

    @property
    def has_text(self) -> bool:
        return self._verbatim.has_text

    def text(self, delta: str) -> list[EngineMessage]:
        for char in self._verbatim.push(delta):
            self._markup.push(*char)
        return self._release(final=False)

    def flush(self) -> list[EngineMessage]:
        self._verbatim.flush()
        self._markup.flush()
        self._close()
        return self._release(final=True)

    def end(self) -> list[EngineMessage]:
        """The rest of the text; nothing at all where no segment was ever opened."""
        messages = self.flush()
        if self._opened:
            messages.append(EndText(self._stream_id))
        return messages

    def spans(self, segment: int) -> Sequence[Span]:
        return self._opened[segment].spans()

    def words(self, segment: int) -> Sequence[SpokenWord]:
        turn = self._opened[segment]
        turn.update_words()
        return turn.words

    # ---- characters to turns

    def _add(self, char: str, c0: int, c1: int) -> None:
        if self._request.trigger.mode == "sentence":
            self._add_clauses(self._clauses.push([(char, c0, c1)]))
        elif char.isspace():
            self._end_word()
            self._lead.append((char, c0, c1))
        else:
            turn = self._newest()
            chars = [*(self._lead if turn.text else []), (char, c0, c1)]
            self._lead = []
            turn.text += "".join(char for char, _, _ in chars)
            turn.places += [(c0, c1) for _, c0, c1 in chars]
            turn.is_speakable = turn.is_speakable or is_speakable(char)
            self._word += char
            if len(self._word) >= MAX_WORD or char in WIDE:
                self._end_word()

    def _add_clauses(self, clauses: Sequence[Clause]) -> None:
        for clause in clauses:
            turn = self._newest()
            turn.text, turn.places, turn.is_speakable = clause.text, list(clause.spans), True
            turn.closed = True

    def _add_pause(self, ms: int, c0: int, c1: int) -> None:
        self._close()
        if ms > 0:
            waits = bool(self._queue) and not self._queue[-1].closed  # marks, for the word behind the pause
            place = len(self._queue) - waits
            self._queue.insert(place, _Turn(places=[(c0, c1)], silence_ms=ms, closed=True))

    def _newest(self) -> _Turn:
        if not self._queue or self._queue[-1].closed:
            self._queue.append(_Turn(HeldBack(self._prompts.tokenizer)))
        return self._queue[-1]

    def _end_word(self) -> None:
        """A turn with as much text as it may have is over, if it can be behind a sentence."""
        if not self._word:
            return
        turn, word = self._queue[-1], self._word
        self._word = ""
        turn.size += self._num_tokens(word)
        share = turn.size / self._max_tokens
        if share >= 1 or share >= ENOUGH_SHARE and word.rstrip(CLOSERS)[-1:] in SENTENCE_ENDS:
            self._close()

    def _close(self) -> None:
        """The newest turn's text is complete. Marks without a word wait for one."""
        self._add_clauses(self._clauses.flush())
        if self._queue and self._queue[-1].is_speakable:
            self._queue[-1].closed = True
            self._lead, self._word = [], ""

    # ---- turns to messages

    def _release(self, final: bool) -> list[EngineMessage]:
        """Everything that may go out by now, in order."""
        messages: list[EngineMessage] = []
        while self._queue:
            turn = self._queue[0]
            turn.read()
            if not self._is_open:
                if not self._may_open(turn, final):
                    break
                messages.append(self._open(turn))
            if turn.num_sent < len(turn.ids):
                messages.append(Tokens(self._stream_id, tuple(turn.ids[turn.num_sent :])))
                turn.num_sent = len(turn.ids)
            if not turn.closed:
                break
            if not turn.silence_ms:
                messages.append(EndSegment(self._stream_id))
            self._queue.popleft()
            self._is_open = False
        return messages

    def _may_open(self, turn: _Turn, final: bool) -> bool:
        trigger = self._request.trigger
        if turn.closed and final:
            return True
        if trigger.mode == "manual" or not (turn.is_speakable or turn.silence_ms):
            return False
        if trigger.mode == "eager" and not self._opened and self.num_chars < trigger.min_chars:
            return False
        return turn.closed or len(turn.ids) >= self._lookahead

    def _open(self, turn: _Turn) -> Prompt:
        index = self.num_segments
        self.num_segments += 1
        is_first = not any(opened.ids for opened in self._opened)
        self._opened.append(turn)
        self._is_open = True
        request, prompts = self._request, self._prompts
        inputs, continued, max_frames = self._start[:0], None, None
        if not turn.silence_ms:
            turn.num_sent = min(self._lookahead, len(turn.ids))
            first = prompts.first_text(turn.ids[: turn.num_sent])
            inputs = np.concatenate([self._start, first])
            if turn.closed and turn.num_sent == len(turn.ids):  # the engine can't tell how many they are
                max_frames = longest_frames(turn.num_sent)
            if not is_first:
                continued = np.concatenate([prompts.assistant(), first])
        return Prompt(
            self._stream_id,
            segment=index,
            inputs=inputs,
            sampling=request.sampling,
            trigger_s=self._clock(),
            priority=request.priority,
            max_lead_s=request.max_lead_s,
            silence_ms=turn.silence_ms,
            whole=request.whole,
            continued=continued,
            max_frames=max_frames,
        )
