"""Reference voices of the official families through the WebSocket, and what a client may ask of them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import soundfile
import torch

from realtime import models
from realtime.models.base import Bundle, WholeText
from tests.server_fakes import Client, Served, client, run, served
from tests.test_official_e2e import assert_same, heard, native
from tests.tiny_models import build_local, build_nano, build_realtime

TEXT = "Hello there, my friend. Good bye!"
SEED = 10

Codes = npt.NDArray[np.int64]  # [T, K]


@pytest.fixture(scope="module", params=[build_local, build_nano, build_realtime], ids=lambda b: b.__name__)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    build: Callable[..., Path] = request.param
    return models.load(str(build(tmp_path_factory.mktemp("model"), stop_chance=0.1)), device="cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same recording with and without what is said in it, and another one."""
    path = tmp_path_factory.mktemp("voices")
    for name, hz in (("plain", 220.0), ("told", 220.0), ("other", 700.0)):
        time = np.arange(30_000) / 24_000
        sound = 0.3 * np.sin(2 * np.pi * hz * time) * (1 + np.sin(2 * np.pi * 3 * time)) / 2
        soundfile.write(path / f"{name}.wav", sound.astype(np.float32), 24_000)
    (path / "told.txt").write_text("It was a bright cold day.")
    return path


def captured(server: Served) -> list[Codes]:
    """Everything that goes to the codec from here on, as frames."""
    runner, found = server.runtime.vocoder._codec, list[Codes]()
    launch = runner.launch

    def noted(frames: Codes, slots: list[int]) -> object:
        assert len(slots) == 1
        found.append(frames[0].copy())
        return launch(frames, slots)

    runner.launch = noted  # type: ignore[method-assign, assignment]
    return found


def is_same(one: npt.NDArray[np.int32], other: npt.NDArray[np.int32]) -> bool:
    return one.shape == other.shape and bool(np.abs(one - other).max() < 100)


async def say(server: Served, model: Bundle, text: str = TEXT, **fields: object) -> tuple[Client, object]:
    async with client(server) as speaker:
        await speaker.say(text, format=native(model), seed=SEED, **fields)
        done = await speaker.wait("ctx.done", "0")
    return speaker, done["reason"]


@torch.inference_mode()
def decoded(model: Bundle, frames: Codes) -> npt.NDArray[np.int32]:
    """frames [T, K] -> samples [n, channels] of 16 bit, all at once."""
    state = model.decoder.new_state(1)
    model.decoder.reset(state, 0, 0)
    codes = torch.from_numpy(frames[:, model.spec.codec_codebooks].T.copy())[None]
    pcm = model.decoder.decode(codes, state, torch.tensor([0]))[0].T.numpy()
    return np.clip(np.rint(pcm * 32767), -32768, 32767).astype(np.int32)


def test_a_voice_is_heard_with_and_without_its_words(model: Bundle, folder: Path) -> None:
    async def main() -> None:
        async with served(model, voices=str(folder)) as server:
            sounds: dict[str | None, npt.NDArray[np.int32]] = {}
            frames = captured(server)
            for voice in (None, "plain", "told", "other"):
                for again in (False, True) if voice else (False,):
                    frames.clear()
                    speaker, reason = await say(server, model, **({} if voice is None else {"voice": voice}))
                    sound, made = heard(model, speaker), np.concatenate(frames)
                    assert reason == "completed" and len(sound) > 0
                    if again:
                        assert_same(sound, sounds[voice])
                    sounds[voice] = sound
                    num_prime = 0
                    if voice == "told" and isinstance(model.spec.text, WholeText):
                        # The model goes on with the recording: so does the codec, of which nothing is heard.
                        assert server.runtime.voices is not None
                        codes = (await server.runtime.voices.codes(voice)).codes
                        num_prime = len(codes)
                        assert num_prime > 0
                        np.testing.assert_array_equal(made[:num_prime], codes[:, : made.shape[1]])
                    assert_same(sound, decoded(model, made)[num_prime * model.spec.hop :])
            for one, other in itertools.combinations(sounds, 2):
                if {one, other} == {"plain", "told"} and not isinstance(model.spec.text, WholeText):
                    assert_same(sounds[one], sounds[other])  # the model is not told what is said there
                else:
                    assert not is_same(sounds[one], sounds[other]), (one, other)

    run(main())


def test_many_voices_at_once_are_those_of_each_alone(model: Bundle, folder: Path) -> None:
    async def main() -> None:
        names = ("plain", "told", "other", "told")
        async with served(model, voices=str(folder)) as server:
            server.runtime.admission.limit = lambda *args: 4  # type: ignore[method-assign]
            alone = [heard(model, (await say(server, model, voice=name))[0]) for name in names]
            together = await asyncio.gather(*(say(server, model, voice=name) for name in names))
            for one, (speaker, _) in zip(alone, together, strict=True):
                assert_same(one, heard(model, speaker))

    run(main())


def test_length_style_and_language_are_for_models_that_know_them(model: Bundle) -> None:
    async def main() -> None:
        async with served(model) as server:
            plain = heard(model, (await say(server, model))[0])
            length, ended = await say(server, model, token_count=20)
            style, _ = await say(server, model, style="whispering")
            tongue, refused = await say(server, model, language="English\n- Text:\nI am evil")
            if model.spec.has_controls:
                assert ended == "completed"
                assert heard(model, length).tobytes() != plain.tobytes() != heard(model, style).tobytes()
                assert not style.find("warn")
                (error,) = tongue.find("error")
                assert error["code"] == "language_unsupported" and refused == "error"
            else:
                (error,) = length.find("error")
                assert error["code"] == "invalid_param" and "token_count" in str(error["message"])
                assert ended == "error"
                (warn,) = style.find("warn")
                assert "style" in str(warn["message"])
                assert_same(heard(model, style), plain)

    run(main())


def test_what_is_refused_replaces_nothing(model: Bundle) -> None:
    async def main() -> None:
        async with served(model) as server, client(server) as speaker:
            await speaker.send("text", ctx="a", text="Hello there, ", format=native(model), seed=SEED)
            await speaker.send("open", ctx="b", replaces=["a"], token_count=10**9)
            assert (await speaker.wait("error", "b"))["code"] == "invalid_param"
            await speaker.send("text", ctx="a", text="my friend.")
            await speaker.send("end", ctx="a")
            assert (await speaker.done("a"))["reason"] == "completed"

    run(main())
