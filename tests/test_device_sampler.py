"""The samplers of the official families: the stored probabilities, and draws that depend on nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from realtime.engine.device_sampler import DeviceSampler, Rule
from realtime.engine.sampler import uniforms
from realtime.messages import SamplingParams
from realtime.models.base import SamplingDefaults

GOLDEN = Path(__file__).parent / "golden"
FOLDERS: list[tuple[str, Rule]] = [("local", "local"), ("nano", "local"), ("realtime", "realtime")]


def cases() -> list[Any]:
    found = []
    for folder, rule in FOLDERS:
        groups = json.loads((GOLDEN / folder / "cases.json").read_text())["groups"]
        for case in groups["sampling"]["cases"]:
            found.append(pytest.param(folder, rule, case, id=f"{folder}-{case['name']}"))
    return found


def defaults_of(case: dict[str, Any], num_codebooks: int = 1) -> SamplingDefaults:
    return SamplingDefaults(
        (case["temperature"],) * num_codebooks,
        case["top_k"] or 0,
        case["top_p"],
        case["repetition_penalty"],
        case.get("repetition_window", 50),
    )


def remember(sampler: DeviceSampler, rows: list[int], history: Tensor) -> None:
    """history int64 [n, H]: what one codebook of each row has drawn, frame by frame; then the next is due."""
    keep = torch.ones(len(rows), dtype=torch.bool)
    for frame in range(history.shape[1]):
        sampler.prepare(rows, [0] * len(rows), [frame] * len(rows))
        sampler.commit(history[:, frame : frame + 1], keep)
    sampler.prepare(rows, [0] * len(rows), [history.shape[1]] * len(rows))


def new_sampler(
    defaults: SamplingDefaults, rule: Rule, rows: int, vocab_size: int, **params: Any
) -> DeviceSampler:
    sampler = DeviceSampler(defaults, rule, rows, "cpu", vocab_size=vocab_size)
    for row in range(rows):
        sampler.set_row(row, SamplingParams(**params))
    return sampler


@pytest.mark.parametrize(("folder", "rule", "case"), cases())
def test_golden_probabilities_and_greedy_choices(folder: str, rule: Rule, case: dict[str, Any]) -> None:
    tensors = load_file(str(GOLDEN / folder / "cases.safetensors"))
    prefix = f"sampling.{case['name']}"
    logits, expected = tensors[f"{prefix}.logits"], tensors[f"{prefix}.probs"]
    n, vocab_size = logits.shape
    history = tensors.get(f"{prefix}.history", torch.zeros(n, 0, dtype=torch.int64))
    rows = list(range(n))

    sampler = new_sampler(defaults_of(case), rule, n, vocab_size)
    remember(sampler, rows, history)
    found = sampler.probabilities(0, logits.clone())
    if "uniform" in case["name"]:  # which of equal entries go is the sort's business
        found, expected = found.sort(-1).values, expected.sort(-1).values
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    assert int((found > 0).sum()) == case["kept"]
    if (penalised := tensors.get(f"{prefix}.penalised")) is not None:
        torch.testing.assert_close(sampler._penalised(0, logits.clone()), penalised, rtol=1e-6, atol=0)

    greedy = new_sampler(defaults_of(case), rule, n, vocab_size, temperature=0.0)
    remember(greedy, rows, history)
    assert greedy.pick(0, logits.clone()).tolist() == tensors[f"{prefix}.greedy"].tolist()


def case_named(name: str, folder: str = "local") -> tuple[dict[str, Any], dict[str, Tensor]]:
    groups = json.loads((GOLDEN / folder / "cases.json").read_text())["groups"]
    (case,) = [case for case in groups["sampling"]["cases"] if case["name"] == name]
    return case, load_file(str(GOLDEN / folder / "cases.safetensors"))


@pytest.mark.parametrize("rule", ["local", "realtime"])
def test_draws_follow_the_probabilities(rule: Rule) -> None:
    generator = torch.Generator().manual_seed(1)
    defaults = SamplingDefaults((0.9,), 20, 0.8, 1.0)
    n = 4000
    logits = torch.randn(1, 64, generator=generator).mul(2).expand(n, 64).contiguous()
    sampler = DeviceSampler(defaults, rule, n, vocab_size=64)
    for row in range(n):
        sampler.set_row(row, SamplingParams(seed=row))
    sampler.prepare(range(n), [0] * n, [0] * n)
    expected = sampler.probabilities(0, logits)[0]
    counts = torch.bincount(sampler.pick(0, logits), minlength=64) / n
    assert not counts[expected == 0].any()
    assert (counts - expected).abs().max() < 4 * 0.5 / n**0.5


# Rows as different as requests can make them.
MIXED = [
    SamplingParams(seed=1),
    SamplingParams(temperature=0.0, seed=2),
    SamplingParams(temperature=1.3, top_k=5, top_p=0.5, seed=3),
    SamplingParams(repetition_penalty=1.7, seed=4),
    SamplingParams(temperature=0.4, top_k=64, top_p=1.0, repetition_penalty=1.0, seed=1),
    SamplingParams(temperature=0.0, repetition_penalty=2.0, seed=6),
]
K, V = 3, 200


def speak(
    rule: Rule, batches: list[list[int]], logits: Tensor, num_frames: int
) -> dict[int, list[tuple[int, ...]]]:
    """Codes and decision of each stream of MIXED for some frames, run in the given batches."""
    sampler = DeviceSampler(SamplingDefaults((0.8,) * K, 25, 0.9, 1.1, 4), rule, len(MIXED), vocab_size=V)
    for stream, params in enumerate(MIXED):
        sampler.set_row(stream, params)
    spoken: dict[int, list[tuple[int, ...]]] = {stream: [] for stream in range(len(MIXED))}
    for frame in range(num_frames):
        for batch in batches:
            sampler.prepare(batch, [0] * len(batch), [frame] * len(batch))
            stop = sampler.decide(logits[frame, batch, 0, :2].clone())
            codes = torch.stack([sampler.pick(k, logits[frame, batch, k].clone()) for k in range(K)], 1)
            sampler.commit(codes, torch.ones(len(batch), dtype=torch.bool))
            for stream, drawn, ends in zip(batch, codes.tolist(), stop.tolist(), strict=True):
                spoken[stream].append((*drawn, int(ends)))
    return spoken


@pytest.mark.parametrize("rule", ["local", "realtime"])
def test_a_row_draws_the_same_in_any_batch(rule: Rule) -> None:
    logits = torch.randn(8, len(MIXED), K, V, generator=torch.Generator().manual_seed(2)) * 3
    together = speak(rule, [[0, 1, 2, 3, 4, 5]], logits, 8)
    assert speak(rule, [[5, 3, 1], [4, 0], [2]], logits, 8) == together
    assert speak(rule, [[stream] for stream in range(6)], logits, 8) == together


def test_padding_lanes_disturb_nobody() -> None:
    logits = torch.randn(3, K, V, generator=torch.Generator().manual_seed(9))
    sampler = new_sampler(SamplingDefaults((0.8,) * K, 25, 0.9, 1.5), "local", 2, V, seed=8)
    picked = []
    for rows in ([0, 1], [0, 1, 2], [0, 0, 2]):  # the row behind the last is for padding
        sampler.start_segment(0)
        for frame in (0, 1):
            sampler.prepare(rows, [0] * len(rows), [frame] * len(rows))
            codes = torch.stack([sampler.pick(k, logits[rows, k]) for k in range(K)], 1)
            sampler.commit(codes, torch.tensor([row < 2 for row in rows]))
        picked.append(codes[0].tolist())
    assert picked[0] == picked[1] == picked[2]


def test_a_greedy_row_takes_the_likeliest_and_the_likelier_decision() -> None:
    logits = torch.randn(6, len(MIXED), K, V, generator=torch.Generator().manual_seed(3)) * 3
    spoken = speak("local", [[0, 1, 2, 3, 4, 5]], logits, 1)
    assert spoken[1][0][:K] == tuple(logits[0, 1].argmax(-1).tolist())
    assert spoken[1][0][K] == int(logits[0, 1, 0, 1] > logits[0, 1, 0, 0])


def test_the_decision_is_drawn_with_the_uniform_behind_the_last_codebook() -> None:
    n = 300
    sampler = DeviceSampler(SamplingDefaults((0.8,) * K, 25, 0.9, 1.1), "local", n, vocab_size=V)
    for row in range(n):
        sampler.set_row(row, SamplingParams(seed=row, temperature=0.1))  # not the decision's
    sampler.prepare(range(n), [2] * n, [5] * n)
    seeds, segments, frames = (np.asarray(x, np.uint64) for x in (range(n), [2] * n, [5] * n))
    draws = uniforms(seeds, segments, frames, K + 1)[:, K]
    goes_on = torch.softmax(torch.tensor([1.0, 0.0]), 0)[0].item()
    stop = sampler.decide(torch.tensor([[1.0, 0.0]]).expand(n, 2))
    assert stop.tolist() == [bool(draw >= goes_on) for draw in draws]
    assert 0 < int(stop.sum()) < n


@pytest.mark.parametrize(("rule", "remembered"), [("local", 12), ("realtime", 3)])
def test_the_penalty_reaches_back_as_far_as_the_rule_says(rule: Rule, remembered: int) -> None:
    sampler = new_sampler(SamplingDefaults((1.0,), 20, 1.0, 2.0, 3), rule, 1, 20)
    remember(sampler, [0], torch.arange(12)[None])
    p = sampler.probabilities(0, torch.ones(1, 20))[0]
    assert int((p < p.max()).sum()) == remembered
    assert (p[12 - remembered : 12] < p.max()).all()


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("rule", ["local", "realtime"])
def test_a_penalty_multiplies_what_is_negative_and_divides_the_rest(rule: Rule, penalty: float) -> None:
    logits = torch.tensor([[-2.0, -1.0, 0.0, 1.0, 2.0, 3.0]])
    sampler = new_sampler(SamplingDefaults((1.0,), 6, 1.0, penalty), rule, 2, 6)
    sampler.set_row(1, SamplingParams(repetition_penalty=0.6))  # beside the one that is looked at
    remember(sampler, [0, 1], torch.tensor([[0, 2, 4], [1, 1, 1]]))
    expected = torch.tensor([-2.0 * penalty, -1.0, 0.0, 1.0, 2.0 / penalty, 3.0])
    found = sampler.probabilities(0, logits.expand(2, 6))[0]
    torch.testing.assert_close(found, torch.softmax(expected, 0))


def test_frames_that_were_not_kept_and_segments_before_are_not_penalised() -> None:
    sampler = new_sampler(SamplingDefaults((1.0,), 20, 1.0, 2.0), "local", 2, 20)
    sampler.prepare([0, 1], [0, 0], [0, 0])
    sampler.commit(torch.tensor([[4], [4]]), torch.tensor([True, False]))
    sampler.prepare([0, 1], [0, 0], [1, 1])
    p = sampler.probabilities(0, torch.ones(2, 20))
    assert p[0, 4] < p[0, 5] and p[1, 4] == p[1, 5]
    sampler.start_segment(0)
    assert (sampler.probabilities(0, torch.ones(2, 20)) == p[1, 4]).all()


def test_codes_beyond_the_heads_are_no_history() -> None:
    sampler = new_sampler(SamplingDefaults((1.0,) * 2, 20, 1.0, 2.0), "local", 1, 16)
    sampler.prepare([0], [0], [0])
    sampler.commit(torch.tensor([[3, 1024]]), torch.tensor([True]))
    sampler.prepare([0], [0], [1])
    assert (sampler.probabilities(1, torch.ones(1, 16)) == 1 / 16).all()
    assert sampler.probabilities(0, torch.ones(1, 16))[0].argmin() == 3


def test_a_row_whose_numbers_are_not_finite_disturbs_nobody() -> None:
    logits = torch.randn(2, 200, generator=torch.Generator().manual_seed(4))
    sampler = new_sampler(SamplingDefaults((0.8,), 25, 0.9, 1.1), "local", 2, 200, seed=5)
    sampler.prepare([0, 1], [0, 0], [0, 0])
    alone = sampler.pick(0, logits.clone())
    logits[0, 7] = torch.nan
    picked = sampler.pick(0, logits)
    assert picked[1] == alone[1] and 0 <= int(picked[0]) < 200


def test_all_candidates_and_the_likeliest_ones_give_the_same() -> None:
    """Only the number of candidates differs: a family without top-k sorts every entry."""
    case, tensors = case_named("nano")
    logits, history = tensors["sampling.nano.logits"], tensors["sampling.nano.history"]
    fast = new_sampler(defaults_of(case), "local", 1, 1024)
    slow = new_sampler(defaults_of(case | {"top_k": 0}), "local", 1, 1024, top_k=25)
    remember(fast, [0], history)
    remember(slow, [0], history)
    torch.testing.assert_close(fast.probabilities(0, logits), slow.probabilities(0, logits))
    for frame in range(50):
        fast.prepare([0], [0], [frame])
        slow.prepare([0], [0], [frame])
        assert fast.pick(0, logits) == slow.pick(0, logits)


@pytest.mark.parametrize("rule", ["local", "realtime"])
def test_a_device_and_a_cpu_pick_the_same_also_of_equal_entries(rule: Rule) -> None:
    """A device has indices from the start, a CPU looks for the place of what it drew."""
    generator = torch.Generator().manual_seed(3)
    defaults = SamplingDefaults((0.8,), 25, 0.9, 1.1)
    cpu, device = (new_sampler(defaults, rule, 3, 200, seed=5) for _ in range(2))
    device.may_skip = False
    num_tied = 0
    for frame in range(60):
        logits = (torch.randn(3, 200, generator=generator) * 2).round(decimals=1)
        for sampler in (cpu, device):
            sampler.prepare([0, 1, 2], [0, 0, 0], [frame] * 3)
        ours, theirs = cpu.pick(0, logits), device.pick(0, logits)
        lines = torch.arange(3)
        assert torch.equal(logits[lines, ours], logits[lines, theirs])
        alone = (logits == logits[lines, ours][:, None]).sum(1) == 1
        assert torch.equal(ours[alone], theirs[alone])
        num_tied += int((~alone).sum())
    assert num_tied > 20


def test_each_of_equal_entries_has_its_turn() -> None:
    sampler = new_sampler(SamplingDefaults((1.0,), 4, 1.0, 1.0), "local", 1, 8)
    logits = torch.tensor([[0.0, 2.0, -9.0, 2.0, 2.0, -9.0, 2.0, -9.0]])
    drawn = set()
    for frame in range(60):
        sampler.prepare([0], [0], [frame])
        drawn.add(int(sampler.pick(0, logits)))
    assert drawn == {1, 3, 4, 6}


@pytest.mark.parametrize("rule", ["local", "realtime"])
def test_nothing_between_prepare_and_the_next_waits_for_the_device(rule: Rule) -> None:
    """Tensors without data: whoever asks for a value, or for a shape that depends on one, raises."""
    sampler = DeviceSampler(SamplingDefaults((0.8,) * K, 25, 0.9, 1.1), rule, 4, "meta", vocab_size=V)
    for row in range(4):
        sampler.set_row(row, MIXED[row])
    sampler.prepare([0, 2, 4], [0, 0, 0], [3, 5, 0])
    assert sampler.decide(torch.empty(3, 2, device="meta")).shape == (3,)
    codes = torch.stack([sampler.pick(k, torch.empty(3, V, device="meta")) for k in range(K)], 1)
    assert codes.shape == (3, K) and codes.dtype == torch.int64
    sampler.commit(codes, torch.empty(3, dtype=torch.bool, device="meta"))
