"""Wren's codec: codes to spectral frames, spectral frames to 48 kHz by harmonics plus noise.

Everything a stream carries from chunk to chunk is in `CodecState`, one index per slot; nothing
looks ahead, and neither the chunking nor the neighbours in a call change what a slot sounds like.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from realtime.errors import ModelError
from realtime.models.weights import Tensors

NOISE_TABLE_SIZE = 1 << 20  # 4 MB of Gaussian samples; each hop of each stream starts at its own place
FADE_BINS = (470, 511, -14.0)  # log gain falls on a line over these bins and stays there
NUM_BINS = FADE_BINS[1] + 1  # all that is heard: a gain of e^-14 beyond them is left out


@dataclass(frozen=True, slots=True)
class SpectralConfig:
    """`codec/config.json`; sizes in samples, rows (codec frames) and spectral frames."""

    sample_rate: int
    frame_rate: float
    hop: int
    num_codebooks: int
    codebook_size: int
    latent_dim: int
    row_dim: int
    row_kernel: int
    row_blocks: int
    frame_dim: int
    frame_kernel: int
    frame_blocks: int
    frames_per_row: int
    harmonic_bands: int
    noise_bands: int
    band_top_hz: float
    frame_hop: int
    window: int
    fft_size: int
    gain_harmonic: float
    gain_noise: float
    log_gain_min: float
    log_gain_max: float
    max_harmonic_hz: float
    voicing_threshold: float

    @classmethod
    def load(cls, path: Path) -> SpectralConfig:
        """Raises ModelError that names what is missing or does not fit."""
        try:
            raw = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} can't be read: {error}") from error
        names = [field.name for field in fields(cls)]
        missing = [name for name in names if name not in raw]
        if missing:
            raise ModelError(f"{path}: missing {', '.join(missing)}")
        config = cls(**{name: raw[name] for name in names})
        if config.hop != config.frame_hop * config.frames_per_row or config.window != 2 * config.frame_hop:
            raise ModelError(f"{path}: hop must be frame_hop * frames_per_row and window 2 * frame_hop")
        if round(config.frame_rate * config.hop) != config.sample_rate:
            raise ModelError(f"{path}: frame_rate * hop must be sample_rate")
        return config


class Linear:
    """A dense layer whose result for one row of input does not depend, to the bit, on how many
    rows come with it: that is what makes chunks sound like the whole.

    One product of the transposed weight has this property from two rows on.
    """

    def __init__(self, tensors: Tensors, name: str, size_out: int, size_in: int) -> None:
        self.weight = tensors.take(f"{name}.weight", size_out, size_in).t().contiguous()
        self.bias = tensors.take(f"{name}.bias", size_out)

    def __call__(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        rows = flat.shape[0]
        out = torch.addmm(self.bias, flat if rows > 1 else flat.expand(2, -1), self.weight)
        return out[:rows].view(*x.shape[:-1], -1)


class CausalBlocks:
    """Blocks of `h + proj(gelu(conv(h)))`; conv is one product over the last `kernel` steps."""

    def __init__(self, tensors: Tensors, prefix: str, num_blocks: int, dim: int, kernel: int) -> None:
        self.dim, self.past = dim, kernel - 1
        self.layers = [
            (
                Linear(tensors, f"{prefix}.{i}.conv", dim, kernel * dim),
                Linear(tensors, f"{prefix}.{i}.proj", dim, dim),
            )
            for i in range(num_blocks)
        ]

    def __call__(self, h: Tensor, history: Tensor) -> tuple[Tensor, Tensor]:
        """h [n, T, dim], history [n, blocks, kernel-1, dim] -> output and the next history."""
        steps = h.shape[1]
        kept = []
        for i, (conv, proj) in enumerate(self.layers):
            padded = torch.cat((history[:, i], h), dim=1)
            kept.append(padded[:, -self.past :])
            windows = torch.cat([padded[:, k : k + steps] for k in range(self.past + 1)], dim=-1)
            h = h + proj(F.gelu(conv(windows)))
        return h, torch.stack(kept, dim=1)


@dataclass(slots=True)
class CodecState:
    """What each slot carries, first dimension slots. `hop_index` counts spectral frames made."""

    rows: Tensor  # [slots, row blocks, kernel-1, row_dim]
    frames: Tensor  # [slots, frame blocks, kernel-1, frame_dim]
    tail: Tensor  # [slots, fft_size - frame_hop]
    excitation: Tensor  # [slots, frame_hop]
    f0: Tensor  # float64 [slots], NaN before the first frame
    voicing: Tensor  # float64 [slots]
    phase: Tensor  # float64 [slots], in turns, below 1
    hop_index: Tensor  # int64 [slots]
    seed: Tensor  # int64 [slots]


class SpectralCodec:
    """Decoder half of the codec; there is no encoder, the voice is built in."""

    def __init__(self, config: SpectralConfig, tensors: Tensors) -> None:
        c = config
        self.config = config
        codebooks = tensors.take("codebooks", c.num_codebooks, c.codebook_size, c.latent_dim)
        self.codebooks = codebooks.view(-1, c.latent_dim)
        self.code_offsets = torch.arange(c.num_codebooks).view(1, -1, 1) * c.codebook_size
        self.dec_in = Linear(tensors, "dec_in", c.row_dim, c.latent_dim)
        self.row_net = CausalBlocks(tensors, "dec", c.row_blocks, c.row_dim, c.row_kernel)
        self.up = Linear(tensors, "up", c.frames_per_row * c.frame_dim, c.row_dim)
        self.frame_net = CausalBlocks(tensors, "frame", c.frame_blocks, c.frame_dim, c.frame_kernel)
        num_values = 2 + c.harmonic_bands + c.noise_bands
        self.out = Linear(tensors, "out", num_values, c.frame_dim)
        self.scale, self.mean = tensors.take("scale", num_values), tensors.take("mean", num_values)

        self.window = torch.hann_window(c.window)
        self.ramp = (torch.arange(c.frame_hop, dtype=torch.float64) + 1) / c.frame_hop
        bins = c.fft_size // 2 + 1
        self.bands = torch.zeros(c.harmonic_bands + c.noise_bands, 2 * bins)  # both grids in one product
        self.bands[: c.harmonic_bands, :bins] = band_weights(c, c.harmonic_bands)
        self.bands[c.harmonic_bands :, bins:] = band_weights(c, c.noise_bands)
        first, last, low = FADE_BINS
        self.fade = torch.zeros(bins)
        self.fade[first : last + 1] = torch.linspace(0.0, low, last + 1 - first)
        self.fade[last + 1 :] = low
        self.fold = torch.zeros(c.fft_size)
        self.fold[0] = self.fold[c.fft_size // 2] = 1.0
        self.fold[1 : c.fft_size // 2] = 2.0
        generator = torch.Generator().manual_seed(0)
        self.noise = torch.randn(NOISE_TABLE_SIZE, generator=generator)

    def new_state(self, slots: int) -> CodecState:
        c = self.config
        return CodecState(
            rows=torch.zeros(slots, c.row_blocks, c.row_kernel - 1, c.row_dim),
            frames=torch.zeros(slots, c.frame_blocks, c.frame_kernel - 1, c.frame_dim),
            tail=torch.zeros(slots, c.fft_size - c.frame_hop),
            excitation=torch.zeros(slots, c.frame_hop),
            f0=torch.full((slots,), math.nan, dtype=torch.float64),
            voicing=torch.zeros(slots, dtype=torch.float64),
            phase=torch.zeros(slots, dtype=torch.float64),
            hop_index=torch.zeros(slots, dtype=torch.int64),
            seed=torch.zeros(slots, dtype=torch.int64),
        )

    def reset(self, state: CodecState, slot: int, seed: int) -> None:
        for field in fields(state):
            getattr(state, field.name)[slot] = 0
        state.f0[slot] = math.nan
        state.seed[slot] = seed & 0x7FFF_FFFF_FFFF_FFFF

    def decode(self, codes: Tensor, state: CodecState, slots: Tensor) -> Tensor:
        """codes int64 [n, C, T], slots int64 [n] without repeats -> float32 [n, 1, T * hop].

        The output runs one spectral hop behind: a stream's first 10 ms are silent and its last
        10 ms are never sent.
        """
        return self.synthesize(self.spectral(codes, state, slots), state, slots).unsqueeze(1)

    def spectral(self, codes: Tensor, state: CodecState, slots: Tensor) -> Tensor:
        """codes [n, C, T] -> spectral frames [n, T * frames_per_row, values]."""
        c = self.config
        n, _, steps = codes.shape
        z = F.embedding(codes + self.code_offsets, self.codebooks).sum(1)  # [n, T, latent]
        h, rows = self.row_net(self.dec_in(z), state.rows[slots])
        h = self.up(h).view(n, steps * c.frames_per_row, c.frame_dim)
        h, frames = self.frame_net(h, state.frames[slots])
        state.rows[slots] = rows
        state.frames[slots] = frames
        return self.out(h) * self.scale + self.mean

    def synthesize(self, spectral: Tensor, state: CodecState, slots: Tensor) -> Tensor:
        """Spectral frames [n, hops, values] -> float32 [n, hops * frame_hop]."""
        c = self.config
        n, hops, _ = spectral.shape
        current = self._excitation(spectral, state, slots)  # [n, hops, frame_hop]
        joined = torch.cat((state.excitation[slots].unsqueeze(1), current), dim=1)
        state.excitation[slots] = joined[:, -1]
        harmonic = torch.cat((joined[:, :-1], joined[:, 1:]), dim=-1)
        noise = self._noise(state, slots, hops)
        noise = torch.cat((noise[:, :-1], noise[:, 1:]), dim=-1)
        sources = torch.stack((harmonic * c.gain_harmonic, noise * c.gain_noise), dim=2) * self.window
        gains = self._minimum_phase(spectral)  # complex [n, hops, 2, NUM_BINS]
        spectrum = (torch.fft.rfft(sources, c.fft_size)[..., :NUM_BINS] * gains).sum(2)
        pieces = torch.fft.irfft(spectrum, c.fft_size)  # [n, hops, fft_size]
        state.hop_index[slots] += hops
        return self._overlap_add(pieces, state, slots)

    def _excitation(self, spectral: Tensor, state: CodecState, slots: Tensor) -> Tensor:
        """Band-limited pulses with the ramped fundamental; the phase is carried from hop to hop."""
        c = self.config
        f0 = torch.exp2(spectral[..., 0].double())
        voicing = (spectral[..., 1] > c.voicing_threshold).double()
        last_f0 = torch.where(state.f0[slots].isnan(), f0[:, 0], state.f0[slots])
        before_f0 = torch.cat((last_f0.unsqueeze(1), f0[:, :-1]), dim=1)
        before_v = torch.cat((state.voicing[slots].unsqueeze(1), voicing[:, :-1]), dim=1)
        state.f0[slots], state.voicing[slots] = f0[:, -1], voicing[:, -1]

        ramped = (
            before_f0.unsqueeze(-1) + (f0 - before_f0).unsqueeze(-1) * self.ramp
        )  # Hz [n, hops, frame_hop]
        turns = ramped.cumsum(-1) / c.sample_rate
        # One fraction per hop, in order: carrying it per chunk would let the chunking change a bit.
        carry = state.phase[slots].numpy()
        totals = turns[..., -1].numpy()
        starts = np.empty_like(totals)
        for j in range(totals.shape[1]):
            starts[:, j] = carry
            carry = (carry + totals[:, j]) % 1.0
        state.phase[slots] = torch.from_numpy(carry)

        p = (turns + torch.from_numpy(starts).unsqueeze(-1)).remainder_(1.0).mul_(2 * math.pi)
        harmonics = torch.floor(c.max_harmonic_hz / ramped) + 0.5
        low = 2 * torch.sin(p * 0.5)
        pulses = torch.where(low.abs() < 2e-3, harmonics, torch.sin(harmonics * p) / low) - 0.5
        amplitude = before_v.unsqueeze(-1) + (voicing - before_v).unsqueeze(-1) * self.ramp
        return (pulses * amplitude * 2).float()

    def _noise(self, state: CodecState, slots: Tensor, hops: int) -> Tensor:
        """Gaussian samples [n, hops + 1, frame_hop] from the hop before the chunk on: a function of
        the stream's seed and the hop alone (zero before the stream's first hop)."""
        c = self.config
        index = state.hop_index[slots].unsqueeze(1) + torch.arange(-1, hops)  # [n, hops + 1]
        start = mix(state.seed[slots].unsqueeze(1), index) % (NOISE_TABLE_SIZE - c.frame_hop)
        samples = self.noise[start.unsqueeze(-1) + torch.arange(c.frame_hop)]
        return samples * (index >= 0).unsqueeze(-1)

    def _minimum_phase(self, spectral: Tensor) -> Tensor:
        """Log gains of both band grids -> complex gains [n, hops, 2, NUM_BINS], by the real cepstrum."""
        c = self.config
        n, hops, _ = spectral.shape
        log_gain = (spectral[..., 2:].reshape(n * hops, -1) @ self.bands).view(n, hops, 2, -1)
        log_gain = log_gain.clamp_(c.log_gain_min, c.log_gain_max).add_(self.fade)
        cepstrum = torch.fft.irfft(log_gain, c.fft_size) * self.fold
        log_spectrum = torch.fft.rfft(cepstrum)[..., :NUM_BINS]
        log_size, angle = torch.view_as_real(log_spectrum).unbind(-1)
        size = log_size.exp()
        gains = torch.empty(*size.shape, 2)  # torch.polar computes the same without vector instructions
        torch.mul(size, angle.cos(), out=gains[..., 0])
        torch.mul(size, angle.sin(), out=gains[..., 1])
        return torch.view_as_complex(gains)

    def _overlap_add(self, pieces: Tensor, state: CodecState, slots: Tensor) -> Tensor:
        """pieces [n, hops, fft_size], each starting one hop after the one before."""
        c = self.config
        n, hops, _ = pieces.shape
        parts = -(-c.fft_size // c.frame_hop)  # hops that a piece reaches into
        pieces = F.pad(pieces, (0, parts * c.frame_hop - c.fft_size)).view(n, hops, parts, c.frame_hop)
        total = pieces.new_zeros(n, hops + parts - 1, c.frame_hop)
        total.view(n, -1)[:, : c.fft_size - c.frame_hop] = state.tail[slots]
        for part in reversed(range(parts)):  # oldest first, so that sums round the same in any chunking
            total[:, part : part + hops] += pieces[:, :, part]
        flat = total.view(n, -1)
        done = hops * c.frame_hop
        state.tail[slots] = flat[:, done : done + c.fft_size - c.frame_hop]
        return flat[:, :done]


def band_weights(config: SpectralConfig, num_bands: int) -> Tensor:
    """[bands, bins]: how much each band counts in each FFT bin, linear between band centres that
    lie evenly in mel from 0 to `band_top_hz`; nothing above."""
    top_mel = 2595 * math.log10(1 + config.band_top_hz / 700)
    centres = 700 * (10 ** (torch.linspace(0, top_mel, num_bands, dtype=torch.float64) / 2595) - 1)
    hz = torch.arange(config.fft_size // 2 + 1, dtype=torch.float64) * config.sample_rate / config.fft_size
    upper = torch.searchsorted(centres, hz).clamp_(1, num_bands - 1)
    low, high = centres[upper - 1], centres[upper]
    share = ((hz - low) / (high - low)).clamp_(0, 1)
    weights = torch.zeros(num_bands, hz.numel(), dtype=torch.float64)
    columns = torch.arange(hz.numel())
    weights[upper - 1, columns] = 1 - share
    weights[upper, columns] += share
    weights[:, hz > config.band_top_hz + 1e-6] = 0
    return weights.float()


def mix(seed: Tensor, index: Tensor) -> Tensor:
    """A well-spread non-negative int64 from two int64 (two rounds of xorshift and multiply)."""
    x = (index + 1) * -7046029254386353131 + seed
    for factor in (-4658895280553007687, -7723592293110705685):
        x = (x ^ ((x >> 31) & 0x1_FFFF_FFFF)) * factor
    return (x ^ ((x >> 29) & 0x7_FFFF_FFFF)) & 0x7FFF_FFFF_FFFF_FFFF
