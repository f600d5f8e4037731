"""Whole and pushed text in the scheduler, with a model that says a hash of all that its KV holds."""

from __future__ import annotations

import random
import zlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pytest
from desk import Desk, check_order
from fakes import CODEBOOK_SIZE, SPEC

from realtime.engine.row import Row
from realtime.engine.scheduler import Batch, StepOutput
from realtime.engine.text import policy_of
from realtime.messages import (
    Drop,
    EndSegment,
    EndText,
    EngineMessage,
    Finish,
    Frames,
    Note,
    Pace,
    Prime,
    Prompt,
    SamplingParams,
    StreamId,
    Tokens,
)
from realtime.models.base import PushedText, TextPolicy, WholeText

PAD, SLOT, NONE = 8, 9, 1024
PUSHED = PushedText(
    pad_id=PAD, eos=1026, max_segment_frames=40, max_positions=160, lookahead=3, max_invalid_frames=4
)
WHOLE = WholeText(slot_id=SLOT, max_segment_frames=40, max_positions=160)
KINDS = pytest.mark.parametrize("text", [PUSHED, WHOLE], ids=["pushed", "whole"])

Entry = tuple[int, ...]
MUTE = (CODEBOOK_SIZE, 0)  # a frame that the codec can't take


@dataclass
class Memory:
    """A model whose KV holds the step inputs themselves. `say` makes of everything up to a position the
    frame that follows, or None for a stop."""

    text: TextPolicy
    say: Callable[[Row, list[Entry]], Entry | None]
    kv: dict[int, list[Entry]] = field(default_factory=lambda: defaultdict(list))
    batches: list[tuple[list[int], str, int]] = field(default_factory=list)  # streams, phase, positions
    not_ok: set[int] = field(default_factory=set)

    def open_row(self, row: Row) -> None:
        """What the row's last stream left is still there."""

    def run(self, batch: Batch) -> StepOutput:
        ids = [row.stream_id for row in batch.rows]
        self.batches.append((list(ids), batch.phase, batch.end - batch.start))
        policy = policy_of(self.text, CODEBOOK_SIZE)
        for row in batch.rows:
            segment = row.segments[0]
            if batch.phase == "prefill":
                for i in range(batch.start, batch.end):
                    self._write(row, segment.start + i, tuple(segment.inputs[i].tolist()))
            else:
                self._write(row, row.position, (*policy.ids(segment), *row.codes))
        if batch.is_partial:
            return StepOutput.nothing(2)
        said = [self.say(row, self.kv[row.index]) for row in batch.rows]
        return StepOutput(
            np.array([frame or (0, 0) for frame in said], np.int64),
            np.array([stream not in self.not_ok for stream in ids]),
            np.array([frame is None for frame in said]),
        )

    def _write(self, row: Row, position: int, entry: Entry) -> None:
        memory = self.kv[row.index]
        assert position <= len(memory), ("a hole", position, len(memory))
        memory[position:] = [entry]


def counted(*lengths: int) -> Callable[[Row, list[Entry]], Entry | None]:
    """Segments of so many frames each, which are (segment, frame)."""

    def say(row: Row, memory: list[Entry]) -> Entry | None:
        frame = row.segments[0].num_frames
        return (row.num_parts, frame) if frame < lengths[row.num_parts] else None

    return say


