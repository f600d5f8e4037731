"""MOSS-TTS-Realtime on disk: its config and tensor names to a Bundle.

Source: the module tree of OpenMOSS MOSS-TTS-Realtime; backbone and local transformer are Qwen3-style,
tables of the backbone, of the local transformer and its heads are three sets, nothing is tied.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from realtime.errors import ModelError
from realtime.models.backbone import RowBackbone
from realtime.models.base import Bundle, ModelSpec, PushedText, SamplingDefaults
from realtime.models.fields import Fields
from realtime.models.frames import RealtimeFrames
from realtime.models.official import (
    check_id,
    family_spec,
    load_codec_for,
    read_positions,
    read_qwen3,
    take_tables,
)
from realtime.models.qwen3 import Qwen3Config
from realtime.models.realtime_prompt import AUDIO_EOS, AUDIO_PAD, LOOKAHEAD, RealtimePrompts
from realtime.models.stack import qwen3_stack
from realtime.models.token_feed import TokenFeed
from realtime.models.tokenizer_codec import Codec
from realtime.models.tokenizers import BpeTokenizer
from realtime.models.weights import Tensors

# A turn of four minutes with its prompt and the turns before: the model knows 32 k positions, but each is
# 112 kB of every row's memory in the released checkpoint.
MAX_POSITIONS = 4096
MAX_SEGMENT_FRAMES = 3000

# Fixed by the official classes, whatever the file says.
NUM_CODES = 1024
NUM_ENTRIES = AUDIO_EOS + 1  # of tables and heads


@dataclass(frozen=True, slots=True)
class RealtimeConfig:
    language: Qwen3Config
    local: Qwen3Config
    vocab_size: int
    num_codebooks: int
    reference_pad: int  # text id of a row with reference codes
    text_pad: int
    max_positions: int

    @classmethod
    def load(cls, folder: Path) -> RealtimeConfig:
        """Raises ModelError that names file and key."""
        fields = Fields.load(folder / "config.json")
        language = fields.object("language_config")
        for key, value in (("audio_vocab_size", NUM_ENTRIES), ("audio_pad_token", AUDIO_PAD)):
            if fields.integer(key, value) != value:
                raise ModelError(f"{fields.path}: {key} {fields.get(key)} is not served, {value} is")
        config = cls(
            language=read_qwen3(language),
            local=read_qwen3(fields.object("local_config")),
            vocab_size=language.positive("vocab_size"),
            num_codebooks=fields.positive("rvq"),
            reference_pad=fields.integer("reference_audio_pad"),
            text_pad=fields.integer("text_pad"),
            max_positions=read_positions(language, "max_position_embeddings", MAX_POSITIONS),
        )
        for key in ("text_pad", "reference_audio_pad"):
            check_id(fields, key, config.vocab_size)
        if config.local.hidden_size != config.language.hidden_size:
            raise ModelError(
                f"{fields.path}: local_config has a hidden_size of {config.local.hidden_size},"
                f" language_config one of {config.language.hidden_size}, and nothing stands between them"
            )
        return config

    @property
    def text(self) -> PushedText:
        frames = min(MAX_SEGMENT_FRAMES, self.max_positions // 2)
        return PushedText(self.text_pad, AUDIO_EOS, frames, self.max_positions, LOOKAHEAD)


def load_realtime(folder: Path, device: torch.device, dtype: torch.dtype, codec_folder: Path) -> Bundle:
    """Raises ModelError that says what is wrong with the folder."""
    config = RealtimeConfig.load(folder)
    backbone, local = load_realtime_lm(folder, config, device, dtype)
    codec = load_codec_for(
        folder,
        codec_folder,
        device,
        dtype,
        num_codebooks=config.num_codebooks,
        codebook_size=NUM_CODES,
    )
    spec = realtime_spec(folder.name, config, codec)
    prompts = RealtimePrompts(
        BpeTokenizer(folder / "tokenizer.json"),
        config.num_codebooks,
        reference_pad=config.reference_pad,
        text_pad=config.text_pad,
    )
    return Bundle(
        spec=spec,
        backbone=backbone,
        local=local,
        decoder=codec.decoder,
        feed=partial(TokenFeed, prompts=prompts, text=config.text),
        encoder=codec.encoder,
        device=str(device),
    )


def realtime_spec(name: str, config: RealtimeConfig, codec: Codec) -> ModelSpec:
    n = config.num_codebooks
    sampling = SamplingDefaults((0.8,) * n, 30, 0.6, 1.1, penalty_window=50)
    return family_spec(name, codec, n, AUDIO_PAD, config.text, sampling, audio_vocab_size=NUM_ENTRIES)


def load_realtime_lm(
    folder: Path, config: RealtimeConfig, device: torch.device, dtype: torch.dtype
) -> tuple[RowBackbone, RealtimeFrames]:
    return build_realtime_lm(Tensors(folder, dtype=dtype, device=device), config)


def build_realtime_lm(tensors: Tensors, config: RealtimeConfig) -> tuple[RowBackbone, RealtimeFrames]:
    c, hidden = config, config.language.hidden_size
    tensors.discard("language_model.embed_tokens.weight")  # a copy of the text table that nothing reads
    text = tensors.take("embed_tokens.0.weight", c.vocab_size, hidden)
    audio = [
        tensors.take(f"embed_tokens.{k + 1}.weight", NUM_ENTRIES, hidden) for k in range(c.num_codebooks)
    ]
    layers, norm = "language_model.layers", "language_model.norm"
    backbone = RowBackbone(qwen3_stack(tensors, c.language, c.max_positions, layers, norm), text, audio)
    name = "local_transformer.model"
    tables = take_tables(tensors, f"{name}.embed_tokens", c.num_codebooks - 1, NUM_ENTRIES, hidden)
    heads = take_tables(tensors, "local_transformer.local_lm_heads", c.num_codebooks, NUM_ENTRIES, hidden)
    stack = qwen3_stack(tensors, c.local, c.num_codebooks, f"{name}.layers", f"{name}.norm")
    tensors.finish()
    return backbone, RealtimeFrames(stack, tables, heads, AUDIO_EOS)
