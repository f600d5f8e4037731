"""The comparison with the official way: both make frames of the same sizes, and the command says so."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from realtime import dummy, speed
from realtime.cli import main
from realtime.models.base import SamplingDefaults
from realtime.reference_loop import ReferenceLoop

pytest.importorskip("transformers")


def sampling(**changes: float) -> SamplingDefaults:
    values = {"top_k": 25, "top_p": 0.8, "repetition_penalty": 1.1} | changes
    return SamplingDefaults((1.7,) * 12, rule="local", **values)  # type: ignore[arg-type]


@pytest.fixture
def loop() -> ReferenceLoop:
    torch.manual_seed(1)
    return ReferenceLoop(dummy.local_config("tiny"), sampling())


def test_the_reference_makes_a_frame_of_each_row_and_remembers_it(loop: ReferenceLoop) -> None:
    loop.start(torch.from_numpy(np.stack([speed.prompt(12, 20, i) for i in range(3)]).astype(np.int64)))
    frames = [loop.frame() for _ in range(2)]
    assert all(
        frame.shape == (3, 12) and 0 <= int(frame.min()) <= int(frame.max()) < 1024 for frame in frames
    )
    assert loop._history[2][5] == [int(frame[2, 5]) for frame in frames]
    assert loop._cache.get_seq_length() == 22


def test_the_reference_draws_by_the_rules(loop: ReferenceLoop) -> None:
    loop._history = [[[0, 0]]]
    loop._sampling = sampling(repetition_penalty=2.0, top_k=2, top_p=0.0001)
    assert int(loop._pick(0, 0, torch.tensor([4.0, 3.0, -1.0]))) == 1, "the penalty made 2 of 4"
    loop._sampling = sampling(repetition_penalty=1.0, top_k=2, top_p=1.0)
    drawn = {int(loop._pick(0, 0, torch.tensor([1.0, 1.0, 0.9]))) for _ in range(40)}
    assert drawn == {0, 1}


def test_both_take_turns_at_every_batch() -> None:
    pairs = list(speed.compare((1, 2), num_steps=2, num_rounds=1, prompt_rows=20))
    assert [pair.width for pair in pairs] == [1, 2]
    for pair in pairs:
        assert pair.ratio == pytest.approx(pair.ours_per_s / pair.theirs_per_s)


def test_the_weights_of_a_step_are_counted() -> None:
    config = dummy.local_config("tiny")
    tables = 4352 * 256 + 12 * 1024 * 256
    once = 10_035_200 - tables - 2 * 256  # but norms and biases, the local layer once
    local = 4 * 256**2 + 2 * 256 * 768
    expected = 4 * (once + 11 * local + 12 * 1024 * 256)
    assert speed.weights_read(config) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("which", ["--decode", "--dummy-weights"])
def test_the_command_ends_with_one_line_of_json(
    which: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "memory_rate", lambda: 1e9)
    monkeypatch.setattr(
        speed, "compare", lambda widths, **_: (speed.Pair(width, 2.0, 1.0, 2.0, 3.0) for width in widths)
    )
    for name in ("frame_times", "codec_times", "first_audio"):
        monkeypatch.setattr(speed, name, lambda stages, widths, *_: [{"width": w, "ms": 1.0} for w in widths])
    arguments = [which] if which == "--decode" else [which, "tiny", "--device", "cpu"]
    assert main(["bench", *arguments, "--streams", "1,2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split()[0] == "1" and lines[3].split()[0] == "2", "a title, a header, a line for each"
    result = json.loads(lines[-1])
    rows = result["rows"] if which == "--decode" else result["frame"]
    assert [row["width"] for row in rows] == [1, 2]


def test_a_model_that_is_not_known_ends_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--dummy-weights", "small", "--device", "cpu"]) == 2
    assert "known: local-v1.5" in capsys.readouterr().err
