"""Summaries of finished simulations in a file of JSON lines, by digest: what a run need not do again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

import msgspec

from equipoise.errors import ConfigError

if TYPE_CHECKING:
    from io import FileIO
    from pathlib import Path


class _Line(msgspec.Struct):
    digest: str
    key: str
    summary: Mapping[str, int | float | None]


class Kept:
    """The file, open for appending; `summaries` is what it held. Use as a context manager. Without a path: nothing.

    A line that is no whole one, since a process was killed as it wrote, is passed over. Several processes may append.
    Raises ConfigError when the file cannot be written."""

    def __init__(self, path: Path | None) -> None:
        self.summaries: dict[str, dict[str, float]] = {}
        self._file: FileIO | None = None
        if path is not None:
            self._open(path)

    def _open(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = self._file = path.open("a+b", buffering=0)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None
        file.seek(0)
        raw = file.readall() or b""
        self.summaries.update(filter(None, map(_read, raw.split(b"\n"))))
        if raw and not raw.endswith(b"\n"):
            file.write(b"\n")

    def append(self, digest: str, key: str, summary: dict[str, float]) -> None:
        """Keep one more; it is in the file when this returns. NaN is written as null."""
        if self._file is None:
            return
        self._file.write(msgspec.json.encode(_Line(digest, key, summary)) + b"\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


def _read(line: bytes) -> tuple[str, dict[str, float]] | None:
    try:
        found = msgspec.json.decode(line, type=_Line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return found.digest, {name: math.nan if value is None else value for name, value in found.summary.items()}
