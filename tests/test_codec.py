"""MOSS-Audio-Tokenizer: what batching rests on, loading, and what is refused."""

from __future__ import annotations

import json
import math
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from codec_models import CPU, GOLDEN, NAMES, ONE_LSB, by, cases, codec, num_quantizers, sound
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from realtime.errors import ModelError
from realtime.models.codec_config import CodecConfig, TransformerConfig
from realtime.models.codec_quantizer import Quantizer
from realtime.models.codec_stage import Stack
from realtime.models.reference import normalised
from realtime.models.tokenizer_codec import Codec, load_codec

every = pytest.mark.parametrize("name", NAMES)
both_ways = pytest.mark.parametrize("gathers", [False, True], ids=["views", "gathers"])
LONG = 120  # frames: many times the longest window (8 frames of micro size)


def random_codes(name: str, frames: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 16, (1, num_quantizers(name), frames), generator=generator)


def random_sizes(total: int, rng: random.Random) -> list[int]:
    sizes = []
    while total:
        sizes.append(min(total, rng.choice((1, 1, 2, 3, 5, 8, 13))))
        total -= sizes[-1]
    return sizes


# ---- chunks and slots


@every
@both_ways
@pytest.mark.parametrize("size", [1, 2, 3, 8, 25, "random"])
def test_any_chunks_are_the_whole_long_after_the_windows_are_full(
    name: str, gathers: bool, size: int | str
) -> None:
    codes = random_codes(name, LONG)
    sizes = by(size, LONG) if isinstance(size, int) else random_sizes(LONG, random.Random(name))
    whole = sound(codec(name, pass_frames=LONG), codes, [LONG])  # one pass, whose rings hold everything
    pieces = sound(codec(name, gathers), codes, sizes)
    assert pieces.shape == whole.shape and whole.std() > 0.05
    assert (pieces - whole).abs().max() <= ONE_LSB / 4


@every
@both_ways
def test_a_frame_is_forgotten_exactly_when_the_last_window_has_left_it(name: str, gathers: bool) -> None:
    model = codec(name, gathers)
    # A change travels one window less a token per layer, at each stage's own rate.
    reach = 0
    for stage in model.config.decoder:
        if isinstance(stage, TransformerConfig):
            reach += stage.num_layers * (stage.window - 1) * model.hop // stage.tokens_per_frame
    codes = random_codes(name, LONG)
    other = codes.clone()
    other[:, :, :3] = (other[:, :, :3] + 1) % 16
    sizes = random_sizes(LONG, random.Random(1))
    change = (sound(model, codes, sizes) - sound(model, other, sizes)).abs().amax(dim=(0, 1))
    last = int(change.nonzero().max())
    end = 3 * model.hop + reach  # of what frame 2 can reach
    assert end - 2 * model.hop < last < end


@every
@both_ways
@pytest.mark.parametrize("seed", range(3))
def test_slots_decoded_together_sound_as_they_do_alone(name: str, gathers: bool, seed: int) -> None:
    rng = random.Random(seed)
    decoder = codec(name, gathers).decoder
    state = decoder.new_state(5)
    for slot in range(5):  # what streams before have left
        decoder.decode(random_codes(name, 20, slot), state, torch.tensor([slot]))
    slots = rng.sample(range(5), 4)
    lengths = [rng.randint(5, 60) for _ in slots]
    all_codes = [random_codes(name, length, 10 + i) for i, length in enumerate(lengths)]
    for slot in slots:
        decoder.reset(state, slot, 0)
    place = [0] * 4
    heard: list[list[Tensor]] = [[] for _ in slots]
    while any(at < length for at, length in zip(place, lengths, strict=True)):
        size = rng.choice((1, 1, 2, 4, 9))
        able = [i for i in range(4) if lengths[i] - place[i] >= size]
        group = rng.sample(able, rng.randint(min(1, len(able)), len(able)))
        if not group:
            continue
        pieces = torch.cat([all_codes[i][:, :, place[i] : place[i] + size] for i in group])
        pcm = decoder.decode(pieces, state, torch.tensor([slots[i] for i in group]))
        for i, piece in zip(group, pcm, strict=True):
            heard[i].append(piece)
            place[i] += size
    for i, length in enumerate(lengths):
        alone = sound(codec(name), all_codes[i], [length])[0]
        assert (torch.cat(heard[i], dim=1) - alone).abs().max() <= ONE_LSB / 4


