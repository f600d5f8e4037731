"""The engine stage: text messages in, one decode step at a time, frames out to the vocoder."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from realtime import metrics
from realtime.engine.row import Row
from realtime.engine.scheduler import Batch, Pacing, Scheduler, StepOutput
from realtime.errors import StageFailed
from realtime.messages import (
    Abort,
    Drop,
    EndSegment,
    EndText,
    EngineMessage,
    Pace,
    Prompt,
    StreamId,
    Tokens,
    VocoderMessage,
)
from realtime.models.base import ModelSpec


class Runner(Protocol):
    def open_row(self, row: Row) -> None: ...

    def run(self, batch: Batch) -> StepOutput: ...


class Engine:
    """`handle` and `step` are called by one thread only (or by a test, with no thread at all). `step` is
    `begin`, the runner, `complete`: a simulation puts its own time in between."""

    def __init__(
        self,
        spec: ModelSpec,
        runner: Runner,
        num_rows: int,
        to_vocoder: Callable[[VocoderMessage], None],
        clock: Callable[[], float] = time.monotonic,
        pacing: Pacing | None = None,
    ) -> None:
        self.scheduler = Scheduler(spec, num_rows, pacing)
        self._runner = runner
        self._to_vocoder = to_vocoder
        self._clock = clock
        self._running: Batch | None = None
        self._began_s = 0.0
        self._handling: StreamId | None = None

    def handle(self, message: EngineMessage) -> None:
        self._handling = message.stream_id
        match message:
            case Tokens():
                self.scheduler.feed(message)
            case Prompt():
                row = self.scheduler.add(message, self._clock())
                if row is not None:
                    self._runner.open_row(row)
            case EndSegment():
                self.scheduler.end_segment(message)
            case EndText():
                self.scheduler.end_text(message)
            case Pace():
                self.scheduler.pace(message)
                self._to_vocoder(message)
            case Abort():
                row = self.scheduler.remove(message.stream_id)
                pads = row.text_pads if row is not None else 0
                self._flush()
                # Also for a stream that never had a row: there is one way out for all.
                self._to_vocoder(Drop(message.stream_id, "cancelled", None, pads))
        self._handling = None
        self._flush()

    def step(self) -> float | None:
        batch = self.begin()
        if not isinstance(batch, Batch):
            return batch
        self.complete(batch, self._runner.run(batch))
        return 0.0

    def begin(self) -> Batch | float | None:
        """The step to run now; or the seconds after which to ask again, None if only a message can
        change anything."""
        self._began_s = self._clock()
        batch, wait_s = self.scheduler.next(self._began_s)
        self._running = batch
        return wait_s if batch is None else batch

    def complete(self, batch: Batch, out: StepOutput) -> None:
        """What the model answered."""
        now = self._clock()
        self.scheduler.learn(batch, now - self._began_s)
        metrics.ENGINE_STEP.labels(batch.phase).observe(now - self._began_s)
        if batch.phase == "decode":
            metrics.ENGINE_ROWS.observe(len(batch.rows))
        self.scheduler.commit(batch, out, now)
        self._running = None
        self._flush()

    def fail(self, error: Exception) -> None:
        """The step, or a message, raised: its streams are closed, their rows are free, the others go
        on."""
        failure = StageFailed("the engine failed on this step")
        batch, self._running = self._running, None
        if batch is not None:
            self.scheduler.fail(batch, failure)
        self._flush()
        stream_id, self._handling = self._handling, None
        if stream_id is not None:
            self.scheduler.remove(stream_id)
            self._to_vocoder(Drop(stream_id, "failed", failure))

    def close(self) -> None:
        """Nothing outlives the thread."""

    def _flush(self) -> None:
        while self.scheduler.parked:
            metrics.ENGINE_PARKED.labels(self.scheduler.parked.pop()).inc()
        outbox, self.scheduler.outbox = self.scheduler.outbox, []
        for message in outbox:
            self._to_vocoder(message)
