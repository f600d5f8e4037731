"""Which slots are decoded together and how far: the rules as tables, and a simulated machine."""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realtime.vocoder.cost import CostModel
from realtime.vocoder.policy import (
    MAX_FIRST_FRAMES,
    MIN_WAIT_S,
    STEP_FRAMES,
    WHOLE_FRAMES,
    ChunkPolicy,
    Cost,
    Plan,
    Recent,
    SlotView,
    first_frames,
    plan,
    wanted_frames,
)

FRAME_S = 0.08
POLICY = ChunkPolicy(FRAME_S)
INTERVAL_S = 0.012


@dataclass
class FakeCost:
    """A known law, exact."""

    fixed_s: float = 0.004
    per_frame_s: float = 0.0005
    per_lane_s: float = 0.001
    jitter_s: float = 0.005
    usual_width: float = 1.0

    @property
    def usual_s(self) -> float:
        return self.step_s(1, 4)

    def step_s(self, width: int, num_frames: int) -> float:
        return self.fixed_s + num_frames * (self.per_frame_s + self.per_lane_s * width)


def flat(step_s: float) -> FakeCost:
    """Every step takes the same time, and exactly that."""
    return FakeCost(fixed_s=step_s, per_frame_s=0.0, per_lane_s=0.0, jitter_s=0.0)


def slot(
    index: int,
    pending: int,
    lead_s: float | None = None,
    *,
    waiting_s: float = 0.0,
    pending_s: float = 0.0,
    closing: bool = False,
    interval_s: float = INTERVAL_S,
    jitter_s: float = 0.0,
    priority: int = 5,
    whole: bool = False,
    quiet_s: float = 0.0,
) -> SlotView:
    return SlotView(
        index, pending, lead_s, waiting_s, pending_s, closing, interval_s, jitter_s, priority, whole, quiet_s
    )


def decide(
    slots: Sequence[SlotView],
    *,
    load: float = 0.0,
    since_s: float = math.inf,
    cost: Cost | None = None,
    policy: ChunkPolicy = POLICY,
) -> Plan:
    return plan(slots, Recent(load, since_s), policy, cost or FakeCost())


# ---- rule 1: the gap-free line


@pytest.mark.parametrize(
    ("interval_s", "step_s", "chunks"),
    [(0.010, 0.040, [1, 4, 25]), (0.022, 0.060, [2, 4, 12, 25])],
)
def test_chunks_ramp_up_as_fast_as_the_lead_allows(
    interval_s: float, step_s: float, chunks: list[int]
) -> None:
    """A single stream on a busy vocoder: each chunk is the largest that its lead can wait for."""
    cost = flat(step_s)
    first = first_frames(interval_s, step_s, POLICY)
    sent, now, lead_s, pending = [first], 0.0, first * FRAME_S, 0
    while len(sent) < len(chunks):
        pending += 1
        now += interval_s
        lead_s -= interval_s
        made = decide([slot(0, pending, lead_s, interval_s=interval_s)], load=1.0, cost=cost)
        if made.slots:
            sent.append(made.num_frames)
            lead_s += made.num_frames * FRAME_S - step_s
            pending += round(step_s / interval_s) - made.num_frames
            assert lead_s >= 0 and pending >= 0
            pending = 0  # as the rule counts: nothing is pending when a chunk has been sent
    assert sent == chunks


def test_a_first_chunk_covers_the_making_of_another() -> None:
    for interval_ms in range(5, 60, 5):
        for turn_ms in range(5, 150, 5):
            interval_s, turn_s = interval_ms / 1000, turn_ms / 1000
            frames = first_frames(interval_s, turn_s, POLICY)
            if frames < 5:
                assert frames * FRAME_S >= frames * interval_s + turn_s - 1e-9
            assert frames == 1 or (frames - 1) * (FRAME_S - interval_s) < turn_s
    assert first_frames(0.09, 0.01, POLICY) == 5  # slower than sound: no chunk helps


