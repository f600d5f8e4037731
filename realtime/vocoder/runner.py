"""Runs a vocoder step: codes of several slots to sound. The only part of the vocoder with tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from realtime.models.base import CodecDecoder, ModelSpec


class CodecRunner:
    """Owns the codec state of every slot, allocated once."""

    def __init__(self, spec: ModelSpec, decoder: CodecDecoder, num_slots: int) -> None:
        self._codebooks = spec.codec_codebooks
        self._decoder = decoder
        self._state: Any = decoder.new_state(num_slots)

    def reset(self, slot: int, seed: int) -> None:
        """Makes a slot equal to a fresh one."""
        self._decoder.reset(self._state, slot, seed)

    @torch.inference_mode()
    def run(self, frames: npt.NDArray[np.int64], slots: list[int]) -> list[npt.NDArray[np.float32]]:
        """frames [n, T, K] of n slots -> per slot float32 [T * hop, channels]."""
        codes = torch.from_numpy(frames[..., self._codebooks]).transpose(1, 2).contiguous()
        pcm = self._decoder.decode(codes, self._state, torch.tensor(slots))
        return [sound.t().contiguous().numpy() for sound in pcm]
