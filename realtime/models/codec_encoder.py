"""Encoder half of MOSS-Audio-Tokenizer: reference sounds to codes.

Works in passes of bounded memory that give what one pass over the whole sound would; its state lives
as long as a call, so it may run on another thread than the decoder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from realtime.models.codec_config import CodecConfig
from realtime.models.codec_quantizer import Quantizer
from realtime.models.codec_stage import Stack

MAX_BATCH = 8  # sounds encoded side by side: each holds a state of tens of megabytes


class TokenizerEncoder:
    def __init__(self, config: CodecConfig, stack: Stack, quantizer: Quantizer) -> None:
        self.config, self.stack, self._quantizer = config, stack, quantizer

    @torch.inference_mode()
    def encode(self, pcm: Sequence[npt.NDArray[np.float32]]) -> list[npt.NDArray[np.int16]]:
        """Sounds float32 [samples, channels] at the codec's rate, one channel where the codec has two
        counts twice -> codes int16 [frames, quantizers] of each.

        Only whole frames count: what is left at the end of a sound is not encoded, and a sound of less
        than a frame has no codes.
        """
        order = sorted(range(len(pcm)), key=lambda index: len(pcm[index]))  # like lengths side by side
        codes: list[npt.NDArray[np.int16]] = [np.zeros((0, 0), np.int16)] * len(pcm)
        for first in range(0, len(order), MAX_BATCH):
            batch = order[first : first + MAX_BATCH]
            for index, found in zip(batch, self._encode([pcm[index] for index in batch]), strict=True):
                codes[index] = found
        return codes

    def _encode(self, pcm: Sequence[npt.NDArray[np.float32]]) -> list[npt.NDArray[np.int16]]:
        sounds = [self._interleaved(sound) for sound in pcm]
        lengths = [sound.numel() // self.config.samples_per_frame for sound in sounds]
        heard: list[list[Tensor]] = [[] for _ in sounds]
        for lanes, latents in self.latents(sounds):
            codes = self._quantizer.encode(latents).to(torch.int16).cpu()
            for lane, frames in zip(lanes, codes, strict=True):
                heard[lane].append(frames)
        empty = torch.zeros(0, self._quantizer.num_quantizers, dtype=torch.int16)
        return [
            torch.cat([empty, *frames])[:length].numpy()
            for frames, length in zip(heard, lengths, strict=True)
        ]

    def _interleaved(self, sound: npt.NDArray[np.float32]) -> Tensor:
        """[samples, channels] -> [samples * channels], as the codec's channels follow one another."""
        assert sound.ndim == 2 and sound.shape[1] in (1, self.config.channels), sound.shape
        samples = torch.from_numpy(np.ascontiguousarray(sound, np.float32))
        return samples.expand(-1, self.config.channels).reshape(-1)

    def latents(self, sounds: Sequence[Tensor]) -> Iterator[tuple[list[int], Tensor]]:
        """Interleaved samples of several sounds -> per pass which sounds still had whole frames, and
        float32 [those, frames, code_dim] of each; shorter ones are filled up with silence."""
        size = self.config.samples_per_frame
        lengths = [sound.numel() // size for sound in sounds]
        state = self.stack.new_state(len(sounds))
        for start in range(0, max(lengths, default=0), self.stack.pass_frames):
            lanes = [lane for lane, length in enumerate(lengths) if length > start]
            num_frames = min(self.stack.pass_frames, max(lengths) - start)
            pieces = [sounds[lane][start * size : (start + num_frames) * size] for lane in lanes]
            x = torch.stack([F.pad(piece, (0, num_frames * size - piece.numel())) for piece in pieces])
            slots = torch.tensor(lanes, device=self.stack.device)
            x = x.to(self.stack.device).unsqueeze(-1)  # [lanes, samples, 1]
            yield lanes, self.stack.run(x, state, slots, num_frames)
