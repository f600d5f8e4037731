"""What single steps take: of a model with random weights (`realtime bench --dummy-weights`), and of the
engine beside the official code's own way (`realtime bench --decode`). Prints a table and one line of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from realtime import dummy
from realtime.engine.device_runner import DeviceRunner
from realtime.engine.engine import Engine
from realtime.engine.row import Row, Segment
from realtime.engine.scheduler import Batch, Pacing
from realtime.errors import ConfigError, StageFailed
from realtime.graphs import CudaRecorder, Graphs
from realtime.messages import (
    Audio,
    Closed,
    EndSegment,
    EndText,
    EngineMessage,
    Prompt,
    SamplingParams,
    StreamEvent,
    StreamId,
    Timing,
    Tokens,
    VocoderMessage,
)
from realtime.models.base import Bundle, PushedText
from realtime.models.loading import place
from realtime.models.moss_local import LocalConfig
from realtime.reference_loop import ReferenceLoop
from realtime.vocoder.policy import ChunkPolicy
from realtime.vocoder.runner import CodecRunner
from realtime.vocoder.vocoder import Vocoder
from realtime.worker import Worker

PROMPT_ROWS = 200  # a voice of ten seconds and a sentence
FRAMES = 25  # of an utterance
DEADLINE_S = 300.0
PENALTY = 1.1  # so that the comparison has every step of the rules


# ---- a batch by hand


class Deck:
    """Rows that decode together, without a scheduler: always all of them, whatever they say."""

    def __init__(self, bundle: Bundle, runner: DeviceRunner, width: int, prompt_rows: int) -> None:
        spec = bundle.spec
        self._runner = runner
        self._rows = []
        for index in range(width):
            inputs = prompt(spec.num_codebooks, prompt_rows, index)
            params = SamplingParams(seed=index, repetition_penalty=PENALTY)
            row = Row(StreamId(index), index, params, 5, None, Timing(0.0), spec.first_codes)
            row.segments.append(Segment(0, inputs, begun=True))
            runner.open_row(row)
            runner.run(Batch((row,), "prefill", 0, prompt_rows))
            row.position, row.segments[0].num_frames = prompt_rows, 1
            self._rows.append(row)

    def step(self) -> None:
        self._runner.run(Batch(tuple(self._rows), "decode"))
        for row in self._rows:
            row.position += 1
            row.segments[0].num_frames += 1


def prompt(num_codebooks: int, num_rows: int, seed: int) -> Any:
    """int32 [T, 1 + K]: text, and a reference in the middle."""
    rng = np.random.default_rng(seed)
    inputs = np.full((num_rows, 1 + num_codebooks), 1024, np.int32)
    inputs[:, 0] = rng.integers(0, 400, num_rows)
    middle = inputs[num_rows // 4 : num_rows // 2, 1:]
    middle[:] = rng.integers(0, 1024, middle.shape)
    return inputs


def seconds(work: Callable[[], object], repeats: int) -> list[float]:
    """Of each call; the work waits for its device itself."""
    taken = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began_s)
    return taken


# ---- a model by itself


@dataclass(frozen=True, slots=True)
class Stages:
    """A model ready to be measured, with a row and a slot for each of `num_streams`."""

    bundle: Bundle
    num_streams: int
    runner: DeviceRunner
    codec: CodecRunner
    policy: ChunkPolicy


def stages_of(bundle: Bundle, num_streams: int) -> Stages:
    """As the server builds them."""
    device, spec = torch.device(bundle.device), bundle.spec
    runner, codec = (
        DeviceRunner(bundle, num_streams, device),
        CodecRunner(spec, bundle.decoder, num_streams, device),
    )
    is_cuda = device.type == "cuda"
    if is_cuda:
        runner.record(Graphs(CudaRecorder(device)))
        codec.record(Graphs(CudaRecorder(device)))
        torch.cuda.synchronize(device)
    policy = ChunkPolicy(spec.frame_s, buckets=codec.widths if is_cuda else ())
    return Stages(bundle, num_streams, runner, codec, policy)


def frame_times(stages: Stages, widths: Sequence[int], repeats: int) -> Iterator[dict[str, Any]]:
    """What a frame of each of so many rows takes."""
    for width in widths:
        deck = Deck(stages.bundle, stages.runner, width, PROMPT_ROWS)
        deck.step()
        taken = seconds(deck.step, repeats)
        yield {"width": width, "frame_ms": median(taken) * 1e3, "frames_per_s": width / median(taken)}


def codec_times(
    stages: Stages, widths: Sequence[int], sizes: Sequence[int], repeats: int
) -> Iterator[dict[str, Any]]:
    """What a codec step of each width and number of frames takes."""
    rng = np.random.default_rng(1)
    for width in (width for width in widths if stages.policy.fits(width)):
        for size in sizes:
            slots = list(range(width))
            codes = rng.integers(0, 1024, (width, size, stages.bundle.spec.num_codebooks))

            def step(codes: Any = codes, slots: Any = slots) -> None:
                stages.codec.run(codes, slots)

            step()
            yield {"width": width, "frames": size, "step_ms": median(seconds(step, repeats)) * 1e3}


def first_audio(stages: Stages, widths: Sequence[int], repeats: int) -> Iterator[dict[str, Any]]:
    """From so many requests at once to the first sound of each, through both stages on their threads."""
    with _running(stages) as say:
        say(1)
        for width in widths:
            rounds = [sorted(say(width)) for _ in range(repeats)]
            yield {
                "width": width,
                "first_ms": median(round[0] for round in rounds) * 1e3,
                "median_ms": median(median(round) for round in rounds) * 1e3,
                "last_ms": median(round[-1] for round in rounds) * 1e3,
            }


@contextlib.contextmanager
def _running(stages: Stages) -> Iterator[Callable[[int], list[float]]]:
    """Both stages at work; gives what speaks so many streams and says when each was first heard."""
    spec = stages.bundle.spec
    num_streams = stages.num_streams
    heard: queue.SimpleQueue[tuple[float, StreamEvent]] = queue.SimpleQueue()

    def emit(events: list[StreamEvent]) -> None:
        now = time.monotonic()
        for event in events:
            heard.put((now, event))

    vocoder = Vocoder(spec, stages.codec, num_streams, stages.policy, emit)
    vocoder.warm_up()
    vocoder_worker: Worker[VocoderMessage] = Worker("vocoder", vocoder)
    pacing = Pacing(lambda: vocoder.first_frames)
    engine = Engine(spec, stages.runner, num_streams, vocoder_worker.put, pacing=pacing)
    engine_worker: Worker[EngineMessage] = Worker("engine", engine)
    next_id = iter(range(1, 1_000_000))

    def say(width: int) -> list[float]:
        ids = {StreamId(next(next_id)) for _ in range(width)}
        began_s = time.monotonic()
        first_s: dict[StreamId, float] = {}
        for stream_id in ids:
            engine_worker.put(*_utterance(stages.bundle, stream_id, began_s))
        left = set(ids)
        while left:
            try:
                now, event = heard.get(timeout=max(began_s + DEADLINE_S - time.monotonic(), 0.001))
            except queue.Empty:
                raise StageFailed(f"{len(left)} streams were not done after {DEADLINE_S:.0f} s") from None
            if isinstance(event, Audio):
                first_s.setdefault(event.stream_id, now - began_s)
            elif isinstance(event, Closed):
                if event.reason == "failed":
                    raise StageFailed("a stage failed; see the log")
                left.discard(event.stream_id)
        return list(first_s.values())

    vocoder_worker.start()
    engine_worker.start()
    try:
        yield say
    finally:
        engine_worker.stop(10)
        vocoder_worker.stop(10)


def _utterance(bundle: Bundle, stream_id: StreamId, now: float) -> list[EngineMessage]:
    inputs = prompt(bundle.spec.num_codebooks, PROMPT_ROWS, stream_id)
    params = SamplingParams(seed=stream_id, max_frames=FRAMES)
    messages: list[EngineMessage] = [Prompt(stream_id, 0, inputs, params, now)]
    if isinstance(bundle.spec.text, PushedText):
        messages.append(Tokens(stream_id, tuple(range(FRAMES))))
    return [*messages, EndSegment(stream_id), EndText(stream_id)]


# ---- beside the official way


@dataclass(frozen=True, slots=True)
class Pair:
    """Decode steps a second of one batch, ours and theirs, and how many times faster: the median of the
    rounds' own ratios, for a shared machine changes its speed from one round to the next. `ratio_alone`: as
    the official service does it, one row after the other, each in batches of one."""

    width: int
    ours_per_s: float
    theirs_per_s: float
    ratio: float
    ratio_alone: float


def compare(widths: Sequence[int], num_steps: int, num_rounds: int, prompt_rows: int) -> Iterator[Pair]:
    """Both take turns, from a new prompt each time."""
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    bundle = dummy.build("tiny", cpu, torch.float32, max(widths))
    sampling = replace(bundle.spec.sampling, repetition_penalty=PENALTY)
    reference = ReferenceLoop(dummy.local_config("tiny"), sampling)
    runner = DeviceRunner(bundle, max(widths), cpu)
    num_codebooks = bundle.spec.num_codebooks
    for width in widths:
        prompts = np.stack([prompt(num_codebooks, prompt_rows, index) for index in range(width)])
        rows = torch.from_numpy(prompts.astype(np.int64))
        ours: list[float] = []
        theirs: list[float] = []
        alone: list[float] = []
        for _ in range(num_rounds):
            deck = Deck(bundle, runner, width, prompt_rows)
            deck.step()
            ours.append(num_steps / sum(seconds(deck.step, num_steps)))
            for some, rates in ((rows, theirs), (rows[:1], alone)):
                reference.start(some)
                reference.frame()
                rates.append(num_steps / sum(seconds(reference.frame, num_steps)))
        ratio = median(a / b for a, b in zip(ours, theirs, strict=True))
        ratio_alone = median(width * a / b for a, b in zip(ours, alone, strict=True))
        yield Pair(width, median(ours), median(theirs), ratio, ratio_alone)


def weights_read(config: LocalConfig) -> int:
    """Bytes of float32 weights that a frame has to read, however many rows it is for."""
    c, local = config.language, config.local
    heads = c.num_heads + c.num_kv_heads
    layer = c.hidden_size * (2 * heads * c.head_dim + 3 * c.intermediate_size)
    inner = local.hidden_size * (4 * local.hidden_size + 2 * local.intermediate_size)
    position = local.num_layers * inner + config.codebook_size * c.hidden_size
    return 4 * (c.num_layers * layer + config.num_codebooks * position)


def memory_rate(num_bytes: int = 2**28) -> float:
    """Bytes a second that one thread reads."""
    values = torch.ones(num_bytes // 4)
    values.sum()
    return num_bytes / median(seconds(values.sum, 3))


# ---- command line


def dummy_main(args: argparse.Namespace) -> int:
    """`realtime bench --dummy-weights NAME`. Raises ModelError where the model does not fit."""
    widths = _widths(args.streams)
    device, dtype = place(args.device, args.dtype)
    torch.set_num_threads(1)
    began_s = time.monotonic()
    stages = stages_of(dummy.build(args.dummy_weights, device, dtype, max(widths)), max(widths))
    ready_s = time.monotonic() - began_s
    repeats = 20 if device.type == "cuda" else 5
    result: dict[str, Any] = {
        "kind": "dummy",
        "model": args.dummy_weights,
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "ready_s": ready_s,
        "frame": list(frame_times(stages, widths, repeats)),
        "codec": list(codec_times(stages, widths, (1, 2, 4, 8, 25), repeats)),
        "first_audio": list(first_audio(stages, widths, 3)),
    }
    for key, title in (
        ("frame", "a frame of each row"),
        ("codec", "a codec step"),
        ("first_audio", "first audio"),
    ):
        _show(result[key], f"{title}: {args.dummy_weights}, {device}, {result['dtype']}")
    print(json.dumps(result))
    return 0


def decode_main(args: argparse.Namespace) -> int:
    """`realtime bench --decode`. Raises ConfigError where transformers is missing."""
    pairs = list(compare(_widths(args.streams), num_steps=20, num_rounds=7, prompt_rows=100))
    rows = [asdict(pair) for pair in pairs]
    _show(rows, "decode steps a second, beside transformers and a loop over rows")
    read, rate = weights_read(dummy.local_config("tiny")), memory_rate()
    print(
        f"a step reads {read / 1e6:.0f} MB of weights, one thread gets {rate / 1e9:.1f} GB/s from memory:"
        f" unless a cache holds them no batch makes more than {rate / read:.0f} steps a second"
    )
    result = {"kind": "decode", "torch": torch.__version__, "rows": rows, "bytes": read, "bytes_per_s": rate}
    print(json.dumps(result))
    return 0


def _widths(text: str) -> list[int]:
    try:
        widths = sorted({int(number) for number in text.split(",")})
    except ValueError as error:
        raise ConfigError(f"--streams are whole numbers with commas: {error}") from error
    if widths[0] < 1:
        raise ConfigError("--streams are at least 1")
    return widths


def _show(rows: Sequence[dict[str, Any]], title: str) -> None:
    table = Table(box=None, pad_edge=False)
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    print(title)
    Console(width=110).print(table)
