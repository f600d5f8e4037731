"""Checkpoint tensors, handed out by name and shape; whatever does not fit is reported at once.

A file is opened, not read: each tensor is copied to its device when it is taken, so a model never
stands in memory twice.
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from realtime.errors import ModelError

FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")  # the first one counts
CPU = torch.device("cpu")

_ROOM = 1 << 24  # values that may be missing from the smallest file
_SMALLEST = 1 << 12  # a missing tensor counts as so many: there may be too many small ones
_MAX_NAMED = 8  # a wrong folder would otherwise fill the screen


class _Source(Protocol):
    """An open weight file."""

    def names(self) -> Iterable[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str) -> Tensor:
        """On the CPU, as it is stored; may share memory with the file."""
        ...


class _Safetensors:
    def __init__(self, path: Path) -> None:
        try:
            self._file: Any = safe_open(path, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} can't be read as safetensors ({error}): copy it again") from error

    def names(self) -> Iterable[str]:
        return list(self._file.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(name)
        return tensor


class _Pickle:
    """A `pytorch_model.bin`; only tensors are unpickled, nothing in it is ever run."""

    def __init__(self, path: Path) -> None:
        try:
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
            reason = str(error).splitlines()[0].partition(". ")[0]
            raise ModelError(f"{path} can't be read as PyTorch weights ({reason}): copy it again") from error
        if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
            raise ModelError(f"{path} holds something other than named tensors")
        self._tensors: dict[str, Tensor] = tensors

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str) -> Tensor:
        return self._tensors[name]


class Tensors:
    """The weights of a model folder (one file or shards with an index) or of one file, as `dtype` on
    `device`, with a strict account of what was taken.

    A missing or mis-shaped tensor is recorded and zeros stand in, so that `finish` can name everything
    that is wrong in one ModelError; `take` raises it when they would be far more than all that is stored.
    `ignore` may be there or not.
    """

    def __init__(
        self,
        path: Path,
        *,
        ignore: frozenset[str] = frozenset(),
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
    ) -> None:
        self._path = path
        self._dtype = dtype
        self._device = device
        self._left = _open(path)
        self._missing: list[str] = []
        self._misshaped: list[str] = []
        self._room = max(2 * self.num_values, _ROOM)  # for zeros
        self.discard(*ignore)

    def has(self, name: str) -> bool:
        """Stored, and not taken yet."""
        return name in self._left

    def discard(self, *names: str) -> None:
        """Tensors that nobody needs, such as the stored copy of a tied one; they may be absent."""
        for name in names:
            self._left.pop(name, None)

    @property
    def num_values(self) -> int:
        """Of all tensors that have not been taken, from the files' headers."""
        return sum(math.prod(source.shape(name)) for name, source in self._left.items())

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A copy of its own, `dtype` where it must differ from the model's."""
        dtype = dtype or self._dtype
        source = self._left.pop(name, None)
        if source is None:
            self._missing.append(f"{name} {list(shape)}")
        elif (stored := source.shape(name)) != shape:
            self._misshaped.append(f"{name} is {list(stored)}, expected {list(shape)}")
        else:
            # To the device as it is stored: the bytes are fewer, and the conversion runs there.
            tensor = source.read(name).to(self._device)
            return tensor.to(dtype, copy=self._device.type == "cpu")
        self._room -= max(math.prod(shape), _SMALLEST)
        if self._room < 0:
            self._left.clear()  # they weren't asked for yet
            self.finish()
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def finish(self) -> None:
        """Raises ModelError that names missing, mis-shaped and extra tensors."""
        problems = [
            f"{len(names)} {label}: {', '.join(names[:_MAX_NAMED] + ['...'] * (len(names) > _MAX_NAMED))}"
            for label, names in (
                ("missing", self._missing),
                ("of the wrong shape", self._misshaped),
                ("not known", sorted(self._left)),
            )
            if names
        ]
        self._left.clear()
        if problems:
            raise ModelError(f"{self._path}: tensors don't fit the config; {'; '.join(problems)}")


def _open(path: Path) -> dict[str, _Source]:
    """Every stored tensor and the file that holds it."""
    if path.is_dir():
        found = next((path / name for name in FILES if (path / name).is_file()), None)
        if found is None:
            raise ModelError(
                f"{path} has no weights: the folder needs {', '.join(FILES[:-1])} or {FILES[-1]}"
            )
        path = found
    elif not path.is_file():
        raise ModelError(f"{path} is missing: the folder needs this file")
    if path.name.endswith(".index.json"):
        return _open_shards(path)
    source = _open_file(path)
    return {name: source for name in source.names()}


def _open_file(path: Path) -> _Source:
    return _Pickle(path) if path.suffix == ".bin" else _Safetensors(path)


def _open_shards(index: Path) -> dict[str, _Source]:
    try:
        where = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted({str(shard) for shard in where.values()})
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{index} is no index of shards ({error!r}): copy it again") from error
    missing = [shard for shard in shards if not (index.parent / shard).is_file()]
    if missing:
        raise ModelError(
            f"{index.parent}: {len(missing)} of {len(shards)} weight files are missing:"
            f" {', '.join(missing[:_MAX_NAMED])}; copy them into the folder"
        )
    found: dict[str, _Source] = {}
    for shard in shards:
        source = _open_file(index.parent / shard)
        found |= {name: source for name in source.names()}
    absent = sorted(where.keys() - found.keys())
    if absent:
        raise ModelError(
            f"{index} names {len(absent)} tensors that no file holds: {', '.join(absent[:_MAX_NAMED])};"
            " index and weight files belong to different downloads, copy the folder again"
        )
    return found
