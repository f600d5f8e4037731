"""The micro codecs of the golden folders, loaded once per way of running them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from realtime.models import tokenizer_codec
from realtime.models.codec_stage import CodecState
from realtime.models.tokenizer_codec import Codec, load_codec

GOLDEN = Path(__file__).parent / "golden"
NAMES = ("codec_v1", "codec_v2", "codec_nano")
CPU = torch.device("cpu")
ONE_LSB = 1 / 32768  # of 16-bit sound

torch.set_num_threads(1)  # as the server runs it


@cache
def cases(name: str) -> dict[str, Tensor]:
    return load_file(GOLDEN / name / "cases.safetensors")


@cache
def groups(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / name / "cases.json").read_text())["groups"]


def num_quantizers(name: str) -> int:
    return json.loads((GOLDEN / name / "config.json").read_text())["quantizer_kwargs"]["num_quantizers"]


def set_gathers(codec: Codec) -> Codec:
    """Attention as on a device that must not wait for the host, here on the CPU."""
    for stack in (codec.decoder.stack, codec.encoder.stack):
        for stage in stack.transformers:
            stage.gathers = True
    return codec


@cache
def codec(
    name: str, gathers: bool = False, pass_frames: int = 8, dtype: torch.dtype = torch.float32
) -> Codec:
    usual = tokenizer_codec.pass_frames
    tokenizer_codec.pass_frames = lambda device: pass_frames
    try:
        loaded = load_codec(GOLDEN / name, CPU, dtype, num_quantizers=num_quantizers(name))
    finally:
        tokenizer_codec.pass_frames = usual
    return set_gathers(loaded) if gathers else loaded


def sound(
    codec: Codec, codes: Tensor, sizes: list[int], state: CodecState | None = None, slot: int = 0
) -> Tensor:
    """codes [1, C, T] in chunks of the given sizes, through one slot -> [1, channels, samples]."""
    state = codec.decoder.new_state(1) if state is None else state
    assert sum(sizes) == codes.shape[2]
    pieces = [codec.decoder.decode(piece, state, torch.tensor([slot])) for piece in codes.split(sizes, 2)]
    return torch.cat(pieces, dim=2)


def by(size: int, total: int) -> list[int]:
    return [min(size, total - start) for start in range(0, total, size)]
