"""Every value that crosses a thread: immutable, small, arrays are CPU NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NewType

import numpy as np
import numpy.typing as npt

from realtime.errors import TTSError

StreamId = NewType("StreamId", int)
CloseReason = Literal["done", "limit", "cancelled", "failed"]
NoteKind = Literal["segment_end", "starved", "silence"]
TriggerMode = Literal["eager", "sentence", "manual"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What a request may ask of the sampler; None means the model's own value.

    `seed` fixes every random choice of the stream; `max_frames` caps its length in codec frames.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    seed: int = 0
    max_frames: int | None = None


@dataclass(frozen=True, slots=True)
class Trigger:
    """When a segment may start: `eager` as soon as the model can, `sentence` when its text is
    complete, `manual` only on flush or end. `min_chars` of text must have come before the first
    segment of a stream starts in `eager` mode (flush and end override it)."""

    mode: TriggerMode = "eager"
    min_chars: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """One of a conversation that is over: what the user said (None: nothing was, "" has a turn all the
    same) and in which sound, int16 [T, C], the text ids of the answer, of which `num_prefilled` stood in the
    prompt, and all frames int16 [T, C] that were sampled for it, the one that ended it included."""

    user_text: str | None
    user_codes: npt.NDArray[np.int16] | None
    ids: tuple[int, ...]
    num_prefilled: int
    frames: npt.NDArray[np.int16]


@dataclass(frozen=True, slots=True)
class UserTurn:
    """What a user said, in writing and, if known, as codec frames int16 [T, C]."""

    text: str
    codes: npt.NDArray[np.int16] | None = None


@dataclass(frozen=True, slots=True)
class SpeechRequest:
    """One utterance, as the edge asks for it.

    `style` tells in words how to speak; a model without such a control ignores it. `token_count` is the
    wanted length in frames, of all text up to a flush. `history`, the turns of the conversation so far, and
    `user`, what this utterance answers, are for models of conversations. The wire has no field for them
    (`continue_from` is reserved): they come through `Runtime.open` only.
    """

    voice: str | None = None
    voice_text: str | None = None  # what is said in the voice's reference, if known
    language: str | None = None
    sampling: SamplingParams = SamplingParams()
    trigger: Trigger = Trigger()
    normalize: bool = True
    join_sentences: bool = False  # a delta starts a new sentence: a space is put between deltas
    priority: int = 5
    max_lead_s: float | None = None  # None: as fast as the engine can
    whole: bool = False  # nobody listens before the end: made in large chunks, when others leave room
    replaces: tuple[StreamId, ...] = ()
    style: str | None = None
    token_count: int | None = None
    history: tuple[Turn, ...] = ()
    user: UserTurn | None = None


@dataclass(frozen=True, slots=True)
class VoiceCodes:
    """A reference voice as codec frames: int16 [T, C]."""

    key: str
    codes: npt.NDArray[np.int16]


@dataclass(frozen=True, slots=True)
class Timing:
    """Monotonic seconds at which a stream's first stages ended; 0.0 = not yet."""

    trigger_s: float
    admit_s: float = 0.0
    prefill_s: float = 0.0
    first_frame_s: float = 0.0
    chunk_full_s: float = 0.0
    first_pcm_s: float = 0.0


# ---- to the engine


@dataclass(frozen=True, slots=True)
class Prompt:
    """Opens a segment. `inputs` is int32 [T, W+K], T = 0 where the model needs no prefill.

    `continued`, int32 [T', W+K], is prefilled instead where the stream's segment before left frames that
    this one can go on from: whole text, its rows and then those frames; pushed text, behind what is in
    the KV. `max_frames` caps whole or pushed text below the model's limit. A segment with `silence_ms` > 0
    holds no text: it is a pause of that length. `prime`, int16 [T, C], on a stream's first prompt: codes of
    the reference that it continues.
    """

    stream_id: StreamId
    segment: int  # counts from 0 within the stream
    inputs: npt.NDArray[np.int32]
    sampling: SamplingParams
    trigger_s: float
    priority: int = 5
    max_lead_s: float | None = None
    silence_ms: int = 0
    whole: bool = False
    continued: npt.NDArray[np.int32] | None = None
    max_frames: int | None = None
    prime: npt.NDArray[np.int16] | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """More text of the newest segment (token-fed models)."""

    stream_id: StreamId
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EndSegment:
    """The newest segment's text is complete."""

    stream_id: StreamId


