"""Logging: one line per record on stderr, the same in server and rank."""

from __future__ import annotations

import logging
import sys

LINE = "%(asctime)s %(levelname)s {process} %(name)s: %(message)s"
TIME = "%Y-%m-%d %H:%M:%S"


def setup_logging(level: str, process: str) -> None:
    """Send records of `level` (debug, info, warning or error) and above to stderr, marked with `process`.

    Touches the "equipoise" loggers only, so that a program that embeds the engine keeps its own set-up.
    Calling it again replaces the earlier set-up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(LINE.format(process=process), TIME))
    root = logging.getLogger("equipoise")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False


def current_level() -> str:
    """The level in force, as `setup_logging` takes it."""
    return logging.getLevelName(logging.getLogger("equipoise").getEffectiveLevel()).lower()
