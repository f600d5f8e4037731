"""What the files of the official families have in common: config objects, special ids, tied tensors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from realtime.errors import ModelError
from realtime.models.base import ModelSpec, SamplingDefaults, TextPolicy
from realtime.models.fields import Fields
from realtime.models.prompts import PromptIds
from realtime.models.qwen3 import Qwen3Config
from realtime.models.stack import GPT2Config
from realtime.models.tokenizer_codec import Codec, load_codec
from realtime.models.weights import Tensors

MIN_POSITIONS = 256  # a prompt without a reference, and some seconds of speech
MAX_PAD_GAP = 1024  # each code up to the pad is a row of zeros in every table


def read_ids(fields: Fields, vocab_size: int) -> PromptIds:
    """The control ids of a whole-text model."""
    generated = "audio_assistant_gen_slot_token_id"
    keys = {
        "im_start": "im_start_token_id",
        "im_end": "im_end_token_id",
        "audio_start": "audio_start_token_id",
        "audio_end": "audio_end_token_id",
        "user_slot": "audio_user_slot_token_id",
        "assistant_slot": generated if fields.has(generated) else "audio_assistant_slot_token_id",
    }
    for key in keys.values():
        check_id(fields, key, vocab_size)
    return PromptIds(**{name: fields.integer(key) for name, key in keys.items()})


def check_id(fields: Fields, key: str, vocab_size: int) -> None:
    if not 0 <= (value := fields.integer(key)) < vocab_size:
        raise ModelError(f"{fields.path}: {key} {value} is not in a vocabulary of {vocab_size}")


def read_pad_code(fields: Fields, codebook_size: int) -> int:
    """The code that adds nothing; none of the codec's."""
    pad_code = fields.integer("audio_pad_code" if fields.has("audio_pad_code") else "audio_pad_token_id")
    if pad_code < codebook_size:
        raise ModelError(f"{fields.path}: the pad code {pad_code} is one of {codebook_size} codes")
    if pad_code > codebook_size + MAX_PAD_GAP:
        raise ModelError(f"{fields.path}: the pad code {pad_code} is far beyond {codebook_size} codes")
    return pad_code


def read_positions(fields: Fields, key: str, most: int) -> int:
    """How many positions a row may have: the model's own, and no more than `most`."""
    positions = fields.integer(key, most)
    if positions < MIN_POSITIONS:
        raise ModelError(f"{fields.path}: {key!r} must be at least {MIN_POSITIONS}, got {positions}")
    return min(positions, most)


def read_codebook_size(fields: Fields, num_codebooks: int) -> int:
    """One size for all codebooks."""
    size = fields.positive("audio_vocab_size", 1024)
    if not fields.has("audio_codebook_sizes"):
        return size
    sizes = fields.items("audio_codebook_sizes")
    if len(sizes) != num_codebooks:
        raise ModelError(
            f"{fields.path}: {len(sizes)} audio_codebook_sizes for {num_codebooks} codebooks (n_vq)"
        )
    named = Fields({f"audio_codebook_sizes[{k}]": size for k, size in enumerate(sizes)}, fields.path)
    if len({named.positive(f"audio_codebook_sizes[{k}]") for k in range(num_codebooks)}) != 1:
        raise ModelError(f"{fields.path}: audio_codebook_sizes {sizes} must be equal")
    return int(sizes[0])


def read_qwen3(fields: Fields) -> Qwen3Config:
    """Qwen3's keys as transformers writes them, of any of its versions."""
    if (act := fields.text("hidden_act", "silu")) != "silu":
        raise ModelError(f"{fields.path}: hidden_act {act!r} is not served, 'silu' is")
    config = Qwen3Config(
        hidden_size=fields.positive("hidden_size"),
        num_layers=fields.positive("num_hidden_layers"),
        num_heads=fields.positive("num_attention_heads"),
        num_kv_heads=fields.positive("num_key_value_heads"),
        head_dim=fields.positive("head_dim"),
        intermediate_size=fields.positive("intermediate_size"),
        rope_theta=_rope_theta(fields),
        rms_norm_eps=fields.above_zero("rms_norm_eps"),
        attention_bias=fields.boolean("attention_bias", False),
    )
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"{fields.path}: {config.num_heads} heads can't share {config.num_kv_heads} key heads"
        )
    if config.head_dim % 2:
        raise ModelError(f"{fields.path}: 'head_dim' must be even, got {config.head_dim}")
    return config


