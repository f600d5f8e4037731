"""The engine with tiny models of the official families: what a stream says depends on nothing but itself."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tiny_models import GOLDEN, build_local, build_nano, build_realtime

from realtime import models
from realtime.engine.device_runner import DeviceRunner
from realtime.engine.engine import Engine
from realtime.engine.row import PREFILL_TILE
from realtime.engine.scheduler import Batch, StepOutput
from realtime.engine.text import Whole
from realtime.messages import (
    Drop,
    EndSegment,
    EndText,
    EngineMessage,
    Finish,
    Frames,
    Prompt,
    SamplingParams,
    StreamId,
    Tokens,
    VocoderMessage,
)
from realtime.models.base import Bundle, PushedText
from realtime.models.moss_realtime import RealtimeConfig, load_realtime_lm
from realtime.models.realtime_prompt import AUDIO_BOS, AUDIO_EOS, AUDIO_PAD

NUM_IDS = 400  # of text, well within every vocabulary here


@pytest.fixture(scope="module", params=[build_local, build_nano, build_realtime], ids=lambda b: b.__name__)
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bundle]:
    torch.set_num_threads(1)
    folder = request.param(tmp_path_factory.mktemp("model"), stop_chance=0.04)
    yield models.load(str(folder), device="cpu")


@dataclass
class Studio:
    bundle: Bundle
    num_rows: int = 4
    sent: list[VocoderMessage] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.runner = DeviceRunner(self.bundle, self.num_rows, torch.device("cpu"))
        self.engine = Engine(self.bundle.spec, self.runner, self.num_rows, self.sent.append, lambda: 0.0)

    def tell(self, *messages: EngineMessage) -> None:
        for message in messages:
            self.engine.handle(message)

    def run(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if self.engine.step() is None:
                return
        raise AssertionError("does not come to rest")

    def said(self) -> dict[int, list[list[int]]]:
        found: dict[int, list[list[int]]] = defaultdict(list)
        for message in self.sent:
            if isinstance(message, Frames):
                for stream, codes in zip(message.stream_ids, message.codes.tolist(), strict=True):
                    found[stream].append(codes)
        return found


def speech(
    bundle: Bundle, stream: int, *lengths: int, max_frames: int = 25, **sampling: float
) -> list[EngineMessage]:
    """Segments whose prompts have so many positions each, from random but fixed text."""
    rng = np.random.default_rng(stream)
    num_codebooks = bundle.spec.num_codebooks
    params = SamplingParams(seed=stream, max_frames=max_frames, **sampling)  # type: ignore[arg-type]
    messages: list[EngineMessage] = []
    for segment, length in enumerate(lengths):
        inputs = np.full((length, 1 + num_codebooks), 1024, np.int32)
        inputs[:, 0] = rng.integers(0, NUM_IDS, length)
        inputs[2:6, 1:] = rng.integers(0, 1024, (4, num_codebooks))[: max(length - 2, 0)]
        continued = inputs[length // 2 :].copy()
        messages.append(Prompt(StreamId(stream), segment, inputs, params, 0.0, continued=continued))
        if isinstance(bundle.spec.text, PushedText):
            messages.append(Tokens(StreamId(stream), tuple(rng.integers(0, NUM_IDS, 6).tolist())))
        messages.append(EndSegment(StreamId(stream)))
    return [*messages, EndText(StreamId(stream))]


def talkative(bundle: Bundle, count: int, length: int) -> list[int]:
    """Streams with prompts of that length that don't stop within their first frames."""
    long = (s for s in range(1, 60) if len(alone(bundle, s, speech(bundle, s, length, max_frames=8))) == 8)
    return list(itertools.islice(long, count))


def alone(bundle: Bundle, stream: int, messages: Sequence[EngineMessage]) -> list[list[int]]:
    studio = Studio(bundle)
    studio.tell(*messages)
    studio.run()
    return studio.said()[stream]


def test_it_speaks_frames_of_the_codec_and_stops_by_itself(bundle: Bundle) -> None:
    studio = Studio(bundle)
    for stream in range(4):
        studio.tell(*speech(bundle, stream, 30, max_frames=400))
    studio.run()
    assert studio.engine.scheduler.num_free == 4
    assert all(m.reason == "done" for m in studio.sent if isinstance(m, Finish))
    frames = [frame for codes in studio.said().values() for frame in codes]
    assert len(frames) > 20 and np.array(frames).shape[1] == bundle.spec.num_codebooks
    assert 0 <= np.min(frames) and np.max(frames) < bundle.spec.codebook_size
    assert len(np.unique(np.array(frames)[:, 0])) > 10, "sampled, not stuck"


