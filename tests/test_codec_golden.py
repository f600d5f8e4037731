"""MOSS-Audio-Tokenizer against what the official modules made of the same weights."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from codec_models import NAMES, by, cases, codec, groups, sound
from torch import Tensor

from realtime.models.codec_config import TransformerConfig
from realtime.models.codec_stage import Stack
from realtime.models.tokenizer_codec import Codec

AUDIO = 2e-6  # absolute, for sound of deviation 0.1
LATENT = 1e-5
FRAMES = 40
V1 = "codec_v1"

every = pytest.mark.parametrize("name", NAMES)
second_generation = pytest.mark.parametrize("name", NAMES[1:])
both_ways = pytest.mark.parametrize("gathers", [False, True], ids=["views", "gathers"])


def codes_of(name: str, key: str = "decode.codes") -> Tensor:
    """[C, n, T] as stored -> [n, C, T]."""
    return cases(name)[key].transpose(0, 1)


def waveform(name: str, key: str = "encode.waveform") -> npt.NDArray[np.float32]:
    """-> [samples, channels]."""
    stored = cases(name)[key]
    return stored.reshape(codec(name).channels, -1).t().contiguous().numpy()


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= tolerance


def run_stages(stack: Stack, x: Tensor, num_frames: int) -> list[Tensor]:
    """Each stage's output as golden data has it, [n, channels, tokens]."""
    outputs = stack.outputs(x, stack.new_state(1), torch.tensor([0]), num_frames)
    return [y.transpose(1, 2) for y in outputs]


@every
def test_windows_are_counted_as_officially(name: str) -> None:
    config = codec(name).config
    windows = {
        stage.name: stage.window
        for stage in (*config.encoder, *config.decoder)
        if isinstance(stage, TransformerConfig)
    }
    assert windows == groups(name)["windows"]["tokens"]


# ---- decode


@every
def test_the_quantizer_gives_the_official_vectors(name: str) -> None:
    z = codec(name).decoder.quantizer.decode(codes_of(name))
    assert_close(z.transpose(1, 2), cases(name)["decode.quantizer_out"], LATENT)


@every
@both_ways
def test_every_stage_of_the_decoder_gives_the_official_output(name: str, gathers: bool) -> None:
    decoder = codec(name, gathers, pass_frames=FRAMES).decoder
    outputs = run_stages(decoder.stack, decoder.quantizer.decode(codes_of(name)), FRAMES)
    assert len(outputs) == sum(key.startswith("decode.stage.") for key in cases(name))
    for i, output in enumerate(outputs):
        assert_close(output, cases(name)[f"decode.stage.{i}"], LATENT)


@every
@both_ways
def test_offline_sound_is_the_official_one_with_any_number_of_codebooks(name: str, gathers: bool) -> None:
    for key in [key for key in cases(name) if key.startswith("decode.audio")]:
        codes = codes_of(name)
        if "_nq" in key:
            codes = codes[:, : int(key.partition("_nq")[2])]
        if key == "decode.audio_2d":
            codes = codes[:, :, :7]
        for model in (codec(name, gathers), codec(name, gathers, pass_frames=FRAMES)):
            assert_close(sound(model, codes, [codes.shape[2]]), cases(name)[key], AUDIO)


def chunkings(name: str) -> list[tuple[str, list[int]]]:
    """Official streams and the chunks they were made of."""
    chunked = "decode.chunk_duration_1_75s" if name == V1 else "decode.chunk_duration_2s"
    return [
        ("decode.stream_1", by(1, FRAMES)),
        ("decode.stream_3", by(3, FRAMES)),
        ("decode.stream_ragged", groups(name)["decode"]["ragged"]),
        (chunked, by(7 if name == V1 else 8, FRAMES)),
    ]


@second_generation
@both_ways
def test_streamed_sound_is_the_official_stream(name: str, gathers: bool) -> None:
    for key, sizes in chunkings(name):
        assert_close(sound(codec(name, gathers), codes_of(name), sizes), cases(name)[key], AUDIO)


