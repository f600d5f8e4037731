"""The whole ring with real threads and a fake model: nothing is lost, nothing leaks, in any order."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from fakes import HOP, FakeBackbone, FakeDecoder, FakeLocal, Pcm, fake_bundle, joined

from realtime.config import Config, EngineConfig
from realtime.errors import BadRequest, Draining, Overloaded, StageFailed
from realtime.messages import (
    Audio,
    Closed,
    Note,
    SamplingParams,
    SpeechRequest,
    StreamEvent,
    StreamId,
    Trigger,
)
from realtime.models.base import TextFeed
from realtime.runtime import Flushed, Permits, Runtime, Stream

TEXT = "Hello there, how can I help you today? Please hold the line. Thank you for calling us."
DEADLINE_S = 60.0

Event = StreamEvent | Flushed


@dataclass
class Model:
    """The parts of a fake model that a test can break or stop."""

    backbone: FakeBackbone = field(default_factory=FakeBackbone)
    local: FakeLocal = field(default_factory=FakeLocal)
    decoder: FakeDecoder = field(default_factory=FakeDecoder)


@asynccontextmanager
async def running(
    capacity: int = 4, *, queue_s: float = 60.0, model: Model | None = None
) -> AsyncIterator[Runtime]:
    """A runtime; when the test is through, everything it lent must be back."""
    model = model or Model()
    config = Config(engine=EngineConfig(max_streams=capacity, queue_s=queue_s))
    bundle = fake_bundle(model.backbone, model.local, model.decoder)
    async with asyncio.timeout(DEADLINE_S), Runtime(config, load=lambda path: bundle) as runtime:
        yield runtime
        await audit(runtime)


async def audit(runtime: Runtime) -> None:
    """Waits for rest, then counts."""
    await until(lambda: not runtime.streams)
    await until(lambda: not runtime._engine_worker.depth and not runtime._vocoder_worker.depth)
    capacity = runtime.config.engine.max_streams
    await until(lambda: runtime.engine.scheduler.num_free == capacity)
    quarantined = len(runtime.vocoder.quarantined)
    await until(lambda: runtime.vocoder.num_free == capacity - quarantined)
    assert runtime.permits.free == capacity - quarantined
    assert not runtime.permits._waiting
    assert not runtime.engine.scheduler.rows and not runtime.vocoder.slots


async def until(condition: Callable[[], bool]) -> None:
    """Lets everything else run until it holds; the test's deadline ends it otherwise."""
    while not condition():
        await asyncio.sleep(0.001)  # a look now and then: the stages' threads need the interpreter


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(main())


def request(
    seed: int = 0,
    *,
    max_frames: int | None = None,
    trigger: Trigger | None = None,
    replaces: tuple[StreamId, ...] = (),
) -> SpeechRequest:
    return SpeechRequest(
        sampling=SamplingParams(seed=seed, max_frames=max_frames),
        trigger=trigger or Trigger(),
        replaces=replaces,
    )


