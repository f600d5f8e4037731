"""The engine stage beside the real vocoder stage: messages in, one way out for every stream."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from fakes import SPEC, FakeClock, FakeDecoder, FakeRunner, joined, prompt, sentence, utterance, whole_pcm

from realtime.engine.engine import Engine
from realtime.errors import StageFailed
from realtime.messages import (
    Abort,
    Closed,
    Drop,
    EndText,
    EngineMessage,
    Finish,
    Frames,
    Note,
    Pace,
    StreamEvent,
    StreamId,
    Tokens,
    VocoderMessage,
)
from realtime.vocoder.policy import ChunkPolicy
from realtime.vocoder.runner import CodecRunner
from realtime.vocoder.vocoder import Vocoder


@dataclass
class Ring:
    """Both stages on one thread and a fake clock."""

    num_rows: int = 4
    runner: FakeRunner = field(default_factory=FakeRunner)
    decoder: FakeDecoder = field(default_factory=FakeDecoder)
    clock: FakeClock = field(default_factory=FakeClock)
    sent: list[VocoderMessage] = field(default_factory=list)
    events: list[StreamEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        codec = CodecRunner(SPEC, self.decoder, self.num_rows)
        self.vocoder = Vocoder(
            SPEC, codec, self.num_rows, ChunkPolicy(SPEC.frame_s), self.events.extend, self.clock
        )
        self.engine = Engine(SPEC, self.runner, self.num_rows, self._hop, self.clock)

    def _hop(self, message: VocoderMessage) -> None:
        self.sent.append(message)
        self.vocoder.handle(message)

    def tell(self, *messages: EngineMessage) -> None:
        for message in messages:
            try:
                self.engine.handle(message)
            except Exception as error:
                self.engine.fail(error)

    def turn(self) -> bool:
        """One step of each; whether anything ran."""
        waits = []
        for stage in (self.engine, self.vocoder):
            try:
                waits.append(stage.step())
            except Exception as error:
                stage.fail(error)
                waits.append(0.0)
        self.clock.advance(0.01)
        return any(wait_s is not None for wait_s in waits)

    def run(self) -> None:
        for _ in range(5000):
            if not self.turn():
                return
        raise AssertionError("does not come to rest")

    def closed(self, stream: int) -> list[Closed]:
        return [e for e in self.events if isinstance(e, Closed) and e.stream_id == stream]

    def frames(self, stream: int) -> list[list[int]]:
        found = []
        for message in self.sent:
            if isinstance(message, Frames) and stream in message.stream_ids:
                codes = message.codes[message.stream_ids.index(StreamId(stream)), SPEC.codec_codebooks]
                found.append(codes.tolist())
        return found

    def check_free(self) -> None:
        assert self.engine.scheduler.num_free == self.vocoder.num_free == self.num_rows


def test_a_stream_is_spoken_and_closed_and_everything_is_free() -> None:
    ring = Ring()
    ring.tell(*utterance(1, 5, 8, seed=3))
    ring.run()
    (closed,) = ring.closed(1)
    assert (closed.reason, closed.frames) == ("done", len(ring.frames(1)))
    assert np.array_equal(joined(ring.events, 1), whole_pcm(3, ring.frames(1)))
    ring.check_free()


def test_every_note_lies_where_the_audio_says() -> None:
    ring = Ring()
    ring.tell(*sentence(1, 5), prompt(1, 1, silence_ms=300), *sentence(1, 6, 2), EndText(StreamId(1)))
    ring.run()
    notes = [e for e in ring.events if isinstance(e, Note)]
    assert [(n.kind, n.segment) for n in notes] == [
        ("segment_end", 0),
        ("silence", 1),
        ("segment_end", 1),
        ("segment_end", 2),
    ]
    assert notes[0].frame == notes[1].frame and notes[3].frame == len(ring.frames(1))


@pytest.mark.parametrize(
    "state", ["never seen", "first tokens", "speaking", "parked", "held", "tail", "over"]
)
def test_an_abort_in_any_state_gives_one_end_and_frees_all(state: str) -> None:
    # CAN-1, CAN-3, CAN-9
    ring = Ring()
    if state == "first tokens":
        ring.tell(prompt(1), Tokens(StreamId(1), (100,)))
    elif state == "parked":
        ring.tell(prompt(1), Tokens(StreamId(1), (100, 101, 102)))
        ring.run()
    elif state != "never seen":
        ring.tell(*utterance(1, 9))
    if state in ("speaking", "held"):
        ring.turn()
    if state == "held":
        ring.tell(Pace(StreamId(1), True, None, ring.clock()))
    if state == "tail":
        while not any(isinstance(m, Finish) for m in ring.sent):
            ring.engine.step()
    if state == "over":
        ring.run()
    ring.tell(Abort(StreamId(1)))
    reasons = [closed.reason for closed in ring.closed(1)]
    assert reasons == (["done", "cancelled"] if state == "over" else ["cancelled"])
    ring.check_free()
    count = len(ring.events)
    ring.tell(Tokens(StreamId(1), (103,)), EndText(StreamId(1)))
    ring.run()
    assert len(ring.events) == count
    ring.check_free()


def test_a_step_that_raises_closes_its_streams_and_the_next_ones_work() -> None:
    # FAULT-1
    ring = Ring()
    ring.tell(*utterance(1, 5), *utterance(2, 5))
    ring.tell(prompt(3), Tokens(StreamId(3), (100,)))  # parked: not in the batch
    ring.turn()
    ring.runner.error = RuntimeError("broken")
    ring.run()
    for stream in (1, 2):
        (closed,) = ring.closed(stream)
        assert closed.reason == "failed" and isinstance(closed.error, StageFailed)
        assert "broken" not in closed.error.message
    ring.tell(Tokens(StreamId(3), (101, 102)), EndText(StreamId(3)), *utterance(4, 5))
    ring.run()
    assert [ring.closed(stream)[0].reason for stream in (3, 4)] == ["done", "done"]
    ring.check_free()


def test_a_stream_that_can_not_be_taken_is_closed_and_leaves_no_row() -> None:
    ring = Ring()
    ring.runner.open_error = RuntimeError("broken")
    ring.tell(*utterance(1, 5), *utterance(2, 5))
    ring.run()
    assert [ring.closed(stream)[0].reason for stream in (1, 2)] == ["failed", "done"]
    ring.check_free()


def test_text_on_its_way_to_a_stream_that_failed_starts_nothing() -> None:
    ring = Ring()
    ring.tell(*sentence(1, 5))
    ring.runner.error = RuntimeError("broken")
    ring.turn()
    ring.tell(*sentence(1, 5, 1), EndText(StreamId(1)))
    ring.run()
    assert [closed.reason for closed in ring.closed(1)] == ["failed"]
    ring.check_free()


def test_a_stream_that_failed_in_the_vocoder_is_over_when_its_abort_comes() -> None:
    ring = Ring()
    ring.tell(*sentence(1, 30), *utterance(2, 30))
    ring.turn()
    ring.decoder.decode_error = RuntimeError("broken")
    while not ring.closed(1) and not ring.closed(2):
        ring.turn()
    for stream in (1, 2):
        if ring.closed(stream):
            ring.tell(Abort(StreamId(stream)))
        else:
            ring.tell(EndText(StreamId(stream)))
    ring.run()
    ring.check_free()


def test_the_play_report_reaches_both_stages() -> None:
    ring = Ring()
    ring.tell(*sentence(1, 30))
    for _ in range(3):
        ring.turn()
    ring.tell(Pace(StreamId(1), True, 0.1, ring.clock()))
    assert ring.vocoder.slots[StreamId(1)].held and ring.engine.scheduler.rows[StreamId(1)].held


def test_every_new_stream_opens_its_row_once() -> None:
    ring = Ring()
    ring.tell(*utterance(1, 3, 3, 3), *utterance(2, 3))
    ring.run()
    assert ring.runner.opened == [1, 2]


@pytest.mark.parametrize("seed", range(8))
def test_after_any_walk_both_pools_are_full_and_every_stream_was_closed(seed: int) -> None:
    # LEAK-1, CAN-5, MIX-4
    rng = random.Random(seed)
    ring = Ring()
    scripts: dict[int, list[EngineMessage]] = {}
    next_id = 1
    for _ in range(300):
        taken = {s for s in scripts if not ring.closed(s)}
        action = rng.random()
        if action < 0.2 and len(taken) < ring.num_rows:
            segments = [rng.randint(1, 12) for _ in range(rng.randint(1, 3))]
            scripts[next_id] = utterance(next_id, *segments, seed=next_id)
            next_id += 1
        elif action < 0.5 and scripts:
            stream = rng.choice(list(scripts))
            for message in scripts[stream][: (size := rng.randint(1, 4))]:
                ring.tell(message)
            del scripts[stream][:size]
        elif action < 0.54 and taken:
            stream = rng.choice(sorted(taken))
            ring.tell(Abort(StreamId(stream)))
            scripts[stream].clear()
        elif action < 0.55:
            ring.runner.error = RuntimeError("broken")
        elif action < 0.56:
            ring.decoder.decode_error = RuntimeError("broken")
        else:
            ring.turn()
        for stream in scripts:  # as the runtime does
            if ring.closed(stream) and ring.closed(stream)[0].reason == "failed":
                ring.tell(Abort(StreamId(stream)))
                scripts[stream].clear()
    for left in scripts.values():
        ring.tell(*left)
    ring.runner.error = ring.decoder.decode_error = None
    ring.run()
    for stream in scripts:
        if not ring.closed(stream):
            ring.tell(Abort(StreamId(stream)))
    ring.check_free()
    assert {stream for stream in scripts if not ring.closed(stream)} == set()
    for stream in scripts:
        if ring.closed(stream)[0].reason == "done":
            assert np.array_equal(joined(ring.events, stream), whole_pcm(stream, ring.frames(stream)))
    assert not any(isinstance(m, Drop) and m.reason == "limit" for m in ring.sent)
