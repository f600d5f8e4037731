"""Decode steps of small models on a CPU: the arithmetic of `qwen3` and `local` with the fewest and
cheapest operators.

A step of such a model is bound by what it costs to call an operator, and by reading the weights.
NumPy's elementwise calls cost a third of torch's and write in place, torch's matrix product is the
faster one; both work on the same memory, which is allocated once. What a row computes does not depend,
to the bit, on the rows beside it: products have two rows or more (see `Qwen3Backbone`), everything
else is row by row.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from realtime.models.base import FrameOutput
from realtime.models.local import LocalTransformer, Picker
from realtime.models.qwen3 import Block, Qwen3Backbone, Qwen3Config, RowKV

Floats = npt.NDArray[np.float32]


class Lines:
    """Step buffers of n rows, as NumPy arrays and, with `t_`, the same memory as tensors."""

    def __init__(self, config: Qwen3Config, n: int) -> None:
        c = config
        num_qk, group = c.num_heads + c.num_kv_heads, c.num_heads // c.num_kv_heads
        self.n = n
        self.x = np.zeros((n, c.hidden_size), np.float32)
        self.unit = np.zeros_like(self.x)
        self.length = np.zeros(n, np.float32)
        self.length_column = self.length[:, None]
        qkv = np.zeros((n, (num_qk + c.num_kv_heads) * c.head_dim), np.float32)
        by_head = qkv.reshape(n, -1, c.head_dim)
        self.raw_qk, self.v = by_head[:, :num_qk], by_head[:, num_qk:]
        self.qk = np.zeros((n, num_qk, c.head_dim), np.float32)
        self.head_length = np.zeros((n, num_qk), np.float32)
        self.head_length_column = self.head_length[..., None]
        self.pairs = self.qk.view(np.complex64)  # [n, heads, head_dim / 2]
        self.q = self.qk[:, : c.num_heads].reshape(n, c.num_kv_heads, group, c.head_dim)
        self.k = self.qk[:, c.num_heads :]
        self.attended = np.zeros_like(self.q)
        gate_up = np.zeros((n, 2 * c.intermediate_size), np.float32)
        self.gate, self.up = np.split(gate_up, 2, axis=1)
        self.act = np.zeros((n, c.intermediate_size), np.float32)
        self.t_x, self.t_unit = torch.from_numpy(self.x), torch.from_numpy(self.unit)
        self.t_qkv, self.t_q = torch.from_numpy(qkv), torch.from_numpy(self.q)
        self.t_attended = torch.from_numpy(self.attended).view(n, -1)
        self.t_gate_up, self.t_act = torch.from_numpy(gate_up), torch.from_numpy(self.act)

    def normalize(self, floor: float) -> None:
        """unit = x / sqrt(|x|^2 + floor), the weight being part of the product that follows."""
        np.vecdot(self.x, self.x, out=self.length)
        np.add(self.length, floor, out=self.length)
        np.sqrt(self.length, out=self.length)
        np.divide(self.x, self.length_column, out=self.unit)


class SmallBlock:
    """One decoder layer; its weights are the Block's."""

    def __init__(self, block: Block) -> None:
        c = block.config
        self.floor = c.hidden_size * c.rms_norm_eps
        self.head_floor = c.head_dim * c.rms_norm_eps
        self.qk_gain = block.qk_gain.numpy()
        self.qkv, self.out, self.gate_up, self.down = block.qkv, block.out, block.gate_up, block.down

    def project(self, m: Lines, rope: npt.NDArray[np.complex64]) -> None:
        """x -> q, k (turned, in `m.qk`) and v (in `m.v`)."""
        m.normalize(self.floor)
        torch.mm(m.t_unit, self.qkv, out=m.t_qkv)
        np.vecdot(m.raw_qk, m.raw_qk, out=m.head_length)
        np.add(m.head_length, self.head_floor, out=m.head_length)
        np.sqrt(m.head_length, out=m.head_length)
        np.divide(m.raw_qk, m.head_length_column, out=m.qk)
        np.multiply(m.qk, self.qk_gain, out=m.qk)
        np.multiply(m.pairs, rope, out=m.pairs)

    def finish(self, m: Lines) -> None:
        """Output projection, MLP and both residuals, in place in x."""
        m.t_x.addmm_(m.t_attended, self.out)
        m.normalize(self.floor)
        torch.mm(m.t_unit, self.gate_up, out=m.t_gate_up)
        np.negative(m.gate, out=m.act)  # silu(gate) * up
        with np.errstate(over="ignore"):  # a gate far below zero: the quotient is 0, as it should be
            np.exp(m.act, out=m.act)
        np.add(m.act, 1.0, out=m.act)
        np.divide(m.gate, m.act, out=m.act)
        np.multiply(m.act, m.up, out=m.act)
        m.t_x.addmm_(m.t_act, self.down)


