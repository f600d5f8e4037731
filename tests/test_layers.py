"""Imports point one way. The table says what each part of the package may import of the rest of it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "realtime"

# The longest matching name on the left counts; every part may import itself.
MAY_IMPORT = {
    "__init__": "",
    "errors": "",
    "config": "errors",
    "audio": "errors",
    "text": "errors",
    "messages": "errors",
    "words": "",
    "cost": "",
    "metrics": "",
    "graphs": "metrics",
    "worker": "messages",
    "models": "errors messages text words",
    "engine": "cost errors graphs messages metrics models.base",
    "vocoder": "cost errors graphs messages metrics models.base",
    "admission": "engine.cost vocoder.cost",
    "preprocess": "errors messages metrics models.base",
    "narration": "messages models.base words",
    "runtime": "admission config errors graphs messages metrics models engine"
    " vocoder preprocess words worker",
    "server": "config errors messages metrics audio words narration models.base runtime",
    "server.fields": "errors",
    "server.wire": "errors server.fields",
    "server.settings": "errors messages audio server.fields",
    "server.protocol": "errors server.fields server.settings server.wire",
    "server.events": "errors server.settings server.wire",
    "client": "errors audio server.wire",
    "wordcheck": "client",
    "subtitles": "errors words",
    "probe": "errors audio server.wire client wordcheck",
    "baselines": "vocoder.policy",
    "simulate": "admission engine.engine engine.row engine.scheduler messages models.base vocoder",
    "plots": "errors",
    "machine": "",
    "compare": "baselines errors machine measure plots simulate",
    "measure": "engine.engine engine.runner messages models models.base simulate vocoder.runner",
    "pairs": "errors client probe",
    "bench": "compare config errors pairs plots client probe speed machine",
    "dummy": "errors messages models",
    "reference_loop": "errors models",
    "speed": "dummy engine errors graphs messages models reference_loop vocoder worker",
    "say": "config errors messages audio narration subtitles words runtime",
    "serve": "config errors runtime server",
    "cli": "*",
    "__main__": "cli",
}
COMPUTES = (
    "graphs models engine.sampler engine.device_sampler engine.runner engine.device_runner vocoder.runner"
    " measure preprocess.encoder runtime dummy reference_loop speed"
)
LIGHT = ["client", "probe", "server.wire", "server.protocol", "server.settings", "server.events"]


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(module: str) -> Iterator[str]:
    """Full names, also of imports inside functions; ours as `realtime.server.wire`."""
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{module}: imports here are absolute"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full.removeprefix("realtime.") in MODULES else node.module


def ours(module: str) -> set[str]:
    names = {name for name in imports(module) if name.split(".")[0] == "realtime"}
    return {name.removeprefix("realtime.") for name in names - {"realtime"}}  # the version is for all


def is_in(module: str, part: str) -> bool:
    return part == "*" or module == part or module.startswith(f"{part}.")


def reachable(module: str) -> set[str]:
    """Everything of ours that importing `module` runs, packages above it included."""
    seen: set[str] = set()
    todo = {module}
    while todo:
        name = todo.pop()
        seen.add(name)
        parents = {".".join(name.split(".")[:depth]) for depth in range(1, name.count(".") + 1)}
        todo |= (ours(name) | parents) - seen
    return seen


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_downward(module: str) -> None:
    row = max((part for part in MAY_IMPORT if is_in(module, part)), key=len, default=None)
    assert row is not None, f"{module} has no row in the table"
    allowed = [row, *MAY_IMPORT[row].split()]
    wrong = {name for name in ours(module) if not any(is_in(name, part) for part in allowed)}
    assert not wrong, f"{module} may import {allowed} of ours, not {sorted(wrong)}"


@pytest.mark.parametrize("module", MODULES)
def test_torch_stays_where_tensors_are(module: str) -> None:
    if not any(is_in(module, part) for part in COMPUTES.split()):
        assert not any(is_in(name, "torch") for name in imports(module))


@pytest.mark.parametrize("module", sorted(MODULES.keys() - {"reference_loop"}))
def test_transformers_is_not_needed(module: str) -> None:
    # but by what the bench compares with, once it is asked to
    assert not any(is_in(name, "transformers") for name in imports(module))


@pytest.mark.parametrize("module", LIGHT)
def test_no_import_of_a_light_module_leads_to_torch(module: str) -> None:
    heavy = {name for name in reachable(module) if any(is_in(found, "torch") for found in imports(name))}
    assert not heavy


def test_client_and_protocol_start_without_torch() -> None:
    # The simulation knows both schedulers, which name tensors in types only.
    modules = ", ".join(f"realtime.{name}" for name in [*LIGHT, "bench", "simulate"])
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
