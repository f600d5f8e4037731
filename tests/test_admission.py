"""Who is let in: as many as are carried, and nobody who would be heard too late."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realtime.admission import LEAST, MIN_STARTING, MOST, START_FRAMES, Admission
from realtime.engine.cost import StepCost
from realtime.messages import StreamId
from realtime.runtime import Permits
from realtime.vocoder.cost import CostModel

FRAME_S = 0.08


def admission(budget_s: float = 1.5, max_streams: int = 64) -> Admission:
    return Admission(max_streams, budget_s, FRAME_S)


def test_no_more_than_each_stage_makes_faster_than_sound() -> None:
    engine, vocoder = StepCost(0.012, 0.001), CostModel(0.0, 0.0, 0.0001)
    gate = admission()
    assert gate.carried(engine, vocoder) == pytest.approx((gate.room_s - 0.012) / 0.001, abs=1.1)
    slow = CostModel(0.0, 0.0, 0.004)
    assert gate.carried(engine, slow) == pytest.approx(gate.room_s / 0.004, abs=1.1)
    assert admission(max_streams=8).carried(engine, vocoder) == 8
    assert admission().carried(StepCost(0.2, 0.01), vocoder) == 1, "one is always let in"


def test_the_longer_a_turnaround_the_faster_frames_must_come() -> None:
    rooms_s = []
    for fixed_s in (0.001, 0.02, 0.06, 1.0):
        gate, vocoder = admission(), CostModel(fixed_s, 0.0, 0.0)
        gate.carried(StepCost(), vocoder)
        rooms_s.append(gate.room_s)
        turn_s = 2 * fixed_s + vocoder.jitter_s
        if LEAST * FRAME_S < gate.room_s < MOST * FRAME_S:
            assert turn_s == pytest.approx(START_FRAMES * (FRAME_S - gate.room_s))
    assert rooms_s == sorted(rooms_s, reverse=True) and rooms_s[-1] == LEAST * FRAME_S


@given(st.integers(0, 64), st.integers(0, 64), st.floats(0, 0.3), st.integers(1, 64))
def test_the_limit_is_at_most_what_is_carried_and_at_least_half(
    held: int, starting: int, interval_s: float, carried: int
) -> None:
    gate = admission()
    limit = gate.limit(held, starting, interval_s, carried)
    assert max(1, carried // 2) <= limit <= carried, (
        "where nothing runs, nothing would tell that it is fast again"
    )
    if gate.is_slow(interval_s) and held >= carried // 2:
        assert limit <= max(held, 1), "nobody comes on top while frames come too slowly"
    if not gate.is_slow(interval_s) and starting < MIN_STARTING:
        assert limit == carried


def test_the_wait_grows_with_the_queue_and_shrinks_with_the_number_of_permits() -> None:
    gate = admission()
    waits = [gate.wait_s(ahead, 16) for ahead in range(20)]
    assert waits == sorted(waits) and waits[0] > 0
    assert gate.wait_s(3, 32) == pytest.approx(gate.wait_s(3, 16) / 2)


def test_who_would_be_heard_too_late_is_told_when_to_come_back() -> None:
    gate = admission(budget_s=1.5)
    for _ in range(200):
        gate.returned(6.0)
        gate.heard(0.1)
    assert gate.hold_s == pytest.approx(6.0, rel=0.01)
    assert gate.retry_s(0, 16) is None  # about (1 + 2.33) * 6 / 16
    late_s = gate.retry_s(4, 16)
    assert late_s == pytest.approx(gate.wait_s(4, 16) + gate.first_s - 1.5)
    assert gate.retry_s(20, 16) > late_s  # type: ignore[operator]


def test_who_waits_for_others_to_start_does_not_wait_for_permits_to_come_back() -> None:
    gate = admission(budget_s=1.5)
    for _ in range(200):
        gate.returned(8.0)
        gate.heard(0.1)
    assert gate.retry_s(9, 16, num_open=10) is None and gate.retry_s(9, 16) is not None
    assert gate.retry_s(16, 16, num_open=10) == gate.retry_s(6, 16)


def test_no_budget_means_no_queue() -> None:
    assert admission(budget_s=0.0).retry_s(0, 64) is not None


# ---- permits


async def turns() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def test_permits_go_by_priority_and_then_in_the_order_of_arrival() -> None:
    async def main() -> None:
        permits = Permits(1)
        await permits.take(StreamId(0), 0)
        order: list[int] = []

        async def wait(stream: int, priority: int) -> None:
            await permits.take(StreamId(stream), 60, priority)
            order.append(stream)
            permits.give()

        tasks = [asyncio.create_task(wait(s, p)) for s, p in ((1, 5), (2, 9), (3, 5), (4, 9))]
        await turns()
        permits.give()
        await asyncio.gather(*tasks)
        assert order == [2, 4, 1, 3] and permits.free == 1

    asyncio.run(main())


def test_above_the_limit_permits_stay_in_the_pool_until_it_rises() -> None:
    async def main() -> None:
        permits = Permits(4)
        permits.set_limit(1)
        await permits.take(StreamId(0), 0)
        waiting = asyncio.create_task(permits.take(StreamId(1), 60))
        await turns()
        assert not permits.is_free and permits.num_waiting == 1
        permits.set_limit(2)
        await waiting
        assert permits.free == 2
        permits.give()
        permits.give()
        permits.set_limit(4)
        assert permits.free == 4

    asyncio.run(main())
