"""Imports go one way, and all but the torch executor does without torch."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

SRC = Path(__file__).parent.parent / "src"

# A package imports from its own row and from rows above it.
ROWS = (
    ("errors", "request", "clock", "machine", "plugins", "demo", "dashboard"),
    ("config",),
    ("sched", "kv", "route", "exec", "text", "obs"),
    ("engine",),
    ("server", "gateway", "sim"),
    ("llm", "cli", "testing", "__main__"),
)
ROW_OF = {package: row for row, packages in enumerate(ROWS) for package in packages}
PURE = {
    "sched": ("numpy", "msgspec"),  # msgspec comes with `equipoise.request` anyhow
    "kv": ("numpy", "msgspec"),
    "route": (),
}
HEAVY = ("torch", "transformers", "safetensors", "xgrammar")

FILES = {".".join(path.relative_to(SRC).with_suffix("").parts): path for path in sorted(SRC.rglob("*.py"))}


@functools.cache
def imports(path: Path) -> tuple[str, ...]:
    """Every module that a file imports anywhere, those for type checking included."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            if node.module == "equipoise":
                yield from (f"equipoise.{alias.name}" for alias in node.names)
            else:
                yield node.module or ""


def package_of(module: str) -> str:
    """`equipoise.sched.plan` -> `sched`."""
    return module.split(".")[1]


@pytest.mark.parametrize("module", [name for name in FILES if name != "equipoise.__init__"])
def test_imports_go_one_way(module: str) -> None:
    own = package_of(module)
    assert own in ROW_OF, f"the row of the new package {own} is to be decided: see ROWS"
    for imported in imports(FILES[module]):
        if imported.startswith("equipoise.") and package_of(imported) in ROW_OF:
            assert ROW_OF[package_of(imported)] <= ROW_OF[own], f"{module} imports {imported}"


@pytest.mark.parametrize("module", [name for name in FILES if not name.startswith("equipoise.exec.torch")])
def test_heavy_libraries_stay_under_exec_torch(module: str) -> None:
    for imported in imports(FILES[module]):
        assert imported.split(".")[0] not in HEAVY, f"{module} imports {imported}"


@pytest.mark.parametrize("module", [name for name in FILES if name.split(".")[1] in PURE])
def test_scheduling_imports_numpy_and_msgspec_at_most_and_routing_neither(module: str) -> None:
    allowed = {"equipoise", *PURE[package_of(module)], *sys.stdlib_module_names}
    for imported in imports(FILES[module]):
        assert imported.split(".")[0] in allowed, f"{module} imports {imported}"


def test_core_imports_without_torch() -> None:
    light = [name.removesuffix(".__init__") for name in FILES if not name.startswith("equipoise.exec.torch")]
    light = [name for name in light if not name.endswith("__main__")]
    block = f"import sys; sys.modules.update(dict.fromkeys({HEAVY!r})); "
    code = block + f"import importlib; [importlib.import_module(name) for name in {light!r}]"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
