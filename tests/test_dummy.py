"""Models of random weights have the released sizes, run through the same stages, and are refused where they
don't fit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from realtime import dummy, speed
from realtime.errors import ModelError
from realtime.models import memory

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "num_values", "num_codec_values"),
    [
        ("local-v1.5", 4_129_990_144, 2_123_701_248),
        ("realtime", 2_331_940_864 - 151_936 * 2048, 1_774_566_400),  # without the copy that nobody reads
        ("nano", 117_311_232, 21_969_664),
        ("tiny", 10_035_200, 7_971_904),
    ],
)
def test_sizes_are_those_of_the_released_checkpoints(
    name: str, num_values: int, num_codec_values: int
) -> None:
    sizes = dummy.Shape(*dummy.SHAPES[name]).sizes(CPU, torch.bfloat16)
    assert (sizes.weights, sizes.codec_weights) == (2 * num_values, 2 * num_codec_values)


@pytest.fixture(scope="module")
def stages() -> speed.Stages:
    torch.set_num_threads(1)
    return speed.stages_of(dummy.build("tiny", CPU, torch.float32, 3), 3)


def test_the_same_seed_makes_the_same_model(stages: speed.Stages) -> None:
    again = speed.stages_of(dummy.build("tiny", CPU, torch.float32, 3), 3)
    frames = np.random.default_rng(1).integers(0, 1024, (1, 2, 12))
    (one,), (two,) = stages.codec.run(frames, [2]), again.codec.run(frames, [2])
    assert np.array_equal(one, two) and np.isfinite(one).all() and np.abs(one).max() > 0


def test_it_hardly_ever_stops(stages: speed.Stages) -> None:
    with speed._running(stages) as say:
        assert len(say(3)) == 3  # each of them is heard


def test_every_figure_is_there(stages: speed.Stages) -> None:
    frames = list(speed.frame_times(stages, (1, 3), 2))
    assert [row["width"] for row in frames] == [1, 3] and all(row["frame_ms"] > 0 for row in frames)
    steps = list(speed.codec_times(stages, (1, 3), (1, 2), 1))
    assert [(row["width"], row["frames"]) for row in steps] == [(1, 1), (1, 2), (3, 1), (3, 2)]
    (first,) = speed.first_audio(stages, (2,), 1)
    assert 0 < first["first_ms"] <= first["median_ms"] <= first["last_ms"]


def test_what_does_not_fit_is_refused_with_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 8 * memory.GIB)
    with pytest.raises(ModelError, match=r"16 streams need .* \(model 7\.69 GiB .* 8\.00 GiB are free"):
        dummy.build("local-v1.5", CPU, torch.bfloat16, 16)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"local-v1\.5, realtime, nano, tiny"):
        dummy.build("local", CPU, torch.float32, 1)
