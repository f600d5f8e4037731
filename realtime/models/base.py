"""What the engine and the vocoder need from a model family, and nothing more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from realtime.messages import EngineMessage, SpeechRequest, StreamId, VoiceCodes
from realtime.words import SpokenWord

if TYPE_CHECKING:  # the schedulers know a ModelSpec, and no tensor
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class WindowedText:
    """Text shown through a window around the token being spoken, moved by a pace codebook.

    `offsets` are relative to the spoken token; `eos` is the code of the pace codebook that ends
    a segment; `min_lookahead` tokens beyond the spoken one must be known while a segment is open.
    Limits are in tokens and frames of one segment.
    """

    offsets: tuple[int, ...]
    pace_codebook: int
    pace_max: int
    eos: int
    start_id: int
    end_id: int
    pad_id: int
    min_lookahead: int
    max_segment_tokens: int
    max_segment_frames: int

    def frame_cap(self, num_tokens: int, closed: bool) -> int:
        """Most frames a segment may have, whatever it has spoken."""
        if not closed:
            return self.max_segment_frames
        return min(self.max_segment_frames, 5 * num_tokens + 25)

    @property
    def max_positions(self) -> int:
        """Most positions of a row's KV."""
        return self.max_segment_frames + 1


def longest_frames(num_tokens: int) -> int:
    """A text that goes on for three times as long as anything readable has run away."""
    return 35 + 15 * num_tokens


@dataclass(frozen=True, slots=True)
class PushedText:
    """One text token per decode step, `pad_id` once the text is over.

    A segment starts when `lookahead` tokens are known, or all of them where there are fewer, and ends
    with `eos` in codebook 0. A frame with a code beyond the codec's codebooks makes no sound;
    `max_invalid_frames` of them in a row end the segment. Limits are in frames and KV positions.
    """

    pad_id: int
    eos: int
    max_segment_frames: int
    max_positions: int
    lookahead: int = 12
    max_invalid_frames: int = 25

    def frame_cap(self, num_tokens: int, closed: bool) -> int:
        """Most frames a segment may have, whatever it has spoken."""
        if not closed:
            return self.max_segment_frames
        return min(self.max_segment_frames, longest_frames(num_tokens))


@dataclass(frozen=True, slots=True)
class WholeText:
    """A whole clause in the prompt; `slot_id` is the text id of every generated frame."""

    slot_id: int
    max_segment_frames: int
    max_positions: int

    def frame_cap(self, num_tokens: int, closed: bool) -> int:
        """Most frames a segment may have, whatever it has spoken."""
        return self.max_segment_frames


TextPolicy = WindowedText | PushedText | WholeText
SamplingRule = Literal["local", "realtime"]


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a family samples with unless a request says otherwise. `temperature` has one value per
    codebook, 0 = the likeliest code; the penalty looks at the last `penalty_window` frames, in the
    "local" rule at the whole segment."""

    temperature: tuple[float, ...]
    top_k: int
    top_p: float
    repetition_penalty: float
    penalty_window: int = 50
    rule: SamplingRule = "realtime"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes and names a family announces. A frame has `num_codebooks` codes, of which
    `codec_codebooks` go to the codec; `hop` is samples per codec frame and channel."""

    name: str
    num_codebooks: int
    codec_codebooks: slice
    codebook_size: int
    frame_rate: float
    sample_rate: int
    channels: int
    hop: int
    first_codes: tuple[int, ...]  # the codes of a segment's first step input
    text: TextPolicy
    sampling: SamplingDefaults
    languages: tuple[str, ...]
    voices: tuple[str, ...]
    has_controls: bool = False  # a prompt may ask for a length and a style
    tells_pace: bool = True  # codebook 0 says how many tokens a frame finished
    phonemes: tuple[str, ...] = ()  # symbols of the two codebooks after it, "" = silence; () = none
    pace_lag_frames: float = 0.0  # how much later than its sound a token counts as finished
    audio_vocab_size: int = 0  # entries of the widest head, where that is more than `codebook_size`
    delay_ms: float = 0.0  # how much later than its frame's place a sound comes out of the codec

    @property
    def frame_s(self) -> float:
        return 1.0 / self.frame_rate


