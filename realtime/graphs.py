"""A step's work, recorded once for each shape and launched as a whole: CUDA graphs of one stage.

What is recorded reads and writes tensors that stay where they are; what it makes in between lives in
memory that all graphs of a stage share, for no two of them ever run at once. Nobody here knows what a
step computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from realtime import metrics

WARM_UPS = 2  # runs before a recording: libraries choose kernels and allocate on first use

Shape = tuple[int, ...]
Work = Callable[[], None]


class Recording(Protocol):
    """A torch.cuda.CUDAGraph is one."""

    def replay(self) -> None: ...


def buckets(most: int) -> tuple[int, ...]:
    """The widths that steps are padded to: 1, 2, 4 and so on, and the most itself."""
    return (*(1 << i for i in range((most - 1).bit_length())), most)


def bucket_of(width: int, widths: tuple[int, ...]) -> int:
    """The first that is wide enough; the width itself where none is."""
    return next((bucket for bucket in widths if bucket >= width), width)


def own_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stage's own order of work on a CUDA device; None on a CPU, where a call does its work at once."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


class CudaRecorder:
    """Records work on a CUDA device, into one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Recording:
        with torch.cuda.device(self._device):
            side, own = own_stream(self._device), torch.cuda.current_stream()
            assert side is not None, self._device
            side.wait_stream(own)
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    work()
            own.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile: only what this one does is watched.
            with torch.cuda.graph(graph, self._pool, side, capture_error_mode="thread_local"):
                work()
        return graph


class Graphs:
    """The recordings of one stage, by shape. Record the largest first: the others fit into its memory."""

    def __init__(self, record: Callable[[Work], Recording]) -> None:
        self._record = record
        self._recordings: dict[Shape, Recording] = {}

    def add(self, shape: Shape, work: Work) -> None:
        assert shape not in self._recordings, shape
        self._recordings[shape] = self._record(work)

    def find(self, shape: Shape) -> Recording | None:
        """None, which is counted, where there is none of this shape: then the caller does the work itself."""
        recording = self._recordings.get(shape)
        if recording is None:
            metrics.GRAPH_MISSES.inc()
        return recording
