"""What the plan promises is what gets allocated, and the released checkpoints need what is known of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from realtime import models
from realtime.errors import ModelError
from realtime.models.codec_config import CodecConfig, TransformerConfig
from realtime.models.memory import GIB, RESERVE_BYTES, Sizes, free_bytes, kv_values, plan, sizes_of
from realtime.models.qwen3 import Qwen3Config
from realtime.models.stack import GPT2Config
from realtime.models.tokenizer_codec import load_codec
from tests.tiny_models import layers

GOLDEN = Path(__file__).parent / "golden"
CPU = torch.device("cpu")

# The released language models.
LOCAL = Qwen3Config(2560, 36, 32, 8, 128, 9728, 1e6, 1e-6)
REALTIME = Qwen3Config(2048, 28, 16, 8, 128, 6144, 1e6, 1e-6)
NANO = GPT2Config(768, 12, 12, 3072, "gelu_new", 1e-5, 10000.0, 32768)


def patch(size: int) -> Any:
    return {"module_type": "PatchedPretransform", "patch_size": size}


def released_codec(folder: Path, generation: int) -> CodecConfig:
    """The released MOSS-Audio-Tokenizer, v1 or v2; only its decoder is as large as it really is."""
    is_v2 = generation == 2
    decoder = [layers(768, 1280, 1280, 32, 10 if is_v2 else None)]
    sizes = [640, 384, 384, 384, 384] if is_v2 else [640, 384, 384]
    seconds = [10, 8, 4, 2, 1] if is_v2 else [None] * 3
    for i, (size, context_s) in enumerate(zip(sizes, seconds, strict=True)):
        is_last = i == len(sizes) - 1
        decoder += [patch(2), layers(size, 240 if is_last else 768, 768, 12, context_s)]
    values = {
        "model_type": "moss-audio-tokenizer" if is_v2 else "speech_tokenizer",
        "sampling_rate": 24000 * generation,
        "downsample_rate": 1920 * generation,
        "causal_transformer_context_duration": 10,
        "code_dim": 768,
        "encoder_kwargs": [patch(240 * 2 ** len(sizes)), layers(240 * 2 ** len(sizes), 768, 64, 1, 10)],
        "decoder_kwargs": [*decoder, patch(240)],
        "quantizer_type": "rlfq",
        "quantizer_kwargs": {
            "input_dim": 768,
            "rvq_dim": 512,
            "output_dim": 768,
            "num_quantizers": 32,
            "codebook_size": 1024,
            "codebook_dim": 8,
        },
    }
    if is_v2:
        values |= {"number_channels": 2, "enable_channel_interleave": True}
    (folder / "config.json").write_text(json.dumps(values))
    return CodecConfig.load(folder / "config.json")


def window_values(config: CodecConfig) -> int:
    """Keys and values of nothing but the windows."""
    stages = [stage for stage in config.decoder if isinstance(stage, TransformerConfig)]
    return sum(2 * stage.num_layers * stage.dim * stage.window for stage in stages)


def test_a_position_of_the_released_models_takes_what_is_known_of_them() -> None:
    assert kv_values(LOCAL) * 2 == 144 * 1024
    assert kv_values(REALTIME) * 2 == 112 * 1024
    assert kv_values(NANO) == 2 * 12 * 768


@pytest.mark.parametrize(("generation", "known"), [(1, 42_496_000), (2, 44_339_200)])
def test_a_slot_of_the_released_codecs_holds_its_windows_and_one_pass(
    tmp_path: Path, generation: int, known: int
) -> None:
    config = released_codec(tmp_path, generation)
    assert window_values(config) == known
    # A stage keeps the tokens of one pass beside its window, and rounds up to 8 of them.
    stages = [stage for stage in config.decoder if isinstance(stage, TransformerConfig)]
    spare = sum(2 * s.num_layers * s.dim * (25 * s.tokens_per_frame + 8) for s in stages)
    assert known < config.slot_values("decoder", 25) <= known + spare


@pytest.mark.parametrize("family", ["local", "nano"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_plan_is_what_a_model_allocates(family: str, dtype: torch.dtype) -> None:
    folder, codec_folder = GOLDEN / family, GOLDEN / {"local": "codec_v2", "nano": "codec_nano"}[family]
    sizes = sizes_of(f"moss_tts_{family}", folder, codec_folder, CPU, dtype)
    bundle = models.load(str(folder), dtype=str(dtype).removeprefix("torch."))
    kv = bundle.backbone.new_kv(3, sizes.max_positions)
    # One row more than asked for.
    assert bytes_of(kv) == 4 * sizes.kv_per_position * sizes.max_positions
    codec = load_codec(codec_folder, CPU, dtype, num_quantizers=4)
    rings = codec.decoder.new_state(3).rings
    assert bytes_of(rings) == 4 * sizes.codec_state
    assert bytes_of(codec.encoder.stack.new_state(3).rings) == 4 * sizes.encoder_state


def bytes_of(value: Any) -> int:
    """Of all tensors that are not views of a smaller part, wherever they are kept."""
    found: dict[int, int] = {}

    def look(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, list | tuple):
            for item in value:
                look(item)
        elif hasattr(value, "keys") and hasattr(value, "values") and not isinstance(value, dict):
            look([value.keys, value.values])
        elif hasattr(value, "layers"):
            look(value.layers)

    look(value)
    return sum(found.values())


@pytest.mark.parametrize(
    ("family", "codec", "num_values"),
    [
        ("local", "codec_v2", 48_832),
        ("nano", "codec_nano", 28_536),  # stores its tables as heads too
        ("realtime", "codec_v1", 800_176 - 544 * 16),  # stores its text table twice
    ],
)
def test_copies_of_other_tensors_are_not_counted(family: str, codec: str, num_values: int) -> None:
    sizes = sizes_of(f"moss_tts_{family}", GOLDEN / family, GOLDEN / codec, CPU, torch.bfloat16)
    assert sizes.weights == 2 * num_values


# ---- the plan

SIZES = Sizes(
    weights=8 * GIB,
    codec_weights=4 * GIB,
    kv_per_position=144 * 1024,
    max_positions=2048,
    codec_state=90 * 2**20,
    encoder_state=100 * 2**20,
)
CUDA = torch.device("cuda", 0)


def test_the_parts_add_up_and_are_shown() -> None:
    made = plan(SIZES, num_streams=31, num_references=4, graphs=GIB, free_bytes=80 * GIB)
    expected = 13 * GIB + RESERVE_BYTES + 32 * (2048 * 144 * 1024 + 90 * 2**20) + 5 * 100 * 2**20
    assert made.total_bytes == expected
    table = [line.split() for line in made.table().splitlines()]
    assert "KV 9.00 GiB 32 rows x 2048 positions x 144.0 KiB".split() in table
    assert "codec state 2.81 GiB 32 slots x 90.00 MiB".split() in table
    assert table[-1] == "together 25.80 GiB of 80.00 GiB free".split()
    made.check(CUDA)


def test_no_line_is_shown_for_nothing() -> None:
    made = plan(SIZES, num_streams=1, num_references=0, graphs=0, free_bytes=80 * GIB)
    assert "graphs" not in made.table() and "references" not in made.table()


def test_as_many_streams_as_the_refusal_says_fit_and_no_more() -> None:
    options = {"num_references": 0, "graphs": GIB, "free_bytes": 24 * GIB}
    refused = plan(SIZES, num_streams=64, **options)
    with pytest.raises(ModelError) as caught:
        refused.check(CUDA)
    message = caught.value.message
    assert message.startswith("64 streams need ") and "\n" not in message
    assert "KV 18.28 GiB" in message and "24.00 GiB are free" in message
    most = refused.most_streams
    assert message.endswith(f"set engine.max_streams to {most} or less")
    plan(SIZES, num_streams=most, **options).check(CUDA)
    with pytest.raises(ModelError):
        plan(SIZES, num_streams=most + 1, **options).check(CUDA)


def test_a_device_that_is_too_small_for_one_stream_is_told_as_that() -> None:
    small = plan(SIZES, num_streams=1, num_references=0, graphs=0, free_bytes=8 * GIB)
    with pytest.raises(ModelError, match="this device is too small for the model"):
        small.check(CPU)


def test_the_memory_of_this_machine_is_known() -> None:
    assert 2**26 < free_bytes(CPU) < 2**50


def test_nothing_is_loaded_where_it_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realtime.models.memory.free_bytes", lambda device: 2**20)
    monkeypatch.setattr("realtime.models.moss_local.load_local", None)  # would be called
    with pytest.raises(ModelError, match=r"3 streams need .* 1\.0 MiB are free"):
        models.load(str(GOLDEN / "local"), num_streams=3)


def test_more_positions_need_more_memory() -> None:
    options = {"num_streams": 4, "num_references": 0, "graphs": 0, "free_bytes": 80 * GIB}
    longer = replace(SIZES, max_positions=4096)
    assert plan(longer, **options).total_bytes - plan(SIZES, **options).total_bytes == 5 * 2048 * 144 * 1024
