"""What a sweep is: a scenario, the fields that vary, policies that are compared, and the seeds they share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from equipoise.config.checks import at_least
from equipoise.errors import ConfigError
from equipoise.sim.run import Simulation
from equipoise.sim.scenario import DEFAULTS, as_table, make_scenario
from equipoise.sim.sweep.jobs import Job
from equipoise.sim.sweep.values import Json, as_text

if TYPE_CHECKING:
    from equipoise.sim.scenario import Scenario

METRICS = ("throughput_tok_s", "ttft_mean_ms", "tpot_mean_ms")
"""What is compared unless other numbers are named."""
PARETO = ("ttft_mean_ms", "throughput_tok_s")
BASE = "base"
"""The policy that changes nothing."""
MOST_RUNS = 1_000_000

Settings = Mapping[str, Json]
"""Values by the fields' paths, "fleet.ranks"."""


@dataclass(frozen=True)
class Sweep:
    """All points, each with every policy and every seed.

    base: the scenario as a file holds it; relative paths in it are under `folder`
    axes: fields that vary together, each with its values; a point takes one row of every axis
    policies: by name, what each sets beside the point; `baseline` is the one that others are compared with
    """

    base: Mapping[str, Any]
    folder: Path = field(default_factory=Path)
    fixed: Settings = field(default_factory=dict)
    axes: Sequence[Sequence[Settings]] = ()
    policies: Mapping[str, Settings] = field(default_factory=lambda: {BASE: {}})
    baseline: str = BASE
    seeds: Sequence[int] = (0,)
    metrics: Sequence[str] = METRICS
    pareto: tuple[str, str] = PARETO

    def __post_init__(self) -> None:
        if self.baseline not in self.policies:
            raise ConfigError(f"baseline: {self.baseline!r} must be one of {', '.join(self.policies)}")
        self._check_fields()
        at_least("vary: points x policies x seeds", self.num_runs, 1, MOST_RUNS)

    def _check_fields(self) -> None:
        names = [name for axis in self.axes for name in axis[0]]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"vary: {name} is there twice")
        for policy, settings in self.policies.items():
            for name in settings:
                if name in names:
                    raise ConfigError(f"policies: {policy} sets {name}, which is varied")
        if "seed" in (*names, *(name for settings in self.policies.values() for name in settings)):
            raise ConfigError("vary: seed is told by seeds: the same ones for every point and policy")

    @property
    def fields(self) -> list[str]:
        """The varied fields."""
        return [name for axis in self.axes for name in axis[0]]

    @property
    def num_runs(self) -> int:
        """Points x policies x seeds."""
        num = len(self.policies) * len(self.seeds)
        for axis in self.axes:
            num *= len(axis)
        return num

    @property
    def name(self) -> str:
        """That of the scenario."""
        return str(self.fixed.get("name", self.base.get("name", DEFAULTS.name)))

    def points(self) -> list[Settings]:
        """Every combination of the axes' rows, the last axis first to change."""
        return [{name: value for row in rows for name, value in row.items()} for rows in product(*self.axes)]

    def scenario(self, point: Settings, policy: str, seed: int) -> Scenario:
        """That of a run. Raises ConfigError that names the field."""
        settings = {**self.fixed, **point, **self.policies[policy], "seed": seed}
        try:
            return make_scenario(
                dict(self.base), [f"{name}={msgspec.json.encode(value).decode()}" for name, value in settings.items()]
            )
        except ConfigError as error:
            raise ConfigError(f"{error} (at {key_of(point, policy, seed)})") from None

    def jobs(self) -> list[Job]:
        """Every run, seeds first to change.

        Each is built, with one rank: names of policies and files are checked before hours are spent. Raises
        ConfigError when one cannot be, or when none tells a number that is asked for."""
        found = []
        numbers: dict[str, list[str]] = {}
        for point in self.points():
            for policy in self.policies:
                scenario = self.scenario(point, policy, self.seeds[0])
                _check(scenario, self.folder, key_of(point, policy, self.seeds[0]), numbers)
                for seed in self.seeds:
                    key = key_of(point, policy, seed)
                    found.append(Job(key, dataclasses.replace(scenario, seed=seed), self.folder))
        known = dict.fromkeys(name for names in numbers.values() for name in names)
        for name in (*self.metrics, *self.pareto):
            if name not in known:
                raise ConfigError(f"metrics: {name!r} must be one of {', '.join(known)}")
        return found


def key_of(point: Settings, policy: str, seed: int) -> str:
    """A run in words."""
    return " / ".join([*([words(point)] if point else []), policy, f"seed {seed}"])


def words(point: Settings) -> str:
    """A point in words, "fleet.ranks=2 workload.rate=4"."""
    return " ".join(f"{name}={as_text(value)}" for name, value in point.items())


def _check(scenario: Scenario, folder: Path, key: str, numbers: dict[str, list[str]]) -> None:
    """Build it with one rank of each role, once for all points that differ in nothing else, and note in `numbers` what
    its summary will tell. Raises ConfigError."""
    fleet = scenario.fleet
    small = {name: min(size, 1) for name, size in vars(fleet).items() if name.endswith(("workers", "ranks"))}
    alone = dataclasses.replace(scenario, fleet=dataclasses.replace(fleet, **small))
    name = str(as_table(alone))
    if name in numbers:
        return
    try:
        numbers[name] = list(Simulation(alone, folder).results().summary())
    except ConfigError as error:
        raise ConfigError(f"{error} (at {key})") from None
    except Exception as error:  # of a policy of one's own, perhaps
        raise ConfigError(f"{type(error).__name__}: {error} (at {key})") from error
