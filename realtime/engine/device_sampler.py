"""Batched, seeded sampling in torch, for the official families: nothing here waits for the device.

Every setting is a tensor with one value per lane, so a batch may mix any requests, and what a lane
draws depends on nothing but itself: its only random numbers are uniforms made on the host from (seed,
segment, frame, codebook). Between `prepare` and `commit` all is tensor work on buffers that stay where
they are, which is what a captured graph needs.

The two rules, both in the order penalty, temperature, top-k, top-p, draw; ties at the k-th survive:

- `local`: the penalty looks at all codes of the segment; top-p drops an entry when the mass before it,
  the likeliest first, is more than top_p (0 and 1 switch it off).
- `realtime`: the penalty looks at the last frames; top-p drops the unlikeliest while their mass is at
  most 1 - top_p (so 0 keeps the likeliest alone).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from realtime.engine.sampler import MAX_TOP_K, uniforms
from realtime.messages import SamplingParams
from realtime.models.base import SamplingDefaults

Rule = Literal["local", "realtime"]

# Candidates that reach top-p: the most that top-k may ask for, and room for ties at the last of them.
# Sorting all 1,024 entries of 16 rows costs five times as much on a CPU, more or fewer of these nothing.
CANDIDATES = MAX_TOP_K + 32


class DeviceSampler:
    """Settings and history of `rows` rows (and one more, of padding lanes), and the choices of a batch.

    `prepare` is told the batch; then `decide` and `pick` choose, and `commit` remembers the frame.
    `vocab_size` is the widest head's: more than any code that may come back in `commit`.
    """

    def __init__(
        self,
        defaults: SamplingDefaults,
        rule: Rule,
        rows: int,
        device: torch.device | str = "cpu",
        *,
        vocab_size: int,
    ) -> None:
        self._defaults = defaults
        self._rule = rule
        self._device = torch.device(device)
        self._num_codebooks = num_codebooks = len(defaults.temperature)
        self._vocab_size = vocab_size
        # A family without a top-k of its own needs every entry.
        self._width = min(CANDIDATES, vocab_size) if defaults.top_k else vocab_size

        lanes = rows + 1
        self._temperature = np.ones((num_codebooks, lanes), np.float32)
        self._is_greedy = np.zeros((num_codebooks, lanes), np.bool_)
        self._top_k = np.ones(lanes, np.int64)
        self._top_p = np.ones(lanes, np.float32)
        self._penalty = np.ones(lanes, np.float32)
        self._seed = np.zeros(lanes, np.uint64)

        # What a batch uses, by lane. Static, so that graphs can read it: [value, lane].
        self._ints = torch.zeros(3, lanes, dtype=torch.int64, device=self._device)
        # Uniforms of the codebooks and the decision, top-p, penalty, temperatures.
        self._floats = torch.zeros(2 * num_codebooks + 3, lanes, device=self._device)
        self._greedy = torch.zeros(num_codebooks, lanes, dtype=torch.bool, device=self._device)
        # The penalty of each code, 1 for those that were not drawn, and (`realtime`) the codes of the
        # last frames. One column more than there are codes takes what is none: the pad of a channel
        # that the model leaves out, and a frame that was not.
        shape = (lanes, num_codebooks, vocab_size + 1)
        self._factors = torch.ones(shape, device=self._device)
        window = defaults.penalty_window if rule == "realtime" else 0
        self._drawn = torch.full(
            (lanes, window, num_codebooks), vocab_size, dtype=torch.int64, device=self._device
        )
        # Leaving out what changes nothing pays on a CPU only; a graph has to hold it all.
        self.may_skip = self._device.type == "cpu"
        self._any_greedy = self._any_penalty = self._any_reward = True

    def set_row(self, row: int, params: SamplingParams) -> None:
        """Everything of the stream before is forgotten. A temperature of 0 is greedy, also where the
        end is decided."""
        d = self._defaults
        temperature = np.asarray(d.temperature, np.float32)
        if params.temperature is not None:
            temperature = np.full_like(temperature, params.temperature)
        self._is_greedy[:, row] = temperature == 0
        self._temperature[:, row] = np.where(temperature == 0, np.float32(1), temperature)
        top_k = params.top_k or d.top_k or self._width
        self._top_k[row] = min(top_k, self._width if not d.top_k else MAX_TOP_K, self._vocab_size)
        top_p = d.top_p if params.top_p is None else params.top_p
        if self._rule == "realtime":
            self._top_p[row] = 1 - top_p
        else:
            self._top_p[row] = top_p if 0 < top_p < 1 else np.inf
        self._penalty[row] = (
            d.repetition_penalty if params.repetition_penalty is None else params.repetition_penalty
        )
        self._seed[row] = np.uint64(params.seed & 0xFFFF_FFFF_FFFF_FFFF)
        self.start_segment(row)

    def start_segment(self, row: int) -> None:
        """The penalty's history is that of one segment."""
        self._factors[row] = 1
        self._drawn[row] = self._vocab_size

    def prepare(self, rows: Sequence[int], segments: Sequence[int], frames: Sequence[int]) -> None:
        """The lanes whose codes are picked next; segments and frames count from 0 in the stream and in
        the segment. A row may come twice; the row after the last is for padding."""
        index = np.asarray(rows, np.int64)
        n, num_codebooks = len(index), self._num_codebooks
        draws = uniforms(
            self._seed[index],
            np.asarray(segments, np.uint64),
            np.asarray(frames, np.uint64),
            num_codebooks + 1,
        )
        ints = np.stack([index, self._top_k[index] - 1, np.asarray(frames, np.int64)])
        settings = [
            draws.T,
            self._top_p[None, index],
            self._penalty[None, index],
            self._temperature[:, index],
        ]
        greedy = self._is_greedy[:, index]
        self._ints[:, :n].copy_(torch.from_numpy(ints))
        self._floats[:, :n].copy_(torch.from_numpy(np.concatenate(settings)))
        self._greedy[:, :n].copy_(torch.from_numpy(greedy))
        self._rows, self._last, self._frame = self._ints[:, :n].unbind(0)  # each [n]
        lanes = self._floats[:, :n].unsqueeze(2).unbind(0)  # each [n, 1]
        self._draws = lanes[: num_codebooks + 1]
        self._top_ps, self._penalties = lanes[num_codebooks + 1 : num_codebooks + 3]
        self._temperatures = lanes[num_codebooks + 3 :]
        self._any_greedy = not self.may_skip or bool(greedy.any())
        self._any_penalty = not self.may_skip or bool((self._penalty[index] != 1).any())
        self._any_reward = not self.may_skip or bool((self._penalty[index] < 1).any())

    def decide(self, logits: Tensor) -> Tensor:
        """logits [n, 2] of go on and stop -> bool [n], True = stop. It has no temperature, and is greedy
        where codebook 0 is."""
        goes_on = torch.softmax(logits.float(), -1)[:, 0]
        stop = goes_on <= self._draws[self._num_codebooks][:, 0]
        if self._any_greedy:
            stop = torch.where(self._greedy[0, : len(stop)], logits[:, 1] > logits[:, 0], stop)
        return stop

    def pick(self, codebook: int, logits: Tensor) -> Tensor:
        """logits [n, V] -> index int64 [n]."""
        logits = self._penalised(codebook, logits.float())
        scores, indices = self._likeliest(logits)
        p = self._candidates(codebook, scores)
        draw = self._draws[codebook]
        if self._rule == "realtime":
            rank = self._rank_from_below(p, draw)
        else:
            rank = self._rank_from_above(p, draw)
        picked = indices.gather(1, rank).squeeze(1) if indices is not None else _place(logits, scores, rank)
        if self._any_greedy:
            picked = torch.where(self._greedy[codebook, : len(picked)], logits.argmax(-1), picked)
        return picked

    def probabilities(self, codebook: int, logits: Tensor) -> Tensor:
        """What `pick` draws from, float32 [n, V]; it costs more than a pick."""
        logits = self._penalised(codebook, logits.float())
        scores, indices = torch.topk(logits, min(self._width, logits.shape[1]), dim=-1)
        p = self._candidates(codebook, scores)
        if self._rule == "realtime":
            kept = self._kept_from_below(p.flip(1).cumsum(1)).flip(1)
        else:
            kept = self._kept_from_above(p.cumsum(1))
        p = p * kept
        return torch.zeros_like(logits).scatter(1, indices, p / p.sum(1, keepdim=True))

    def commit(self, codes: Tensor, keep: Tensor) -> None:
        """codes int64 [n, K] of the prepared lanes become history where `keep`, bool [n]."""
        if not self._any_penalty:
            return
        codes = codes.clamp(max=self._vocab_size)
        if self._rule == "realtime":
            slot = self._frame % self._drawn.shape[1]
            self._drawn[self._rows, slot] = torch.where(keep[:, None], codes, self._drawn[self._rows, slot])
            drawn = self._drawn[self._rows].transpose(1, 2)  # [n, K, window]
            fresh = torch.ones_like(self._factors[: len(codes)])
            fresh.scatter_(2, drawn, self._penalties[:, None].expand(drawn.shape))
            self._factors.index_copy_(0, self._rows, fresh)
        else:
            _, num_codebooks, columns = self._factors.shape
            codebooks = torch.arange(num_codebooks, device=self._device)
            place = (self._rows[:, None] * num_codebooks + codebooks) * columns + codes
            factors = self._factors.view(-1)
            factors[place] = torch.where(keep[:, None], self._penalties, factors[place])

    # ---- one step each

    def _penalised(self, codebook: int, logits: Tensor) -> Tensor:
        if not self._any_penalty:
            return logits
        factor = self._factors[:, codebook, : logits.shape[1]].index_select(0, self._rows)
        up, down = logits * factor, logits / factor
        # Negative ones are multiplied, others divided: above 1 that is the lower of both, below the higher.
        penalised = torch.minimum(up, down)
        if self._any_reward:
            penalised = torch.where(self._penalties < 1, torch.maximum(up, down), penalised)
        return penalised

    def _likeliest(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """The highest logits [n, M], descending, and where they are. On a CPU without the latter: NumPy sorts
        numbers alone several times as fast."""
        num_scores = min(self._width, logits.shape[1])
        if self.may_skip:
            return torch.from_numpy(-np.sort(-logits.numpy(), -1)[:, :num_scores]), None
        return torch.topk(logits, num_scores, dim=-1)

    def _candidates(self, codebook: int, scores: Tensor) -> Tensor:
        """scores [n, M] of the likeliest entries, descending -> probabilities after top-k."""
        kth = scores.gather(1, self._last[:, None].clamp(max=scores.shape[1] - 1))
        scores = (scores / self._temperatures[codebook]).masked_fill_(scores < kth, -torch.inf)
        return torch.softmax(scores, -1)

    def _kept_from_above(self, sums: Tensor) -> Tensor:
        """sums [n, M], the running sums from the likeliest on -> which top-p keeps."""
        return F.pad(sums[:, :-1], (1, 0)) <= self._top_ps

    def _kept_from_below(self, sums: Tensor) -> Tensor:
        """sums [n, M], the running sums from the unlikeliest on -> which top-p keeps."""
        kept = sums > self._top_ps
        kept[:, -1] = True
        return kept

    def _rank_from_above(self, p: Tensor, draw: Tensor) -> Tensor:
        sums = p.cumsum(1)
        # The last entry that is kept is the first whose own sum is more than top_p.
        total = sums.gather(1, _first_above(sums, self._top_ps))
        return _first_above(sums, draw * total)

    def _rank_from_below(self, p: Tensor, draw: Tensor) -> Tensor:
        sums = p.flip(1).cumsum(1)
        dropped = (sums * ~self._kept_from_below(sums)).amax(1, keepdim=True)
        rank = _first_above(sums, dropped + draw * (sums[:, -1:] - dropped))
        return p.shape[1] - 1 - rank


def _first_above(sums: Tensor, level: Tensor) -> Tensor:
    """The first entry of sums [n, M] that is above level [n, 1], the last where rounding leaves none."""
    return (sums <= level).sum(1, keepdim=True).clamp_(max=sums.shape[1] - 1)


def _place(logits: Tensor, scores: Tensor, rank: Tensor) -> Tensor:
    """Where in logits [n, V] the entry is that has this rank [n, 1] in scores [n, M], their highest in
    descending order -> int64 [n]. Equal ones count in the order of their places."""
    score = scores.gather(1, rank)
    num_before = rank - (scores > score).sum(1, keepdim=True)
    return _first_above((logits == score).cumsum(1), num_before).squeeze(1)
