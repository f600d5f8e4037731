"""The JSON files of a model folder, read strictly."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from realtime.errors import ModelError

MOST = 1 << 20  # more of anything that has a size is a slip of the pen


class Fields:
    """One JSON object of a model folder, read strictly: every miss names file and key."""

    def __init__(self, values: Mapping[str, Any], path: str) -> None:
        self._values = values
        self.path = path

    @classmethod
    def load(cls, path: Path) -> Fields:
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ModelError(f"{path} is missing or can't be read: the folder needs this file") from error
        except ValueError as error:
            raise ModelError(f"{path} is no valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise ModelError(f"{path} must hold a JSON object")
        return cls(values, str(path))

    def get(self, key: str) -> Any:
        if key not in self._values:
            raise ModelError(f"{self.path}: missing key {key!r}")
        return self._values[key]

    def integer(self, key: str, default: int | None = None) -> int:
        """The default where the key is absent or null; without one that is an error, as below."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelError(f"{self.path}: {key!r} must be an integer, got {value!r}")
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        """An integer of 1 to MOST."""
        value = self.integer(key, default)
        if not 1 <= value <= MOST:
            raise ModelError(f"{self.path}: {key!r} must be 1 to {MOST}, got {value}")
        return value

    def above_zero(self, key: str, default: float | None = None) -> float:
        value = self.number(key, default)
        if not 0 < value < math.inf:
            raise ModelError(f"{self.path}: {key!r} must be above 0, got {value}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"{self.path}: {key!r} must be a number, got {value!r}")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise ModelError(f"{self.path}: {key!r} must be a string, got {value!r}")
        return value

    def boolean(self, key: str, default: bool | None = None) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self.path}: {key!r} must be true or false, got {value!r}")
        return value

    def items(self, key: str) -> list[Any]:
        value = self.get(key)
        if not isinstance(value, list):
            raise ModelError(f"{self.path}: {key!r} must be a list, got {value!r}")
        return value

    def object(self, key: str) -> Fields:
        value = self.get(key)
        if not isinstance(value, dict):
            raise ModelError(f"{self.path}: {key!r} must be an object, got {value!r}")
        return Fields(value, f"{self.path}: {key}")

    def has(self, key: str) -> bool:
        return key in self._values

    def _get(self, key: str, default: Any) -> Any:
        value = self._values.get(key, default) if default is not None else self.get(key)
        return default if value is None else value
