"""The backbone of the official families: rows of text id and codes in, hidden states out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from realtime.models.kv import Prefill, RowKV, Step
from realtime.models.stack import Stack


class RowBackbone:
    """Rows [text id, codes] in, the last layer's hidden state out; `Backbone` of the official families.

    A row's embedding is the sum of its channels', in their order and in the model's float type.
    """

    def __init__(self, stack: Stack, text: Tensor, audio: Sequence[Tensor]) -> None:
        """text [vocab, H], audio of each codebook [codes, H]; a code that has no row there adds
        nothing only if the table has a zero row for it."""
        self.stack = stack
        self._text = text
        self._audio = torch.cat(list(audio))
        starts = [0, *(table.shape[0] for table in audio[:-1])]
        self._starts = torch.tensor(starts, device=text.device).cumsum(0).unsqueeze(1)

    def new_kv(self, rows: int, max_positions: int) -> RowKV:
        return RowKV(self.stack, rows, max_positions, self._text)

    def embed(self, inputs: Tensor) -> Tensor:
        """int64 [n, 1 + K] -> [n, H]."""
        x = F.embedding(inputs[:, 0], self._text)
        for channel in F.embedding(inputs[:, 1:].t() + self._starts, self._audio):
            x = x.add_(channel)
        return x

    def prefill(self, inputs: Tensor, kv: RowKV, row: int, start: int) -> Tensor:
        """Positions start .. start + T - 1 of one row: inputs int64 [T, 1 + K] -> last hidden [1, H]."""
        part = Prefill(kv, row, start, inputs.shape[0])
        x = self.stack.run(self.embed(inputs), part.at, part)
        return self.stack.norm(x[-1:])

    def decode(
        self, inputs: Tensor, kv: RowKV, rows: Tensor, positions: Tensor, span: int | None = None
    ) -> Tensor:
        """One position of each given row: inputs int64 [n, 1 + K], rows and positions int64 [n] -> [n, H].
        A repeated row must repeat its input. `span`, a multiple of LENGTH_STEP beyond every position,
        is how many positions are read; without it all of them, on a CPU as many as it takes."""
        step = Step(kv, rows, positions, span)
        return self.stack.norm(self.stack.run(self.embed(inputs), positions, step))
