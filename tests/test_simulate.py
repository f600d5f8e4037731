"""The simulator runs the real schedulers; what it measures keeps the promises of both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from realtime.baselines import fixed_1_25, fixed_5_25, one_at_end
from realtime.compare import OURS, VARIANTS, compare, read_lengths, rows_of, table_of, verdicts
from realtime.errors import ConfigError
from realtime.simulate import GPU, WREN, Outcome, Scenario, Simulation, Utterance, Variant
from realtime.vocoder.policy import ChunkPolicy, Plan, Recent, SlotView

SHORT = Scenario(load=4, num_utterances=60, warm_up=8)


def view(index: int, pending: int, lead_s: float | None = 1.0, *, closing: bool = False) -> SlotView:
    return SlotView(index, pending, lead_s, 0.0, 0.01 * index, closing, 0.02)


class NoCost:
    """The baselines don't ask."""

    fixed_s = jitter_s = usual_s = usual_width = 0.0

    def step_s(self, width: int, num_frames: int) -> float:
        raise AssertionError


def test_the_table_is_interpolated_and_never_below_its_first_row() -> None:
    assert GPU.codec_s(16, 25) == pytest.approx(0.0583)
    assert GPU.codec_s(16, 1) == GPU.codec_s(1, 4) == pytest.approx(0.0301)
    assert GPU.codec_s(3, 10) == pytest.approx(0.0340 + 2 / 5 * 0.0064)
    assert GPU.codec_s(17, 25) == pytest.approx(2 * 0.0583), "wider is two steps"
    assert WREN.codec_s(4, 8) == pytest.approx(0.0025 + 0.032)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
@pytest.mark.parametrize("machine", [GPU, WREN, replace(GPU, is_shared=False)])
def test_every_utterance_is_heard_in_full_and_nothing_is_left(variant: Variant, machine: object) -> None:
    simulation = Simulation(replace(SHORT, machine=machine), variant)
    outcome = simulation.run()
    assert len(outcome.utterances) == SHORT.num_utterances
    assert all(u.num_arrived == u.num_frames and u.first_s is not None for u in outcome.utterances)
    assert simulation._vocoder.num_free == simulation._engine.scheduler.num_free == SHORT.max_streams
    assert outcome.num_starved == 0 and outcome.window_s > 0


@pytest.mark.parametrize("arrivals", ["closed", "listen", "poisson"])
def test_arrivals_of_any_kind_come_to_an_end(arrivals: str) -> None:
    outcome = Simulation(replace(SHORT, arrivals=arrivals, tokens_per_s=20.0), OURS).run()
    figures = outcome.figures()
    assert figures["utterances"] + outcome.num_refused >= SHORT.num_utterances
    assert figures["first_p50_ms"] < 300 and figures["audio_per_s"] > 0


def test_the_same_seed_gives_the_same_run() -> None:
    first, again = (Simulation(SHORT, OURS).run().figures() for _ in range(2))
    assert first == again
    assert Simulation(replace(SHORT, seed=2), OURS).run().figures() != first


def test_clients_that_report_and_networks_that_jitter_are_part_of_it() -> None:
    calm = Simulation(SHORT, OURS).run().figures()
    rough = Simulation(replace(SHORT, client_jitter_s=0.02, reports=1.0), OURS).run().figures()
    assert rough["first_mean_ms"] > calm["first_mean_ms"] + 10
    assert rough["c50"] > 0.9


def test_a_jitter_free_load_within_capacity_is_free_of_gaps() -> None:
    # LOAD-5, LOAD-6: at every load that is carried, and better than fixed thresholds at each
    rows = rows_of(compare([replace(SHORT, load=load, num_utterances=150) for load in (1, 8, 16)]))
    for load in (1, 8, 16):
        ours, fixed = (
            next(r for r in rows if r["load"] == load and r["variant"] == v.name) for v in VARIANTS[:2]
        )
        assert ours["c50"] == 1.0 >= fixed["c50"]
        assert ours["first_mean_ms"] < fixed["first_mean_ms"]


def test_coalescing_grows_with_load() -> None:
    # LOAD-3, LOAD-5
    widths = [
        Simulation(replace(SHORT, load=load, num_utterances=120), OURS).run().figures()["mean_width"]
        for load in (1, 4, 16)
    ]
    assert widths == sorted(widths) and widths[0] < 1.2 and widths[-1] > 6


def test_three_times_the_capacity_keeps_the_promise_to_those_who_are_admitted() -> None:
    # LOAD-1: the excess is refused at once, with a time to come back; the others hear no gap
    scenario = Scenario(load=120, num_utterances=250, warm_up=50)
    outcome = Simulation(scenario, OURS).run()
    figures = outcome.figures()
    assert outcome.num_refused > 0
    # The prediction is kept: hardly any refusal comes after a wait.
    assert outcome.refused_late <= 0.05 * (outcome.num_refused + outcome.refused_late)
    assert figures["c50"] > 0.95 and figures["first_p99_ms"] < 2000


