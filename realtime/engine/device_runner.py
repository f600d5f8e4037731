"""Runs a batch of an official model on any device.

What a decode step does on the device is one method on tensors that stay where they are: it waits for
nothing, and takes the codes of a row's frame before from a table on the device. Around it the host
uploads which rows, positions and text ids a step has, and downloads what came of it, once each.
"""

from __future__ import annotations

import logging
import time
from functools import partial

import numpy as np
import torch
from torch import Tensor

from realtime.engine.device_sampler import DeviceSampler
from realtime.engine.row import PREFILL_TILE, Row
from realtime.engine.scheduler import Batch, StepOutput
from realtime.engine.text import policy_of
from realtime.graphs import Graphs, bucket_of, buckets, own_stream
from realtime.models.base import Bundle

MIN_WIDTH = 2  # matrix kernels of a CPU round a lone row unlike one in company
SPAN_STEP = 64  # positions; a step attends to a multiple, so that there are few shapes
SHORT_SHARE = 4  # most rows are no longer than this part of the most: their graphs read so much less
FIRST = 0  # in place of a span: the frame that a prompt ends in

logger = logging.getLogger(__name__)


class DeviceRunner:
    """Owns the decode-state pool: KV, sampling state and newest codes of every row, allocated once, and
    one more that is nobody's, for lanes that only fill up a graph's width.

    A lane is a row's place in a step.
    """

    def __init__(self, bundle: Bundle, num_rows: int, device: torch.device) -> None:
        spec = bundle.spec
        num_lanes = max(num_rows, MIN_WIDTH)
        self._device = device
        self._num_codebooks = spec.num_codebooks
        self._policy = policy_of(spec.text, spec.codebook_size)
        self._backbone, self._local = bundle.backbone, bundle.local
        self._num_rows = num_rows
        self._max_positions = _rounded(spec.text.max_positions)
        self._kv = bundle.backbone.new_kv(num_rows, self._max_positions)
        self._sampler = DeviceSampler(
            spec.sampling,
            spec.sampling.rule,
            num_rows,
            device,
            vocab_size=max(spec.audio_vocab_size, spec.codebook_size),
        )
        is_pinned = device.type == "cuda"
        self._host = torch.zeros(num_lanes, 3, dtype=torch.int64, pin_memory=is_pinned)
        # What `step` reads and writes: row, position and text id of each lane; each row's newest
        # codes; and each lane's codes, whether they are finite, and whether they are none but a stop.
        self._lanes = torch.zeros(num_lanes, 3, dtype=torch.int64, device=device)
        self._newest = torch.zeros(num_rows + 1, spec.num_codebooks, dtype=torch.int64, device=device)
        self._answers = torch.zeros(num_lanes, spec.num_codebooks + 2, dtype=torch.int64, device=device)
        self._stream = own_stream(device)
        self._graphs: Graphs | None = None

    @torch.inference_mode()
    def record(self, graphs: Graphs) -> None:
        """From here on steps are graphs, of a few widths and spans; before any row is open."""
        self._sampler.may_skip = False
        short = _rounded(self._max_positions // SHORT_SHARE)
        self._spans = tuple(sorted({short, self._max_positions}))
        self._widths = buckets(self._num_rows)
        self._graphs = graphs
        for width in reversed(self._widths):
            began_s = time.monotonic()
            self._upload((), width)
            for span in reversed(self._spans):
                graphs.add((width, span), partial(self.step, width, span))
            logger.info("graphs of decode steps of %d rows: %.1f s", width, time.monotonic() - began_s)
        width = self._upload((), self._width(1))
        nothing = torch.zeros(1, 1 + self._num_codebooks, dtype=torch.int64, device=self._device)
        self._hidden = self._backbone.prefill(nothing, self._kv, self._num_rows, 0).clone()
        graphs.add((width, FIRST), lambda: self._frame(self._hidden.expand(width, -1), width))

    def open_row(self, row: Row) -> None:
        """A reused row behaves like a fresh one from here on: older KV lies beyond what is attended to."""
        with torch.cuda.stream(self._stream):
            self._sampler.set_row(row.index, row.sampling)

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepOutput:
        """One frame per row."""
        with torch.cuda.stream(self._stream):
            hidden = self._prefill(batch) if batch.phase == "prefill" else None
            if batch.is_partial:
                return StepOutput.nothing(self._num_codebooks)
            width = self._upload(batch.rows, self._width(len(batch.rows)))
            span = FIRST if hidden is not None else self._span(batch.rows)
            recording = self._graphs.find((width, span)) if self._graphs is not None else None
            if recording is not None:
                if hidden is not None:
                    self._hidden.copy_(hidden)
                recording.replay()
            elif hidden is not None:
                self._frame(hidden.expand(width, -1), width)
            else:
                self.step(width, span)
            return self._download(batch.rows)

    # ---- on the device

    def step(self, width: int, span: int) -> None:
        """One decode step of the first `width` lanes, none of which has a position of `span` or more."""
        rows, positions, ids = self._lanes[:width].unbind(1)
        inputs = torch.cat([ids[:, None], self._newest[rows]], 1)
        self._frame(self._backbone.decode(inputs, self._kv, rows, positions, span), width)

    def _frame(self, hidden: Tensor, width: int) -> None:
        """hidden [width, H] -> a frame of each lane, which is also the next step's input."""
        out = self._local.frame(hidden, self._sampler)
        self._sampler.commit(out.codes, out.ok & ~out.stop)
        self._newest.index_copy_(0, self._lanes[:width, 0], out.codes)
        answers = self._answers[:width]
        answers[:, :-2] = out.codes
        answers[:, -2] = out.ok
        answers[:, -1] = out.stop

    def _prefill(self, batch: Batch) -> Tensor:
        """The batch's part of its row's prompt -> last hidden [1, H]. On a CPU tile by tile: then its
        numbers don't depend on where the parts were cut."""
        (row,) = batch.rows
        segment = row.segments[0]
        part = torch.from_numpy(segment.inputs[batch.start : batch.end].astype(np.int64)).to(self._device)
        size = PREFILL_TILE if self._device.type == "cpu" else len(part)
        for at in range(0, len(part), size):
            start = segment.start + batch.start + at
            hidden = self._backbone.prefill(part[at : at + size], self._kv, row.index, start)
        return hidden

    # ---- on the host

    def _width(self, num_rows: int) -> int:
        """How many lanes a step of so many rows has."""
        if self._device.type == "cpu":
            num_rows = max(num_rows, MIN_WIDTH)
        return num_rows if self._graphs is None else bucket_of(num_rows, self._widths)

    def _upload(self, rows: tuple[Row, ...], width: int) -> int:
        """A step's lanes are those of the rows, in order, a lone one twice on a CPU, and then nobody's up
        to `width`."""
        for row in rows:
            if row.segments[0].num_frames == 0:
                self._sampler.start_segment(row.index)
        if len(rows) < MIN_WIDTH and self._device.type == "cpu":
            rows = rows * MIN_WIDTH
        num_pads = width - len(rows)
        self._sampler.prepare(
            [row.index for row in rows] + [self._num_rows] * num_pads,
            [row.num_parts for row in rows] + [0] * num_pads,
            [row.segments[0].num_frames for row in rows] + [0] * num_pads,
        )
        lanes = [(row.index, row.position, *self._policy.ids(row.segments[0])) for row in rows]
        lanes += [(self._num_rows, 0, 0)] * num_pads
        self._host[:width] = torch.tensor(lanes)
        self._lanes[:width].copy_(self._host[:width], non_blocking=True)
        return width

    def _span(self, rows: tuple[Row, ...]) -> int:
        needed = max(row.position for row in rows) + 1
        return _rounded(needed) if self._graphs is None else bucket_of(needed, self._spans)

    def _download(self, rows: tuple[Row, ...]) -> StepOutput:
        answers = self._answers[: len(rows)].cpu().numpy().copy()
        ok = answers[:, -2] != 0
        for row, is_ok in zip(rows, ok, strict=True):
            if not is_ok:
                self._kv.clear(row.index)  # what is not a number would be heard through any mask
        return StepOutput(answers[:, :-2], ok, answers[:, -1] != 0)


def _rounded(positions: int) -> int:
    return -(-positions // SPAN_STEP) * SPAN_STEP
