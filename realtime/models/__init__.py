"""Model families: a folder on disk to the Bundle that the stages run."""

from __future__ import annotations

from pathlib import Path

from realtime.models.base import Bundle

EMBEDDED = Path(__file__).parent.parent / "wren"


def load(
    path: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    codec: str = "",
    num_streams: int = 1,
    num_references: int = 0,
) -> Bundle:
    """`wren` is the embedded voice, anything else a model folder or a hub's org/name; `codec` is used
    instead of the one that the model's files name. An official model is loaded only if there is memory
    for so many streams, and so many references encoded at once. Raises ModelError."""
    from realtime.models.loading import load_any  # torch: not for those who need a ModelSpec alone

    return load_any(path, device, dtype, codec, num_streams, num_references)
