"""The language models of the official families against stored values of the official modules, and the
promises that batching and reuse of rows rest on."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from realtime import models
from realtime.engine.device_sampler import DeviceSampler
from realtime.errors import ModelError
from realtime.messages import Prompt, SamplingParams, SpeechRequest, StreamId, VoiceCodes
from realtime.models.backbone import RowBackbone
from realtime.models.base import PushedText, SamplingDefaults, WholeText
from realtime.models.frames import RealtimeFrames, TiedFrames
from realtime.models.kv import FrameMemory, Prefill
from realtime.models.moss_local import LocalConfig, load_local_lm
from realtime.models.moss_nano import NanoConfig, load_nano_lm
from realtime.models.moss_realtime import NUM_ENTRIES, RealtimeConfig, load_realtime_lm
from realtime.models.official import load_codec_for
from realtime.models.qwen3 import Qwen3Config
from realtime.models.realtime_prompt import AUDIO_BOS, AUDIO_EOS, AUDIO_PAD
from realtime.models.stack import GPT2Config, Stack, gpt2_stack, halves, qwen3_stack
from realtime.models.weights import Tensors

GOLDEN = Path(__file__).parent / "golden"
CPU = torch.device("cpu")
FAMILIES = ("local", "nano", "realtime")
TOLERANCE = 2e-5  # of the golden data's notes, for hidden states and logits
HEADS_TOLERANCE = 5e-5  # the same of Realtime's logits
MAX_POSITIONS = 320


def greedy(penalty: float) -> SamplingParams:
    return SamplingParams(temperature=0.0, repetition_penalty=penalty)


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@cache
def cases(family: str) -> dict[str, Tensor]:
    return load_file(GOLDEN / family / "cases.safetensors")


@dataclass
class Model:
    """A family's language model, and how its rows are made."""

    family: str
    backbone: RowBackbone
    local: TiedFrames | RealtimeFrames
    config: Any
    num_codebooks: int
    codebook_size: int  # entries of a head

    @property
    def slot(self) -> int:
        return int(self.config.text_pad if self.family == "realtime" else self.config.ids.assistant_slot)


def load(family: str, folder: Path | None = None, dtype: torch.dtype = torch.float32) -> Model:
    folder = GOLDEN / family if folder is None else folder
    if family == "local":
        local = LocalConfig.load(folder)
        parts: Any = load_local_lm(folder, local, CPU, dtype)
        return Model(family, *parts, local, local.num_codebooks, local.codebook_size)
    if family == "nano":
        nano = NanoConfig.load(folder)
        parts = load_nano_lm(folder, nano, CPU, dtype)
        return Model(family, *parts, nano, nano.num_codebooks, nano.codebook_size)
    realtime = RealtimeConfig.load(folder)
    parts = load_realtime_lm(folder, realtime, CPU, dtype)
    return Model(family, *parts, realtime, realtime.num_codebooks, NUM_ENTRIES)


@cache
def golden(family: str) -> Model:
    return load(family)


@cache
def load_reduced() -> Model:
    """Nano that generates two of its codebooks."""
    model = load("nano")
    full, config = model.local, model.config
    assert isinstance(full, TiedFrames) and full._slot is not None
    text = model.backbone._text
    decision = text[[config.ids.assistant_slot, config.ids.audio_end]]
    stack, tables = full._positions._stack, full._tables[:2]
    model.local = TiedFrames(stack, tables, decision, model.num_codebooks, config.pad_code, full._slot)
    return model


class Likeliest:
    """A sampler without settings or memory."""

    def prepare(self, rows: Sequence[int], segments: Sequence[int], frames: Sequence[int]) -> None: ...

    def start_segment(self, row: int) -> None: ...

    def decide(self, logits: Tensor) -> Tensor:
        return logits[:, 1] > logits[:, 0]

    def pick(self, codebook: int, logits: Tensor) -> Tensor:
        return logits.argmax(-1)

    def commit(self, codes: Tensor, keep: Tensor) -> None: ...


@dataclass
class Recorder:
    """A sampler, with a memory of what it was asked."""

    sampler: DeviceSampler | Likeliest
    decisions: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)

    def decide(self, logits: Tensor) -> Tensor:
        self.decisions.append(logits.clone())
        return self.sampler.decide(logits)

    def pick(self, codebook: int, logits: Tensor) -> Tensor:
        self.logits.append(logits.clone())
        return self.sampler.pick(codebook, logits)


@dataclass
class Made:
    """What came of one row: frames, and of every step hidden state and logits."""

    codes: list[Tensor] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    decisions: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)  # [K, V] of each frame
    stopped: bool = False

    @property
    def frames(self) -> Tensor:
        return torch.stack(self.codes) if self.codes else torch.zeros(0, 0, dtype=torch.int64)


@dataclass
class Speech:
    """A row to be spoken: its prompt, where it starts, and the text ids of its steps (then the slot's or
    pad's)."""

    row: int
    prompt: Tensor
    ids: Sequence[int] = ()
    start: int = 0


