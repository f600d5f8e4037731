"""The local transformer of MOSS-TTS-Realtime: one hidden state in, the frame's codes one by one.

Source: the module tree of OpenMOSS MOSS-TTS-Realtime; a Qwen3-style stack over at most K positions
with fresh keys for every frame, one input table and one head per codebook, nothing tied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from realtime.models.base import FrameOutput
from realtime.models.qwen3 import Block, Qwen3Config, UnitNorm, rope_table
from realtime.models.weights import Tensors


class Picker(Protocol):
    """Chooses one entry per row; the sampler of the engine is one."""

    def pick(self, codebook: int, logits: Tensor) -> Tensor:
        """logits [n, V] -> int64 [n]."""
        ...


class LocalTransformer:
    """Emits K codes from one hidden state.

    `allowed[k]` are the ids codebook k may emit, in the order in which their logits reach the
    picker; heads keep only these rows, so nothing has to be masked later. The last id of codebook 0
    ends the segment.
    """

    def __init__(
        self, tensors: Tensors, config: Qwen3Config, vocab_size: int, allowed: Sequence[Tensor]
    ) -> None:
        self.config = config
        num_codebooks = len(allowed)
        shape = (vocab_size, config.hidden_size)
        self.allowed = list(allowed)
        self.inputs = [
            tensors.take(f"local_transformer.model.embed_tokens.{i}.weight", *shape)
            for i in range(num_codebooks - 1)
        ]
        self.norm = UnitNorm(config.hidden_size, config.rms_norm_eps)
        gain = self.norm.gain(tensors.take("local_transformer.model.norm.weight", config.hidden_size))
        self.heads = [
            (tensors.take(f"local_transformer.local_lm_heads.{i}.weight", *shape)[ids] * gain)
            .t()
            .contiguous()
            for i, ids in enumerate(allowed)
        ]
        self.blocks = [
            Block(tensors, f"local_transformer.model.layers.{i}", config) for i in range(config.num_layers)
        ]
        self.rope = rope_table(config, num_codebooks)

    def frame(self, hidden: Tensor, sampling: Picker) -> FrameOutput:
        """hidden [n, H] -> codes int64 [n, K]; a row is ok while its last logits are finite (a bad
        number anywhere in a row's frame reaches them through the keys)."""
        c = self.config
        n, num_codebooks = hidden.shape[0], len(self.heads)
        keys = hidden.new_empty(c.num_layers, n, c.num_kv_heads, num_codebooks, c.head_dim)
        values = torch.empty_like(keys)
        codes: list[Tensor] = []
        x = hidden
        for i, head in enumerate(self.heads):
            for block, k_all, v_all in zip(self.blocks, keys, values, strict=True):
                q, k, v = block.project(x, self.rope[i : i + 1])
                k_all[:, :, i] = k
                v_all[:, :, i] = v
                seen_k = k_all.view(n * c.num_kv_heads, num_codebooks, c.head_dim)[:, : i + 1]
                seen_v = v_all.view(n * c.num_kv_heads, num_codebooks, c.head_dim)[:, : i + 1]
                scores = torch.bmm(q, seen_k.transpose(1, 2))
                x = block.finish(x, torch.bmm(torch.softmax(scores, -1), seen_v))
            logits = torch.mm(self.norm(x), head)
            codes.append(self.allowed[i][sampling.pick(i, logits)])
            if i + 1 < num_codebooks:
                x = F.embedding(codes[-1], self.inputs[i])
        stop = codes[0] == self.allowed[0][-1]
        return FrameOutput(torch.stack(codes, dim=1), torch.isfinite(logits).all(1), stop)
