"""What a graph replays equals what the step itself does: kernels as they were recorded, in memory that
stays where it is, whatever the host knows meanwhile. Here operators stand in for a CUDA device's kernels."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from codec_models import set_gathers
from test_device_runner import Studio, speech
from tiny_models import build_codec_v2, build_local, build_nano, build_realtime
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from realtime import dummy, metrics, models, speed
from realtime.graphs import CudaRecorder, Graphs, Recording, bucket_of, buckets
from realtime.models.base import Bundle
from realtime.models.kv import RowKV
from realtime.models.tokenizer_codec import load_codec
from realtime.vocoder.policy import ChunkPolicy
from realtime.vocoder.runner import CodecRunner

CPU = torch.device("cpu")


class Tape(TorchDispatchMode):
    """Every operator of some work with the tensors and numbers it was called with. `replay` calls them
    again and puts what they make where it was: no Python of the work runs a second time."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        work()  # memory that is kept is allocated before, as with a graph
        with self:
            work()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        assert "_local_scalar_dense" not in str(func), "a graph can't wait for a number"
        assert "nonzero" not in str(func), "a graph's shapes can't depend on numbers"
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, tensors(out)))
        return out

    def replay(self) -> None:
        with torch.inference_mode():
            for func, args, kwargs, before in self.calls:
                for place, made in zip(before, tensors(func(*args, **kwargs)), strict=True):
                    if place.data_ptr() != made.data_ptr():
                        place.copy_(made)


def tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def misses() -> float:
    return metrics.GRAPH_MISSES._value.get()


@pytest.fixture(scope="module", params=[build_local, build_nano, build_realtime], ids=lambda b: b.__name__)
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bundle]:
    torch.set_num_threads(1)
    folder = request.param(tmp_path_factory.mktemp("model"), stop_chance=0.02)
    yield models.load(str(folder), device="cpu")


