"""Models of released (and small) sizes with random weights: what they take and cost, without a checkpoint.

The loaders' own code builds them. Every tensor is made where it stays, on the device; what they say is
noise that hardly ever ends.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from realtime.errors import ModelError
from realtime.messages import SpeechRequest, StreamId, VoiceCodes
from realtime.models import memory
from realtime.models.base import Backbone, Bundle, LocalDecoder, ModelSpec, TextFeed
from realtime.models.codec_config import CodecConfig
from realtime.models.moss_local import LocalConfig, build_local_lm, local_spec
from realtime.models.moss_nano import NanoConfig, build_nano_lm, nano_spec
from realtime.models.moss_realtime import NUM_CODES, RealtimeConfig, build_realtime_lm, realtime_spec
from realtime.models.tokenizer_codec import Codec, build_codec, pass_frames
from realtime.models.weights import Tensors

META = torch.device("meta")
SCALE = 0.02  # of the noise, as the official classes begin training
SURENESS = 6.0  # of going on: a stop has a chance of exp(-12) a frame

# Rows of a table that say go on and stop; the decision of a TiedFrames.
_DECISIONS = {"local_text_lm_head.weight": (0, 1), "transformer.wte.weight": (9, 7)}


class RandomTensors(Tensors):
    """Stands in for a checkpoint's tensors: any name is there, with seeded noise. On the device `meta`
    nothing is; then `num_values` counts what was taken."""

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._random = None if device == META else torch.Generator(device).manual_seed(seed)
        self._num_taken = 0

    def has(self, name: str) -> bool:
        """Older names of a tensor, and projections that may be left out, are not there."""
        return False

    def discard(self, *names: str) -> None:
        """There are no copies."""

    @property
    def num_values(self) -> int:
        return self._num_taken

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        self._num_taken += math.prod(shape)
        tensor = torch.empty(shape, dtype=dtype or self._dtype, device=self._device)
        if self._random is None:
            return tensor
        if len(shape) == 1:
            tensor.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            tensor.normal_(0.0, SCALE, generator=self._random)
        return _talkative(name, tensor)

    def finish(self) -> None:
        """Nothing can be wrong."""


def _talkative(name: str, tensor: Tensor) -> Tensor:
    """Axis 0 of a local transformer's output becomes a constant that only the decision reads, and codes
    that end a segment, or make no sound, become as unlikely as noise can be."""
    if name == "local_transformer.ln_f.weight":
        tensor[0] = 0
    elif name == "local_transformer.ln_f.bias":
        tensor[0] = SURENESS
    elif ".local_lm_heads." in name:
        tensor[NUM_CODES:] = 0
    elif name in _DECISIONS:
        go_on, stop = _DECISIONS[name]
        tensor[[go_on, stop]] = 0
        tensor[go_on, 0], tensor[stop, 0] = 1, -1
    return tensor


class Shape:
    """A family's config files and how to build it from them."""

    def __init__(self, family: str, config: dict[str, Any], codec: dict[str, Any]) -> None:
        self.family = family
        self.config: LocalConfig | NanoConfig | RealtimeConfig
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
            (folder / "codec.json").write_text(json.dumps(codec), encoding="utf-8")
            self.codec = CodecConfig.load(folder / "codec.json")
            match family:
                case "local":
                    self.config = LocalConfig.load(folder)
                case "nano":
                    self.config = NanoConfig.load(folder)
                case _:
                    self.config = RealtimeConfig.load(folder)

    def language(self, tensors: Tensors) -> tuple[Backbone, LocalDecoder]:
        match self.config:
            case LocalConfig() as config:
                return build_local_lm(tensors, config)
            case NanoConfig() as config:
                return build_nano_lm(tensors, config)
            case RealtimeConfig() as config:
                return build_realtime_lm(tensors, config)

    def sound(self, tensors: Tensors, device: torch.device, dtype: torch.dtype) -> Codec:
        return build_codec(tensors, self.codec, device, dtype, self.config.num_codebooks)

    def spec(self, name: str, codec: Codec) -> ModelSpec:
        match self.config:
            case LocalConfig() as config:
                return local_spec(name, config, codec)
            case NanoConfig() as config:
                return nano_spec(name, config, codec)
            case RealtimeConfig() as config:
                return realtime_spec(name, config, codec)

    def sizes(self, device: torch.device, dtype: torch.dtype) -> memory.Sizes:
        """From a model without memory."""
        lm, codec = RandomTensors(0, dtype, META), RandomTensors(0, dtype, META)
        self.language(lm)
        self.sound(codec, META, dtype)
        width, frames = dtype.itemsize, pass_frames(device)
        return memory.Sizes(
            weights=lm.num_values * width,
            codec_weights=codec.num_values * width,
            kv_per_position=memory.kv_values(self.config.language) * width,
            max_positions=self.config.max_positions,
            codec_state=self.codec.slot_values("decoder", frames) * width,
            encoder_state=self.codec.slot_values("encoder", frames) * width,
        )


