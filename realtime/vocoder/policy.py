"""Which slots are decoded together next, and how many frames each: a pure function.

The line everything follows from: a stream may wait for a chunk of F frames, p of them pending, only
while its lead covers the wait and the step, `lead >= max(F - p, 0) * s + v + jitter`, where s is the
time between two frames of a stream and v the step. The first chunk obeys the same line: it must
cover the making of another one like it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

STEP_FRAMES = (1, 2, 4, 5, 8, 12, 16, 25)  # a step is never padded: remainders take several steps
MIN_WAIT_S = 0.001
MAX_FIRST_FRAMES = 4  # with frames slower than sound no chunking helps; don't wait long for nothing


class Cost(Protocol):
    """What steps cost, in seconds; a CostModel is one."""

    @property
    def fixed_s(self) -> float: ...

    @property
    def jitter_s(self) -> float: ...

    def step_s(self, width: int, num_frames: int) -> float: ...


@dataclass(frozen=True, slots=True)
class SlotView:
    """What the policy sees of a slot. `lead_s` is None before its first audio."""

    index: int
    num_pending: int
    lead_s: float | None
    waiting_s: float  # since the stream was triggered (no audio yet) or since its oldest pending frame came
    pending_s: float  # since the oldest pending frame came
    closing: bool


@dataclass(frozen=True, slots=True)
class ChunkPolicy:
    """Constants of a deployment. `max_step_s` bounds a step that nobody is waiting for: it can't be
    interrupted, so it is what a newcomer may find in its way."""

    frame_s: float
    max_frames: int = 25
    max_step_s: float = 0.04
    first_audio_budget_s: float = 1.5


@dataclass(frozen=True, slots=True)
class Plan:
    """Decode `num_frames` of each of `slots` now, or, with no slots, look again after `wait_s`
    (None: only a message can change anything)."""

    slots: tuple[int, ...]
    num_frames: int
    wait_s: float | None


@dataclass(slots=True)
class _Ready:
    slot: SlotView
    num_frames: int  # what it would like now
    urgency: int  # 0 due, 1 newcomer, 2 has slack
    key: tuple[float, float]  # order within its urgency, smallest first


def plan(slots: Sequence[SlotView], interval_s: float, load: float, policy: ChunkPolicy, cost: Cost) -> Plan:
    """`interval_s` is the time between two frames of a running stream, `load` the vocoder's busy
    share (0..1): as it rises, chunks grow, as far as each stream's lead allows."""
    ready: list[_Ready] = []
    wait_s: float | None = None
    turn_s = _turn_s(slots, policy, cost)
    num_due = sum(
        slot.num_pending > 0 and slot.lead_s is not None and slot.lead_s <= turn_s for slot in slots
    )
    for slot in slots:
        if slot.num_pending == 0:
            continue
        entry, again_s = _consider(slot, turn_s, num_due, interval_s, load, policy, cost)
        if entry is not None:
            ready.append(entry)
        elif again_s is not None:
            wait_s = again_s if wait_s is None else min(wait_s, again_s)
    if not ready:
        return Plan((), 0, wait_s)
    ready.sort(key=lambda entry: (entry.urgency, entry.key))
    num_frames = ready[0].num_frames
    chosen = _company(ready, num_frames, policy, cost)
    return Plan(tuple(entry.slot.index for entry in chosen), num_frames, 0.0)


def _turn_s(slots: Sequence[SlotView], policy: ChunkPolicy, cost: Cost) -> float:
    """The lead at which a stream is due: a step that has just begun for others, then a frame for
    everybody who plays, for all of them may be due at once."""
    num_playing = sum(slot.lead_s is not None and not math.isinf(slot.lead_s) for slot in slots)
    step_s = cost.step_s(max(num_playing, 1), 1)
    in_flight_s = policy.max_step_s if num_playing > 1 else 0.0
    return in_flight_s + step_s + cost.jitter_s


