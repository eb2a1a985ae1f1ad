"""Values of a varied field, from a list or from text: "2,4,8", "0..0.3:0.1", "1..64:x2"."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from equipoise.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | dict[str, Json] | None"
"""What a setting may be set to."""

MOST_VALUES = 10_000
_JOINED = re.compile(r"\+(?=[A-Za-z_][\w-]*(?:\.[\w-]+)*=)")
_A_NUMBER = r"[+-]?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"(?P<first>{_A_NUMBER})\.\.(?P<last>{_A_NUMBER})(?::(?P<factor>x?)(?P<step>{_A_NUMBER}))?")


def values_of(field: str, given: Json) -> list[Json]:
    """The values to vary `field` over: those of a list, or what text says.

    Text has values and ranges, separated by commas. A range "0..0.3:0.1" goes from 0 by steps of 0.1 up to 0.3, that
    included; "1..64:x2" doubles from 1 to 64; without a step it is 1. Raises ConfigError when it is none, has none or
    has one twice."""
    if isinstance(given, str):
        found = [value for part in given.split(",") for value in _part(field, part.strip())]
    elif isinstance(given, list):
        found = [value for each in given for value in (_part(field, each) if isinstance(each, str) else [each])]
    else:
        found = [given]
    if not found:
        raise ConfigError(f"vary: {field} has no values")
    names = [as_text(value) for value in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"vary: {field} has {twice} twice")
    return found


def path_of(name: str) -> str:
    """A field's path as settings have it: "fleet.max-model-len " -> "fleet.max_model_len"."""
    return name.strip().replace("-", "_")


def axis_of(text: str) -> dict[str, Json]:
    """What "fleet.ranks=2,4" says, or "fleet.ranks=2,4+scheduler.max_running=64,32": fields that vary together."""
    found: dict[str, Json] = {}
    for part in _JOINED.split(text):
        name, separator, values = part.partition("=")
        if not separator or not name.strip():
            raise ConfigError(f"vary: {part!r} must be like fleet.ranks=2,4,8")
        found[name.strip()] = values
    return found


def policy_of(text: str) -> tuple[str, dict[str, Json]]:
    """What "gate=scheduler.balance=true,scheduler.balance_margin=1" says; "plain" alone changes nothing."""
    name, _, rest = text.partition("=")
    settings: dict[str, Json] = {}
    for part in filter(None, (each.strip() for each in rest.split(","))):
        path, value = setting_of("policy", part)
        settings[path] = value
    if not name.strip():
        raise ConfigError(f"policy: {text!r} has no name, it must be like NAME=scheduler.balance=true")
    return name.strip(), settings


def setting_of(where: str, text: str) -> tuple[str, Json]:
    """What "scheduler.balance=true" says."""
    path, separator, value = text.partition("=")
    if not separator or not path.strip():
        raise ConfigError(f"{where}: {text!r} must be like scheduler.balance=true")
    return path_of(path), value_of(value.strip())


def value_of(text: str) -> Json:
    """What JSON or Python would make of a word, or the word."""
    try:
        found: Json = msgspec.json.decode(text.lower() if text in ("True", "False") else text)
    except msgspec.DecodeError:
        return text
    return found


def as_text(value: Json) -> str:
    """A value as a user writes it; lists and tables as JSON."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _part(field: str, text: str) -> list[Json]:
    found = _RANGE.fullmatch(text)
    if found is None:
        if not text:
            raise ConfigError(f"vary: {field} has an empty value")
        return [value_of(text)]
    first, last, step = (Decimal(found[name] or "1") for name in ("first", "last", "step"))
    named, by_factor = f"{field}: {text!r}", bool(found["factor"])
    return [_number(value) for value in _range(named, first, last, step, by_factor=by_factor)]


def _range(name: str, first: Decimal, last: Decimal, step: Decimal, *, by_factor: bool) -> list[Decimal]:
    """From `first` to `last`, in decimals, so that 0..0.3:0.1 ends with 0.3."""
    if first > last:
        raise ConfigError(f"vary: {name} must go from a number up to a larger one")
    if (step <= 1 or first <= 0) if by_factor else step <= 0:
        raise ConfigError(f"vary: {name} never ends, its step must be more than 0, a factor more than 1")
    found = []
    while first <= last:
        found.append(first)
        first = first * step if by_factor else first + step
        if len(found) > MOST_VALUES:
            raise ConfigError(f"vary: {name} has more than {MOST_VALUES} values")
    return found


def _number(value: Decimal) -> int | float:
    return int(value) if value == value.to_integral_value() else float(value)