@every
@both_ways
def test_a_reset_slot_equals_a_fresh_one_and_others_do_not_notice(name: str, gathers: bool) -> None:
    decoder = codec(name, gathers).decoder
    state, untouched = decoder.new_state(2), decoder.new_state(2)
    both, one = torch.tensor([0, 1]), torch.tensor([1])
    before = torch.cat([random_codes(name, 30, 1), random_codes(name, 30, 2)])
    for each in (state, untouched):
        decoder.decode(before, each, both)
    decoder.reset(state, 0, 7)
    codes = random_codes(name, 40, 3)
    assert torch.equal(decoder.decode(codes, state, one), decoder.decode(codes, untouched, one))
    fresh = decoder.new_state(2)
    first = torch.tensor([0])
    assert torch.equal(decoder.decode(codes, state, first), decoder.decode(codes, fresh, first))


@every
@both_ways
def test_a_slot_that_was_not_finite_is_whole_again_after_a_reset(name: str, gathers: bool) -> None:
    model = codec(name, gathers)
    state = model.decoder.new_state(1)
    for rings in state.rings:
        for ring in rings:
            ring.keys.fill_(math.nan)
            ring.values.fill_(math.nan)
    model.decoder.reset(state, 0, 0)
    codes = random_codes(name, 40)
    assert torch.equal(sound(model, codes, [7, 33], state), sound(model, codes, [7, 33]))


@every
@both_ways
def test_lanes_that_only_fill_up_a_width_change_nothing(name: str, gathers: bool) -> None:
    decoder = codec(name, gathers).decoder
    state = decoder.new_state(3)
    codes = random_codes(name, 40)
    heard = []
    for piece in codes.split(5, dim=2):
        width = torch.cat([piece, torch.zeros(2, *piece.shape[1:], dtype=torch.int64)])
        heard.append(decoder.decode(width, state, torch.tensor([1, 3, 3]))[:1])
    assert (torch.cat(heard, dim=2) - sound(codec(name), codes, [40])).abs().max() <= ONE_LSB / 4
    for slot in (0, 2):
        assert int(state.frames[slot]) == 0


@every
def test_a_device_is_never_asked_for_a_number(name: str) -> None:
    # Fake tensors have shapes and no numbers: whatever needs one raises.
    decoder, views = codec(name, gathers=True).decoder, codec(name).decoder
    with FakeTensorMode(allow_non_fake_inputs=True):
        state = decoder.new_state(4)
        codes, slots = torch.zeros(3, num_quantizers(name), 5, dtype=torch.int64), torch.arange(3)
        pcm = decoder.decode(codes, state, slots)
        decoder.reset(state, 2, 0)
        with pytest.raises(DataDependentOutputException):
            views.decode(codes, state, slots)
    assert pcm.shape == (3, codec(name).channels, 5 * codec(name).hop)


@every
def test_codes_beyond_a_codebook_read_its_nearest_entry(name: str) -> None:
    codes = random_codes(name, 12)
    wild = codes.clone()
    codes[0, 0, 3], wild[0, 0, 3] = 15, 1026
    codes[0, -1, 5], wild[0, -1, 5] = 0, -1
    assert torch.equal(sound(codec(name), codes, [12]), sound(codec(name), wild, [12]))


@every
@both_ways
def test_half_the_precision_is_nearly_the_same_sound(name: str, gathers: bool) -> None:
    codes = random_codes(name, 40)
    whole = sound(codec(name), codes, [40])
    half = sound(codec(name, gathers, dtype=torch.bfloat16), codes, by(3, 40))
    assert half.dtype == torch.float32
    assert 0 < (half - whole).square().mean().sqrt() < 0.05 * whole.std()


