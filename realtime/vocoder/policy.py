"""Which slots are decoded together next, and how many frames each: a pure function.

The line everything follows from: a stream may wait for a chunk of F frames, p of them pending, only
while its lead covers the wait and the turnaround,

    lead >= max(F - p, 0) * s + v + jitter,

where s is the time between two frames of this stream, v the step that somebody else may be about to
get plus its own, and jitter what s and v were off by in 19 of 20 cases. The first chunk obeys the
same line: it must cover the making of another one like it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

STEP_FRAMES = (1, 2, 4, 5, 8, 12, 16, 25)  # a step is never padded: remainders take several steps
WHOLE_FRAMES = (*STEP_FRAMES, 50, 100)  # more than 25 only where nobody listens: a newcomer would wait
MIN_WAIT_S = 0.001
START_WAIT_S = 0.02  # about a frame of a busy engine
MAX_FIRST_FRAMES = 5  # where frames are hardly faster than sound no chunk helps: don't wait long for it


class Cost(Protocol):
    """What steps cost, in seconds; a CostModel is one. `usual_s` and `usual_width` are those of the
    last steps."""

    @property
    def fixed_s(self) -> float: ...

    @property
    def jitter_s(self) -> float: ...

    @property
    def usual_s(self) -> float: ...

    @property
    def usual_width(self) -> float: ...

    def step_s(self, width: int, num_frames: int) -> float: ...


@dataclass(frozen=True, slots=True)
class SlotView:
    """What the policy sees of a slot. `lead_s` is None before its first audio, inf where nobody listens
    now. `interval_s` is s, `jitter_s` what one frame may be late by."""

    index: int
    num_pending: int
    lead_s: float | None
    waiting_s: float  # since the stream was triggered (no audio yet) or since its oldest pending frame came
    pending_s: float  # since the oldest pending frame came, or the last one was taken
    closing: bool
    interval_s: float
    jitter_s: float = 0.0
    priority: int = 5
    whole: bool = False  # nobody listens before the end
    quiet_s: float = 0.0  # since its newest frame came

    @property
    def is_playing(self) -> bool:
        return self.lead_s is not None and not self.whole and self.lead_s < math.inf

    @property
    def is_stalled(self) -> bool:
        """No frame is on its way: its text, and not the engine, is slow."""
        return self.num_pending == 0 and self.pending_s > 2 * self.interval_s + self.jitter_s


@dataclass(frozen=True, slots=True)
class ChunkPolicy:
    """Constants of a deployment. `buckets` are the widths that steps are padded to (none: not padded),
    the last one is the most. A step that is not urgent lasts at most `max_step_s`, unless a single
    lane of `max_frames` takes longer: it can't be interrupted, so it is what a newcomer may find in
    its way; half a frame leaves a one-frame start possible.

    `fixed_share` is the most of the time that fixed costs may take once `crowd` streams run: then steps
    that are not urgent begin at least `fixed / fixed_share` apart, and whoever became ready in between
    shares them. Without it, each newcomer, second chunk and tail among 16 streams gets a step of its
    own, these slow the frames down, which makes more chunks urgent: two states are stable, and the bad
    one has half the throughput. With few streams there is no company to wait for: the distance grows
    with their number. Who is due never waits."""

    frame_s: float
    max_frames: int = 25
    max_step_s: float = 0.04
    first_audio_budget_s: float = 1.5
    buckets: tuple[int, ...] = ()
    fixed_share: float = 0.3
    crowd: int = 16

    def lanes(self, width: int) -> int:
        """What a step of so many slots is padded to."""
        return next((bucket for bucket in self.buckets if bucket >= width), width)

    def fits(self, width: int) -> bool:
        return not self.buckets or width <= self.buckets[-1]


@dataclass(frozen=True, slots=True)
class Plan:
    """Decode `num_frames` of each of `slots` now, or, with no slots, look again after `wait_s`
    (None: only a message can change anything)."""

    slots: tuple[int, ...]
    num_frames: int
    wait_s: float | None


@dataclass(frozen=True, slots=True)
class Recent:
    """What the vocoder did of late: its busy share, 0..1, and the time since its last step began.
    `prompts_s`: for so long the engine will be busy with prompts, which delays everybody's next frame."""

    load: float = 0.0
    since_s: float = math.inf
    prompts_s: float = 0.0


