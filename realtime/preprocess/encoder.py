"""The encoder stage: reference recordings to codec frames, those together that come together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np
import soxr

from realtime import metrics
from realtime.errors import StageFailed, TTSError
from realtime.messages import VoiceCodes
from realtime.models.base import CodecEncoder, ModelSpec
from realtime.preprocess.voices import Encode, Encoded, Pcm, read

WINDOW_S = 0.02  # the first of a batch waits so long for company: little beside an encode
MAX_BATCH = 4  # a codec's state for each while it is encoded

logger = logging.getLogger(__name__)


class Encoder:
    """`handle` collects, `step` encodes. `prepare` is what the family does to a recording that has the
    codec's rate and channels; `emit` is called on the encoder's thread."""

    def __init__(
        self,
        spec: ModelSpec,
        encoder: CodecEncoder,
        prepare: Callable[[Pcm], Pcm] | None,
        emit: Callable[[list[Encoded]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spec = spec
        self._encoder = encoder
        self._prepare = prepare
        self._emit = emit
        self._clock = clock
        self._waiting: list[Encode] = []
        self._batch: list[Encode] = []  # in hand
        self._since_s = 0.0

    def handle(self, message: Encode) -> None:
        if not self._waiting:
            self._since_s = self._clock()
        self._waiting.append(message)

    def step(self) -> float | None:
        if not self._waiting:
            return None
        wait_s = self._since_s + WINDOW_S - self._clock()
        if wait_s > 0 and len(self._waiting) < MAX_BATCH:
            return wait_s
        self._batch, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
        self._run()
        return 0.0

    def fail(self, error: Exception) -> None:
        failed = StageFailed("the voice could not be encoded")
        self._emit([Encoded(message.key, error=failed) for message in self._batch])
        self._batch = []

    def close(self) -> None:
        pass

    def _run(self) -> None:
        """One that can't be read does not spoil the others."""
        sounds: list[Pcm] = []
        for message in list(self._batch):
            try:
                sounds.append(self._sound(message))
            except TTSError as error:
                self._batch.remove(message)
                self._emit([Encoded(message.key, error=error)])
        if sounds:
            with metrics.VOICE_ENCODE.time():
                codes = self._encoder.encode(sounds)
            batch, self._batch = self._batch, []
            self._emit([Encoded(m.key, VoiceCodes(m.key, one)) for m, one in zip(batch, codes, strict=True)])

    def _sound(self, message: Encode) -> Pcm:
        pcm = fitted(*read(message.path), self._spec.sample_rate, self._spec.channels)
        return pcm if self._prepare is None else self._prepare(pcm)


def fitted(pcm: Pcm, rate: int, sample_rate: int, channels: int) -> Pcm:
    """[samples, any] at `rate` to [samples, channels] at the codec's: the mean for a codec of one channel;
    for one of two, the same twice or the first two of many."""
    if channels == 1:
        pcm = pcm.mean(axis=1, keepdims=True, dtype=np.float32)
    elif pcm.shape[1] == 1:
        pcm = np.repeat(pcm, channels, axis=1)
    else:
        pcm = pcm[:, :channels]
    if rate != sample_rate:
        pcm = soxr.resample(np.ascontiguousarray(pcm), rate, sample_rate)
    return np.ascontiguousarray(pcm, np.float32)