def test_streams_that_join_and_leave_a_batch_say_what_they_say_alone(bundle: Bundle) -> None:
    # MIX-2, MIX-3, DET-1, also with a neighbour that has said so much that more positions are attended to
    rng = random.Random(7)
    texts = {
        1: speech(bundle, 1, 90, 20, 40, max_frames=70),
        2: speech(bundle, 2, 12, 33, max_frames=20),
        3: speech(bundle, 3, 200, max_frames=25, temperature=0.6),
        4: speech(bundle, 4, 7, 8, 9, max_frames=25, repetition_penalty=1.3, top_k=5),
        5: speech(bundle, 5, 31, 32, max_frames=25, top_p=0.5),
        6: speech(bundle, 6, 65, max_frames=10, temperature=0.0),
    }
    studio = Studio(bundle)
    waiting = list(texts)
    while waiting or studio.engine.scheduler.rows:
        if waiting and studio.engine.scheduler.num_free and rng.random() < 0.3:
            studio.tell(*texts[waiting.pop(0)])
        studio.engine.step()
    said = studio.said()
    for stream, messages in texts.items():
        assert said[stream] == alone(bundle, stream, messages), stream
    assert sum(len(frames) for frames in said.values()) > 60


def test_a_row_that_was_used_before_is_like_a_fresh_one(bundle: Bundle) -> None:
    studio = Studio(bundle, num_rows=1)
    studio.tell(*speech(bundle, 1, 150, max_frames=40))
    studio.run()
    studio.tell(*speech(bundle, 2, 20, 30))
    studio.run()
    assert studio.said()[2] == alone(bundle, 2, speech(bundle, 2, 20, 30))


