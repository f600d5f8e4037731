"""Keys and values of a `Stack`, allocated once, and how a pass writes and reads them.

Several query heads of one key head are queries of one attention, so nothing is repeated. A decode step
waits for nothing, and its shapes follow from its arguments alone: a CUDA graph can hold it. On a CPU,
where memory is read in place instead of gathered, it looks at the rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from realtime.models.stack import Stack

LENGTH_STEP = 64  # attention reads this many positions or a multiple: rounds the same at any of them


def attention(q: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
    """q [m, kv_heads, queries, d] over keys and values [m, 2 * kv_heads, length, d]."""
    kv_heads = q.shape[1]
    return F.scaled_dot_product_attention(q, memory[:, :kv_heads], memory[:, kv_heads:], attn_mask=mask)


class RowKV:
    """Keys and values of every row, by layer [rows + 1, 2 * kv_heads, positions, d], allocated once.

    Row `rows` is for padding lanes. A row's memory is not cleared between streams: what lies beyond its
    position is masked, and a step writes its own position before it reads.
    """

    def __init__(self, stack: Stack, rows: int, max_positions: int, like: Tensor) -> None:
        self.rows = rows
        self.max_positions = -(-max_positions // LENGTH_STEP) * LENGTH_STEP
        shape = (rows + 1, 2 * stack.num_kv_heads, self.max_positions, stack.head_dim)
        self.layers = [like.new_zeros(shape) for _ in range(stack.num_layers)]
        self.seen = torch.arange(self.max_positions, device=like.device)
        self.gathers = like.device.type != "cpu"

    def clear(self, row: int) -> None:
        """Forgets a row whose numbers were not finite: a mask hides numbers, but not NaN."""
        for memory in self.layers:
            memory[row] = 0

    def mask(self, last: Tensor, span: int) -> Tensor:
        """[n, span]: what queries that see up to `last`, int64 [n], may read."""
        like = self.layers[0]
        hidden = self.seen[:span] > last.unsqueeze(1)
        return like.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))


class Prefill:
    """Many positions of one row, from `start` on."""

    def __init__(self, kv: RowKV, row: int, start: int, num_positions: int) -> None:
        self._layers, self._row = kv.layers, row
        self.at = slice(start, start + num_positions)
        assert 0 <= start and self.at.stop <= kv.max_positions, (start, num_positions, kv.max_positions)
        self._span = -(-self.at.stop // LENGTH_STEP) * LENGTH_STEP
        self._mask = kv.mask(kv.seen[self.at], self._span)

    def __call__(self, layer: int, q: Tensor, new: Tensor) -> Tensor:
        memory = self._layers[layer][self._row]
        memory[:, self.at] = new.transpose(0, 1)
        n, kv_heads, group, dim = q.shape
        q = q.permute(1, 2, 0, 3).reshape(1, kv_heads, group * n, dim)
        out = attention(q, memory[None, :, : self._span], self._mask.repeat(group, 1))
        return out.view(kv_heads, group, n, dim).permute(2, 0, 1, 3).reshape(n, -1)


class Step:
    """One position of each given row. On a CPU memory is read in place, from the lowest row to the
    highest, unless most of these take no part; the results of those that don't are never read."""

    def __init__(self, kv: RowKV, rows: Tensor, positions: Tensor, span: int | None) -> None:
        self._layers, self._rows, self._positions = kv.layers, rows, positions
        self._lanes: slice | None = None
        self._places: Tensor | None = None  # of the step's rows among the lanes, where they differ
        last = positions
        if not kv.gathers:
            first, highest = int(rows.min()), int(rows.max())
            n, num_lanes = rows.shape[0], highest + 1 - first
            if num_lanes <= 2 * n:
                self._lanes = slice(first, highest + 1)
                places = rows - first
                if num_lanes != n or not torch.equal(places, torch.arange(n)):
                    self._places = places
                    last = torch.zeros(num_lanes, dtype=torch.int64).index_copy_(0, places, positions)
            if span is None:
                span = (int(positions.max()) // LENGTH_STEP + 1) * LENGTH_STEP
        self._span = kv.max_positions if span is None else span
        self._mask = kv.mask(last, self._span)[:, None, None]

    def __call__(self, layer: int, q: Tensor, new: Tensor) -> Tensor:
        memory, n = self._layers[layer], q.shape[0]
        memory[self._rows, :, self._positions] = new
        if self._lanes is None:
            lanes = memory[:, :, : self._span].index_select(0, self._rows)
            return attention(q, lanes, self._mask).reshape(n, -1)
        lanes = memory[self._lanes, :, : self._span]
        if self._places is None:
            return attention(q, lanes, self._mask).reshape(n, -1)
        spread = q.new_zeros(lanes.shape[0], *q.shape[1:])
        spread[self._places] = q
        return attention(spread, lanes, self._mask)[self._places].reshape(n, -1)


class FrameMemory:
    """Keys and values within one frame, of n rows at a few positions that are filled in order."""

    def __init__(self, stack: Stack, n: int, num_positions: int, like: Tensor) -> None:
        shape = (n, 2 * stack.num_kv_heads, num_positions, stack.head_dim)
        self._layers = [like.new_zeros(shape) for _ in range(stack.num_layers)]
        self.position = 0

    def __call__(self, layer: int, q: Tensor, new: Tensor) -> Tensor:
        memory = self._layers[layer]
        memory[:, :, self.position] = new
        return attention(q, memory[:, :, : self.position + 1], None).reshape(q.shape[0], -1)
