"""Runs a batch of the embedded voice: step inputs from rows, backbone, local decoder, codes."""

from __future__ import annotations

import numpy as np
import torch

from realtime.engine.row import Row
from realtime.engine.sampler import Sampler
from realtime.engine.scheduler import Batch, StepOutput
from realtime.engine.text import policy_of
from realtime.models.base import Bundle

MIN_WIDTH = 2  # one row alone is computed twice: see the note at Qwen3Backbone


class ModelRunner:
    """Owns the decode-state pool: KV and sampling state, allocated once."""

    def __init__(self, bundle: Bundle, num_rows: int) -> None:
        self.spec = bundle.spec
        self._backbone, self._local = bundle.backbone, bundle.local
        self._sampler = Sampler(bundle.spec.sampling, bundle.spec.codec_codebooks, num_rows)
        self._policy = policy_of(bundle.spec.text, bundle.spec.codebook_size)
        self._kv = bundle.backbone.new_kv(num_rows, bundle.spec.text.max_positions)

    def open_row(self, row: Row) -> None:
        """A reused row behaves like a fresh one from here on."""
        self._sampler.set_row(row.index, row.sampling)

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepOutput:
        """One frame per row."""
        if batch.is_partial:
            (row,) = batch.rows
            part = torch.from_numpy(row.segments[0].inputs[batch.start : batch.end].astype(np.int64))
            self._backbone.prefill(part, self._kv, row.index, batch.start)
            return StepOutput.nothing(self.spec.num_codebooks)
        rows = list(batch.rows)
        num_rows = len(rows)
        if num_rows < MIN_WIDTH:
            rows = rows * MIN_WIDTH
        for row in batch.rows:
            if row.segments[0].num_frames == 0:
                self._sampler.start_segment(row.index)
        self._sampler.prepare(
            [row.index for row in rows],
            [row.num_parts for row in rows],
            [row.segments[0].num_frames for row in rows],
            [self._policy.may_stop(row.segments[0]) for row in rows],
        )
        if batch.phase == "prefill":
            (row,) = batch.rows
            inputs = torch.from_numpy(row.segments[0].inputs[batch.start :].astype(np.int64))
            hidden = self._backbone.prefill(inputs, self._kv, row.index, batch.start).expand(len(rows), -1)
        else:
            inputs = torch.tensor([[*self._policy.ids(row.segments[0]), *row.codes] for row in rows])
            index = torch.tensor([row.index for row in rows])
            positions = torch.tensor([row.position for row in rows])
            hidden = self._backbone.decode(inputs, self._kv, index, positions)
        out = self._local.frame(hidden, self._sampler)
        codes, ok, stop = out.codes.numpy(), out.ok.numpy(), out.stop.numpy()
        self._sampler.commit(codes)
        for row in (row for row, is_ok in zip(batch.rows, ok, strict=False) if not is_ok):
            self._kv.clear(row.index)
        return StepOutput(codes[:num_rows], ok[:num_rows], stop[:num_rows])
