"""A name for everything that a simulation's numbers depend on, so that those of an earlier run can be trusted."""

from __future__ import annotations

import hashlib
import re
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

import equipoise
from equipoise.sim.scenario import as_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from equipoise.sim.scenario import Scenario

SIMULATED_BY = (
    "*.py",
    "config/*.py",
    "exec/*.py",
    "kv/*.py",
    "route/*.py",
    "sched/*.py",
    "sim/*.py",
    "sim/workload/*.py",
)
"""Sources whose change may change results."""
_FROM_A_MODULE = re.compile(r"([\w.]+):\w+")
"""A policy or rule of one's own, "package.module:name"."""


def digest(scenario: Scenario, folder: Path) -> str:
    """Of all settings but the scenario's name, the contents of the files and modules that they name, this package's
    version and code, and numpy's version, which decides what is drawn."""
    table = as_table(scenario)
    del table["name"]
    read = [[where, _content(path)] for where, text in _strings(table, "") for path in _files(where, text, folder)]
    return hashlib.sha256(msgspec.json.encode([table, read, _code()], order="deterministic")).hexdigest()


def _strings(table: dict[str, Any], where: str) -> Iterator[tuple[str, str]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _strings(value, f"{where}{name}.")
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, str) and each:
                yield f"{where}{name}", each


def _files(where: str, text: str, folder: Path) -> Iterator[Path]:
    """What a setting's text names: a file under `folder`, tables by the beginning of their paths, or a module."""
    path = folder / text
    if where == "cost.tables":
        yield from sorted(path.parent.glob(f"{path.name}*"))
    elif path.is_file():
        yield path
    elif (found := _FROM_A_MODULE.fullmatch(text)) and (source := _source(found[1])):
        yield source


def _source(module: str) -> Path | None:
    """A module's file; looked for where policies are, among what is installed, then in the current folder."""
    here = Path(*module.split(".")).with_suffix(".py")
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is not None and spec.origin is not None:
        return Path(spec.origin)
    return here if here.is_file() else None


def _content(path: Path) -> str:
    try:
        known = path.stat()
        return _content_of(path, known.st_size, known.st_mtime_ns)
    except OSError as error:
        return str(error.strerror)


@lru_cache(maxsize=1024)
def _content_of(path: Path, size: int, mtime_ns: int) -> str:
    """Hashed once for many points, as long as size and time stay."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@cache
def _code() -> list[str]:
    root = Path(equipoise.__file__).parent
    files = sorted(path for pattern in SIMULATED_BY for path in root.glob(pattern))
    return [equipoise.__version__, np.__version__, *map(_content, files)]
