"""The only place that knows about threads: one inbox, one thread, one stage."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

M = TypeVar("M")
M_contra = TypeVar("M_contra", contravariant=True)

MAX_FAILED = 8  # steps in a row: no stream's own fault any more
FATAL = ("CUDA error", "device-side assert")  # after these every call on the device fails

logger = logging.getLogger(__name__)


class Stage(Protocol[M_contra]):
    """`step` returns seconds until the next one is due: 0 = now, None = only when a message comes.
    `fail` is told what `handle` or `step` raised, and lets go of what that step had in hand."""

    def handle(self, message: M_contra) -> None: ...

    def step(self) -> float | None: ...

    def fail(self, error: Exception) -> None: ...

    def close(self) -> None: ...


def _nothing(name: str, error: Exception) -> None:
    pass


class Worker(Generic[M]):
    """Runs a stage on its own thread. `put` may be called from any thread and never waits; the
    inbox needs no bound because permits bound the streams and each sends a bounded text. No step
    comes between messages that were put together.

    A step that raises closes its own streams and the next ones run. If the device is gone, or nothing
    but failures comes, the stage is broken: `on_broken` is called once, on this thread, and no step runs
    any more.
    """

    def __init__(
        self, name: str, stage: Stage[M], on_broken: Callable[[str, Exception], None] = _nothing
    ) -> None:
        self._stage = stage
        self._on_broken = on_broken
        self._num_failed = 0  # steps, since one did something
        self._is_broken = False
        self._inbox: queue.SimpleQueue[tuple[M, ...] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._name = name

    @property
    def depth(self) -> int:
        return self._inbox.qsize()

    @property
    def name(self) -> str:
        return self._name

    @property
    def cpu_s(self) -> float:
        """CPU time of the thread; 0 where it does not run or the system can't tell."""
        number = self._thread.ident
        if number is None or not self._thread.is_alive() or not hasattr(time, "pthread_getcpuclockid"):
            return 0.0
        return time.clock_gettime(time.pthread_getcpuclockid(number))

    def start(self) -> None:
        self._thread.start()

    def put(self, *messages: M) -> None:
        self._inbox.put(messages)

    def run_queued(self) -> None:
        """Handles what is queued and steps until nothing is due, on the caller's thread; only
        before `start`."""
        while not self._inbox.empty():
            messages = self._inbox.get()
            assert messages is not None
            for message in messages:
                self._stage.handle(message)
        while self._stage.step() == 0.0:
            pass

    def stop(self, timeout_s: float) -> None:
        """Asks the loop to end after what is queued; a stage that hangs is left behind."""
        self._inbox.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.error("%s did not stop within %.1f s", self._name, timeout_s)

    def _loop(self) -> None:
        wait_s: float | None = None
        while True:
            try:
                messages = self._inbox.get(wait_s != 0.0, wait_s)
                while True:
                    if messages is None:
                        self._stage.close()
                        return
                    for message in messages:
                        self._handle(message)
                    messages = self._inbox.get_nowait()
            except queue.Empty:
                pass
            wait_s = None if self._is_broken else self._step()

    def _step(self) -> float | None:
        try:
            wait_s = self._stage.step()
        except Exception as error:  # a step belongs to its streams; the stage goes on
            logger.exception("%s: step failed", self._name)
            self._stage.fail(error)
            self._num_failed += 1
            if self._num_failed >= MAX_FAILED or any(mark in str(error) for mark in FATAL):
                self._is_broken = True  # streams can still be ended, no more is computed
                self._on_broken(self._name, error)
            return 0.0
        if wait_s == 0.0:
            self._num_failed = 0
        return wait_s

    def _handle(self, message: M) -> None:
        try:
            self._stage.handle(message)
        except Exception as error:
            logger.exception("%s: could not take %s", self._name, type(message).__name__)
            self._stage.fail(error)
