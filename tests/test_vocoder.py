"""Frames in, sound out: whatever the chunks, the neighbours and the way a stream ends."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from fakes import HOP, NUM_CODECS, SPEC, FakeClock, FakeDecoder, joined, whole_pcm

from realtime.errors import StageFailed
from realtime.messages import (
    Audio,
    Closed,
    Drop,
    Finish,
    Frames,
    Note,
    NoteKind,
    Pace,
    Prime,
    Started,
    StreamEvent,
    StreamId,
    Timing,
)
from realtime.vocoder.policy import STEP_FRAMES, ChunkPolicy
from realtime.vocoder.runner import CodecRunner
from realtime.vocoder.vocoder import Vocoder

Frame = list[int]


@dataclass
class Booth:
    """A vocoder with the fake codec; steps cost what `step_s` says."""

    num_slots: int = 4
    step_s: float = 0.01
    interval_s: float = 0.02
    decoder: FakeDecoder = field(default_factory=FakeDecoder)
    clock: FakeClock = field(default_factory=FakeClock)
    events: list[StreamEvent] = field(default_factory=list)
    said: dict[int, list[Frame]] = field(default_factory=dict)
    seeds: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.decoder.on_decode = lambda width, frames: self.clock.advance(self.step_s)
        codec = CodecRunner(SPEC, self.decoder, self.num_slots)
        self.vocoder = Vocoder(
            SPEC, codec, self.num_slots, ChunkPolicy(SPEC.frame_s), self.events.extend, self.clock
        )

    def frames(self, frames: dict[int, Frame], seeds: dict[int, int] | None = None) -> None:
        """One decode step of the engine."""
        started: list[Started | None] = []
        for stream in frames:
            first = stream not in self.said
            if first:
                self.said[stream] = []
                self.seeds[stream] = (seeds or {}).get(stream, stream)
            started.append(Started(Timing(self.clock()), self.seeds[stream]) if first else None)
            self.said[stream].append(frames[stream])
        ids = tuple(StreamId(stream) for stream in frames)
        # In front of the codec's codes stands what the model says of the frame: here, its number.
        numbers = [[len(self.said[stream]) - 1, stream] for stream in frames]
        codes = np.array([[*number, *codes] for number, codes in zip(numbers, frames.values(), strict=True)])
        intervals_s = tuple(self.interval_s for _ in frames)
        self.handle(Frames(ids, codes.astype(np.int16), tuple(started), intervals_s))

    def handle(self, message: Prime | Frames | Note | Pace | Finish | Drop) -> None:
        """As the worker does: what `handle` raises is told to `fail`."""
        try:
            self.vocoder.handle(message)
        except Exception as error:
            self.vocoder.fail(error)

    def note(self, stream: int, kind: NoteKind, value: int = 0, segment: int = 0) -> None:
        frame = len(self.said.get(stream, []))
        self.handle(Note(StreamId(stream), segment, frame, kind, value))

    def finish(self, stream: int) -> None:
        self.handle(Finish(StreamId(stream), "done"))

    def drop(self, stream: int) -> None:
        self.handle(Drop(StreamId(stream), "cancelled"))

    def step(self) -> float | None:
        try:
            return self.vocoder.step()
        except Exception as error:
            self.vocoder.fail(error)
            return 0.0

    def settle(self) -> None:
        """Steps until only a message can change anything."""
        for _ in range(10_000):
            wait_s = self.step()
            if wait_s is None:
                return
            self.clock.advance(wait_s)
        raise AssertionError("does not come to rest")

    def speak(self, stream: int, num_frames: int, rng: random.Random) -> None:
        for _ in range(num_frames):
            self.frames({stream: random_frame(rng)})
            self.clock.advance(self.interval_s)
            self.step()

    def closed(self, stream: int) -> list[Closed]:
        return [e for e in self.events if isinstance(e, Closed) and e.stream_id == stream]

    def check_whole(self, stream: int) -> None:
        expected = whole_pcm(self.seeds[stream], self.said[stream])
        assert np.array_equal(joined(self.events, stream), expected)
        marks = [event.marks.tolist() for event in self.events if isinstance(event, Audio)]
        own = [mark for chunk in marks for mark in chunk if mark[1] == stream]
        assert own == [[number, stream] for number in range(len(self.said[stream]))]
        (closed,) = self.closed(stream)
        assert (closed.reason, closed.error, closed.frames) == ("done", None, len(self.said[stream]))
        last = [e for e in self.events if e.stream_id == stream][-1]
        assert last is closed

    def check_free(self) -> None:
        assert self.vocoder.num_free == self.num_slots - len(self.vocoder.quarantined)
        assert not self.vocoder.slots


def random_frame(rng: random.Random) -> Frame:
    return [rng.randrange(64) for _ in range(NUM_CODECS)]


def kinds(events: Sequence[StreamEvent], stream: int) -> list[str]:
    return [e.kind if isinstance(e, Note) else type(e).__name__ for e in events if e.stream_id == stream]


# ---- sound


@pytest.mark.parametrize("num_frames", [1, 2, 3, 7, 26, 77])
def test_a_stream_in_any_chunks_is_the_whole(num_frames: int) -> None:
    # SEAM-1, SEAM-2, TAIL
    booth = Booth()
    booth.speak(1, num_frames, random.Random(num_frames))
    booth.finish(1)
    booth.settle()
    booth.check_whole(1)
    booth.check_free()
    assert all(frames in STEP_FRAMES for _, frames in booth.decoder.calls)


@pytest.mark.parametrize("burst", [1, 2, 5, 40])
def test_frames_that_come_in_one_turn_are_taken_in_order(burst: int) -> None:
    # SEAM-7
    booth = Booth()
    rng = random.Random(0)
    for _ in range(4):
        for _ in range(burst):
            booth.frames({1: random_frame(rng)})
        booth.clock.advance(0.1)
        booth.step()
    booth.finish(1)
    booth.settle()
    booth.check_whole(1)


def test_an_end_without_new_frames_closes_at_once() -> None:
    # LEAK-3
    booth = Booth()
    booth.speak(1, 1, random.Random(0))
    booth.settle()
    booth.finish(1)
    booth.check_whole(1)
    booth.check_free()


def test_an_end_before_any_frame_closes_with_none() -> None:
    # LEAK-3, STOP-3
    booth = Booth()
    booth.finish(1)
    assert booth.events == [Closed(StreamId(1), "done")]
    booth.check_free()


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("num_prime", [1, 3, 30])
def test_a_primed_stream_goes_on_from_the_unheard_frames(num_prime: int, early: bool) -> None:
    booth = Booth()
    rng = random.Random(num_prime)
    unheard = [random_frame(rng) for _ in range(num_prime)]
    codes = np.array([[0, 0, *frame] for frame in unheard], np.int16)
    started = Started(Timing(booth.clock()), 1)
    booth.handle(Prime(StreamId(1), codes, started))
    if early:
        booth.settle()
        assert not booth.events, "nothing of it is heard"
    booth.speak(2, 5, rng)  # a neighbour that is not primed
    booth.speak(1, 9, rng)
    booth.finish(1)
    booth.finish(2)
    booth.settle()
    expected = whole_pcm(1, [*unheard, *booth.said[1]])[num_prime * HOP :]
    assert np.array_equal(joined(booth.events, 1), expected)
    booth.check_whole(2)
    assert [closed.frames for closed in booth.closed(1)] == [9]
    booth.check_free()


@pytest.mark.parametrize("num_steps", [0, 1, 9])
def test_a_primed_stream_may_end_before_its_first_frame(num_steps: int) -> None:
    booth = Booth()
    booth.handle(Prime(StreamId(1), np.ones((40, 4), np.int16), Started(Timing(booth.clock()), 1)))
    for _ in range(num_steps):
        booth.step()
    if num_steps == 1:
        booth.drop(1)
    else:
        booth.finish(1)
    booth.settle()
    assert [event.frames for event in booth.closed(1)] == [0] and kinds(booth.events, 1) == ["Closed"]
    booth.check_free()


@pytest.mark.parametrize("where", ["reset", "step"])
def test_a_primed_stream_that_failed_is_not_opened_again(where: str) -> None:
    booth = Booth()
    if where == "reset":
        booth.decoder.reset_error = RuntimeError("no slot")
    started = Started(Timing(booth.clock()), 1, is_primed=True)
    booth.handle(Prime(StreamId(1), np.ones((3, 4), np.int16), replace(started, is_primed=False)))
    if where == "step":
        booth.decoder.decode_error = RuntimeError("no step")
        booth.step()
    booth.handle(Frames((StreamId(1),), np.ones((1, 4), np.int16), (started,), (0.01,)))
    booth.settle()
    (closed,) = booth.closed(1)
    assert closed.reason == "failed" and kinds(booth.events, 1) == ["Closed"]
    booth.finish(1)  # as the engine does in the end
    booth.check_free()


def test_sound_that_is_held_back_is_still_decoded_at_the_end() -> None:
    booth = Booth()
    booth.speak(1, 2, random.Random(0))
    booth.handle(Pace(StreamId(1), True, None, booth.clock()))
    booth.frames({1: [1, 2]})
    assert booth.step() is None  # nobody listens: no timer, no busy loop
    booth.finish(1)
    booth.settle()
    booth.check_whole(1)


def test_a_stream_that_stalled_for_text_is_not_late_for_ever() -> None:
    booth = Booth()
    rng = random.Random(0)
    booth.speak(1, 5, rng)
    booth.settle()
    booth.clock.advance(60)
    booth.frames({1: random_frame(rng)})
    booth.settle()
    lead_s = booth.vocoder.slots[StreamId(1)].lead_s(booth.clock(), SPEC.frame_s)
    assert lead_s is not None and 0 < lead_s <= SPEC.frame_s
    booth.finish(1)
    booth.check_whole(1)


# ---- notes


def test_a_note_follows_the_audio_that_contains_its_frame() -> None:
    booth = Booth()
    booth.frames({1: [1, 2]})
    booth.note(1, "starved", 90)
    booth.frames({1: [3, 4]})
    booth.note(1, "segment_end", 2)
    booth.settle()
    num_frames = 0
    for event in booth.events:
        if isinstance(event, Audio):
            num_frames += event.pcm.shape[0] // HOP
        elif isinstance(event, Note):
            assert event.frame <= num_frames
    assert [kind for kind in kinds(booth.events, 1) if kind != "Audio"] == ["starved", "segment_end"]


def test_a_note_whose_frame_has_passed_is_handed_on_at_once() -> None:
    booth = Booth()
    booth.note(1, "silence", 100)
    booth.frames({1: [1, 2]})
    booth.settle()
    booth.note(1, "segment_end", 1)
    assert kinds(booth.events, 1) == ["silence", "Audio", "segment_end"]


def test_a_pause_is_never_passed_by_sound_that_comes_after_it() -> None:
    # TEXTIN-16: frames of the next segment that are already there don't share its chunk
    booth = Booth()
    rng = random.Random(0)
    for _ in range(7):
        booth.frames({1: random_frame(rng)})
    booth.note(1, "segment_end", 7)
    booth.note(1, "silence", 500, segment=1)
    booth.note(1, "segment_end", 0, segment=1)
    for _ in range(30):
        booth.frames({1: random_frame(rng)})
    booth.finish(1)
    booth.settle()
    place = 0
    for event in booth.events:
        if isinstance(event, Audio):
            place += event.pcm.shape[0] // HOP
        elif isinstance(event, Note):
            assert place == event.frame == 7
    booth.check_whole(1)


def test_a_pause_counts_as_lead() -> None:
    booth = Booth()
    booth.speak(1, 1, random.Random(0))
    booth.settle()
    slot = booth.vocoder.slots[StreamId(1)]
    before = slot.lead_s(booth.clock(), SPEC.frame_s)
    booth.note(1, "silence", 500)
    after = slot.lead_s(booth.clock(), SPEC.frame_s)
    assert before is not None and after == pytest.approx(before + 0.5)


# ---- ends in the middle


@pytest.mark.parametrize("state", ["unknown", "pending", "spoken", "finishing", "closed"])
def test_a_drop_closes_a_stream_in_any_state_and_its_slot_is_free(state: str) -> None:
    # CAN-3, CAN-9
    booth = Booth()
    if state != "unknown":
        booth.frames({1: [1, 2]})
    if state in ("spoken", "finishing", "closed"):
        booth.settle()
    if state == "finishing":
        booth.frames({1: [1, 2]})
    if state in ("finishing", "closed"):
        booth.finish(1)
    booth.drop(1)
    reasons = [closed.reason for closed in booth.closed(1)]
    assert reasons == (["done", "cancelled"] if state == "closed" else ["cancelled"])
    booth.check_free()
    booth.settle()
    assert isinstance(booth.events[-1], Closed)
    booth.drop(1)  # harmless
    booth.check_free()


def test_frames_notes_and_ends_of_a_stream_that_failed_here_are_let_go() -> None:
    booth = Booth()
    booth.frames({1: [1, 2]})
    booth.decoder.decode_error = RuntimeError("broken")
    booth.settle()
    booth.frames({1: [1, 2]})
    booth.note(1, "segment_end", 2)
    booth.finish(1)
    booth.check_free()
    assert [closed.reason for closed in booth.closed(1)][0] == "failed"


def test_a_step_that_raises_closes_its_participants_and_nobody_else() -> None:
    # FAULT-1, FAULT-4
    booth = Booth()
    rng = random.Random(0)
    booth.speak(1, 3, rng)
    booth.settle()
    booth.frames({2: random_frame(rng), 3: random_frame(rng)})
    booth.decoder.decode_error = RuntimeError("broken")
    booth.settle()
    for stream in (2, 3):
        (closed,) = booth.closed(stream)
        assert closed.reason == "failed" and isinstance(closed.error, StageFailed)
        assert "broken" not in closed.error.message
    booth.speak(1, 3, rng)
    booth.finish(1)
    booth.settle()
    booth.check_whole(1)
    booth.check_free()


def test_a_slot_used_again_is_a_fresh_one() -> None:
    # MIX-4: after a normal end, a drop and a failure
    booth = Booth(num_slots=1)
    rng = random.Random(0)
    for stream, end in enumerate(("finish", "drop", "fail", "finish")):
        booth.speak(stream, 3, rng)
        if end == "fail":
            booth.frames({stream: random_frame(rng)})
            booth.decoder.decode_error = RuntimeError("broken")
            booth.clock.advance(1)
        elif end == "drop":
            booth.drop(stream)
        else:
            booth.finish(stream)
        booth.settle()
        booth.check_free()
    booth.check_whole(0)
    booth.check_whole(3)


def test_a_slot_that_can_not_be_reset_is_put_aside_and_only_its_stream_closes() -> None:
    booth = Booth(num_slots=3)
    rng = random.Random(0)
    booth.speak(1, 2, rng)
    booth.decoder.reset_error = RuntimeError("broken")
    booth.frames({2: random_frame(rng), 3: random_frame(rng), 1: random_frame(rng)})
    (closed,) = booth.closed(2)
    assert (closed.reason, closed.quarantined) == ("failed", True)
    booth.frames({2: random_frame(rng), 3: random_frame(rng), 1: random_frame(rng)})
    for stream in (1, 3):
        booth.finish(stream)
    booth.settle()
    booth.check_whole(1)
    booth.check_whole(3)
    booth.check_free()
    assert len(booth.vocoder.quarantined) == 1 and booth.vocoder.num_free == 2
    booth.speak(4, 2, rng)
    booth.speak(5, 2, rng)
    assert not {index for index, _ in booth.decoder.calls[-1:]} & set(booth.vocoder.quarantined)


# ---- together


@pytest.mark.parametrize("seed", range(25))
def test_any_walk_leaves_every_slot_free_and_every_finished_stream_whole(seed: int) -> None:
    # LEAK-1, MIX-1, MIX-2, SEAM-7: storms of short and long streams with drops and failures
    rng = random.Random(seed)
    booth = Booth(step_s=rng.choice((0.001, 0.01, 0.06)))
    left: dict[int, int] = {}
    whole: set[int] = set()
    next_id = 0
    for _ in range(250):
        if rng.random() < 0.2 and len(booth.vocoder.slots) + sum(s not in booth.said for s in left) < 4:
            left[next_id] = rng.randint(1, 40)
            next_id += 1
        speaking = [s for s in left if left[s] and rng.random() < 0.8]
        if speaking:
            booth.frames({s: random_frame(rng) for s in speaking})
        for stream in speaking:
            left[stream] -= 1
            if rng.random() < 0.1:
                booth.note(stream, rng.choice(("segment_end", "silence", "starved")), 40)
        for stream in [s for s in left if not left[s] or rng.random() < 0.02]:
            if left.pop(stream):
                booth.drop(stream)
            else:
                booth.finish(stream)
                whole.add(stream)
        if rng.random() < 0.02:
            booth.decoder.decode_error = RuntimeError("broken")
        booth.clock.advance(rng.choice((0.0, 0.02, 0.3)))
        for _ in range(rng.randint(0, 3)):
            booth.step()
        for stream in [s for s in left if s in booth.said and StreamId(s) not in booth.vocoder.slots]:
            del left[stream]  # its step failed
    for stream in left:
        booth.drop(stream)
    booth.decoder.decode_error = None
    booth.settle()
    booth.check_free()
    for stream in whole:
        closed = booth.closed(stream)[0]
        if closed.reason == "done":
            booth.check_whole(stream)


def test_the_time_between_frames_is_learned() -> None:
    booth = Booth(interval_s=0.031)
    booth.speak(1, 60, random.Random(0))
    assert booth.vocoder.slots[StreamId(1)].interval.mean_s == pytest.approx(0.031, abs=0.001)
    booth.interval_s = 0.011
    booth.frames({2: [1, 2]})
    for _ in range(30):
        booth.frames({2: [1, 2]})
    intervals = [slot.interval.mean_s for slot in booth.vocoder.slots.values()]
    assert intervals == pytest.approx([0.031, 0.011], abs=0.002), "each stream has its own"


def test_warming_up_leaves_nothing_behind() -> None:
    booth = Booth()
    booth.vocoder.warm_up()
    assert not booth.events
    booth.speak(1, 9, random.Random(0))
    booth.finish(1)
    booth.settle()
    booth.check_whole(1)
    booth.check_free()


def test_codes_the_codec_does_not_have_close_only_their_stream() -> None:
    # FAULT-4: one of several lanes has codes out of range; the others are what they are without it.
    rig = Booth()
    rig.frames({1: [1, 2], 2: [3, 4]})
    rig.frames({1: [5, 64], 2: [6, 7]})
    rig.finish(2)
    rig.settle()
    (closed,) = rig.closed(1)
    assert closed.reason == "failed" and isinstance(closed.error, StageFailed)
    rig.check_whole(2)
    rig.check_free()