Planner = Callable[[Sequence[SlotView], Recent, ChunkPolicy, Cost], Plan]

DUE, NEW, SLACK, WHOLE, COULD = range(5)  # in the order of service; COULD only joins others


@dataclass(slots=True)
class _Wish:
    slot: SlotView
    urgency: int
    key: tuple[float, ...]  # order within its urgency, smallest first
    least: int  # frames: a step of its own has at least so many
    most: int


class _Moment:
    """What all decisions of one call share."""

    def __init__(self, slots: Sequence[SlotView], recent: Recent, policy: ChunkPolicy, cost: Cost) -> None:
        self.policy = policy
        self.cost = cost
        self.prompts_s = recent.prompts_s
        width = policy.lanes(max(1, min(round(cost.usual_width), len(slots))))
        self._steps = {frames: cost.step_s(width, frames) for frames in WHOLE_FRAMES}
        self.others_s = cost.usual_s if len(slots) > 1 else 0.0  # a step that may begin just before
        # All that play may be due at once: then a frame for each of them comes first.
        num_playing = sum(slot.is_playing for slot in slots)
        self.one_s = max(self._steps[1], cost.step_s(policy.lanes(max(num_playing, 1)), 1))
        self.turn_s = self.others_s + self.one_s + cost.jitter_s
        self.wanted = wanted_frames(recent.load, policy, cost)

    def guard_s(self, slot: SlotView) -> float:
        """With less lead than this it is due."""
        return self.turn_s + slot.jitter_s

    def needed_s(self, slot: SlotView, num_frames: int) -> float:
        """The lead that waiting for a chunk of `num_frames` takes. Errors of single frames are
        independent: they add up as their root."""
        missing = max(num_frames - slot.num_pending, 0)
        wait_s = missing * slot.interval_s + math.sqrt(missing) * slot.jitter_s
        return wait_s + self.others_s + self._steps[num_frames] + self.cost.jitter_s

    def fits(self, lead_s: float, num_frames: int) -> bool:
        """A step of its own would be there in time."""
        return self._steps[num_frames] + self.cost.jitter_s <= lead_s

    def first_frames(self, slot: SlotView) -> int:
        return first_frames(slot.interval_s, self.guard_s(slot) + self.prompts_s, self.policy)


def plan(slots: Sequence[SlotView], recent: Recent, policy: ChunkPolicy, cost: Cost) -> Plan:
    """The step to run now. As the load rises, chunks grow and steps get wider, as far as each stream's
    lead allows."""
    moment = _Moment(slots, recent, policy, cost)
    wishes: list[_Wish] = []
    wait_s = math.inf
    for slot in slots:
        if slot.num_pending == 0:
            continue
        wish, again_s = _consider(slot, moment)
        if wish is not None:
            wishes.append(wish)
        wait_s = min(wait_s, again_s)
    wishes.sort(key=lambda wish: (wish.urgency, wish.key))
    if wishes and wishes[0].urgency < COULD:
        apart_s = _apart_s(slots, wishes[0].urgency, recent, policy, cost)
        if apart_s <= 0:
            made = _step(wishes, slots, moment)
            if made is not None:
                return made
            # It would make somebody late whose frame is on its way: that comes as a message, or stalls.
            apart_s = wishes[0].slot.interval_s
        due_s = [until_s for wish in wishes if (until_s := _until_due_s(wish.slot, moment)) > 0]
        wait_s = min(wait_s, apart_s, *due_s)
    return Plan((), 0, max(wait_s, MIN_WAIT_S) if wait_s < math.inf else None)


