"""The official families through the WebSocket, from tiny checkpoints in their own file formats."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from realtime import models
from realtime.engine.scheduler import Batch, Scheduler, StepOutput
from realtime.messages import Frames
from realtime.models.base import Bundle
from realtime.server.wire import FLAG_LAST
from tests.server_fakes import Client, Served, client, run, served
from tests.tiny_models import build_local, build_nano, build_realtime

TEXT = "Hello there, my friend. It costs 3.14 euros at Dr. Who's. Good bye!"

SEEDS = (10, 4, 5)  # for which none of the models here says more than a few seconds

Builder = Callable[..., Path]


@pytest.fixture(scope="module", params=[build_local, build_nano, build_realtime], ids=lambda b: b.__name__)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = request.param(tmp_path_factory.mktemp("model"), stop_chance=0.1)
    return models.load(str(folder), device="cpu")


@asynccontextmanager
async def speaking(model: Bundle, max_streams: int = 4) -> AsyncIterator[Served]:
    """A server that admits everybody: on a busy machine even these models may be slower than sound."""
    async with served(model, max_streams=max_streams) as server:
        server.runtime.admission.limit = lambda *args: max_streams  # type: ignore[method-assign]
        yield server


def native(model: Bundle) -> dict[str, object]:
    return {"sample_rate": model.spec.sample_rate, "channels": model.spec.channels}


def heard(model: Bundle, speaker: Client, ctx: str = "0") -> npt.NDArray[np.int32]:
    """Samples [n, channels] of 16 bit."""
    pcm = np.frombuffer(speaker.pcm(ctx), "<i2").astype(np.int32)
    return pcm.reshape(-1, model.spec.channels)


def assert_same(one: npt.NDArray[np.int32], other: npt.NDArray[np.int32]) -> None:
    """But for rounding: a codec call's products round by how many frames it has."""
    assert one.shape == other.shape
    assert np.abs(one - other).max(initial=0) <= 2


async def say(
    server: Served, model: Bundle, pieces: Sequence[str], ctx: str = "0", seed: int = SEEDS[0]
) -> npt.NDArray[np.int32]:
    """What one context alone on its connection sounds like; its text comes in pieces."""
    async with client(server) as speaker:
        for piece in pieces:
            await speaker.send("text", ctx=ctx, text=piece, format=native(model), seed=seed)
            await asyncio.sleep(0)
        await speaker.send("end", ctx=ctx)
        await speaker.done(ctx)
    return heard(model, speaker, ctx)


def usage(done: dict[str, object]) -> dict[str, int]:
    found = done["usage"]
    assert isinstance(found, dict)
    return found


def test_it_speaks_whole_frames_at_its_own_rate_and_ends(model: Bundle) -> None:
    async def main() -> None:
        async with speaking(model) as server, client(server) as speaker:
            for seed in SEEDS:
                ctx = str(seed)
                await speaker.say(TEXT, ctx, format=native(model), seed=seed)
            for seed in SEEDS:
                done = await speaker.done(str(seed))
                assert done["reason"] == "completed"
                assert done["samples"] == usage(done)["model_frames"] * model.spec.hop
                sound = heard(model, speaker, str(seed))
                assert len(sound) == done["samples"] and len(np.unique(sound)) > 100
                assert speaker.frames(str(seed))[-1].flags & FLAG_LAST

    run(main())


def test_any_split_of_the_text_sounds_the_same(model: Bundle) -> None:
    # TEXTIN-1, DET-1
    rng = random.Random(3)
    cuts = sorted(rng.sample(range(1, len(TEXT)), 9))
    pieces = [TEXT[i:j] for i, j in zip([0, *cuts], [*cuts, len(TEXT)], strict=True)]

    async def main() -> None:
        async with speaking(model) as server:
            whole = await say(server, model, [TEXT])
            assert len(whole) > 0
            assert_same(await say(server, model, pieces), whole)
            assert_same(await say(server, model, list(TEXT)), whole)

    run(main())


