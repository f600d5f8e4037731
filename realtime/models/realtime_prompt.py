"""The prompt rows of MOSS-TTS-Realtime: a conversation whose assistant turns are spoken.

Rows are int32 [1 + K]: a text id and K codes. Text of users and of the assistant is read as plain text:
no control id comes from it. What the model has heard and said stays in its context, so a turn that is
over is a row sequence as well, and prefilling it again gives the same context.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from realtime.errors import BadRequest
from realtime.messages import SpeechRequest, Turn
from realtime.models.tokenizers import BpeTokenizer

Rows = npt.NDArray[np.int32]  # [T, 1 + K]
Codes = npt.NDArray[np.int16]  # [T, C]; of more than K codebooks the first K count

LOOKAHEAD = 12  # text tokens that a frame's text is ahead of its sound
AUDIO_PAD, AUDIO_BOS, AUDIO_EOS = 1024, 1025, 1026

SYSTEM = (
    "system\nYou are a highly expressive text-to-speech (TTS) engine developed by Mosi Intelligence. \n"
    "You possess natural language understanding, emotional modeling, and multi-style speech generation"
    " capabilities, allowing you to generate the corresponding speech based on the text given in the"
    " assistant."
)
CONTEXT = "context\nThe assistant section should be synthesized using the following voice timbre:"
USER, ASSISTANT, NEWLINE = "user\n", "assistant\n", "\n"


class RealtimePrompts:
    """Makes the rows of one checkpoint. Voices and recordings are codes [T, C]: never transposed."""

    def __init__(
        self,
        tokenizer: BpeTokenizer,
        num_codebooks: int,
        *,
        reference_pad: int,
        text_pad: int,
    ) -> None:
        self.tokenizer = tokenizer
        self._num_codebooks = num_codebooks
        self._reference_pad = reference_pad
        self._text_pad = text_pad
        self._plain_ids = frozenset(range(tokenizer.num_ids)) - tokenizer.control_ids
        self._im_start = tokenizer.id_of("<|im_start|>")
        self._end = [tokenizer.id_of("<|im_end|>"), *tokenizer.plain(NEWLINE)]
        self._system = [*self._begin(SYSTEM), *self._end]
        self._context = self._begin(CONTEXT)
        self._assistant = [*self._end, *self._begin(ASSISTANT)]

    def conversation(self, request: SpeechRequest, voice: Codes | None = None) -> Rows:
        """All that stands before the text of an answer. Raises BadRequest for turns that can't have been."""
        parts = [self.system(voice)]
        for place, turn in enumerate(request.history):
            if not 1 <= turn.num_prefilled <= len(turn.ids):
                raise BadRequest(
                    f"history[{place}]: {turn.num_prefilled} of {len(turn.ids)} ids can't have been prefilled"
                )
            if not set(turn.ids) <= self._plain_ids:
                raise BadRequest(f"history[{place}]: there are ids that no text has")
            self._check(f"history[{place}].frames", turn.frames)
            self._check(f"history[{place}].user_codes", turn.user_codes)
            parts.append(self.turn(turn))
        if request.user is None:
            return np.concatenate([*parts, self.assistant()])
        self._check("user.codes", request.user.codes)
        return np.concatenate([*parts, self.user(request.user.text, request.user.codes)])

    def _check(self, what: str, codes: Codes | None) -> None:
        if codes is None:
            return
        if codes.ndim != 2 or not len(codes) or codes.shape[1] < self._num_codebooks:
            raise BadRequest(
                f"{what} must be frames of at least {self._num_codebooks} codes, got shape {codes.shape}"
            )
        if codes.min() < 0 or codes.max() > AUDIO_EOS:
            raise BadRequest(f"{what} must have codes from 0 to {AUDIO_EOS}")

    def system(self, voice: Codes | None = None) -> Rows:
        """The start of every conversation, with the voice to speak in."""
        rows = [self._text_rows(self._system)]
        if voice is not None:
            rows.append(self._text_rows(self._context))
            rows.append(self._code_rows(voice))
            rows.append(self._text_rows(self._end))
        return np.concatenate(rows)

    def user(self, text: str, codes: Codes | None = None) -> Rows:
        """What a user said, in writing or with its sound, up to where the answer's text begins.

        A sound runs `LOOKAHEAD` tokens behind its text, between a begin and an end mark; a shorter text
        is followed by all of it.
        """
        ids = [*self._end, *self._begin(USER + text)]
        if codes is None:
            return np.concatenate([self._text_rows(ids), self.assistant()])
        num_frames, num_tokens = codes.shape[0], len(self.tokenizer.plain(text))
        if num_tokens >= LOOKAHEAD:
            first = len(self._end) + len(self._begin(USER)) + LOOKAHEAD
            num_pads = max(num_frames + LOOKAHEAD - num_tokens + 1, 0)
        else:
            first = len(ids)
            num_pads = num_frames + 1
        rows = self._text_rows([*ids, *[self._text_pad] * num_pads])
        rows[first - 1, 1] = AUDIO_BOS
        rows[first : first + num_frames, 1:] = self._cut(codes)
        rows[first + num_frames, 1] = AUDIO_EOS
        return np.concatenate([rows, self.assistant()])

    def assistant(self) -> Rows:
        """Where an answer begins."""
        return self._text_rows(self._assistant)

    def first_text(self, ids: Sequence[int]) -> Rows:
        """The answer's text as far as it stands in the prompt; the first frame comes after it."""
        assert ids
        rows = self._text_rows(ids)
        rows[-1, 1] = AUDIO_BOS
        return rows

    def turn(self, turn: Turn) -> Rows:
        """All that a turn has left in the context: the last frame was never fed."""
        fed = self._cut(turn.frames[:-1])
        text = [*turn.ids[turn.num_prefilled :], *[self._text_pad] * len(fed)][: len(fed)]
        rows = self._text_rows(text)
        rows[:, 1:] = fed
        begin = self.assistant() if turn.user_text is None else self.user(turn.user_text, turn.user_codes)
        return np.concatenate([begin, self.first_text(turn.ids[: turn.num_prefilled]), rows])

    def _begin(self, text: str) -> list[int]:
        return [self._im_start, *self.tokenizer.plain(text)]

    def _text_rows(self, ids: Sequence[int]) -> Rows:
        rows = np.full((len(ids), 1 + self._num_codebooks), AUDIO_PAD, np.int32)
        rows[:, 0] = ids
        return rows

    def _code_rows(self, codes: Codes) -> Rows:
        rows = self._text_rows([self._reference_pad] * codes.shape[0])
        rows[:, 1:] = self._cut(codes)
        return rows

    def _cut(self, codes: Codes) -> Codes:
        assert codes.ndim == 2 and codes.shape[1] >= self._num_codebooks, codes.shape
        return codes[:, : self._num_codebooks]