@pytest.fixture
def gathering(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention as on a device."""
    usual = RowKV.__init__

    def init(self: RowKV, *args: Any) -> None:
        usual(self, *args)
        self.gathers = True

    monkeypatch.setattr(RowKV, "__init__", init)


def run_all(
    bundle: Bundle, num_rows: int, graphs: Graphs | None
) -> tuple[dict[int, list[list[int]]], Studio]:
    """Five streams with prompts of different lengths that join and leave at random."""
    texts = {
        1: speech(bundle, 1, 90, 20, max_frames=30),
        2: speech(bundle, 2, 12, max_frames=20),
        3: speech(bundle, 3, 460, max_frames=60, temperature=0.6),  # beyond a short span, of Local and Nano
        4: speech(bundle, 4, 7, 9, max_frames=15, repetition_penalty=1.3, top_k=5),
        5: speech(bundle, 5, 31, max_frames=15, top_p=0.5, temperature=0.0),
    }
    studio = Studio(bundle, num_rows)
    if graphs is not None:
        studio.runner.record(graphs)
    rng, waiting = random.Random(3), list(texts)
    while waiting or studio.engine.scheduler.rows:
        if waiting and studio.engine.scheduler.num_free and rng.random() < 0.3:
            studio.tell(*texts[waiting.pop(0)])
        studio.engine.step()
    return studio.said(), studio


def test_decode_graphs_say_what_the_steps_themselves_say(bundle: Bundle, gathering: None) -> None:
    expected, _ = run_all(bundle, 3, None)
    before = misses()
    said, _ = run_all(bundle, 3, Graphs(Tape))
    assert said == expected
    assert sum(len(frames) for frames in said.values()) > 60
    assert misses() == before


def test_a_step_without_a_graph_is_done_by_itself_and_counted(bundle: Bundle, gathering: None) -> None:
    class Partial(Graphs):
        def add(self, shape: tuple[int, ...], work: Callable[[], None]) -> None:
            if shape[0] != 2:
                super().add(shape, work)

    expected, _ = run_all(bundle, 3, None)
    before = misses()
    said, _ = run_all(bundle, 3, Partial(Tape))
    assert said == expected
    assert misses() > before


def test_lanes_that_fill_up_a_width_leave_no_trace_in_any_row(bundle: Bundle, gathering: None) -> None:
    _, studio = run_all(bundle, 5, Graphs(Tape))
    kv = studio.runner._kv
    before = [memory[:5].clone() for memory in kv.layers]
    newest, factors = studio.runner._newest[:5].clone(), studio.runner._sampler._factors[:5].clone()
    studio.runner._upload((), 4)
    recording = studio.runner._graphs.find((4, studio.runner._spans[-1]))
    assert recording is not None
    recording.replay()
    assert all(torch.equal(a, b[:5]) for a, b in zip(before, kv.layers, strict=True))
    assert torch.equal(newest, studio.runner._newest[:5])
    assert torch.equal(factors, studio.runner._sampler._factors[:5])


def test_a_lone_row_may_have_a_runner_of_its_own(bundle: Bundle, gathering: None) -> None:
    expected, _ = run_all(bundle, 1, None)
    assert run_all(bundle, 1, Graphs(Tape))[0] == expected


# ---- codec


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = build_codec_v2(tmp_path_factory.mktemp("codec"), windows=0.08)
    return set_gathers(load_codec(folder, CPU, torch.float32, num_quantizers=12)).decoder


def codec_runner(decoder: Any, num_slots: int, spec: Any, graphs: Graphs | None) -> CodecRunner:
    runner = CodecRunner(spec, decoder, num_slots)
    if graphs is not None:
        runner.record(graphs, (1, 2, 4, 8))
    return runner


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return models.load(str(build_local(tmp_path_factory.mktemp("local"))), device="cpu").spec


def test_codec_graphs_sound_like_the_steps_themselves(decoder: Any, spec: Any) -> None:
    # MIX, with slots that are reset in between and sizes without a graph
    rng = np.random.default_rng(1)
    plain = codec_runner(decoder, 5, spec, None)
    graphed = codec_runner(decoder, 5, spec, Graphs(Tape))
    before = misses()
    for step in range(25):
        slots = sorted(rng.choice(5, rng.integers(1, 6), replace=False).tolist())
        size = int(rng.choice([1, 2, 4, 8, 5] if step % 5 == 4 else [1, 2, 4, 8]))
        if rng.random() < 0.2:
            for runner in (plain, graphed):
                runner.reset(slots[0], 0)
        frames = rng.integers(0, 1024, (len(slots), size, 12))
        pairs = zip(plain.run(frames, slots), graphed.run(frames, slots), strict=True)
        for expected, sound in pairs:
            assert sound.shape == (size * 3840, 2) and np.abs(sound).max() > 1e-3
            np.testing.assert_allclose(sound, expected, atol=1e-5)
    assert 0 < misses() - before <= 5, "sizes without a graph"


def test_sound_that_was_handed_out_does_not_change(decoder: Any, spec: Any) -> None:
    runner = codec_runner(decoder, 2, spec, Graphs(Tape))
    frames = np.random.default_rng(1).integers(0, 1024, (2, 4, 12))
    first = runner.launch(frames, [0, 1])
    kept = [sound.copy() for sound in runner.collect(first)]
    runner.run(frames[::-1].copy(), [0, 1])
    assert all(np.array_equal(a, b) for a, b in zip(kept, runner.collect(first), strict=True))


def test_both_stages_speak_by_graphs_on_their_threads(gathering: None) -> None:
    stages = speed.stages_of(dummy.build("tiny", CPU, torch.float32, 3), 3)
    for stage in stages.bundle.decoder.stack.transformers:
        stage.gathers = True
    stages.runner.record(Graphs(Tape))
    stages.codec.record(Graphs(Tape))
    stages = replace(stages, policy=ChunkPolicy(stages.bundle.spec.frame_s, buckets=stages.codec.widths))
    before = misses()
    with speed._running(stages) as say:
        assert len(say(3)) == 3 and len(say(1)) == 1
    assert misses() == before


# ---- shapes


@pytest.mark.parametrize(
    ("most", "expected"), [(1, (1,)), (2, (1, 2)), (5, (1, 2, 4, 5)), (16, (1, 2, 4, 8, 16))]
)
def test_widths_double_up_to_the_most(most: int, expected: tuple[int, ...]) -> None:
    assert buckets(most) == expected
    assert [bucket_of(width, expected) for width in (1, most)] == [1, most]
    assert bucket_of(most + 1, expected) == most + 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_graph_replays_with_new_numbers() -> None:
    device = torch.device("cuda")
    x, y = torch.zeros(4, device=device), torch.zeros(4, device=device)
    recording: Recording = CudaRecorder(device)(lambda: y.copy_(x + 1))  # type: ignore[arg-type,return-value]
    x.fill_(5)
    recording.replay()
    assert y.tolist() == [6.0] * 4