@dataclass(frozen=True, slots=True)
class FrameOutput:
    """One frame per row of a batch: `codes` int64 [n, K]; `ok` bool [n], False where the row's
    numbers were not finite; `stop` bool [n], True where this is no frame but the segment's end."""

    codes: Tensor
    ok: Tensor
    stop: Tensor


class Backbone(Protocol):
    def new_kv(self, rows: int, max_positions: int) -> Any: ...

    def prefill(self, inputs: Tensor, kv: Any, row: int, start: int) -> Tensor:
        """Many positions of one row: inputs int64 [T, W+K] -> last hidden [1, H]."""
        ...

    def decode(
        self, inputs: Tensor, kv: Any, rows: Tensor, positions: Tensor, span: int | None = None
    ) -> Tensor:
        """One step for `n` rows: inputs int64 [n, W+K], rows and positions int64 [n] -> [n, H]. No
        position is `span` or more, so nothing from there on has to be read."""
        ...


class LocalDecoder(Protocol):
    def frame(self, hidden: Tensor, sampling: Any) -> FrameOutput:
        """The codes of one frame from each row's hidden state [n, H]."""
        ...


class CodecDecoder(Protocol):
    def new_state(self, slots: int) -> Any: ...

    def reset(self, state: Any, slot: int, seed: int) -> None:
        """Make a slot equal to a fresh one."""
        ...

    def decode(self, codes: Tensor, state: Any, slots: Tensor) -> Tensor:
        """codes int64 [n, C, T] of the given slots -> float32 [n, channels, T * hop]."""
        ...


class CodecEncoder(Protocol):
    def encode(self, pcm: Sequence[npt.NDArray[np.float32]]) -> list[npt.NDArray[np.int16]]:
        """Sounds float32 [samples, channels] at the codec's rate -> codes int16 [T, C] of each."""
        ...


class TextFeed(Protocol):
    """One per stream, on the event loop's thread: text in, engine messages out.

    Nothing it has emitted ever changes, whatever the split of the text into deltas.
    """

    @property
    def num_chars(self) -> int:
        """Code points received so far."""
        ...

    @property
    def num_segments(self) -> int:
        """Segments opened so far."""
        ...

    @property
    def num_dropped(self) -> int:
        """Code points this voice can't speak."""
        ...

    @property
    def has_text(self) -> bool:
        """Anything but white space came."""
        ...

    def text(self, delta: str) -> list[EngineMessage]: ...

    def flush(self) -> list[EngineMessage]: ...

    def end(self) -> list[EngineMessage]: ...

    def spans(self, segment: int) -> Sequence[tuple[int, int] | None]:
        """Code points c0, c1 of the input that each token of a segment came from; None for a
        token without a source."""
        ...

    def words(self, segment: int) -> Sequence[SpokenWord]:
        """The words of a segment known so far, ascending and disjoint."""
        ...


class MakeFeed(Protocol):
    def __call__(
        self, stream_id: StreamId, request: SpeechRequest, voice: VoiceCodes | None = None
    ) -> TextFeed:
        """A feed for one stream; `voice` is the reference of a model that can clone."""
        ...


@dataclass(frozen=True, slots=True)
class Bundle:
    """A loaded model. Without an encoder its voices are fixed; with one, `prepare` is what it wants done
    to a recording float32 [samples, channels] before that."""

    spec: ModelSpec
    backbone: Backbone
    local: LocalDecoder
    decoder: CodecDecoder
    feed: MakeFeed
    encoder: CodecEncoder | None = None
    prepare: Callable[[npt.NDArray[np.float32]], npt.NDArray[np.float32]] | None = None
    device: str = "cpu"  # where its tensors are
