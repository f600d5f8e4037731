from __future__ import annotations

import io
import struct
import wave
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realtime.audio import SAMPLE_RATES, Encoding, PcmEncoder, WavWriter, wav_header, write_wav

RATES = (48_000, 24_000)


def sine(num_samples: int, rate: int = 48_000, channels: int = 1) -> npt.NDArray[np.float32]:
    phase = 2 * np.pi * 440 * np.arange(num_samples)[:, None] / rate * np.arange(1, channels + 1)
    return (0.5 * np.sin(phase)).astype(np.float32)


def encode(encoder: PcmEncoder, pcm: npt.NDArray[np.float32], chunk: int) -> bytes:
    pieces = [encoder.encode(pcm[i : i + chunk]) for i in range(0, len(pcm), chunk)]
    return b"".join(pieces) + encoder.flush()


def s16(data: bytes) -> npt.NDArray[np.int16]:
    return np.frombuffer(data, "<i2")


@pytest.mark.parametrize("rate", SAMPLE_RATES)
@pytest.mark.parametrize("native_rate", RATES)
@pytest.mark.parametrize("chunk", [1, 7, 480, 4096])
def test_any_chunking_gives_the_same_samples_and_the_exact_count(
    native_rate: int, rate: int, chunk: int
) -> None:
    pcm = sine(native_rate // 4 + 7, native_rate)
    whole = s16(encode(PcmEncoder(native_rate, 1, rate, 1, "pcm_s16le"), pcm, len(pcm)))
    cut = s16(encode(PcmEncoder(native_rate, 1, rate, 1, "pcm_s16le"), pcm, chunk))

    assert len(whole) == len(cut) == round(len(pcm) * rate / native_rate)
    assert np.abs(whole.astype(int) - cut).max() <= 1


@settings(max_examples=40, deadline=None)
@given(
    num_samples=st.integers(0, 5000),
    rate=st.sampled_from(SAMPLE_RATES),
    native_rate=st.sampled_from(RATES),
    channels=st.sampled_from([1, 2]),
    cuts=st.lists(st.integers(0, 900), max_size=8),
)
def test_count_is_exact_for_any_length(
    num_samples: int, rate: int, native_rate: int, channels: int, cuts: list[int]
) -> None:
    encoder = PcmEncoder(native_rate, 1, rate, channels, "pcm_f32le")
    pcm = sine(num_samples)
    num_bytes = start = 0
    for cut in [*cuts, num_samples]:
        piece = encoder.encode(pcm[start : start + cut])
        assert len(piece) % (4 * channels) == 0
        num_bytes += len(piece)
        start += cut
    num_bytes += len(encoder.flush())

    assert encoder.num_samples_in == num_samples
    assert encoder.num_samples_out == round(num_samples * rate / native_rate)
    assert num_bytes == 4 * channels * encoder.num_samples_out


@pytest.mark.parametrize("rate", SAMPLE_RATES)
def test_a_tone_keeps_its_pitch_and_level(rate: int) -> None:
    out = s16(encode(PcmEncoder(48_000, 1, rate, 1, "pcm_s16le"), sine(48_000), 3840)) / 32768
    spectrum = np.abs(np.fft.rfft(out)) * 2 / len(out)

    assert np.argmax(spectrum) == 440
    assert spectrum[440] == pytest.approx(0.5, abs=0.002)


@pytest.mark.parametrize("rate", SAMPLE_RATES)
def test_the_first_80_ms_give_audio_at_every_rate(rate: int) -> None:
    encoder = PcmEncoder(48_000, 1, rate, 1, "pcm_s16le")
    encoder.encode(sine(3840))

    assert encoder.num_samples_out >= 0.05 * rate


def test_equal_rates_pass_samples_through_at_once() -> None:
    pcm = sine(100, channels=2)
    encoder = PcmEncoder(48_000, 2, 48_000, 2, "pcm_f32le")

    assert encoder.encode(pcm) == pcm.tobytes()
    assert encoder.flush() == b""


def test_clipping_is_monotonic_and_never_flips_the_sign() -> None:
    levels = [-np.inf, -9.0, -1.0001, -1.0, -0.5, -1e-9, 0.0, 1e-9, 0.5, 0.99999, 1.0, 1.02, 9.0, np.inf]
    out = s16(PcmEncoder(48_000, 1, 48_000, 1, "pcm_s16le").encode(np.array(levels, np.float32)[:, None]))

    assert list(out) == sorted(out)
    assert out[0] == -32768 and out[-1] == 32767
    assert all(value * level >= 0 for value, level in zip(out[1:-1].astype(int), levels[1:-1], strict=True))


@pytest.mark.parametrize("encoding", ["pcm_s16le", "pcm_f32le"])
def test_nan_is_silence_and_does_not_stay_in_the_filter(encoding: Encoding) -> None:
    pcm = sine(9600)
    pcm[100] = np.nan
    data = encode(PcmEncoder(48_000, 1, 16_000, 1, encoding), pcm, 480)
    out = np.frombuffer(data, "<i2" if encoding == "pcm_s16le" else "<f4")

    assert np.isfinite(out).all()
    assert np.abs(out[-1000:]).max() > 0


def test_stereo_becomes_the_mean_and_mono_is_doubled() -> None:
    stereo = sine(4800, channels=2)
    mean = stereo.mean(axis=1, keepdims=True)
    down = encode(PcmEncoder(48_000, 2, 24_000, 1, "pcm_s16le"), stereo, 480)
    mono = encode(PcmEncoder(48_000, 1, 24_000, 1, "pcm_s16le"), mean, 4800)
    up = s16(encode(PcmEncoder(48_000, 1, 24_000, 2, "pcm_s16le"), mean, 777)).reshape(-1, 2)

    assert len(down) == len(mono) == 2 * 2400
    assert np.abs(s16(down).astype(int) - s16(mono)).max() <= 1
    assert (up[:, 0] == up[:, 1]).all()
    assert (up[:, 0] == s16(mono)).all()


def test_stereo_stays_interleaved() -> None:
    stereo = sine(48_000, channels=2)
    out = s16(encode(PcmEncoder(48_000, 2, 16_000, 2, "pcm_s16le"), stereo, 999)).reshape(-1, 2)

    assert [np.argmax(np.abs(np.fft.rfft(out[:, i]))) for i in (0, 1)] == [440, 880]


def test_silence_goes_through_the_same_filter() -> None:
    pcm = np.concatenate([sine(1000), np.zeros((777, 1), np.float32), sine(2000)])
    whole = encode(PcmEncoder(48_000, 1, 22_050, 1, "pcm_s16le"), pcm, len(pcm))
    encoder = PcmEncoder(48_000, 1, 22_050, 1, "pcm_s16le")
    pieces = [encoder.encode(pcm[:1000]), encoder.silence(777), encoder.encode(pcm[1777:]), encoder.flush()]

    assert b"".join(pieces) == whole


# ---- WAV


def test_header_of_s16_is_the_canonical_44_bytes() -> None:
    expected = b"RIFF" + struct.pack("<I", 36 + 40) + b"WAVEfmt "
    expected += struct.pack("<IHHIIHH", 16, 1, 2, 24_000, 96_000, 4, 16) + b"data" + struct.pack("<I", 40)

    assert wav_header(24_000, 2, "pcm_s16le", 10) == expected


def test_header_of_f32_names_the_float_format_and_counts_samples() -> None:
    header = wav_header(48_000, 1, "pcm_f32le", 10)

    assert struct.unpack_from("<IHHIIHHH", header, 16) == (18, 3, 1, 48_000, 192_000, 4, 32, 0)
    assert header[38:] == b"fact" + struct.pack("<II", 4, 10) + b"data" + struct.pack("<I", 40)
    assert struct.unpack_from("<I", header, 4)[0] == len(header) - 8 + 40


def test_a_streamed_header_says_that_the_end_is_not_known() -> None:
    header = wav_header(8000, 1, "pcm_s16le")

    assert header[4:8] == header[40:44] == b"\xff\xff\xff\xff"


def test_a_written_file_reads_back(tmp_path: Path) -> None:
    pcm = np.arange(-50, 50, dtype="<i2").tobytes()
    write_wav(tmp_path / "a.wav", pcm, 16_000, 1, "pcm_s16le")
    with wave.open(str(tmp_path / "a.wav")) as wav:
        assert (wav.getframerate(), wav.getnchannels(), wav.getnframes()) == (16_000, 1, 100)
        assert wav.readframes(100) == pcm


def test_the_writer_puts_sizes_right_where_the_file_can_seek() -> None:
    file = io.BytesIO()
    with WavWriter(file, 16_000, 1, "pcm_s16le") as wav:
        wav.write(b"\1\0" * 3)
        wav.write(b"\2\0" * 4)

    assert file.getvalue() == wav_header(16_000, 1, "pcm_s16le", 7) + b"\1\0" * 3 + b"\2\0" * 4


def test_the_writer_leaves_a_pipe_as_a_stream() -> None:
    class Pipe(io.BytesIO):
        def seekable(self) -> bool:
            return False

    file = Pipe()
    with WavWriter(file, 16_000, 1, "pcm_f32le") as wav:
        wav.write(bytes(8))

    assert file.getvalue() == wav_header(16_000, 1, "pcm_f32le") + bytes(8)
