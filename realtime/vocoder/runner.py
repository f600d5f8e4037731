"""Runs a vocoder step: codes of several slots to sound. The only part of the vocoder with tensors."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from realtime.graphs import Graphs, bucket_of, buckets, own_stream
from realtime.models.base import CodecDecoder, ModelSpec
from realtime.vocoder.policy import STEP_FRAMES

# Wider steps are two: on a device that is full a wider one is no cheaper, and its work space is large.
MAX_WIDTH = 16

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Launched:
    """The sound of a step, float32 [n, T * hop, channels], on its way to the host: there at `event`."""

    pcm: Tensor
    event: torch.cuda.Event | None


class CodecRunner:
    """Owns the codec state of every slot, allocated once. On a CUDA device `launch` waits for nothing, and
    `num_ahead` further steps may be launched before one is collected; on a CPU all is done at once."""

    def __init__(
        self,
        spec: ModelSpec,
        decoder: CodecDecoder,
        num_slots: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self._device = torch.device(device)
        self._stream = own_stream(self._device)
        self.num_ahead = 0 if self._stream is None else 1
        self._codebooks = spec.codec_codebooks
        self._frame_shape = (spec.hop, spec.channels)
        self._decoder = decoder
        self._num_slots = num_slots
        self._state: Any = decoder.new_state(num_slots)
        self._graphs: Graphs | None = None
        self.widths = buckets(min(num_slots, MAX_WIDTH))

    @torch.inference_mode()
    def record(self, graphs: Graphs, sizes: Sequence[int] = STEP_FRAMES) -> None:
        """From here on steps of these numbers of frames are graphs, of a few widths. A lane that only fills
        one up is in the slot after the last, which is nobody's."""
        num_frames = self.widths[-1] * max(sizes)
        num_codebooks = self._codebooks.stop - self._codebooks.start
        # What steps read and write, whatever their shape.
        self._codes = torch.zeros(num_frames * num_codebooks, dtype=torch.int64, device=self._device)
        self._slots = torch.full((self.widths[-1],), self._num_slots, dtype=torch.int64, device=self._device)
        self._pcm = torch.zeros(num_frames * math.prod(self._frame_shape), device=self._device)
        self._num_codebooks = num_codebooks
        for width in reversed(self.widths):
            began_s = time.monotonic()
            for size in sorted(sizes, reverse=True):
                graphs.add((width, size), partial(self._step, width, size))
            logger.info("graphs of codec steps of %d slots: %.1f s", width, time.monotonic() - began_s)
        self._graphs = graphs

    def reset(self, slot: int, seed: int) -> None:
        """Makes a slot equal to a fresh one."""
        with torch.cuda.stream(self._stream):
            self._decoder.reset(self._state, slot, seed)

    @torch.inference_mode()
    def launch(self, frames: npt.NDArray[np.int64], slots: list[int]) -> Launched:
        """frames [n, T, K] of n slots."""
        codes = torch.from_numpy(frames[..., self._codebooks]).transpose(1, 2)  # [n, C, T]
        with torch.cuda.stream(self._stream):
            if self._graphs is None:
                pcm = self._decode(self._sent(codes), self._sent(torch.tensor(slots)))
            else:
                pcm = self._replay(self._graphs, codes, slots)
            if self._stream is None:
                return Launched(pcm if self._graphs is None else pcm.clone(), None)
            # Pinned memory comes from a pool that waits for the copy before it gives it away again.
            host = torch.empty(pcm.shape, pin_memory=True).copy_(pcm, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            return Launched(host, event)

    def collect(self, launched: Launched) -> list[npt.NDArray[np.float32]]:
        """Per slot float32 [T * hop, channels]; waits for this step and for no later one."""
        if launched.event is None:
            return list(launched.pcm.numpy())
        launched.event.synchronize()
        return [sound.copy() for sound in launched.pcm.numpy()]

    def run(self, frames: npt.NDArray[np.int64], slots: list[int]) -> list[npt.NDArray[np.float32]]:
        """A step by itself."""
        return self.collect(self.launch(frames, slots))

    # ---- on the device

    def _decode(self, codes: Tensor, slots: Tensor) -> Tensor:
        """codes [n, C, T] -> float32 [n, T * hop, channels]."""
        return self._decoder.decode(codes, self._state, slots).transpose(1, 2).contiguous()

    def _replay(self, graphs: Graphs, codes: Tensor, slots: list[int]) -> Tensor:
        """By a graph of the next larger width, if there is one."""
        n, _, size = codes.shape
        width = bucket_of(n, self.widths)
        recording = graphs.find((width, size))
        if recording is None:
            return self._decode(self._sent(codes), self._sent(torch.tensor(slots)))
        pads = [self._num_slots] * (width - n)
        self._lanes(width, size)[0][:n].copy_(self._sent(codes))
        self._slots[:width].copy_(self._sent(torch.tensor(slots + pads)))
        recording.replay()
        return self._lanes(width, size)[1][:n]

    def _step(self, width: int, size: int) -> None:
        codes, pcm = self._lanes(width, size)
        pcm.copy_(self._decode(codes, self._slots[:width]))

    def _lanes(self, width: int, size: int) -> tuple[Tensor, Tensor]:
        """Where a step of this shape finds its codes [width, C, T] and leaves its sound."""
        hop, channels = self._frame_shape
        codes = self._codes[: width * self._num_codebooks * size].view(width, self._num_codebooks, size)
        pcm = self._pcm[: width * size * hop * channels].view(width, size * hop, channels)
        return codes, pcm

    def _sent(self, values: Tensor) -> Tensor:
        """On the device, without waiting for what it does now."""
        if self._stream is None:
            return values.contiguous()
        return values.contiguous().pin_memory().to(self._device, non_blocking=True)