def wanted_frames(load: float, policy: ChunkPolicy, cost: Cost) -> int:
    """As large as makes a step cheap: a step may waste, on its fixed cost, at most half the share
    that the vocoder is idle anyway, fixed / (fixed + F * per_frame) <= (1 - load) / 2."""
    per_frame_s = max(cost.step_s(1, 2) - cost.step_s(1, 1), 1e-6)
    waste = max(1 - load, 0.02) / 2
    wanted = math.ceil(cost.fixed_s / per_frame_s * (1 / waste - 1))
    return max(1, min(wanted, policy.max_frames))


def first_frames(interval_s: float, turn_s: float, policy: ChunkPolicy) -> int:
    """F1 = ceil((v + jitter) / (frame - s)), at least 1; `turn_s` is v + jitter."""
    spare_s = policy.frame_s - interval_s
    if spare_s <= 0:
        return MAX_FIRST_FRAMES
    return max(1, min(math.ceil(turn_s / spare_s - 1e-9), MAX_FIRST_FRAMES))


def _apart_s(
    slots: Sequence[SlotView], urgency: int, recent: Recent, policy: ChunkPolicy, cost: Cost
) -> float:
    """How long a step of this urgency has to wait yet for the distance it keeps."""
    if urgency == DUE:
        return 0.0
    if urgency == SLACK and any(s.lead_s is None and s.num_pending > 0 and not s.whole for s in slots):
        return START_WAIT_S  # the first chunk that is being made comes first, and takes others along
    num_playing = sum(slot.is_playing for slot in slots)
    distance_s = cost.fixed_s / policy.fixed_share * min(1.0, num_playing / policy.crowd)
    return distance_s - recent.since_s


def floor_frames(num_frames: int, sizes: Sequence[int] = STEP_FRAMES) -> int:
    """The largest step size that is not more than `num_frames` (at least 1)."""
    return max(frames for frames in sizes if frames <= max(num_frames, 1))


def _consider(slot: SlotView, moment: _Moment) -> tuple[_Wish | None, float]:
    """The slot's wish, and the time after which it must be looked at again."""
    policy = moment.policy
    p = slot.num_pending
    most = floor_frames(min(p, policy.max_frames))
    if slot.whole:
        if not slot.closing and p < WHOLE_FRAMES[-1]:
            return None, math.inf
        return _Wish(
            slot, WHOLE, (-slot.priority, -slot.waiting_s), 1, floor_frames(p, WHOLE_FRAMES)
        ), math.inf
    if slot.lead_s is None:
        first = moment.first_frames(slot)
        # Frames that come no faster than sound: no chunk helps.
        deadline_s = first * policy.frame_s + moment.prompts_s
        if p < first and not slot.closing and slot.pending_s < deadline_s:
            return None, deadline_s - slot.pending_s
        # Past half its budget, or ready for as long as its chunk plays, it is as urgent as a stream whose
        # lead went below the guard so long ago.
        over_s = max(slot.waiting_s - policy.first_audio_budget_s / 2, slot.pending_s - deadline_s)
        key = (moment.guard_s(slot) - over_s,) if over_s > 0 else (-slot.priority, -slot.waiting_s)
        urgency = DUE if over_s > 0 else NEW
        return _Wish(slot, urgency, key, floor_frames(min(p, first)), most), math.inf
    if slot.lead_s <= moment.guard_s(slot):
        return _Wish(slot, DUE, (slot.lead_s,), min(most, moment.first_frames(slot)), most), math.inf
    could = _Wish(slot, COULD, (slot.lead_s,), 1, most)
    if math.isinf(slot.lead_s) and not slot.closing:
        return could, math.inf  # nobody listens now: only a message can change anything
    larger = next((frames for frames in STEP_FRAMES if frames > p), STEP_FRAMES[-1])
    spare_s = slot.lead_s - moment.needed_s(slot, larger)
    # More should have come by then: the row waits for its text, or for this very listener, whose lead
    # does not shrink before it plays.
    spare_s = min(spare_s, 3 * slot.interval_s + moment.guard_s(slot) - slot.quiet_s)
    if p >= moment.wanted or slot.closing or spare_s < -1e-9:
        within = max((t for t in STEP_FRAMES if moment.fits(slot.lead_s, t)), default=1)
        least = floor_frames(min(p, moment.wanted, within))
        return _Wish(slot, SLACK, (-slot.priority, -p, slot.lead_s), least, most), math.inf
    return could, spare_s  # it goes when its lead no longer covers even the next larger chunk