def _consider(
    slot: SlotView,
    turn_s: float,
    num_due: int,
    interval_s: float,
    load: float,
    policy: ChunkPolicy,
    cost: Cost,
) -> tuple[_Ready | None, float | None]:
    """The slot's wish, or None and the time after which it must be looked at again."""
    p = slot.num_pending
    guard_s = cost.step_s(1, 1) + cost.jitter_s
    if slot.lead_s is None:
        first = first_frames(interval_s, policy, cost)
        deadline_s = first * interval_s + guard_s  # the frames should have come by then: text is slow
        if p < first and not slot.closing and slot.pending_s < deadline_s:
            return None, deadline_s - slot.pending_s
        late = slot.waiting_s > policy.first_audio_budget_s / 2
        return _Ready(slot, floor_frames(min(p, first)), 0 if late else 1, (-slot.waiting_s, 0.0)), None
    if slot.lead_s <= turn_s:
        return _Ready(slot, _due_frames(slot.lead_s, p, num_due, policy, cost), 0, (slot.lead_s, 0.0)), None
    wanted = chunk_frames(slot.lead_s - turn_s, p, interval_s, load, policy, cost)
    # By then the rest should have come: text is slow, or the row waits for its listener. A lead that
    # does not shrink (a player that has not started) must not keep what is there.
    late_s = 2 * wanted * interval_s + guard_s
    if p >= wanted or slot.closing or slot.pending_s >= late_s:
        return _Ready(slot, floor_frames(min(p, max(wanted, 1))), 2, (-p, slot.lead_s)), None
    if math.isinf(slot.lead_s):
        return None, None  # nobody listens: only a message can change anything
    # It goes when its lead no longer covers even the next larger chunk.
    larger = min(frames for frames in STEP_FRAMES if frames > p)
    due_s = slot.lead_s - turn_s - _needed_s(larger, p, interval_s, cost)
    return None, max(min(due_s, late_s - slot.pending_s), MIN_WAIT_S)


def _due_frames(lead_s: float, num_pending: int, num_due: int, policy: ChunkPolicy, cost: Cost) -> int:
    """As much of a backlog as fits into its lead, or into the step that anybody may be in the way of,
    shared by all who are due."""
    within_s = max(lead_s, policy.max_step_s) / max(num_due, 1)
    most = min(num_pending, policy.max_frames)
    fitting = [frames for frames in STEP_FRAMES if frames <= most and cost.step_s(1, frames) <= within_s]
    return max(fitting, default=1)


def first_frames(interval_s: float, policy: ChunkPolicy, cost: Cost) -> int:
    """F1 = ceil((v + jitter) / (frame - s)), at least 1."""
    spare_s = policy.frame_s - interval_s
    if spare_s <= 0:
        return MAX_FIRST_FRAMES
    needed = math.ceil((cost.step_s(1, 1) + cost.jitter_s) / spare_s)
    return max(1, min(needed, MAX_FIRST_FRAMES))


def chunk_frames(
    lead_s: float, num_pending: int, interval_s: float, load: float, policy: ChunkPolicy, cost: Cost
) -> int:
    """The largest chunk worth waiting for: as large as makes a step cheap when idle, up to the
    most allowed as load rises, and never more than the lead can wait for."""
    per_frame_s = max(cost.step_s(1, 2) - cost.step_s(1, 1), 1e-6)
    cheap = math.ceil(4 * cost.fixed_s / per_frame_s)  # the fixed cost is a fifth of such a step
    wanted = min(max(cheap, round(load * policy.max_frames), 1), policy.max_frames)
    best = 1
    for frames in STEP_FRAMES:
        if frames <= wanted and lead_s >= _needed_s(frames, num_pending, interval_s, cost):
            best = frames
    return best


def _needed_s(num_frames: int, num_pending: int, interval_s: float, cost: Cost) -> float:
    """The lead that waiting for a chunk of `num_frames` takes."""
    wait_s = max(num_frames - num_pending, 0) * interval_s
    return wait_s + cost.step_s(1, num_frames) + cost.jitter_s


def floor_frames(num_frames: int) -> int:
    """The largest step size that is not more than `num_frames` (at least 1)."""
    return max(frames for frames in STEP_FRAMES if frames <= max(num_frames, 1))


def _company(ready: list[_Ready], num_frames: int, policy: ChunkPolicy, cost: Cost) -> list[_Ready]:
    """Who joins the first of `ready` in a step of `num_frames`.

    Streams that are due or new join in their order. One with slack joins a step led by those only
    if that saves more (one step's fixed cost) than it delays them. Nobody joins who would push the
    step past the lead of a stream that is due, or past what a newcomer may find in its way.
    """
    leader = ready[0]
    chosen = [leader]
    tightest_s = min((e.slot.lead_s for e in ready if e.slot.lead_s is not None), default=float("inf"))
    for entry in ready[1:]:
        if entry.slot.num_pending < num_frames:
            continue
        width = len(chosen) + 1
        step_s = cost.step_s(width, num_frames)
        delay_s = step_s - cost.step_s(width - 1, num_frames)
        if entry.urgency == 2:
            if leader.urgency < 2 and delay_s > cost.fixed_s:
                continue
            if step_s > policy.max_step_s:
                continue
        elif leader.urgency == 0 and step_s + cost.jitter_s > max(tightest_s, policy.max_step_s):
            continue
        chosen.append(entry)
    return chosen
