"""Qwen3 decoder blocks and the backbone with its slot-indexed, static KV memory.

Weights are kept transposed and contiguous and q, k, v as well as gate and up are one product each:
a step of a small model is bound by the number of operators, not by arithmetic. For the same reason
the weight of an RMSNorm is part of the matrix that follows it, and two rows of a head that RoPE turns
together are stored next to each other, so that a rotation is one complex product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from realtime.models.weights import Tensors


@dataclass(frozen=True, slots=True)
class Qwen3Config:
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float
    rms_norm_eps: float
    attention_bias: bool = False


def rope_table(config: Qwen3Config, num_positions: int) -> Tensor:
    """complex64 [positions, 1, head_dim / 2]: the turn of each pair at each position."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float64), config.rope_theta**-half)
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64).unsqueeze(1)


class UnitNorm:
    """RMSNorm without its weight and without the factor sqrt(dim), which `gain` moves into whatever
    is multiplied next: x / sqrt(|x|^2 + dim * eps), three fused operators."""

    def __init__(self, dim: int, eps: float) -> None:
        self.floor = torch.tensor([(dim * eps) ** 0.5])
        self._root: float = dim**0.5

    def __call__(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x / torch.hypot(length, self.floor)

    def gain(self, weight: Tensor) -> Tensor:
        return weight * self._root


class Block:
    """One decoder layer's weights and everything in it but the attention itself."""

    def __init__(self, tensors: Tensors, prefix: str, config: Qwen3Config) -> None:
        c = config
        q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        half = c.head_dim // 2
        pairs = torch.arange(c.head_dim).view(2, half).t().reshape(-1)  # (0, half, 1, half+1, ...)

        def paired(name: str, size: int) -> Tensor:
            weight = tensors.take(f"{prefix}.self_attn.{name}.weight", size, c.hidden_size)
            return weight.view(-1, c.head_dim, c.hidden_size)[:, pairs].reshape(size, c.hidden_size)

        q, k = paired("q_proj", q_size), paired("k_proj", kv_size)
        v = tensors.take(f"{prefix}.self_attn.v_proj.weight", kv_size, c.hidden_size)
        q_norm = tensors.take(f"{prefix}.self_attn.q_norm.weight", c.head_dim)[pairs] * c.head_dim**-0.5
        k_norm = tensors.take(f"{prefix}.self_attn.k_norm.weight", c.head_dim)[pairs]
        gate = tensors.take(f"{prefix}.mlp.gate_proj.weight", c.intermediate_size, c.hidden_size)
        up = tensors.take(f"{prefix}.mlp.up_proj.weight", c.intermediate_size, c.hidden_size)

        self.config = config
        self.norm = UnitNorm(c.hidden_size, c.rms_norm_eps)
        self.head_norm = UnitNorm(c.head_dim, c.rms_norm_eps)
        norm_in = self.norm.gain(tensors.take(f"{prefix}.input_layernorm.weight", c.hidden_size))
        norm_mlp = self.norm.gain(tensors.take(f"{prefix}.post_attention_layernorm.weight", c.hidden_size))
        self.qkv = (torch.cat((q, k, v)) * norm_in).t().contiguous()
        # The softmax scale is part of the q norm.
        self.qk_gain = self.head_norm.gain(
            torch.cat((q_norm.expand(c.num_heads, -1), k_norm.expand(c.num_kv_heads, -1)))
        )
        self.out = tensors.take(f"{prefix}.self_attn.o_proj.weight", c.hidden_size, q_size).t().contiguous()
        self.gate_up = (torch.cat((gate, up)) * norm_mlp).t().contiguous()
        self.down = (
            tensors.take(f"{prefix}.mlp.down_proj.weight", c.hidden_size, c.intermediate_size)
            .t()
            .contiguous()
        )

    def project(self, x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [n, H], rope [n or 1, 1, d/2] -> q [n * kv_heads, group, d], k and v [n, kv_heads, d]."""
        c = self.config
        n, heads = x.shape[0], c.num_heads + c.num_kv_heads
        qkv = torch.mm(self.norm(x), self.qkv).view(n, heads + c.num_kv_heads, c.head_dim)
        qk = self.head_norm(qkv[:, :heads]) * self.qk_gain
        turned = torch.view_as_complex(qk.view(n, heads, c.head_dim // 2, 2)) * rope
        qk = torch.view_as_real(turned).view(n, heads, c.head_dim)
        q = qk[:, : c.num_heads].reshape(n * c.num_kv_heads, c.num_heads // c.num_kv_heads, c.head_dim)
        return q, qk[:, c.num_heads :], qkv[:, heads:]

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Residual, output projection and MLP; `attended` has q's shape."""
        x = torch.addmm(x, attended.reshape(x.shape[0], -1), self.out)
        gate, up = torch.mm(self.norm(x), self.gate_up).chunk(2, dim=1)
        return torch.addmm(x, F.silu(gate).mul_(up), self.down)


LENGTH_STEP = 64  # attention reads this many positions or a multiple: rounds the same at any of them


class RowKV:
    """K and V of every row, allocated once. A row's memory is not cleared between streams: what lies
    beyond its position is masked, and a step overwrites its own position before it is read."""

    def __init__(self, config: Qwen3Config, rows: int, max_positions: int) -> None:
        self.rows = rows
        self.max_positions = -(-max_positions // LENGTH_STEP) * LENGTH_STEP
        self.num_heads, self.head_dim = config.num_kv_heads, config.head_dim
        shape = (rows * self.num_heads, self.max_positions, self.head_dim)
        self.layers = [(torch.zeros(shape), torch.zeros(shape)) for _ in range(config.num_layers)]
        seen = torch.arange(self.max_positions)
        self.mask = torch.zeros(self.max_positions, self.max_positions).masked_fill_(
            seen.unsqueeze(0) > seen.unsqueeze(1), float("-inf")
        )

    def clear(self, row: int) -> None:
        """Forgets a row whose numbers were not finite: a mask hides numbers, but not NaN."""
        lanes = slice(row * self.num_heads, (row + 1) * self.num_heads)
        for keys, values in self.layers:
            keys[lanes] = 0
            values[lanes] = 0

    def place(self, rows: Tensor, positions: Tensor) -> Place:
        return Place(self, rows, positions)


class Place:
    """Where one decode step reads and writes in a RowKV: one position of each given row.

    Attention runs over all rows from the lowest to the highest one, without gathering their memory; the
    results of rows that are not in the step are never read.
    """

    def __init__(self, kv: RowKV, rows: Tensor, positions: Tensor) -> None:
        heads = kv.num_heads
        first, last = int(rows[0]), int(rows[-1])
        num_rows = last - first + 1
        self._lanes = slice(first * heads, (last + 1) * heads)
        self._length = (int(positions.max()) // LENGTH_STEP + 1) * LENGTH_STEP
        self._is_one = num_rows == 1  # perhaps repeated
        self._rows = None if num_rows == rows.shape[0] else rows - first
        every = positions[:num_rows]
        if self._rows is not None and not self._is_one:
            every = torch.zeros(num_rows, dtype=torch.int64)
            every[self._rows] = positions
        mask = kv.mask[every, : self._length]
        self._mask = mask.repeat_interleave(heads, dim=0).unsqueeze(1)  # [lanes, 1, length]
        self.lanes = (rows.unsqueeze(1) * heads + torch.arange(heads)).view(-1)  # of each row and head
        self.positions = positions.repeat_interleave(heads)

    def write(self, memory: Tensor, new: Tensor) -> None:
        """new [n, kv_heads, d] into one layer's keys or values."""
        memory[self.lanes, self.positions] = new.reshape(-1, memory.shape[-1])

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor | None = None) -> Tensor:
        """q [n, kv_heads, group, d] -> [n, kv_heads * group * d]."""
        n, heads, group, dim = q.shape
        if self._is_one:
            lanes = q[0]
        elif self._rows is None:
            lanes = q.reshape(-1, group, dim)
        else:
            spread = q.new_zeros(self._mask.shape[0] // heads, heads, group, dim)
            spread[self._rows] = q
            lanes = spread.view(-1, group, dim)
        keys, values = keys[self._lanes, : self._length], values[self._lanes, : self._length]
        weights = torch.softmax(torch.baddbmm(self._mask, lanes, keys.transpose(1, 2)), -1)
        attended = torch.bmm(weights, values).view(-1, heads * group * dim)
        if self._rows is not None:
            attended = attended.expand(n, -1) if self._is_one else attended[self._rows]
        return attended if out is None else out.copy_(attended)


class Qwen3Backbone:
    """Summed embeddings of a step input through the decoder layers and the final norm.

    NOTE: a product of one row takes another path through the matrix library than a product of
    several and rounds differently; with two or more rows each row's result is the same to the bit
    at any width. Callers that promise "batched equals alone" never pass a single row.
    """

    def __init__(
        self, tensors: Tensors, config: Qwen3Config, channel_sizes: list[int], max_positions: int
    ) -> None:
        self.config = config
        tables = [
            tensors.take(f"embed_tokens.{i}.weight", size, config.hidden_size)
            for i, size in enumerate(channel_sizes)
        ]
        self.embedding = torch.cat(tables)
        self.offsets = torch.tensor([0, *channel_sizes[:-1]]).cumsum(0)
        self.blocks = [Block(tensors, f"language_model.layers.{i}", config) for i in range(config.num_layers)]
        self.norm = UnitNorm(config.hidden_size, config.rms_norm_eps)
        self.norm_gain = self.norm.gain(tensors.take("language_model.norm.weight", config.hidden_size))
        self.rope = rope_table(config, max_positions)

    def new_kv(self, rows: int, max_positions: int) -> RowKV:
        return RowKV(self.config, rows, max_positions)

    def prefill(self, inputs: Tensor, kv: RowKV, row: int, start: int) -> Tensor:
        """Positions start .. start+T-1 of one row: inputs int64 [T, W+K] -> last hidden [1, H]."""
        c = self.config
        stop = start + inputs.shape[0]
        own = slice(row * c.num_kv_heads, (row + 1) * c.num_kv_heads)
        rope, mask = self.rope[start:stop], kv.mask[start:stop, :stop]
        x = self.embed(inputs)
        for block, (keys, values) in zip(self.blocks, kv.layers, strict=True):
            q, k, v = block.project(x, rope)
            keys[own, start:stop] = k.transpose(0, 1)
            values[own, start:stop] = v.transpose(0, 1)
            q = q.view(stop - start, c.num_kv_heads, -1, c.head_dim).permute(1, 2, 0, 3)  # [kv, group, T, d]
            scores = q @ keys[own, :stop].unsqueeze(1).transpose(2, 3) + mask
            attended = torch.softmax(scores, -1) @ values[own, :stop].unsqueeze(1)
            x = block.finish(x, attended.permute(2, 0, 1, 3))
        return self.norm(x[-1:]) * self.norm_gain

    def embed(self, inputs: Tensor) -> Tensor:
        """Step inputs int64 [n, W+K] -> [n, H]."""
        return F.embedding(inputs + self.offsets, self.embedding).sum(1)

    def decode(
        self, inputs: Tensor, kv: RowKV, rows: Tensor, positions: Tensor, span: int | None = None
    ) -> Tensor:
        """One position of each given row: inputs int64 [n, W+K], rows and positions int64 [n]
        (rows ascending; a repeated row must repeat its input) -> last hidden [n, H]. The positions
        themselves tell how far to read, `span` is not needed."""
        c, n = self.config, inputs.shape[0]
        place = kv.place(rows, positions)
        rope = self.rope[positions]
        x = self.embed(inputs)
        for block, (keys, values) in zip(self.blocks, kv.layers, strict=True):
            q, k, v = block.project(x, rope)
            place.write(keys, k)
            place.write(values, v)
            x = block.finish(x, place.attend(q.view(n, c.num_kv_heads, -1, c.head_dim), keys, values))
        return self.norm(x) * self.norm_gain
