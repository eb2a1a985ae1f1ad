"""The examples that ship with a command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from equipoise.errors import ConfigError

if TYPE_CHECKING:
    from types import ModuleType


def text_of(package: ModuleType, name: str) -> str:
    """The text of the YAML file `name` in `package`; for "list" the names of all and their first lines.

    Raises ConfigError when there is none of that name."""
    folder = Path(next(iter(package.__path__)))
    known = {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    if name == "list":
        return "".join(f"{stem:<20}{_title(path)}\n" for stem, path in known.items())
    if name not in known:
        raise ConfigError(f"example: {name!r} is not known, there are {', '.join(known)}")
    return known[name].read_text(encoding="utf-8")


def _title(path: Path) -> str:
    """The first line, a comment."""
    return path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
