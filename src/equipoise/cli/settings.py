"""Settings from three places, folded into the dataclasses of `equipoise.config`: flags, environment, file.

A key is a field's name with - or _; flags leave out the `_s` of seconds (--shutdown-timeout).
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter
from cyclopts.config import Dict, Env

from equipoise.config import CacheConfig, ModelConfig, SchedulerConfig, ServerConfig, SimExecutorConfig
from equipoise.errors import ConfigError

PREFIX = "EQUIPOISE_"
SECTIONS = (ModelConfig, CacheConfig, SchedulerConfig, SimExecutorConfig, ServerConfig)


def flag_name(field: str) -> str:
    """The flag of a field, without its dashes: "request_timeout_s" -> "request-timeout"."""
    return field.removesuffix("_s").replace("_", "-")


KEYS = frozenset(flag_name(field.name) for section in SECTIONS for field in dataclasses.fields(section))

_order = iter(range(100))


def _section(title: str) -> Parameter:
    return Parameter(
        name="*", group=Group(title, sort_key=next(_order)), name_transform=flag_name, negative_iterable=()
    )


ModelFlags = Annotated[ModelConfig, _section("Model")]
CacheFlags = Annotated[CacheConfig, _section("KV cache")]
SchedulerFlags = Annotated[SchedulerConfig, _section("Scheduler")]
SimFlags = Annotated[SimExecutorConfig, _section("Simulated executor")]
ServerFlags = Annotated[ServerConfig, _section("Server")]


def settings_sources(argv: list[str]) -> tuple[Callable[..., Any], ...]:
    """Where cyclopts looks for what the flags leave open, first come first served.

    Raises ConfigError when the file that `--config` names cannot be read or has unknown keys."""
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
        if key not in KEYS:
            raise ConfigError(f"config: {path}: {name} is not a setting{_nearest(name, set(KEYS))}")
        settings[key] = value
    return settings


def _nearest(name: str, known: set[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), 1)
    return f", did you mean {close[0]}?" if close else ""
