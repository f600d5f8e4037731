"""Chunking as others do it: what the scheduler is compared with. Same signature as the policy."""

from __future__ import annotations

from collections.abc import Sequence

from realtime.vocoder.policy import ChunkPolicy, Cost, Plan, Recent, SlotView

TAIL_FRAMES = 25  # a tail is decoded in pieces of at most so many


def fixed_5_25(slots: Sequence[SlotView], recent: Recent, policy: ChunkPolicy, cost: Cost) -> Plan:
    """Five frames first, then 25; who has five joins; T is the shortest backlog; tails go alone."""
    return _thresholds(slots, policy, first=5, floor=5)


def fixed_1_25(slots: Sequence[SlotView], recent: Recent, policy: ChunkPolicy, cost: Cost) -> Plan:
    """One frame first, then 25; who is ready joins; T is the shortest backlog; tails go alone."""
    return _thresholds(slots, policy, first=1, floor=None)


def one_at_end(slots: Sequence[SlotView], recent: Recent, policy: ChunkPolicy, cost: Cost) -> Plan:
    """Each utterance in one chunk when it is complete; those of one length go together."""
    complete = sorted(
        (slot for slot in slots if slot.closing and slot.num_pending), key=lambda s: -s.pending_s
    )
    if not complete:
        return Plan((), 0, None)
    num_frames = complete[0].num_pending
    same = [slot.index for slot in complete if slot.num_pending == num_frames]
    return Plan(tuple(same[: policy.buckets[-1]] if policy.buckets else same), num_frames, 0.0)


def _thresholds(slots: Sequence[SlotView], policy: ChunkPolicy, first: int, floor: int | None) -> Plan:
    def is_ready(slot: SlotView) -> bool:
        return slot.num_pending >= (first if slot.lead_s is None else 25)

    ready = sorted((slot for slot in slots if is_ready(slot)), key=lambda slot: -slot.pending_s)
    tails = [slot for slot in slots if slot.closing and 0 < slot.num_pending and not is_ready(slot)]
    if tails and (not ready or max(tail.pending_s for tail in tails) > ready[0].pending_s):
        tail = max(tails, key=lambda slot: slot.pending_s)
        return Plan((tail.index,), min(tail.num_pending, TAIL_FRAMES), 0.0)
    if not ready:
        return Plan((), 0, None)
    chosen = [slot for slot in ready]
    if floor is not None:
        chosen += [s for s in slots if s.num_pending >= floor and not s.closing and s not in ready]
    chosen = chosen[: policy.buckets[-1]] if policy.buckets else chosen
    num_frames = min(min(slot.num_pending for slot in chosen), 25)
    return Plan(tuple(slot.index for slot in chosen), num_frames, 0.0)
