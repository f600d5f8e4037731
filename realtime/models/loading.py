"""Finds a model and its codec, chooses the loader, and makes sure beforehand that there is memory for it."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch

from realtime.errors import ModelError
from realtime.models import EMBEDDED, hub
from realtime.models.base import Bundle
from realtime.models.fields import Fields

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# What an official checkpoint decodes with where its files do not say.
_CODECS = {
    "moss_tts_local": "OpenMOSS-Team/MOSS-Audio-Tokenizer-v2",
    "moss_tts_nano": "OpenMOSS-Team/MOSS-Audio-Tokenizer-Nano",
    "moss_tts_realtime": "OpenMOSS-Team/MOSS-Audio-Tokenizer",
}

logger = logging.getLogger(__name__)


def load_any(path: str, device: str, dtype: str, codec: str, num_streams: int, num_references: int) -> Bundle:
    """As `realtime.models.load` says."""
    where, values = place(device, dtype)  # before anything is downloaded
    folder = EMBEDDED if path == "wren" else hub.find(path)
    config = Fields.load(folder / "config.json")
    family = _family(folder, config)
    if family == "wren":
        from realtime.models.moss import load_realtime as load_wren

        if device not in ("auto", "cpu") or dtype not in ("auto", "float32") or codec:
            raise ModelError(f"{folder.name} runs on the CPU in float32 with its own codec: leave them unset")
        return _named(load_wren(folder), path)
    codec_folder = hub.find(codec) if codec else hub.find(_codec_name(folder, config, family), folder)
    _check_memory(family, folder, codec_folder, where, values, num_streams, num_references)
    match family:
        case "moss_tts_local":
            from realtime.models.moss_local import load_local as load_family
        case "moss_tts_nano":
            from realtime.models.moss_nano import load_nano as load_family
        case _:
            from realtime.models.moss_realtime import load_realtime as load_family
    return _named(load_family(folder, where, values, codec_folder), path)


def _named(bundle: Bundle, path: str) -> Bundle:
    """The model's name is what it was asked for by: the hub's cache calls a folder by its commit."""
    name = Path(path).name or bundle.spec.name
    return replace(bundle, spec=replace(bundle.spec, name=name))


def _check_memory(
    family: str,
    folder: Path,
    codec_folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    num_streams: int,
    num_references: int,
) -> None:
    from realtime.models import memory

    plan = memory.plan(
        memory.sizes_of(family, folder, codec_folder, device, dtype),
        num_streams=num_streams,
        num_references=num_references,
        graphs=memory.GRAPHS_BYTES if device.type == "cuda" else 0,
        free_bytes=memory.free_bytes(device),
    )
    logger.info("memory on %s with engine.max_streams = %d:\n%s", device, num_streams, plan.table())
    plan.check(device)


def place(device: str, dtype: str) -> tuple[torch.device, torch.dtype]:
    """Where a model runs and in what numbers. Raises ModelError where there is no such device."""
    where = _device(device)
    return where, _DTYPES[("bfloat16" if where.type == "cuda" else "float32") if dtype == "auto" else dtype]


def _device(name: str) -> torch.device:
    """Raises ModelError where there is no such device."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and count == 0):
        return torch.device("cpu")
    index = torch.device("cuda" if name == "auto" else name).index or 0
    if index >= count:
        why = " (this PyTorch is built without CUDA)" if torch.version.cuda is None else ""
        raise ModelError(f"model.device is {name}, but {count} CUDA devices were found{why}: try cpu or auto")
    return torch.device("cuda", index)


def _family(folder: Path, config: Fields) -> str:
    """Which loader a folder needs; ModelError for one that none can read."""
    model_type = _get(config, "model_type")
    if model_type == "moss_tts_realtime" and config.has("text_channels"):
        return "wren"  # its text is a window of several tokens; the official one is a single channel
    if not isinstance(model_type, str) or model_type not in _CODECS:
        raise ModelError(
            f"{folder} is none of the models served here ({', '.join(_CODECS)}): its model_type is"
            f" {model_type!r}, its architectures are {_get(config, 'architectures')!r}"
        )
    return model_type


def _codec_name(folder: Path, config: Fields, family: str) -> str:
    """Where the official code looks for it: the processor's settings, then the model's."""
    places = [config]
    if (processor := _processor(folder)) is not None:
        nested = isinstance(_get(processor, "audio_tokenizer"), dict)
        places = [processor, *([processor.object("audio_tokenizer")] if nested else []), config]
    for place in places:
        for key in ("audio_tokenizer_name_or_path", "audio_tokenizer_pretrained_name_or_path"):
            if isinstance(name := _get(place, key), str):
                return name
    return _CODECS[family]


def _processor(folder: Path) -> Fields | None:
    path = folder / "processor_config.json"
    return Fields.load(path) if path.is_file() else None


def _get(fields: Fields, key: str) -> object:
    return fields.get(key) if fields.has(key) else None
