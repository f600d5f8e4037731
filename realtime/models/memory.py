"""What a model will need of a device's memory, told from its files before anything is loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from realtime.errors import ModelError
from realtime.models.codec_config import CodecConfig
from realtime.models.moss_local import LocalConfig
from realtime.models.moss_nano import NanoConfig
from realtime.models.moss_realtime import RealtimeConfig
from realtime.models.qwen3 import Qwen3Config
from realtime.models.stack import GPT2Config
from realtime.models.tokenizer_codec import pass_frames
from realtime.models.weights import Tensors

GIB = 2**30
MIB = 2**20
GRAPHS_BYTES = GIB  # captured CUDA graphs and their work space
RESERVE_BYTES = 512 * MIB  # activations, kernels' work space and what was not thought of


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes; `kv_per_position` of one row of `max_positions`, the codec's states of one stream and of
    one reference that is being encoded."""

    weights: int
    codec_weights: int
    kv_per_position: int
    max_positions: int
    codec_state: int
    encoder_state: int


@dataclass(frozen=True, slots=True)
class Plan:
    """`lines` say what each part is, how many bytes it takes and how that comes about."""

    num_streams: int
    most_streams: int  # that would fit
    lines: tuple[tuple[str, int, str], ...]
    free_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(size for _, size, _ in self.lines)

    def table(self) -> str:
        rows = [*self.lines, ("together", self.total_bytes, f"of {_amount(self.free_bytes)} free")]
        return "\n".join(f"  {name:<11} {_amount(size):>10}  {how}".rstrip() for name, size, how in rows)

    def check(self, device: torch.device) -> None:
        """Raises ModelError with the numbers if it does not fit."""
        if self.total_bytes <= self.free_bytes:
            return
        parts = " + ".join(f"{name} {_amount(size)}" for name, size, _ in self.lines)
        advice = (
            f"set engine.max_streams to {self.most_streams} or less"
            if self.most_streams
            else "this device is too small for the model"
        )
        raise ModelError(
            f"{self.num_streams} streams need {_amount(self.total_bytes)} of memory on {device}"
            f" ({parts}), {_amount(self.free_bytes)} are free: {advice}"
        )


def plan(sizes: Sizes, *, num_streams: int, num_references: int, graphs: int, free_bytes: int) -> Plan:
    """Rows and slots are one more than there are streams: the last of each is nobody's, for calls of a
    fixed width. `num_references` are encoded side by side."""
    kv = sizes.kv_per_position * sizes.max_positions
    lanes = num_streams + 1
    encoder_lanes = num_references + 1 if num_references else 0
    encoder = encoder_lanes * sizes.encoder_state
    fixed = sizes.weights + sizes.codec_weights + encoder + graphs + RESERVE_BYTES
    per_row = f"{sizes.max_positions} positions x {sizes.kv_per_position / 1024:.1f} KiB"
    lines = (
        ("model", sizes.weights, ""),
        ("codec", sizes.codec_weights, ""),
        ("KV", lanes * kv, f"{lanes} rows x {per_row}"),
        ("codec state", lanes * sizes.codec_state, f"{lanes} slots x {sizes.codec_state / MIB:.2f} MiB"),
        ("references", encoder, f"{encoder_lanes} lanes x {sizes.encoder_state / MIB:.2f} MiB"),
        ("graphs", graphs, ""),
        ("reserve", RESERVE_BYTES, ""),
    )
    used = tuple(line for line in lines if line[1])
    most = (free_bytes - fixed) // (kv + sizes.codec_state) - 1
    return Plan(num_streams, max(most, 0), used, free_bytes)


def sizes_of(
    family: str, folder: Path, codec_folder: Path, device: torch.device, dtype: torch.dtype
) -> Sizes:
    """From config files and the headers of the weights. Raises ModelError."""
    config: LocalConfig | NanoConfig | RealtimeConfig
    match family:
        case "moss_tts_local":
            config = LocalConfig.load(folder)
        case "moss_tts_nano":
            config = NanoConfig.load(folder)
        case _:
            config = RealtimeConfig.load(folder)
    weights = Tensors(folder)
    # Copies of other tensors, which the loaders leave where they are.
    weights.discard("language_model.embed_tokens.weight")
    if isinstance(config, RealtimeConfig) or config.is_tied:
        weights.discard("text_lm_head.weight")
        weights.discard(*(f"audio_lm_heads.{k}.weight" for k in range(config.num_codebooks)))
    codec = CodecConfig.load(codec_folder / "config.json")
    width, frames = dtype.itemsize, pass_frames(device)
    return Sizes(
        weights=weights.num_values * width,
        codec_weights=Tensors(codec_folder).num_values * width,
        kv_per_position=kv_values(config.language) * width,
        max_positions=config.max_positions,
        codec_state=codec.slot_values("decoder", frames) * width,
        encoder_state=codec.slot_values("encoder", frames) * width,
    )


def kv_values(config: Qwen3Config | GPT2Config) -> int:
    """Keys and values of all layers at one position."""
    if isinstance(config, GPT2Config):
        return 2 * config.num_layers * config.hidden_size
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim


def free_bytes(device: torch.device) -> int:
    """What a process can still have there; on a CPU no more than its container may."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit, used = (_lines(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory.current"))
    if limit and used and limit[0].isdigit():
        free = min(free, int(limit[0]) - int(used[0]))
    return free


def _lines(path: Path) -> list[str]:
    """Of a file that Linux has and others have not."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _amount(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / MIB:.1f} MiB"
