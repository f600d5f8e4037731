"""Model families: a folder on disk to the Bundle that the stages run."""

from __future__ import annotations

from pathlib import Path

from realtime.errors import ModelError
from realtime.models.base import Bundle

EMBEDDED = Path(__file__).parent.parent / "wren"


def load(path: str) -> Bundle:
    """`wren` is the embedded voice, anything else a model folder; raises ModelError."""
    from realtime.models.moss import load_realtime

    folder = EMBEDDED if path == "wren" else Path(path).expanduser()
    if not folder.is_dir():
        raise ModelError(f"{folder} is no folder: model.path is 'wren' (embedded) or a model folder")
    return load_realtime(folder)