def pieces(text: str, rng: random.Random) -> list[str]:
    parts = []
    while text:
        cut = rng.randint(1, max(1, len(text) // 2))
        parts.append(text[:cut])
        text = text[cut:]
    return parts


async def events_of(stream: Stream) -> list[Event]:
    return [event async for event in stream]


async def speak(runtime: Runtime, deltas: Sequence[str], asked: SpeechRequest) -> list[Event]:
    async with runtime.open(asked) as stream:
        for delta in deltas:
            stream.text(delta)
        stream.end()
        return await events_of(stream)


def pcm(events: Sequence[Event]) -> Pcm:
    return joined(events, events[0].stream_id)


def the_end(events: Sequence[Event]) -> Closed:
    closed = [event for event in events if isinstance(event, Closed)]
    assert len(closed) == 1 and events[-1] is closed[0]
    return closed[0]


# ---- one stream


def test_a_stream_ends_with_done_after_all_its_audio() -> None:
    async def main() -> None:
        async with running() as runtime:
            events = await speak(runtime, [TEXT], request())
            closed = the_end(events)
            assert (closed.reason, closed.error) == ("done", None)
            assert pcm(events).size == closed.frames * HOP > 0
            ends = [e for e in events if isinstance(e, Note) and e.kind == "segment_end"]
            assert [note.segment for note in ends] == [0, 1, 2]
            assert sum(note.value for note in ends) == closed.frames

    run(main)


def test_any_split_of_the_text_that_is_there_in_time_gives_the_same_sound() -> None:
    # SEAM-5, DET-2: sentence mode, so that how fast the text came does not matter
    async def main() -> None:
        async with running() as runtime:

            async def sound(deltas: Sequence[str], seed: int) -> Pcm:
                asked = request(seed, trigger=Trigger("manual"))
                return pcm(await speak(runtime, deltas, asked))

            whole = await sound([TEXT], 1)
            for split in range(3):
                assert np.array_equal(await sound(pieces(TEXT, random.Random(split)), 1), whole)
            assert not np.array_equal(await sound([TEXT], 2), whole)

    run(main)


@pytest.mark.parametrize("text", ["...", "- - -", '"', "!?"])
def test_text_with_nothing_to_speak_is_one_marked_silence(text: str) -> None:
    # NORM-1, NORM-10
    async def main() -> None:
        async with running() as runtime:
            silence, closed = await speak(runtime, [text], request())
            assert isinstance(silence, Note) and (silence.kind, silence.value) == ("silence", 100)
            assert isinstance(closed, Closed) and (closed.reason, closed.frames) == ("done", 0)

    run(main)


@pytest.mark.parametrize("deltas", [[], [""], ["  ", "\n\n"], ["\u200b"]])
def test_blank_text_is_over_without_a_frame(deltas: list[str]) -> None:
    # NORM-1, NORM-2
    async def main() -> None:
        async with running() as runtime:
            events = await speak(runtime, deltas, request())
            assert events == [Closed(events[0].stream_id, "done")]

    run(main)


def test_pauses_alone_are_silence_of_that_length() -> None:
    # TEXTIN-16
    async def main() -> None:
        async with running() as runtime:
            events = await speak(runtime, ["[pause 300ms][pause 1s]"], request())
            assert sum(e.value for e in events if isinstance(e, Note) and e.kind == "silence") == 1300
            assert the_end(events).reason == "done"

    run(main)


def test_a_model_that_never_ends_is_ended_and_says_so_and_late_text_changes_nothing() -> None:
    # STOP-1, STOP-5
    async def main() -> None:
        async with running(1, model=Model(local=FakeLocal(never_eos=True))) as runtime:
            async with runtime.open(request(max_frames=5)) as stream:
                stream.text(TEXT)
                events = await events_of(stream)
                stream.text(" And more of it. And more.")
                stream.flush()
                stream.end()
            assert (the_end(events).reason, the_end(events).frames) == ("limit", 5)
            assert the_end(await speak(runtime, [TEXT], request())).frames > 5

    run(main)


def test_refusals_name_what_is_known() -> None:
    async def main() -> None:
        async with running() as runtime:
            with pytest.raises(BadRequest, match="fake"):
                runtime.open(SpeechRequest(voice="nobody"))
            with pytest.raises(BadRequest, match="en"):
                runtime.open(SpeechRequest(language="tlh"))
            assert not runtime.streams

    run(main)


# ---- flush


def test_every_flush_is_answered_once_in_order_after_its_audio() -> None:
    # TEXTIN-2
    async def main() -> None:
        async with running() as runtime:
            async with runtime.open(request()) as stream:
                stream.flush("nothing yet")
                for i, text in enumerate(
                    ("One moment, ", "please hold. Thank", " you [pause 300ms]", "", "Bye")
                ):
                    stream.text(text)
                    stream.flush(i)
                stream.end()
                events = await events_of(stream)
            answers = [event for event in events if isinstance(event, Flushed)]
            assert [answer.id for answer in answers] == ["nothing yet", 0, 1, 2, 3, 4]
            assert [answer.c1 for answer in answers] == [0, 12, 30, 48, 48, 51]
            spoken = -1
            segments = {0: 0, 1: 2, 2: 4, 3: 4, 4: 5}  # the last segment each flush covers
            for event in events:
                if isinstance(event, Note) and event.kind == "segment_end":
                    spoken = event.segment
                elif isinstance(event, Flushed) and isinstance(event.id, int):
                    assert spoken >= segments[event.id]
            assert the_end(events).reason == "done"

    run(main)


def test_a_flush_with_everything_spoken_is_answered_at_once() -> None:
    async def main() -> None:
        async with running() as runtime:
            async with runtime.open(request()) as stream:
                events = stream.__aiter__()
                stream.text("Hello there.")
                stream.flush("first")
                while not isinstance(await anext(events), Flushed):
                    pass
                stream.flush("second")
                answer = await anext(events)
                assert isinstance(answer, Flushed) and answer.id == "second"

    run(main)


# ---- cancel


@pytest.mark.parametrize("after", [0, 1, 3])
def test_nothing_but_the_end_follows_a_cancel(after: int) -> None:
    # CAN-3, CAN-4, CAN-9
    async def main() -> None:
        async with running(model=Model(local=FakeLocal(never_eos=True))) as runtime:
            async with runtime.open(request()) as stream:
                stream.text(TEXT)
                events = stream.__aiter__()
                for _ in range(after):
                    await anext(events)
                stream.cancel()
                stream.cancel()
                stream.flush("late")
                rest = [event async for event in events]
                assert [(type(e), e.reason) for e in rest if isinstance(e, Closed)] == [(Closed, "cancelled")]
                assert len(rest) == 1
                stream.cancel()

    run(main)


def test_a_cancel_before_any_text_costs_no_capacity() -> None:
    # CAN-9, NORM-2
    async def main() -> None:
        async with running(1) as runtime:
            async with runtime.open(request()) as stream:
                stream.cancel()
                assert the_end(await events_of(stream)).frames == 0
            assert runtime.permits.free == 1

    run(main)


def test_leaving_the_scope_cancels_what_is_left() -> None:
    # CAN-6
    async def main() -> None:
        async with running(2) as runtime:
            for _ in range(5):
                async with runtime.open(request()) as stream:
                    stream.text(TEXT)
                    async for event in stream:
                        if isinstance(event, Audio):
                            break
            with pytest.raises(ZeroDivisionError):
                async with runtime.open(request()) as stream:
                    stream.text(TEXT)
                    raise ZeroDivisionError

    run(main)


def test_the_next_stream_in_the_same_slot_is_complete_and_equal_to_itself_alone() -> None:
    # CAN-4, CAN-5, MIX-4
    async def main() -> None:
        async with running(1) as runtime:
            alone = pcm(await speak(runtime, [TEXT], request(5)))
            for number in range(8):
                async with runtime.open(request(number)) as first:
                    first.text(TEXT)
                    if number % 2:
                        await anext(first.__aiter__())
                    first.cancel()
                    assert np.array_equal(pcm(await speak(runtime, [TEXT], request(5))), alone)

    run(main)


# ---- capacity


async def occupy(stream: Stream) -> None:
    """It takes a permit and then waits for more text."""
    stream.text("Hello there my")
    await until(lambda: stream.has_permit)


def test_a_stream_without_a_permit_is_refused_after_its_time() -> None:
    # LOAD-1, LOAD-4
    async def main() -> None:
        async with running(1, queue_s=0.0) as runtime, runtime.open(request()) as holder:
            await occupy(holder)
            closed = the_end(await speak(runtime, [TEXT], request()))
            assert closed.reason == "failed" and isinstance(closed.error, Overloaded)
            assert closed.error.retry_after_ms
            holder.cancel()
            await events_of(holder)
            assert the_end(await speak(runtime, [TEXT], request())).reason == "done"

    run(main)


def test_who_would_be_heard_too_late_is_refused_before_its_text_is_read() -> None:
    # LOAD-1
    async def main() -> None:
        async with running(1) as runtime, runtime.open(request()) as holder:
            await occupy(holder)
            runtime.admission.hold_s = 60.0
            async with runtime.open(request()) as late:
                late.text(TEXT * 50)
                closed = the_end(await events_of(late))
            assert isinstance(closed.error, Overloaded) and closed.error.retry_after_ms > 1000
            assert late.feed.num_chars == 0 and not runtime.permits.num_waiting
            async with runtime.open(request(replaces=(holder.id,))) as heir:  # gets the permit it ends
                await until(lambda: heir.has_permit)  # ... before its first word
                heir.text("Hi there.")
                heir.end()
                assert the_end(await events_of(heir)).reason == "done"

    run(main)


def test_waiting_streams_go_in_the_order_of_arrival() -> None:
    async def main() -> None:
        async with running(1) as runtime, runtime.open(request()) as holder:
            await occupy(holder)
            order: list[int] = []

            async def wait(number: int) -> None:
                async with runtime.open(request()) as stream:
                    stream.text("Hi there.")
                    stream.end()
                    async for event in stream:
                        if isinstance(event, Audio) and number not in order:
                            order.append(number)

            async with asyncio.TaskGroup() as tasks:
                for number in range(5):
                    tasks.create_task(wait(number))
                    await until(lambda number=number: len(runtime.permits._waiting) == number + 1)
                holder.cancel()
            assert order == [0, 1, 2, 3, 4]

    run(main)


@pytest.mark.parametrize("text_first", [True, False])
def test_a_stream_that_replaces_another_gets_its_permit_ahead_of_the_queue(text_first: bool) -> None:
    async def main() -> None:
        async with running(1) as runtime, runtime.open(request()) as holder:
            await occupy(holder)
            async with runtime.open(request()) as queued:
                queued.text("Hi there.")
                queued.end()
                await until(lambda: queued.id in runtime.permits)
                async with runtime.open(request(replaces=(holder.id,))) as heir:
                    if not text_first:
                        assert the_end(await events_of(holder)).reason == "cancelled"
                    heir.text("Hello again.")
                    await until(lambda: heir.has_permit)
                    assert not queued.has_permit
                    heir.end()
                    assert the_end(await events_of(heir)).reason == "done"
                assert the_end(await events_of(queued)).reason == "done"

    run(main)


def test_an_heir_that_never_speaks_gives_the_permit_back() -> None:
    async def main() -> None:
        async with running(1) as runtime, runtime.open(request()) as holder:
            await occupy(holder)
            async with runtime.open(request(replaces=(holder.id,))) as heir:
                await events_of(holder)
                heir.text("...")
                heir.end()
                assert the_end(await events_of(heir)).reason == "done"

    run(main)


def waiting(permits: Permits, stream: int, wait_s: float = 60.0) -> asyncio.Task[None]:
    return asyncio.create_task(permits.take(StreamId(stream), wait_s))


async def turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_a_permit_granted_to_a_stream_that_is_cancelled_in_the_same_turn_is_not_lost() -> None:
    async def main() -> None:
        permits = Permits(1)
        await permits.take(StreamId(1), 0)
        second, third = waiting(permits, 2), waiting(permits, 3)
        await turns()
        permits.give()
        second.cancel()
        await third
        assert second.cancelled() and permits.free == 0
        permits.give()
        assert permits.free == 1

    run(main)


def test_a_free_permit_is_taken_while_another_grant_is_on_its_way() -> None:
    async def main() -> None:
        permits = Permits(2)
        await permits.take(StreamId(1), 0)
        await permits.take(StreamId(2), 0)
        third = waiting(permits, 3)
        await turns()
        permits.give()
        permits.give()
        await permits.take(StreamId(4), 0)  # one for the third, one for this
        await third
        assert permits.free == 0

    run(main)


@pytest.mark.parametrize("seed", range(20))
def test_permits_are_neither_lost_nor_made(seed: int) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        permits = Permits(3)
        held: list[int] = []

        async def take(stream: int) -> None:
            try:
                await permits.take(StreamId(stream), rng.choice((0.0, 0.0, 60.0)))
            except Overloaded:
                return
            held.append(stream)

        tasks = []
        for stream in range(200):
            action = rng.random()
            if action < 0.5:
                tasks.append(asyncio.create_task(take(stream)))
            elif action < 0.8 and held:
                held.pop()
                permits.give()
            elif action < 0.9 and held and (waiters := list(permits._waiting)):
                if permits.give_to(rng.choice(waiters)):
                    held.pop()
            elif tasks:
                rng.choice(tasks).cancel()
            await turns(rng.randint(0, 2))
        await turns(10)
        while held:
            held.pop()
            permits.give()
            await turns(10)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert permits.free + len(held) == 3 and not permits._waiting

    run(main)


def test_an_heir_that_was_granted_another_permit_does_not_swallow_the_inherited_one() -> None:
    async def main() -> None:
        async with running(2) as runtime, runtime.open(request()) as old, runtime.open(request()) as other:
            await occupy(old)
            await occupy(other)
            async with runtime.open(request()) as heir:
                heir.text("Hello there.")
                heir.end()
                await until(lambda: heir.id in runtime.permits)
                old.heir = heir.id
                # Both ends arrive in one turn, and the heir is first in the queue.
                runtime.dispatch([Closed(stream.id, "failed") for stream in (other, old)])
                assert the_end(await events_of(heir)).reason == "done"

    run(main)


# ---- isolation


def test_the_same_seed_sounds_the_same_alone_and_among_neighbours() -> None:
    # DET-1, MIX-2, MIX-3, MIX-5, TAIL-2
    async def main() -> None:
        texts = [TEXT, "Please hold the line.", "Thank you. Good bye and good night.", "One moment please."]
        async with running(8) as runtime:
            requests = [request(seed, trigger=Trigger("manual")) for seed in range(8)]
            alone = [pcm(await speak(runtime, [texts[i % 4]], asked)) for i, asked in enumerate(requests)]
            together = await asyncio.gather(
                *(speak(runtime, [texts[i % 4]], asked) for i, asked in enumerate(requests)),
                *(speak(runtime, [TEXT], requests[0]) for _ in range(4)),
            )
            for i, events in enumerate(together[:8]):
                assert np.array_equal(pcm(events), alone[i])
            for events in together[8:]:
                assert np.array_equal(pcm(events), alone[0])

    run(main)


@pytest.mark.parametrize("stage", ["engine", "vocoder"])
def test_a_stage_failure_closes_that_batch_only_and_leaks_nothing(
    stage: str, caplog: pytest.LogCaptureFixture
) -> None:
    # FAULT-1, WS-5, LEAK-1
    async def main() -> None:
        model = Model()
        async with running(2, model=model) as runtime, runtime.open(request()) as stream:
            stream.text("Hello there, how can I help you today? And")  # stays open: more text may come
            events = stream.__aiter__()
            while not isinstance(await anext(events), Audio):
                pass
            broken = RuntimeError("secret detail")
            if stage == "engine":
                model.backbone.error = broken
            else:
                model.decoder.decode_error = broken
            stream.text(" more to say, and more to say. And more to say again.")
            rest = [event async for event in events]
            closed = the_end(rest)
            assert closed.reason == "failed" and isinstance(closed.error, StageFailed)
            assert "secret" not in closed.error.message
            stream.text("Still typing. Still typing.")
            stream.end()
            for _ in range(3):
                done = await asyncio.gather(*(speak(runtime, [TEXT], request()) for _ in range(3)))
                assert [the_end(events).reason for events in done] == ["done"] * 3
        assert "secret detail" in caplog.text

    run(main)


def test_a_slot_that_can_not_be_reset_takes_its_permit_along(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        model = Model()
        async with running(3, model=model) as runtime:
            model.decoder.reset_error = RuntimeError("broken")
            assert the_end(await speak(runtime, [TEXT], request())).quarantined
            assert runtime.permits.free == 2
            done = await asyncio.gather(*(speak(runtime, [TEXT], request()) for _ in range(5)))
            assert [the_end(events).reason for events in done] == ["done"] * 5

    with caplog.at_level(logging.ERROR):
        run(main)
    assert "put aside" in caplog.text


@pytest.mark.parametrize("speaking", [True, False])
def test_a_failure_of_text_processing_is_told_as_one(
    speaking: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with running(1) as runtime, runtime.open(request()) as stream:
            events = stream.__aiter__()
            if speaking:
                stream.text("Hello there, how can I help you today?")
                while not isinstance(await anext(events), Audio):
                    pass
            break_feed(stream.feed)
            stream.text("more")
            rest = [event async for event in events]
            closed = the_end(rest)
            assert closed.reason == "failed" and isinstance(closed.error, StageFailed)
            assert closed.error.code == "engine_error"

    with caplog.at_level(logging.ERROR):
        run(main)


def break_feed(feed: TextFeed) -> None:
    def broken(delta: str) -> list[object]:
        raise RuntimeError("broken")

    feed.text = broken  # type: ignore[method-assign, assignment]


def test_a_held_stream_makes_no_more_and_goes_on_when_it_is_let_go() -> None:
    # WS-2
    async def main() -> None:
        async with running(1) as runtime, runtime.open(request()) as stream:
            stream.pace(hold=True)
            stream.text(TEXT)
            stream.end()
            await until(lambda: stream.id in runtime.engine.scheduler.rows)
            await until(lambda: runtime.engine.scheduler.rows[stream.id].held or not runtime.streams)
            stream.pace(hold=False)
            assert the_end(await events_of(stream)).reason == "done"

    run(main)


# ---- the end of the runtime


def test_draining_refuses_new_streams_and_waits_for_the_old() -> None:
    # OPS-1
    async def main() -> None:
        async with running() as runtime:
            speaking = asyncio.create_task(speak(runtime, [TEXT], request()))
            await until(lambda: bool(runtime.streams))
            draining = asyncio.create_task(runtime.drain(DEADLINE_S))
            await turns()
            assert not runtime.ready
            with pytest.raises(Draining):
                runtime.open(request())
            await draining
            assert the_end(await speaking).reason == "done"

    run(main)


def test_draining_without_time_cancels_what_is_left() -> None:
    # OPS-1, CAN-8
    async def main() -> None:
        async with (
            running(1) as runtime,
            runtime.open(request()) as speaking,
            runtime.open(request()) as waiting,
        ):
            await occupy(speaking)
            waiting.text(TEXT)
            await runtime.drain(0.0)
            assert the_end(await events_of(speaking)).reason == "cancelled"
            assert the_end(await events_of(waiting)).reason == "cancelled"

    run(main)


def test_leaving_the_runtime_ends_its_threads() -> None:
    async def main() -> None:
        before = {thread.ident for thread in threading.enumerate()}
        async with running() as runtime:
            await speak(runtime, [TEXT], request())
            engine, vocoder = runtime._engine_worker._thread, runtime._vocoder_worker._thread
            assert {engine.ident, vocoder.ident}.isdisjoint(before)
        assert not engine.is_alive() and not vocoder.is_alive()

    run(main)


# ---- random walks


@pytest.mark.parametrize("seed", range(8))
def test_after_any_walk_of_any_streams_everything_is_back(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    # LEAK-1, LEAK-2, CAN-5, CAN-7, LOAD-2: three times the capacity, every way to behave and to leave
    rng = random.Random(seed)
    model = Model()
    alone: dict[int, Pcm] = {}
    finished = 0

    async def client(runtime: Runtime, number: int, open_streams: list[StreamId]) -> None:
        nonlocal finished
        mine = random.Random(seed * 1000 + number)
        replaced = (mine.choice(open_streams),) if open_streams and mine.random() < 0.3 else ()
        async with runtime.open(request(number, replaces=replaced)) as stream:
            open_streams.append(stream.id)
            reader = asyncio.create_task(read(stream, mine))
            for delta in pieces(TEXT, mine):
                stream.text(delta)
                action = mine.random()
                if action < 0.1:
                    stream.flush(number)
                elif action < 0.15:
                    stream.pace(mine.random() < 0.5, mine.choice((None, 0.0)))
                elif action < 0.2:
                    stream.cancel()
                elif action < 0.23:
                    reader.cancel()
                    return  # leaves early
                elif action < 0.25:
                    model.backbone.error = RuntimeError("broken")
                elif action < 0.27:
                    model.decoder.decode_error = RuntimeError("broken")
                await turns(mine.randint(0, 4))
            stream.end()
            stream.pace(hold=False)
            events = await reader
            closed = the_end(events)
            if closed.reason == "done":
                finished += 1
                assert pcm(events).size == closed.frames * HOP
            answers = [event for event in events if isinstance(event, Flushed)]
            assert [a.c1 for a in answers] == sorted(a.c1 for a in answers)

    async def read(stream: Stream, mine: random.Random) -> list[Event]:
        events = []
        async for event in stream:
            events.append(event)
            await turns(mine.randint(0, 2))
        return events

    async def main() -> None:
        async with running(4, model=model, queue_s=rng.choice((0.0, 60.0))) as runtime:
            open_streams: list[StreamId] = []
            async with asyncio.TaskGroup() as tasks:
                for number in range(24):
                    tasks.create_task(client(runtime, number, open_streams))
                    await turns(rng.randint(0, 6))
            await audit(runtime)
            model.backbone.error = model.decoder.decode_error = None
            events = await asyncio.gather(*(speak(runtime, [TEXT], request(n)) for n in range(4)))
            assert [the_end(e).reason for e in events] == ["done"] * 4
            alone.update({n: pcm(e) for n, e in enumerate(events)})

    with caplog.at_level(logging.CRITICAL):
        run(main)
    assert all(sound.size for sound in alone.values())
