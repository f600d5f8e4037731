"""Batched, seeded sampling: one choice per row and codebook, no Python loop over rows.

The only random number of a choice is a uniform made on the host from (seed, segment, frame,
codebook), so what a row draws depends on nothing but itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from realtime.messages import SamplingParams
from realtime.models.base import SamplingDefaults

MAX_TOP_K = 64  # always this many candidates: a width that follows the neighbours would round by them


def uniforms(
    seeds: npt.NDArray[np.uint64],
    segments: npt.NDArray[np.uint64],
    frames: npt.NDArray[np.uint64],
    num_codebooks: int,
) -> npt.NDArray[np.float32]:
    """[n, K] in [0, 1 - 2^-20], a function of its arguments alone (SplitMix64's finaliser,
    Steele, Lea & Flood 2014, over a combined key)."""
    # The seed is mixed first: neighbouring seeds must not give each other's draws, one codebook on.
    key = (_mixed(seeds) ^ (segments << np.uint64(40))) + (frames << np.uint64(8))
    x = _mixed(key[:, None] + np.arange(num_codebooks, dtype=np.uint64))
    # 20 bits: u * total stays below the total in float32.
    draws: npt.NDArray[np.float32] = (x >> np.uint64(44)).astype(np.float32) * np.float32(2.0**-20)
    return draws


def _mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = x * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Sampler:
    """Sampling settings of every row, and the choice of codes for a batch of them.

    `prepare` is told the batch; `pick` is called once per codebook; `commit` remembers the frame
    for the repetition penalty.
    """

    def __init__(self, defaults: SamplingDefaults, codec_codebooks: slice, rows: int) -> None:
        num_codebooks = len(defaults.temperature)
        self._defaults = defaults
        self._codec = codec_codebooks
        self._temperature = np.zeros((rows, num_codebooks), np.float32)
        self._top_k = np.zeros(rows, np.int64)
        self._top_p = np.zeros(rows, np.float32)
        self._penalty = np.ones(rows, np.float32)
        self._seed = np.zeros(rows, np.uint64)
        self._history = np.full((rows, defaults.penalty_window, num_codebooks), -1, np.int64)

    def set_row(self, row: int, params: SamplingParams) -> None:
        """Everything of the stream before is forgotten."""
        d = self._defaults
        self._temperature[row] = d.temperature
        if params.temperature is not None:
            self._temperature[row, self._codec] = params.temperature
        self._top_k[row] = min(params.top_k or d.top_k, MAX_TOP_K)
        self._top_p[row] = d.top_p if params.top_p is None else params.top_p
        self._penalty[row] = (
            d.repetition_penalty if params.repetition_penalty is None else params.repetition_penalty
        )
        self._seed[row] = np.uint64(params.seed & 0xFFFF_FFFF_FFFF_FFFF)
        self.start_segment(row)

    def start_segment(self, row: int) -> None:
        self._history[row] = -1

    def prepare(
        self, rows: Sequence[int], segments: Sequence[int], frames: Sequence[int], allow_eos: Sequence[bool]
    ) -> None:
        """The batch whose codes are picked next; segments and frames count from 0 in the stream
        and in the segment."""
        index = np.asarray(rows)
        temperature = self._temperature[index]
        self._rows = index
        self._sampled = (temperature > 0).any(axis=0)  # [K]
        u = uniforms(
            self._seed[index],
            np.asarray(segments, np.uint64),
            np.asarray(frames, np.uint64),
            temperature.shape[1],
        )
        # A greedy row among sampled ones draws 0: the first, likeliest candidate.
        self._u = np.where(temperature > 0, u, np.float32(0))
        self._scale = 1 / np.where(temperature > 0, temperature, np.float32(1))
        top_k, top_p, penalty = self._top_k[index], self._top_p[index], self._penalty[index]
        self._cut = np.where(np.arange(MAX_TOP_K) < top_k[:, None], np.float32(0), np.float32(-np.inf))
        self._drop = (1 - top_p)[:, None] if (top_p < 1).any() else None
        self._factor = torch.from_numpy(penalty).unsqueeze(1) if (penalty != 1).any() else None
        self._lines = np.arange(len(index))
        self._eos = torch.from_numpy(np.where(np.asarray(allow_eos), np.float32(0), np.float32(-np.inf)))

    def pick(self, codebook: int, logits: Tensor) -> Tensor:
        """logits float32 [n, V] -> index int64 [n]. The last entry of codebook 0 is the end of
        speech. Order: penalty, temperature, top-k, top-p (the tail whose total is at most
        1 - top_p goes; the likeliest always stays)."""
        if codebook == 0:
            logits[:, -1] += self._eos
        if self._factor is not None:
            logits = self._penalised(codebook, logits, self._factor)
        if not self._sampled[codebook]:
            return logits.argmax(-1)
        width = min(MAX_TOP_K, logits.shape[1])
        values, indices = torch.topk(logits, width, dim=-1)
        # What follows is small: NumPy's calls cost a third of torch's.
        scores = values.numpy()
        with np.errstate(invalid="ignore"):  # a row without a finite number; its frame is refused later
            weights = (scores - scores[:, :1]) * self._scale[:, codebook, None] + self._cut[:, :width]
        np.exp(weights, out=weights)
        cumulative = weights.cumsum(-1)
        if self._drop is not None:
            total = cumulative[:, -1:]
            keep = (total - cumulative + weights) > self._drop * total  # this candidate and all below it
            keep[:, 0] = True
            cumulative = (weights * keep).cumsum(-1)
        rank = (cumulative <= self._u[:, codebook, None] * cumulative[:, -1:]).sum(-1)
        return torch.from_numpy(indices.numpy()[self._lines, np.minimum(rank, width - 1)])

    def _penalised(self, codebook: int, logits: Tensor, factor: Tensor) -> Tensor:
        seen = torch.from_numpy(self._history[self._rows, :, codebook]) + 1  # 0 = nothing
        mask = torch.zeros(logits.shape[0], logits.shape[1] + 1, dtype=torch.bool)
        # The end of speech has an id beyond the head's width; it is in no history.
        mask.scatter_(1, seen.clamp_(max=logits.shape[1]), True)
        return torch.where(mask[:, 1:], torch.where(logits < 0, logits * factor, logits / factor), logits)

    def commit(self, codes: npt.NDArray[np.int64]) -> None:
        """codes [n, K] of the prepared batch become history."""
        if self._factor is not None:
            self._history[self._rows] = np.roll(self._history[self._rows], -1, axis=1)
            self._history[self._rows, -1] = codes
