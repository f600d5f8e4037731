"""A scheduler on a fake clock with a stand-in for the model, and what holds for all it sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fakes import SPEC, FakeClock, FakeRunner

from realtime.engine.row import Row
from realtime.engine.scheduler import Batch, Scheduler
from realtime.messages import (
    Drop,
    EndSegment,
    EndText,
    EngineMessage,
    Finish,
    Frames,
    Note,
    Pace,
    Prompt,
    StreamId,
    Tokens,
    VocoderMessage,
)
from realtime.models.base import ModelSpec


@dataclass
class Desk:
    """A scheduler, a clock, a runner, and everything that was sent."""

    num_rows: int = 4
    step_s: float = 0.01
    runner: Any = field(default_factory=FakeRunner)
    clock: FakeClock = field(default_factory=FakeClock)
    sent: list[VocoderMessage] = field(default_factory=list)
    spec: ModelSpec = SPEC

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.spec, self.num_rows)

    def tell(self, *messages: EngineMessage) -> None:
        for message in messages:
            match message:
                case Prompt():
                    row = self.scheduler.add(message, self.clock())
                    if row is not None:
                        self.runner.open_row(row)
                case Tokens():
                    self.scheduler.feed(message)
                case EndSegment():
                    self.scheduler.end_segment(message)
                case EndText():
                    self.scheduler.end_text(message)
                case Pace():
                    self.scheduler.pace(message)
                case _:
                    raise AssertionError(message)
        self._collect()

    def step(self) -> Batch | float | None:
        """One turn: the batch that ran, or what `next` answered instead."""
        batch, wait_s = self.scheduler.next(self.clock())
        self._collect()
        if batch is None:
            return wait_s
        out = self.runner.run(batch)
        self.clock.advance(self.step_s)
        self.scheduler.commit(batch, out, self.clock())
        self._collect()
        return batch

    def run(self, limit: int = 5000) -> int:
        """Steps until nothing runs; how many steps ran."""
        for count in range(limit):
            if not isinstance(self.step(), Batch):
                return count
        raise AssertionError("does not come to rest")

    def row(self, stream: int) -> Row:
        return self.scheduler.rows[StreamId(stream)]

    def num_frames(self, stream: int) -> int:
        return sum(stream in m.stream_ids for m in self.sent if isinstance(m, Frames))

    def of(self, stream: int, kind: type) -> list[VocoderMessage]:
        return [m for m in self.sent if isinstance(m, kind) and m.stream_id == stream]

    def notes(self, stream: int, kind: str) -> list[tuple[int, int, int]]:
        notes = [m for m in self.of(stream, Note) if isinstance(m, Note)]
        return [(n.segment, n.frame, n.value) for n in notes if n.kind == kind]

    def _collect(self) -> None:
        self.sent += self.scheduler.outbox
        self.scheduler.outbox = []


def mentions(message: VocoderMessage, stream: int) -> bool:
    if isinstance(message, Frames):
        return stream in message.stream_ids
    return message.stream_id == stream


def check_order(sent: Sequence[VocoderMessage], stream: int) -> None:
    """Frames are counted right by every note, the first says so, and nothing follows the end."""
    num_frames = 0
    ended = False
    for message in sent:
        if not mentions(message, stream):
            continue
        assert not ended, message
        match message:
            case Frames():
                i = message.stream_ids.index(StreamId(stream))
                assert (message.started[i] is not None) == (num_frames == 0)
                assert message.codes.dtype == np.int16 and message.codes.ndim == 2
                num_frames += 1
            case Note():
                assert message.frame == num_frames, (message, num_frames)
            case Finish() | Drop():
                ended = True
    assert ended, stream