@pytest.mark.parametrize("key", ["reference.0", "plain_stops.0", "batch.0", "batch.1", "continuation.0"])
def test_a_local_models_frames_sound_as_officially(key: str) -> None:
    # A continuation is decoded behind its prefix, whose sound is then left out.
    stored = load_file(GOLDEN / "local/cases.safetensors")
    group, row = key.split(".")
    rows = stored[f"greedy.{group}.rows.{row}"][1:, 1:]
    expected = stored[f"e2e.{key}.audio0"]
    prefix = len(rows) - expected.shape[1] // 16 if group == "continuation" else 0
    rows = rows[: prefix + expected.shape[1] // 16]
    chunks = [prefix, len(rows) - prefix] if prefix else [len(rows)]
    pcm = sound(codec("codec_v2"), rows.t().unsqueeze(0), chunks)[0, :, prefix * 16 :]
    assert (pcm - expected).abs().max() <= 2e-6


# ---- encoding


@pytest.mark.parametrize("kind", ["mono", "stereo"])
def test_a_local_models_references_have_the_official_codes(kind: str) -> None:
    stored = load_file(GOLDEN / "local/cases.safetensors")
    pcm = stored[f"e2e.encode.{kind}.waveform"].t().numpy()
    (codes,) = codec("codec_v2").encoder.encode([normalised(pcm)])
    assert np.array_equal(codes[:, :4], stored[f"e2e.encode.{kind}.codes"].numpy())


@every
@both_ways
def test_many_sounds_encode_as_they_do_alone_and_keep_their_order(name: str, gathers: bool) -> None:
    encoder = codec(name, gathers).encoder
    rng = np.random.default_rng(0)
    channels = codec(name).channels
    sounds = [
        rng.normal(0, 0.3, (length, channels)).astype(np.float32)
        for length in (700, 3, 16, 0, 250, 251, 1000, 33, 90, 480, 15)
    ]
    together = encoder.encode(sounds)
    assert len(together) == len(sounds)
    for pcm, codes in zip(sounds, together, strict=True):
        assert codes.shape == (len(pcm) // 16, num_quantizers(name)) and codes.dtype == np.int16
        assert np.array_equal(codes, encoder.encode([pcm])[0])
    assert encoder.encode([]) == []


@pytest.mark.parametrize("name", NAMES[1:])
def test_one_channel_counts_twice(name: str) -> None:
    left = cases(name)["encode.waveform"][:1].t().numpy()
    encoder = codec(name).encoder
    (once,), (twice,) = encoder.encode([left]), encoder.encode([np.repeat(left, 2, axis=1)])
    assert np.array_equal(once, twice)


def test_an_encoder_and_a_decoder_work_on_two_threads_at_once() -> None:
    model = codec("codec_v2")
    codes = random_codes("codec_v2", LONG)
    pcm = cases("codec_v2")["encode.waveform"].t().repeat(4, 1).numpy()
    expected = model.encoder.encode([pcm])[0]
    whole = sound(model, codes, by(1, LONG))
    encoded = []

    def encode() -> None:
        encoded.extend(model.encoder.encode([pcm])[0] for _ in range(3))

    thread = threading.Thread(target=encode)
    thread.start()
    heard = [sound(model, codes, by(1, LONG)) for _ in range(2)]
    thread.join()
    assert len(encoded) == 3 and all(np.array_equal(found, expected) for found in encoded)
    assert all(torch.equal(found, whole) for found in heard)


# ---- loading


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a codec to break."""

    def copy(name: str) -> Path:
        return shutil.copytree(GOLDEN / name, tmp_path / name)

    return copy


def load(path: Path, num_quantizers: int = 4) -> Codec:
    return load_codec(path, CPU, torch.float32, num_quantizers=num_quantizers)


def edit_config(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads((path / "config.json").read_text())
    change(values)
    (path / "config.json").write_text(json.dumps(values))


def edit_tensors(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def rename(path: Path, *pairs: tuple[str, str]) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            new = name
            for old, other in pairs:
                new = new.replace(old, other)
            tensors[new] = tensors.pop(name)

    edit_tensors(path, change)


def refused(path: Path, *named: str, num_quantizers: int = 4) -> None:
    with pytest.raises(ModelError) as caught:
        load(path, num_quantizers)
    for name in named:
        assert name in caught.value.message


OLD_AND_NEW = [
    ("self_attn.in_projs.0.weight", "self_attn.in_proj.weight"),
    ("self_attn.out_projs.0.weight", "self_attn.out_proj.weight"),
    ("linear1.weight", "ffn.0.weight"),
    ("linear2.weight", "ffn.2.weight"),
]


@every
def test_old_and_new_names_of_tensors_are_the_same_codec(name: str, folder: Callable[[str], Path]) -> None:
    path = folder(name)
    if name == "codec_v1":
        rename(path, *OLD_AND_NEW)
    else:
        norm = "parametrizations.weight.original"
        old = [(new, old) for old, new in OLD_AND_NEW]
        rename(path, *old, (f"{norm}0", "weight_g"), (f"{norm}1", "weight_v"))
    codes = random_codes(name, 20)
    assert torch.equal(sound(load(path, num_quantizers(name)), codes, [20]), sound(codec(name), codes, [20]))


@every
def test_a_prefix_of_the_codebooks_is_enough_for_a_model_that_speaks_fewer(name: str) -> None:
    model = load(GOLDEN / name)
    codes = cases(name)["decode.codes"].transpose(0, 1)[:, :4]
    assert (sound(model, codes, [40]) - cases(name)["decode.audio_nq4"]).abs().max() <= 2e-6
    pcm = cases(name)["encode.waveform"].reshape(model.channels, -1).t().contiguous().numpy()
    assert np.array_equal(model.encoder.encode([pcm])[0], codec(name).encoder.encode([pcm])[0][:, :4])


def test_a_reversed_list_stands_for_a_missing_decoder_in_the_second_generation(
    folder: Callable[[str], Path],
) -> None:
    def turn(values: dict[str, Any]) -> None:
        turned = []
        for stage in reversed(values.pop("decoder_kwargs")):
            if "input_dimension" in stage:
                sides = {
                    "input_dimension": stage["output_dimension"],
                    "output_dimension": stage["input_dimension"],
                }
                stage = stage | sides
            turned.append(stage)
        values["reversed_decoder_kwargs"] = turned

    path = folder("codec_v2")
    edit_config(path, turn)
    assert load(path).config.decoder == codec("codec_v2").config.decoder

    path = folder("codec_v1")  # ignores the list, and would build a decoder of full size
    edit_config(path, lambda values: values.pop("decoder_kwargs"))
    refused(path, "config.json", "decoder_kwargs")


def test_projections_between_equal_sizes_may_be_missing_in_the_first_generation_only(
    folder: Callable[[str], Path],
) -> None:
    assert codec("codec_v1").decoder.stack.transformers[1].input is None
    same_size, other_size = "encoder.3.input_proj.weight", "decoder.0.input_proj.weight"
    path = folder("codec_v2")
    edit_tensors(path, lambda tensors: tensors.pop(same_size))
    refused(path, same_size)
    path = folder("codec_v1")
    edit_tensors(path, lambda tensors: tensors.pop(other_size))
    refused(path, other_size)


def test_missing_extra_and_misshaped_tensors_are_named_in_one_error(folder: Callable[[str], Path]) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["encoder.1.transformer.layers.0.norm2.bias"]
        del tensors["quantizer.quantizers.31.codebook.weight"]  # one that 4 codebooks don't need
        tensors["decoder.0.transformer.layers.1.ffn.0.weight"] = torch.zeros(3, 3)
        tensors["decoder.0.transformer.layers.1.linear1.bias"] = torch.zeros(64)

    path = folder("codec_v2")
    edit_tensors(path, change)
    refused(path, "layers.0.norm2.bias", "quantizers.31.codebook", "layers.1.ffn.0.weight", "linear1.bias")


def test_a_model_that_speaks_more_codebooks_is_refused_with_both_numbers() -> None:
    refused(GOLDEN / "codec_nano", "17", "16", num_quantizers=17)


def put(place: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Sets (or, with None, removes) what `place` names: "decoder_kwargs.0.norm"."""

    def change(values: dict[str, Any]) -> None:
        *path, last = (int(part) if part.isdigit() else part for part in place.split("."))
        target: Any = values
        for part in path:
            target = target[part]
        if value is None:
            del target[last]
        else:
            target[last] = value

    return change


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        ("downsample_rate", None, "downsample_rate"),
        ("downsample_rate", 17, "encoder_kwargs"),
        ("downsample_rate", "16", "downsample_rate"),
        ("code_dim", 8, "code_dim"),
        ("number_channels", 3, "channel"),
        ("enable_channel_interleave", False, "interleaved"),
        ("quantizer_type", "rvq", "rvq"),
        ("quantizer_kwargs", None, "quantizer_kwargs"),
        ("quantizer_kwargs.codebook_dim", 0, "codebook_dim"),
        ("encoder_kwargs", None, "encoder_kwargs"),
        ("decoder_kwargs", {}, "decoder_kwargs"),
        ("decoder_kwargs.1", "patch", "decoder_kwargs[1]"),
        ("decoder_kwargs.1", None, "decoder_kwargs"),
        ("decoder_kwargs.1.patch_size", 3, "decoder_kwargs[1]"),
        ("decoder_kwargs.1.patch_size", 0, "patch_size"),
        ("decoder_kwargs.1.stride", 2, "stride"),
        ("decoder_kwargs.1.module_type", "Conv", "Conv"),
        ("decoder_kwargs.0.module_type", None, "module_type"),
        ("decoder_kwargs.0.rotary_share", 0.5, "rotary_share"),
        ("decoder_kwargs.0.norm", "rms_norm", "rms_norm"),
        ("decoder_kwargs.0.causal", False, "causal"),
        ("decoder_kwargs.0.gating", "silu", "gating"),
        ("decoder_kwargs.0.positional_embedding", "sin", "positional_embedding"),
        ("decoder_kwargs.0.num_heads", 3, "heads"),
        ("decoder_kwargs.0.input_dimension", 12, "decoder_kwargs[0]"),
        ("decoder_kwargs.0.context_duration", 0.01, "context"),
        ("decoder_kwargs.0.context_duration", "long", "context_duration"),
        ("decoder_kwargs.0.context_duration", math.nan, "context_duration"),
        ("decoder_kwargs.0.max_period", 0, "max_period"),
        ("encoder_kwargs.5.output_dimension", 8, "encoder_kwargs"),
    ],
)
def test_a_config_that_is_not_served_is_refused_by_file_and_key(
    folder: Callable[[str], Path], place: str, value: Any, named: str
) -> None:
    path = folder("codec_v2")
    edit_config(path, put(place, value))
    refused(path, "config.json", named)


