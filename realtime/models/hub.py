"""From the name of a model to its folder: on this machine, or fetched from the Hugging Face hub."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from pathlib import Path

from realtime.errors import ModelError

# Everything a model folder of ours may need; repositories also hold code, which is never run here.
PATTERNS = ("*.json", "*.safetensors", "*.bin", "*.model")

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def find(name: str, beside: Path | None = None) -> Path:
    """A folder, else a hub's "org/name", which is downloaded once and kept in the hub's cache. What the
    files of a model name is in its folder or next to it. Raises ModelError."""
    path = Path(name).expanduser()
    near = [beside / path, beside.parent / path.name] if beside is not None else []
    for folder in (*near, path):
        if folder.is_dir():
            return folder
    if not _ID.fullmatch(name):
        raise ModelError(f"{(near or [path])[0]} is no folder: a model is a folder, or org/name on the hub")
    return _download(name)


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download  # slow to import, and only for models that are fetched

    try:
        return Path(snapshot_download(name, allow_patterns=list(PATTERNS)))
    except Exception as error:  # the client, its HTTP library and its transfer library raise their own
        by_hand = Path(name).absolute()
        raise ModelError(
            f"{name} can't be downloaded: {_reason(name, error)}; or fill {by_hand} by hand,"
            f" where it is looked for first: hf download {name} --local-dir {by_hand}"
        ) from error


def _reason(name: str, error: Exception) -> str:
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    causes = list(_causes(error))
    if any(isinstance(cause, OSError) and cause.errno == errno.ENOSPC for cause in causes) or any(
        "no space left" in str(cause).lower() for cause in causes
    ):
        return f"no space left in {constants.HF_HUB_CACHE}, free some or set HF_HOME to another disk"
    if any(isinstance(cause, GatedRepoError) for cause in causes):
        return "its terms must be accepted on its page of the hub, then log in with hf auth login"
    if any(isinstance(cause, RepositoryNotFoundError) for cause in causes):
        return "there is no such repository, or it is private (hf auth login)"
    if any(isinstance(cause, LocalEntryNotFoundError) for cause in causes):
        return f"the hub can't be reached ({_last_words(causes[-1])}), connect and start again"
    return f"{_last_words(error)}, start again"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what led to it, nearest first."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def _last_words(error: BaseException) -> str:
    """The first line of what it says, without its full stop."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