class Engine:
    """The loop around a model, as plain as it can be: rows that stopped take no further part."""

    def __init__(
        self,
        model: Model,
        num_rows: int = 4,
        params: SamplingParams | None = None,
        window: int = 50,
    ) -> None:
        """`params` None: the likeliest codes."""
        self.model = model
        self.kv = model.backbone.new_kv(num_rows, MAX_POSITIONS)
        self.sampler: DeviceSampler | Likeliest = Likeliest()
        if params is not None:
            self.sampler = self._sampler(num_rows, params, window)

    def _sampler(self, num_rows: int, params: SamplingParams, window: int) -> DeviceSampler:
        model = self.model
        rule = "realtime" if model.family == "realtime" else "local"
        defaults = SamplingDefaults((1.0,) * model.num_codebooks, 50, 1.0, 1.0, window, rule)
        vocab_size = model.codebook_size + 1  # the pad of a reduced depth is committed too
        sampler = DeviceSampler(defaults, rule, num_rows, vocab_size=vocab_size)
        for row in range(num_rows):
            sampler.set_row(row, params)
        return sampler

    def speak(self, *speeches: Speech, max_frames: int, part: int = 10**9, width: int = 2) -> list[Made]:
        """`width`: lanes of a step that has fewer rows."""
        made = [Made() for _ in speeches]
        hidden = [self._prefill(speech, part) for speech in speeches]
        for speech, one, state in zip(speeches, made, hidden, strict=True):
            self.sampler.start_segment(speech.row)
            self._frame([speech], [one], state.expand(2, -1))
        for k in range(max_frames - 1):
            live = [i for i, one in enumerate(made) if not one.stopped]
            if not live:
                break
            lanes = [live[j % len(live)] for j in range(max(width, len(live)))]
            rows, inputs, positions = [], [], []
            for i in lanes:
                speech, one = speeches[i], made[i]
                text = speech.ids[k] if k < len(speech.ids) else self.model.slot
                rows.append(speech.row)
                inputs.append(torch.cat((torch.tensor([text]), one.codes[-1])))
                positions.append(speech.start + speech.prompt.shape[0] + k)
            states = self.model.backbone.decode(
                torch.stack(inputs), self.kv, torch.tensor(rows), torch.tensor(positions)
            )
            self._frame([speeches[i] for i in lanes], [made[i] for i in lanes], states)
        return made

    def _prefill(self, speech: Speech, part: int) -> Tensor:
        start = speech.start
        for piece in speech.prompt.split(part):
            hidden = self.model.backbone.prefill(piece, self.kv, speech.row, start)
            start += piece.shape[0]
        return hidden

    def _frame(self, speeches: list[Speech], made: list[Made], hidden: Tensor) -> None:
        rows = [speech.row for speech in speeches]
        rows = rows * (hidden.shape[0] // len(rows))
        num_frames = [len(one.codes) for one in made]
        self.sampler.prepare(rows, [0] * len(rows), num_frames * (len(rows) // len(made)))
        asked = Recorder(self.sampler)
        out = self.model.local.frame(hidden, asked)
        assert bool(out.ok.all())
        self.sampler.commit(out.codes, ~out.stop)
        for i, one in enumerate(made):
            if any(one is other for other in made[:i]):
                continue  # a lane that fills up the width
            one.hidden.append(hidden[i])
            one.logits.append(torch.stack([logits[i] for logits in asked.logits]))
            if asked.decisions:
                one.decisions.append(asked.decisions[0][i])
            one.stopped = bool(out.stop[i])
            if not one.stopped or self.model.family == "realtime":
                one.codes.append(out.codes[i])


def close(found: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


# ---- prefill


@dataclass
class Spied:
    """A layer that tells what comes in."""

    layer: Any
    inputs: list[Tensor]

    def project(self, x: Tensor, rope: Any) -> Any:
        self.inputs.append(x.clone())
        return self.layer.project(x, rope)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        found: Tensor = self.layer.finish(x, attended)
        return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prefill_is_that_of_the_official_modules_layer_by_layer(family: str) -> None:
    case, model = cases(family), load(family)
    inputs = case["prefill.input_ids"][0]
    seen: list[Tensor] = []
    stack = model.backbone.stack
    stack._layers = [Spied(layer, seen) for layer in stack._layers]  # type: ignore[misc]
    kv = model.backbone.new_kv(3, MAX_POSITIONS)

    embedded = model.backbone.embed(inputs)
    part = Prefill(kv, 1, 0, inputs.shape[0])
    hidden = stack.norm(stack.run(embedded, part.at, part))

    assert torch.equal(model.backbone.embed(inputs), case["prefill.inputs_embeds"][0])
    close(hidden, case["prefill.last_hidden_state"][0])
    for i, x in enumerate(seen):
        close(x, case[f"prefill.layer_input.{i}"][0])
        # Stored as [T, kv_heads, d] in two families, as [kv_heads, T, d] in the third.
        keys, values = (case[f"prefill.{name}.{i}"][0] for name in ("key", "value"))
        if family != "realtime":
            keys, values = keys.transpose(0, 1), values.transpose(0, 1)
        if family == "nano":
            keys = keys[..., halves(keys.shape[-1])]
        stored = kv.layers[i][1, :, : inputs.shape[0]]
        close(stored[: keys.shape[0]], keys)
        close(stored[keys.shape[0] :], values)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prefill_in_parts_is_one_prefill(family: str) -> None:
    case, model = cases(family), golden(family)
    inputs = case["prefill.input_ids"][0]
    whole, parts, steps = (model.backbone.new_kv(2, MAX_POSITIONS) for _ in range(3))
    expected = model.backbone.prefill(inputs, whole, 0, 0)
    close(expected, case["prefill.last_hidden_state"][0, -1:])

    start = 0
    for piece in inputs.split([5, 32, 1, inputs.shape[0] - 38]):
        found = model.backbone.prefill(piece, parts, 1, start)
        start += piece.shape[0]
    close(found, expected, 2e-6)

    model.backbone.prefill(inputs[:-3], steps, 1, 0)
    for position in range(inputs.shape[0] - 3, inputs.shape[0]):
        twice = inputs[position].expand(2, -1)
        places = torch.tensor([position, position])
        found = model.backbone.decode(twice, steps, torch.tensor([1, 1]), places)
    close(found[:1], expected, 2e-6)
    assert torch.equal(found[0], found[1])


def test_a_pad_code_adds_nothing_in_local_and_nano_and_its_row_in_realtime() -> None:
    for family in ("local", "nano"):
        model = golden(family)
        pad = model.config.pad_code
        row = torch.tensor([[model.slot, *[pad] * model.num_codebooks]])
        text = model.backbone._text[model.slot]
        assert torch.equal(model.backbone.embed(row)[0], text)
    model = golden("realtime")
    row = torch.tensor([[model.slot, AUDIO_BOS, *[AUDIO_PAD] * (model.num_codebooks - 1)]])
    assert not torch.equal(model.backbone.embed(row)[0], model.backbone._text[model.slot])


# ---- greedy speech

WHOLE_CASES = [
    ("local", "reference", "reference", 8, 1.0),
    ("local", "plain_stops", "plain", 8, 1.0),
    ("local", "continuation", "continuation", 6, 1.0),
    ("local", "penalty", "reference", 8, 1.8),
    ("local", "budget_one", "plain", 1, 1.0),
    ("local", "stop_at_once", "all_fields", 6, 1.0),
    ("nano", "voice_clone", "voice_clone", 8, 1.0),
    ("nano", "plain_stops", "plain", 8, 1.0),
    ("nano", "stop_at_once", "chinese", 8, 1.0),
    ("nano", "continuation", "continuation", 6, 1.0),
    ("nano", "penalty", "voice_clone", 8, 1.8),
    ("nano", "nq2", "voice_clone_nq2", 6, 1.0),
]


@pytest.mark.parametrize(("family", "name", "prompt", "max_frames", "penalty"), WHOLE_CASES)
def test_whole_text_speech_is_that_of_the_official_modules(
    family: str, name: str, prompt: str, max_frames: int, penalty: float
) -> None:
    case = cases(family)
    model = load_reduced() if name == "nq2" else golden(family)
    engine = Engine(model, params=None if penalty == 1 else greedy(penalty))
    speech = Speech(2, case[f"prompt.{prompt}.input_ids"][0])

    (made,) = engine.speak(speech, max_frames=max_frames)

    frames = expected_frames(family, name, 0)
    assert made.codes == [] if not len(frames) else torch.equal(made.frames, frames)
    assert made.stopped == (len(case[f"greedy.{name}.hidden"]) > len(frames))
    compare_steps(made, family, name, 0)


@pytest.mark.parametrize("family", ["local", "nano"])
def test_rows_of_a_batch_speak_as_in_the_official_one(family: str) -> None:
    case = cases(family)
    inputs, mask = case["greedy.batch.input_ids"], case["greedy.batch.attention_mask"]
    speeches = [Speech(row, inputs[i][mask[i]]) for i, row in enumerate((3, 1))]
    made = Engine(golden(family)).speak(*speeches, max_frames=8)
    for i, one in enumerate(made):
        frames = expected_frames(family, "batch", i)[: len(one.codes)]
        assert torch.equal(one.frames, frames)
        compare_steps(one, family, "batch", i)
    assert (made[0].stopped, len(made[0].codes)) == (True, 3)
    assert (made[1].stopped, len(made[1].codes)) == (False, 8)


def expected_frames(family: str, name: str, i: int) -> Tensor:
    if family == "nano":
        return cases(family)[f"greedy.{name}.codes"][i]
    rows = cases(family)[f"greedy.{name}.rows.{i}"]  # the last audio start, a prefix, then the frames
    groups = json.loads((GOLDEN / family / "cases.json").read_text(encoding="utf-8"))["groups"]
    return rows[1 + groups[f"greedy.{name}"]["start_lengths"][i] :, 1:]


def compare_steps(made: Made, family: str, name: str, i: int) -> None:
    case = cases(family)
    decisions = case[f"greedy.{name}.{'stop_logits' if family == 'local' else 'text_logits'}"][:, i]
    steps = len(made.hidden)
    close(torch.stack(made.hidden), case[f"greedy.{name}.hidden"][:steps, i])
    close(torch.stack(made.decisions), decisions[:steps])
    close(first_positions(made, family, name), case[f"greedy.{name}.local_hidden0"][:steps, i])
    num_frames = len(made.codes)
    expected = case[f"greedy.{name}.audio_logits"][:num_frames, :, i]
    if num_frames == 0:
        assert len(expected) == 0
    else:
        close(torch.stack(made.logits[:num_frames]), expected)


def first_positions(made: Made, family: str, name: str) -> Tensor:
    """What the local transformer makes of the hidden states alone, [steps, H]."""
    positions = (load_reduced() if name == "nq2" else golden(family)).local._positions
    hidden = torch.stack(made.hidden)
    positions.start(hidden)
    return positions.step(hidden)


def test_a_batch_is_prefilled_as_in_the_official_one_but_without_its_padding() -> None:
    case, model = cases("local"), golden("local")
    mask, expected = case["greedy.batch.attention_mask"], case["greedy.batch.prefill_hidden"]
    stack = model.backbone.stack
    for i, row in enumerate((3, 1)):
        inputs = case["greedy.batch.input_ids"][i][mask[i]]
        part = Prefill(model.backbone.new_kv(4, MAX_POSITIONS), row, 0, len(inputs))
        close(stack.norm(stack.run(model.backbone.embed(inputs), part.at, part)), expected[i][mask[i]])
        assert not expected[i][~mask[i]].any()


def realtime_speech(row: int, prompt: str, ids: Tensor, prefill: int = 12, **more: Any) -> Speech:
    """The prompt's rows, then the first text ids, with the begin of speech on the last."""
    head = cases("realtime")[f"prompt.{prompt}"]
    text = torch.full((min(prefill, len(ids)), head.shape[1]), AUDIO_PAD)
    text[:, 0] = ids[:prefill]
    text[-1, 1] = AUDIO_BOS
    return Speech(row, torch.cat((head, text)), ids[prefill:].tolist(), **more)


def test_a_turn_of_realtime_is_that_of_the_official_modules() -> None:
    case = cases("realtime")
    speech = realtime_speech(1, "text_turn", case["assistant.ids"])
    assert torch.equal(speech.prompt, case["prefill.input_ids"][0])
    (made,) = Engine(golden("realtime")).speak(speech, max_frames=40)
    assert torch.equal(made.frames, case["greedy.frames"])
    assert made.stopped and int(made.frames[-1, 0]) == AUDIO_EOS
    close(torch.stack(made.hidden), case["greedy.hidden"])
    logits = torch.stack(made.logits)
    close(logits[:6], case["greedy.logits"], HEADS_TOLERANCE)
    close(logits[:, 0], case["greedy.logits_head0"], HEADS_TOLERANCE)
    close(first_positions(made, "realtime", "greedy"), case["greedy.local_hidden0"])


@pytest.mark.parametrize(
    ("name", "penalty", "window"), [("greedy_penalty", 1.5, 50), ("greedy_penalty_window2", 3.0, 2)]
)
def test_penalties_of_realtime_are_the_official_ones(name: str, penalty: float, window: int) -> None:
    case = cases("realtime")
    engine = Engine(golden("realtime"), params=greedy(penalty), window=window)
    (made,) = engine.speak(realtime_speech(0, "text_turn", case["assistant.ids"]), max_frames=20)
    assert torch.equal(made.frames, case[f"{name}.frames"])
    if name == "greedy_penalty":
        heads = torch.stack(made.logits)[:, 0]
        close(heads, case["greedy_penalty.logits_head0"], HEADS_TOLERANCE)


def test_rows_of_realtime_speak_in_a_batch_as_in_the_official_one() -> None:
    case = cases("realtime")
    speeches = [
        realtime_speech(2, "text_turn", case["assistant.ids"]),
        realtime_speech(0, "no_user_turn", case["batch.ids1"]),
    ]
    made = Engine(golden("realtime")).speak(*speeches, max_frames=6)
    mask = case["batch.attention_mask"]  # of the official batch, which has its padding on the left
    assert mask.sum(1).tolist() == [len(speech.prompt) for speech in speeches]
    assert torch.equal(mask, mask.sort(1).values)
    for i, one in enumerate(made):
        assert torch.equal(one.frames, case["batch.frames"][i])
        close(torch.stack(one.hidden), case["batch.hidden"][:, i])


def test_short_and_long_prefills_of_realtime_are_the_official_ones() -> None:
    case, model = cases("realtime"), golden("realtime")
    short = realtime_speech(0, "text_turn", case["short_text.ids"])
    (made,) = Engine(model).speak(short, max_frames=6)
    assert torch.equal(made.frames, case["short_text.frames"])
    ids = case["assistant.ids"]
    long = realtime_speech(0, "text_turn", ids, prefill=len(ids))
    (made,) = Engine(model).speak(long, max_frames=3)
    assert torch.equal(made.frames, case["long_prefill.frames"])


# ---- the local transformer alone


@pytest.mark.parametrize("family", FAMILIES)
def test_a_frame_step_by_step_is_a_frame_in_one_pass(family: str) -> None:
    case, model = cases(family), golden(family)
    positions = model.local._positions
    if family == "realtime":
        codes = case["local_forward.codes"]
        embedded = [table[codes[k]] for k, table in enumerate(model.local._tables)]  # type: ignore[union-attr]
        inputs = torch.stack([case["local_forward.hidden"][0], *embedded]).expand(2, -1, -1)
    else:
        inputs = case["local_forward.inputs"]
    positions.start(inputs[:, 0])
    found = [positions.step(inputs[:, i]) for i in range(inputs.shape[1])]
    if family == "realtime":
        heads = model.local._heads
        logits = torch.stack([head(x)[0] for head, x in zip(heads, found, strict=True)])
        close(logits, case["local_forward.logits"], HEADS_TOLERANCE)
    else:
        close(torch.stack(found, 1), case["local_forward.outputs"])


def test_nano_at_reduced_depth_leaves_the_pad_code() -> None:
    case, model = cases("nano"), load_reduced()
    prompt = case["prompt.voice_clone_nq2.input_ids"][0]
    (made,) = Engine(model).speak(Speech(0, prompt), max_frames=4)
    assert made.frames[:, 2:].eq(model.config.pad_code).all()
    assert made.frames[:, :2].lt(model.codebook_size).all()


# ---- batching and reuse


def prompts_of(model: Model, num: int, seed: int = 0) -> list[Tensor]:
    """Rows of random text with a few rows of codes, of very different lengths."""
    random = torch.Generator().manual_seed(seed)
    pad = AUDIO_PAD if model.family == "realtime" else model.config.pad_code
    prompts = []
    for i in range(num):
        rows = torch.full((8 + 23 * i, 1 + model.num_codebooks), pad)
        rows[:, 0] = torch.randint(10, 500, (len(rows),), generator=random)
        entries = min(model.codebook_size, 1024)
        rows[2:5, 1:] = torch.randint(0, entries, (3, model.num_codebooks), generator=random)
        prompts.append(rows)
    return prompts


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model that never stops, made once."""
    folder = tmp_path_factory.mktemp("tiny")
    build = {
        "local": tiny_models.build_local,
        "nano": tiny_models.build_nano,
        "realtime": tiny_models.build_realtime,
    }
    return cache(lambda family: build[family](folder / family, stop_chance=0.0))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", ["golden", "tiny"])
def test_batched_equals_alone_to_the_bit(family: str, size: str, tiny: Callable[[str], Path]) -> None:
    """Also with sampled codes, at any width, in any rows, beside rows of other lengths."""
    model = golden(family) if size == "golden" else load(family, tiny(family))
    params = SamplingParams(temperature=1.3, top_p=0.95, seed=5, repetition_penalty=1.2)
    prompts = prompts_of(model, 4)
    alone = []
    for prompt in prompts:
        engine = Engine(model, 6, params)
        alone += engine.speak(Speech(3, prompt), max_frames=3)
    for rows, width in (((0, 1, 2, 3), 4), ((5, 2, 4, 0), 7)):
        speeches = [Speech(row, prompt) for row, prompt in zip(rows, prompts, strict=True)]
        together = Engine(model, 6, params).speak(*speeches, max_frames=3, width=width)
        for one, other in zip(together, alone, strict=True):
            assert torch.equal(one.frames, other.frames)
            assert torch.equal(torch.stack(one.hidden), torch.stack(other.hidden))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_far_from_the_others_reads_only_its_own(family: str) -> None:
    """Two rows at both ends of the pool are gathered instead of read in place."""
    model = golden(family)
    first, second = prompts_of(model, 2, seed=3)
    near = Engine(model, 12).speak(Speech(0, first), Speech(1, second), max_frames=5)
    far = Engine(model, 12).speak(Speech(11, first), Speech(0, second), max_frames=5)
    for one, other in zip(near, far, strict=True):
        assert torch.equal(torch.stack(one.hidden), torch.stack(other.hidden))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_reused_row_is_a_fresh_one(family: str) -> None:
    model = golden(family)
    short, *_, long = prompts_of(model, 5, seed=1)
    fresh = Engine(model).speak(Speech(1, short), max_frames=5)[0]
    engine = Engine(model)
    engine.speak(Speech(1, long), Speech(0, long), max_frames=9)
    again = engine.speak(Speech(1, short), max_frames=5)[0]
    assert torch.equal(torch.stack(fresh.hidden), torch.stack(again.hidden))

    engine.kv.layers[0][1, 0, 300] = math.nan  # beyond every mask, yet it would be heard
    engine.kv.clear(1)
    again = engine.speak(Speech(1, short), max_frames=5)[0]
    assert torch.equal(torch.stack(fresh.hidden), torch.stack(again.hidden))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_wider_span_and_padding_lanes_change_nothing(family: str) -> None:
    model = golden(family)
    num_rows = 2
    kv = model.backbone.new_kv(num_rows, MAX_POSITIONS)
    (prompt, other) = prompts_of(model, 2, seed=2)
    for row, rows in enumerate((prompt, other)):
        model.backbone.prefill(rows, kv, row, 0)
    inputs = torch.stack((prompt[3], other[3], prompt[0], prompt[0]))
    places = torch.tensor([len(prompt), len(other), 0, 0])
    rows = torch.tensor([0, 1, num_rows, num_rows])
    expected = model.backbone.decode(inputs[:2], kv, rows[:2], places[:2])
    for span in (None, 64, MAX_POSITIONS):
        found = model.backbone.decode(inputs, kv, rows, places, span)
        assert torch.equal(found[:2], expected)


def test_a_row_whose_numbers_are_not_finite_says_so_and_the_others_go_on() -> None:
    for family in FAMILIES:
        model = golden(family)
        hidden = torch.randn(3, model.backbone._text.shape[1])
        sampler = Engine(model).sampler
        sampler.prepare([0, 1, 2], [0] * 3, [0] * 3)
        expected = model.local.frame(hidden, sampler)
        hidden[1, 0] = math.nan
        out = model.local.frame(hidden, sampler)
        assert out.ok.tolist() == [True, False, True]
        assert torch.equal(out.codes[[0, 2]], expected.codes[[0, 2]])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_float_types_run_and_stay_close(family: str, dtype: torch.dtype) -> None:
    model = load(family, dtype=dtype)
    case = cases(family)
    inputs = case["prefill.input_ids"][0]
    kv = model.backbone.new_kv(2, MAX_POSITIONS)
    hidden = model.backbone.prefill(inputs, kv, 0, 0)
    assert hidden.dtype == dtype
    close(hidden.float(), case["prefill.last_hidden_state"][0, -1:], 0.1)
    speech = Speech(1, inputs)
    (made,) = Engine(model).speak(speech, max_frames=3)
    assert torch.isfinite(torch.stack(made.logits)).all()


# ---- layers that no golden checkpoint has


def reference_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[T, heads, d] each, causal."""
    t, heads, dim = q.shape
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(dim)
    scores = scores.masked_fill(torch.ones(t, t).triu(1).bool(), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(t, -1)


def written(folder: Path, tensors: dict[str, Tensor]) -> Tensors:
    path = folder / "model.safetensors"
    save_file(tensors, path)
    return Tensors(path)


def run_both_ways(stack: Stack, x: Tensor) -> tuple[Tensor, Tensor]:
    """A sequence [T, H] in one pass over a row's memory, and step by step over a frame's."""
    kv = stack_kv(stack, x)
    part = Prefill(kv, 0, 0, len(x))
    memory = FrameMemory(stack, 2, len(x), x)
    steps = []
    for i in range(len(x)):
        steps.append(stack.run(x[i].repeat(2, 1), slice(i, i + 1), memory)[0])
        memory.position += 1
    return stack.norm(stack.run(x.clone(), part.at, part)), stack.norm(torch.stack(steps))


def stack_kv(stack: Stack, like: Tensor) -> Any:
    return RowBackbone(stack, like, [like]).new_kv(1, 64)


def test_qwen3_layers_may_have_biases(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "intermediate_size": 20,
    }
    w = tiny_models.Weights(1)
    w.qwen3("layers", sizes)
    w.norm("norm", 12)
    for name, size in (("q", 24), ("k", 12), ("v", 12), ("o", 12)):
        w.normal(f"layers.0.self_attn.{name}_proj.bias", size)
    config = Qwen3Config(12, 1, 4, 2, 6, 20, 100.0, 1e-6, attention_bias=True)
    tensors = written(tmp_path, w.tensors)
    stack = qwen3_stack(tensors, config, 16, "layers", "norm")
    tensors.finish()
    x = torch.randn(9, 12, generator=torch.Generator().manual_seed(1))
    t = {name.removeprefix("layers.0."): value for name, value in w.tensors.items()}

    def rms(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), t[f"{name}.weight"], 1e-6)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, t[f"{name}.weight"], t.get(f"{name}.bias"))

    def turned(x: Tensor) -> Tensor:
        angles = torch.arange(9.0)[:, None, None] * 100.0 ** (-torch.arange(0, 6, 2) / 6)
        first, second = x.chunk(2, -1)
        real, imaginary = first * angles.cos() - second * angles.sin(), second * angles.cos()
        return torch.cat((real, imaginary + first * angles.sin()), -1)

    y = rms(x, "input_layernorm")
    q, k, v = (linear(y, f"self_attn.{name}_proj").view(9, -1, 6) for name in "qkv")
    q, k = turned(rms(q, "self_attn.q_norm")), turned(rms(k, "self_attn.k_norm"))
    expected = x + linear(reference_attention(q, k, v), "self_attn.o_proj")
    y = rms(expected, "post_attention_layernorm")
    gated = F.silu(linear(y, "mlp.gate_proj")) * linear(y, "mlp.up_proj")
    expected = rms(expected + linear(gated, "mlp.down_proj"), "norm")
    for found in run_both_ways(stack, x):
        close(found, expected, 1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu_new"])
def test_gpt2_layers_may_have_learned_positions(tmp_path: Path, activation: Any) -> None:
    w = tiny_models.Weights(2)
    w.gpt2("at", 12, 20, 1)
    w.normal("at.wpe.weight", 16, 12)
    config = GPT2Config(12, 1, 3, 20, activation, 1e-5, None, 16)
    tensors = written(tmp_path, w.tensors)
    stack = gpt2_stack(tensors, config, 9, "at")
    tensors.finish()
    x = torch.randn(9, 12, generator=torch.Generator().manual_seed(2))
    t = {name.removeprefix("at.h.0."): value for name, value in w.tensors.items()}

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (12,), t[f"{name}.weight"], t[f"{name}.bias"], 1e-5)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, t[f"{name}.weight"], t[f"{name}.bias"])

    expected = x + t["at.wpe.weight"][:9]
    q, k, v = linear(norm(expected, "ln_1"), "attn.c_attn").view(9, 3, 3, 4).unbind(1)
    expected = expected + linear(reference_attention(q, k, v), "attn.c_proj")
    inner = linear(norm(expected, "ln_2"), "mlp.fc_in")
    acts: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": F.silu,
        "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    }
    expected = norm(expected + linear(acts[activation](inner), "mlp.fc_out"), "at.ln_f")
    for found in run_both_ways(stack, x):
        close(found, expected, 1e-5)


# ---- files


def copied(family: str, folder: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / family, folder / family))


def changed(folder: Path, **values: Any) -> None:
    """Sets keys of config.json; None takes one out."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | values
    kept = {key: value for key, value in config.items() if value is not None}
    path.write_text(json.dumps(kept), encoding="utf-8")


def test_tied_heads_may_be_stored_or_not(tmp_path: Path) -> None:
    folder = copied("local", tmp_path)
    (folder / "model-with-tied.safetensors").replace(folder / "model.safetensors")
    prompt = cases("local")["prompt.reference.input_ids"][0]
    (with_tied,) = Engine(load("local", folder)).speak(Speech(0, prompt), max_frames=3)
    (without,) = Engine(golden("local")).speak(Speech(0, prompt), max_frames=3)
    assert torch.equal(torch.stack(with_tied.logits), torch.stack(without.logits))


def test_nano_comes_as_pickle_and_as_safetensors(tmp_path: Path) -> None:
    folder = copied("nano", tmp_path)
    (folder / "model.safetensors").unlink()
    prompt = cases("nano")["prompt.voice_clone.input_ids"][0]
    (pickled,) = Engine(load("nano", folder)).speak(Speech(0, prompt), max_frames=3)
    (safe,) = Engine(golden("nano")).speak(Speech(0, prompt), max_frames=3)
    assert torch.equal(torch.stack(pickled.logits), torch.stack(safe.logits))


def test_the_text_head_of_local_may_decide(tmp_path: Path) -> None:
    folder = copied("local", tmp_path)
    changed(folder, local_text_head_mode="full-vocab")
    tensors = load_file(folder / "model.safetensors")
    ids = golden("local").config.ids
    head = tensors.pop("local_text_lm_head.weight")
    tensors["transformer.embed_tokens.weight"][[ids.assistant_slot, ids.audio_end]] = head
    save_file(tensors, folder / "model.safetensors")
    model = load("local", folder)
    hidden = torch.randn(2, head.shape[1])
    asked = [Recorder(Engine(one).sampler) for one in (model, golden("local"))]
    for one, recorder in zip((model, golden("local")), asked, strict=True):
        recorder.sampler.prepare([0, 1], [0, 0], [0, 0])
        one.local.frame(hidden, recorder)
    assert torch.equal(asked[0].decisions[0], asked[1].decisions[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_that_do_not_fit_are_named(family: str, tmp_path: Path) -> None:
    folder = copied(family, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    norm = next(name for name in tensors if "local_transformer" in name and "norm" in name or "ln_f" in name)
    tensors.pop(norm)
    tensors["unheard.of"] = torch.zeros(1)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=rf"1 missing: {norm} .*1 not known: unheard\.of"):
        load(family, folder)


BROKEN: list[tuple[str, dict[str, Any], str]] = [
    ("local", {"n_vq": None}, "missing key 'n_vq'"),
    ("local", {"n_vq": 3}, "4 audio_codebook_sizes for 3 codebooks"),
    ("local", {"audio_codebook_sizes": [16, 16, 16, 8]}, "must be equal"),
    ("local", {"audio_pad_code": 3}, "pad code 3 is one of 16 codes"),
    ("local", {"audio_end_token_id": 544}, "audio_end_token_id 544 is not in a vocabulary of 544"),
    ("local", {"local_text_head_mode": "ternary"}, "'ternary' is not known"),
    ("local", {"gpt2_config": {"n_embd": 40, "n_head": 4, "n_inner": 8}}, "40 is not hidden_size 32"),
    ("local", {"gpt2_config": {"n_embd": 32, "n_head": 5}}, "32 is not 5 heads"),
    ("local", {"n_vq": 0}, "config.json: 'n_vq' must be 1 to"),
    ("local", {"n_vq": 10**9, "audio_codebook_sizes": None}, "config.json: 'n_vq' must be 1 to"),
    ("local", {"audio_codebook_sizes": [[16]] * 4}, r"'audio_codebook_sizes\[0\]' must be an integer"),
    ("local", {"audio_codebook_sizes": [0] * 4}, r"'audio_codebook_sizes\[0\]' must be 1 to"),
    ("local", {"audio_pad_code": 1000000}, "config.json: the pad code 1000000 is far beyond 16 codes"),
    ("local", {"sampling_rate": -1}, "'sampling_rate' must be 1 to"),
    ("local", {"local_transformer_layers": 0}, "'local_transformer_layers' must be 1 to"),
    ("nano", {"local_transformer_layers": 10**6}, "missing: local_transformer.h.1.ln_1.weight .24., "),
    (
        "nano",
        {"audio_vocab_size": 10**6, "audio_codebook_sizes": None, "audio_pad_token_id": 10**6},
        r"audio_embeddings.0.weight is \[16, 24\], expected \[1000000, 24\]",
    ),
    ("nano", {"gpt2_config": None}, "missing key 'gpt2_config'"),
    ("nano", {"audio_assistant_slot_token_id": "nine"}, "must be an integer"),
    ("realtime", {"audio_vocab_size": 2000}, "audio_vocab_size 2000 is not served, 1027 is"),
    ("realtime", {"text_pad": 600}, "text_pad 600 is not in a vocabulary of 544"),
    ("realtime", {"language_config": {}}, "missing key"),
]


@pytest.mark.parametrize(("family", "values", "message"), BROKEN)
def test_a_config_that_can_not_be_served_is_named(
    family: str, values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = copied(family, tmp_path)
    changed(folder, **values)
    with pytest.raises(ModelError, match=message):
        load(family, folder)


NESTED: list[tuple[str, str, str, Any, str]] = [
    ("local", "qwen3_config", "num_key_value_heads", 0, "must be 1 to"),
    ("local", "qwen3_config", "num_key_value_heads", 2, "3 heads can't share 2 key heads"),
    ("local", "qwen3_config", "num_hidden_layers", -2, "must be 1 to"),
    ("local", "qwen3_config", "head_dim", 15, "must be even"),
    ("local", "qwen3_config", "rms_norm_eps", 0, "must be above 0"),
    ("local", "qwen3_config", "rope_theta", float("inf"), "must be above 0"),
    ("local", "qwen3_config", "max_position_embeddings", 0, "must be at least 256, got 0"),
    ("local", "qwen3_config", "max_position_embeddings", 100, "must be at least 256, got 100"),
    ("local", "qwen3_config", "hidden_size", 10**7, "must be 1 to"),
    ("local", "gpt2_config", "scale_attn_weights", False, "False is not served, True is"),
    ("nano", "gpt2_config", "scale_attn_by_inverse_layer_idx", True, "True is not served, False is"),
    ("nano", "gpt2_config", "n_head", 0, "must be 1 to"),
    ("nano", "gpt2_config", "n_inner", 0, "must be 1 to"),
    ("nano", "gpt2_config", "n_positions", 0, "must be 1 to|must be at least 256, got 0"),
    ("nano", "gpt2_config", "vocab_size", 0, "must be 1 to"),
    ("realtime", "language_config", "num_key_value_heads", 0, "must be 1 to"),
    ("realtime", "language_config", "max_position_embeddings", 3, "must be at least 256, got 3"),
    ("realtime", "local_config", "num_attention_heads", 0, "must be 1 to"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "part", "key", "value", "message"), NESTED)
def test_a_size_that_can_not_be_served_is_named(
    family: str, part: str, key: str, value: Any, message: str, tmp_path: Path
) -> None:
    """Through the loader that a server uses, before it looks for a codec."""
    folder = copied(family, tmp_path)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    changed(folder, **{part: config[part] | {key: value}})
    with pytest.raises(ModelError, match=rf"config\.json: {part}: .*{key}.*{message}|{part}: {message}"):
        models.load(str(folder), device="cpu", codec=str(GOLDEN / "codec_v2"))


@pytest.mark.parametrize("family", ["local", "nano"])
def test_heads_may_be_others_than_the_tables(family: str, tmp_path: Path) -> None:
    folder = copied(family, tmp_path)
    if family == "local":
        (folder / "model-with-tied.safetensors").replace(folder / "model.safetensors")
    tensors = load_file(folder / "model.safetensors")
    model, ids = golden(family), golden(family).config.ids
    for k in range(model.num_codebooks):
        tensors[f"audio_lm_heads.{k}.weight"] *= -1
    tensors["text_lm_head.weight"][[ids.assistant_slot, ids.audio_end]] *= -1
    save_file(tensors, folder / "model.safetensors")
    hidden = torch.randn(2, model.backbone._text.shape[1], generator=torch.Generator().manual_seed(4))

    def asked(local: Any) -> Recorder:
        recorder = Recorder(Likeliest())
        local.frame(hidden, recorder)
        return recorder

    tied, usual = asked(load(family, folder).local), asked(model.local)
    assert torch.equal(torch.stack(tied.logits), torch.stack(usual.logits))
    changed(folder, tie_word_embeddings=False)
    untied = asked(load(family, folder).local)
    assert torch.equal(untied.logits[0], -usual.logits[0])
    sign = 1 if family == "local" else -1  # whose decision is a head of its own
    assert torch.equal(untied.decisions[0], sign * usual.decisions[0])
    if family == "local":
        changed(folder, local_text_head_mode="full")
        tensors.pop("local_text_lm_head.weight")
        save_file(tensors, folder / "model.safetensors")
        (text_head,) = asked(load(family, folder).local).decisions
        changed(folder, tie_word_embeddings=True)
        assert torch.equal(text_head, -asked(load(family, folder).local).decisions[0])
        changed(folder, tie_word_embeddings=False)
    heads = [name for name in tensors if "lm_head" in name and "local" not in name]
    save_file({name: t for name, t in tensors.items() if name not in heads}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=f"{model.num_codebooks + 1} missing: audio_lm_heads.0.weight"):
        load(family, folder)


def test_a_model_type_that_is_none_is_named(tmp_path: Path) -> None:
    folder = copied("local", tmp_path)
    for value in ([], {}, 3):
        changed(folder, model_type=value)
        with pytest.raises(ModelError, match="none of the models served here"):
            models.load(str(folder), device="cpu")


SPECS = {  # codebooks, rate, channels, hop, temperature, top-k, top-p, penalty, entries of a head
    "local": (12, 48000, 2, 3840, 1.7, 25, 0.8, 1.0, 1024),
    "nano": (16, 48000, 2, 3840, 0.8, 25, 0.95, 1.2, 1024),
    "realtime": (16, 24000, 1, 1920, 0.8, 30, 0.6, 1.1, 1027),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_becomes_a_bundle(family: str, tiny: Callable[[str], Path]) -> None:
    bundle = models.load(str(tiny(family)), device="cpu")
    spec = bundle.spec
    found = (spec.num_codebooks, spec.sample_rate, spec.channels, spec.hop, spec.sampling.temperature[0])
    s = spec.sampling
    entries = max(spec.codebook_size, spec.audio_vocab_size)
    assert (*found, s.top_k, s.top_p, s.repetition_penalty, entries) == SPECS[family]
    assert (spec.frame_rate, spec.tells_pace) == (12.5, False)
    assert s.rule == ("realtime" if family == "realtime" else "local")
    assert isinstance(spec.text, PushedText if family == "realtime" else WholeText)
    assert spec.text.max_segment_frames < spec.text.max_positions
    assert bundle.encoder is not None and (bundle.prepare is not None) == (family == "local")
    voice = VoiceCodes("someone", np.zeros((5, spec.num_codebooks), np.int16))
    feed = bundle.feed(StreamId(1), SpeechRequest(), voice)
    prompt = next(message for message in [*feed.text("Hello there."), *feed.end()])
    assert isinstance(prompt, Prompt) and prompt.inputs.shape[1] == 1 + spec.num_codebooks


def test_a_codec_of_another_model_is_named_with_both_numbers(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    local, nano, realtime = (tiny(family) for family in FAMILIES)
    slower = Path(shutil.copytree(local, tmp_path / "local"))
    changed(slower, sampling_rate=44100)
    pairs = [
        (slower, slower / "codec", "44100 Hz, its codec .* has 48000"),
        (local, realtime / "codec", "48000 Hz, its codec .* has 24000"),
        (realtime, GOLDEN / "codec_v1", "1024 entries in a codebook, its codec .* has 16"),
    ]
    for folder, codec, message in pairs:
        with pytest.raises(ModelError, match=message):
            models.load(str(folder), device="cpu", codec=str(codec))
    wide = Path(shutil.copytree(local, tmp_path / "wide"))
    changed(wide, n_vq=17, audio_codebook_sizes=[1024] * 17)
    with pytest.raises(ModelError, match="17 codebooks.* has 16"):
        load_codec_for(wide, nano / "codec", CPU, torch.float32, num_codebooks=17, codebook_size=1024)


def test_scaled_positions_are_refused(tmp_path: Path) -> None:
    folder = copied("local", tmp_path)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["qwen3_config"]["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0}
    path.write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ModelError, match="scaled positions"):
        load("local", folder)


def test_rope_theta_is_found_wherever_it_stands(tmp_path: Path) -> None:
    folder = copied("local", tmp_path)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    language = config["qwen3_config"]
    theta = language.pop("rope_theta")
    for key in ("rope_parameters", "rope_scaling"):
        config["qwen3_config"] = language | {key: {"rope_type": "default", "rope_theta": theta / 2}}
        path.write_text(json.dumps(config), encoding="utf-8")
        assert LocalConfig.load(folder).language.rope_theta == theta / 2
    config["qwen3_config"] = language | {"rope_scaling": None}
    path.write_text(json.dumps(config), encoding="utf-8")
    assert LocalConfig.load(folder).language.rope_theta == 1e6


def test_without_a_config_of_its_own_the_local_transformer_has_the_official_defaults(tmp_path: Path) -> None:
    folder = copied("local", tmp_path)
    changed(folder, gpt2_config=None, local_transformer_layers=None)
    config = LocalConfig.load(folder).local
    assert config == GPT2Config(32, 1, 1, 128, "silu", 1e-6, None, 5)
