"""The vocoder on a device that runs ahead: the next step is launched before the sound of the one before is
there. All promises of `test_vocoder` hold, and one more that is about who fails."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import test_vocoder
from fakes import SPEC
from test_vocoder import *  # noqa: F403 - its tests run here with the codec below
from test_vocoder import Booth, random_frame

from realtime.errors import StageFailed
from realtime.vocoder.policy import ChunkPolicy
from realtime.vocoder.runner import CodecRunner

deepest: list[int] = []  # how many steps were in flight at once, of each launch


class AheadRunner(CodecRunner):
    """Steps are on their way until they are collected, which is in order."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.num_ahead = 1
        self.collect_error: Exception | None = None
        self.wait: Callable[[], None] = lambda: None
        self._flying: list[Any] = []

    def launch(self, frames: npt.NDArray[np.int64], slots: list[int]) -> Any:
        launched = super().launch(frames, slots)
        self._flying.append(launched)
        assert len(self._flying) <= 2
        deepest.append(len(self._flying))
        return launched

    def collect(self, launched: Any) -> list[npt.NDArray[np.float32]]:
        assert self._flying.pop(0) is launched
        if self.collect_error is not None:
            error, self.collect_error = self.collect_error, None
            raise error
        self.wait()
        return super().collect(launched)


@pytest.fixture(autouse=True)
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_vocoder, "CodecRunner", AheadRunner)
    deepest.clear()


def two_in_flight() -> tuple[Booth, AheadRunner]:
    """A step of streams 1 and 2 is on its way and another one, of 3, behind it."""
    booth, rng = Booth(), random.Random(0)
    booth.frames({1: random_frame(rng), 2: random_frame(rng)})
    booth.clock.advance(0.2)
    while not deepest:
        booth.step()
    booth.frames({3: random_frame(rng)})
    codec = booth.vocoder._codec
    assert isinstance(codec, AheadRunner) and len(codec._flying) == 1
    return booth, codec


def test_a_step_is_launched_before_the_one_before_is_waited_for() -> None:
    booth, _ = two_in_flight()
    booth.clock.advance(0.2)
    assert not booth.events
    booth.step()
    assert deepest == [1, 2]
    assert [e.stream_id for e in booth.events] == [1, 2], "of the first step only"
    for stream in (1, 2, 3):
        booth.finish(stream)
    booth.settle()
    for stream in (1, 2, 3):
        booth.check_whole(stream)
    booth.check_free()


def test_sound_that_does_not_come_closes_its_streams_and_not_those_of_the_step_behind() -> None:
    booth, codec = two_in_flight()
    codec.collect_error = RuntimeError("broken")
    booth.clock.advance(0.2)
    booth.step()
    for stream in (1, 2):
        (closed,) = booth.closed(stream)
        assert closed.reason == "failed" and isinstance(closed.error, StageFailed)
    booth.finish(3)
    booth.speak(4, 3, random.Random(1))  # in a slot that is free again
    booth.finish(4)
    booth.settle()
    booth.check_whole(3)
    booth.check_whole(4)
    booth.check_free()


def test_a_launch_that_fails_leaves_the_step_in_front_alone() -> None:
    booth, _ = two_in_flight()
    booth.decoder.decode_error = RuntimeError("broken")
    booth.clock.advance(0.2)
    booth.step()
    assert [closed.reason for closed in booth.closed(3)] == ["failed"]
    for stream in (1, 2):
        booth.finish(stream)
    booth.settle()
    for stream in (1, 2):
        booth.check_whole(stream)
    booth.check_free()


def test_a_message_that_fails_closes_nothing_that_is_in_flight() -> None:
    booth, _ = two_in_flight()
    booth.vocoder.fail(RuntimeError("of a message"))
    assert not booth.events
    for stream in (1, 2, 3):
        booth.finish(stream)
    booth.settle()
    for stream in (1, 2, 3):
        booth.check_whole(stream)


def test_who_does_not_fit_into_a_step_is_launched_before_it_ends() -> None:
    booth, rng = Booth(num_slots=8, interval_s=0.06), random.Random(1)
    booth.vocoder._policy = ChunkPolicy(SPEC.frame_s, buckets=(1, 2))
    codec, clock = booth.vocoder._codec, booth.clock
    assert isinstance(codec, AheadRunner)
    ends_s: deque[float] = deque()  # a device that takes 20 ms for any step
    booth.decoder.on_decode = lambda width, frames: ends_s.append(max(clock(), *ends_s, 0.0) + 0.02)
    codec.wait = lambda: clock.advance(max(ends_s.popleft() - clock(), 0.0))
    next_s = clock()
    for _ in range(60):  # all streams at once, hardly faster than they play
        booth.frames({stream: random_frame(rng) for stream in range(8)})
        next_s += 0.06
        while clock() < next_s:
            wait_s = booth.step()
            clock.advance(max(min(wait_s if wait_s is not None else 1.0, next_s - clock()), 0.0))
    for stream in range(8):
        booth.finish(stream)
    booth.settle()
    for stream in range(8):
        booth.check_whole(stream)
    assert deepest.count(2) > 10