def _rope_theta(fields: Fields) -> float:
    """A number, or inside an object of scaling settings, of which none but a factor of 1 is served."""
    theta = fields.above_zero("rope_theta") if fields.has("rope_theta") else None
    for key in ("rope_parameters", "rope_scaling"):
        if not fields.has(key) or fields.get(key) is None:
            continue
        scaling = fields.object(key)
        kind = scaling.text("rope_type", "default")
        if kind not in ("default", "linear") or scaling.number("factor", 1.0) != 1.0:
            raise ModelError(f"{scaling.path}: scaled positions ({kind}) are not served")
        if theta is None and scaling.has("rope_theta"):
            theta = scaling.above_zero("rope_theta")
    return 1e6 if theta is None else theta


def read_gpt2(fields: Fields, num_layers: int) -> GPT2Config:
    """The keys of a GPT2 config, defaults included: without `position_embedding_type` positions are
    learned."""
    for key, value in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)):
        if fields.boolean(key, value) != value:
            raise ModelError(f"{fields.path}: {key} {not value} is not served, {value} is")
    hidden_size, num_heads = fields.positive("n_embd"), fields.positive("n_head")
    if hidden_size % num_heads or hidden_size // num_heads % 2:
        raise ModelError(f"{fields.path}: n_embd {hidden_size} is not {num_heads} heads of even size")
    activation = fields.text("activation_function", "gelu_new")
    if activation not in ("silu", "gelu_new"):
        raise ModelError(f"{fields.path}: activation_function {activation!r} is not known")
    positions = fields.text("position_embedding_type", "absolute")
    if positions not in ("absolute", "rope"):
        raise ModelError(f"{fields.path}: position_embedding_type {positions!r} is not known")
    return GPT2Config(
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        intermediate_size=fields.positive("n_inner", 4 * hidden_size),
        activation="silu" if activation == "silu" else "gelu_new",
        layer_norm_epsilon=fields.above_zero("layer_norm_epsilon", 1e-5),
        rope_base=fields.above_zero("rope_base", 10000.0) if positions == "rope" else None,
        num_positions=fields.positive("n_positions", 1024),
    )


# ---- tensors


def take_tables(tensors: Tensors, prefix: str, num_tables: int, num_codes: int, hidden: int) -> list[Tensor]:
    return [tensors.take(f"{prefix}.{k}.weight", num_codes, hidden) for k in range(num_tables)]


def take_heads(tensors: Tensors, tables: Sequence[Tensor], is_tied: bool) -> list[Tensor]:
    """Of each table the head that gives its codes' logits: the table itself, stored once more or not,
    unless a checkpoint unties them."""
    if is_tied:
        tensors.discard(*(f"audio_lm_heads.{k}.weight" for k in range(len(tables))))
        return list(tables)
    return take_tables(tensors, "audio_lm_heads", len(tables), *tables[0].shape)


def with_zero_rows(table: Tensor, num_rows: int) -> Tensor:
    """A table in which the codes from its end to `num_rows` are there and add nothing."""
    zeros = table.new_zeros(num_rows - table.shape[0], table.shape[1])
    return torch.cat((table, zeros))


# ---- model and codec


def family_spec(
    name: str,
    codec: Codec,
    num_codebooks: int,
    pad_code: int,
    text: TextPolicy,
    sampling: SamplingDefaults,
    *,
    has_controls: bool = False,
    audio_vocab_size: int = 0,
) -> ModelSpec:
    """All codes go to the codec, no code tells the pace, and voices come from recordings."""
    return ModelSpec(
        name=name,
        num_codebooks=num_codebooks,
        codec_codebooks=slice(0, num_codebooks),
        codebook_size=codec.codebook_size,
        frame_rate=codec.frame_rate,
        sample_rate=codec.sample_rate,
        channels=codec.channels,
        hop=codec.hop,
        first_codes=(pad_code,) * num_codebooks,
        text=text,
        sampling=sampling,
        languages=(),
        voices=(),
        has_controls=has_controls,
        tells_pace=False,
        audio_vocab_size=audio_vocab_size,
    )


def load_codec_for(
    folder: Path,
    codec_folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    *,
    num_codebooks: int,
    codebook_size: int,
    sample_rate: int | None = None,
) -> Codec:
    """The codec of the model in `folder`; ModelError with both numbers where the two don't fit."""
    codec = load_codec(codec_folder, device, dtype, num_quantizers=num_codebooks)
    pairs: Sequence[tuple[str, int | None, int]] = (
        ("entries in a codebook", codebook_size, codec.codebook_size),
        ("Hz", sample_rate, codec.sample_rate),
    )
    for what, wanted, found in pairs:
        if wanted is not None and wanted != found:
            raise ModelError(
                f"{folder} speaks with {wanted} {what}, its codec {codec_folder} has {found}: they don't"
                " belong together"
            )
    return codec