@given(
    lead_s=st.floats(0, 3),
    pending=st.integers(1, 60),
    interval_s=st.floats(0.002, 0.07),
    jitter_s=st.floats(0, 0.02),
    load=st.floats(0, 1),
    fixed_s=st.floats(0.0005, 0.03),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_a_stream_waits_only_while_its_lead_covers_the_wait_and_the_step(
    lead_s: float, pending: int, interval_s: float, jitter_s: float, load: float, fixed_s: float
) -> None:
    cost = FakeCost(fixed_s)

    def view(lead_s: float, after_s: float = 0.0) -> SlotView:
        lead_s -= after_s
        return slot(0, pending, lead_s, quiet_s=after_s, interval_s=interval_s, jitter_s=jitter_s)

    made = decide([view(lead_s)], load=load, cost=cost)
    if made.slots:
        assert made.num_frames in STEP_FRAMES and made.num_frames <= pending
        return
    assert made.wait_s is not None and made.wait_s > 0
    larger = min(frames for frames in STEP_FRAMES if frames > pending)
    missing = larger - pending
    wait_s = missing * interval_s + math.sqrt(missing) * jitter_s
    assert lead_s >= wait_s + cost.step_s(1, larger) + cost.jitter_s
    # ... and it wakes up when the line is reached, or the frames don't come, neither before nor later.
    if made.wait_s > MIN_WAIT_S:
        assert not decide([view(lead_s, made.wait_s - 1e-6)], load=load, cost=cost).slots
    assert decide([view(lead_s, made.wait_s + 1e-8)], load=load, cost=cost).slots


def test_the_step_that_somebody_else_may_get_counts_as_turnaround() -> None:
    cost = flat(0.03)
    alone, beside = [slot(0, 1, 0.055)], [slot(0, 1, 0.055), slot(1, 0, 5.0)]
    assert decide(alone, load=1.0, cost=cost).slots == ()
    assert decide(beside, load=1.0, cost=cost).slots == (0,)


def test_a_step_with_slack_does_not_make_anybody_late_whose_frame_is_on_its_way() -> None:
    cost = flat(0.03)
    late_soon = slot(0, 0, 0.05)  # nothing pending: its frame comes within an interval
    assert decide([late_soon, slot(1, 25, 3.0)], load=1.0, cost=cost).slots == ()
    assert decide([slot(0, 0, 0.2), slot(1, 25, 3.0)], load=1.0, cost=cost).slots == (1,)


def test_a_stream_that_stalls_for_text_holds_nobody_up() -> None:
    cost = flat(0.03)
    stalled = slot(0, 0, -7.0, pending_s=7.0)
    assert decide([stalled, slot(1, 25, 3.0)], load=1.0, cost=cost).slots == (1,)
    assert decide([stalled, slot(1, 3, 3.0, closing=True)], cost=cost).slots == (1,)
    assert decide([stalled, slot(1, 9, closing=True, whole=True)], cost=cost).slots == (1,)


def test_chunks_grow_with_load() -> None:
    sizes = [wanted_frames(load, POLICY, FakeCost()) for load in (0.0, 0.5, 0.8, 1.0)]
    assert sizes == sorted(sizes) and sizes[-1] == 25 and sizes[0] < 16


def test_the_fixed_cost_of_a_wanted_chunk_is_at_most_half_the_idle_share() -> None:
    cost = FakeCost()
    for load in (0.0, 0.3, 0.6):
        frames = wanted_frames(load, POLICY, cost)
        share = cost.fixed_s / (cost.fixed_s + frames * (cost.per_frame_s + cost.per_lane_s))
        assert share <= (1 - load) / 2 or frames == POLICY.max_frames


def test_the_largest_chunk_of_the_deployment_is_kept() -> None:
    policy = ChunkPolicy(FRAME_S, max_frames=8)
    for lead_s in (0.001, 10.0):
        assert decide([slot(0, 60, lead_s)], load=1.0, policy=policy).num_frames <= 8


def test_more_than_25_frames_only_where_nobody_listens() -> None:
    whole = slot(0, 120, closing=True, whole=True)
    assert decide([whole], cost=flat(0.02)) == Plan((0,), 100, 0.0)
    assert decide([slot(0, 60, whole=True)]) == Plan((), 0, None), "it waits for more, without a timer"
    beside = decide([whole, slot(1, 0, 9.0)], cost=flat(0.02))
    assert beside.slots == (0,) and beside.num_frames <= 25
    assert decide([whole, slot(1, 1, 0.01)], cost=flat(0.02)).slots[0] == 1


# ---- waiting


def test_nothing_pending_waits_for_a_message() -> None:
    assert decide([slot(0, 0, 0.5), slot(1, 0), slot(2, 0, closing=True)]) == Plan((), 0, None)


def test_a_listener_who_holds_is_waited_for_without_a_time() -> None:
    assert decide([slot(0, 1, math.inf)], load=1.0) == Plan((), 0, None)


def test_a_first_chunk_whose_frames_do_not_come_goes_as_it_is() -> None:
    cost = flat(0.2)  # wants several frames
    made = decide([slot(0, 1, pending_s=0.0)], cost=cost)
    assert made.slots == () and made.wait_s is not None
    assert decide([slot(0, 1, pending_s=made.wait_s)], cost=cost) == Plan((0,), 1, 0.0)


def test_a_tail_is_an_ordinary_participant_and_is_not_waited_with() -> None:
    # TAIL: the rest of a stream is split over steps of the set, beside others
    assert decide([slot(0, 3, 5.0, closing=True)]) == Plan((0,), 2, 0.0)
    assert decide([slot(0, 1, None, closing=True)]) == Plan((0,), 1, 0.0)
    both = decide([slot(0, 2, 5.0, closing=True), slot(1, 9, 0.001)])
    assert both.slots[0] == 1


# ---- rules 2 and 3: order and company


def test_due_streams_go_first_then_newcomers_then_the_longest_backlog() -> None:
    # A flat law: nobody is kept out for the time it costs.
    slots = [slot(0, 25, 9.0), slot(1, 8, 9.0), slot(2, 1, waiting_s=0.2), slot(3, 1, waiting_s=0.3)]
    due = [slot(4, 1, 0.006), slot(5, 1, 0.005)]
    cost = flat(0.01)
    assert decide(slots + due, cost=cost).slots[:2] == (5, 4)
    assert decide(slots, cost=cost).slots[:2] == (3, 2)
    assert decide(slots[:2]).slots[0] == 0


def test_priority_comes_before_age_and_a_due_stream_before_priority() -> None:
    newcomers = [slot(0, 1, waiting_s=0.3), slot(1, 1, waiting_s=0.1, priority=9)]
    assert decide(newcomers, cost=flat(0.01)).slots == (1, 0)
    assert decide([*newcomers, slot(2, 1, 0.01, priority=0)], cost=flat(0.01)).slots[0] == 2


def test_a_newcomer_past_half_its_budget_goes_before_due_streams() -> None:
    made = decide([slot(0, 1, 0.004), slot(1, 1, waiting_s=0.8)])
    assert made.slots[0] == 1


def test_streams_with_slack_sit_out_when_they_cost_more_than_they_save() -> None:
    slots = [slot(0, 1, 0.02), slot(1, 25, 9.0), slot(2, 25, 9.0)]
    assert decide(slots, cost=FakeCost(fixed_s=0.0005, per_lane_s=0.004)).slots == (0,)
    assert decide(slots, cost=FakeCost(fixed_s=0.02, per_lane_s=0.0001)).slots == (0, 1, 2)


def test_lanes_that_padding_makes_anyway_are_free() -> None:
    policy = ChunkPolicy(FRAME_S, buckets=(4, 8))
    cost = FakeCost(fixed_s=0.0005, per_lane_s=0.004)
    slots = [slot(i, 1, 0.02 if i == 0 else 9.0) for i in range(12)]
    assert len(decide(slots, cost=cost, policy=policy).slots) == 4
    everybody = [slot(i, 25, 9.0) for i in range(12)]
    assert len(decide(everybody, load=1.0, cost=flat(0.02), policy=policy).slots) == 8


def test_a_step_of_slack_only_stays_short_enough_for_a_newcomer() -> None:
    made = decide([slot(i, 25, 9.0) for i in range(16)], load=1.0)
    cost = FakeCost()
    longest_s = max(POLICY.max_step_s, cost.step_s(1, 25))
    assert cost.step_s(len(made.slots), made.num_frames) <= longest_s


def test_nobody_joins_with_fewer_frames_than_the_step_has() -> None:
    made = decide([slot(0, 4, 0.021), slot(1, 3, 5.0), slot(2, 4, 0.022)], cost=flat(0.01))
    assert made == Plan((0, 2), 4, 0.0)


def test_a_first_chunk_is_never_smaller_than_the_line_says() -> None:
    cost = flat(0.04)  # a newcomer wants two frames: 80 ms of lead, 2 * 40 ms of turnaround
    newcomer = slot(1, 2, waiting_s=0.1)
    assert decide([slot(0, 1, 0.05), newcomer], cost=cost).slots == (0,)
    assert decide([slot(0, 2, 0.05), newcomer], cost=cost) == Plan((0, 1), 2, 0.0)


def test_with_a_crowd_steps_that_are_not_urgent_keep_a_distance_and_share() -> None:
    crowd = [slot(i, 1, 5.0) for i in range(16)]
    newcomer = slot(16, 1, waiting_s=0.05)
    cost = FakeCost(fixed_s=0.02, per_frame_s=0.001, per_lane_s=0.0)
    views = [*crowd, replace_pending(newcomer, 5)]
    waiting = decide(views, since_s=0.01, cost=cost)
    assert waiting.slots == () and waiting.wait_s is not None
    distance_s = cost.fixed_s / POLICY.fixed_share
    assert waiting.wait_s <= distance_s - 0.01 + 1e-9
    assert 16 in decide(views, since_s=distance_s, cost=cost).slots
    due = slot(17, 1, 0.02)
    for load in (0.0, 0.8, 1.0):
        assert decide([*views, due], since_s=0.0, load=load, cost=cost).slots, "not when somebody is due"
    overdue = replace(newcomer, index=17, num_pending=2, waiting_s=0.8)
    assert decide([*views, overdue], since_s=0.0, cost=cost).slots, "nor who waited for too long"
    soon = decide([*crowd, replace(newcomer, num_pending=5, waiting_s=0.74)], since_s=0.0, cost=cost)
    assert soon.wait_s == pytest.approx(0.01), "and it is asked again when somebody has"
    few = [slot(0, 1, 5.0), replace_pending(newcomer, 5)]
    assert decide(few, since_s=0.01, cost=cost).slots, "nor with hardly any company"


def replace_pending(view: SlotView, pending: int) -> SlotView:
    return replace(view, num_pending=pending)


@given(
    st.lists(
        st.builds(
            slot,
            st.just(0),
            st.integers(0, 40),
            st.one_of(st.none(), st.floats(-1, 4), st.just(math.inf)),
            waiting_s=st.floats(0, 2),
            pending_s=st.floats(0, 1),
            closing=st.booleans(),
            priority=st.integers(0, 9),
            whole=st.booleans(),
            quiet_s=st.floats(0, 1),
        ),
        max_size=20,
    ),
    st.floats(0, 0.1),
    st.floats(0, 1),
    st.one_of(st.just(math.inf), st.floats(0, 0.2)),
    st.floats(0, 0.3),
    st.integers(0, 3),
)
@settings(max_examples=500, deadline=None, derandomize=True)
def test_every_plan_keeps_the_rules(
    drawn: list[SlotView], interval_s: float, load: float, since_s: float, prompts_s: float, bucket: int
) -> None:
    slots = [replace(s, index=i, interval_s=interval_s) for i, s in enumerate(drawn)]
    cost = FakeCost()
    policy = replace(POLICY, buckets=(1, 4, 16)[:bucket])
    made = plan(slots, Recent(load, since_s, prompts_s), policy, cost)
    assert not policy.buckets or len(made.slots) <= policy.buckets[-1]
    assert len(set(made.slots)) == len(made.slots)
    if not made.slots:
        assert made.wait_s is None or 0 < made.wait_s < math.inf
    else:
        assert made.num_frames in WHOLE_FRAMES
        assert made.num_frames <= 25 or all(s.whole for s in slots)
        assert all(slots[i].num_pending >= made.num_frames for i in made.slots)
    pending = [s for s in slots if s.num_pending]
    due = [s for s in pending if s.is_playing and s.lead_s is not None and s.lead_s <= cost.step_s(1, 1)]
    assert bool(made.slots) or not due
    # A tail waits only for somebody whose frame is on its way, and not without a time.
    assert made.slots or made.wait_s is not None or not any(s.closing for s in pending)
    late = [
        s
        for s in pending
        if s.lead_s is None and not s.whole and (s.waiting_s > 0.75 or s.pending_s > FRAME_S)
    ]
    full = [s for s in late if s.num_pending >= MAX_FIRST_FRAMES or s.closing]
    assert bool(made.slots) or not any(s.waiting_s > 0.75 for s in full)
    if due and not late:  # nobody who can wait goes in front of who can't
        leader = slots[made.slots[0]]
        assert leader.is_playing and leader.lead_s is not None
        assert leader.lead_s <= min(s.lead_s for s in due if s.lead_s is not None) + 1e-9


# ---- a simulated machine


@dataclass
class SimStream:
    start_s: float
    num_frames: int
    made: int = 0
    pending: deque[int] = field(default_factory=deque)
    heard: list[int] = field(default_factory=list)
    since_s: float = 0.0
    first_s: float | None = None
    underrun_s: float = 0.0

    def lead_s(self, now: float) -> float | None:
        return None if self.first_s is None else len(self.heard) * FRAME_S - (now - self.first_s)


def simulate(
    streams: list[SimStream], interval_s: float, cost: FakeCost, rng: random.Random, stalls: float = 0.0
) -> None:
    """Frames arrive on their own clock, one step runs at a time; time is only what they take."""
    events = [(stream.start_s, i) for i, stream in enumerate(streams)]
    heapq.heapify(events)
    now, began_s = 0.0, -math.inf
    busy: deque[tuple[float, float]] = deque()

    def arrive(until_s: float) -> None:
        while events and events[0][0] <= until_s:
            at_s, i = heapq.heappop(events)
            stream = streams[i]
            if not stream.pending:
                stream.since_s = at_s
            stream.pending.append(stream.made)
            stream.made += 1
            if stream.made < stream.num_frames:
                stall_s = 0.5 if rng.random() < stalls else 0.0
                heapq.heappush(events, (at_s + interval_s * rng.uniform(0.8, 1.2) + stall_s, i))

    for _ in range(1_000_000):
        arrive(now)
        while busy and busy[0][0] < now - 1.0:
            busy.popleft()
        load = min(1.0, sum(took_s for _, took_s in busy))
        views = [
            SlotView(
                i,
                len(stream.pending),
                lead_s := stream.lead_s(now),
                now - (stream.start_s if lead_s is None else stream.since_s),
                now - stream.since_s,
                stream.made == stream.num_frames,
                interval_s,
                0.2 * interval_s,
            )
            for i, stream in enumerate(streams)
            if stream.made and len(stream.heard) < stream.num_frames
        ]
        made = plan(views, Recent(load, now - began_s), POLICY, cost)
        if made.slots:
            began_s = now
            took_s = cost.step_s(len(made.slots), made.num_frames)
            now += took_s
            busy.append((now, took_s))
            for i in made.slots:
                stream = streams[i]
                lead_s = stream.lead_s(now)
                if stream.first_s is None:
                    stream.first_s = now
                elif lead_s is not None and lead_s < 0:
                    stream.underrun_s = max(stream.underrun_s, -lead_s)
                    stream.first_s -= lead_s
                stream.heard += [stream.pending.popleft() for _ in range(made.num_frames)]
                stream.since_s = now
            continue
        wakes = [events[0][0]] if events else []
        if made.wait_s is not None:
            wakes.append(now + made.wait_s)
        if not wakes:
            return
        now = max(min(wakes), now + 1e-9)
    raise AssertionError("does not come to an end")


@pytest.mark.parametrize(
    ("num_streams", "interval_s", "cost"),
    [
        (1, 0.012, FakeCost()),
        (4, 0.020, FakeCost()),
        (8, 0.030, FakeCost(0.003, 0.0004, 0.0006)),
        (16, 0.030, FakeCost(0.003, 0.0004, 0.0006)),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_every_frame_is_decoded_once_and_in_order_and_nobody_runs_dry(
    num_streams: int, interval_s: float, cost: FakeCost, seed: int
) -> None:
    rng = random.Random(seed)
    streams = [SimStream(rng.uniform(0, 3), rng.randint(1, 90)) for _ in range(num_streams)]
    simulate(streams, interval_s, cost, rng)
    assert [stream.heard for stream in streams] == [list(range(stream.num_frames)) for stream in streams]
    assert max(stream.underrun_s for stream in streams) <= cost.jitter_s
    waits = [stream.first_s - stream.start_s for stream in streams if stream.first_s is not None]
    assert max(waits) < POLICY.first_audio_budget_s


@pytest.mark.parametrize("seed", range(3))
def test_where_steps_are_long_a_stream_is_late_by_a_step_or_two_at_most(seed: int) -> None:
    # The law of a large codec on a GPU: a step in flight may be in the way of one that is due.
    rng = random.Random(seed)
    streams = [SimStream(rng.uniform(0, 3), rng.randint(1, 90)) for _ in range(16)]
    simulate(streams, 0.03, FakeCost(0.024, 0.0014, 0.0), rng)
    assert [stream.heard for stream in streams] == [list(range(stream.num_frames)) for stream in streams]
    assert max(stream.underrun_s for stream in streams) < 0.1


@pytest.mark.parametrize("seed", range(3))
def test_no_slot_is_forgotten_on_a_saturated_machine(seed: int) -> None:
    # Twice as much as the machine can do, with text that stalls: late, but complete and fair.
    rng = random.Random(seed)
    streams = [SimStream(rng.uniform(0, 1), rng.randint(1, 60)) for _ in range(24)]
    simulate(streams, 0.02, FakeCost(0.01, 0.002, 0.006), rng, stalls=0.02)
    assert [stream.heard for stream in streams] == [list(range(stream.num_frames)) for stream in streams]


# ---- what a step costs


def learn(model: CostModel, law: FakeCost, steps: int, rng: random.Random, noise: float = 0.05) -> None:
    for _ in range(steps):
        width, frames = rng.randint(1, 8), rng.choice(STEP_FRAMES)
        model.observe(width, frames, law.step_s(width, frames) * rng.uniform(1 - noise, 1 + noise))


def worst(model: CostModel, law: FakeCost) -> float:
    """The largest relative error over all shapes."""
    shapes = [(width, frames) for width in (1, 2, 4, 8) for frames in STEP_FRAMES]
    return max(abs(model.step_s(*shape) / law.step_s(*shape) - 1) for shape in shapes)


@pytest.mark.parametrize(
    "law",
    [FakeCost(0.002, 0.0005, 0.001), FakeCost(0.024, 0.0014, 0.0), FakeCost(0.0, 0.0, 0.003)],
)
def test_the_cost_model_learns_the_law(law: FakeCost) -> None:
    model = CostModel()
    learn(model, law, 300, random.Random(0), noise=0.02)
    assert worst(model, law) < 0.25
    assert model.step_s(1, 25) == pytest.approx(law.step_s(1, 25), rel=0.1)


@pytest.mark.parametrize("factor", [10.0, 0.1])
def test_the_cost_model_follows_a_tenfold_change(factor: float) -> None:
    law = FakeCost(0.002, 0.0005, 0.001)
    changed = FakeCost(*(value * factor for value in (0.002, 0.0005, 0.001)))
    model = CostModel()
    rng = random.Random(1)
    learn(model, law, 300, rng)
    learn(model, changed, 500, rng)
    assert worst(model, changed) < 0.4


@pytest.mark.parametrize("seed", range(5))
def test_the_cost_model_is_never_negative_whatever_it_sees(seed: int) -> None:
    rng = random.Random(seed)
    model = CostModel()
    shape = (1, 1)
    for _ in range(3000):
        if rng.random() < 0.02:
            shape = (rng.randint(1, 16), rng.choice(STEP_FRAMES))  # long runs of one shape teach nothing new
        model.observe(*shape, rng.choice((0.0, 0.001, 0.01, 0.01, 0.5)))
        assert 0 <= model.step_s(16, 25) < 1000 and model.fixed_s >= 0 and model.jitter_s > 0
        assert model.step_s(2, 8) <= model.step_s(3, 8) <= model.step_s(3, 12)


def test_jitter_is_what_the_model_was_off_by() -> None:
    law = FakeCost()
    exact, noisy = CostModel(), CostModel()
    learn(exact, law, 300, random.Random(0), noise=0.0)
    learn(noisy, law, 300, random.Random(0), noise=0.8)
    assert exact.jitter_s == 0.005 and noisy.jitter_s > exact.jitter_s


def test_many_backlogs_that_are_due_at_once_are_served_within_their_lead() -> None:
    # LOAD-6: sixteen streams with two seconds pending each and a tenth of a second to go
    cost = FakeCost(fixed_s=0.0025, per_frame_s=0.0)
    leads = {index: 0.1 for index in range(16)}
    elapsed_s = 0.0
    while min(leads.values()) < 0.5:
        made = decide([slot(index, 25, lead_s) for index, lead_s in leads.items()], cost=cost)
        took_s = cost.step_s(len(made.slots), made.num_frames)
        elapsed_s += took_s
        for index in leads:
            leads[index] -= took_s
            assert leads[index] >= 0, (index, elapsed_s)
            leads[index] += made.num_frames * POLICY.frame_s * (index in made.slots)
    assert elapsed_s < 1.0


def test_frames_of_a_row_that_waits_for_its_listener_are_sent() -> None:
    """A player that has not begun reports 0: its lead does not shrink, and the row makes no more frames."""
    first = decide([slot(0, 1, lead_s=0.8, quiet_s=0.01)], load=0.9)
    assert not first.slots and first.wait_s is not None and first.wait_s < 0.3
    later_s = 0.01 + first.wait_s + 1e-6
    assert decide([slot(0, 1, lead_s=0.8, quiet_s=later_s)], load=0.9).slots == (0,)
