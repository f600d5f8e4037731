"""`realtime bench --simulate`: the scheduler and its baselines on simulated machines, side by side."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.table import Table

from realtime import machine as where
from realtime import plots
from realtime.baselines import fixed_1_25, fixed_5_25, one_at_end
from realtime.errors import ConfigError
from realtime.simulate import GPU, UTTERANCE_FRAMES, Machine, Outcome, Scenario, Simulation, Variant

OURS, FIXED_5, FIXED_1, WHOLE = VARIANTS = (
    Variant("realtime"),
    Variant("(a) 5 then 25", fixed_5_25, is_paced=False),
    Variant("(b) 1 then 25", fixed_1_25, is_paced=False),
    Variant("(c) one at the end", one_at_end, is_paced=False, whole=True),
)
MACHINES = {"gpu": GPU, "gpu-overlap": replace(GPU, name="gpu-overlap", is_shared=False)}
EMBEDDED = "wren"  # measured when it is wanted
COLUMNS = {
    "first ms": "first_mean_ms",
    "p50": "first_p50_ms",
    "p99": "first_p99_ms",
    "permit ms": "queue_mean_ms",
    "C50 %": "c50",
    "C100 %": "c100",
    "worst ms": "worst_ms",
    "audio s/s": "audio_per_s",
    "codec ms/s": "codec_per_audio",
    "width": "mean_width",
    "T": "mean_frames",
    "refused": "refused",
}
SCALES = {"c50": 100.0, "c100": 100.0, "codec_per_audio": 1000.0}

Row = dict[str, Any]


def read_lengths(path: Path | None) -> Sequence[int]:
    """Frames per utterance, one number a line. Raises ConfigError."""
    if path is None:
        return UTTERANCE_FRAMES
    try:
        lengths = [int(line) for line in path.read_text(encoding="utf-8").split()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: one number of frames a line is expected: {error}") from error
    if not lengths or min(lengths) < 1:
        raise ConfigError(f"{path}: at least one length, none below 1")
    return lengths


def compare(scenarios: Iterable[Scenario], variants: Sequence[Variant] = VARIANTS) -> list[Outcome]:
    """Every variant in every scenario."""
    return [Simulation(scenario, variant).run() for scenario in scenarios for variant in variants]


def rows_of(outcomes: Iterable[Outcome]) -> list[Row]:
    return [
        {
            "machine": outcome.scenario.machine.name,
            "arrivals": outcome.scenario.arrivals,
            "load": outcome.scenario.load,
            "variant": outcome.variant.name,
            **outcome.figures(),
        }
        for outcome in outcomes
    ]


def table_of(rows: Sequence[Row], title: str) -> Table:
    table = Table(title=title, box=None, pad_edge=False)
    table.add_column("load", justify="right")
    table.add_column("variant")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for row in rows:
        cells = [f"{row[key] * SCALES.get(key, 1.0):.{_digits(key)}f}" for key in COLUMNS.values()]
        table.add_row(f"{row['load']:g}", row["variant"], *cells)
    return table


def _digits(key: str) -> int:
    return (
        2 if key in ("c50", "c100") else 1 if key in ("codec_per_audio", "mean_width", "mean_frames") else 0
    )


def verdicts(rows: Sequence[Row]) -> list[tuple[str, float, str, bool]]:
    """The targets of the scheduler that these rows say something about: name, value, target, reached."""
    found: list[tuple[str, float, str, bool]] = []

    def of(load: float, variant: Variant) -> Row | None:
        return next((r for r in rows if r["load"] == load and r["variant"] == variant.name), None)

    for load in dict.fromkeys(row["load"] for row in rows):
        ours, fixed, whole = of(load, OURS), of(load, FIXED_5), of(load, WHOLE)
        if ours is None or fixed is None:
            continue
        first = ours["first_mean_ms"] / fixed["first_mean_ms"]
        found.append((f"first audio / (a) at {load:g}", first, "< 1", first < 1))
        c50 = ours["c50"]
        good = c50 >= fixed["c50"] and (load != 16 or c50 >= 0.998)
        found.append((f"C50 at {load:g}", c50, f">= {max(fixed['c50'], 0.998 * (load == 16)):.4f}", good))
        if load >= 16:
            codec = ours["codec_per_audio"] / fixed["codec_per_audio"]
            found.append((f"vocoder time / (a) at {load:g}", codec, "<= 0.6", codec <= 0.6))
        if whole is not None and load in (16, 64):
            ratio, target = ours["audio_per_s"] / whole["audio_per_s"], 0.92 if load == 16 else 0.95
            found.append((f"streaming / offline at {load:g}", ratio, f">= {target}", ratio >= target))
        if load == 16:
            spread = ours["first_p99_ms"] / ours["first_p50_ms"]
            found.append(("first audio p99 / p50 at 16", spread, "<= 2", spread <= 2))
    starved = sum(row["starved"] for row in rows if row["variant"] == OURS.name)
    found.append(("starvation decodes", starved, "0", starved == 0))
    return found


def draw(outcomes: Sequence[Outcome], rows: Sequence[Row], folder: Path) -> None:
    """PNG pictures of one machine's run."""
    plots.draw_lines(rows, "first_mean_ms", "mean first audio, ms", folder / "first_audio.png", is_log=True)
    plots.draw_lines(rows, "c50", "share of streams without an underrun over 50 ms", folder / "c50.png")
    offline = {row["load"]: row["audio_per_s"] for row in rows if row["variant"] == WHOLE.name}
    ratios = [{**row, "ratio": row["audio_per_s"] / offline[row["load"]]} for row in rows if offline]
    if ratios:
        plots.draw_lines(ratios, "ratio", "throughput / one chunk at the end", folder / "throughput.png")
    nearest = min(outcomes, key=lambda outcome: abs(outcome.scenario.load - 16)).scenario.load
    at = [outcome for outcome in outcomes if outcome.scenario.load == nearest]
    sizes = {o.variant.name: [float(t) for (_, t), n in o.shapes.items() for _ in range(n)] for o in at}
    plots.draw_histogram(sizes, f"frames of a step, {nearest:g} streams", folder / "chunks.png", (0, 100))
    slacks = {o.variant.name: o.slacks_s for o in at}
    title = f"lead when a chunk arrives, seconds, {nearest:g} streams"
    plots.draw_histogram(slacks, title, folder / "slack.png", (-0.5, 4))
    ours = next(outcome for outcome in at if outcome.variant.name == OURS.name)
    middle_s = ours.spans[len(ours.spans) // 2][1]
    plots.draw_gantt(ours.spans, middle_s, folder / "second.png")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("simulation")
    group.add_argument(
        "--machine",
        choices=(*MACHINES, EMBEDDED, "all"),
        default="all",
        help="a large model on a GPU, engine and vocoder taking turns (gpu) or side by side (gpu-overlap), "
        "or the embedded voice at its costs on this machine, measured first (wren); default: all",
    )
    group.add_argument("--loads", default="1,2,4,8,16,32,64", help="streams, default: %(default)s")
    group.add_argument("--arrivals", choices=("closed", "listen", "poisson"), default="closed")
    group.add_argument("--lengths", type=Path, metavar="FILE", help="frames per utterance, one a line")
    group.add_argument("--network-jitter-ms", type=float, default=0.0, help="mean, exponential")
    group.add_argument("--reports", type=float, default=0.0, help="share of clients that report playing")
    group.add_argument("--seed", type=int, default=1)


def _measured(console: Console) -> Machine:
    from realtime.measure import measured  # loads a model, and torch

    machine = measured()
    console.print(
        f"{machine.name}, measured here: decode step {1000 * machine.ar_fixed_s:.1f} +"
        f" {1000 * machine.ar_row_s:.2f} ms a row, vocoder step {1000 * machine.codec_fixed_s:.1f} +"
        f" {1000 * machine.codec_lane_frame_s:.2f} ms a frame of a stream"
    )
    return machine


def main(args: argparse.Namespace) -> int:
    """Runs the comparison that `add_arguments` describes."""
    names = [*MACHINES, EMBEDDED] if args.machine == "all" else [args.machine]
    try:
        loads = [float(load) for load in args.loads.split(",")]
    except ValueError:
        raise ConfigError(f"--loads are numbers with commas, got {args.loads!r}") from None
    if not all(0 < load < math.inf for load in loads):
        raise ConfigError(f"--loads are above 0, got {args.loads!r}")
    lengths = read_lengths(args.lengths)
    console = Console(width=150)
    console.print(f"simulated on {where.title()}", markup=False)
    all_rows: list[Row] = []
    all_verdicts: dict[str, list[tuple[str, float, str, bool]]] = {}
    for name in names:
        machine = MACHINES[name] if name in MACHINES else _measured(console)
        scenarios = [
            Scenario(
                machine=machine,
                load=load,
                arrivals=cast(Any, args.arrivals),
                num_utterances=args.utterances,
                warm_up=max(args.utterances // 20, 2 * round(load)),
                lengths=lengths,
                tokens_per_s=args.tokens_per_s,
                client_jitter_s=args.network_jitter_ms / 1000,
                reports=args.reports,
                seed=args.seed,
            )
            for load in loads
        ]
        outcomes = compare(scenarios)
        rows = rows_of(outcomes)
        all_rows += rows
        console.print(table_of(rows, f"{machine.name}, {args.arrivals}, {args.utterances} utterances each"))
        found = all_verdicts[machine.name] = verdicts(rows)
        for target_name, value, target, reached in found:
            console.print(
                f"{'reached' if reached else 'MISSED ':8} {target_name}: {value:.3f} ({target})", markup=False
            )
        console.print()
        if args.plots is not None:
            draw(outcomes, rows, args.plots / machine.name)
    result = {"kind": "simulation", "machine": where.machine(), "rows": all_rows, "targets": all_verdicts}
    print(json.dumps({"kind": "simulation", "targets": all_verdicts}))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0
