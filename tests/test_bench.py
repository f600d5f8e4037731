"""The bench: what it counts, that a server is idle afterwards, and both sides of a pair measured alike."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from realtime import bench
from realtime.bench import Load, Tally, Usage, figures, loads_of, parse_usage, run_load, usage_of
from realtime.errors import ConfigError
from realtime.pairs import run_pairs, summarize
from realtime.probe import Turn
from tests.server_fakes import run, served


def test_the_ratio_is_that_of_the_medians() -> None:
    report = summarize([10.0, 20.0, 900.0], [22.0, 21.0, 1.0])
    assert (report.num_pairs, report.ratio) == (3, pytest.approx(1.05))
    assert report.off_ms["p50"] == 20.0 and report.on_ms["p50"] == 21.0


def test_pairs_are_measured_on_a_real_server_which_is_idle_afterwards() -> None:
    async def main() -> None:
        async with served() as server:
            report = await run_pairs(server.url, 4)
            assert report.num_pairs == 4
            assert 0 < report.off_ms["p50"] and 0 < report.on_ms["p50"]

    run(main())


# ---- under load


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(words)


def test_clients_in_a_loop_are_counted_after_their_warm_up() -> None:
    async def main() -> None:
        async with served(max_streams=4) as server:
            tally = await run_load(server.url, Load(streams=3, num_utterances=12))
            assert 12 <= len(tally.turns) < 12 + 3 and not tally.errors and not tally.refused
            assert tally.audio_s > 0 and tally.ended_s > tally.began_s > 0

    run(main())


def test_a_rate_does_not_wait_for_who_is_not_done() -> None:
    async def main() -> None:
        async with served(max_streams=8) as server:
            tally = await run_load(server.url, Load(rate=50.0, num_utterances=10, tokens_per_s=200.0))
            assert len(tally.turns) == 10 and not tally.errors

    run(main())


def test_what_is_refused_is_counted_and_is_no_failure() -> None:
    # LOAD-1: two streams at once, eight are offered; who is refused is told when to come back
    async def main() -> None:
        async with served(max_streams=2, queue_s=0.0) as server:
            tally = await run_load(server.url, Load(rate=500.0, num_utterances=8))
            assert tally.refused + len(tally.turns) == 8 and tally.refused > 0 and not tally.errors
            assert len(tally.refused_ms) == tally.refused

    run(main())


def test_the_server_tells_what_its_stages_used() -> None:
    async def main() -> None:
        async with served() as server:
            usage = await usage_of(server.url)
            assert usage is not None and {"engine", "vocoder", "rest"} <= set(usage.cpu_s)
            assert await usage_of("ws://127.0.0.1:1/v1/tts/stream") is None

    run(main())


def test_usage_is_read_from_the_text_format() -> None:
    text = """# TYPE tts_stage_cpu_seconds counter
tts_stage_cpu_seconds_total{stage="engine"} 2.5
tts_stage_cpu_seconds_total{stage="vocoder"} 1e-1
process_cpu_seconds_total 4.6
process_resident_memory_bytes 1.048576e+08
"""
    usage = parse_usage(text)
    assert usage.cpu_s == pytest.approx({"engine": 2.5, "vocoder": 0.1, "rest": 2.0})
    assert usage.memory_mb == pytest.approx(100.0)


def test_figures_are_shares_of_utterances_and_of_time() -> None:
    turns = [Turn(0, i, ttfa_ms=float(i + 1), underrun_ms=60.0 * (i == 0), rtf=0.5) for i in range(10)]
    tally = Tally(turns, [10.0, 20.0], refused=1, refused_ms=[3.0], audio_s=6.0, began_s=1.0, ended_s=3.0)
    before, after = Usage({"engine": 1.0}, 90.0), Usage({"engine": 3.0}, 100.0)
    row = figures(tally, before, after, own_cpu_s=0.1, took_s=4.0)
    assert (row["c50"], row["c100"], row["worst_ms"]) == (0.9, 1.0, 60.0)
    assert (row["audio_per_s"], row["cpu_engine"], row["generator_cpu"]) == (3.0, 0.5, 0.025)
    assert (row["gap_p99_ms"], row["refused_p99_ms"], row["memory_mb"]) == (20.0, 3.0, 100.0)
    assert bench.table_of([{"load": "1", "mode": "streaming", **row}], "title").row_count == 1


def test_loads_are_read_from_the_command_line(tmp_path: Path) -> None:
    names = [(name, load.streams) for name, load in loads_of(arguments("--streams", "1,16"))]
    assert names == [("1", 1), ("16", 16)]
    ((name, load),) = loads_of(arguments("--rate", "2.5", "--utterances", "7"))
    assert (name, load.rate, load.num_utterances) == ("2.5/s", 2.5, 7)
    texts = tmp_path / "texts"
    texts.write_text("One.\n\nTwo.\n")
    ((_, load),) = loads_of(arguments("--streams", "1", "--texts", str(texts)))
    assert load.texts == ["One.", "Two."]
    texts.write_text("\n")
    for words in (["--streams", "x"], ["--streams", "0"], ["--texts", str(texts)], ["--texts", "/nowhere"]):
        with pytest.raises(ConfigError):
            list(loads_of(arguments(*words)))


def test_the_simulation_is_a_mode_of_the_same_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    words = ["--simulate", "--machine", "wren", "--loads", "2", "--utterances", "20", "--json", str(path)]
    assert bench.main(arguments(*words)) == 0
    assert '"kind": "simulation"' in capsys.readouterr().out and path.exists()
