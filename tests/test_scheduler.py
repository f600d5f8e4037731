"""Who decodes, who parks, where segments and streams end: tables and random walks on a fake clock."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from desk import Desk, check_order, mentions
from fakes import EOS, NO_ROWS, SPEC, TEXT, FakeRunner, prompt, sentence, utterance

from realtime.engine.row import Row, Segment
from realtime.engine.scheduler import Batch, Scheduler, StepOutput
from realtime.engine.text import window_ids
from realtime.messages import (
    Drop,
    EndSegment,
    EndText,
    EngineMessage,
    Finish,
    Frames,
    Pace,
    StreamId,
    Tokens,
)

FRAME_S = SPEC.frame_s


def slow(row: Row, segment: Segment) -> int:
    return 0


def every_second(row: Row, segment: Segment) -> int:
    return segment.num_frames % 2


# ---- when a row runs


def test_an_open_segment_starts_with_two_tokens_and_not_with_one() -> None:
    desk = Desk()
    desk.tell(prompt(1), Tokens(StreamId(1), (100,)))
    assert desk.step() is None
    desk.tell(Tokens(StreamId(1), (101,)))
    assert isinstance(desk.step(), Batch)


def test_a_closed_segment_runs_with_whatever_it_has() -> None:
    desk = Desk()
    desk.tell(prompt(1), Tokens(StreamId(1), (100,)), EndSegment(StreamId(1)))
    assert isinstance(desk.step(), Batch)


def test_a_row_parks_when_its_next_token_is_not_known_and_goes_on_when_it_comes() -> None:
    # TEXTIN-9
    desk = Desk()
    desk.tell(prompt(1), Tokens(StreamId(1), (100, 101, 102)))
    assert desk.run() == 2  # one token a frame: after two of them the third is spoken without the fourth
    desk.tell(Tokens(StreamId(1), (103,)))
    assert desk.run() == 1
    desk.tell(EndText(StreamId(1)))
    desk.run()
    assert desk.of(1, Finish) == [Finish(StreamId(1), "done", desk.of(1, Finish)[0].text_pads)]
    assert desk.scheduler.num_free == desk.num_rows


@pytest.mark.parametrize(("stall_s", "told"), [(0.05, []), (0.5, [(0, 2, 510)])])
def test_a_stall_is_told_once_and_only_when_it_is_longer_than_a_frame(
    stall_s: float, told: list[tuple[int, int, int]]
) -> None:
    desk = Desk()
    desk.tell(prompt(1), Tokens(StreamId(1), (100, 101, 102)))
    desk.run()
    desk.clock.advance(stall_s)
    desk.step()  # asking again in between does not restart the count
    desk.clock.advance(0.01)
    desk.tell(Tokens(StreamId(1), (103, 104)))
    desk.run()
    assert desk.notes(1, "starved") == told


def test_waiting_for_the_first_tokens_of_a_segment_is_no_stall() -> None:
    desk = Desk()
    desk.tell(*sentence(1, 2), prompt(1, 1), Tokens(StreamId(1), (200,)))
    desk.run()
    desk.clock.advance(3)
    desk.tell(EndText(StreamId(1)))
    desk.run()
    assert desk.notes(1, "starved") == []


def test_the_window_shows_start_known_tokens_and_what_lies_beyond() -> None:
    segment = Segment(0, NO_ROWS, tokens=[100, 101, 102])
    assert window_ids(segment, TEXT) == [1, 1, 100, 101, 102, 4, 4]
    segment.closed = True
    assert window_ids(segment, TEXT) == [1, 1, 100, 101, 102, 2, 2]
    segment.spoken = 3
    assert window_ids(segment, TEXT) == [101, 102, 2, 2, 2, 2, 2]


def test_a_held_row_parks_and_goes_on_where_it_was() -> None:
    desk = Desk()
    desk.tell(*utterance(1, 5), *utterance(2, 5))
    desk.step()
    desk.tell(Pace(StreamId(1), True, None, desk.clock()))
    desk.run()
    assert desk.num_frames(1) == 1 and desk.of(2, Finish)
    desk.tell(Pace(StreamId(1), False, None, desk.clock()))
    desk.run()
    assert desk.num_frames(1) == desk.num_frames(2)


# ---- lead


def test_a_row_stays_within_its_lead_and_says_when_to_ask_again() -> None:
    desk = Desk(step_s=0.001)
    desk.tell(*utterance(1, 60, max_lead_s=0.4))
    desk.run()
    assert desk.num_frames(1) == 6  # the sixth takes it over 0.4 s
    wait_s = desk.step()
    assert isinstance(wait_s, float) and 0 < wait_s < FRAME_S
    desk.clock.advance(wait_s + 1e-6)
    assert isinstance(desk.step(), Batch)


def test_the_reported_play_position_counts_instead_of_the_clock() -> None:
    desk = Desk(step_s=0.001)
    desk.tell(*utterance(1, 60, max_lead_s=0.4))
    desk.run()
    before = desk.num_frames(1)
    desk.tell(Pace(StreamId(1), False, 0.4, desk.clock()))
    desk.run()
    assert desk.num_frames(1) == before + 5
    assert desk.row(1).lead_s(desk.clock(), FRAME_S) == pytest.approx(0.48, abs=0.01)


def test_a_pause_at_the_start_that_is_longer_than_the_lead_does_not_silence_the_stream() -> None:
    # TEXTIN-16
    desk = Desk(step_s=0.001)
    desk.tell(
        prompt(1, silence_ms=8000, max_lead_s=2), *sentence(1, 5, 1, max_lead_s=2), EndText(StreamId(1))
    )
    assert isinstance(desk.step(), Batch)
    for _ in range(100):
        answer = desk.step()
        if isinstance(answer, float):
            desk.clock.advance(answer + 1e-6)
        elif answer is None:
            break
    assert desk.of(1, Finish)


def test_a_stall_is_not_made_up_for_by_running_ahead_of_the_lead() -> None:
    desk = Desk(step_s=0.001)
    desk.tell(prompt(1, max_lead_s=0.4), Tokens(StreamId(1), (100, 101)))
    desk.run()
    desk.clock.advance(30)
    desk.tell(Tokens(StreamId(1), tuple(range(102, 150))))
    before = desk.num_frames(1)
    desk.run()
    assert desk.num_frames(1) - before == 6


# ---- segments, pauses, the end


def test_segments_follow_each_other_in_one_row_each_from_position_zero() -> None:
    desk = Desk()
    desk.tell(*utterance(1, 3, 4))
    desk.run()
    ends = desk.notes(1, "segment_end")
    assert [(segment, frames) for segment, _, frames in ends] == [
        (0, ends[0][1]),
        (1, ends[1][1] - ends[0][1]),
    ]
    first = [batch.rows[0] for batch in desk.runner.batches]
    assert len({id(row) for row in first}) == 1
    assert desk.of(1, Finish) and desk.scheduler.num_free == desk.num_rows


def test_a_pause_is_told_at_its_place_and_takes_no_step() -> None:
    desk = Desk()
    desk.tell(*sentence(1, 3), prompt(1, 1, silence_ms=700), *sentence(1, 2, 2), EndText(StreamId(1)))
    desk.run()
    (segment, frame, value), *rest = desk.notes(1, "silence")
    ends = desk.notes(1, "segment_end")
    assert (segment, frame, value, rest) == (1, ends[0][1], 700, [])
    assert ends[1] == (1, frame, 0)
    assert ends[2][1] == desk.num_frames(1)


def test_a_stream_of_pauses_only_finishes_without_a_frame() -> None:
    desk = Desk()
    desk.tell(prompt(1, silence_ms=300), prompt(1, 1, silence_ms=200), EndText(StreamId(1)))
    assert desk.notes(1, "silence") == [(0, 0, 300), (1, 0, 200)]
    assert desk.of(1, Finish) == [Finish(StreamId(1), "done")]
    assert desk.step() is None and desk.scheduler.num_free == desk.num_rows


def test_a_new_prompt_and_the_end_of_text_both_close_an_open_segment() -> None:
    desk = Desk()
    desk.tell(prompt(1), Tokens(StreamId(1), (100, 101)), prompt(1, 1), Tokens(StreamId(1), (200, 201)))
    desk.run()
    assert len(desk.notes(1, "segment_end")) == 1
    desk.tell(EndText(StreamId(1)))
    desk.run()
    assert len(desk.notes(1, "segment_end")) == 2 and desk.of(1, Finish)


def test_a_row_without_text_left_waits_for_the_end() -> None:
    desk = Desk()
    desk.tell(*sentence(1, 3))
    desk.run()
    assert desk.step() is None and not desk.of(1, Finish)
    desk.tell(EndText(StreamId(1)))
    assert desk.of(1, Finish)


@pytest.mark.parametrize(
    ("num_tokens", "closed", "spoken", "num_frames", "allowed"),
    [
        (5, True, 5, 6, True),
        (5, True, 4, 6, True),
        (5, True, 3, 6, False),
        (5, True, 5, 2, True),
        (5, True, 5, 1, False),
        (5, False, 4, 6, False),
        (1, True, 0, 2, True),
    ],
)
def test_speech_may_end_when_the_last_token_is_reached_and_two_frames_are_out(
    num_tokens: int, closed: bool, spoken: int, num_frames: int, allowed: bool
) -> None:
    # TEXTIN-9, STOP-3: never before the end of the text, never at once
    desk = Desk()
    desk.tell(prompt(1))
    segment = desk.row(1).segments[0]
    segment.tokens = list(range(100, 100 + num_tokens))
    segment.closed, segment.spoken, segment.num_frames = closed, spoken, num_frames
    assert desk.scheduler.policy.may_stop(segment) is allowed


def test_the_end_of_speech_makes_no_frame() -> None:
    desk = Desk()
    desk.tell(*utterance(1, 4))
    desk.run()
    assert desk.num_frames(1) == len(desk.runner.batches) - 1 == 3  # ends while the fourth token is spoken


# ---- caps


def test_twelve_frames_may_follow_the_one_that_finished_the_text() -> None:
    # STOP-1
    desk = Desk(runner=FakeRunner(never_eos=True))
    desk.tell(*utterance(1, 10))
    desk.run()
    assert desk.num_frames(1) == 10 + 12
    assert desk.notes(1, "segment_end") == [(0, 22, 22)]
    assert desk.of(1, Finish) == [Finish(StreamId(1), "done")]


@pytest.mark.parametrize(("num_tokens", "frames"), [(1, 30), (2, 35), (31, 180), (60, 180)])
def test_a_segment_that_speaks_nothing_ends_the_stream_at_its_cap(num_tokens: int, frames: int) -> None:
    # STOP-1, STOP-2
    desk = Desk(runner=FakeRunner(pace=slow, never_eos=True))
    desk.tell(*utterance(1, num_tokens))
    desk.run()
    assert desk.num_frames(1) == frames
    assert desk.of(1, Finish) == [Finish(StreamId(1), "limit")]
    assert desk.scheduler.num_free == desk.num_rows


def test_what_a_capped_segment_has_not_spoken_becomes_a_new_part_of_it() -> None:
    def sleepy(row: Row, segment: Segment) -> int:  # the first part speaks four tokens and stops
        return int(segment.num_frames < 4 or row.num_parts > 0)

    desk = Desk(runner=FakeRunner(pace=sleepy, never_eos=True))
    desk.tell(*sentence(1, 10), *sentence(1, 3, 1), EndText(StreamId(1)))
    seen = []
    while isinstance(batch := desk.step(), Batch):
        segment = batch.rows[0].segments[0] if batch.rows[0].segments else None
        if segment is not None and (segment.index, segment.offset) not in [s[:2] for s in seen]:
            seen.append((segment.index, segment.offset, list(segment.tokens)))
    assert seen == [
        (0, 0, [100 + i for i in range(10)]),
        (0, 4, [104 + i for i in range(6)]),
        (1, 0, [200 + i for i in range(3)]),
    ]
    first = 75 + 6 + 12  # 5 N + 25 frames of the first part, then the rest with its silence
    assert desk.notes(1, "segment_end") == [(0, first, first), (1, first + 15, 15)]


def test_an_open_segment_is_capped_and_its_text_goes_on() -> None:
    def late(row: Row, segment: Segment) -> int:
        return int(row.num_parts > 0 or segment.num_frames % 60 == 59)

    desk = Desk(runner=FakeRunner(pace=late))
    desk.tell(prompt(1), Tokens(StreamId(1), tuple(range(100, 110))))
    for _ in range(181):
        desk.step()
    segment = desk.row(1).segments[0]
    assert (desk.num_frames(1), segment.offset, segment.tokens) == (180, 3, list(range(103, 110)))
    assert not desk.notes(1, "segment_end") and not segment.closed
    desk.tell(Tokens(StreamId(1), (110,)), EndText(StreamId(1)))
    assert desk.row(1).segments[0].tokens == list(range(103, 111))
    desk.run()
    assert len(desk.notes(1, "segment_end")) == 1


def test_a_capped_part_that_turns_out_to_have_no_text_is_never_started() -> None:
    """An open segment at its cap with everything spoken, and then only the end comes."""
    desk = Desk(runner=FakeRunner(pace=lambda row, segment: 1 if segment.num_frames in (50, 179) else 0))
    desk.tell(prompt(1), Tokens(StreamId(1), (100, 101)))
    desk.run(60)
    desk.tell(Tokens(StreamId(1), (102,)))
    desk.run()
    assert desk.num_frames(1) == 180
    desk.tell(Tokens(StreamId(1), (103,)))
    desk.step()
    desk.row(1).segments[0].tokens.clear()
    desk.tell(EndText(StreamId(1)))
    assert desk.step() is None
    assert desk.notes(1, "segment_end") == [(0, 180, 180)] and desk.of(1, Finish)


@pytest.mark.parametrize("limit", [1, 2, 7])
def test_a_stream_ends_at_its_own_limit_with_the_last_frame_before_the_finish(limit: int) -> None:
    # STOP-5
    desk = Desk()
    desk.tell(*utterance(1, 20, max_frames=limit), *utterance(2, 20))
    desk.run()
    assert desk.num_frames(1) == limit
    order = [m for m in desk.sent if mentions(m, 1)]
    assert order[-1] == Finish(StreamId(1), "limit") and isinstance(order[-2], Frames)
    assert desk.scheduler.num_free == desk.num_rows


def test_text_that_comes_after_the_end_of_a_stream_takes_no_row() -> None:
    desk = Desk()
    desk.tell(*sentence(1, 20, max_frames=2))
    desk.run()
    desk.tell(*sentence(1, 3, 1), EndText(StreamId(1)), Pace(StreamId(1), True, None, 0.0))
    assert desk.step() is None and desk.scheduler.num_free == desk.num_rows
    assert [m for m in desk.sent if mentions(m, 1)][-1] == Finish(StreamId(1), "limit")


# ---- batches


def test_rows_decode_together_in_ascending_order_whatever_their_position() -> None:
    desk = Desk()
    desk.tell(*utterance(1, 9))
    desk.step()
    desk.tell(*utterance(2, 9), *utterance(3, 9))
    batch = desk.step()
    assert isinstance(batch, Batch) and batch.phase == "decode"
    assert [row.index for row in batch.rows] == [0, 1, 2]


def test_never_two_prefills_in_a_row_while_somebody_needs_its_frame() -> None:
    desk = Desk(num_rows=8)
    desk.tell(*utterance(1, 30))
    desk.step()
    desk.step()
    for stream in range(2, 7):
        desk.tell(*utterance(stream, 5, num_rows=3))
    for _ in range(8):
        desk.step()
    phases = [batch.phase for batch in desk.runner.batches[2:10]]
    assert phases.count("prefill") == 4 and ("prefill", "prefill") not in zip(
        phases, phases[1:], strict=False
    )


def test_prefills_follow_each_other_while_the_leads_of_all_who_run_cover_them() -> None:
    desk = Desk(num_rows=8, step_s=0.005)
    desk.tell(*utterance(1, 60))
    for _ in range(30):
        desk.step()  # two seconds ahead
    for stream in range(2, 7):
        desk.tell(*utterance(stream, 5, num_rows=3))
    phases = [batch.phase for _ in range(5) if isinstance(batch := desk.step(), Batch)]
    assert phases.count("prefill") >= 3


def test_a_long_prompt_is_read_in_parts_between_the_steps_of_a_stream_in_need() -> None:
    desk = Desk(num_rows=4)
    desk.tell(*utterance(1, 30))
    desk.step()
    desk.step()
    desk.tell(*utterance(2, 5, num_rows=170))
    for num_positions in (50, 200) * 20:
        desk.scheduler.cost.observe_prefill(num_positions, 0.003 * num_positions)
    parts: list[tuple[int, int]] = []
    while not desk.num_frames(2):
        batch = desk.step()
        assert isinstance(batch, Batch)
        if batch.phase == "prefill":
            parts.append((batch.start, batch.end))
    assert len(parts) > 3
    assert [start for start, _ in parts] == [0, *(end for _, end in parts[:-1])] and parts[-1][1] == 170
    phases = [batch.phase for batch in desk.runner.batches[2:6]]
    assert ("prefill", "prefill") not in zip(phases, phases[1:], strict=False)
    desk.run()
    assert desk.of(2, Finish) and desk.of(1, Finish)


def test_rows_far_ahead_sit_out_while_a_newcomer_makes_its_first_frames() -> None:
    desk = Desk(num_rows=4, step_s=0.002)
    desk.tell(*utterance(1, 60))
    for _ in range(40):
        desk.step()  # three seconds ahead, far more than its guard
    desk.tell(*utterance(2, 10))
    first, second, third = desk.step(), desk.step(), desk.step()
    assert isinstance(first, Batch) and isinstance(second, Batch) and isinstance(third, Batch)
    assert [[row.stream_id for row in batch.rows] for batch in (first, second, third)] == [[2], [2], [1, 2]]
    assert "pace" in desk.scheduler.parked


def test_nobody_sits_out_whose_lead_is_not_above_the_guard() -> None:
    desk = Desk(num_rows=4, step_s=0.04)
    desk.tell(*utterance(1, 60))
    for _ in range(5):
        desk.step()
    desk.tell(*utterance(2, 10))
    batch = desk.step()
    assert isinstance(batch, Batch) and [row.stream_id for row in batch.rows] == [1, 2]


def test_what_a_frame_took_leaves_out_the_wait_for_text_for_the_listener_and_for_others() -> None:
    desk = Desk(step_s=0.01)
    desk.tell(prompt(1), Tokens(StreamId(1), (100, 101, 102)))
    desk.run()
    desk.clock.advance(5.0)
    desk.tell(Tokens(StreamId(1), (103, 104)))
    desk.run()
    desk.tell(Pace(StreamId(1), True, None, desk.clock()), Tokens(StreamId(1), (105, 106)))
    desk.run()
    desk.clock.advance(5.0)
    desk.tell(Pace(StreamId(1), False, None, desk.clock()))
    desk.run()
    intervals = [m.intervals_s[0] for m in desk.sent if isinstance(m, Frames)]
    assert len(intervals) > 5 and max(intervals) == pytest.approx(0.01)


def test_prefills_go_by_priority_and_then_by_age_and_follow_each_other_when_nobody_decodes() -> None:
    desk = Desk()
    desk.tell(*utterance(1, 5, num_rows=3), *utterance(2, 5, num_rows=3, priority=9))
    first, second = desk.step(), desk.step()
    assert isinstance(first, Batch) and isinstance(second, Batch)
    assert [first.rows[0].stream_id, first.phase] == [2, "prefill"]
    # Nobody hears the first one yet: the other one's prompt comes before its second frame.
    assert [second.rows[0].stream_id, second.phase] == [1, "prefill"]


@pytest.mark.parametrize(("heard_s", "first"), [(0.0, 2), (10.0, 1)])
def test_the_next_prompt_of_who_is_speaking_comes_first_only_when_its_listener_would_wait(
    heard_s: float, first: int
) -> None:
    desk = Desk()
    desk.tell(*sentence(1, 30, num_rows=3))
    desk.run()
    desk.clock.advance(heard_s)  # with nothing heard yet, its lead is all that it has made
    desk.tell(*sentence(2, 5, num_rows=3), *sentence(1, 5, segment=1, num_rows=3))
    batch = desk.step()
    assert isinstance(batch, Batch) and (batch.phase, batch.rows[0].stream_id) == ("prefill", first)


def test_a_row_with_bad_numbers_fails_alone() -> None:
    # FAULT-5
    desk = Desk(runner=FakeRunner(not_ok={2}))
    desk.tell(*utterance(1, 5), *utterance(2, 5), *utterance(3, 5))
    desk.run()
    assert [m.reason for m in desk.of(2, Drop) if isinstance(m, Drop)] == ["failed"]
    assert desk.of(1, Finish) and desk.of(3, Finish) and not desk.num_frames(2)


def test_the_lowest_free_row_goes_first_and_removing_twice_frees_once() -> None:
    desk = Desk()
    desk.tell(*sentence(1, 3), *sentence(2, 3), *sentence(3, 3))
    removed = desk.scheduler.remove(StreamId(1))
    assert removed is not None and removed.index == 0
    assert desk.scheduler.remove(StreamId(1)) is None
    assert desk.scheduler.num_free == 2
    desk.tell(*sentence(4, 3))
    assert desk.row(4).index == 0


def test_more_streams_than_rows_is_an_impossible_situation() -> None:
    desk = Desk(num_rows=1)
    desk.tell(*sentence(1, 3))
    with pytest.raises(AssertionError):
        desk.tell(*sentence(2, 3))


# ---- random walks


@pytest.mark.parametrize("seed", range(30))
def test_after_any_walk_every_row_is_free_and_every_stream_was_told_in_order(seed: int) -> None:
    # LEAK-1, CAN-3, STOP-1: normal ends, aborts, failures, limits, holds, late text, in any mixture
    rng = random.Random(seed)

    def any_pace(row: Row, segment: Segment) -> int:
        return rng.choice((0, 0, 1, 1, 2, 3))

    desk = Desk(num_rows=4, step_s=0.02, runner=FakeRunner(pace=any_pace, never_eos=rng.random() < 0.3))
    scripts: dict[int, list[EngineMessage]] = {}
    dropped: set[int] = set()
    next_id = 1
    for _ in range(400):
        action = rng.random()
        alive = [s for s in scripts if s in desk.scheduler.rows]
        if action < 0.15 and desk.scheduler.num_free and next_id < 40:
            scripts[next_id] = split_messages(rng, next_id)
            desk.tell(scripts[next_id].pop(0))
            next_id += 1
        elif action < 0.55:
            waiting = [s for s, left in scripts.items() if left]
            if waiting:
                stream = rng.choice(waiting)
                desk.tell(scripts[stream].pop(0))
        elif action < 0.58 and alive:
            stream = rng.choice(alive)
            desk.scheduler.remove(StreamId(stream))
            dropped.add(stream)
            scripts[stream].clear()
        elif action < 0.62 and alive:
            played = rng.choice((None, 0.1))
            desk.tell(Pace(StreamId(rng.choice(alive)), rng.random() < 0.5, played, desk.clock()))
        elif action < 0.63 and alive:
            desk.runner.not_ok.add(rng.choice(alive))
        else:
            answer = desk.step()
            desk.clock.advance(rng.choice((0, 0, 0.1)) + (answer if isinstance(answer, float) else 0))
    for stream, left in scripts.items():
        desk.tell(*left, Pace(StreamId(stream), False, None, desk.clock()))
    while not isinstance(answer := desk.step(), type(None)):
        if isinstance(answer, float):
            desk.clock.advance(answer + 1e-6)
    assert desk.scheduler.num_free == desk.num_rows and not desk.scheduler.rows
    for stream in scripts:
        if stream not in dropped:
            check_order(desk.sent, stream)


def split_messages(rng: random.Random, stream: int) -> list[EngineMessage]:
    """A random utterance, its tokens in random pieces."""
    messages: list[EngineMessage] = []
    options = {"max_lead_s": rng.choice((None, 0.5)), "max_frames": rng.choice((None, None, 9))}
    for segment in range(rng.randint(1, 4)):
        if rng.random() < 0.2:
            messages.append(prompt(stream, segment, silence_ms=rng.choice((80, 900)), **options))
            continue
        messages.append(prompt(stream, segment, num_rows=rng.choice((0, 0, 3)), **options))
        ids = [100 * segment + i for i in range(rng.choice((2, 3, 8, 20)))]
        while ids:
            cut = rng.randint(1, len(ids))
            messages.append(Tokens(StreamId(stream), tuple(ids[:cut])))
            ids = ids[cut:]
        if rng.random() < 0.7:
            messages.append(EndSegment(StreamId(stream)))
    return [*messages, EndText(StreamId(stream))]


@pytest.mark.parametrize("seed", range(10))
def test_what_a_stream_says_does_not_depend_on_its_neighbours(seed: int) -> None:
    # MIX-2, MIX-3, DET-1
    rng = random.Random(seed)
    texts = {
        s: [replace(m) for m in utterance(s, rng.randint(2, 9), rng.randint(2, 9), seed=s)] for s in range(6)
    }

    def spoken(streams: Sequence[int], stagger: int) -> dict[int, list[list[int]]]:
        desk = Desk(num_rows=6, runner=FakeRunner(pace=every_second))
        for stream in streams:
            desk.tell(*texts[stream])
            for _ in range(stagger):
                desk.step()
        desk.run()
        said: dict[int, list[list[int]]] = {stream: [] for stream in streams}
        for message in desk.sent:
            if isinstance(message, Frames):
                codec = message.codes[:, SPEC.codec_codebooks].tolist()
                for stream, codes in zip(message.stream_ids, codec, strict=True):
                    said[stream].append(codes)
        return said

    together = spoken(rng.sample(sorted(texts), 6), rng.randint(0, 4))
    for stream in texts:
        assert together[stream] == spoken([stream], 0)[stream]


def test_the_end_code_is_what_the_model_family_says() -> None:
    assert SPEC.text.eos == EOS


def test_a_frame_tells_how_many_tokens_it_really_finished() -> None:
    # The pace code says three, one token is left.
    scheduler = Scheduler(SPEC, 1)
    scheduler.add(prompt(1), 0.0)
    scheduler.feed(Tokens(StreamId(1), (7,)))
    scheduler.end_text(EndText(StreamId(1)))
    batch, _ = scheduler.next(0.0)
    assert batch is not None
    codes = np.array([[3, 0, 5, 6]])
    scheduler.commit(batch, StepOutput(codes, np.array([True]), np.array([False])), 0.0)
    (frames,) = [message for message in scheduler.outbox if isinstance(message, Frames)]
    assert frames.codes.tolist() == [[1, 0, 5, 6]]
    assert batch.rows[0].codes == (3, 0, 5, 6), "the model is fed the raw code"
