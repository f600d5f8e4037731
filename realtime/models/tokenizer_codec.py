"""MOSS-Audio-Tokenizer v1, v2 and Nano: a folder in the official format to a decoder and an encoder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from realtime.errors import ModelError
from realtime.models.codec_config import CodecConfig
from realtime.models.codec_encoder import TokenizerEncoder
from realtime.models.codec_quantizer import Quantizer
from realtime.models.codec_stage import CodecState, Stack
from realtime.models.weights import Tensors


def pass_frames(device: torch.device) -> int:
    """Most frames of one pass, which decides how much longer than its window a ring is. A processor
    gains nothing from more, and attends over all of a ring; a device wants few passes."""
    return 8 if device.type == "cpu" else 25


class TokenizerDecoder:
    """Codes to sound, at once and without delay: T frames give T * hop samples per channel.

    Every query of every stage sees exactly its window of the official definition, so any split into
    chunks sounds like the whole. That also holds for v1, whose official streaming forgets keys too
    early once a window is full and then depends on the chunk size.
    """

    def __init__(self, config: CodecConfig, stack: Stack, quantizer: Quantizer) -> None:
        self.config, self.stack, self.quantizer = config, stack, quantizer

    def new_state(self, slots: int) -> CodecState:
        return self.stack.new_state(slots)

    def reset(self, state: CodecState, slot: int, seed: int) -> None:
        """Makes a slot equal to a fresh one; there is no noise that a seed could fix."""
        self.stack.reset(state, slot)

    def decode(self, codes: Tensor, state: CodecState, slots: Tensor) -> Tensor:
        """codes int64 [n, C, T] of the first C codebooks, slots int64 [n] without repeats ->
        float32 [n, channels, T * hop], not clipped.

        A lane that only fills up a fixed width has the slot number `slots` of `new_state`, as often as
        needed. Up to `pass_frames` of T are one pass without a word to the host.
        """
        n, _, num_frames = codes.shape
        slots = slots.to(self.stack.device)
        z = self.quantizer.decode(codes.to(self.stack.device))
        num_passes = -(-num_frames // self.stack.pass_frames)
        sizes = [(num_frames + i) // num_passes for i in range(num_passes)]
        passes = [
            self.stack.run(piece, state, slots, size)
            for piece, size in zip(torch.split(z, sizes, dim=1), sizes, strict=True)
        ]
        interleaved = passes[0] if num_passes == 1 else torch.cat(passes, dim=1)
        return interleaved.view(n, num_frames * self.config.hop, self.config.channels).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class Codec:
    """A loaded codec. Both halves share the quantizer's weights and nothing that changes."""

    config: CodecConfig
    decoder: TokenizerDecoder
    encoder: TokenizerEncoder
    num_quantizers: int

    @property
    def sample_rate(self) -> int:
        return self.config.sample_rate

    @property
    def channels(self) -> int:
        return self.config.channels

    @property
    def hop(self) -> int:
        return self.config.hop

    @property
    def frame_rate(self) -> float:
        return self.config.frame_rate

    @property
    def codebook_size(self) -> int:
        return self.config.quantizer.codebook_size


def load_codec(folder: Path, device: torch.device, dtype: torch.dtype, *, num_quantizers: int) -> Codec:
    """The codec in `folder` with its first `num_quantizers` codebooks; raises ModelError."""
    config = CodecConfig.load(folder / "config.json")
    if num_quantizers > config.quantizer.num_quantizers:
        raise ModelError(
            f"{folder}: the model speaks {num_quantizers} codebooks,"
            f" this codec has {config.quantizer.num_quantizers}"
        )
    return build_codec(
        Tensors(folder, dtype=torch.float32, device=device), config, device, dtype, num_quantizers
    )


def build_codec(
    tensors: Tensors, config: CodecConfig, device: torch.device, dtype: torch.dtype, num_quantizers: int
) -> Codec:
    quantizer = Quantizer(tensors, config.quantizer, num_quantizers)
    frames = pass_frames(device)
    encoder, decoder = (
        Stack(
            tensors,
            stages,
            frames,
            device,
            dtype,
            may_lack_projections=config.is_first_generation,
            is_down=stages is config.encoder,
        )
        for stages in (config.encoder, config.decoder)
    )
    tensors.finish()
    return Codec(
        config=config,
        decoder=TokenizerDecoder(config, decoder, quantizer),
        encoder=TokenizerEncoder(config, encoder, quantizer),
        num_quantizers=num_quantizers,
    )
