"""Reading fields of a message that somebody else wrote.

Every refusal names the field, what is accepted, and what came; never more than a few characters
of the content. An absent field and an explicit null are the same: not given, the answer is None.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from realtime.errors import BadRequest

MAX_INT = 2**53 - 1  # what a JSON reader in a browser holds exactly
MAX_SHOWN_CHARS = 60


def shown(value: object) -> str:
    """A short description of a received value, fit for an error message (ASCII, one line)."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case str():
            text = ascii(value[:MAX_SHOWN_CHARS])[:MAX_SHOWN_CHARS]
            return text if len(value) < MAX_SHOWN_CHARS else f"{text}... ({len(value)} characters)"
        case int():
            return str(value) if value.bit_length() <= 64 else f"an integer of {value.bit_length()} bits"
        case float():
            return repr(value)
        case bytes():
            return f"{len(value)} bytes of binary"
        case Mapping():
            return f"an object of {len(value)} fields"
        case list() | tuple():
            return f"an array of {len(value)} items"
        case _:
            return f"a value of type {type(value).__name__}"


def is_unicode(text: str) -> bool:
    """Whether `text` can be written as UTF-8, i.e. holds no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class Fields:
    """Typed access to a mapping; `within` is the path shown before a name, such as `format.`."""

    def __init__(self, values: Mapping[str, object], within: str = "") -> None:
        self._values = values
        self._within = within

    def refuse(self, name: str, accepted: str) -> BadRequest:
        """The error for a field that is not what is accepted."""
        value = self._values.get(name)
        received = "it is missing" if value is None else f"got {shown(value)}"
        return BadRequest(f"{self._within}{name} must be {accepted}, {received}")

    def value(self, name: str) -> object:
        return self._values.get(name)

    def string(self, name: str, min_chars: int, max_chars: int) -> str | None:
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, str) or not min_chars <= len(value) <= max_chars or not is_unicode(value):
            raise self.refuse(name, f"a string of {min_chars} to {max_chars} characters")
        return value

    def choice(self, name: str, options: tuple[str, ...]) -> str | None:
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, str) or value not in options:
            raise self.refuse(name, "one of " + ", ".join(options))
        return value

    def integer(self, name: str, low: int = 0, high: int = MAX_INT) -> int | None:
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.refuse(name, f"an integer from {low} to {high}")
        return value

    def number(
        self, name: str, low: float, high: float = math.inf, *, above_low: bool = False
    ) -> float | None:
        """A finite number in [low, high], or in (low, high] with `above_low`."""
        value = self._values.get(name)
        if value is None:
            return None
        bounds = f"{'above' if above_low else 'from'} {low:g}"
        accepted = f"a number {bounds}" if high == math.inf else f"a number {bounds} to {high:g}"
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(name, accepted)
        # A comparison with NaN is false, so NaN lands here too. Infinity has no place on the wire.
        if not low <= value <= min(high, 2.0**63) or (above_low and value == low):
            raise self.refuse(name, accepted)
        return float(value)

    def boolean(self, name: str) -> bool | None:
        value = self._values.get(name)
        if value is None or isinstance(value, bool):
            return value
        raise self.refuse(name, "true or false")

    def mapping(self, name: str) -> Fields | None:
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.refuse(name, "an object")
        return Fields(value, f"{self._within}{name}.")

    def tag(self, name: str) -> str | int | None:
        """Something the client made up and gets back: a short string or an integer."""
        value = self._values.get(name)
        if isinstance(value, bool) or not isinstance(value, str | int | None):
            raise self.refuse(name, "a string of at most 64 characters or an integer")
        if isinstance(value, str):
            return self.string(name, 0, 64)
        return self.integer(name, -MAX_INT, MAX_INT)
