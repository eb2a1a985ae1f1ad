"""Tables as files hold them into dataclasses of settings: merged, overridden, checked to the last key."""

from __future__ import annotations

import dataclasses
import difflib
from functools import cache
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from equipoise.errors import ConfigError


def merge(under: dict[str, Any], over: dict[str, Any], where: str) -> dict[str, Any]:
    """`over` on top of `under`, whose names have _; `where`, "fleet.", is for errors."""
    merged = dict(under)
    for key, value in over.items():
        name = key.replace("-", "_")
        if isinstance(merged.get(name), dict):
            if not isinstance(value, dict):
                raise ConfigError(f"{where}{key}: {value!r} must be a table of settings")
            merged[name] = merge(merged[name], value, f"{where}{key}.")
        else:
            merged[name] = value
    return merged


def override(table: dict[str, Any], text: str) -> None:
    """Do to `table` what "fleet.ranks=8" says. Raises ConfigError when it is not like that."""
    path, separator, value = text.partition("=")
    if not separator:
        raise ConfigError(f"set: {text!r} must be like fleet.ranks=8")
    *sections, name = path.strip().replace("-", "_").split(".")
    for each in sections:
        inner = table.setdefault(each, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"set: {path}: {each} is no section")
        table = inner
    table[name] = _value(value.strip())


def _value(text: str) -> Any:
    """What JSON or Python would make of a word, or the word: "none" is a policy's name, null is nothing."""
    try:
        return msgspec.json.decode(text.lower() if text in ("True", "False") else text)
    except msgspec.DecodeError:
        return text


_Section = TypeVar("_Section")


def section(table: Any, kind: type[_Section], where: str) -> _Section:
    """`table` as the settings of `kind`, at `where`, "fleet.". Raises ConfigError that names the setting: on a key
    that is none too, since a typo must not pass for one."""
    if not isinstance(table, dict):
        raise ConfigError(f"{where.rstrip('.')}: {table!r} must be a table of settings")
    hints = _hints(kind)  # type: ignore[arg-type]  # a class can be hashed
    found = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in hints:
            near = difflib.get_close_matches(name, hints, 1)
            hint = f", did you mean {where}{near[0]}?" if near else f": there are {', '.join(hints)}"
            raise ConfigError(f"{where}{key} is not a setting{hint}")
        inner = _section_of(hints[name])
        if inner is None or (value is None and inner is not hints[name]):
            found[name] = _setting(value, hints[name], f"{where}{key}")
        else:
            found[name] = section(value, inner, f"{where}{key}.")
    try:
        return kind(**found)
    except ConfigError as error:
        raise ConfigError(f"{where}{error}") from None


def _section_of(hint: Any) -> Any:
    """The dataclass that `hint` is, or that it is beside None; None when there is none."""
    return next((each for each in (hint, *get_args(hint)) if dataclasses.is_dataclass(each)), None)


@cache
def _hints(kind: type) -> dict[str, Any]:
    """Types of the fields: 0.2 ms to find, and sweeps have thousands of scenarios."""
    return get_type_hints(kind)


def _setting(value: Any, hint: Any, where: str) -> Any:
    choices = next((get_args(each) for each in (hint, *get_args(hint)) if get_origin(each) is Literal), ())
    if choices and isinstance(value, str) and value not in choices:
        raise ConfigError(f"{where}: {value!r} must be one of {', '.join(choices)}")
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {str(error).replace('`', '')}, it is {value!r}") from None
