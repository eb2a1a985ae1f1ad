"""Settings from three places, folded into the dataclasses of `equipoise.config`: flags, environment, file.

A key is a field's name with - or _; flags leave out the `_s` of seconds (--shutdown-timeout). Each command has keys of
its own. Flags and a file are meant for one command; the environment is common to all, a key that two of them have too.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
from cyclopts import ArgumentCollection, Group, Parameter
from cyclopts.config import Dict, Env

from equipoise.config import (
    CacheConfig,
    CostConfig,
    ModelConfig,
    RanksConfig,
    SchedulerConfig,
    ServerConfig,
    SimExecutorConfig,
)
from equipoise.config.cost import setting_name
from equipoise.config.files import read_table
from equipoise.config.gateway import (
    FrontConfig,
    HealthConfig,
    LimitsConfig,
    QueueConfig,
    RoutingConfig,
    WorkersConfig,
)
from equipoise.errors import ConfigError

PREFIX = "EQUIPOISE_"
SECTIONS: dict[str, tuple[type, ...]] = {
    "serve": (ModelConfig, RanksConfig, CacheConfig, SchedulerConfig, SimExecutorConfig, CostConfig, ServerConfig),
    "gateway": (WorkersConfig, RoutingConfig, HealthConfig, LimitsConfig, QueueConfig, FrontConfig),
}
"""The parts of each command's settings."""


def flag_name(field: str) -> str:
    """The flag of a field, without its dashes: "request_timeout_s" -> "request-timeout"."""
    return field.removesuffix("_s").replace("_", "-")


def cost_flag(field: str) -> str:
    """The flag of a field of the cost model: "gpu" -> "cost-gpu", but "step_ms" -> "step-ms"."""
    return flag_name(setting_name(field))


class Keys(NamedTuple):
    """The keys of a command: all with their types, those with a list of choices, those that take whole numbers."""

    types: dict[str, Any]
    choices: dict[str, tuple[str, ...]]
    whole: frozenset[str]


@cache
def keys_of(command: str) -> Keys:
    """The keys of `command`, one of SECTIONS."""
    types = {}
    for section in SECTIONS[command]:
        name_of = cost_flag if section is CostConfig else flag_name
        types.update({name_of(name): hint for name, hint in get_type_hints(section).items()})
    choices = {key: get_args(hint) for key, hint in types.items() if get_origin(hint) is Literal}
    return Keys(types, choices, frozenset(key for key, hint in types.items() if hint in (int, int | None)))


PATHS = ("tables", "config")
"""Fields of the cost model that name files."""
SWITCH_WORDS = frozenset({"true", "false", "yes", "no", "on", "off"})
_FRACTION = re.compile(r"[+-]?\d*\.\d*|[+-]?\d[\d.]*[eE].*")
_order = iter(range(100))


def _section(title: str, group: Group | None = None, name_of: Callable[[str], str] = flag_name) -> Parameter:
    group = group or Group(title, sort_key=next(_order))
    return Parameter(name="*", group=group, name_transform=name_of, negative_iterable=())


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
RanksFlags = Annotated[RanksConfig, _section("Ranks")]
CacheFlags = Annotated[CacheConfig, _section("KV cache")]
SchedulerFlags = Annotated[SchedulerConfig, _section("Scheduler")]
SimFlags = Annotated[SimExecutorConfig, _section("Simulated executor")]
CostFlags = Annotated[CostConfig, _section("Cost of a simulated step", name_of=cost_flag)]
ServerFlags = Annotated[ServerConfig, _section("Server")]

WorkersFlags = Annotated[WorkersConfig, _section("Workers")]
RoutingFlags = Annotated[RoutingConfig, _section("Routing")]
HealthFlags = Annotated[HealthConfig, _section("Health of workers")]
LimitsFlags = Annotated[LimitsConfig, _section("Time limits and tries")]
QueueFlags = Annotated[QueueConfig, _section("Queue")]
FrontFlags = Annotated[FrontConfig, _section("Gateway")]

ConfigFile = Annotated[
    Path | None, Parameter(help="TOML, YAML or JSON file with settings; flags and environment win over it.")
]


