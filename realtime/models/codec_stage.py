"""The stages of MOSS-Audio-Tokenizer, up or down, with an explicit state of slot-indexed key rings.

Every query sees exactly its window whatever the chunks: a pass writes its keys into the rings first,
and a ring is that much longer than the window. Sequences are token-major, [n, tokens, channels].
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from realtime.models.codec_config import PatchConfig, StageConfig, TransformerConfig
from realtime.models.weights import Tensors

LAYER_NORM_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class CodecState:
    """What slots carry from pass to pass, allocated once and written in place. The lane after the last
    slot is nobody's: calls of a fixed width use it for what they don't need."""

    frames: Tensor  # int64 [slots + 1], codec frames so far
    rings: tuple[tuple[Ring, ...], ...]  # per transformer and layer


@dataclass(frozen=True, slots=True)
class Ring:
    """Keys and values of one layer, [(slots + 1) * ring tokens, dim]: token p of a slot is at p modulo
    the ring's length."""

    keys: Tensor
    values: Tensor


class Place(Protocol):
    """Where one pass stands in a transformer's rings; the same in each of its layers."""

    turns: Tensor  # complex64 [n * tokens, 1, head_dim / 2]
    where: Tensor  # int64 [n * tokens], lines of the rings that the pass writes

    def attend(self, q: Tensor, ring: Ring) -> Tensor:
        """q [n, tokens, heads, head_dim] -> [n * tokens, dim]."""
        ...


class Stack:
    """The stages of one half of a codec. `pass_frames` is the most that one pass may hold."""

    def __init__(
        self,
        tensors: Tensors,
        stages: Sequence[StageConfig],
        pass_frames: int,
        device: torch.device,
        dtype: torch.dtype,
        may_lack_projections: bool,
        is_down: bool,
    ) -> None:
        self.pass_frames = pass_frames
        self.device, self.dtype = device, dtype
        self.is_down = is_down
        self.stages: list[PatchConfig | Transformer] = [
            stage
            if isinstance(stage, PatchConfig)
            else Transformer(tensors, stage, pass_frames, device, dtype, may_lack_projections)
            for stage in stages
        ]
        self.transformers = [stage for stage in self.stages if isinstance(stage, Transformer)]

    def new_state(self, slots: int) -> CodecState:
        lanes = slots + 1

        def ring(stage: Transformer) -> Ring:
            shape = (lanes * stage.ring_tokens, stage.config.dim)
            return Ring(
                torch.zeros(shape, dtype=self.dtype, device=self.device),
                torch.zeros(shape, dtype=self.dtype, device=self.device),
            )

        return CodecState(
            frames=torch.zeros(lanes, dtype=torch.int64, device=self.device),
            rings=tuple(
                tuple(ring(stage) for _ in range(stage.config.num_layers)) for stage in self.transformers
            ),
        )

    def reset(self, state: CodecState, slot: int) -> None:
        """Makes a slot equal to a fresh one."""
        for stage, rings in zip(self.transformers, state.rings, strict=True):
            if stage.gathers:  # what a slot has not written itself is masked, which hides no NaN
                lane = slice(slot * stage.ring_tokens, (slot + 1) * stage.ring_tokens)
                for ring in rings:
                    ring.keys[lane] = 0
                    ring.values[lane] = 0
        state.frames[slot] = 0

    def run(self, x: Tensor, state: CodecState, slots: Tensor, num_frames: int) -> Tensor:
        """One pass of at most `pass_frames` frames: x float32 [n, tokens, channels] of the given slots
        (int64 [n], no slot twice but the last lane) -> float32, in the last stage's shape."""
        for output in self.outputs(x, state, slots, num_frames):
            last = output
        return last

    def outputs(self, x: Tensor, state: CodecState, slots: Tensor, num_frames: int) -> Iterator[Tensor]:
        """What each stage makes of the one before."""
        assert 0 < num_frames <= self.pass_frames, num_frames
        frames = state.frames[slots]
        rings = iter(state.rings)
        for stage in self.stages:
            if isinstance(stage, Transformer):
                place = stage.place(slots, frames, num_frames)
                x = stage(x, next(rings), place)
            else:
                x = patch_down(x, stage.size) if self.is_down else patch_up(x, stage.size)
            yield x
        state.frames[slots] = frames + num_frames


