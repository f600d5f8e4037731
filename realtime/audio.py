"""Samples on their way out: down-mix, resampling, PCM bytes, WAV files.

Everything is a stream. `num_samples` always counts sample frames: a stereo sample is one.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO, Literal, Self

import numpy as np
import numpy.typing as npt
import soxr

Encoding = Literal["pcm_s16le", "pcm_f32le"]
Samples = npt.NDArray[np.float32]  # [num_samples, channels], full scale is 1.0

ENCODINGS: tuple[Encoding, ...] = ("pcm_s16le", "pcm_f32le")
SAMPLE_RATES = (8_000, 16_000, 22_050, 24_000, 44_100, 48_000)
SAMPLE_BYTES: dict[str, int] = {"pcm_s16le": 2, "pcm_f32le": 4}

# The variable-rate engine filters in the time domain: it holds back 5 ms of input at 48 to 24 or
# 44.1 kHz, 13 ms to 22.05 or 16 kHz and 28 ms to 8 kHz, where the usual engine works in blocks of 38 ms
# (158 ms to 8 kHz) that would come off the first frame's audio. It costs 6 ms of CPU per second of audio
# at most, passes 95 % of the band and shifts the sound by 0.2 ms at most, the same all through.
_QUALITY = "HQ"


class PcmEncoder:
    """One context's samples from the model's format to the client's.

    However the input is cut, the output is the same; in all it is exactly
    `round(num_samples_in * sample_rate / native_rate)` sample frames.
    """

    def __init__(
        self, native_rate: int, native_channels: int, sample_rate: int, channels: int, encoding: Encoding
    ) -> None:
        assert channels in (1, native_channels) or native_channels == 1, (native_channels, channels)
        self._native_rate = native_rate
        self._native_channels = native_channels
        self._sample_rate = sample_rate
        self._channels = channels
        self._encoding = encoding
        self._resampler: soxr.ResampleStream | None = None
        if native_rate != sample_rate:
            self._resampler = soxr.ResampleStream(
                native_rate,
                sample_rate,
                min(native_channels, channels),
                dtype="float32",
                quality=_QUALITY,
                vr=True,
            )
        self.num_samples_in = 0
        self.num_samples_out = 0

    def encode(self, pcm: Samples) -> bytes:
        """What can be told of [num_samples, native_channels] so far; whole sample frames only.

        NaN becomes silence here, before it could stay in the filter for ever.
        """
        assert pcm.ndim == 2 and pcm.shape[1] == self._native_channels, (pcm.shape, self._native_channels)
        self.num_samples_in += len(pcm)
        pcm = np.nan_to_num(pcm, nan=0.0, posinf=1.0, neginf=-1.0)
        if self._channels < self._native_channels:
            pcm = pcm.mean(axis=1, keepdims=True, dtype=np.float32)
        if self._resampler is not None:
            pcm = self._resampler.resample_chunk(np.ascontiguousarray(pcm))
        return self._to_bytes(pcm)

    def silence(self, num_samples: int) -> bytes:
        """`num_samples` of silence at the model's rate, through the same filter as the sound around it."""
        return self.encode(np.zeros((num_samples, self._native_channels), np.float32))

    def flush(self) -> bytes:
        """The end of the stream, still held by the filter. Nothing may be encoded afterwards."""
        if self._resampler is None:
            return b""
        channels = min(self._native_channels, self._channels)
        tail = self._resampler.resample_chunk(np.zeros((0, channels), np.float32), last=True)
        num_missing = (
            round(self.num_samples_in * self._sample_rate / self._native_rate) - self.num_samples_out
        )
        assert num_missing >= 0, (self.num_samples_in, self.num_samples_out)
        padding = max(num_missing - len(tail), 0)  # the resampler rounds its count down
        return self._to_bytes(np.pad(tail[:num_missing], ((0, padding), (0, 0))))

    def _to_bytes(self, pcm: Samples) -> bytes:
        self.num_samples_out += len(pcm)
        if self._channels > pcm.shape[1]:
            pcm = np.repeat(pcm, self._channels, axis=1)
        if self._encoding == "pcm_f32le":
            return pcm.astype("<f4", copy=False).tobytes()
        # Clipping comes first: a cast of what is out of range would wrap around and flip the sign.
        scaled: Samples = np.clip(pcm * np.float32(32768), -32768, 32767)
        return np.rint(scaled, out=scaled).astype("<i2").tobytes()


# ---- WAV

_UNKNOWN_SIZE = 0xFFFFFFFF  # what readers take as "until the end of the stream"
_FORMAT_TAGS: dict[Encoding, int] = {"pcm_s16le": 1, "pcm_f32le": 3}


def wav_header(sample_rate: int, channels: int, encoding: Encoding, num_samples: int | None = None) -> bytes:
    """A RIFF header for the given length, or for a stream whose end is not known yet (None)."""
    width = SAMPLE_BYTES[encoding]
    unit = width * channels
    data_bytes = _UNKNOWN_SIZE if num_samples is None else min(num_samples * unit, _UNKNOWN_SIZE)
    fmt = struct.pack(
        "<HHIIHH", _FORMAT_TAGS[encoding], channels, sample_rate, sample_rate * unit, unit, 8 * width
    )
    if encoding == "pcm_f32le":  # other formats than PCM: an extension size and the length in samples
        fmt += struct.pack("<H", 0)
        fact = b"fact" + struct.pack("<II", 4, data_bytes // unit)
    else:
        fact = b""
    chunks = b"WAVEfmt " + struct.pack("<I", len(fmt)) + fmt + fact + b"data" + struct.pack("<I", data_bytes)
    return b"RIFF" + struct.pack("<I", min(len(chunks) + data_bytes, _UNKNOWN_SIZE)) + chunks


def write_wav(path: Path | str, pcm: bytes, sample_rate: int, channels: int, encoding: Encoding) -> None:
    """Writes a whole WAV file."""
    num_samples = len(pcm) // (SAMPLE_BYTES[encoding] * channels)
    Path(path).write_bytes(wav_header(sample_rate, channels, encoding, num_samples) + pcm)


class WavWriter:
    """A WAV written as it comes; the file stays the caller's.

    The sizes are put right at the end where the file can seek; a pipe keeps those of a stream.
    """

    def __init__(self, file: BinaryIO, sample_rate: int, channels: int, encoding: Encoding) -> None:
        self._file = file
        self._format = (sample_rate, channels, encoding)
        self._start = file.tell() if file.seekable() else None
        self._pcm_bytes = 0
        file.write(wav_header(*self._format))

    def write(self, pcm: bytes) -> None:
        self._file.write(pcm)
        self._pcm_bytes += len(pcm)

    def close(self) -> None:
        if self._start is not None:
            _, channels, encoding = self._format
            num_samples = self._pcm_bytes // (SAMPLE_BYTES[encoding] * channels)
            self._file.seek(self._start)
            self._file.write(wav_header(*self._format, num_samples))
            self._file.seek(0, 2)
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