def settings_sources(argv: list[str]) -> tuple[Callable[..., Any], ...]:
    """Where cyclopts looks for what the flags leave open, first come first served.

    Raises ConfigError when the file that `--config` names cannot be read or has keys that the command lacks."""
    command = next((word for word in argv if word in SECTIONS), None)
    environment = Env(PREFIX, command=False, show=False)
    if command is None:
        return ()  # a scenario gives the same results whatever the environment
    check_whole_numbers(argv, keys_of(command).whole, os.environ)
    path = _config_path(argv)
    if path is None:
        return (environment,)
    file = Dict(_read(path, command), allow_unknown=False, use_commands_as_keys=False, source=str(path))
    return (environment, file)


def check_environment() -> None:
    """Raise ConfigError on an EQUIPOISE_ variable that is no setting: a typo must not pass for one."""
    keys = [key for command in SECTIONS for key in keys_of(command).types]
    known = {PREFIX + key.replace("-", "_").upper() for key in keys} | {f"{PREFIX}CONFIG"}
    for name in os.environ:
        if name.startswith(PREFIX) and name not in known:
            raise ConfigError(f"environment: {name} is not a setting{_nearest(name, known)}")


def command_of_others(flag: str, argv: list[str]) -> str | None:
    """What to tell about `flag`, "--max-running", that the command of `argv` lacks; None when no command has it."""
    command = next((word for word in argv if word in SECTIONS), None)
    key = flag.removeprefix("--")
    return _belongs(key, command) or _belongs(key.removeprefix("no-"), command) if command else None


def _belongs(key: str, command: str) -> str | None:
    for other in SECTIONS:
        if other != command and key in keys_of(other).types:
            return f"{key} is a setting of `equipoise {other}`, `equipoise {command}` has none of that name"
    return None


def check_whole_numbers(argv: list[str], whole: frozenset[str], environment: Mapping[str, str]) -> None:
    """cyclopts rounds 3.5 to a whole number in silence. Raises ConfigError where one of the flags `whole`, or its
    variable, is given so."""
    given = {f"{PREFIX}{key.replace('-', '_').upper()}": key for key in whole}
    pairs = [(name, value) for name, value in environment.items() if name in given]
    for index, word in enumerate(argv):
        flag, separator, value = word.partition("=")
        if flag.removeprefix("--") in whole:
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


def _read(path: Path, command: str) -> dict[str, Any]:
    types, choices, _ = keys_of(command)
    settings: dict[str, Any] = {}
    for name, value in _flat(read_table(path, "config"), path, command).items():
        key = flag_name(name.replace("-", "_"))
        if key not in types:
            raise ConfigError(f"config: {path}: {_unknown(name, key, value, command)}")
        try:
            settings[key] = msgspec.convert(value, types[key])
        except msgspec.ValidationError as error:
            allowed = f", it must be one of {', '.join(choices[key])}" if key in choices else ""
            raise ConfigError(f"config: {path}: {key}: {str(error).replace('`', '')}{allowed}") from None
    return settings


def _flat(table: dict[str, Any], path: Path, command: str) -> dict[str, Any]:
    """`table` with the settings of its section `cost`, a scenario's, as they are called outside it. Paths there are
    relative to the file, as in a scenario."""
    if not isinstance(table.get("cost"), dict) or CostConfig not in SECTIONS[command]:
        return table
    flat = {name: value for name, value in table.items() if name != "cost"}
    known = set(get_type_hints(CostConfig))
    for name, value in table["cost"].items():
        field = name.replace("-", "_")
        if field not in known:
            raise ConfigError(f"config: {path}: cost.{name} is not a setting{_nearest(field, known)}")
        key = cost_flag(field)
        if any(flag_name(other.replace("-", "_")) == key for other in flat):
            raise ConfigError(f"config: {path}: {key}: given twice, as cost.{name} too")
        if value is not None:  # a resolved scenario names what it leaves open too
            flat[key] = str(path.parent / value) if field in PATHS and isinstance(value, str) else value
    return flat


def _unknown(name: str, key: str, value: object, command: str) -> str:
    elsewhere = _belongs(key, command)
    if elsewhere is not None:
        return elsewhere
    if isinstance(value, dict):
        return f"{name} is not a setting, and the file has no tables: leave [{name}] out"
    return f"{name} is not a setting{_nearest(name, set(keys_of(command).types))}"


def _nearest(name: str, known: set[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), 1)
    return f", did you mean {close[0]}?" if close else ""
