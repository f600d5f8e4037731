"""What word times cost in first audio, measured on a running server in interleaved pairs.

The two sides of a pair follow each other at once, in alternating order, so that whatever else the
machine does meets both.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rich.console import Console
from rich.progress import track

from realtime.client import Session, connect
from realtime.errors import StageFailed
from realtime.probe import percentiles

TEXT = "Good morning, how can I help you today?"
WARM_UP = 5  # pairs that are not counted


@dataclass(frozen=True, slots=True)
class PairReport:
    """First audio in ms with word times and without; `ratio` is of the medians, on / off."""

    num_pairs: int
    off_ms: dict[str, float]
    on_ms: dict[str, float]
    ratio: float


async def first_audio_ms(session: Session, words: str, index: int) -> float:
    """From the text's leaving to the first audio's coming; the rest of the utterance is cancelled."""
    speech = session.context(f"{words}-{index}", words=words, seed=index)
    sent_s = time.perf_counter()
    await speech.send(TEXT, end=True)
    took_ms = None
    async for event in speech:
        if event.frame is not None and took_ms is None:
            took_ms = (event.received_s - sent_s) * 1000
            await speech.cancel()
        elif event.type == "error":
            raise StageFailed(str(event.message.get("message")))
    if took_ms is None:
        raise StageFailed("an utterance ended without audio")
    return took_ms


async def run_pairs(url: str, num_pairs: int) -> PairReport:
    """Raises TTSError where the server can't be reached or refuses."""
    took: dict[str, list[float]] = {"none": [], "word": []}
    async with connect(url) as session:
        await session.ready()
        for index in track(
            range(num_pairs + WARM_UP), "measuring", console=Console(stderr=True), transient=True
        ):
            order = ("none", "word") if index % 2 else ("word", "none")
            for words in order:
                took_ms = await first_audio_ms(session, words, index)
                if index >= WARM_UP:
                    took[words].append(took_ms)
    return summarize(took["none"], took["word"])


def summarize(off_ms: Sequence[float], on_ms: Sequence[float]) -> PairReport:
    ratio = median(on_ms) / median(off_ms)
    return PairReport(len(off_ms), percentiles(off_ms), percentiles(on_ms), round(ratio, 4))
