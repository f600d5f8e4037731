"""One TOML file, one frozen dataclass per section; unknown keys are refused with the nearest known one."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from realtime.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Sockets. `token` empty = no authentication; `allowed_origins` are browser origins other than
    the server's own that may connect ("*" = any)."""

    host: str = "127.0.0.1"
    port: int = 8000
    token: str = ""
    allowed_origins: tuple[str, ...] = ()
    max_connections: int = 1024
    drain_s: float = 20.0

    def __post_init__(self) -> None:
        _check("server.port", self.port, 0, 65535)
        _check("server.max_connections", self.max_connections, 1, 100_000)
        _check("server.drain_s", self.drain_s, 0, 3600)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """`path` is "wren" for the embedded voice, a model folder, or org/name on the hub. `codec` is a folder
    or org/name to use instead of the codec that the model names. "auto" is the first CUDA device if there
    is one, else the CPU; and bfloat16 on CUDA, float32 on the CPU. The embedded voice runs on the CPU."""

    path: str = "wren"
    codec: str = ""
    device: str = "auto"
    dtype: str = "auto"

    def __post_init__(self) -> None:
        if not re.fullmatch(r"auto|cpu|cuda(:\d{1,2})?", self.device):
            raise ConfigError(f"model.device must be auto, cpu, cuda or cuda:N, got {self.device!r}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"model.dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """`max_streams` is the capacity: that many speak at once; another waits at most `queue_s`."""

    max_streams: int = 16
    queue_s: float = 1.5

    def __post_init__(self) -> None:
        _check("engine.max_streams", self.max_streams, 1, 1024)
        _check("engine.queue_s", self.queue_s, 0, 60)


@dataclass(frozen=True, slots=True)
class VocoderConfig:
    """`max_frames` of one stream are decoded in one step at most while anybody listens. `whole`: nobody
    does before the end, every utterance is made in large chunks (for files, and to compare with)."""

    max_frames: int = 25
    whole: bool = False

    def __post_init__(self) -> None:
        _check("vocoder.max_frames", self.max_frames, 1, 100)


@dataclass(frozen=True, slots=True)
class VoicesConfig:
    """`folder` holds the voices of a model that can clone: NAME.wav (flac, mp3, ogg), and in NAME.txt what
    is said there, if known; empty = none."""

    folder: str = ""


@dataclass(frozen=True, slots=True)
class Config:
    server: ServerConfig = field(default_factory=ServerConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    vocoder: VocoderConfig = field(default_factory=VocoderConfig)
    voices: VoicesConfig = field(default_factory=VoicesConfig)


def load(path: Path | None, overrides: Sequence[str] = ()) -> Config:
    """The defaults, then the file, then `section.key=value` overrides (values as in TOML; a bare
    word is a string). Raises ConfigError."""
    config = Config()
    if path is not None:
        try:
            raw = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path} can't be read: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is no valid TOML: {error}") from error
        config = _merge(config, raw, str(path))
    for override in overrides:
        name, sign, value = override.partition("=")
        section, dot, key = name.strip().partition(".")
        if not sign or not dot:
            raise ConfigError(f"--set takes section.key=value, got {override!r}")
        is_text = isinstance(getattr(getattr(config, section, None), key, None), str)
        config = _merge(config, {section: {key: _value(value.strip(), is_text)}}, "--set")
    return config


def as_dict(config: Config) -> dict[str, dict[str, Any]]:
    """Every effective setting, for the log at start; a token is not shown."""
    shown = {}
    for name in (section.name for section in fields(config)):
        section = getattr(config, name)
        shown[name] = {key.name: getattr(section, key.name) for key in fields(section)}
    if config.server.token:
        shown["server"]["token"] = "(set)"
    return shown


def _value(text: str, is_text: bool) -> Any:
    """As TOML, except that what is wanted as text needs no quotes, also where it looks like a number."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return text if is_text and isinstance(value, int | float) else value


def _merge(config: Config, raw: Mapping[str, Any], source: str) -> Config:
    sections = [section.name for section in fields(config)]
    for name, values in raw.items():
        if name not in sections:
            raise ConfigError(f"{source}: no section [{name}]{_hint(name, sections)}")
        if not isinstance(values, Mapping):
            raise ConfigError(f"{source}: [{name}] must be a section of keys, got {values!r}")
        section = getattr(config, name)
        known = {key.name: getattr(section, key.name) for key in fields(section)}
        changed = {}
        for key, value in values.items():
            if key not in known:
                raise ConfigError(f"{source}: no key {name}.{key}{_hint(key, list(known))}")
            changed[key] = _typed(f"{source}: {name}.{key}", value, known[key])
        config = replace(config, **{name: replace(section, **changed)})
    return config


def _typed(where: str, value: Any, default: Any) -> Any:
    """The value as the type of the default; whole numbers pass as floats, lists of strings as tuples."""
    if isinstance(default, tuple):
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
    elif isinstance(default, float):
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63:
            return float(value)
    elif isinstance(value, type(default)) and isinstance(value, bool) == isinstance(default, bool):
        return value
    shown = "something else" if where.endswith("server.token") else repr(value)
    raise ConfigError(f"{where} must be like {default!r}, got {shown}")


def _hint(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f", did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"


def _check(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} must be from {low} to {high}, got {value}")