@both_ways
def test_streams_of_v1_are_its_offline_sound_and_the_official_ones_only_until_a_window_is_full(
    gathers: bool,
) -> None:
    # The official v1 streaming evicts before it attends: from then on it depends on its chunks.
    offline = cases(V1)["decode.audio"]
    hop = codec(V1).hop
    for key, sizes in chunkings(V1):
        ours, official = sound(codec(V1, gathers), codes_of(V1), sizes), cases(V1)[key]
        assert_close(ours, offline, AUDIO)
        equal_frames = 7 if sizes[0] == 1 and sizes[1] == 1 else 6
        assert_close(ours[..., : equal_frames * hop], official[..., : equal_frames * hop], AUDIO)
        assert (ours - official).abs().max() > 1e-3
    ours = sound(codec(V1, gathers), codes_of(V1)[:, :12], by(1, FRAMES))
    assert_close(ours, cases(V1)["decode.audio_nq12"], AUDIO)
    assert (ours - cases(V1)["decode.stream_1_nq12"]).abs().max() > 1e-3


def decode_together(model: Codec, codes: Tensor, lengths: list[int], size: int) -> list[Tensor]:
    """Rows of different lengths side by side, `size` frames a step where all that take part have them."""
    state = model.decoder.new_state(len(lengths))
    heard: list[list[Tensor]] = [[] for _ in lengths]
    start = 0
    while start < max(lengths):
        rows = [row for row, length in enumerate(lengths) if length > start]
        step = min([size, *(lengths[row] - start for row in rows)])
        pcm = model.decoder.decode(codes[rows, :, start : start + step], state, torch.tensor(rows))
        for row, piece in zip(rows, pcm, strict=True):
            heard[row].append(piece)
        start += step
    return [torch.cat(pieces, dim=1) for pieces in heard]


@every
@both_ways
@pytest.mark.parametrize("size", [1, 3, FRAMES])
def test_rows_of_a_batch_are_the_official_ones(name: str, gathers: bool, size: int) -> None:
    lengths = cases(name)["decode_batch.padding_mask"].sum(1).tolist()
    num_samples_of = cases(name)["decode_batch.audio_lengths"]
    if name != V1:
        assert torch.equal(num_samples_of, cases(name)["decode_batch.audio_chunked_lengths"])
    rows = decode_together(codec(name, gathers), codes_of(name, "decode_batch.codes"), lengths, size)
    for row, pcm in enumerate(rows):
        num_samples = int(num_samples_of[row])
        assert pcm.shape[1] == num_samples
        for key in ("decode_batch.audio", "decode_batch.audio_chunked"):
            if key in cases(name):
                assert_close(pcm, cases(name)[key][row, :, :num_samples], AUDIO)
    if name == V1:  # evicts too early, like one row alone
        assert (
            torch.stack([rows[0][:, :368], rows[1]]) - cases(V1)["decode_batch.stream_2rows"]
        ).abs().max() > 1e-3


@second_generation
@both_ways
def test_a_session_of_two_slots_sounds_as_officially_its_reused_slot_too(name: str, gathers: bool) -> None:
    decoder = codec(name, gathers).decoder
    state = decoder.new_state(2)
    codes = codes_of(name, "decode_batch.codes")
    slot_of = {1: 0, 2: 1, 3: 1}
    place = dict.fromkeys(slot_of, 0)
    heard: dict[int, list[Tensor]] = {request: [] for request in slot_of}
    for step in groups(name)["slots"]["steps"]:
        if 3 in step["ids"] and not heard[3]:
            decoder.reset(state, slot_of[3], 0)
        for request, frames in zip(step["ids"], step["frames"], strict=True):
            if frames:
                stop = place[request] + frames
                piece = codes[request - 1 : request, :, place[request] : stop]
                heard[request].append(decoder.decode(piece, state, torch.tensor([slot_of[request]]))[0])
                place[request] = stop
    for request, pieces in heard.items():
        assert_close(torch.cat(pieces, dim=1), cases(name)[f"slots.audio.{request}"], AUDIO)


# ---- encode


def latents(model: Codec, sounds: list[npt.NDArray[np.float32]]) -> list[Tensor]:
    """-> [code_dim, frames] of each sound."""
    interleaved = [torch.from_numpy(pcm).reshape(-1) for pcm in sounds]
    heard: list[list[Tensor]] = [[] for _ in sounds]
    for lanes, piece in model.encoder.latents(interleaved):
        for lane, frames in zip(lanes, piece, strict=True):
            heard[lane].append(frames)
    return [torch.cat(pieces).t() for pieces in heard]


