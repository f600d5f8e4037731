"""The residual quantizer of MOSS-Audio-Tokenizer, always in float32.

An entry is chosen by the angle between directions, but stands for its raw vector through a projection
with a bias, so fewer codebooks also mean another constant.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from realtime.models.codec_config import QuantizerConfig
from realtime.models.weights import Tensors


class Quantizer:
    """The first `num_quantizers` codebooks."""

    def __init__(self, tensors: Tensors, config: QuantizerConfig, num_quantizers: int) -> None:
        c = config
        assert 0 < num_quantizers <= c.num_quantizers, (num_quantizers, c.num_quantizers)
        self.num_quantizers, self.codebook_size = num_quantizers, c.codebook_size
        self.input = _Projection.take(tensors, "quantizer.input_proj", c.rvq_dim, c.input_dim)
        output = _Projection.take(tensors, "quantizer.output_proj", c.output_dim, c.rvq_dim)
        # All of them are taken, so that a checkpoint that lacks one is refused.
        self.codebooks = [_Codebook(tensors, f"quantizer.quantizers.{i}", c) for i in range(c.num_quantizers)]
        del self.codebooks[num_quantizers:]
        # What a code adds to the decoder's input, the projections included.
        self.table = torch.cat([output.linear(book.entries()) for book in self.codebooks])
        self.bias = output.bias
        self.offsets = torch.arange(num_quantizers, device=self.table.device).unsqueeze(1) * c.codebook_size

    def decode(self, codes: Tensor) -> Tensor:
        """int64 [n, C, T] of the first C codebooks -> float32 [n, T, output_dim]. Codes beyond a
        codebook are taken for its nearest entry: they must not read another memory."""
        num_codebooks = codes.shape[1]
        lines = codes.clamp(0, self.codebook_size - 1) + self.offsets[:num_codebooks]
        z = F.embedding(lines, self.table).sum(1)
        return z if self.bias is None else z + self.bias

    def encode(self, x: Tensor) -> Tensor:
        """float32 [n, T, input_dim] -> int64 [n, T, num_quantizers]."""
        rest = self.input(x)
        codes = []
        for book in self.codebooks:
            code = book.nearest(rest)
            rest = rest - book.output(F.embedding(code, book.raw))
            codes.append(code)
        return torch.stack(codes, -1)


class _Codebook:
    def __init__(self, tensors: Tensors, prefix: str, config: QuantizerConfig) -> None:
        c = config
        self.input = _Projection.take(tensors, f"{prefix}.in_proj", c.codebook_dim, c.rvq_dim)
        self.output = _Projection.take(tensors, f"{prefix}.out_proj", c.rvq_dim, c.codebook_dim)
        shape = (c.codebook_size, c.codebook_dim)
        self.raw = tensors.take(f"{prefix}.codebook.weight", *shape, dtype=torch.float32)
        directions = F.normalize(self.raw, dim=-1)
        self._directions = directions.t().contiguous()
        self._lengths = directions.square().sum(-1)  # 1 but for rounding, which can decide between two

    def entries(self) -> Tensor:
        """float32 [codebook_size, rvq_dim]: what each code stands for."""
        return self.output(self.raw)

    def nearest(self, x: Tensor) -> Tensor:
        """[n, T, rvq_dim] -> int64 [n, T]; of equally near entries the first."""
        direction = F.normalize(self.input(x), dim=-1)
        distances = (
            direction.square().sum(-1, keepdim=True) - 2 * (direction @ self._directions) + self._lengths
        )
        return distances.argmin(-1)


class _Projection:
    """A dense layer stored as a convolution of width 1 with weight norm; nothing between equal sizes."""

    def __init__(self, weight: Tensor | None, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    @classmethod
    def take(cls, tensors: Tensors, name: str, size_out: int, size_in: int) -> _Projection:
        if size_out == size_in:
            return cls(None, None)
        names = ("parametrizations.weight.original0", "parametrizations.weight.original1")
        if tensors.has(f"{name}.weight_g"):
            names = ("weight_g", "weight_v")
        length = tensors.take(f"{name}.{names[0]}", size_out, 1, 1, dtype=torch.float32)
        direction = tensors.take(f"{name}.{names[1]}", size_out, size_in, 1, dtype=torch.float32)
        bias = tensors.take(f"{name}.bias", size_out, dtype=torch.float32)
        norm = torch.linalg.vector_norm(direction, dim=1, keepdim=True)
        return cls((length * direction / norm).squeeze(-1), bias)

    def linear(self, x: Tensor) -> Tensor:
        """Without the bias."""
        return x if self.weight is None else F.linear(x, self.weight)

    def __call__(self, x: Tensor) -> Tensor:
        return x if self.weight is None else F.linear(x, self.weight, self.bias)
