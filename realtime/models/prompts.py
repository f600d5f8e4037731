"""The prompt rows of the families that are given whole clauses: MOSS-TTS-Local and MOSS-TTS-Nano.

A prompt is a sequence of rows int32 [1 + K]: a text id and K codes, pad codes where there is no sound.
Every piece is tokenised for itself: in one string, tokens would merge across the pieces' borders. Text
goes in as it is (pinyin, IPA between slashes and `[pause 3.2s]` mean something to the model); only what
would stand for a control id is ordinary text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from realtime.errors import BadRequest
from realtime.models.tokenizers import TextTokenizer

Rows = npt.NDArray[np.int32]  # [T, 1 + K]
Codes = npt.NDArray[np.int16]  # [T, C]: C codebooks, at least as many as the model has are used

# The models want a language by its English name.
LANGUAGES = {
    **{"ar": "Arabic", "cs": "Czech", "da": "Danish", "de": "German", "el": "Greek", "en": "English"},
    **{"es": "Spanish", "fa": "Persian", "fi": "Finnish", "fr": "French", "he": "Hebrew", "hi": "Hindi"},
    **{"hu": "Hungarian", "id": "Indonesian", "it": "Italian", "ja": "Japanese", "ko": "Korean"},
    **{"nl": "Dutch", "no": "Norwegian", "pl": "Polish", "pt": "Portuguese", "ro": "Romanian"},
    **{"ru": "Russian", "sv": "Swedish", "th": "Thai", "tr": "Turkish", "uk": "Ukrainian"},
    **{"vi": "Vietnamese", "yue": "Cantonese", "zh": "Chinese"},
}

USER = "user\n"
REFERENCES = "<user_inst>\n- Reference(s):\n"
NO_REFERENCE = "None"
TEXT_END = "\n</user_inst>"
NEWLINE = "\n"
ASSISTANT = "assistant\n"

_LENGTH = re.compile(r"\$\{token:(\d+)\}")
LENGTH_START = "${token:"
MAX_LENGTH_TAG = 32  # characters of a whole one, with room


@dataclass(frozen=True, slots=True)
class PromptIds:
    """The control ids of a checkpoint's config."""

    im_start: int
    im_end: int
    audio_start: int
    audio_end: int
    user_slot: int
    assistant_slot: int


@dataclass(frozen=True, slots=True)
class PromptFields:
    """What a prompt may say about the speech beside its text; None or blank = nothing said. `tokens` is
    the wanted length in frames."""

    instruction: str | None = None
    tokens: int | None = None
    quality: str | None = None
    sound_event: str | None = None
    ambient_sound: str | None = None
    language: str | None = None

    def text(self) -> str:
        lines = []
        for field in fields(self):
            value = getattr(self, field.name)
            name = field.name.replace("_", " ").title()
            lines.append(f"\n- {name}:\n{('' if value is None else str(value)).strip() or 'None'}")
        return "".join(lines) + "\n- Text:\n"


NO_FIELDS = PromptFields()


class ClausePrompts:
    """Makes the prompts of one checkpoint. With `has_controls` (Local) the model knows the fields of a
    prompt and pause tags in a text; without (Nano) all fields are left blank."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        ids: PromptIds,
        num_codebooks: int,
        pad_code: int,
        *,
        has_controls: bool,
    ) -> None:
        self.tokenizer = tokenizer
        self.has_controls = has_controls
        self.no_rows = np.zeros((0, 1 + num_codebooks), np.int32)
        self._ids = ids
        self._num_codebooks = num_codebooks
        self._pad_code = pad_code
        self._before = [ids.im_start, *tokenizer.template(USER), *tokenizer.template(REFERENCES)]
        self._no_reference = tokenizer.template(NO_REFERENCE)
        self._after = [
            *tokenizer.template(TEXT_END),
            ids.im_end,
            *tokenizer.template(NEWLINE),
            ids.im_start,
            *tokenizer.template(ASSISTANT),
            ids.audio_start,
        ]

    def rows(
        self,
        text: str,
        fields: PromptFields = NO_FIELDS,
        references: Sequence[Codes] = (),
        prefix: Codes | None = None,
    ) -> Rows:
        """The rows int32 [T, 1 + K] after which the first frame of `text` comes.

        `references` are recordings of the wanted voice. `prefix` are the frames that speak the first
        part of `text`; the model goes on behind them, in their voice.
        """
        ids = self._ids
        parts = [self._text_rows(self._before)]
        for codes in references:
            parts.append(self._text_rows([ids.audio_start]))
            parts.append(self._code_rows(ids.user_slot, codes))
            parts.append(self._text_rows([ids.audio_end]))
        if not references:
            parts.append(self._text_rows(self._no_reference))
        said = fields if self.has_controls else NO_FIELDS
        parts.append(self._text_rows(self.tokenizer.plain(said.text())))
        parts.append(self._text_rows(self.tokenizer.plain(text)))
        parts.append(self._text_rows(self._after))
        if prefix is not None:
            parts.append(self._code_rows(ids.assistant_slot, prefix))
        return np.concatenate(parts)

    def _text_rows(self, ids: Sequence[int]) -> Rows:
        rows = np.full((len(ids), 1 + self._num_codebooks), self._pad_code, np.int32)
        rows[:, 0] = ids
        return rows

    def _code_rows(self, slot: int, codes: Codes) -> Rows:
        """Where the model speaks with fewer codebooks than it has, the others are padding."""
        assert codes.ndim == 2, codes.shape
        rows = self._text_rows([slot] * codes.shape[0])
        width = min(codes.shape[1], self._num_codebooks)
        rows[:, 1 : 1 + width] = codes[:, :width]
        return rows


def language_name(language: str | None) -> str | None:
    """`en`, `en-US` or `english` as the prompt has it: `English`. Raises BadRequest for anything else."""
    if language is None:
        return None
    for code, name in LANGUAGES.items():
        if language.lower() == name.lower() or language.replace("_", "-").split("-")[0].lower() == code:
            return name
    raise BadRequest(
        f"language {language!r} is not known; known: {', '.join(LANGUAGES)}, or their English names",
        code="language_unsupported",
    )


def split_length(text: str) -> tuple[int | None, str]:
    """The frames that a `${token:N}` at the very start of a text asks for, and the text without it."""
    if not text.startswith(LENGTH_START):
        return None, text
    match = _LENGTH.match(text)
    if match is None or len(match[0]) > MAX_LENGTH_TAG or int(match[1]) <= 0:
        raise BadRequest(
            f"a text that starts with {LENGTH_START!r} must go on with a number of frames of at least 1"
            f" and '}}', got {text[:MAX_LENGTH_TAG]!r}"
        )
    return int(match[1]), text[match.end() :].lstrip()