def build(name: str, device: torch.device, dtype: torch.dtype, num_streams: int, seed: int = 1) -> Bundle:
    """The model of that name, without a voice or a tokenizer; ModelError where it does not fit."""
    if name not in SHAPES:
        raise ModelError(f"{name!r} is not known; known: {', '.join(SHAPES)}")
    shape = Shape(*SHAPES[name])
    plan = plan_of(shape, device, dtype, num_streams)
    plan.check(device)
    with torch.inference_mode():
        backbone, local = shape.language(RandomTensors(seed, dtype, device))
        codec = shape.sound(RandomTensors(seed + 1, torch.float32, device), device, dtype)
    return Bundle(
        spec=shape.spec(name, codec),
        backbone=backbone,
        local=local,
        decoder=codec.decoder,
        feed=_no_feed,
        device=str(device),
    )


def local_config(name: str) -> LocalConfig:
    config = Shape(*SHAPES[name]).config
    assert isinstance(config, LocalConfig), name
    return config


def plan_of(shape: Shape, device: torch.device, dtype: torch.dtype, num_streams: int) -> memory.Plan:
    return memory.plan(
        shape.sizes(device, dtype),
        num_streams=num_streams,
        num_references=0,
        graphs=memory.GRAPHS_BYTES if device.type == "cuda" else 0,
        free_bytes=memory.free_bytes(device),
    )


def _no_feed(stream_id: StreamId, request: SpeechRequest, voice: VoiceCodes | None = None) -> TextFeed:
    raise AssertionError("a model of random weights has no tokenizer")


# ---- sizes, from the files of the released checkpoints; `tiny` is a Local of a size for a CPU


def _qwen3(hidden: int, layers: int, heads: int, kv_heads: int, dim: int, inner: int, vocab: int) -> Any:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "intermediate_size": inner,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
    }


def _gpt2(hidden: int, layers: int, heads: int, inner: int, base: float, act: str, eps: float) -> Any:
    return {
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": heads,
        "n_inner": inner,
        "activation_function": act,
        "layer_norm_epsilon": eps,
        "position_embedding_type": "rope",
        "rope_base": base,
    }


def _ids(start: int, end: int, audio_start: int, audio_end: int, user: int, assistant: int) -> Any:
    return {
        "im_start_token_id": start,
        "im_end_token_id": end,
        "audio_start_token_id": audio_start,
        "audio_end_token_id": audio_end,
        "audio_user_slot_token_id": user,
        "audio_assistant_slot_token_id": assistant,
        "audio_pad_token_id": 1024,
    }


def _local(language: Any, local: Any, ids: Any) -> Any:
    return {"qwen3_config": language, "gpt2_config": local, "n_vq": 12, "local_transformer_layers": 1, **ids}


def _codec(
    rate: int,
    channels: int,
    halves: tuple[list[Any], list[Any]],
    num_quantizers: int,
    code_dim: int = 768,
    rvq_dim: int = 512,
) -> Any:
    quantizer = {
        "input_dim": code_dim,
        "rvq_dim": rvq_dim,
        "output_dim": code_dim,
        "num_quantizers": num_quantizers,
        "codebook_size": 1024,
        "codebook_dim": 8,
    }
    generation = (
        {"model_type": "moss-audio-tokenizer", "number_channels": channels}
        if channels > 1
        else {"model_type": "speech_tokenizer"}
    )
    return {
        **generation,
        "sampling_rate": rate,
        "downsample_rate": rate * 2 // 25,
        "causal_transformer_context_duration": 10,
        "code_dim": code_dim,
        "quantizer_type": "rlfq",
        "quantizer_kwargs": quantizer,
        "decoder_kwargs": halves[0],
        "encoder_kwargs": halves[1],
    }


