"""Pictures of bench results. Needs matplotlib (extra `bench`), imported when a picture is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from realtime.errors import ConfigError

Rows = Sequence[Mapping[str, Any]]  # one per variant and load, with the figures
Span = tuple[str, float, float]  # what, start, length; seconds


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install 'realtime[bench]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as pyplot

    return pyplot


def draw_lines(rows: Rows, figure: str, label: str, path: Path, *, is_log: bool = False) -> None:
    """One line per variant: a figure against load."""
    pyplot = _pyplot()
    canvas, axes = pyplot.subplots(figsize=(7, 4))
    for variant in dict.fromkeys(row["variant"] for row in rows):
        points = [(row["load"], row[figure]) for row in rows if row["variant"] == variant]
        axes.plot(*zip(*points, strict=True), marker="o", label=variant)
    axes.set_xscale("log", base=2)
    if is_log:
        axes.set_yscale("log")
    axes.set_xlabel("streams")
    axes.set_ylabel(label)
    axes.grid(True, alpha=0.3)
    axes.legend()
    _save(canvas, path)


def draw_histogram(
    values: Mapping[str, Sequence[float]], label: str, path: Path, limits: tuple[float, float]
) -> None:
    """Shares of values, one outline per variant."""
    pyplot = _pyplot()
    canvas, axes = pyplot.subplots(figsize=(7, 4))
    for variant, found in values.items():
        if found:
            weights = [1 / len(found)] * len(found)
            axes.hist(found, bins=50, range=limits, weights=weights, histtype="step", label=variant)
    axes.set_xlabel(label)
    axes.set_ylabel("share")
    axes.legend()
    _save(canvas, path)


def draw_gantt(spans: Sequence[Span], start_s: float, path: Path) -> None:
    """One second of the machine: what ran when."""
    pyplot = _pyplot()
    canvas, axes = pyplot.subplots(figsize=(10, 2))
    for number, what in enumerate(("engine", "vocoder")):
        inside = [(at - start_s, took) for name, at, took in spans if name == what]
        shown = [span for span in inside if -0.2 < span[0] < 1.0]
        axes.broken_barh(shown, (number - 0.4, 0.8), edgecolor="white", facecolor=f"C{number}")
    axes.set_xlim(0, 1)
    axes.set_yticks([0, 1], ["engine", "vocoder"])
    axes.set_xlabel("seconds")
    _save(canvas, path)


def _save(canvas: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.tight_layout()
    canvas.savefig(path, dpi=120)
    _pyplot().close(canvas)
