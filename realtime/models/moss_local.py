"""MOSS-TTS-Local (v1.5) on disk: its config and tensor names to a Bundle.

Source: the module tree of OpenMOSS MOSS-TTS-Local; a Qwen3 backbone, a GPT2-style local transformer of
the same width, heads that are the embedding tables, and a decision of its own whether to go on.

Stored values of the official code (of micro size) decide: the backbone's heads turn in halves, the local
transformer's in interleaved pairs, head k answers at position k, the decision (go on, stop) at position 0
beside head 0; a pad code adds nothing, and a prompt is tokenized piece by piece. Not confirmed by a released
checkpoint: the type of the stored values (any float type loads), whether the tied heads are stored (both
ways load), how many positions the backbone was made for (nothing enforces them; MAX_POSITIONS is less than
any known Qwen3's), and what string the user slot's id has (only the id counts).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from realtime.errors import ModelError
from realtime.models.backbone import RowBackbone
from realtime.models.base import Bundle, ModelSpec, SamplingDefaults, WholeText
from realtime.models.clause_feed import ClauseFeed
from realtime.models.fields import Fields
from realtime.models.frames import TiedFrames
from realtime.models.official import (
    family_spec,
    load_codec_for,
    read_codebook_size,
    read_gpt2,
    read_ids,
    read_pad_code,
    read_positions,
    read_qwen3,
    take_heads,
    take_tables,
    with_zero_rows,
)
from realtime.models.prompts import ClausePrompts, PromptIds
from realtime.models.qwen3 import Qwen3Config
from realtime.models.reference import normalised
from realtime.models.stack import GPT2Config, gpt2_stack, qwen3_stack
from realtime.models.tokenizer_codec import Codec
from realtime.models.tokenizers import BpeTokenizer
from realtime.models.weights import Tensors

# A prompt with a reference of a minute, the segment before and a segment: the model itself has no such
# limit, but a position is 144 kB of every row's memory in the released checkpoint.
MAX_POSITIONS = 2048
MAX_SEGMENT_FRAMES = 500  # 40 s: several times what a clause takes, so its stop never came

FULL_VOCABULARY = ("full_vocab", "full-vocab", "full", "vocab")


@dataclass(frozen=True, slots=True)
class LocalConfig:
    language: Qwen3Config
    local: GPT2Config
    vocab_size: int
    num_codebooks: int
    codebook_size: int
    ids: PromptIds
    pad_code: int
    sample_rate: int
    is_tied: bool  # heads are the tables, and stored copies of them count for nothing
    is_full_vocabulary: bool  # the decision is two rows of the text head instead of a head of its own
    max_positions: int

    @classmethod
    def load(cls, folder: Path) -> LocalConfig:
        """Raises ModelError that names file and key."""
        fields = Fields.load(folder / "config.json")
        language = fields.object("qwen3_config" if fields.has("qwen3_config") else "language_config")
        num_codebooks = fields.positive("n_vq")
        codebook_size = read_codebook_size(fields, num_codebooks)
        vocab_size = language.positive("vocab_size")
        mode = fields.text("local_text_head_mode", "binary")
        if mode not in ("binary", *FULL_VOCABULARY):
            raise ModelError(f"{fields.path}: local_text_head_mode {mode!r} is not known")
        config = cls(
            language=read_qwen3(language),
            local=_read_local(fields, language.positive("hidden_size"), num_codebooks),
            vocab_size=vocab_size,
            num_codebooks=num_codebooks,
            codebook_size=codebook_size,
            ids=read_ids(fields, vocab_size),
            pad_code=read_pad_code(fields, codebook_size),
            sample_rate=fields.positive("sampling_rate", 48000),
            is_tied=fields.boolean("tie_word_embeddings", True),
            is_full_vocabulary=mode != "binary",
            max_positions=read_positions(language, "max_position_embeddings", MAX_POSITIONS),
        )
        if config.local.hidden_size != config.language.hidden_size:
            raise ModelError(
                f"{fields.path}: n_embd {config.local.hidden_size} is not hidden_size"
                f" {config.language.hidden_size}, and nothing stands between them"
            )
        return config

    @property
    def text(self) -> WholeText:
        frames = min(MAX_SEGMENT_FRAMES, self.max_positions // 2)
        return WholeText(self.ids.assistant_slot, frames, self.max_positions)


def _read_local(fields: Fields, hidden_size: int, num_codebooks: int) -> GPT2Config:
    """Without a config of its own the official class makes one: heads of 80, learned positions."""
    values = fields.object("gpt2_config") if fields.has("gpt2_config") else None
    if values is None:
        made = {
            "n_embd": hidden_size,
            "n_head": max(1, hidden_size // 80),
            "activation_function": "silu",
            "layer_norm_epsilon": 1e-6,
        }
        values = Fields(made, f"{fields.path}: gpt2_config")
    num_layers = fields.positive("local_transformer_layers", values.positive("n_layer", 1))
    config = read_gpt2(values, num_layers)
    # The official class builds as many positions as a frame has, whatever the file says.
    return replace(config, num_positions=num_codebooks + 1)


def load_local(folder: Path, device: torch.device, dtype: torch.dtype, codec_folder: Path) -> Bundle:
    """Raises ModelError that says what is wrong with the folder."""
    config = LocalConfig.load(folder)
    backbone, local = load_local_lm(folder, config, device, dtype)
    codec = load_codec_for(
        folder,
        codec_folder,
        device,
        dtype,
        num_codebooks=config.num_codebooks,
        codebook_size=config.codebook_size,
        sample_rate=config.sample_rate,
    )
    spec = local_spec(folder.name, config, codec)
    tokenizer = BpeTokenizer(folder / "tokenizer.json")
    prompts = ClausePrompts(tokenizer, config.ids, config.num_codebooks, config.pad_code, has_controls=True)
    return Bundle(
        spec=spec,
        backbone=backbone,
        local=local,
        decoder=codec.decoder,
        feed=partial(ClauseFeed, prompts=prompts, text=config.text),
        encoder=codec.encoder,
        prepare=normalised,
        device=str(device),
    )


def local_spec(name: str, config: LocalConfig, codec: Codec) -> ModelSpec:
    n = config.num_codebooks
    sampling = SamplingDefaults((1.7,) * n, 25, 0.8, 1.0, rule="local")
    return family_spec(name, codec, n, config.pad_code, config.text, sampling, has_controls=True)


def load_local_lm(
    folder: Path, config: LocalConfig, device: torch.device, dtype: torch.dtype
) -> tuple[RowBackbone, TiedFrames]:
    return build_local_lm(Tensors(folder, dtype=dtype, device=device), config)


def build_local_lm(tensors: Tensors, config: LocalConfig) -> tuple[RowBackbone, TiedFrames]:
    c, hidden = config, config.language.hidden_size
    text = tensors.take("transformer.embed_tokens.weight", c.vocab_size, hidden)
    tables = take_tables(tensors, "audio_embeddings", c.num_codebooks, c.codebook_size, hidden)
    heads = take_heads(tensors, tables, c.is_tied)
    text_head = text
    if c.is_full_vocabulary and not c.is_tied:
        text_head = tensors.take("text_lm_head.weight", c.vocab_size, hidden)
    tensors.discard("text_lm_head.weight")
    backbone = RowBackbone(
        qwen3_stack(tensors, c.language, c.max_positions, "transformer.layers", "transformer.norm"),
        text,
        [with_zero_rows(table, c.pad_code + 1) for table in tables],
    )
    if c.is_full_vocabulary:
        decision = text_head[[c.ids.assistant_slot, c.ids.audio_end]]
    else:
        decision = tensors.take("local_text_lm_head.weight", 2, hidden)
    stack = gpt2_stack(tensors, c.local, c.num_codebooks + 1, "local_transformer")
    tensors.finish()
    return backbone, TiedFrames(stack, tables, decision, c.num_codebooks, c.pad_code, heads=heads)
