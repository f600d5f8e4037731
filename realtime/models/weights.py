"""Checkpoint tensors, handed out by name and shape; whatever does not fit is reported at once."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from realtime.errors import ModelError

_MAX_NAMED = 8  # a wrong folder would otherwise fill the screen


class Tensors:
    """A safetensors file as float32 tensors, with a strict account of what was taken.

    `take` never raises: a missing or mis-shaped tensor is recorded and zeros stand in, so that
    `finish` can name everything that is wrong in one ModelError.
    """

    def __init__(self, path: Path, *, ignore: frozenset[str] = frozenset()) -> None:
        self._path = path
        if not path.is_file():
            raise ModelError(f"{path} is missing: the folder needs this file")
        try:
            self._tensors = load_file(path)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} can't be read as safetensors ({error}): copy it again") from error
        for name in ignore:
            self._tensors.pop(name, None)
        self._missing: list[str] = []
        self._misshaped: list[str] = []

    def take(self, name: str, *shape: int) -> Tensor:
        tensor = self._tensors.pop(name, None)
        if tensor is None:
            self._missing.append(f"{name} {list(shape)}")
            return torch.zeros(shape)
        if tuple(tensor.shape) != shape:
            self._misshaped.append(f"{name} is {list(tensor.shape)}, expected {list(shape)}")
            return torch.zeros(shape)
        return tensor.float()

    def finish(self) -> None:
        """Raises ModelError that names missing, mis-shaped and extra tensors."""
        problems = [
            f"{len(names)} {label}: {', '.join(names[:_MAX_NAMED] + ['...'] * (len(names) > _MAX_NAMED))}"
            for label, names in (
                ("missing", self._missing),
                ("of the wrong shape", self._misshaped),
                ("not known", sorted(self._tensors)),
            )
            if names
        ]
        self._tensors.clear()
        if problems:
            raise ModelError(f"{self._path}: tensors don't fit the config; {'; '.join(problems)}")
