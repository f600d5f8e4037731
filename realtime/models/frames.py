"""The local transformers of the official families: one hidden state in, a frame's codes one by one.

All run a small stack over the few positions of one frame, with memory that is fresh each time, and ask
the sampler for every code. They differ in what decides the end, in what stands at which position, and in
whether tables are shared. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from realtime.models.base import FrameOutput
from realtime.models.kv import FrameMemory
from realtime.models.stack import Linear, Stack


class Chooser(Protocol):
    """Chooses for each row; the sampler of the engine is one. Logits are float32."""

    def decide(self, logits: Tensor) -> Tensor:
        """logits [n, 2] of go on and stop -> bool [n], True = stop."""
        ...

    def pick(self, codebook: int, logits: Tensor) -> Tensor:
        """logits [n, V] -> int64 [n]."""
        ...


class Positions:
    """The positions of one frame after another, for any width; memory is kept by width, a few MB each."""

    def __init__(self, stack: Stack, num_positions: int) -> None:
        self._stack = stack
        self._num_positions = num_positions
        self._memory: dict[int, FrameMemory] = {}

    def start(self, hidden: Tensor) -> None:
        n = hidden.shape[0]
        if n not in self._memory:
            self._memory[n] = FrameMemory(self._stack, n, self._num_positions, hidden)
        self._now = self._memory[n]
        self._now.position = 0

    def step(self, x: Tensor) -> Tensor:
        """x [n, H] at the next position -> [n, H], after the final norm."""
        memory = self._now
        assert memory.position < self._num_positions, (memory.position, self._num_positions)
        at = slice(memory.position, memory.position + 1)
        out = self._stack.norm(self._stack.run(x, at, memory))
        memory.position += 1
        return out


class TiedFrames:
    """Local's and Nano's: position 0 decides whether to go on, the tables that embed codes are also the
    heads, unless a checkpoint has others. Nano (`slot`, the embedding of the text id of a frame) then has
    one more position, from which its codes begin.

    `tables` [codes, H] are those of the codebooks to generate; the frame's other codes are `pad_code`.
    """

    def __init__(
        self,
        stack: Stack,
        tables: Sequence[Tensor],
        decision: Tensor,
        num_codebooks: int,
        pad_code: int,
        slot: Tensor | None = None,
        heads: Sequence[Tensor] | None = None,
    ) -> None:
        self._positions = Positions(stack, len(tables) + (slot is not None))
        self._tables = tables
        self._heads = [Linear(head) for head in (tables if heads is None else heads)]
        self._decision = Linear(decision)  # [2, H]: go on, stop
        self._slot = slot  # [H]
        self._num_pads = num_codebooks - len(tables)
        self._pad_code = pad_code

    def frame(self, hidden: Tensor, sampling: Chooser) -> FrameOutput:
        """hidden [n, H] -> codes int64 [n, K]; those of a row that stops mean nothing. A row is ok while
        its last logits are finite: a bad number anywhere in its frame reaches them through the keys."""
        n = hidden.shape[0]
        self._positions.start(hidden)
        x = self._positions.step(hidden)
        stop = sampling.decide(self._decision(x).float())
        if self._slot is not None:
            x = self._positions.step(self._slot.expand(n, -1))
        codes: list[Tensor] = []
        for k, head in enumerate(self._heads):
            if k > 0:
                x = self._positions.step(F.embedding(codes[-1], self._tables[k - 1]))
            logits = head(x).float()
            codes.append(sampling.pick(k, logits))
        codes += [torch.full_like(codes[0], self._pad_code)] * self._num_pads
        return FrameOutput(torch.stack(codes, 1), torch.isfinite(logits).all(1), stop)


class RealtimeFrames:
    """Realtime's: tables and heads of their own, the end is a code of codebook 0."""

    def __init__(self, stack: Stack, tables: Sequence[Tensor], heads: Sequence[Tensor], eos: int) -> None:
        """`tables` [codes, H] of all codebooks but the last, `heads` [codes, H] of all."""
        self._positions = Positions(stack, len(heads))
        self._tables = tables
        self._heads = [Linear(head) for head in heads]
        self._eos = eos

    def frame(self, hidden: Tensor, sampling: Chooser) -> FrameOutput:
        """As of TiedFrames; codes may be any of the heads' entries."""
        self._positions.start(hidden)
        codes: list[Tensor] = []
        x = hidden
        for k, head in enumerate(self._heads):
            if k > 0:
                x = F.embedding(codes[-1], self._tables[k - 1])
            logits = head(self._positions.step(x)).float()
            codes.append(sampling.pick(k, logits))
        return FrameOutput(torch.stack(codes, 1), torch.isfinite(logits).all(1), codes[0] == self._eos)