def _patch(size: int) -> Any:
    return {"module_type": "PatchedPretransform", "patch_size": size}


def _stage(source: int, target: int, dim: int, layers: int, context_s: float = 10) -> Any:
    return {
        "module_type": "Transformer",
        "input_dimension": source,
        "output_dimension": target,
        "d_model": dim,
        "num_heads": dim // 64,
        "num_layers": layers,
        "dim_feedforward": 4 * dim,
        "causal": True,
        "norm": "layer_norm",
        "positional_embedding": "rope",
        "max_period": 10000,
        "gating": "none",
        "layer_scale": 0.01,
        "conv_layout": True,
        "context_duration": context_s,
    }


def _halves(
    stages: Sequence[tuple[int, int, int, int, float]], patches: Sequence[int], ahead: int = 0
) -> tuple[list[Any], list[Any]]:
    """Stages of a decoder (in, out, dim, layers, context) with the patches behind them, and the encoder that
    is its mirror image. `ahead`: a patch in front of the first stage."""
    decoder = [_patch(ahead)] if ahead else []
    for stage, size in zip(stages, patches, strict=True):
        decoder += [_stage(*stage), _patch(size)]
    encoder = [
        {**part, "input_dimension": part["output_dimension"], "output_dimension": part["input_dimension"]}
        if "d_model" in part
        else part
        for part in reversed(decoder)
    ]
    return decoder, encoder


_V2 = _halves(
    [
        (768, 1280, 1280, 32, 10),
        (640, 768, 768, 12, 10),
        (384, 768, 768, 12, 8),
        (384, 768, 768, 12, 4),
        (384, 768, 768, 12, 2),
        (384, 240, 768, 12, 1),
    ],
    [2, 2, 2, 2, 2, 240],
)
_V1 = _halves(
    [
        (768, 1280, 1280, 32, 10),
        (640, 768, 768, 12, 10),
        (384, 768, 768, 12, 10),
        (384, 240, 768, 12, 10),
    ],
    [2, 2, 2, 240],
)
_NANO = _halves(
    [(192, 768, 256, 4, 10), (384, 768, 256, 2, 8), (384, 768, 256, 2, 6), (384, 240, 256, 4, 4)],
    [2, 2, 2, 240],
    ahead=4,
)
_TINY = _halves(
    [
        (192, 256, 256, 3, 10),
        (128, 128, 128, 1, 10),
        (64, 128, 128, 1, 8),
        (64, 128, 128, 1, 4),
        (64, 128, 128, 1, 2),
        (64, 240, 128, 2, 1),
    ],
    [2, 2, 2, 2, 2, 240],
)

SHAPES: dict[str, tuple[str, Any, Any]] = {
    "local-v1.5": (
        "local",
        _local(
            _qwen3(2560, 36, 32, 8, 128, 9728, 151936),
            _gpt2(2560, 1, 32, 9728, 1e6, "silu", 1e-6),
            _ids(151644, 151645, 151669, 151670, 151654, 151656),
        ),
        _codec(48000, 2, _V2, num_quantizers=32),
    ),
    "realtime": (
        "realtime",
        {
            "rvq": 16,
            "reference_audio_pad": 151654,
            "text_pad": 151655,
            "language_config": _qwen3(2048, 28, 16, 8, 128, 6144, 151936),
            "local_config": _qwen3(2048, 4, 16, 8, 128, 6144, 1027),
        },
        _codec(24000, 1, _V1, num_quantizers=32),
    ),
    "nano": (
        "nano",
        {
            "n_vq": 16,
            "local_transformer_layers": 1,
            "gpt2_config": {
                **_gpt2(768, 12, 12, 3072, 1e4, "gelu_new", 1e-5),
                "vocab_size": 16384,
                "n_positions": 32768,
            },
            **_ids(4, 5, 6, 7, 8, 9),
        },
        _codec(48000, 2, _NANO, num_quantizers=16),
    ),
    "tiny": (
        "local",
        _local(
            _qwen3(256, 6, 6, 2, 64, 768, 4352),
            _gpt2(256, 1, 8, 768, 1e6, "silu", 1e-6),
            _ids(4097, 4098, 4102, 4103, 4099, 4101),
        ),
        _codec(48000, 2, _TINY, num_quantizers=32, code_dim=192, rvq_dim=96),
    ),
}
