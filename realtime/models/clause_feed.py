"""Incremental text to prompts of whole clauses: the text feed of MOSS-TTS-Local and MOSS-TTS-Nano.

`functools.partial(ClauseFeed, prompts=ClausePrompts(...), text=WholeText(...))` makes one for
`(stream_id, request, voice)`. A clause is one segment: `Prompt` and `EndSegment`, and `EndText` at the
end. Its `inputs` speak it alone; `continued` has the text of the clause before in front, whose frames the
engine puts behind these rows: the model is then in the middle of speaking both. The text goes in as it
came, less white space around.

A voice is a reference in the user's turn, or, where `request.voice_text` says what it speaks, the
beginning of what the assistant says.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from realtime.errors import BadRequest
from realtime.messages import (
    EndSegment,
    EndText,
    EngineMessage,
    Prompt,
    SpeechRequest,
    StreamId,
    VoiceCodes,
)
from realtime.models.base import WholeText, longest_frames
from realtime.models.prompts import (
    LENGTH_START,
    MAX_LENGTH_TAG,
    ClausePrompts,
    PromptFields,
    Rows,
    language_name,
    split_length,
)
from realtime.models.tokenizers import Span, TextTokenizer
from realtime.text.clauses import WIDE, Clause, Clauses, is_speakable, is_wide
from realtime.text.clean import Char
from realtime.text.markup import Markup, pause_ms
from realtime.text.verbatim import Verbatim
from realtime.words import SpokenWord

MAX_TOKENS = 75  # of a clause; about 25 s of speech
MIN_FRAMES_PER_TOKEN = 3  # of speech that is very fast
FRAME_RATE = 12.5

_TAG = re.compile(r"\[[^\[\]]*\]")


@dataclass(frozen=True, slots=True)
class _Pause:
    ms: int
    c0: int
    c1: int


@dataclass(frozen=True, slots=True)
class _Opened:
    """What is known of a segment that went out."""

    spans: tuple[Span, ...] = ()
    words: tuple[SpokenWord, ...] = ()
    is_pause: bool = False


class ClauseFeed:
    """The text of one stream, on the event loop's thread."""

    def __init__(
        self,
        stream_id: StreamId,
        request: SpeechRequest,
        voice: VoiceCodes | None = None,
        *,
        prompts: ClausePrompts,
        text: WholeText,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_segments = 0
        self._stream_id = stream_id
        self._request = request
        self._prompts = prompts
        self._clock = clock
        self._max_frames = text.max_segment_frames
        self._max_positions = text.max_positions
        self._references = [] if voice is None or request.voice_text else [voice.codes]
        self._prefix = voice.codes if voice is not None and request.voice_text else None
        self._prefix_text = (request.voice_text or "").strip() if self._prefix is not None else ""
        self._language = language_name(request.language) if prompts.has_controls else None
        self._style = " ".join((request.style or "").split()) or None  # on one line, as the fields are
        self._verbatim = Verbatim(request.join_sentences)
        self._num_tokens = token_counter(prompts.tokenizer)
        self._clauses = Clauses(self._num_tokens, MAX_TOKENS, request.trigger.mode)
        self._markup = None if prompts.has_controls else Markup(False, self._add, self._add_pause)
        # The start of the text, as long as it may ask for a length.
        self._head: list[Char] | None = [] if prompts.has_controls and request.token_count is None else None
        self._length: int | None = None  # frames that were asked for, of all text up to a flush
        if request.token_count is not None:
            if isinstance(request.token_count, bool) or request.token_count <= 0:
                raise BadRequest(f"token_count must be at least 1, got {request.token_count!r}")
            self._set_length(request.token_count, "token_count: ")
        self._queue: deque[Clause | _Pause] = deque()  # not yet sent
        self._before: Clause | None = None  # the newest that was sent: the next one goes on from it
        self._opened: list[_Opened] = []

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
            self._read(char)
        return self._release(final=False)

    def flush(self) -> list[EngineMessage]:
        self._verbatim.flush()
        if self._head:
            self._end_head()
        if self._markup is not None:
            self._markup.flush()
        self._queue += self._clauses.flush()
        messages = self._release(final=True)
        if self._length is not None:
            self._length = None
            self._clauses = Clauses(self._num_tokens, MAX_TOKENS, self._request.trigger.mode)
        return messages

    def end(self) -> list[EngineMessage]:
        """The rest of the text; nothing at all where no segment was ever opened."""
        messages = self.flush()
        if self._opened:
            messages.append(EndText(self._stream_id))
        return messages

    def spans(self, segment: int) -> Sequence[Span]:
        return self._opened[segment].spans

    def words(self, segment: int) -> Sequence[SpokenWord]:
        return self._opened[segment].words

    # ---- characters to clauses

    def _read(self, char: Char) -> None:
        if self._head is not None:
            self._head.append(char)
            text = "".join(part for part, _, _ in self._head)
            may_ask = LENGTH_START.startswith(text[: len(LENGTH_START)])
            if not may_ask or text[-1] == "}" or len(text) > MAX_LENGTH_TAG:
                self._end_head()
        elif self._markup is not None:
            self._markup.push(*char)
        else:
            self._add(*char)

    def _end_head(self) -> None:
        """The text's start is known. A length is that of the whole text: then it is one clause."""
        assert self._head is not None
        head, self._head = self._head, None
        self._length, rest = split_length("".join(char for char, _, _ in head))
        if self._length is not None:
            self._set_length(self._length)
        for char in head[len(head) - len(rest) :]:
            self._read(char)

    def _set_length(self, length: int, what: str = "") -> None:
        if length > self._max_frames:
            raise BadRequest(f"{what}a text can take {self._max_frames} frames at most, not {length}")
        self._length = length
        self._clauses = Clauses(self._num_tokens, self._max_frames // MIN_FRAMES_PER_TOKEN, "manual")

    def _add(self, char: str, c0: int, c1: int) -> None:
        clauses = self._clauses.push([(char, c0, c1)])
        if clauses and self._length is not None:
            raise BadRequest(
                f"a text that is given a length is one clause, {self._max_frames} frames at most"
            )
        self._queue += clauses

    def _add_pause(self, ms: int, c0: int, c1: int) -> None:
        self._queue += self._clauses.flush()
        if ms > 0:
            self._queue.append(_Pause(ms, c0, c1))

    # ---- clauses to messages

    def _release(self, final: bool) -> list[EngineMessage]:
        """Everything that may go out by now, in order."""
        trigger = self._request.trigger
        is_early = trigger.mode == "eager" and not self._opened and self.num_chars < trigger.min_chars
        if not final and (is_early or trigger.mode == "manual"):
            return []
        messages: list[EngineMessage] = []
        while self._queue:
            item = self._queue.popleft()
            if isinstance(item, Clause):
                messages += [self._prompt(item), EndSegment(self._stream_id)]
            else:
                messages.append(self._silence(item))
            self.num_segments += 1
        return messages

    def _prompt(self, clause: Clause) -> Prompt:
        fields = PromptFields(instruction=self._style, tokens=self._length, language=self._language)
        inputs = self._rows(clause.text, fields)
        num_frames = MIN_FRAMES_PER_TOKEN * clause.num_tokens
        if len(inputs) + num_frames > self._max_positions:
            raise BadRequest(
                f"{len(inputs)} positions of a prompt (voice and text) and at least {num_frames} frames of"
                f" speech are more than the {self._max_positions} that the model has"
            )
        continued = None
        if self._before is not None and self._length is None:
            before = self._before.text
            is_behind_pause = self._opened[-1].is_pause
            text = _joined(before, clause.text) if is_behind_pause else before + clause.lead + clause.text
            continued = self._rows(text, fields)
        self._before = clause
        words = clause_words(clause, self._num_tokens)
        # Behind the last word may be marks.
        self._opened.append(_Opened((*_token_spans(words), clause.spans[-1]), tuple(words)))
        max_frames = longest_frames(clause.num_tokens) + _pause_frames(clause.text)
        return self._message(inputs, continued, max(max_frames, 2 * (self._length or 0)))

    def _rows(self, text: str, fields: PromptFields) -> Rows:
        return self._prompts.rows(
            _joined(self._prefix_text, text), fields, references=self._references, prefix=self._prefix
        )

    def _silence(self, pause: _Pause) -> Prompt:
        self._opened.append(_Opened(((pause.c0, pause.c1),), is_pause=True))
        return self._message(self._prompts.no_rows, None, None, silence_ms=pause.ms)

    def _message(
        self, inputs: Rows, continued: Rows | None, max_frames: int | None, silence_ms: int = 0
    ) -> Prompt:
        request = self._request
        prime = None
        if self._prefix is not None and self.num_segments == 0:
            prime = self._prefix[:, : inputs.shape[1] - 1]
        return Prompt(
            self._stream_id,
            segment=self.num_segments,
            inputs=inputs,
            sampling=request.sampling,
            trigger_s=self._clock(),
            priority=request.priority,
            max_lead_s=request.max_lead_s,
            silence_ms=silence_ms,
            whole=request.whole,
            continued=continued,
            max_frames=max_frames,
            prime=prime,
        )


def _joined(before: str, text: str) -> str:
    """A space goes between a transcript, or text in front of a pause, and what follows it, in scripts that
    have one."""
    if not before or is_wide(text[0]) or is_wide(before[-1]) or before[-1] in WIDE:
        return before + text
    return f"{before} {text}"


def _pause_frames(text: str) -> int:
    """How long the pauses are that a text asks the model for."""
    return sum(round((pause_ms(tag) or 0) / 1000 * FRAME_RATE) for tag in _TAG.findall(text))


# ---- words


def clause_words(clause: Clause, num_tokens: Callable[[str], int]) -> list[SpokenWord]:
    """The words of a clause with as many tokens each as they have alone: how long they are, about."""
    words: list[SpokenWord] = []
    token = 0
    for start, end in word_places(clause.text):
        size = max(num_tokens(clause.text[start:end]), 1)
        spans = clause.spans[start:end]
        words.append(SpokenWord(token, token + size, spans[0][0], spans[-1][1]))
        token += size
    return words


def word_places(text: str) -> Iterator[tuple[int, int]]:
    """What stands between spaces and has a sound; in scripts without spaces each letter, with the marks
    behind it."""
    start, sound = 0, ""  # the newest letter of the word
    for place, char in enumerate(f"{text} "):
        begins = sound and (is_wide(char) or is_speakable(char) and is_wide(sound))
        if begins or char.isspace():
            if sound:
                yield start, place
            start, sound = place + char.isspace(), ""
        if is_speakable(char):
            sound = char


def _token_spans(words: Sequence[SpokenWord]) -> Iterator[Span]:
    for word in words:
        for _ in range(word.first_token, word.last_token):
            yield word.c0, word.c1


@lru_cache(maxsize=4)  # one per loaded model: streams share the words they have in common
def token_counter(tokenizer: TextTokenizer) -> Callable[[str], int]:
    """How many tokens a word has alone, with the space before it."""

    @lru_cache(maxsize=4096)
    def count(text: str) -> int:
        return len(tokenizer.plain(f" {text}"))

    return count
