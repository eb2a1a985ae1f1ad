"""Settings from three places, folded into the dataclasses of `equipoise.config`: flags, environment, file.

A key is a field's name with - or _; flags leave out the `_s` of seconds (--shutdown-timeout).
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from cyclopts import ArgumentCollection, Group, Parameter
from cyclopts.config import Dict, Env

from equipoise.config import CacheConfig, ModelConfig, SchedulerConfig, ServerConfig, SimExecutorConfig
from equipoise.errors import ConfigError

PREFIX = "EQUIPOISE_"
SECTIONS = (ModelConfig, CacheConfig, SchedulerConfig, SimExecutorConfig, ServerConfig)


def flag_name(field: str) -> str:
    """The flag of a field, without its dashes: "request_timeout_s" -> "request-timeout"."""
    return field.removesuffix("_s").replace("_", "-")


TYPES: dict[str, Any] = {
    flag_name(name): hint for section in SECTIONS for name, hint in get_type_hints(section).items()
}
KEYS = frozenset(TYPES)
CHOICES: dict[str, tuple[str, ...]] = {
    key: get_args(hint) for key, hint in TYPES.items() if get_origin(hint) is Literal
}
WHOLE_KEYS = frozenset(key for key, hint in TYPES.items() if hint in (int, int | None))

SWITCH_WORDS = frozenset({"true", "false", "yes", "no", "on", "off"})
_FRACTION = re.compile(r"[+-]?\d*\.\d*|[+-]?\d[\d.]*[eE].*")
_order = iter(range(100))


def _section(title: str, group: Group | None = None) -> Parameter:
    group = group or Group(title, sort_key=next(_order))
    return Parameter(name="*", group=group, name_transform=flag_name, negative_iterable=())


def _one_model(arguments: ArgumentCollection) -> None:
    """Raise ConfigError when the command line names the model twice, or by what was meant for a switch."""
    given = {token.keyword: token.value for argument in arguments for token in argument.tokens if token.source == "cli"}
    word = given.get(None)
    if word is None:
        return
    if "--model" in given:
        raise ConfigError(f"model: given twice, as {word!r} and as --model {given['--model']}")
    if word.lower() in SWITCH_WORDS:
        raise ConfigError(
            f"model: {word!r} is not a folder, and switches take no value: --prefix-cache, --no-prefix-cache"
        )


_MODEL = Group("Model", sort_key=next(_order), validator=_one_model)

ModelWord = Annotated[str | None, Parameter(name="DIR", group=_MODEL, help="The model, as --model gives it.")]
ModelFlags = Annotated[ModelConfig, _section("Model", _MODEL)]
CacheFlags = Annotated[CacheConfig, _section("KV cache")]
SchedulerFlags = Annotated[SchedulerConfig, _section("Scheduler")]
SimFlags = Annotated[SimExecutorConfig, _section("Simulated executor")]
ServerFlags = Annotated[ServerConfig, _section("Server")]


def settings_sources(argv: list[str]) -> tuple[Callable[..., Any], ...]:
    """Where cyclopts looks for what the flags leave open, first come first served.

    Raises ConfigError when the file that `--config` names cannot be read or has unknown keys."""
    _check_whole_numbers(argv)
    path = _config_path(argv)
    environment = Env(PREFIX, command=False, show=False)
    if path is None:
        return (environment,)
    file = Dict(_read(path), allow_unknown=False, use_commands_as_keys=False, source=str(path))
    return (environment, file)


def check_environment() -> None:
    """Raise ConfigError on an EQUIPOISE_ variable that is no setting: a typo must not pass for one."""
    known = {PREFIX + key.replace("-", "_").upper() for key in KEYS} | {f"{PREFIX}CONFIG"}
    for name in os.environ:
        if name.startswith(PREFIX) and name not in known:
            raise ConfigError(f"environment: {name} is not a setting{_nearest(name, known)}")


def _check_whole_numbers(argv: list[str]) -> None:
    """cyclopts rounds 3.5 to a whole number in silence. Raises ConfigError where one is asked for."""
    given = {f"{PREFIX}{key.replace('-', '_').upper()}": key for key in WHOLE_KEYS}
    pairs = [(name, value) for name, value in os.environ.items() if name in given]
    for index, word in enumerate(argv):
        flag, separator, value = word.partition("=")
        if flag.removeprefix("--") in WHOLE_KEYS:
            pairs.append((flag, value if separator else "".join(argv[index + 1 : index + 2])))
    for name, value in pairs:
        if _FRACTION.fullmatch(value):
            raise ConfigError(f"{name}: {value} is not a whole number")


def _config_path(argv: list[str]) -> Path | None:
    for index, word in enumerate(argv):
        if word == "--config" and index + 1 < len(argv):
            return Path(argv[index + 1])
        if word.startswith("--config="):
            return Path(word.partition("=")[2])
    from_environment = os.environ.get(f"{PREFIX}CONFIG")
    return Path(from_environment) if from_environment else None


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            given = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"config: {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config: {path} is not valid TOML: {error}") from None
    settings: dict[str, Any] = {}
    for name, value in given.items():
        key = flag_name(name.replace("-", "_"))
        if key not in KEYS and isinstance(value, dict):
            raise ConfigError(
                f"config: {path}: {name} is not a setting, and the file has no tables: leave [{name}] out"
            )
        if key not in KEYS:
            raise ConfigError(f"config: {path}: {name} is not a setting{_nearest(name, set(KEYS))}")
        try:
            settings[key] = msgspec.convert(value, TYPES[key])
        except msgspec.ValidationError as error:
            choices = f", it must be one of {', '.join(CHOICES[key])}" if key in CHOICES else ""
            raise ConfigError(f"config: {path}: {key}: {str(error).replace('`', '')}{choices}") from None
    return settings


def _nearest(name: str, known: set[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), 1)
    return f", did you mean {close[0]}?" if close else ""