def hashed(stop_share: float = 0.08, mute_share: float = 0.0) -> Callable[[Row, list[Entry]], Entry | None]:
    def say(row: Row, memory: list[Entry]) -> Entry | None:
        frame = row.segments[0].num_frames
        digest = zlib.crc32(repr((row.sampling.seed, row.num_parts, frame, memory)).encode())
        if digest % 997 < 997 * stop_share:
            return None
        codes = (digest // 997 % CODEBOOK_SIZE, digest // 65521 % CODEBOOK_SIZE)
        return MUTE if digest // 31 % 991 < 991 * mute_share else codes

    return say


def desk(text: TextPolicy, say: Callable[[Row, list[Entry]], Entry | None], **options: object) -> Desk:
    spec = replace(
        SPEC, text=text, num_codebooks=2, codec_codebooks=slice(0, 2), first_codes=(), tells_pace=False
    )
    return Desk(runner=Memory(text, say), spec=spec, **options)  # type: ignore[arg-type]


def rows(*ids: int) -> npt.NDArray[np.int32]:
    return np.array([(id, NONE, NONE) for id in ids], np.int32).reshape(-1, 3)


def opens(
    stream: int, segment: int = 0, *ids: int, more: tuple[int, ...] | None = None, **fields: object
) -> Prompt:
    continued = None if more is None else rows(*more)
    sampling = SamplingParams(seed=stream, max_frames=fields.pop("stream_frames", None))  # type: ignore[arg-type]
    return Prompt(
        StreamId(stream), segment, rows(*ids), sampling, 100.0, continued=continued, **fields  # type: ignore[arg-type]
    )  # fmt: skip


def said(desk: Desk, stream: int) -> list[list[int]]:
    return [
        message.codes[message.stream_ids.index(StreamId(stream))].tolist()
        for message in desk.sent
        if isinstance(message, Frames) and stream in message.stream_ids
    ]


def text_ids(desk: Desk, row: int = 0) -> list[int]:
    return [entry[0] for entry in desk.runner.kv[row]]


def tokens(stream: int, *ids: int) -> Tokens:
    return Tokens(StreamId(stream), ids)


END, END_SEGMENT = EndText(StreamId(1)), EndSegment(StreamId(1))


# ---- pushed text


def test_pushed_text_goes_a_token_a_step_behind_the_prompt_and_then_pads() -> None:
    at = desk(PUSHED, counted(6))
    at.tell(opens(1, 0, 50, 51, 101, 102, 103), tokens(1, 104, 105), END)
    at.run()
    assert text_ids(at) == [50, 51, 101, 102, 103, 104, 105, PAD, PAD, PAD, PAD]
    assert at.runner.kv[0][5:] == [(id, 0, i) for i, id in enumerate([104, 105, PAD, PAD, PAD, PAD])]
    assert said(at, 1) == [[0, i] for i in range(6)]
    assert at.notes(1, "segment_end") == [(0, 6, 6)] and at.of(1, Finish) == [Finish(StreamId(1), "done")]


def test_a_pushed_segment_starts_from_its_prompt_and_parks_while_its_next_token_is_not_known() -> None:
    # TEXTIN-9: no padding is shown before the end of the text
    at = desk(PUSHED, counted(30))
    at.tell(opens(1, 0, 101, 102, 103))
    assert at.run() == 1 and at.num_frames(1) == 1
    at.clock.advance(0.5)
    at.tell(tokens(1, 104, 105))
    assert at.run() == 2 and text_ids(at)[3:] == [104, 105]
    (starved,) = at.notes(1, "starved")
    assert starved[:2] == (0, 1) and 500 <= starved[2] < 550
    at.tell(END_SEGMENT)
    at.run()
    assert at.num_frames(1) == 30 and set(text_ids(at)[5:]) == {PAD}


def test_a_pushed_segment_that_stops_early_goes_on_with_the_rest_of_its_text() -> None:
    at = desk(PUSHED, counted(2, 3, 4, 1))
    at.tell(opens(1, 0, 50, 51, 101, 102, 103), tokens(1, 104, 105, 106, 107, 108))
    at.run()
    # Token 105 was shown with the stop, and is shown again.
    assert text_ids(at) == [50, 51, 105, 106, 107, 108] and said(at, 1)[2:] == [[1, 0], [1, 1]]
    at.tell(tokens(1, 109))
    at.run()
    assert at.notes(1, "segment_end") == [] and len(said(at, 1)) == 5
    at.tell(tokens(1, 110))
    assert at.run() == 1  # that of the stop; then there are too few tokens for a prompt
    at.tell(tokens(1, 111))
    at.run()
    at.tell(tokens(1, 112, 113), END_SEGMENT, opens(1, 1, 50, 51, 201, more=(60, 201)), END)
    at.run()
    assert at.notes(1, "segment_end") == [(0, 9, 9), (1, 10, 1)]
    assert text_ids(at)[:5] == [50, 51, 110, 111, 112] and text_ids(at)[-3:] == [60, 201, PAD]
    assert at.of(1, Finish) == [Finish(StreamId(1), "done")]


def test_all_text_is_shown_however_early_a_model_stops_and_it_comes_to_an_end() -> None:
    seen: list[int] = []

    def say(row: Row, memory: list[Entry]) -> Entry | None:
        seen.extend(entry[0] for entry in memory)
        return None if row.segments[0].num_frames else (1, 1)

    for closed in (False, True):
        at, ids = desk(PUSHED, say), range(104, 131)
        seen.clear()
        at.tell(opens(1, 0, 101, 102, 103))
        for id in ids:
            at.tell(tokens(1, id))
            if not closed:
                at.run()
        at.tell(END)
        at.run()
        assert set(range(101, 131)) <= set(seen)
        assert at.of(1, Finish) == [Finish(StreamId(1), "done")] and at.scheduler.num_free == 4
        ((segment, frame, value),) = at.notes(1, "segment_end")
        assert segment == 0 and frame == value == at.num_frames(1) >= 10
        check_order(at.sent, 1)


def test_a_segment_that_makes_nothing_for_the_codec_too_often_goes_on_with_its_rest() -> None:
    at = desk(PUSHED, lambda row, memory: MUTE if row.num_parts == 0 else counted(0, 20)(row, memory))
    ids = range(104, 120)
    at.tell(opens(1, 0, 50, 101, 102, 103), tokens(1, *ids), END)
    at.run()
    assert said(at, 1) == [[1, i] for i in range(20)] and at.notes(1, "segment_end") == [(0, 20, 20)]
    num_shown = PUSHED.max_invalid_frames - 1  # none with the first frame
    assert text_ids(at)[:4] == [50, *ids[num_shown : num_shown + 3]]


def test_frames_that_the_codec_can_not_take_are_fed_back_and_make_no_sound() -> None:
    frames: list[Entry | None] = [(1, 1), MUTE, MUTE, MUTE, (2, 2), MUTE, (3, 3), None]
    at = desk(PUSHED, lambda row, memory: frames[row.segments[0].num_frames])
    at.tell(opens(1, 0, 101), END)
    at.run()
    assert said(at, 1) == [[1, 1], [2, 2], [3, 3]]
    assert [entry[1:] for entry in at.runner.kv[0][1:]] == frames[:-1]
    assert at.notes(1, "segment_end") == [(0, 3, 3)] and at.of(1, Finish) == [Finish(StreamId(1), "done")]
    check_order(at.sent, 1)


def test_a_segment_ends_when_it_has_made_nothing_for_the_codec_too_often_in_a_row() -> None:
    at = desk(PUSHED, lambda row, memory: (5, 5) if row.num_parts or not row.segments[0].num_frames else MUTE)
    at.tell(opens(1, 0, 101), opens(1, 1, 201, max_frames=2), END)
    at.run()
    assert at.notes(1, "segment_end")[0] == (0, 1, 1) and said(at, 1) == [[5, 5]] * 3
    assert len(at.runner.batches) == 1 + PUSHED.max_invalid_frames + 3


def test_a_pushed_turn_goes_on_behind_what_the_turn_before_has_left() -> None:
    at = desk(PUSHED, counted(3, 2, 1))
    at.tell(opens(1, 0, 50, 101), tokens(1, 102), END_SEGMENT)
    at.run()
    at.tell(opens(1, 1, 50, 201, more=(60, 201)), tokens(1, 202), END_SEGMENT)
    at.run()
    at.tell(opens(1, 2, 50, 301, more=(60, 301)), END)
    at.run()
    first = [(50, NONE, NONE), (101, NONE, NONE), (102, 0, 0), (PAD, 0, 1), (PAD, 0, 2)]
    second = [(60, NONE, NONE), (201, NONE, NONE), (202, 1, 0), (PAD, 1, 1)]
    assert at.runner.kv[0] == [*first, *second, (60, NONE, NONE), (301, NONE, NONE), (PAD, 2, 0)]
    assert at.notes(1, "segment_end") == [(0, 3, 3), (1, 5, 2), (2, 6, 1)]


@pytest.mark.parametrize(("before", "reason"), [((0,), "nothing was left"), ((5, 5), "no room is left")])
def test_a_pushed_turn_starts_anew_where_it_can_not_go_on(before: tuple[int, ...], reason: str) -> None:
    text = replace(PUSHED, max_positions=60)
    at = desk(text, counted(*before, 2))
    for i in range(len(before)):
        at.tell(opens(1, i, *range(50, 58), more=tuple(range(60, 66))))
    at.tell(opens(1, len(before), 50, 301, more=tuple(range(60, 66))), END)
    at.run()
    assert at.runner.kv[0][:2] == [(50, NONE, NONE), (301, NONE, NONE)] and len(at.runner.kv[0]) == 4


# ---- whole text


def test_whole_text_is_in_the_prompt_and_every_step_shows_the_slot() -> None:
    at = desk(WHOLE, counted(3))
    at.tell(opens(1, 0, 50, 51), END)
    at.run()
    assert at.runner.kv[0][2:] == [(SLOT, 0, 0), (SLOT, 0, 1), (SLOT, 0, 2)]
    assert said(at, 1) == [[0, 0], [0, 1], [0, 2]] and at.notes(1, "segment_end") == [(0, 3, 3)]


def test_a_clause_goes_on_from_the_frames_of_the_one_before() -> None:
    at = desk(WHOLE, counted(3, 2, 4))
    for i in range(3):
        at.tell(opens(1, i, 50 + i, more=(60 + i, 70 + i)), END_SEGMENT)
    at.tell(END)
    at.run()
    third = [(62, NONE, NONE), (72, NONE, NONE), (SLOT, 1, 0), (SLOT, 1, 1)]
    assert at.runner.kv[0] == [*third, *[(SLOT, 2, i) for i in range(4)]]
    assert [size for _, phase, size in at.runner.batches if phase == "prefill"] == [1, 2 + 3, 2 + 2]


def test_a_clause_starts_anew_behind_one_that_left_no_frame() -> None:
    # STOP-3
    at = desk(WHOLE, counted(3, 0, 2))
    for i in range(3):
        at.tell(opens(1, i, 50 + i, more=(60 + i,)))
    at.tell(END)
    at.run()
    assert text_ids(at) == [52, SLOT, SLOT]
    assert at.notes(1, "segment_end") == [(0, 3, 3), (1, 3, 0), (2, 5, 2)]


@pytest.mark.parametrize(
    ("num_rows", "num_same", "num_kept"),
    [(97, 31, 0), (97, 32, 32), (97, 70, 64), (97, 96, 96), (97, 97, 96), (96, 96, 64), (119, 119, 96)],
)
def test_what_two_clauses_begin_with_is_read_once(num_rows: int, num_same: int, num_kept: int) -> None:
    """The last row is always read: the frame is made of it."""
    first, second = list(range(200, 319)), list(range(200, 200 + num_rows))
    second[num_same:] = range(500, 500 + num_rows - num_same)
    at = desk(WHOLE, hashed(0.05))
    at.tell(opens(1, 0, *first), opens(1, 1, *second), END)
    at.run()
    assert [size for _, phase, size in at.runner.batches if phase == "prefill"] == [119, num_rows - num_kept]
    assert text_ids(at)[:num_rows] == second
    alone = desk(WHOLE, hashed(0.05))
    alone.scheduler.policy.num_kept = lambda row, segment: 0  # type: ignore[method-assign]
    alone.tell(opens(1, 0, *first), opens(1, 1, *second), END)
    alone.run()
    assert said(at, 1) == said(alone, 1)


def test_what_clauses_begin_with_is_read_once_also_behind_a_continuation_and_a_pause() -> None:
    head = list(range(200, 270))
    at = desk(WHOLE, counted(3, 4, 2, 2))
    at.tell(opens(1, 0, *head, 50))
    at.tell(opens(1, 1, *head, 51, more=(*head, 50, 51)), opens(1, 2, silence_ms=300))
    at.tell(opens(1, 3, *head, 52, more=(*head, 51, 52)), END)
    at.tell(opens(2, 0, *head, 50), EndText(StreamId(2)))
    at.run()
    prefills = [(*streams, size) for streams, phase, size in at.runner.batches if phase == "prefill"]
    assert [size for stream, size in prefills if stream == 1] == [71, 72 - 64 + 3, 72 - 64 + 4]
    assert [size for stream, size in prefills if stream == 2] == [71]


def test_a_clause_that_would_not_fit_with_the_one_before_starts_anew() -> None:
    at = desk(replace(WHOLE, max_positions=48), counted(7, 6, 5))
    for i in range(3):
        at.tell(opens(1, i, 50 + i, more=(60 + i, 70 + i)))
    at.tell(END)
    at.run()
    # Two rows, the frames before and 40 frames at most: 49 positions do not fit, 48 do.
    assert [size for _, phase, size in at.runner.batches if phase == "prefill"] == [1, 1, 2 + 6]


def test_a_pause_between_two_clauses_changes_nothing_of_how_they_join() -> None:
    at = desk(WHOLE, counted(3, 2))
    at.tell(opens(1, 0, 50), opens(1, 1, silence_ms=300), opens(1, 2, 52, more=(62,)), END)
    at.run()
    assert at.runner.kv[0][:4] == [(62, NONE, NONE), (SLOT, 0, 0), (SLOT, 0, 1), (SLOT, 0, 2)]
    assert at.notes(1, "silence") == [(1, 3, 300)]


def test_the_reference_that_a_stream_continues_is_told_once_and_before_everything_else() -> None:
    at = desk(WHOLE, counted(2, 3))
    reference = np.ones((5, 2), np.int16)
    at.tell(opens(1, 0, 50, prime=reference), opens(1, 1, 51, prime=reference), END)
    at.run()
    (prime,) = at.of(1, Prime)
    assert isinstance(prime, Prime) and at.sent[0] is prime
    assert prime.codes is reference and prime.started.seed == 1
    check_order(at.sent, 1)


# ---- limits


@KINDS
def test_a_model_that_never_stops_ends_its_stream_at_the_cap(text: TextPolicy) -> None:
    # STOP-1
    at = desk(text, lambda row, memory: (1, 2))
    at.tell(opens(1, 0, 50), opens(1, 1, 51), END)
    at.run()
    assert at.num_frames(1) == text.max_segment_frames
    assert at.of(1, Finish) == [Finish(StreamId(1), "limit")] and at.scheduler.num_free == 4


@KINDS
def test_a_model_that_stops_right_at_the_cap_has_ended_by_itself(text: TextPolicy) -> None:
    at = desk(text, counted(text.max_segment_frames))
    at.tell(opens(1, 0, 50), END)
    at.run()
    assert at.num_frames(1) == text.max_segment_frames and at.of(1, Finish) == [Finish(StreamId(1), "done")]


@KINDS
def test_a_prompt_may_have_a_cap_of_its_own_and_a_long_one_leaves_less_room(text: TextPolicy) -> None:
    # STOP-2
    at = desk(text, lambda row, memory: (1, 2))
    at.tell(opens(1, 0, 50, max_frames=7), END, opens(2, 0, *range(150)), EndText(StreamId(2)))
    at.run()
    assert (at.num_frames(1), at.num_frames(2)) == (7, 10)
    assert len(at.runner.kv[1]) == text.max_positions


@KINDS
def test_a_prompt_that_does_not_fit_fails_its_stream_alone_and_says_by_how_much(text: TextPolicy) -> None:
    at = desk(text, counted(3))
    at.tell(opens(1, 0, *range(163)), opens(2, 0, 50), END, EndText(StreamId(2)))
    at.run()
    (drop,) = at.of(1, Drop)
    assert isinstance(drop, Drop) and drop.error is not None and "4 positions too long" in drop.error.message
    assert at.of(2, Finish) and at.scheduler.num_free == 4


@KINDS
def test_a_stream_may_have_a_limit_of_its_own(text: TextPolicy) -> None:
    # STOP-5
    at = desk(text, counted(4, 9))
    at.tell(opens(1, 0, 50, stream_frames=6), opens(1, 1, 51), END)
    at.run()
    assert at.num_frames(1) == 6 and at.of(1, Finish) == [Finish(StreamId(1), "limit")]


# ---- batches


@KINDS
def test_a_continuation_is_read_in_parts_between_the_steps_of_a_stream_in_need(text: TextPolicy) -> None:
    at = desk(text, lambda row, memory: None if row.stream_id == 1 and len(memory) == 3 else (1, 1))
    for num_positions in (50, 200) * 20:
        at.scheduler.cost.observe_prefill(num_positions, 0.003 * num_positions)
    at.tell(opens(1, 0, 50), opens(2, 0, 50, stream_frames=30), EndText(StreamId(2)))
    at.tell(opens(1, 1, 51, more=tuple(range(100))), END)
    at.run()
    parts = [size for streams, phase, size in at.runner.batches if streams == [1] and phase == "prefill"]
    whole = 100 + (2 if text is WHOLE else 0)
    assert parts[0] == 1 and sum(parts[1:]) == whole and len(parts) > 3
    assert all(size % 32 == 0 for size in parts[1:-1]), "parts end where tiles do"


@KINDS
@pytest.mark.parametrize("seed", range(25))
def test_after_any_walk_all_rows_are_free_and_who_got_to_its_end_said_what_it_says_alone(
    text: TextPolicy, seed: int
) -> None:
    # LEAK-1, CAN-3, MIX-2, DET-1: any arrival of text, aborts, holds, stops at any step, mute frames, caps
    rng = random.Random(seed)
    say = hashed(rng.choice((0.0, 0.05, 0.3)), rng.choice((0.0, 0.1, 0.6)) if text is PUSHED else 0.0)
    at = desk(text, say, step_s=0.02)
    texts: dict[int, list[EngineMessage]] = {}
    left: dict[int, list[EngineMessage]] = {}
    dropped: set[int] = set()
    for _ in range(600):
        action = rng.random()
        alive = [s for s in texts if s in at.scheduler.rows]
        if action < 0.12 and at.scheduler.num_free and len(texts) < 30:
            stream = len(texts) + 1
            texts[stream] = some_text(rng, stream, text)
            left[stream] = list(texts[stream])
            at.tell(left[stream].pop(0))
        elif action < 0.5:
            waiting = [s for s in left if left[s]]
            if waiting:
                at.tell(left[rng.choice(waiting)].pop(0))
        elif action < 0.53 and alive:
            stream = rng.choice(alive)
            at.scheduler.remove(StreamId(stream))
            dropped.add(stream)
            left[stream].clear()
        elif action < 0.57 and alive:
            at.tell(Pace(StreamId(rng.choice(alive)), rng.random() < 0.5, None, at.clock()))
        elif action < 0.58 and alive:
            at.runner.not_ok.add(rng.choice(alive))
        else:
            at.step()
    for stream in texts:
        at.tell(*left[stream], Pace(StreamId(stream), False, None, at.clock()))
    at.run()
    assert at.scheduler.num_free == at.num_rows and not at.scheduler.rows
    for stream in set(texts) - dropped:
        check_order(at.sent, stream)
        if at.of(stream, Finish):
            alone = desk(text, say)
            alone.tell(*texts[stream])
            alone.run()
            assert said(at, stream) == said(alone, stream)
            assert ends(at, stream) == ends(alone, stream)
        else:
            assert stream in at.runner.not_ok


def ends(at: Desk, stream: int) -> list[object]:
    """What else it was told, but for how long it waited."""
    notes = [m for m in at.of(stream, Note) if isinstance(m, Note) and m.kind != "starved"]
    return [*notes, *at.of(stream, Finish)]


def some_text(rng: random.Random, stream: int, text: TextPolicy) -> list[EngineMessage]:
    """A few segments, whose text comes in pieces where the model takes it so."""
    messages: list[EngineMessage] = []
    id = StreamId(stream)
    limit = rng.choice((None, None, 9))
    for segment in range(rng.randint(1, 4)):
        ids = [rng.randint(10, 99) for _ in range(rng.choice((1, 3, 20, 70)))]
        more = rng.choice((None, tuple(ids[:3])))
        cap = rng.choice((None, 5))
        messages.append(opens(stream, segment, *ids, more=more, max_frames=cap, stream_frames=limit))
        for _ in range(rng.randint(0, 6) if text is PUSHED else 0):
            messages.append(tokens(stream, *(rng.randint(10, 99) for _ in range(rng.randint(1, 4)))))
        if rng.random() < 0.5 or text is WHOLE:
            messages.append(EndSegment(id))
    return [*messages, EndText(id)]
