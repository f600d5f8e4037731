"""Decoder layers of the official families, for any device and float type; the memory is the caller's.

Two kinds of layer, Qwen3's and GPT2's, differ in norms, biases and MLP; everything around them is one:
q, k and v are one product, and heads that turn in interleaved pairs are stored so that they turn in halves.
Norms and angles are float32. Nothing here waits for the device.

NOTE: on a CPU a product of one row rounds differently from a product of several; with two rows or more
each row's result is the same to the bit at any width. Callers that promise "batched equals alone" never
pass a single row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from realtime.models.qwen3 import Qwen3Config
from realtime.models.weights import Tensors

FILL = 32  # numbers that a CPU treats at once

Rope = tuple[Tensor, Tensor]  # cosine and signed sine, [n, 1, head_dim]
At = Tensor | slice  # positions of the rows of a step


@dataclass(frozen=True, slots=True)
class GPT2Config:
    """`rope_base` None: learned positions, a table of `num_positions` rows."""

    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    activation: Literal["silu", "gelu_new"]
    layer_norm_epsilon: float
    rope_base: float | None
    num_positions: int


class Attend(Protocol):
    def __call__(self, layer: int, q: Tensor, new: Tensor) -> Tensor:
        """Stores `new`, keys and values [n, 2 * kv_heads, d] of one position of each of n rows, and
        attends with q [n, kv_heads, group, d] up to it -> [n, kv_heads * group * d]."""
        ...


# ---- parts of a layer


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; weight [dim] or, of heads, [heads, dim]."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight, self._eps, self._dim = weight, eps, weight.shape[-1]
        # On a CPU the library's own is seven operators, with its square root moved into the weight four.
        self._is_split = weight.device.type == "cpu" and weight.dtype == torch.float32
        self._gain = weight * self._dim**0.5
        self._floor = torch.tensor((self._dim * eps) ** 0.5)

    def __call__(self, x: Tensor) -> Tensor:
        if self._is_split:
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            return (x / torch.hypot(length, self._floor)).mul_(self._gain)
        return F.rms_norm(x, (self._dim,), None, self._eps) * self._weight


class LayerNorm:
    def __init__(self, tensors: Tensors, prefix: str, dim: int, eps: float) -> None:
        self.weight, self._bias = tensors.take(f"{prefix}.weight", dim), tensors.take(f"{prefix}.bias", dim)
        self._dim, self._eps = dim, eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self._dim,), self.weight, self._bias, self._eps)


class Linear:
    """x @ weight.T + bias, onto a residual if there is one."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        # [in, out]; other devices read the stored layout as fast and spare the copy.
        self._weight = weight.t().contiguous() if weight.device.type == "cpu" else weight.t()
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        if self._bias is None:
            return torch.mm(x, self._weight)
        return torch.addmm(self._bias, x, self._weight)

    def onto(self, residual: Tensor, x: Tensor) -> Tensor:
        out = torch.addmm(residual, x, self._weight)
        return out if self._bias is None else out.add_(self._bias)


def rope_table(base: float, head_dim: int, num_positions: int, like: Tensor) -> Rope:
    """Cosines and sines [positions, 1, head_dim] of a head whose halves turn against each other; the
    sine of the first half is negative. Angles are float32, as in the official modules."""
    step = 1.0 / base ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    angles = torch.outer(torch.arange(num_positions).float(), step)
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    return torch.cat((cos, cos), -1).to(like), torch.cat((-sin, sin), -1).to(like)


def turn_(x: Tensor, rope: Rope | None) -> None:
    """x [n, heads, d] by its positions' angles, in place."""
    if rope is not None:
        cos, sin = rope
        torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin, out=x)


def halves(head_dim: int) -> Tensor:
    """The order in which interleaved pairs (0, 1), (2, 3) ... become halves: 0, 2 ... 1, 3 ..."""
    return torch.arange(head_dim).view(-1, 2).t().reshape(-1)


# ---- layers


