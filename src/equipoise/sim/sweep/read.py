"""A sweep from a file, from keywords, or from flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from equipoise.config.checks import at_least
from equipoise.config.files import read_table
from equipoise.errors import ConfigError
from equipoise.sim.scenario import DEFAULTS
from equipoise.sim.sweep.spec import BASE, METRICS, MOST_RUNS, PARETO, Settings, Sweep
from equipoise.sim.sweep.values import Json, path_of, values_of

KEYS = ("scenario", "folder", "set", "vary", "policies", "baseline", "seeds", "metrics", "pareto")
"""Of a file that describes a sweep; `scenario`, `vary` and `policies` tell it from a scenario."""

Vary = Mapping[str, Json] | Sequence[Mapping[str, Json]]
"""Fields with their values, each by itself; or a list of such, the fields of each varying together."""


def read_sweep(path: Path) -> dict[str, Any]:
    """The keys of KEYS that a file gives: of a sweep, or of a scenario that is its `scenario` then.

    The scenario is read too; `folder`, under which its relative paths are, is its own when not given. Raises
    ConfigError."""
    table = {key.replace("-", "_"): value for key, value in read_table(path, "sweep").items()}
    if not {"scenario", "vary", "policies"} & set(table):
        return {"scenario": table, "folder": path.parent}
    for key in table:
        if key not in KEYS:
            raise ConfigError(f"sweep: {path}: {key} is not a setting of a sweep, there are {', '.join(KEYS)}")
    for key in ("set", "policies"):
        if not isinstance(table.get(key, {}), dict):
            raise ConfigError(f"{key}: {table[key]!r} must be a table of settings")
    scenario, folder = table.get("scenario", {}), path.parent
    if isinstance(scenario, str):
        where = folder / scenario
        scenario, folder = read_table(where, "scenario"), where.parent
    return {**table, "scenario": scenario, "folder": folder / str(table.get("folder", ""))}


def make_sweep(
    scenario: Mapping[str, Any],
    *,
    folder: Path | None = None,
    set: Settings | None = None,
    vary: Vary = (),
    policies: Mapping[str, Settings] | None = None,
    baseline: str | None = None,
    seeds: int | Sequence[int] = 1,
    metrics: str | Sequence[str] = METRICS,
    pareto: str | Sequence[str] = PARETO,
) -> Sweep:
    """The sweep that keywords or the keys of a file tell; docs/sweep.md says what each means. Raises ConfigError."""
    if not isinstance(scenario, Mapping):
        raise ConfigError(f"scenario: {scenario!r} must be a file or the settings of one")
    fixed = _settings("set", set or {})
    first_seed = fixed.pop("seed", scenario.get("seed", DEFAULTS.seed))
    named = {str(name): _settings(f"policies.{name}", found or {}) for name, found in (policies or {}).items()}
    if len(named) < 2:
        named = {**({} if BASE in named else {BASE: {}}), **named}
    axes_shown = _names("pareto", pareto)
    if len(axes_shown) != 2:
        raise ConfigError(f"pareto: {', '.join(axes_shown)} must be two numbers' names, for x and y")
    return Sweep(
        base=scenario,
        folder=folder or Path(),
        fixed=fixed,
        axes=axes_of(vary),
        policies=named,
        baseline=baseline if baseline is not None else next(iter(named)),
        seeds=_seeds(seeds, first_seed),
        metrics=_names("metrics", metrics),
        pareto=(axes_shown[0], axes_shown[1]),
    )


def axes_of(vary: Vary) -> list[list[Settings]]:
    """Axes from {field: values}, each by itself, or from a list of these, whose fields vary together."""
    axes: list[list[Settings]] = []
    for group in _groups(vary):
        columns = {path_of(name): values_of(name, given) for name, given in group.items()}
        lengths = {name: len(values) for name, values in columns.items()}
        if len(dict.fromkeys(lengths.values())) > 1:
            told = ", ".join(f"{name} has {num}" for name, num in lengths.items())
            raise ConfigError(f"vary: fields that vary together need as many values each: {told}")
        axes.append([dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)])
    return axes


def with_axes(vary: Vary, more: Sequence[Mapping[str, Json]]) -> list[dict[str, Json]]:
    """`vary` with `more` axes, instead of what it says of their fields."""
    new = {path_of(name) for axis in more for name in axis}
    kept = [{name: given for name, given in axis.items() if path_of(name) not in new} for axis in _groups(vary)]
    return [axis for axis in kept if axis] + [dict(axis) for axis in more]


def _groups(vary: Vary) -> list[Mapping[str, Json]]:
    groups = [{name: given} for name, given in vary.items()] if isinstance(vary, Mapping) else vary
    for group in groups:
        if not isinstance(group, Mapping) or not group:
            raise ConfigError(f"vary: {group!r} must be like fleet.ranks: [2, 4]")
    return list(groups)


def _seeds(given: object, first: object) -> list[int]:
    if isinstance(given, int) and not isinstance(given, bool) and isinstance(first, int):
        at_least("seeds", given, 1, MOST_RUNS)
        return list(range(first, first + given))
    if isinstance(given, list) and given and all(isinstance(each, int) and given.count(each) == 1 for each in given):
        return given
    raise ConfigError(f"seeds: {given!r} must be how many, or a list of different ones")


def _names(where: str, given: object) -> tuple[str, ...]:
    """Of "a,b" or of a list."""
    found = given.split(",") if isinstance(given, str) else given
    if not isinstance(found, list | tuple) or not found or not all(isinstance(each, str) for each in found):
        raise ConfigError(f"{where}: {given!r} must be a list of names")
    return tuple(dict.fromkeys(each.strip().replace("-", "_") for each in found))


def _settings(where: str, given: object) -> dict[str, Json]:
    """By the fields' paths."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where}: {given!r} must be settings, like scheduler.balance: true")
    return {path_of(str(name)): value for name, value in given.items()}
