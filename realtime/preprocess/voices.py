"""The voices of a model that can clone: the recordings of a folder, and their codes once one was asked for.

Knows files, names and the event loop; the encoder is behind a message.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import soundfile
import xxhash

from realtime import metrics
from realtime.errors import BadRequest, ConfigError, StageFailed, TTSError
from realtime.messages import VoiceCodes

SUFFIXES = (".wav", ".flac", ".mp3", ".ogg")  # which files are voices; what they hold is found out
MIN_REFERENCE_S = 0.5
MAX_REFERENCE_S = 60.0
MAX_TRANSCRIPT = 2000  # characters: more than can be said in that time
CACHE_BYTES = 16 * 2**20  # a minute is 24 kB of codes: some 700 of the longest
ENCODE_S = 60.0  # a stream waits so long for its voice at most

Pcm = npt.NDArray[np.float32]  # [samples, channels]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Voice:
    """A recording and, if known, what is said there. `key` stands for the sound itself."""

    name: str
    path: Path
    text: str | None
    key: str


@dataclass(frozen=True, slots=True)
class Encode:
    """To the encoder."""

    key: str
    path: Path


@dataclass(frozen=True, slots=True)
class Encoded:
    """From the encoder: one of the two is there."""

    key: str
    codes: VoiceCodes | None = None
    error: TTSError | None = None


def read(path: Path) -> tuple[Pcm, int]:
    """The samples of a recording, whatever its name says of the format, and their rate. Raises
    BadRequest, without having read more than the limit."""
    try:
        with soundfile.SoundFile(path) as file:
            rate = int(file.samplerate)
            most = int(MAX_REFERENCE_S * rate)
            pcm: Pcm = file.read(most + 1, dtype="float32", always_2d=True)
            seconds = max(file.frames, len(pcm)) / rate
    except (soundfile.SoundFileError, OSError) as error:
        reason = getattr(error, "error_string", None) or getattr(error, "strerror", None) or error
        raise BadRequest(f"{path.name} can't be read as sound: {reason}", code="bad_audio") from error
    if len(pcm) > most:
        raise BadRequest(
            f"{path.name} is {seconds:.1f} s, at most {MAX_REFERENCE_S:.0f} s of a voice are accepted",
            code="bad_audio",
        )
    if len(pcm) < MIN_REFERENCE_S * rate:
        raise BadRequest(
            f"{path.name} is {seconds:.2f} s, at least {MIN_REFERENCE_S} s of a voice are needed",
            code="bad_audio",
        )
    if not np.isfinite(pcm).all():
        raise BadRequest(f"{path.name} holds samples that are no numbers", code="bad_audio")
    return pcm, rate


def scan(folder: str) -> dict[str, Voice]:
    """The voices of a folder by name; a file that can't be one is left out with a warning. Raises
    ConfigError."""
    path = Path(folder).expanduser()
    try:
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES)
    except OSError as error:
        raise ConfigError(f"voices.folder {path} can't be read: {error.strerror}") from error
    voices: dict[str, Voice] = {}
    for file in files:
        try:
            if file.stem in voices:
                raise BadRequest(f"there is a {voices[file.stem].path.name} already")
            voices[file.stem] = _voice(file)
        except (BadRequest, OSError, UnicodeDecodeError) as error:
            logger.warning("voice %s is left out: %s", file, error)
    return voices


def _voice(file: Path) -> Voice:
    pcm, rate = read(file)
    key = xxhash.xxh3_128(f"{rate} {pcm.shape} ".encode() + pcm.tobytes()).hexdigest()
    words = file.with_suffix(".txt")
    text = words.read_text(encoding="utf-8").strip() if words.is_file() else ""
    if len(text) > MAX_TRANSCRIPT:
        raise BadRequest(f"{words.name} has {len(text)} characters, at most {MAX_TRANSCRIPT} are accepted")
    return Voice(file.stem, file, text or None, key)


class Voices:
    """Codes by the name of a voice. Whoever asks while one is being encoded waits for that; what was used
    longest ago is forgotten first. Lives on the event loop's thread; `encode` sends to the encoder,
    whose answers come to `encoded`."""

    def __init__(
        self,
        voices: dict[str, Voice],
        encode: Callable[[Encode], None],
        max_bytes: int = CACHE_BYTES,
    ) -> None:
        self._voices = voices
        self._encode = encode
        self._max_bytes = max_bytes
        self._cache: OrderedDict[str, VoiceCodes] = OrderedDict()
        self._flights: dict[str, asyncio.Future[VoiceCodes]] = {}  # at most one for each voice

    @property
    def num_bytes(self) -> int:
        return sum(codes.codes.nbytes for codes in self._cache.values())

    def __contains__(self, name: str) -> bool:
        return name in self._voices

    def text(self, name: str) -> str | None:
        return self._voices[name].text

    async def codes(self, name: str) -> VoiceCodes:
        """Raises BadRequest for a recording that went bad, and StageFailed."""
        voice = self._voices[name]
        if voice.key in self._cache:
            self._cache.move_to_end(voice.key)
            metrics.VOICES.labels("hit").inc()
            return self._cache[voice.key]
        flight = self._flights.get(voice.key)
        metrics.VOICES.labels("miss" if flight is None else "shared").inc()
        if flight is None:
            flight = asyncio.get_running_loop().create_future()
            flight.add_done_callback(_look_at)
            self._flights[voice.key] = flight
            self._encode(Encode(voice.key, voice.path))
        try:
            async with asyncio.timeout(ENCODE_S):
                return await asyncio.shield(flight)  # others wait for it too
        except TimeoutError:
            raise StageFailed(f"voice {name!r} was not encoded within {ENCODE_S:.0f} s") from None

    def encoded(self, answers: Iterable[Encoded]) -> None:
        """A failure is told to those who wait, and tried again by the next one."""
        for answer in answers:
            flight = self._flights.pop(answer.key)
            if answer.codes is None:
                flight.set_exception(answer.error or StageFailed("the voice could not be encoded"))
                continue
            self._cache[answer.key] = answer.codes
            flight.set_result(answer.codes)
        while self.num_bytes > self._max_bytes:
            self._cache.popitem(last=False)


def _look_at(flight: asyncio.Future[VoiceCodes]) -> None:
    """Those who waited may all have left; asyncio would log a failure that nobody has looked at."""
    if not flight.cancelled():
        flight.exception()