def _until_due_s(slot: SlotView, moment: _Moment) -> float:
    if slot.lead_s is None:
        return moment.policy.first_audio_budget_s / 2 - slot.waiting_s
    return slot.lead_s - moment.guard_s(slot)


def _step(wishes: list[_Wish], slots: Sequence[SlotView], moment: _Moment) -> Plan | None:
    """The best step led by the first wish: the one that makes nobody late, or the least so; of those, the
    one that starts the most newcomers; of those, the one that makes the most sound in its time. None if
    it is better to wait."""
    leader = wishes[0]
    policy, cost = moment.policy, moment.cost
    most = leader.most
    if leader.urgency == NEW:  # every newcomer that is ready: each one left out waits for a whole step
        # ... but none that is shorter than the leader's line allows.
        most = min(w.most for w in wishes if w.urgency == NEW and w.most >= leader.least)
    elif leader.urgency == WHOLE and any(not slot.whole for slot in slots):
        most = min(most, policy.max_frames)
    best: tuple[tuple[float, int, float], tuple[int, ...], int] | None = None
    for frames in WHOLE_FRAMES:
        if not min(leader.least, most) <= frames <= most:
            continue
        chosen = _company(wishes, frames, moment)
        step_s = cost.step_s(policy.lanes(len(chosen)), frames)
        inside = {wish.slot.index for wish in chosen}
        late_s = 0.0
        for slot in slots:
            if slot.is_playing and slot.lead_s is not None and not slot.is_stalled:
                own_s = 0.0 if slot.index in inside else moment.one_s
                late_s = max(late_s, step_s + own_s + cost.jitter_s - slot.lead_s)
        num_new = sum(wish.urgency == NEW for wish in chosen)
        rank = (late_s, -num_new, -frames * len(chosen) / step_s)
        if best is None or rank < best[0]:
            best = (rank, tuple(wish.slot.index for wish in chosen), frames)
    assert best is not None, leader
    if best[0][0] > 0 and leader.urgency >= SLACK:
        return None
    return Plan(best[1], best[2], 0.0)


def _company(wishes: list[_Wish], num_frames: int, moment: _Moment) -> list[_Wish]:
    """Who joins the first of `wishes` in a step of `num_frames`.

    Streams that are due or new join in their order. One with slack joins a step led by those only if
    that saves more (its share of a step of its own) than it delays them. Nobody joins who would push
    the step past the lead of a stream that is due, or past what a newcomer may find in its way.
    """
    policy, cost = moment.policy, moment.cost
    leader = wishes[0]
    lanes = policy.lanes(1)
    step_s = cost.step_s(lanes, num_frames)
    limit_s = max(policy.max_step_s, cost.step_s(1, policy.max_frames))
    if leader.urgency == DUE and leader.slot.lead_s is not None:
        limit_s = max(leader.slot.lead_s - cost.jitter_s, policy.max_step_s)
    saved_s = cost.fixed_s * num_frames / max(moment.wanted, num_frames)
    chosen = [leader]
    for wish in wishes[1:]:
        if wish.slot.num_pending < num_frames or (wish.slot.lead_s is None and num_frames < wish.least):
            continue  # nor may a first chunk be smaller than the line says
        width = len(chosen) + 1
        if not policy.fits(width):
            break
        if policy.lanes(width) != lanes:
            wider_s = cost.step_s(policy.lanes(width), num_frames)
            if wider_s > limit_s:
                continue
            if leader.urgency <= NEW < wish.urgency and wider_s - step_s > saved_s:
                continue
            lanes, step_s = policy.lanes(width), wider_s
        chosen.append(wish)
    return chosen