def test_a_folder_without_its_files_is_refused(folder: Callable[[str], Path]) -> None:
    path = folder("codec_nano")
    (path / "model.safetensors").unlink()
    refused(path, "model.safetensors")
    (path / "config.json").unlink()
    refused(path, "config.json")


# ---- official sizes


def transformer(
    sides: tuple[int, int], width: tuple[int, int, int, int], seconds: float | None
) -> dict[str, Any]:
    """`width`: model, heads, layers, feed-forward."""
    context = {} if seconds is None else {"context_duration": seconds}
    return {
        "module_type": "Transformer",
        **dict(zip(("input_dimension", "output_dimension"), sides, strict=True)),
        **dict(zip(("d_model", "num_heads", "num_layers", "dim_feedforward"), width, strict=True)),
        "causal": True,
        "norm": "layer_norm",
        "positional_embedding": "rope",
        "max_period": 10000,
        "gating": "none",
        "layer_scale": 0.01,
        "conv_layout": True,
        **context,
    }


def patch(size: int) -> dict[str, Any]:
    return {"module_type": "PatchedPretransform", "patch_size": size}


def official(generation: str) -> dict[str, Any]:
    """Encoder lists as published; each decoder is its encoder backwards."""
    large, middle = (1280, 20, 32, 5120), (768, 12, 12, 3072)
    if generation == "v1":
        stages = [
            patch(240),
            transformer((240, 384), middle, None),
            *(patch(2), transformer((768, 384), middle, None)),
            *(patch(2), transformer((768, 640), middle, None)),
            *(patch(2), transformer((1280, 768), large, None)),
        ]
    elif generation == "v2":
        stages = [patch(240), transformer((240, 384), middle, 1)]
        for out, seconds in ((384, 2), (384, 4), (384, 8), (640, 10)):
            stages += [patch(2), transformer((768, out), middle, seconds)]
        stages += [patch(2), transformer((1280, 768), large, 10)]
    else:
        stages = [patch(240), transformer((240, 384), (256, 4, 4, 1024), 4)]
        for out, layers, seconds in ((384, 2, 6), (384, 2, 8), (192, 4, 10)):
            stages += [patch(2), transformer((768, out), (256, 4, layers, 1024), seconds)]
        stages += [patch(4)]
    backwards = [
        stage
        if "patch_size" in stage
        else stage
        | {"input_dimension": stage["output_dimension"], "output_dimension": stage["input_dimension"]}
        for stage in reversed(stages)
    ]
    first = generation == "v1"
    return {
        "model_type": "speech_tokenizer" if first else "moss-audio-tokenizer",
        "sample_rate" if first else "sampling_rate": 24000 if first else 48000,
        "downsample_rate": 1920 if first else 3840,
        "causal_transformer_context_duration": 10,
        **({} if first else {"number_channels": 2, "enable_channel_interleave": True}),
        "code_dim": 768,
        "encoder_kwargs": stages,
        "decoder_kwargs": backwards,
        "quantizer_type": "rlfq",
        "quantizer_kwargs": {
            "input_dim": 768,
            "rvq_dim": 512,
            "output_dim": 768,
            "num_quantizers": 16 if generation == "nano" else 32,
            "codebook_size": 1024,
            "codebook_dim": 8,
        },
    }