def test_where_a_prompt_is_cut_changes_nothing(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    neighbour, stream = talkative(bundle, 2, 9)
    messages = speech(bundle, stream, 4 * PREFILL_TILE + 5)
    whole = alone(bundle, stream, messages)
    studio = Studio(bundle)
    cost = studio.engine.scheduler.cost
    for num_positions in (50, 200) * 20:  # slow enough to be read tile by tile beside the other stream
        cost.observe_prefill(num_positions, 0.003 * num_positions)
    monkeypatch.setattr(studio.engine.scheduler, "learn", lambda batch, took_s: None)
    studio.tell(*speech(bundle, neighbour, 9, max_frames=8))
    for _ in range(3):
        studio.engine.step()
    studio.tell(*messages)
    parts = []
    while studio.engine.scheduler.rows:
        batch = studio.engine.begin()
        assert batch is not None and not isinstance(batch, float)
        if batch.phase == "prefill":
            parts.append(batch.end - batch.start)
        studio.engine.complete(batch, studio.runner.run(batch))
    assert len(parts) > 1 and sum(parts) == 4 * PREFILL_TILE + 5
    assert studio.said()[stream] == whole


def test_pushed_text_says_the_same_however_it_comes(bundle: Bundle) -> None:
    if not isinstance(bundle.spec.text, PushedText):
        pytest.skip("its text comes whole")
    prompt, tokens, *rest = speech(bundle, 3, 20, max_frames=60)
    assert isinstance(tokens, Tokens)
    studio = Studio(bundle)
    studio.tell(prompt)
    studio.run()
    for id in tokens.ids:
        studio.tell(Tokens(tokens.stream_id, (id,)))
        studio.run()
    studio.tell(*rest)
    studio.run()
    assert studio.said()[3] == alone(bundle, 3, [prompt, tokens, *rest])


def test_a_row_with_bad_numbers_fails_alone_and_leaves_a_clean_row(bundle: Bundle) -> None:
    # FAULT-5
    bad, good, later = talkative(bundle, 3, 20)
    studio = Studio(bundle, num_rows=2)
    studio.tell(*speech(bundle, bad, 20), *speech(bundle, good, 20))
    while len(studio.said()) < 2:
        studio.engine.step()
    studio.runner._kv.layers[0][studio.engine.scheduler.rows[StreamId(bad)].index] = float("nan")
    studio.run()
    assert [m.stream_id for m in studio.sent if isinstance(m, Drop)] == [bad]
    studio.tell(*speech(bundle, later, 20))
    studio.run()
    for stream in (good, later):
        assert studio.said()[stream] == alone(bundle, stream, speech(bundle, stream, 20))


# ---- stored utterances of the official modules, greedy


def stored(family: str) -> dict[str, np.ndarray]:
    return load_file(GOLDEN / family / "cases.safetensors")


def greedy(stream: int, inputs: np.ndarray, max_frames: int | None = None, penalty: float = 1.0) -> Prompt:
    params = SamplingParams(temperature=0.0, repetition_penalty=penalty, max_frames=max_frames)
    return Prompt(StreamId(stream), 0, inputs.reshape(-1, inputs.shape[-1]).astype(np.int32), params, 0.0)


@pytest.mark.parametrize(
    ("family", "codec", "cases"),
    [
        (
            "local",
            "codec_v2",
            {
                "reference": ("prompt.reference.input_ids", 8, 1.0),
                "plain_stops": ("prompt.plain.input_ids", 8, 1.0),
                "continuation": ("prompt.continuation.input_ids", 6, 1.0),
                "penalty": ("prompt.reference.input_ids", 8, 1.8),
                "stop_at_once": ("prompt.all_fields.input_ids", 6, 1.0),
            },
        ),
        (
            "nano",
            "codec_nano",
            {
                "voice_clone": ("prompt.voice_clone.input_ids", 8, 1.0),
                "plain_stops": ("prompt.plain.input_ids", 8, 1.0),
                "continuation": ("prompt.continuation.input_ids", 6, 1.0),
                "penalty": ("prompt.voice_clone.input_ids", 8, 1.8),
                "stop_at_once": ("prompt.chinese.input_ids", 8, 1.0),
            },
        ),
    ],
)
def test_all_stored_utterances_come_out_of_one_batch(
    family: str, codec: str, cases: dict[str, tuple[str, int, float]]
) -> None:
    tensors = stored(family)
    small = models.load(str(GOLDEN / family), device="cpu", codec=str(GOLDEN / codec))
    studio = Studio(small, num_rows=len(cases))
    for stream, (prompt, max_frames, penalty) in enumerate(cases.values()):
        studio.tell(greedy(stream, tensors[prompt], max_frames, penalty), EndText(StreamId(stream)))
    studio.run()
    said = studio.said()
    for stream, name in enumerate(cases):
        if family == "nano":
            expected = tensors[f"greedy.{name}.codes"][0]
        else:  # the rows from the beginning of the assistant's audio on, text ids first
            num_before = {"continuation": 5}.get(name, 1)
            expected = tensors[f"greedy.{name}.rows.0"][num_before:, 1:]
        assert said[stream] == expected.tolist(), name


def test_a_stored_turn_of_pushed_text_comes_out_token_by_token(tmp_path: Path) -> None:
    folder, tensors = GOLDEN / "realtime", stored("realtime")
    config = RealtimeConfig.load(folder)
    backbone, local = load_realtime_lm(folder, config, torch.device("cpu"), torch.float32)
    tiny = models.load(str(build_realtime(tmp_path)), device="cpu")
    small = replace(tiny, spec=replace(tiny.spec, text=config.text), backbone=backbone, local=local)
    ids = tensors["assistant.ids"].tolist()
    first = np.full((12, 17), AUDIO_PAD, np.int32)
    first[:, 0], first[-1, 1] = ids[:12], AUDIO_BOS
    studio = Studio(small)
    studio.tell(greedy(1, np.concatenate([tensors["prompt.text_turn"].reshape(-1, 17), first])))
    for id in ids[12:]:
        studio.run()
        studio.tell(Tokens(StreamId(1), (id,)))
    studio.tell(EndText(StreamId(1)))
    studio.run()
    frames = tensors["greedy.frames"].tolist()
    assert frames[-1][0] == AUDIO_EOS
    assert studio.said()[1] == [frame for frame in frames[:-1] if max(frame) < AUDIO_PAD]
    assert [m.reason for m in studio.sent if isinstance(m, Finish)] == ["done"]


def test_a_prompt_s_beginning_that_is_there_already_changes_nothing_to_the_bit(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clauses of one voice, each with a prompt that begins like the one before, beside another stream."""
    if isinstance(bundle.spec.text, PushedText):
        pytest.skip("goes on where the turn before ended")
    head = speech(bundle, 3, 3 * PREFILL_TILE + 9)[0]
    assert isinstance(head, Prompt)
    clauses: list[EngineMessage] = []
    for message in speech(bundle, 5, 20, 33, 50, max_frames=200):
        if isinstance(message, Prompt):
            assert message.continued is not None
            inputs, continued = (
                np.concatenate([head.inputs, x]) for x in (message.inputs, message.continued)
            )
            message = replace(message, inputs=inputs, continued=continued)
        clauses.append(message)

    def run() -> tuple[list[list[int]], list[int], torch.Tensor]:
        studio, sizes = Studio(bundle), []
        usual = studio.runner.run

        def counted(batch: Batch) -> StepOutput:
            if batch.phase == "prefill" and batch.rows[0].stream_id == 5:
                sizes.append(batch.end - batch.start)
            return usual(batch)

        studio.runner.run = counted  # type: ignore[method-assign]
        studio.tell(*speech(bundle, 1, 40, max_frames=60), *clauses)
        studio.run()
        return studio.said()[5], sizes, torch.stack([memory[1] for memory in studio.runner._kv.layers])

    said, sizes, memory = run()
    monkeypatch.setattr(Whole, "num_kept", lambda self, row, segment: 0)
    expected, all_sizes, whole_memory = run()
    assert said == expected and len(said) > 3
    assert torch.equal(memory, whole_memory)
    assert sum(all_sizes) - sum(sizes) == 2 * 3 * PREFILL_TILE
