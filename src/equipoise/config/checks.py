"""Range checks that every part of the settings uses: an error names the setting, its value and what is allowed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equipoise.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_COUNT = 2**31 - 1
"""Bounds every number of things: columns add and multiply them in 64 bits."""
MAX_SECONDS = 31_536_000.0
"""A year: longer than anything waits, and short enough for every clock."""


def at_least(name: str, value: int | None, low: int, high: int = MAX_COUNT) -> None:
    """Raise ConfigError unless `value` is None or low <= value <= high."""
    if value is not None and value < low:
        raise ConfigError(f"{name}: {value} must be at least {low}")
    if value is not None and value > high:
        raise ConfigError(f"{name}: {value} must be at most {high}")


def seconds(name: str, value: float | None, *, may_be_zero: bool = False) -> None:
    """Raise ConfigError unless `value` is None or a time that can be waited for."""
    if value is None or 0 < value <= MAX_SECONDS or (may_be_zero and value == 0):
        return
    low = "at least 0" if may_be_zero else "more than 0"
    raise ConfigError(f"{name}: {value} must be {low} and at most {MAX_SECONDS:g}")


def needs(switch: str, is_on: bool, name: str, value: float | None) -> None:
    """Raise ConfigError when `value` is given for something that is off: it must not be passed over in silence."""
    if value is not None and not is_on:
        raise ConfigError(f"{name}: {value} has no effect while {switch} is off, switch it on too")


def within(name: str, value: float, low: float, high: float) -> None:
    """Raise ConfigError unless low <= value <= high."""
    if not low <= value <= high:
        raise ConfigError(f"{name}: {value} must be at least {low:g} and at most {high:g}")


def one_of(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise ConfigError unless `value` is one of `choices`."""
    if value not in choices:
        raise ConfigError(f"{name}: {value!r} must be one of {', '.join(choices)}")


def header_value(name: str, value: str | None) -> None:
    """Raise ConfigError unless `value` is None or can be sent in a header; the message does not repeat it."""
    if value is not None and not (value.strip() == value != "" and value.isascii() and value.isprintable()):
        raise ConfigError(f"{name}: it must be ASCII, not empty and without spaces around it: it travels in a header")
