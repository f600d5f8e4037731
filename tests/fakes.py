"""Stand-ins with exact, cheap behaviour: a clock, a runner, a codec and a whole model."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor

from realtime.engine.row import Row, Segment
from realtime.engine.sampler import Sampler
from realtime.engine.scheduler import Batch, StepOutput
from realtime.engine.text import policy_of, window_ids
from realtime.messages import (
    Audio,
    EndSegment,
    EndText,
    EngineMessage,
    Prompt,
    SamplingParams,
    StreamId,
    Tokens,
)
from realtime.models import EMBEDDED
from realtime.models.base import Bundle, FrameOutput, ModelSpec, SamplingDefaults, WindowedText
from realtime.models.wren_feed import WrenFeed

NUM_CODECS = 2
CODEBOOK_SIZE = 64
NUM_PHONEMES = 5
EOS = 1026
HOP = 12
TEXT = WindowedText(
    offsets=(-2, -1, 0, 1, 2, 3, 4),
    pace_codebook=0,
    pace_max=3,
    eos=EOS,
    start_id=1,
    end_id=2,
    pad_id=4,
    min_lookahead=1,
    max_segment_tokens=60,
    max_segment_frames=180,
)
SPEC = ModelSpec(
    name="fake",
    num_codebooks=2 + NUM_CODECS,
    codec_codebooks=slice(2, 2 + NUM_CODECS),
    codebook_size=CODEBOOK_SIZE,
    frame_rate=12.5,
    sample_rate=150,
    channels=1,
    hop=HOP,
    first_codes=(1025, 1024, 1024, 1024),
    text=TEXT,
    sampling=SamplingDefaults((0.7, 0.0, 0.9, 0.9), top_k=20, top_p=0.9, repetition_penalty=1.2),
    languages=("en",),
    voices=("fake",),
)
POLICY = policy_of(TEXT, CODEBOOK_SIZE)
NO_ROWS = np.zeros((0, 11), np.int32)

Codes = npt.NDArray[np.int64]
Pcm = npt.NDArray[np.float32]


@dataclass
class FakeClock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds


# ---- engine


def prompt(
    stream: int,
    segment: int = 0,
    *,
    silence_ms: int = 0,
    num_rows: int = 0,
    max_lead_s: float | None = None,
    priority: int = 5,
    seed: int = 0,
    max_frames: int | None = None,
) -> Prompt:
    return Prompt(
        StreamId(stream),
        segment,
        np.zeros((num_rows, 11), np.int32),
        SamplingParams(seed=seed, max_frames=max_frames),
        trigger_s=100.0,
        priority=priority,
        max_lead_s=max_lead_s,
        silence_ms=silence_ms,
    )


def sentence(stream: int, num_tokens: int, segment: int = 0, **options: int) -> list[EngineMessage]:
    """A whole segment, closed."""
    ids = tuple(100 + segment * 100 + i for i in range(num_tokens))
    return [
        prompt(stream, segment, **options),
        Tokens(StreamId(stream), ids),
        EndSegment(StreamId(stream)),
    ]


def utterance(stream: int, *num_tokens: int, **options: int) -> list[EngineMessage]:
    """Segments of so many tokens each, and the end."""
    parts = [sentence(stream, n, i, **options) for i, n in enumerate(num_tokens)]
    return [message for part in parts for message in part] + [EndText(StreamId(stream))]


Pace = Callable[[Row, Segment], int]


def one_token_a_frame(row: Row, segment: Segment) -> int:
    return 1


def fake_codes(seed: int, part: int, frame: int, visible: Sequence[int]) -> list[int]:
    """What the fake model says: a function of these four and nothing else."""
    digest = zlib.crc32(repr((seed, part, frame, list(visible))).encode())
    return [digest % NUM_PHONEMES, digest // 7 % CODEBOOK_SIZE, digest // 1009 % CODEBOOK_SIZE]


@dataclass
class FakeRunner:
    """Answers for the model. `pace` says how many tokens a frame finishes; the end of speech comes as
    soon as it may, unless `never_eos`."""

    pace: Pace = one_token_a_frame
    never_eos: bool = False
    error: Exception | None = None  # raised by the next run
    open_error: Exception | None = None  # raised by the next open_row
    not_ok: set[int] = field(default_factory=set)  # streams whose numbers are not finite
    batches: list[Batch] = field(default_factory=list)
    opened: list[int] = field(default_factory=list)

    def open_row(self, row: Row) -> None:
        error, self.open_error = self.open_error, None
        if error is not None:
            raise error
        self.opened.append(row.stream_id)

    def run(self, batch: Batch) -> StepOutput:
        self.batches.append(batch)
        error, self.error = self.error, None
        if error is not None:
            raise error
        if batch.is_partial:
            return StepOutput.nothing(SPEC.num_codebooks)
        rows = []
        for row in batch.rows:
            segment = row.segments[0]
            ends = POLICY.may_stop(segment) and not self.never_eos
            first = EOS if ends else self.pace(row, segment)
            seen = window_ids(segment, TEXT)
            rows.append([first, *fake_codes(row.sampling.seed, row.num_parts, segment.num_frames, seen)])
        codes = np.array(rows, np.int64)
        ok = np.array([row.stream_id not in self.not_ok for row in batch.rows])
        return StepOutput(codes, ok, codes[:, 0] == EOS)


# ---- codec


@dataclass
class FakeState:
    """Per slot a number that every frame goes into: what a slot says depends on all it has heard."""

    running: npt.NDArray[np.int64]


@dataclass
class FakeDecoder:
    """A codec whose sound gives away cross-talk, and lost or repeated frames."""

    decode_error: Exception | None = None  # raised by the next decode
    reset_error: Exception | None = None  # raised by the next reset
    calls: list[tuple[tuple[int, ...], int]] = field(default_factory=list)  # slots and frames
    on_decode: Callable[[int, int], None] = lambda width, num_frames: None

    def new_state(self, slots: int) -> FakeState:
        return FakeState(np.full(slots, -1, np.int64))  # not usable before a reset

    def reset(self, state: FakeState, slot: int, seed: int) -> None:
        error, self.reset_error = self.reset_error, None
        if error is not None:
            raise error
        state.running[slot] = seed % 9973

    def decode(self, codes: Tensor, state: FakeState, slots: Tensor) -> Tensor:
        frames = codes.numpy()
        index = slots.numpy()
        assert len(set(index.tolist())) == len(index), index
        assert (state.running[index] >= 0).all(), "a slot was used before it was reset"
        error, self.decode_error = self.decode_error, None
        if error is not None:
            state.running[index] = 12345  # half-way
            raise error
        self.calls.append((tuple(index.tolist()), frames.shape[2]))
        self.on_decode(len(index), frames.shape[2])
        out = np.zeros((len(index), 1, frames.shape[2] * HOP), np.float32)
        for t in range(frames.shape[2]):
            state.running[index] = advance(state.running[index], frames[:, :, t])
            out[:, 0, t * HOP : (t + 1) * HOP] = sound(state.running[index])
        return torch.from_numpy(out)


def advance(running: Codes, frame: Codes) -> Codes:
    weights = 1 + np.arange(frame.shape[-1])
    return (running * 31 + (frame * weights).sum(-1) + 1) % 9973


def sound(running: Codes) -> Pcm:
    return ((running[:, None] * HOP + np.arange(HOP)) / 2.0**17).astype(np.float32)


def whole_pcm(seed: int, frames: Iterable[Sequence[int]]) -> Pcm:
    """What a stream of these codec frames sounds like when nothing goes wrong: [samples]."""
    running = np.array([seed % 9973])
    pieces = []
    for frame in frames:
        running = advance(running, np.array([frame], np.int64))
        pieces.append(sound(running)[0])
    return np.concatenate(pieces) if pieces else np.zeros(0, np.float32)


def joined(events: Iterable[object], stream: int) -> Pcm:
    """All sound of a stream; its chunks must follow each other."""
    pieces: list[Pcm] = []
    num_frames = 0
    for event in events:
        if isinstance(event, Audio) and event.stream_id == stream:
            assert event.first_frame == num_frames, (event.first_frame, num_frames)
            assert (event.timing is not None) == (num_frames == 0)
            num_frames += event.pcm.shape[0] // HOP
            pieces.append(event.pcm[:, 0])
    return np.concatenate(pieces) if pieces else np.zeros(0, np.float32)


# ---- a whole model


@dataclass
class FakeBackbone:
    """The hidden state is a number made of the step input and the position: no memory needed."""

    error: Exception | None = None  # raised by the next decode step
    before_decode: Callable[[], None] = lambda: None
    num_steps: int = 0

    def new_kv(self, rows: int, max_positions: int) -> None:
        return None

    def prefill(self, inputs: Tensor, kv: None, row: int, start: int) -> Tensor:
        raise NotImplementedError

    def decode(self, inputs: Tensor, kv: None, rows: Tensor, positions: Tensor) -> Tensor:
        self.before_decode()
        self.num_steps += 1
        error, self.error = self.error, None
        if error is not None:
            raise error
        weights = 31 + 17 * torch.arange(inputs.shape[1])
        return (((inputs * weights).sum(1) + 101 * positions) % 65521).float().unsqueeze(1)


ALLOWED = (
    torch.tensor([0, 1, 2, 3, EOS]),
    torch.arange(NUM_PHONEMES),
    torch.arange(CODEBOOK_SIZE),
    torch.arange(CODEBOOK_SIZE),
)
LEAN = torch.tensor([-1.0, 2.0, 1.0, 0.0, 3.0])  # of the pace codebook: about a token a frame, and ends


@dataclass
class FakeLocal:
    """Logits are a function of the hidden state; the engine's own sampler picks."""

    never_eos: bool = False

    def frame(self, hidden: Tensor, sampling: Sampler) -> FrameOutput:
        state = hidden.long()
        codes = []
        for k, allowed in enumerate(ALLOWED):
            mixed = state * (2 * torch.arange(allowed.numel()) + 3 + 8 * k) % 997
            logits = mixed.float() / 200
            if k == 0:
                logits = logits / 4 + LEAN
                if self.never_eos:
                    logits[:, -1] = float("-inf")
            codes.append(allowed[sampling.pick(k, logits)])
            state = (state * 7 + codes[-1].unsqueeze(1)) % 65521
        return FrameOutput(
            torch.stack(codes, 1), torch.ones(hidden.shape[0], dtype=torch.bool), codes[0] == EOS
        )


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))


def fake_bundle(
    backbone: FakeBackbone | None = None, local: FakeLocal | None = None, decoder: FakeDecoder | None = None
) -> Bundle:
    """A model that costs next to nothing and speaks through the real text feed and sampler."""
    return Bundle(
        SPEC,
        backbone or FakeBackbone(),
        local or FakeLocal(),
        decoder or FakeDecoder(),
        partial(WrenFeed, text=TEXT, tokenizer=tokenizer(), num_codebooks=SPEC.num_codebooks),
    )