def patch_down(x: Tensor, size: int) -> Tensor:
    """[n, T, d] -> [n, T / size, d * size]; the place within the patch runs fastest."""
    n, tokens, dim = x.shape
    return x.view(n, tokens // size, size, dim).transpose(2, 3).reshape(n, tokens // size, dim * size)


def patch_up(x: Tensor, size: int) -> Tensor:
    """[n, T, d * size] -> [n, T * size, d]: undoes `patch_down`."""
    n, tokens, dim = x.shape
    return x.view(n, tokens, dim // size, size).transpose(2, 3).reshape(n, tokens * size, dim // size)


class Layer:
    """One layer's weights. Matrices are transposed, and the layer scale is part of the one before it."""

    def __init__(self, tensors: Tensors, prefix: str, config: TransformerConfig, dtype: torch.dtype) -> None:
        c = config
        f32 = torch.float32

        def matrix(names: Sequence[str], size_out: int, size_in: int, scale: str | None = None) -> Tensor:
            found = next((name for name in names if tensors.has(f"{prefix}.{name}")), names[0])
            weight = tensors.take(f"{prefix}.{found}", size_out, size_in, dtype=f32)
            if scale is not None and c.has_layer_scale:
                weight *= tensors.take(f"{prefix}.{scale}.scale", size_out, dtype=f32).unsqueeze(1)
            return weight.t().contiguous().to(dtype)

        def norm(name: str) -> tuple[Tensor, Tensor]:
            weight, bias = (
                tensors.take(f"{prefix}.{name}.{kind}", c.dim, dtype=f32) for kind in ("weight", "bias")
            )
            return weight, bias

        attention = ("self_attn.in_proj.weight", "self_attn.in_projs.0.weight", "self_attn.in_proj_weight")
        out = ("self_attn.out_proj.weight", "self_attn.out_projs.0.weight")
        self.norm1, self.norm2 = norm("norm1"), norm("norm2")
        self.qkv = matrix(attention, 3 * c.dim, c.dim)
        self.out = matrix(out, c.dim, c.dim, "layer_scale_1")
        self.up = matrix(("ffn.0.weight", "linear1.weight"), c.feed_dim, c.dim)
        self.down = matrix(("ffn.2.weight", "linear2.weight"), c.dim, c.feed_dim, "layer_scale_2")


class Transformer:
    """A causal stage. Matrix products and attention run in `dtype`, sums and norms in float32."""

    def __init__(
        self,
        tensors: Tensors,
        config: TransformerConfig,
        pass_frames: int,
        device: torch.device,
        dtype: torch.dtype,
        may_lack_projections: bool,
    ) -> None:
        c = config
        self.config = config
        self.device, self.dtype = device, dtype
        self.gathers = device.type != "cpu"
        self.ring_tokens = c.ring_tokens(pass_frames)

        def projection(name: str, size_out: int, size_in: int) -> Tensor | None:
            name = f"{c.name}.{name}.weight"
            if may_lack_projections and size_in == size_out and not tensors.has(name):
                return None
            return tensors.take(name, size_out, size_in, dtype=torch.float32).t().contiguous().to(dtype)

        self.input = projection("input_proj", c.dim, c.input_dim)
        self.output = projection("output_proj", c.output_dim, c.dim)
        self.layers = [
            Layer(tensors, f"{c.name}.transformer.layers.{i}", c, dtype) for i in range(c.num_layers)
        ]
        half = torch.arange(c.head_dim // 2, dtype=torch.float32)
        self.frequencies = torch.exp(half * (-math.log(c.max_period) * 2 / c.head_dim)).to(device)
        most_tokens = 0 if self.gathers else pass_frames * c.tokens_per_frame
        self.masks = mask_table(c.window, most_tokens, self.ring_tokens).to(dtype)

    def __call__(self, x: Tensor, rings: Sequence[Ring], place: Place) -> Tensor:
        """x float32 [n, T, input_dim] -> float32 [n, T, output_dim]."""
        c = self.config
        n, tokens, _ = x.shape
        heads = c.num_heads
        x = x.reshape(n * tokens, -1)
        if self.input is not None:
            x = torch.mm(x.to(self.dtype), self.input).float()
        for layer, ring in zip(self.layers, rings, strict=True):
            h = F.layer_norm(x, (c.dim,), *layer.norm1, eps=LAYER_NORM_EPS).to(self.dtype)
            qkv = torch.mm(h, layer.qkv)
            pairs = qkv[:, : 2 * c.dim].float().view(n * tokens, 2 * heads, c.head_dim // 2, 2)
            turned = torch.view_as_real(torch.view_as_complex(pairs) * place.turns).to(self.dtype)
            q, k = turned.view(n * tokens, 2, c.dim).unbind(1)
            ring.keys.index_copy_(0, place.where, k)
            ring.values.index_copy_(0, place.where, qkv[:, 2 * c.dim :])
            attended = place.attend(q.view(n, tokens, heads, c.head_dim), ring)
            x = self._add(x, attended, layer.out)
            h = F.layer_norm(x, (c.dim,), *layer.norm2, eps=LAYER_NORM_EPS).to(self.dtype)
            x = self._add(x, F.gelu(torch.mm(h, layer.up)), layer.down)
        if self.output is not None:
            x = torch.mm(x.to(self.dtype), self.output).float()
        return x.view(n, tokens, c.output_dim)

    def _add(self, x: Tensor, h: Tensor, weight: Tensor) -> Tensor:
        return torch.addmm(x, h, weight) if self.dtype is torch.float32 else x + torch.mm(h, weight)

    def place(self, slots: Tensor, frames: Tensor, num_frames: int) -> Place:
        """Of the next `num_frames` frames in slots that have had `frames`, both int64 [n]."""
        tokens = num_frames * self.config.tokens_per_frame
        positions = (frames * self.config.tokens_per_frame).unsqueeze(1) + torch.arange(
            tokens, device=self.device
        )  # [n, T]
        angles = positions.view(-1, 1).float() * self.frequencies
        turns = torch.view_as_complex(torch.stack((angles.cos(), angles.sin()), -1)).unsqueeze(1)
        where = (slots.unsqueeze(1) * self.ring_tokens + positions % self.ring_tokens).view(-1)
        kind = _GatherPlace if self.gathers else _ViewPlace
        return kind(self, turns, where, slots, positions)


def mask_table(window: int, max_tokens: int, ring: int) -> Tensor:
    """[max_tokens, 2 * ring]: in row i, column j + ring - s is 0 where the token written at ring place
    j is among the `window` that query i of a pass starting at place s sees, -inf elsewhere."""
    back = torch.arange(max_tokens).unsqueeze(1) - torch.arange(-ring, ring)
    return torch.zeros(max_tokens, 2 * ring).masked_fill_(back % ring >= window, -math.inf)


class _ViewPlace:
    """Attention in the rings themselves, slot by slot and only over what a slot has written: a
    processor would spend more time on copies of a window than on attending to it."""

    def __init__(
        self, stage: Transformer, turns: Tensor, where: Tensor, slots: Tensor, positions: Tensor
    ) -> None:
        self.turns, self.where = turns, where
        ring, tokens = stage.ring_tokens, positions.shape[1]
        self._lanes: list[tuple[slice, Tensor]] = []
        for slot, start in zip(slots.tolist(), positions[:, 0].tolist(), strict=True):
            length = min(start + tokens, ring)
            first = ring - start % ring
            mask = stage.masks[:tokens, first : first + length]
            self._lanes.append((slice(slot * ring, slot * ring + length), mask))

    def attend(self, q: Tensor, ring: Ring) -> Tensor:
        n, tokens, heads, head_dim = q.shape
        attended = [
            F.scaled_dot_product_attention(
                q[lane].transpose(0, 1).unsqueeze(0),
                ring.keys[span].view(1, -1, heads, head_dim).transpose(1, 2),
                ring.values[span].view(1, -1, heads, head_dim).transpose(1, 2),
                attn_mask=mask,
            )
            for lane, (span, mask) in enumerate(self._lanes)
        ]
        joined = attended[0] if n == 1 else torch.cat(attended)
        return joined.transpose(1, 2).reshape(n * tokens, heads * head_dim)


class _GatherPlace:
    """Attention over copies of whole rings: shapes follow from n and T alone and nothing waits for the
    device, so a graph can be captured of it."""

    def __init__(
        self, stage: Transformer, turns: Tensor, where: Tensor, slots: Tensor, positions: Tensor
    ) -> None:
        self.turns, self.where = turns, where
        self._slots = slots
        ring = stage.ring_tokens
        back = (positions.unsqueeze(2) - torch.arange(ring, device=positions.device)) % ring  # [n, T, ring]
        # Before a ring is full, its far end would stand for positions before the first.
        seen = (back < stage.config.window) & (back <= positions.unsqueeze(2))
        self._mask = (
            torch.zeros(seen.shape, dtype=stage.dtype, device=seen.device)
            .masked_fill_(~seen, -math.inf)
            .unsqueeze(1)
        )

    def attend(self, q: Tensor, ring: Ring) -> Tensor:
        n, tokens, heads, head_dim = q.shape
        length = self._mask.shape[-1]
        keys = ring.keys.view(-1, length, heads, head_dim)[self._slots].transpose(1, 2)
        values = ring.values.view(-1, length, heads, head_dim)[self._slots].transpose(1, 2)
        attended = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=self._mask)
        return attended.transpose(1, 2).reshape(n * tokens, heads * head_dim)