def test_what_is_streamed_is_the_offline_sound_of_its_codes(
    model: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames: list[npt.NDArray[np.int16]] = []
    commit = Scheduler.commit

    def recorded(self: Scheduler, batch: Batch, out: StepOutput, now: float) -> None:
        num_before = len(self.outbox)
        commit(self, batch, out, now)
        frames.extend(m.codes for m in self.outbox[num_before:] if isinstance(m, Frames))

    monkeypatch.setattr(Scheduler, "commit", recorded)

    async def main() -> npt.NDArray[np.int32]:
        async with speaking(model) as server:
            frames.clear()  # of what a server says to itself when it starts
            return await say(server, model, [TEXT])

    streamed = run(main())
    codes = torch.from_numpy(np.concatenate(frames)[:, model.spec.codec_codebooks].astype(np.int64))
    with torch.inference_mode():
        state = model.decoder.new_state(1)
        pcm = model.decoder.decode(codes.t()[None], state, torch.tensor([0]))
    offline = (pcm[0].t().clamp(-1, 1) * 32767).round().to(torch.int32).numpy()
    assert len(codes) > 10
    assert_same(streamed, offline)


def test_contexts_at_once_sound_as_they_do_alone(model: Bundle) -> None:
    # MIX-2
    async def main() -> None:
        async with speaking(model) as server:
            alone = [await say(server, model, [TEXT], seed=seed) for seed in SEEDS]
            together = await asyncio.gather(*(say(server, model, [TEXT], seed=seed) for seed in SEEDS))
            for one, other in zip(alone, together, strict=True):
                assert_same(one, other)
            assert len({sound.tobytes() for sound in alone}) == len(SEEDS)

    run(main())


def test_a_flush_speaks_what_came_and_the_context_goes_on(model: Bundle) -> None:
    async def main() -> None:
        async with speaking(model) as server, client(server) as speaker:
            await speaker.send("text", ctx="a", text="Hello there", format=native(model), seed=SEEDS[0])
            await speaker.send("flush", ctx="a", id="f1")
            flushed = await speaker.wait("flush.done", "a")
            assert flushed["id"] == "f1" and flushed["c1"] == len("Hello there")
            first = len(heard(model, speaker, "a"))
            assert flushed["pts"] == first
            await speaker.send("text", ctx="a", text=", my friend. Good bye!")
            await speaker.send("end", ctx="a")
            done = await speaker.done("a")
            assert done["reason"] == "completed" and done["samples"] == len(heard(model, speaker, "a"))
            segments = [message["seg"] for message in speaker.find("seg.done", "a")]
            assert segments == list(range(len(segments))) and len(segments) > 1

    run(main())


def test_a_cancel_is_a_barrier_and_frees_the_stream_for_the_next(tmp_path: Path) -> None:
    # CAN-1, CAN-9: all three families, with models that never stop by themselves
    async def speak(builder: Builder) -> None:
        model = models.load(str(builder(tmp_path / builder.__name__, stop_chance=0.0)), device="cpu")
        async with speaking(model, max_streams=1) as server, client(server) as speaker:
            for round in range(3):
                ctx = str(round)
                await speaker.say(TEXT * 4, ctx, format=native(model))
                await speaker.audio(ctx)
                await speaker.send("cancel", ctx=ctx)
                done = await speaker.wait("ctx.done", ctx)
                assert done["reason"] == "cancelled"
                count = len(speaker.frames(ctx))
                await speaker.pong()
                assert len(speaker.frames(ctx)) == count

    async def main() -> None:
        for builder in (build_local, build_nano, build_realtime):
            await speak(builder)

    run(main())


def test_a_model_that_never_stops_is_stopped_at_the_limit_and_says_so(model: Bundle) -> None:
    # STOP-1
    async def main() -> None:
        short = replace(model.spec.text, max_segment_frames=3)
        async with speaking(replace(model, spec=replace(model.spec, text=short))) as server:
            async with client(server) as speaker:
                for seed in range(6):
                    await speaker.say("Hello there.", str(seed), format=native(model), seed=seed)
                ends = [await speaker.done(str(seed)) for seed in range(6)]
        assert "limit" in {done["reason"] for done in ends} <= {"completed", "limit"}
        for done in ends:
            if done["reason"] == "limit":
                assert done["samples"] == 3 * model.spec.hop

    run(main())
