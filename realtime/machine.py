"""What a figure was measured on, and when."""

from __future__ import annotations

import contextlib
import os
import platform
import re
from datetime import UTC, datetime
from pathlib import Path


def machine() -> dict[str, str]:
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
        cpu = names[0] if names else cpu
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": cpu,
        "cores": str(cores),
        "python": platform.python_version(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def title() -> str:
    where = machine()
    return f"{where['cpu']}, {where['cores']} cores, {where['date']}"
