"""MOSS-TTS-Nano on disk: its config and tensor names to a Bundle.

Source: the module tree of OpenMOSS MOSS-TTS-Nano; backbone and local transformer are GPT2-style, the
decision whether to go on is two rows of the token table, heads are the embedding tables.

Stored values of the checkpoint's own code (of micro size) decide: heads turn in interleaved pairs in both
stacks, c_attn and its like are [out, in], position 0 of a frame decides, its logits are rows (slot, end) in
the order go on, stop, the slot's embedding comes next and head k answers at position k + 1; a pad code adds
nothing, and a prompt is tokenized piece by piece. Not confirmed by a released checkpoint: that its values
are stored as bfloat16 (any float type loads), and that its tied heads are stored too (both ways load).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

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
    take_heads,
    take_tables,
    with_zero_rows,
)
from realtime.models.prompts import ClausePrompts, PromptIds
from realtime.models.stack import GPT2Config, gpt2_stack
from realtime.models.tokenizer_codec import Codec
from realtime.models.tokenizers import SentencePieceTokenizer
from realtime.models.weights import Tensors

MAX_POSITIONS = 2048  # a prompt with a reference of a minute, the segment before and a segment
MAX_SEGMENT_FRAMES = 375  # 30 s, what the official service allows


@dataclass(frozen=True, slots=True)
class NanoConfig:
    language: GPT2Config
    local: GPT2Config
    vocab_size: int
    num_codebooks: int
    codebook_size: int
    ids: PromptIds
    pad_code: int
    sample_rate: int
    is_tied: bool  # heads are the tables, and stored copies of them count for nothing
    max_positions: int

    @classmethod
    def load(cls, folder: Path) -> NanoConfig:
        """Raises ModelError that names file and key."""
        fields = Fields.load(folder / "config.json")
        values = fields.object("gpt2_config")
        num_codebooks = fields.positive("n_vq")
        codebook_size = read_codebook_size(fields, num_codebooks)
        vocab_size = values.positive("vocab_size")
        language = read_gpt2(values, values.positive("n_layer"))
        local = replace(
            language,
            num_layers=fields.positive("local_transformer_layers", 1),
            num_positions=num_codebooks + 1,
        )
        return cls(
            language=language,
            local=local,
            vocab_size=vocab_size,
            num_codebooks=num_codebooks,
            codebook_size=codebook_size,
            ids=read_ids(fields, vocab_size),
            pad_code=read_pad_code(fields, codebook_size),
            sample_rate=fields.positive("audio_tokenizer_sample_rate", 48000),
            is_tied=fields.boolean("tie_word_embeddings", True),
            max_positions=read_positions(values, "n_positions", MAX_POSITIONS),
        )

    @property
    def text(self) -> WholeText:
        frames = min(MAX_SEGMENT_FRAMES, self.max_positions // 2)
        return WholeText(self.ids.assistant_slot, frames, self.max_positions)


def load_nano(folder: Path, device: torch.device, dtype: torch.dtype, codec_folder: Path) -> Bundle:
    """Raises ModelError that says what is wrong with the folder."""
    config = NanoConfig.load(folder)
    backbone, local = load_nano_lm(folder, config, device, dtype)
    codec = load_codec_for(
        folder,
        codec_folder,
        device,
        dtype,
        num_codebooks=config.num_codebooks,
        codebook_size=config.codebook_size,
        sample_rate=config.sample_rate,
    )
    spec = nano_spec(folder.name, config, codec)
    tokenizer = SentencePieceTokenizer(folder / "tokenizer.model")
    prompts = ClausePrompts(tokenizer, config.ids, config.num_codebooks, config.pad_code, has_controls=False)
    return Bundle(
        spec=spec,
        backbone=backbone,
        local=local,
        decoder=codec.decoder,
        feed=partial(ClauseFeed, prompts=prompts, text=config.text),
        encoder=codec.encoder,
        device=str(device),
    )


def nano_spec(name: str, config: NanoConfig, codec: Codec) -> ModelSpec:
    n = config.num_codebooks
    sampling = SamplingDefaults((0.8,) * n, 25, 0.95, 1.2, rule="local")
    return family_spec(name, codec, n, config.pad_code, config.text, sampling)


def load_nano_lm(
    folder: Path, config: NanoConfig, device: torch.device, dtype: torch.dtype
) -> tuple[RowBackbone, TiedFrames]:
    return build_nano_lm(Tensors(folder, dtype=dtype, device=device), config)


def build_nano_lm(tensors: Tensors, config: NanoConfig) -> tuple[RowBackbone, TiedFrames]:
    c, hidden = config, config.language.hidden_size
    text = tensors.take("transformer.wte.weight", c.vocab_size, hidden)
    tables = take_tables(tensors, "audio_embeddings", c.num_codebooks, c.codebook_size, hidden)
    heads = take_heads(tensors, tables, c.is_tied)
    text_head = text if c.is_tied else tensors.take("text_lm_head.weight", c.vocab_size, hidden)
    tensors.discard("text_lm_head.weight")
    backbone = RowBackbone(
        gpt2_stack(tensors, c.language, c.max_positions, "transformer"),
        text,
        [with_zero_rows(table, c.pad_code + 1) for table in tables],
    )
    stack = gpt2_stack(tensors, c.local, c.num_codebooks + 1, "local_transformer")
    tensors.finish()
    decision, slot = text_head[[c.ids.assistant_slot, c.ids.audio_end]], text[c.ids.assistant_slot]
    local = TiedFrames(stack, tables, decision, c.num_codebooks, c.pad_code, slot, heads)
    return backbone, local
