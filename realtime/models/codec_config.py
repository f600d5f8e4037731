"""`config.json` of MOSS-Audio-Tokenizer (v1, v2, Nano) as sizes of its stages; no tensor is needed for it.

Both halves of the codec are lists that alternate patches (several tokens become one, or one becomes
several) and causal transformers; an index into the list is the module's place in tensor names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from realtime.errors import ModelError
from realtime.models.fields import MOST, Fields

Half = Literal["encoder", "decoder"]

_PATCH_KEYS = frozenset({"module_type", "patch_size"})
# What is always the same in this family, and the only thing computed here.
_FIXED = {
    "causal": True,
    "norm": "layer_norm",
    "positional_embedding": "rope",
    "gating": "none",
    "conv_layout": True,
}
_TRANSFORMER_KEYS = frozenset(
    {
        "module_type",
        "input_dimension",
        "output_dimension",
        "d_model",
        "num_heads",
        "num_layers",
        "dim_feedforward",
        "max_period",
        "layer_scale",
        "context_duration",
        *_FIXED,
    }
)
_QUANTIZERS = ("rlfq", "random_prefix_rlfq")


@dataclass(frozen=True, slots=True)
class PatchConfig:
    """`size` tokens of `dim` channels are one token of `size * dim` channels."""

    size: int


@dataclass(frozen=True, slots=True)
class TransformerConfig:
    """A causal transformer; its queries see `window` tokens, their own included."""

    name: str  # in front of its tensors: "decoder.3"
    input_dim: int
    output_dim: int
    dim: int
    num_heads: int
    num_layers: int
    feed_dim: int
    max_period: float
    has_layer_scale: bool
    window: int
    tokens_per_frame: int

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    def ring_tokens(self, pass_frames: int) -> int:
        """Tokens a slot must keep so that the first query of a pass still sees a whole window after
        all keys of the pass were written; a multiple of 8, which attention kernels want."""
        return -(-(self.window + pass_frames * self.tokens_per_frame) // 8) * 8


StageConfig = PatchConfig | TransformerConfig


@dataclass(frozen=True, slots=True)
class QuantizerConfig:
    input_dim: int
    rvq_dim: int
    output_dim: int
    num_quantizers: int
    codebook_size: int
    codebook_dim: int


@dataclass(frozen=True, slots=True)
class CodecConfig:
    """Sizes of a codec; `hop` is in samples per channel. `is_first_generation`: MOSS-Audio-Tokenizer
    v1, whose checkpoints leave out projections between equal sizes."""

    sample_rate: int
    channels: int
    hop: int
    code_dim: int
    is_first_generation: bool
    encoder: tuple[StageConfig, ...]
    decoder: tuple[StageConfig, ...]
    quantizer: QuantizerConfig

    @property
    def frame_rate(self) -> float:
        return self.sample_rate / self.hop

    @property
    def samples_per_frame(self) -> int:
        """Of all channels: they are interleaved in the sequence that the transformers see."""
        return self.hop * self.channels

    def slot_values(self, half: Half, pass_frames: int) -> int:
        """How many numbers (in the transformers' dtype) a slot's keys and values are."""
        stages: tuple[StageConfig, ...] = getattr(self, half)
        return sum(
            2 * stage.num_layers * stage.dim * stage.ring_tokens(pass_frames)
            for stage in stages
            if isinstance(stage, TransformerConfig)
        )

    @classmethod
    def load(cls, path: Path) -> CodecConfig:
        """Raises ModelError that names file and key of what is missing or not served."""
        fields = Fields.load(path)
        sample_rate = fields.positive("sampling_rate" if fields.has("sampling_rate") else "sample_rate")
        channel_keys = [key for key in ("number_channels", "channels_numbers") if fields.has(key)]
        channels = fields.positive(channel_keys[0]) if channel_keys else 1
        interleaved = not fields.has("enable_channel_interleave") or fields.get("enable_channel_interleave")
        if channels > 2 or channels == 2 and not interleaved:
            raise ModelError(f"{path}: one channel or two interleaved ones are served")
        # The classes of both generations are named alike; only the second one knows channels.
        first_generation = not channel_keys or fields.get("model_type") == "speech_tokenizer"
        hop = fields.positive("downsample_rate")
        reader = _StageReader(
            path, fields, int if first_generation else round, sample_rate * channels, hop * channels
        )
        code_dim = fields.positive("code_dim")
        quantizer = _quantizer(fields, path)
        if quantizer.input_dim != code_dim or quantizer.output_dim != code_dim:
            raise ModelError(
                f"{path}: quantizer_kwargs: input_dim and output_dim must be code_dim {code_dim}"
            )
        decoder_key = "decoder_kwargs"
        if not fields.has(decoder_key) and not first_generation and fields.has("reversed_decoder_kwargs"):
            decoder_key = "reversed_decoder_kwargs"
        return cls(
            sample_rate=sample_rate,
            channels=channels,
            hop=hop,
            code_dim=code_dim,
            is_first_generation=first_generation,
            encoder=reader.read("encoder", "encoder_kwargs", code_dim),
            decoder=reader.read("decoder", decoder_key, code_dim),
            quantizer=quantizer,
        )


def _quantizer(fields: Fields, path: Path) -> QuantizerConfig:
    values = fields.object("quantizer_kwargs")
    kind = (fields if fields.has("quantizer_type") else values).get("quantizer_type")
    if kind not in _QUANTIZERS:
        raise ModelError(f"{path}: quantizer_type {kind!r} is not served, {' and '.join(_QUANTIZERS)} are")
    return QuantizerConfig(
        input_dim=values.positive("input_dim"),
        rvq_dim=values.positive("rvq_dim"),
        output_dim=values.positive("output_dim"),
        num_quantizers=values.positive("num_quantizers"),
        codebook_size=values.positive("codebook_size"),
        codebook_dim=values.positive("codebook_dim"),
    )


@dataclass(frozen=True, slots=True)
class _StageReader:
    """Reads a list of stages and follows the width and rate of what flows through it."""

    path: Path
    fields: Fields
    window_of: Callable[[float], int]  # the first generation cuts a window, the second one rounds it
    samples_per_s: int
    samples_per_frame: int

    def read(self, half: Half, key: str, code_dim: int) -> tuple[StageConfig, ...]:
        stages: list[StageConfig] = []
        dim, tokens = (1, self.samples_per_frame) if half == "encoder" else (code_dim, 1)
        for stage, where in self._stages(half, key):
            match stage.get("module_type"):
                case "PatchedPretransform":
                    size = stage.positive("patch_size")
                    if half == "encoder":
                        dim, tokens, rest = dim * size, tokens // size, tokens % size
                    else:
                        dim, tokens, rest = dim // size, tokens * size, dim % size
                    if rest:
                        raise ModelError(f"{where}: patch_size {size} does not divide what it gets")
                    stages.append(PatchConfig(size))
                case "Transformer":
                    swapped = key == "reversed_decoder_kwargs"
                    name = f"{half}.{len(stages)}"
                    transformer = self._transformer(stage, where, name, tokens, swapped)
                    if transformer.input_dim != dim:
                        raise ModelError(f"{where}: gets {dim} channels, takes {transformer.input_dim}")
                    dim = transformer.output_dim
                    stages.append(transformer)
                case other:
                    raise ModelError(f"{where}: module_type {other!r} is not served")
        wanted = (code_dim, 1) if half == "encoder" else (1, self.samples_per_frame)
        if (dim, tokens) != wanted:
            raise ModelError(
                f"{self.path}: {key}: a frame becomes {tokens} tokens of {dim} channels,"
                f" downsample_rate and code_dim ask for {wanted[1]} of {wanted[0]}"
            )
        return tuple(stages)

    def _stages(self, half: Half, key: str) -> Iterator[tuple[Fields, str]]:
        items = list(enumerate(self.fields.items(key)))
        for index, values in reversed(items) if key == "reversed_decoder_kwargs" else items:
            where = f"{self.path}: {key}[{index}]"
            if not isinstance(values, dict):
                raise ModelError(f"{where} must be an object, got {values!r}")
            known = _PATCH_KEYS if "patch_size" in values else _TRANSFORMER_KEYS
            for name in values.keys() - known:
                raise ModelError(f"{where}: unknown key {name!r}")
            yield Fields(values, where), where

    def _transformer(
        self, stage: Fields, where: str, name: str, tokens: int, swapped: bool
    ) -> TransformerConfig:
        for key, value in _FIXED.items():
            if stage.get(key) != value:
                raise ModelError(f"{where}: {key} {stage.get(key)!r} is not served, {value!r} is")
        seconds = (
            stage.above_zero("context_duration")
            if stage.has("context_duration")
            else self.fields.above_zero("causal_transformer_context_duration")
        )
        rate_hz = self.samples_per_s * tokens / self.samples_per_frame
        if rate_hz * seconds > MOST:
            raise ModelError(f"{where}: a context of {seconds} s at {rate_hz} Hz is too long")
        sides = (stage.positive("input_dimension"), stage.positive("output_dimension"))
        config = TransformerConfig(
            name=name,
            input_dim=sides[swapped],
            output_dim=sides[not swapped],
            dim=stage.positive("d_model"),
            num_heads=stage.positive("num_heads"),
            num_layers=stage.positive("num_layers"),
            feed_dim=stage.positive("dim_feedforward"),
            max_period=stage.above_zero("max_period"),
            has_layer_scale=stage.get("layer_scale") is not None,
            window=self.window_of(rate_hz * seconds),
            tokens_per_frame=tokens,
        )
        if config.dim % (2 * config.num_heads):
            raise ModelError(f"{where}: d_model {config.dim} is not {config.num_heads} heads of even size")
        if config.window < 1:
            raise ModelError(f"{where}: a context of {seconds} s at {rate_hz} Hz holds no token")
        return config