class Counting:
    """In place of Tensors: nothing but shapes, and how many there were."""

    def __init__(self) -> None:
        self.num_tensors = self.num_values = 0

    def has(self, name: str) -> bool:
        return False

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        self.num_tensors += 1
        self.num_values += math.prod(shape)
        return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("generation", "num_tensors", "num_values", "windows", "window_values"),
    [
        ("v1", 1600, 1_774_566_400, [125, 250, 500, 1000], 42_496_000),
        ("v2", 2094, 2_123_701_248, [125, 250, 400, 400, 400, 400], 44_339_200),
        ("nano", None, 21_969_664, [500, 800, 1200, 1600], None),
    ],
)
def test_codecs_of_official_size_have_the_official_numbers_of_everything(
    tmp_path: Path,
    generation: str,
    num_tensors: int | None,
    num_values: int,
    windows: list[int],
    window_values: int | None,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(official(generation)))
    config = CodecConfig.load(tmp_path / "config.json")
    assert config.frame_rate == 12.5
    stages = [stage for stage in config.decoder if isinstance(stage, TransformerConfig)]
    assert [stage.window for stage in stages] == windows
    values = sum(2 * stage.num_layers * stage.dim * stage.window for stage in stages)
    assert window_values is None or values == window_values
    # Rings hold a pass more than the windows, and little besides.
    passing = sum(2 * stage.num_layers * stage.dim * 8 * stage.tokens_per_frame for stage in stages)
    assert values + passing <= config.slot_values("decoder", 8) < 1.02 * (values + passing)

    tensors: Any = Counting()
    meta = torch.device("meta")
    Quantizer(tensors, config.quantizer, config.quantizer.num_quantizers)
    for half in (config.encoder, config.decoder):
        Stack(tensors, half, 8, meta, torch.float32, config.is_first_generation, half is config.encoder)
    assert tensors.num_values == num_values
    assert num_tensors is None or tensors.num_tensors == num_tensors