class Qwen3Layer:
    def __init__(self, tensors: Tensors, prefix: str, config: Qwen3Config) -> None:
        c = config
        self._shape = (c.num_kv_heads, c.num_heads // c.num_kv_heads, c.head_dim)
        self._num_turned = c.num_heads + c.num_kv_heads

        def weight(name: str, *shape: int) -> Tensor:
            return tensors.take(f"{prefix}.{name}.weight", *shape)

        def norm(name: str) -> RMSNorm:
            return RMSNorm(weight(name, c.hidden_size), c.rms_norm_eps)

        def bias(name: str, size: int) -> list[Tensor]:
            return [tensors.take(f"{prefix}.self_attn.{name}.bias", size)] if c.attention_bias else []

        heads = {"q_proj": c.num_heads, "k_proj": c.num_kv_heads, "v_proj": c.num_kv_heads}
        sizes = {name: number * c.head_dim for name, number in heads.items()}
        biases = [part for name, size in sizes.items() for part in bias(name, size)]
        self._qkv = Linear(
            torch.cat([weight(f"self_attn.{name}", size, c.hidden_size) for name, size in sizes.items()]),
            torch.cat(biases) if biases else None,
        )
        q_norm = weight("self_attn.q_norm", c.head_dim).expand(c.num_heads, -1)
        k_norm = weight("self_attn.k_norm", c.head_dim).expand(c.num_kv_heads, -1)
        self._head_norm = RMSNorm(torch.cat((q_norm, k_norm)), c.rms_norm_eps)
        out_bias = bias("o_proj", c.hidden_size)
        self._out = Linear(
            weight("self_attn.o_proj", c.hidden_size, c.num_heads * c.head_dim),
            out_bias[0] if out_bias else None,
        )
        inner = c.intermediate_size
        gate, up = (weight(f"mlp.{name}_proj", inner, c.hidden_size) for name in ("gate", "up"))
        self._gate_up = Linear(torch.cat((gate, up)))
        self._down = Linear(weight("mlp.down_proj", c.hidden_size, inner))
        self._norm_in, self._norm_mlp = norm("input_layernorm"), norm("post_attention_layernorm")

    def project(self, x: Tensor, rope: Rope | None) -> tuple[Tensor, Tensor]:
        """x [n, H] -> q [n, kv_heads, group, d] and new keys and values [n, 2 * kv_heads, d]."""
        kv_heads, group, dim = self._shape
        qkv = self._qkv(self._norm_in(x)).view(x.shape[0], -1, dim)
        turned = self._head_norm(qkv[:, : self._num_turned])
        turn_(turned, rope)
        new = torch.cat((turned[:, kv_heads * group :], qkv[:, self._num_turned :]), 1)
        return turned[:, : kv_heads * group].view(-1, kv_heads, group, dim), new

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Output projection, MLP and both residuals; attended [n, heads * d]."""
        x = self._out.onto(x, attended)
        gate, up = self._gate_up(self._norm_mlp(x)).chunk(2, 1)
        return self._down.onto(x, F.silu(gate).mul_(up))


class GPT2Layer:
    """LayerNorm and biases everywhere, a plain MLP; linear weights are [out, in]."""

    def __init__(self, tensors: Tensors, prefix: str, config: GPT2Config) -> None:
        c, hidden = config, config.hidden_size
        self._num_heads, self._dim = c.num_heads, hidden // c.num_heads
        self._act = F.silu if c.activation == "silu" else _gelu_new

        def take(name: str, size: int, source: int) -> tuple[Tensor, Tensor]:
            at = f"{prefix}.{name}"
            return tensors.take(f"{at}.weight", size, source), tensors.take(f"{at}.bias", size)

        self._norm_in = LayerNorm(tensors, f"{prefix}.ln_1", hidden, c.layer_norm_epsilon)
        self._norm_mlp = LayerNorm(tensors, f"{prefix}.ln_2", hidden, c.layer_norm_epsilon)
        qkv = take("attn.c_attn", 3 * hidden, hidden)
        if c.rope_base is not None:
            qkv = (_with_halves(qkv[0], self._dim), _with_halves(qkv[1], self._dim))
        self._qkv = Linear(*qkv)
        self._out = Linear(*take("attn.c_proj", hidden, hidden))
        up, up_bias = take("mlp.fc_in", c.intermediate_size, hidden)
        down, down_bias = take("mlp.fc_out", hidden, c.intermediate_size)
        # A CPU's activation rounds differently where numbers don't fill its registers; zeros do.
        extra = -c.intermediate_size % FILL
        self._up = Linear(F.pad(up, (0, 0, 0, extra)), F.pad(up_bias, (0, extra)))
        self._down = Linear(F.pad(down, (0, extra)), down_bias)

    def project(self, x: Tensor, rope: Rope | None) -> tuple[Tensor, Tensor]:
        """As of Qwen3Layer, with as many key heads as heads."""
        heads = self._num_heads
        qkv = self._qkv(self._norm_in(x)).view(x.shape[0], 3 * heads, self._dim)
        turn_(qkv[:, : 2 * heads], rope)
        return qkv[:, :heads].unsqueeze(2), qkv[:, heads:]

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        x = self._out.onto(x, attended)
        return self._down.onto(x, self._act(self._up(self._norm_mlp(x))))


def _gelu_new(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _with_halves(qkv: Tensor, head_dim: int) -> Tensor:
    """Rows of c_attn, q and k reordered from interleaved pairs to halves."""
    q, k, v = qkv.chunk(3)
    order = halves(head_dim).to(qkv.device)
    turned = [part.view(-1, head_dim, *part.shape[1:])[:, order].reshape(part.shape) for part in (q, k)]
    return torch.cat((*turned, v))


# ---- a stack of them


class Stack:
    """Layers and the final norm; a caller brings embedded rows and the memory."""

    def __init__(
        self,
        layers: Sequence[Qwen3Layer | GPT2Layer],
        norm: RMSNorm | LayerNorm,
        heads: tuple[int, int],
        rope: Rope | None,
        learned: Tensor | None = None,
    ) -> None:
        self._layers = layers
        self.norm = norm
        self.num_kv_heads, self.head_dim = heads
        self._rope = rope
        self._learned = learned  # [positions, H]

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def run(self, x: Tensor, at: At, attend: Attend) -> Tensor:
        """x [n, H], a new tensor, at one position each -> [n, H], before the final norm."""
        if self._learned is not None:
            x = x + self._learned[at]
        rope = None if self._rope is None else (self._rope[0][at], self._rope[1][at])
        for i, layer in enumerate(self._layers):
            q, new = layer.project(x, rope)
            x = layer.finish(x, attend(i, q, new))
        return x


def qwen3_stack(tensors: Tensors, config: Qwen3Config, num_positions: int, layers: str, norm: str) -> Stack:
    """`layers` and `norm` are the tensor names in front of the layer's number and of `.weight`."""
    made = [Qwen3Layer(tensors, f"{layers}.{i}", config) for i in range(config.num_layers)]
    weight = tensors.take(f"{norm}.weight", config.hidden_size)
    rope = rope_table(config.rope_theta, config.head_dim, num_positions, weight)
    final = RMSNorm(weight, config.rms_norm_eps)
    return Stack(made, final, (config.num_kv_heads, config.head_dim), rope)


def gpt2_stack(tensors: Tensors, config: GPT2Config, num_positions: int, prefix: str) -> Stack:
    """`num_positions` are those in use; a learned table may have more."""
    c = config
    layers = [GPT2Layer(tensors, f"{prefix}.h.{i}", config) for i in range(c.num_layers)]
    norm = LayerNorm(tensors, f"{prefix}.ln_f", c.hidden_size, c.layer_norm_epsilon)
    heads = (c.num_heads, c.hidden_size // c.num_heads)
    if c.rope_base is None:
        learned = tensors.take(f"{prefix}.wpe.weight", c.num_positions, c.hidden_size)
        return Stack(layers, norm, heads, None, learned)
    return Stack(layers, norm, heads, rope_table(c.rope_base, heads[1], num_positions, norm.weight))
