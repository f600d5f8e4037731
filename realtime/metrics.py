"""The metrics, named once; `/metrics` shows them. A gauge moves where the resource is taken or given back.

One process serves one device, so they live as long as the process and are shared by all who import them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import REGISTRY, Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FAST_S = (0.001, 0.002, 0.004, 0.008, 0.012, 0.016, 0.024, 0.032, 0.048, 0.064, 0.1, 0.2, 0.5)
_FIRST_S = (0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 3.0)
_LEAD_S = (-1.0, -0.5, -0.2, -0.1, -0.05, 0.0, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 20.0)
_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)

# ---- streams
TTFA = Histogram("tts_ttfa_seconds", "From enough text to the first sound of a stream", buckets=_FIRST_S)
RTF = Histogram(
    "tts_rtf",
    "Time to make a stream by its length",
    buckets=(0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0, 1.5, 3),
)
LEAD_MIN = Histogram("tts_lead_min_seconds", "Least lead of a stream over its life", buckets=_LEAD_S)
UNDERRUNS = Counter("tts_underruns", "Chunks that came after their listener had run dry")
STREAMS = Gauge("tts_streams", "Streams by state", ["state"])
CLOSED = Counter("tts_streams_closed", "Streams that ended", ["reason"])
ERRORS = Counter("tts_errors", "Refusals and failures of streams", ["code"])
PERMIT_WAIT = Histogram("tts_permit_wait_seconds", "Wait for a row and a slot", buckets=(0.0, *_FIRST_S))
# ---- engine
ENGINE_STEP = Histogram("tts_engine_step_seconds", "Engine steps", ["phase"], buckets=_FAST_S)
ENGINE_ROWS = Histogram("tts_engine_rows", "Rows of a decode step", buckets=_WIDTHS)
ENGINE_PARKED = Counter("tts_engine_parked", "Rows that were taken out of the decode batch", ["why"])
# ---- vocoder
VOCODER_STEP = Histogram("tts_vocoder_step_seconds", "Vocoder steps", buckets=_FAST_S)
VOCODER_FRAMES = Histogram(
    "tts_vocoder_chunk_frames", "Frames of a step", buckets=(1, 2, 4, 5, 8, 12, 16, 25, 50, 100)
)
VOCODER_WIDTH = Histogram("tts_vocoder_width", "Streams of a step", buckets=_WIDTHS)
VOCODER_FIXED = Counter("tts_vocoder_fixed_seconds", "Part of the steps' time that is their fixed cost")
VOCODER_SLACK = Histogram(
    "tts_vocoder_slack_seconds", "Lead of a stream when its chunk is ready", buckets=_LEAD_S
)
GRAPH_MISSES = Counter("tts_graph_misses", "Steps of a shape without a captured graph")
# ---- voices
VOICES = Counter("tts_voice_cache", "References asked for, by what was there", ["result"])
VOICE_ENCODE = Histogram("tts_voice_encode_seconds", "Encoding of a batch of references", buckets=_FIRST_S)
# ---- the process
QUARANTINED = Gauge("tts_quarantined", "Rows or slots that can't be used again", ["pool"])
STALE_EVENTS = Counter("tts_stale_events", "Events of streams that are gone")
BUILD = Info("tts_build", "What runs")


class _Stages(Collector):
    """Queue depth and CPU time of the running stages, read when asked for."""

    def __init__(self) -> None:
        self.read: Callable[[], Iterable[tuple[str, int, float]]] = tuple

    def collect(self) -> Iterable[Metric]:
        depth = GaugeMetricFamily("tts_queue_depth", "Messages waiting for a stage", labels=["stage"])
        cpu_s = CounterMetricFamily("tts_stage_cpu_seconds", "CPU time of a stage's thread", labels=["stage"])
        for stage, waiting, used_s in self.read():
            depth.add_metric([stage], waiting)
            cpu_s.add_metric([stage], used_s)
        return depth, cpu_s


_stages = _Stages()
REGISTRY.register(_stages)


def watch_stages(read: Callable[[], Iterable[tuple[str, int, float]]]) -> None:
    """`read` gives stage, messages waiting, and CPU seconds used; the last one to watch is shown."""
    _stages.read = read


def exposition() -> bytes:
    """Everything in Prometheus' text format."""
    return generate_latest(REGISTRY)