def test_as_many_streams_as_rows_and_more_are_queued_or_refused() -> None:
    # LOAD-2, LOAD-4
    scenario = Scenario(load=12, max_streams=8, num_utterances=120, warm_up=10)
    simulation = Simulation(scenario, OURS)
    outcome = simulation.run()
    assert len(outcome.utterances) + outcome.refused_late == 120
    assert max(t for _, t in outcome.shapes) <= 25


def test_a_simulated_minute_of_64_streams_is_short() -> None:
    """In steps, not seconds: what a minute takes is bounded by them."""
    outcome = Simulation(Scenario(load=64, num_utterances=400, warm_up=64), OURS).run()
    minutes = (outcome.spans[-1][1] - outcome.spans[0][1]) / 60
    assert len(outcome.spans) / minutes < 4000


# ---- baselines


def test_fixed_thresholds_wait_for_five_then_for_25() -> None:
    policy, cost = ChunkPolicy(0.08, buckets=(16,)), NoCost()
    assert fixed_5_25([view(0, 4, None)], Recent(), policy, cost) == Plan((), 0, None)
    assert fixed_5_25([view(0, 5, None)], Recent(), policy, cost) == Plan((0,), 5, 0.0)
    assert fixed_5_25([view(0, 24)], Recent(), policy, cost).slots == ()
    joined = fixed_5_25([view(0, 25), view(1, 6), view(2, 4)], Recent(), policy, cost)
    assert joined == Plan((0, 1), 6, 0.0), "the shortest backlog of those with five"
    tail = fixed_5_25([view(0, 3, closing=True), view(1, 12)], Recent(), policy, cost)
    assert tail == Plan((0,), 3, 0.0), "tails alone"
    assert fixed_1_25([view(0, 1, None), view(1, 20)], Recent(), policy, cost) == Plan((0,), 1, 0.0)


def test_offline_decodes_an_utterance_in_one_chunk() -> None:
    policy, cost = ChunkPolicy(0.08, buckets=(16,)), NoCost()
    assert one_at_end([view(0, 90, None)], Recent(), policy, cost) == Plan((), 0, None)
    complete = [view(0, 70, None, closing=True), view(1, 90, None, closing=True), view(2, 90, None)]
    assert one_at_end(complete, Recent(), policy, cost) == Plan((1,), 90, 0.0), "the oldest"
    complete[2] = view(2, 90, None, closing=True)
    assert one_at_end(complete, Recent(), policy, cost) == Plan((2, 1), 90, 0.0), "equal ones together"


# ---- what is reported


def test_figures_are_those_of_the_utterances() -> None:
    outcome = Outcome(SHORT, OURS)
    for number in range(100):
        late_s = 0.06 if number < 2 else 0.0
        outcome.utterances.append(
            Utterance(0, 10, 0.0, first_s=0.001 * (number + 1), late_s=late_s, num_arrived=10)
        )
    figures = outcome.figures()
    assert (figures["c50"], figures["c100"]) == (0.98, 1.0)
    assert figures["first_mean_ms"] == pytest.approx(50.5)
    assert figures["first_p99_ms"] == pytest.approx(99), "by nearest rank"


def test_the_verdicts_name_every_target_of_16_and_64_streams() -> None:
    row = {
        "first_mean_ms": 100.0,
        "first_p50_ms": 100.0,
        "first_p99_ms": 150.0,
        "c50": 1.0,
        "audio_per_s": 30.0,
        "codec_per_audio": 0.01,
        "starved": 0,
    }
    better = {**row, "first_mean_ms": 90.0, "codec_per_audio": 0.005}
    rows = [
        {**(better if variant is OURS else row), "load": load, "variant": variant.name}
        for load in (16, 64)
        for variant in VARIANTS
    ]
    found = verdicts(rows)
    assert all(reached for *_, reached in found) and len(found) == 10
    assert table_of([{**row, "load": 16, "variant": "x", **_missing()}], "title").row_count == 1


def _missing() -> dict[str, float]:
    names = ("queue_mean_ms", "c100", "worst_ms", "mean_width", "mean_frames", "refused")
    return dict.fromkeys(names, 0.0)


def test_lengths_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "lengths"
    path.write_text("12\n30 7\n")
    assert read_lengths(path) == [12, 30, 7]
    for wrong in ("", "12 x", "0"):
        path.write_text(wrong)
        with pytest.raises(ConfigError):
            read_lengths(path)
    with pytest.raises(ConfigError):
        read_lengths(tmp_path / "nothing")