@every
@both_ways
def test_every_stage_of_the_encoder_gives_the_official_output(name: str, gathers: bool) -> None:
    encoder = codec(name, gathers, pass_frames=FRAMES).encoder
    outputs = run_stages(encoder.stack, torch.from_numpy(waveform(name)).reshape(1, -1, 1), FRAMES)
    assert len(outputs) == sum(key.startswith("encode.stage.") for key in cases(name))
    for i, output in enumerate(outputs):
        assert_close(output, cases(name)[f"encode.stage.{i}"], LATENT)


@every
@both_ways
@pytest.mark.parametrize("pass_frames", [1, 3, 7, FRAMES])
def test_latents_and_codes_are_the_official_ones_in_any_passes(
    name: str, gathers: bool, pass_frames: int
) -> None:
    model = codec(name, gathers, pass_frames)
    (found,) = latents(model, [waveform(name)])
    assert_close(found, cases(name)["encode.latents"][0], LATENT)
    (codes,) = model.encoder.encode([waveform(name)])
    assert codes.dtype == np.int16
    assert cases(name)["encode.codes_lengths"].tolist() == [len(codes)] == [FRAMES]
    assert np.array_equal(codes, codes_of(name, "encode.codes")[0].t().numpy())
    if name == V1:  # the official one in chunks forgets too early here as well
        key = {1: "0_25s", 3: "0_75s", 7: "1_75s"}.get(pass_frames)
        if key is not None:
            assert not np.array_equal(codes, codes_of(name, f"encode.codes_chunk_{key}")[0].t().numpy())
            official = cases(name)[f"encode.latents_chunk_{key}"][0]
            assert_close(found[:, :6], official[:, :6], LATENT)
            assert (found - official).abs().max() > 1e-3
    else:
        assert_close(found, cases(name)["encode.latents_chunked"][0], LATENT)
        assert np.array_equal(codes, codes_of(name, "encode.codes_chunked")[0].t().numpy())


@every
def test_codes_decode_to_the_official_vectors_and_sound(name: str) -> None:
    model = codec(name)
    codes = codes_of(name, "encode.codes")
    z = model.decoder.quantizer.decode(codes)
    assert_close(z.transpose(1, 2), cases(name)["encode.quantized"], LATENT)
    assert_close(sound(model, codes, [FRAMES]), cases(name)["roundtrip.audio"], AUDIO)


@second_generation
def test_left_and_right_are_not_the_same(name: str) -> None:
    (codes,) = codec(name).encoder.encode([waveform(name)[:, ::-1]])
    assert np.array_equal(codes, codes_of(name, "encode.codes_swapped")[0].t().numpy())
    assert not np.array_equal(codes, codes_of(name, "encode.codes")[0].t().numpy())


@every
@pytest.mark.parametrize("num_samples", [15, 16, 17, 79, 80, 81, 95])
def test_only_whole_frames_are_encoded(name: str, num_samples: int) -> None:
    (codes,) = codec(name).encoder.encode([waveform(name)[:num_samples]])
    length = int(cases(name)[f"encode_length.{num_samples}.lengths"][0])
    assert codes.shape == (length, codec(name).num_quantizers)
    assert np.array_equal(
        codes, codes_of(name, f"encode_length.{num_samples}.codes")[0, :, :length].t().numpy()
    )


@every
@both_ways
def test_sounds_encoded_together_have_the_official_codes(name: str, gathers: bool) -> None:
    model = codec(name, gathers)
    sounds = [waveform(name), *(waveform(name, f"encode_batch.waveform.{i}") for i in (1, 2))]
    lengths = cases(name)["encode_batch.lengths"].tolist()
    together = latents(model, sounds)
    for row, codes in enumerate(model.encoder.encode(sounds)):
        length = lengths[row]
        for key in ("codes",) if name == V1 else ("codes", "codes_chunked"):
            expected = codes_of(name, f"encode_batch.{key}")[row, :, :length].t().numpy()
            assert np.array_equal(codes, expected)
        assert_close(together[row][:, :length], cases(name)["encode_batch.latents"][row, :, :length], LATENT)
