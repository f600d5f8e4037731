"""What the official code does for each frame, in the plainest way: transformers' own backbone with a cache
that grows, a local transformer of ordinary modules, and sampling row by row. The bench sets the engine
beside it; nothing else uses it.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from realtime.errors import ConfigError
from realtime.models.base import SamplingDefaults
from realtime.models.moss_local import LocalConfig
from realtime.models.stack import GPT2Config


class ReferenceLoop:
    """A Local of the given sizes with random weights. `start` reads a prompt, `frame` makes a frame of
    every row. Raises ConfigError where transformers is not installed."""

    def __init__(self, config: LocalConfig, sampling: SamplingDefaults) -> None:
        try:
            from transformers import DynamicCache, Qwen3Config, Qwen3Model
        except ImportError as error:
            raise ConfigError("this needs transformers: pip install 'realtime[bench]'") from error
        c = config.language
        self._config, self._sampling = config, sampling
        self._new_cache = DynamicCache
        names = inspect.signature(Qwen3Model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"  # as older versions call it
        new_config: Any = Qwen3Config  # their annotations know only some of what there is
        new_model: Any = Qwen3Model
        self.backbone: Any = new_model(
            new_config(
                vocab_size=config.vocab_size,
                hidden_size=c.hidden_size,
                num_hidden_layers=c.num_layers,
                num_attention_heads=c.num_heads,
                num_key_value_heads=c.num_kv_heads,
                head_dim=c.head_dim,
                intermediate_size=c.intermediate_size,
                rms_norm_eps=c.rms_norm_eps,
                attn_implementation="sdpa",
            )
        ).eval()
        self.tables = [nn.Embedding(config.codebook_size, c.hidden_size) for _ in range(config.num_codebooks)]
        self.blocks = [_Block(config.local) for _ in range(config.local.num_layers)]
        self.norm = nn.LayerNorm(config.local.hidden_size, config.local.layer_norm_epsilon)
        self.decision = nn.Linear(c.hidden_size, 2, bias=False)

    @torch.inference_mode()
    def start(self, rows: Tensor) -> None:
        """rows int64 [n, T, 1 + K]: prompts of one length."""
        self._cache = self._new_cache()
        self._history: list[list[list[int]]] = [
            [[] for _ in range(self._config.num_codebooks)] for _ in range(rows.shape[0])
        ]
        self._read(rows)

    @torch.inference_mode()
    def frame(self) -> Tensor:
        """int64 [n, K], which are also the next step's input."""
        n, num_codebooks = self._hidden.shape[0], self._config.num_codebooks
        memories = [_Memory(n, num_codebooks, self._config.local) for _ in self.blocks]
        x = self._local(self._hidden, memories, 0)
        torch.multinomial(torch.softmax(self.decision(x).float(), -1), 1)  # nobody stops here
        codes: list[Tensor] = []
        for k in range(num_codebooks):
            if k > 0:
                x = self._local(self.tables[k - 1](codes[-1]), memories, k)
            logits = F.linear(x, self.tables[k].weight).float()
            codes.append(torch.stack([self._pick(row, k, logits[row]) for row in range(n)]))
        frame = torch.stack(codes, 1)
        slot = torch.full((n, 1), self._config.ids.assistant_slot)
        self._read(torch.cat((slot, frame), 1).unsqueeze(1))
        return frame

    def _read(self, rows: Tensor) -> None:
        x = self.backbone.embed_tokens(rows[..., 0])
        for k, table in enumerate(self.tables):
            codes = rows[..., k + 1]
            is_code = (codes != self._config.pad_code).unsqueeze(-1)
            x = x + table(codes.masked_fill(~is_code.squeeze(-1), 0)) * is_code
        out = self.backbone(inputs_embeds=x, use_cache=True, **{self._cache_name: self._cache})
        self._hidden: Tensor = out.last_hidden_state[:, -1]

    def _local(self, x: Tensor, memories: list[_Memory], position: int) -> Tensor:
        for block, memory in zip(self.blocks, memories, strict=True):
            x = block(x, memory, position)
        out: Tensor = self.norm(x)
        return out

    def _pick(self, row: int, codebook: int, scores: Tensor) -> Tensor:
        """One row's code from its scores [V]: penalty, temperature, top-k, top-p, one draw."""
        s, history = self._sampling, self._history[row][codebook]
        if s.repetition_penalty != 1 and history:
            seen = torch.tensor(sorted(set(history)))
            old = scores[seen]
            scores = scores.scatter(
                0, seen, torch.where(old < 0, old * s.repetition_penalty, old / s.repetition_penalty)
            )
        scores = scores / s.temperature[codebook]
        kth = torch.topk(scores, s.top_k).values[-1]
        scores = scores.masked_fill(scores < kth, -torch.inf)
        ordered, order = torch.sort(scores, descending=True)
        p = torch.softmax(ordered, -1)
        dropped = p.cumsum(-1) - p > s.top_p
        scores = scores.masked_fill(torch.zeros_like(dropped).scatter(0, order, dropped), -torch.inf)
        code = torch.multinomial(torch.softmax(scores, -1), 1)[0]
        history.append(int(code))
        return code


class _Memory:
    """Keys and values of one layer within one frame."""

    def __init__(self, n: int, num_positions: int, config: GPT2Config) -> None:
        shape = (n, config.num_heads, num_positions, config.hidden_size // config.num_heads)
        self.keys, self.values = torch.zeros(shape), torch.zeros(shape)


class _Block(nn.Module):
    """A layer of the local transformer, with positions in interleaved pairs."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.num_heads, self.base = config.num_heads, config.rope_base or 1.0
        self.ln_1 = nn.LayerNorm(hidden, config.layer_norm_epsilon)
        self.ln_2 = nn.LayerNorm(hidden, config.layer_norm_epsilon)
        self.c_attn, self.c_proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.fc_in, self.fc_out = nn.Linear(hidden, inner), nn.Linear(inner, hidden)

    def forward(self, x: Tensor, memory: _Memory, position: int) -> Tensor:
        n, hidden = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).view(n, 3, self.num_heads, -1).unbind(1)
        memory.keys[:, :, position] = self._turned(k, position)
        memory.values[:, :, position] = v
        attended = F.scaled_dot_product_attention(
            self._turned(q, position).unsqueeze(2),
            memory.keys[:, :, : position + 1],
            memory.values[:, :, : position + 1],
        )
        x = x + self.c_proj(attended.reshape(n, hidden))
        out: Tensor = x + self.fc_out(F.silu(self.fc_in(self.ln_2(x))))
        return out

    def _turned(self, x: Tensor, position: int) -> Tensor:
        dim = x.shape[-1]
        angles = position * self.base ** (-torch.arange(0, dim, 2).float() / dim)
        cos, sin = angles.cos().repeat_interleave(2), angles.sin().repeat_interleave(2)
        pairs = x.view(*x.shape[:-1], -1, 2)
        turned = torch.stack((-pairs[..., 1], pairs[..., 0]), -1).view(x.shape)
        return x * cos + turned * sin
