"""What the steps of a model cost on this machine: the constants of a simulated one.

Runs the real stages' runners in this process, one after the other, so nothing else should be busy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np
import torch

from realtime import models
from realtime.engine.engine import Engine
from realtime.engine.runner import ModelRunner
from realtime.messages import EndText, EngineMessage, SamplingParams, SpeechRequest, StreamId
from realtime.models.base import Bundle
from realtime.simulate import Machine
from realtime.vocoder.runner import CodecRunner

WIDTHS = (1, 4, 16)
SHAPES = ((1, 1), (1, 8), (4, 4), (16, 2), (16, 8))  # of vocoder steps: streams, frames
REPEATS = 12
TEXT = "The room looks out over the river, and breakfast is included until half past ten. "


def measured(name: str = "wren") -> Machine:
    """The embedded voice: engine and vocoder on a core each. Takes a few seconds."""
    torch.set_num_threads(1)
    bundle = models.load(name, device="cpu", dtype="float32")
    decode_s = [_decode_s(bundle, width) for width in WIDTHS]
    row_s, ar_fixed_s = _line(WIDTHS, decode_s)
    codec_s = _codec_s(bundle)
    lane_frame_s, codec_fixed_s = _line([width * frames for width, frames in SHAPES], codec_s)
    return Machine(
        name,
        ar_fixed_s=ar_fixed_s,
        ar_row_s=row_s,
        codec_fixed_s=codec_fixed_s,
        codec_lane_frame_s=lane_frame_s,
        is_shared=False,
    )


def _decode_s(bundle: Bundle, width: int) -> float:
    """A decode step of so many streams."""
    runner = ModelRunner(bundle, max(WIDTHS))
    engine = Engine(bundle.spec, runner, max(WIDTHS), lambda message: None)
    for i in range(width):
        request = SpeechRequest(sampling=SamplingParams(seed=i))
        feed = bundle.feed(StreamId(i), request)
        messages: list[EngineMessage] = [*feed.text(TEXT * 3), *feed.end()]
        for message in messages:
            if not isinstance(message, EndText):  # a stream that is over would leave the batch
                engine.handle(message)
    return _median_s(engine.step)


def _codec_s(bundle: Bundle) -> list[float]:
    codec = CodecRunner(bundle.spec, bundle.decoder, max(width for width, _ in SHAPES))
    taken_s = []
    for width, num_frames in SHAPES:
        for slot in range(width):
            codec.reset(slot, 0)
        frames = np.zeros((width, num_frames, bundle.spec.num_codebooks), np.int64)
        slots = list(range(width))
        taken_s.append(_median_s(lambda frames=frames, slots=slots: codec.run(frames, slots)))  # type: ignore[misc]
    return taken_s


def _median_s(step: Callable[[], object]) -> float:
    for _ in range(3):
        step()
    taken_s = []
    for _ in range(REPEATS):
        start_s = time.perf_counter()
        step()
        taken_s.append(time.perf_counter() - start_s)
    return median(taken_s)


def _line(x: Sequence[int], y: Sequence[float]) -> tuple[float, float]:
    """Slope and start of the line through the points that is off by the least share, neither below 0."""
    columns = np.stack([np.asarray(x, float), np.ones(len(x))], 1) / np.asarray(y)[:, None]
    slope, start = np.linalg.lstsq(columns, np.ones(len(y)), rcond=None)[0]
    return max(float(slope), 0.0), max(float(start), 0.0)