@dataclass(frozen=True, slots=True)
class EndText:
    """No more segments; closes the newest. The stream finishes when it stops."""

    stream_id: StreamId


@dataclass(frozen=True, slots=True)
class Pace:
    """How the listener is doing: `hold` parks the row, `played_s` is the reported play position."""

    stream_id: StreamId
    hold: bool
    played_s: float | None
    at_s: float


@dataclass(frozen=True, slots=True)
class Abort:
    """Stop the stream at once and free what it holds."""

    stream_id: StreamId


EngineMessage = Prompt | Tokens | EndSegment | EndText | Pace | Abort


# ---- to the vocoder, all of them sent by the engine


@dataclass(frozen=True, slots=True)
class Started:
    """What the vocoder must know when a stream's first frame comes; `seed` fixes its noise. One that
    `is_primed` has a slot already, unless that has failed."""

    timing: Timing
    seed: int
    priority: int = 5
    whole: bool = False
    is_primed: bool = False


@dataclass(frozen=True, slots=True)
class Frames:
    """One decode step: a frame, int16 [n, K], for each row that spoke. In a pace codebook stands how
    many tokens the frame really finished. `intervals_s`: how long each row took for it, without the time
    it waited for text or its listener. `prompts_s`: what the prompts that wait will take, before or
    between the next frames."""

    stream_ids: tuple[StreamId, ...]
    codes: npt.NDArray[np.int16]
    started: tuple[Started | None, ...]  # on a stream's first frame
    intervals_s: tuple[float, ...]
    prompts_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Note:
    """Something about the stream after its first `frame` frames; travels in order with the audio.

    `segment_end`: value = frames of the segment. `starved`: value = ms the row waited for text.
    `silence`: value = ms of silence to insert here.
    """

    stream_id: StreamId
    segment: int
    frame: int
    kind: NoteKind
    value: int


@dataclass(frozen=True, slots=True)
class Finish:
    """Decode what is pending, then close."""

    stream_id: StreamId
    reason: CloseReason
    text_pads: int = 0


@dataclass(frozen=True, slots=True)
class Drop:
    """Close now; pending frames are discarded."""

    stream_id: StreamId
    reason: CloseReason
    error: TTSError | None = None
    text_pads: int = 0


@dataclass(frozen=True, slots=True)
class Prime:
    """Opens a stream's slot before its first frame: `codes`, int16 [T, C] with T > 0, are decoded unheard, so
    that its sound goes on from theirs (a reference whose transcript the prompt continues)."""

    stream_id: StreamId
    codes: npt.NDArray[np.int16]
    started: Started


VocoderMessage = Prime | Frames | Note | Pace | Finish | Drop


# ---- to the event loop


@dataclass(frozen=True, slots=True)
class Audio:
    """Sound of consecutive frames: float32 [samples, channels] at the model's rate.

    `marks`, int16 [frames, K - C], is what the model said of each frame beside its sound: codebooks in
    front of the codec's (Wren: tokens finished, and the phonemes of both halves).
    """

    stream_id: StreamId
    pcm: npt.NDArray[np.float32]
    marks: npt.NDArray[np.int16]
    first_frame: int
    timing: Timing | None  # on a stream's first chunk


@dataclass(frozen=True, slots=True)
class Closed:
    """The last thing ever said about a stream. `frames`: how many were turned into sound.
    `quarantined`: the slot it had can't be used again, so neither can its permit."""

    stream_id: StreamId
    reason: CloseReason
    error: TTSError | None = None
    frames: int = 0
    text_pads: int = 0
    quarantined: bool = False


StreamEvent = Audio | Note | Closed