def softmax(scores: Floats) -> None:
    """In place over the last axis."""
    np.subtract(scores, scores.max(-1, keepdims=True), out=scores)
    np.exp(scores, out=scores)
    np.divide(scores, scores.sum(-1, keepdims=True), out=scores)


class SmallLocal:
    """`LocalTransformer.frame` with the weights of one."""

    def __init__(self, local: LocalTransformer) -> None:
        self._local = local
        self._blocks = [SmallBlock(block) for block in local.blocks]
        self._rope = local.rope.numpy()
        self._inputs = [table.numpy() for table in local.inputs]
        self._allowed = [ids.numpy() for ids in local.allowed]
        self._floor = local.config.hidden_size * local.config.rms_norm_eps
        self._memory: dict[int, tuple[Lines, Floats, Floats]] = {}  # by width, a few hundred kB each

    def frame(self, hidden: Tensor, sampling: Picker) -> FrameOutput:
        """hidden [n, H] -> codes int64 [n, K]."""
        m, all_keys, all_values = self._memory_for(hidden.shape[0])
        heads = self._local.heads
        codes: list[npt.NDArray[np.int64]] = []
        np.copyto(m.x, hidden.numpy())
        for i, head in enumerate(heads):
            for block, keys, values in zip(self._blocks, all_keys, all_values, strict=True):
                block.project(m, self._rope[i])
                keys[:, :, i] = m.k
                values[:, :, i] = m.v
                scores = np.matmul(m.q, keys[:, :, : i + 1].swapaxes(2, 3))
                softmax(scores)
                np.matmul(scores, values[:, :, : i + 1], out=m.attended)
                block.finish(m)
            m.normalize(self._floor)
            logits = torch.mm(m.t_unit, head)
            codes.append(self._allowed[i][sampling.pick(i, logits).numpy()])
            if i + 1 < len(heads):
                np.take(self._inputs[i], codes[-1], axis=0, out=m.x)
        stop = torch.from_numpy(codes[0] == self._allowed[0][-1])
        return FrameOutput(torch.from_numpy(np.stack(codes, axis=1)), torch.isfinite(logits).all(1), stop)

    def _memory_for(self, n: int) -> tuple[Lines, Floats, Floats]:
        if n not in self._memory:
            c = self._local.config
            shape = (c.num_layers, n, c.num_kv_heads, len(self._local.heads), c.head_dim)
            self._memory[n] = (Lines(c, n), np.zeros(shape, np.float32), np.zeros(shape, np.float32))
        return self._memory[n]


class SmallBackbone:
    """`Qwen3Backbone.decode` with the weights of one; prefill is the backbone's own."""

    def __init__(self, backbone: Qwen3Backbone) -> None:
        self._backbone = backbone
        self._blocks = [SmallBlock(block) for block in backbone.blocks]
        self._rope = backbone.rope.numpy()
        self._gain = backbone.norm_gain.numpy()
        self._floor = backbone.config.hidden_size * backbone.config.rms_norm_eps
        self._memory: dict[int, Lines] = {}

    def new_kv(self, rows: int, max_positions: int) -> RowKV:
        return self._backbone.new_kv(rows, max_positions)

    def prefill(self, inputs: Tensor, kv: RowKV, row: int, start: int) -> Tensor:
        return self._backbone.prefill(inputs, kv, row, start)

    def decode(
        self, inputs: Tensor, kv: RowKV, rows: Tensor, positions: Tensor, span: int | None = None
    ) -> Tensor:
        """As `Qwen3Backbone.decode`; what is returned is overwritten by the next step of this width."""
        c, n = self._backbone.config, inputs.shape[0]
        if n not in self._memory:
            self._memory[n] = Lines(c, n)
        m = self._memory[n]
        place = kv.place(rows, positions)
        lanes, at = place.lanes.numpy(), place.positions.numpy()
        rope = self._rope[positions.numpy()]
        np.copyto(m.x, self._backbone.embed(inputs).numpy())
        for block, (keys, values) in zip(self._blocks, kv.layers, strict=True):
            block.project(m, rope)
            keys.numpy()[lanes, at] = m.k.reshape(-1, c.head_dim)
            values.numpy()[lanes, at] = m.v.reshape(-1, c.head_dim)
            place.attend(m.t_q, keys, values, out=m.t_attended)
            block.finish(m)
        m.normalize(self._floor)
        np.multiply(m.unit, self._gain, out=m.unit)
        return m.t_unit
