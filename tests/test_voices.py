"""Reference voices: files of a folder, one encode for all who ask, and streams that wait for theirs."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import soundfile
import torch

from realtime.config import Config, EngineConfig, ModelConfig, VoicesConfig
from realtime.errors import BadRequest, ConfigError, StageFailed
from realtime.messages import Audio, Closed, SamplingParams, SpeechRequest, StreamId, VoiceCodes
from realtime.models.base import Bundle, TextFeed
from realtime.models.reference import normalised
from realtime.models.tokenizer_codec import load_codec
from realtime.preprocess.encoder import MAX_BATCH, WINDOW_S, Encoder, fitted
from realtime.preprocess.voices import MAX_REFERENCE_S, Encode, Encoded, Voice, Voices, read, scan
from realtime.runtime import Runtime
from tests.fakes import SPEC, FakeClock, fake_bundle
from tests.server_fakes import bundle, client, run, served, until
from tests.tiny_models import build_local

GOLDEN = Path(__file__).parent / "golden"

Pcm = npt.NDArray[np.float32]


def tone(seconds: float = 1.0, rate: int = 16_000, channels: int = 1, hz: float = 440.0) -> Pcm:
    t = np.arange(round(seconds * rate), dtype=np.float32)[:, None] / rate
    gains = np.arange(1, channels + 1) / channels
    return (0.3 * np.sin(2 * np.pi * hz * t) * gains).astype(np.float32)


def save(path: Path, pcm: Pcm | None = None, rate: int = 16_000, **options: str) -> Path:
    soundfile.write(path, tone() if pcm is None else pcm, rate, **options)
    return path


# ---- files


@pytest.mark.parametrize("format", ["WAV", "FLAC", "OGG", "MP3"])
def test_a_recording_is_read_by_what_it_is_and_not_by_its_name(tmp_path: Path, format: str) -> None:
    saved = save(tmp_path / "misnamed.wav", format=format)
    pcm, rate = read(saved)
    assert rate == 16_000 and pcm.dtype == np.float32 and pcm.shape[1] == 1
    assert abs(len(pcm) - 16_000) < 4_000  # MP3 and OGG pad
    assert 0.25 < np.abs(pcm[2_000:10_000]).max() < 0.35


@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE"])
def test_every_width_of_sample_gives_the_same_sound(tmp_path: Path, subtype: str) -> None:
    pcm, _ = read(save(tmp_path / "a.wav", subtype=subtype))
    assert np.abs(pcm - tone()).max() < (0.01 if subtype == "PCM_U8" else 1e-4)


@pytest.mark.parametrize("data", [b"", b"<html>not found</html>" * 50, b"\x89PNG\r\n\x1a\n" + bytes(300)])
def test_what_is_no_sound_is_refused_by_name(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.wav").write_bytes(data)
    with pytest.raises(BadRequest, match=r"a\.wav can't be read as sound") as caught:
        read(tmp_path / "a.wav")
    assert caught.value.code == "bad_audio" and str(tmp_path) not in caught.value.message


@pytest.mark.parametrize(
    ("seconds", "message"),
    [
        (61.0, r"a\.wav is 61\.0 s, at most 60 s of a voice are accepted"),
        (0.2, r"a\.wav is 0\.20 s, at least 0\.5 s of a voice are needed"),
    ],
)
def test_a_reference_has_a_longest_and_a_shortest_length(
    tmp_path: Path, seconds: float, message: str
) -> None:
    with pytest.raises(BadRequest, match=message):
        read(save(tmp_path / "a.wav", tone(seconds, 8_000), 8_000))
    for ok_s in (0.5, MAX_REFERENCE_S):
        read(save(tmp_path / "a.wav", tone(ok_s, 8_000), 8_000))


def test_samples_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    pcm = tone()
    pcm[77] = np.nan
    with pytest.raises(BadRequest, match="no numbers"):
        read(save(tmp_path / "a.wav", pcm, subtype="FLOAT"))


def test_the_voices_of_a_folder_are_its_recordings_with_their_words(tmp_path: Path) -> None:
    save(tmp_path / "Anna.wav")
    save(tmp_path / "ben k.flac", tone(hz=300))
    save(tmp_path / "copy.ogg", tone(), format="WAV")  # the same sound under another name
    (tmp_path / "Anna.txt").write_text("  What Anna says: grün.\n", encoding="utf-8")
    (tmp_path / "ben k.txt").write_text("\n")
    (tmp_path / "notes.md").write_text("nothing to do with it")
    voices = scan(str(tmp_path))
    assert list(voices) == ["Anna", "ben k", "copy"]
    assert [voice.text for voice in voices.values()] == ["What Anna says: grün.", None, None]
    assert voices["Anna"].key == voices["copy"].key != voices["ben k"].key


def test_a_bad_file_is_left_out_with_a_warning_that_names_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path / "good.wav")
    save(tmp_path / "long.wav", tone(61, 8_000), 8_000)
    (tmp_path / "broken.mp3").write_bytes(b"no sound at all" * 20)
    (tmp_path / "folder.wav").mkdir()
    save(tmp_path / "good.flac")
    save(tmp_path / "words.wav")
    (tmp_path / "words.txt").write_bytes(b"\xff\xfe\xff")
    save(tmp_path / "book.wav")
    (tmp_path / "book.txt").write_text("word " * 500)
    with caplog.at_level(logging.WARNING):
        assert [voice.path.name for voice in scan(str(tmp_path)).values()] == ["good.flac"]
    told = "\n".join(caplog.messages)
    for name in (
        "good.wav",
        "long.wav",
        "broken.mp3",
        "folder.wav",
        "words.wav",
        "book.txt has 2499 characters",
    ):
        assert name in told
    assert len(caplog.messages) == 6


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"voices\.folder .*none can't be read: No such file"):
        scan(str(tmp_path / "none"))


def test_a_model_that_can_not_clone_takes_no_recordings(tmp_path: Path) -> None:
    async def main() -> None:
        config = Config(voices=VoicesConfig(str(tmp_path)))
        with pytest.raises(ConfigError, match="fake has its own voices only: fake"):
            async with Runtime(config, lambda path: fake_bundle()):
                pass

    run(main())


# ---- to the codec's format


def test_a_codec_of_one_channel_hears_the_mean() -> None:
    pcm = np.stack([np.full(100, 0.5), np.zeros(100)], 1).astype(np.float32)
    assert np.array_equal(fitted(pcm, 24_000, 24_000, 1), np.full((100, 1), 0.25, np.float32))


def test_a_codec_of_two_channels_hears_one_twice_and_two_of_many() -> None:
    mono, many = tone(), tone(channels=6)
    assert np.array_equal(fitted(mono, 16_000, 16_000, 2), np.repeat(mono, 2, axis=1))
    assert np.array_equal(fitted(many, 16_000, 16_000, 2), many[:, :2])


def test_a_recording_is_resampled_to_the_rate_of_the_codec() -> None:
    pcm = fitted(tone(1.0, 44_100, 2), 44_100, 48_000, 2)
    assert pcm.shape == (48_000, 2) and pcm.dtype == np.float32
    assert np.abs(pcm - tone(1.0, 48_000, 2))[1_000:-1_000].max() < 1e-3


# ---- the encoder stage


@dataclass
class FakeEncoder:
    """Codes that tell the sound they were made from: its frames, and its sum."""

    batches: list[int] = field(default_factory=list)
    error: Exception | None = None  # raised by the next encode
    may_run: threading.Event = field(default_factory=threading.Event)

    def encode(self, pcm: Sequence[Pcm]) -> list[npt.NDArray[np.int16]]:
        assert self.may_run.wait(20)
        self.batches.append(len(pcm))
        error, self.error = self.error, None
        if error is not None:
            raise error
        return [codes_of(sound) for sound in pcm]


def codes_of(sound: Pcm) -> npt.NDArray[np.int16]:
    level = int(np.abs(sound).mean() * 1000)
    return np.full((len(sound) // SPEC.hop, 2), level, np.int16)


def free_encoder() -> FakeEncoder:
    encoder = FakeEncoder()
    encoder.may_run.set()
    return encoder


def stage(encoder: FakeEncoder, clock: FakeClock, **options: Any) -> tuple[Encoder, list[Encoded]]:
    answers: list[Encoded] = []
    prepare = options.get("prepare")
    return Encoder(SPEC, encoder, prepare, answers.extend, clock), answers


def test_references_that_come_together_are_encoded_together(tmp_path: Path) -> None:
    encoder, clock = free_encoder(), FakeClock()
    encoding, answers = stage(encoder, clock)
    assert encoding.step() is None
    for i in range(3):
        encoding.handle(Encode(str(i), save(tmp_path / f"{i}.wav", tone(1 + i))))
    wait_s = encoding.step()
    assert wait_s is not None and 0 < wait_s <= WINDOW_S and not encoder.batches
    clock.advance(wait_s)
    assert encoding.step() == 0.0 and encoding.step() is None
    assert encoder.batches == [3]
    assert [answer.key for answer in answers] == ["0", "1", "2"]
    for i, answer in enumerate(answers):
        assert answer.codes is not None and answer.codes.key == str(i)
        assert answer.codes.codes.shape == ((1 + i) * SPEC.sample_rate // SPEC.hop, 2)


def test_a_full_batch_waits_no_longer(tmp_path: Path) -> None:
    encoder = free_encoder()
    encoding, answers = stage(encoder, FakeClock())
    path = save(tmp_path / "a.wav")
    for i in range(MAX_BATCH + 1):
        encoding.handle(Encode(str(i), path))
    assert encoding.step() == 0.0
    assert encoder.batches == [MAX_BATCH] and len(answers) == MAX_BATCH
    assert encoding.step() != 0.0


def test_one_that_can_not_be_read_does_not_spoil_the_others(tmp_path: Path) -> None:
    encoder, clock = free_encoder(), FakeClock()
    encoding, answers = stage(encoder, clock)
    encoding.handle(Encode("gone", tmp_path / "gone.wav"))
    encoding.handle(Encode("good", save(tmp_path / "good.wav")))
    clock.advance(WINDOW_S)
    encoding.step()
    found = {answer.key: answer for answer in answers}
    assert isinstance(found["gone"].error, BadRequest) and found["gone"].codes is None
    assert found["good"].error is None and found["good"].codes is not None


def test_a_failed_batch_is_told_to_all_in_it_and_the_stage_goes_on(tmp_path: Path) -> None:
    encoder, clock = free_encoder(), FakeClock()
    encoding, answers = stage(encoder, clock)
    path = save(tmp_path / "a.wav")
    encoder.error = RuntimeError("out of memory")
    for key in ("a", "b"):
        encoding.handle(Encode(key, path))
    clock.advance(WINDOW_S)
    with pytest.raises(RuntimeError) as caught:
        encoding.step()
    encoding.fail(caught.value)
    assert [(answer.key, type(answer.error)) for answer in answers] == [
        ("a", StageFailed),
        ("b", StageFailed),
    ]
    encoding.handle(Encode("a", path))
    clock.advance(WINDOW_S)
    encoding.step()
    assert answers[-1].codes is not None


def test_a_family_may_want_a_recording_prepared(tmp_path: Path) -> None:
    encoder, clock = free_encoder(), FakeClock()
    path = save(tmp_path / "quiet.wav", 0.1 * tone())
    levels = []
    for prepare in (None, normalised):
        encoding, answers = stage(encoder, clock, prepare=prepare)
        encoding.handle(Encode("a", path))
        clock.advance(WINDOW_S)
        encoding.step()
        assert answers[0].codes is not None
        levels.append(int(answers[0].codes.codes[0, 0]))
    assert levels[1] == pytest.approx(levels[0] * 10 ** (3 / 20), abs=1.5)  # 3 dB at most


def test_references_have_the_same_codes_together_and_alone(tmp_path: Path) -> None:
    codec = load_codec(GOLDEN / "codec_v2", torch.device("cpu"), torch.float32, num_quantizers=4)
    spec = replace(SPEC, sample_rate=codec.sample_rate, channels=codec.channels)
    for i, seconds in enumerate((1.0, 3.37, 7.01)):
        save(tmp_path / f"{i}.wav", tone(seconds, 48_000, 1, 9.0 + i), 48_000)

    def encoded(*names: str) -> dict[str, npt.NDArray[np.int16]]:
        clock = FakeClock()
        answers: list[Encoded] = []
        encoding = Encoder(spec, codec.encoder, normalised, answers.extend, clock)
        for name in names:
            encoding.handle(Encode(name, tmp_path / f"{name}.wav"))
        clock.advance(WINDOW_S)
        encoding.step()
        return {answer.key: answer.codes.codes for answer in answers if answer.codes is not None}

    together = encoded("0", "1", "2")
    assert [codes.shape for codes in together.values()] == [(4, 4), (13, 4), (28, 4)]
    for name, codes in together.items():
        assert np.array_equal(encoded(name)[name], codes)


# ---- the cache


def voice(name: str, key: str | None = None) -> Voice:
    return Voice(name, Path(f"{name}.wav"), None, key or name)


def cache(*names: str, max_bytes: int = 1 << 20) -> tuple[Voices, list[Encode]]:
    asked: list[Encode] = []
    return Voices({name: voice(name) for name in names}, asked.append, max_bytes), asked


def answer(key: str, num_frames: int = 10) -> Encoded:
    return Encoded(key, VoiceCodes(key, np.zeros((num_frames, 2), np.int16)))


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_many_who_ask_at_once_cost_one_encode() -> None:
    async def main() -> None:
        voices, asked = cache("a")
        waiting = [asyncio.create_task(voices.codes("a")) for _ in range(20)]
        await turns()
        assert asked == [Encode("a", Path("a.wav"))]
        voices.encoded([answer("a")])
        found = await asyncio.gather(*waiting)
        assert all(codes is found[0] for codes in found)
        assert await voices.codes("a") is found[0] and len(asked) == 1

    run(main())


def test_two_names_of_one_sound_cost_one_encode() -> None:
    async def main() -> None:
        asked: list[Encode] = []
        voices = Voices({"a": voice("a", "same"), "b": voice("b", "same")}, asked.append)
        waiting = [asyncio.create_task(voices.codes(name)) for name in ("a", "b")]
        await turns()
        voices.encoded([answer("same")])
        one, other = await asyncio.gather(*waiting)
        assert one is other and len(asked) == 1

    run(main())


def test_who_leaves_does_not_take_the_others_along() -> None:
    async def main() -> None:
        voices, asked = cache("a")
        first, second = (asyncio.create_task(voices.codes("a")) for _ in range(2))
        await turns()
        first.cancel()
        await turns()
        assert first.cancelled() and not second.done()
        voices.encoded([answer("a")])
        assert (await second).key == "a" and len(asked) == 1

    run(main())


def test_a_failure_reaches_all_who_wait_and_is_tried_again() -> None:
    async def main() -> None:
        voices, asked = cache("a")
        waiting = [asyncio.create_task(voices.codes("a")) for _ in range(2)]
        await turns()
        voices.encoded([Encoded("a", error=BadRequest("a.wav went bad", code="bad_audio"))])
        for task in waiting:
            with pytest.raises(BadRequest, match="went bad"):
                await task
        again = asyncio.create_task(voices.codes("a"))
        await turns()
        assert len(asked) == 2
        voices.encoded([answer("a")])
        await again

    run(main())


def test_a_failure_that_nobody_waits_for_any_more_is_not_reported_by_asyncio() -> None:
    async def main() -> None:
        unhandled: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        voices, _ = cache("a")
        task = asyncio.create_task(voices.codes("a"))
        await turns()
        task.cancel()
        await turns()
        voices.encoded([Encoded("a", error=StageFailed("no"))])
        await turns()
        assert not unhandled

    run(main())


def test_what_was_used_longest_ago_is_forgotten_first() -> None:
    async def main() -> None:
        voices, asked = cache("a", "b", "c", max_bytes=2 * 40)
        for name in ("a", "b"):
            await codes(voices, name)
        await voices.codes("a")  # used again
        await codes(voices, "c")
        assert voices.num_bytes <= 80 and len(asked) == 3
        await voices.codes("a")
        assert len(asked) == 3
        await codes(voices, "b")
        assert len(asked) == 4

    async def codes(voices: Voices, name: str) -> VoiceCodes:
        task = asyncio.create_task(voices.codes(name))
        await turns()
        voices.encoded([answer(name)])
        return await task

    run(main())


def test_one_larger_than_the_cache_is_served_and_not_kept() -> None:
    async def main() -> None:
        voices, asked = cache("a", max_bytes=10)
        task = asyncio.create_task(voices.codes("a"))
        await turns()
        voices.encoded([answer("a")])
        assert (await task).key == "a" and voices.num_bytes == 0

    run(main())


def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr("realtime.preprocess.voices.ENCODE_S", 0.0)
        voices, _ = cache("a")
        with pytest.raises(StageFailed, match="was not encoded within"):
            await voices.codes("a")
        voices.encoded([answer("a")])  # too late for that one
        assert (await voices.codes("a")).key == "a"

    run(main())


# ---- streams


@dataclass
class Cloner:
    """A fake model that can clone, and what its feeds were made with."""

    encoder: FakeEncoder = field(default_factory=FakeEncoder)
    asked: list[tuple[SpeechRequest, VoiceCodes | None]] = field(default_factory=list)

    def bundle(self) -> Bundle:
        model = bundle()
        make = model.feed

        def feed(stream_id: StreamId, request: SpeechRequest, voice: VoiceCodes | None = None) -> TextFeed:
            self.asked.append((request, voice))
            return make(stream_id, request)

        return replace(model, encoder=self.encoder, feed=feed)


def with_voices(test: Callable[[Cloner, Path], Awaitable[None]]) -> Callable[[Path], None]:
    def wrapped(tmp_path: Path) -> None:
        save(tmp_path / "anna.wav", tone(2.0))
        (tmp_path / "anna.txt").write_text("These are her words.")
        save(tmp_path / "ben.wav", tone(1.0, hz=200))
        cloner = Cloner()

        async def main() -> None:
            try:
                await test(cloner, tmp_path)
            finally:
                cloner.encoder.may_run.set()

        run(main())

    wrapped.__name__ = test.__name__
    return wrapped


@with_voices
async def test_the_voices_of_the_folder_are_listed_and_checked(cloner: Cloner, folder: Path) -> None:
    async with served(cloner.bundle(), voices=str(folder)) as server:
        (model,) = (await server.get("/v1/models")).json()["data"]
        assert model["voices"] == ["fake", "anna", "ben"]
        listed = (await server.get("/v1/voices")).json()["voices"]
        assert [(one["voice_id"], one["category"]) for one in listed] == [
            ("fake", "premade"),
            ("anna", "cloned"),
            ("ben", "cloned"),
        ]
        async with client(server.url) as speaker:
            ready = await speaker.wait("session.ready")
            assert ready["voices_url"] == "/v1/voices"
            await speaker.say("Hello.", voice="../anna")
            error = await speaker.wait("error")
            assert error["code"] == "voice_not_found" and "anna, ben" in error["message"]


@with_voices
async def test_a_stream_speaks_with_the_codes_and_words_of_its_voice(cloner: Cloner, folder: Path) -> None:
    cloner.encoder.may_run.set()
    async with served(cloner.bundle(), voices=str(folder)) as server, client(server.url) as speaker:
        await speaker.say("Hello there.", "1", voice="anna")
        await speaker.say("Hello there.", "2", voice="ben")
        await speaker.say("Hello there.", "3")
        for ctx in ("1", "2", "3"):
            assert (await speaker.done(ctx))["reason"] == "completed"
            assert speaker.frames(ctx)
        heard = [
            (voice.codes.shape[0], asked.voice_text) for asked, voice in cloner.asked if voice is not None
        ]
        frames_per_s = server.runtime.spec.sample_rate // SPEC.hop
        assert heard == [(2 * frames_per_s, "These are her words."), (frames_per_s, None)]
        await speaker.say("Once more.", "4", voice="anna")
        await speaker.done("4")
        assert sum(cloner.encoder.batches) == 2  # each voice once


@with_voices
async def test_a_stream_that_waits_for_its_voice_keeps_nobody_waiting(cloner: Cloner, folder: Path) -> None:
    async with served(cloner.bundle(), voices=str(folder), max_streams=1) as server:
        async with client(server.url) as speaker:
            await speaker.say("Hello ", "1", voice="anna", end=False)
            await speaker.say("Hello there.", "2")  # the only permit is free while the voice is encoded
            assert (await speaker.done("2"))["reason"] == "completed"
            await speaker.say("there, my friend.", "1")
            await speaker.pong()  # the reader reads
            (stream,) = server.runtime.streams.values()
            assert not speaker.frames("1") and stream.is_waiting  # not idle
            cloner.encoder.may_run.set()
            done = await speaker.done("1")
            assert done["reason"] == "completed" and done["usage"]["chars"] == len("Hello there, my friend.")


@with_voices
async def test_a_cancel_does_not_wait_for_the_voice(cloner: Cloner, folder: Path) -> None:
    async with served(cloner.bundle(), voices=str(folder)) as server, client(server.url) as speaker:
        await speaker.say("Hello there.", "1", voice="anna")
        await until(lambda: server.runtime.streams)
        await speaker.send("cancel", ctx="1")
        assert (await speaker.done("1"))["reason"] == "cancelled"
        cloner.encoder.may_run.set()
        await speaker.say("Hello there.", "2", voice="anna")
        assert (await speaker.done("2"))["reason"] == "completed"
        assert sum(cloner.encoder.batches) == 1


@with_voices
async def test_a_recording_that_went_bad_fails_its_streams_only(cloner: Cloner, folder: Path) -> None:
    cloner.encoder.may_run.set()
    async with served(cloner.bundle(), voices=str(folder)) as server, client(server.url) as speaker:
        (folder / "anna.wav").write_bytes(b"overwritten")
        await speaker.say("Hello there.", "1", voice="anna")
        error = await speaker.wait("error", "1")
        assert error["code"] == "bad_audio" and "anna.wav" in error["message"]
        await speaker.done("1")
        await speaker.say("Hello there.", "2", voice="ben")
        assert (await speaker.done("2"))["reason"] == "completed"


@with_voices
async def test_an_encoder_that_fails_fails_the_stream_and_serves_the_next(
    cloner: Cloner, folder: Path
) -> None:
    cloner.encoder.may_run.set()
    cloner.encoder.error = RuntimeError("secret details")
    async with served(cloner.bundle(), voices=str(folder)) as server, client(server.url) as speaker:
        server.expected_errors.append("encoder: step failed")
        await speaker.say("Hello there.", "1", voice="anna")
        error = await speaker.wait("error", "1")
        assert error["code"] == "engine_error" and "secret" not in error["message"]
        await speaker.done("1")
        await speaker.say("Hello there.", "2", voice="anna")
        assert (await speaker.done("2"))["reason"] == "completed"


# ---- a real model


def test_what_a_cloning_model_says_depends_on_the_recording_alone(tmp_path: Path) -> None:
    folder = build_local(tmp_path / "model", stop_chance=0.0)
    recordings = tmp_path / "voices"
    recordings.mkdir()
    save(recordings / "anna.wav")
    save(recordings / "anna again.wav")
    save(recordings / "ben.wav", tone(hz=200))
    save(recordings / "transcribed.wav")
    (recordings / "transcribed.txt").write_text("These are her words.")

    def is_same(one: Pcm, other: Pcm) -> bool:
        """But for the rounding that differs with the cut into chunks."""
        return one.shape == other.shape and bool(np.abs(one - other).max() < 1e-4)

    async def said(runtime: Runtime, voice: str | None) -> Pcm:
        request = SpeechRequest(voice=voice, sampling=SamplingParams(seed=5, max_frames=6))
        async with runtime.open(request) as stream:
            stream.text("Hello there, how are you?")
            stream.end()
            events = [event async for event in stream]
            assert isinstance(events[-1], Closed) and events[-1].reason == "limit", events[-1]
            return np.concatenate([event.pcm for event in events if isinstance(event, Audio)])

    async def main() -> None:
        config = Config(
            model=ModelConfig(str(folder)),
            engine=EngineConfig(max_streams=2, queue_s=60.0),
            voices=VoicesConfig(str(recordings)),
        )
        async with Runtime(config) as runtime:
            names = (None, "anna", "ben", "transcribed")
            sounds = [await said(runtime, name) for name in names]
            for i, one in enumerate(sounds):
                assert is_same(await said(runtime, names[i]), one)
                assert not any(is_same(other, one) for other in sounds[i + 1 :])
            assert is_same(await said(runtime, "anna again"), sounds[1])

    run(main())
