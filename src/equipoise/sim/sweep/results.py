"""What came of a sweep: a row for each point, policy and seed, and policies compared on the same seeds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING

from equipoise.sim.sweep.spec import Settings, Sweep, key_of
from equipoise.sim.sweep.stats import Interval, Paired, interval, paired

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MORE_IS_BETTER = ("throughput", "good", "num_finished", "prefix_hit", "busy")
"""What the names of numbers contain that should be high; all others should be low."""


@dataclass(frozen=True)
class Row:
    """One run. `numbers` is its summary, empty when it failed: `error` says why then."""

    point: Settings
    policy: str
    seed: int
    numbers: Mapping[str, float]
    error: str | None = None

    def number(self, metric: str) -> float:
        """One of them; NaN of a run that failed."""
        return self.numbers.get(metric, math.nan)


@dataclass(frozen=True)
class Comparison:
    """A policy at a point, over all seeds: the interval of the mean, and against the baseline, None for itself."""

    point: Settings
    policy: str
    metric: str
    mean: Interval
    against: Paired | None


@dataclass(frozen=True)
class Overall:
    """A policy against the baseline over all points; gains are shares, 0.05 for 5% more, better or not.

    worst, best: the comparisons at these points; num_better, num_worse: points at which it differs significantly"""

    policy: str
    metric: str
    median: float
    worst: Comparison
    best: Comparison
    num_better: int
    num_worse: int


@dataclass(frozen=True)
class SweepResults:
    """All rows, points first, seeds last."""

    sweep: Sweep
    rows: Sequence[Row]

    @property
    def failures(self) -> list[Row]:
        """Runs that failed."""
        return [row for row in self.rows if row.error is not None]

    def compare(self, metric: str) -> list[Comparison]:
        """Every policy at every point."""
        sweep = self.sweep
        found = []
        for number, point in enumerate(sweep.points()):
            columns = {policy: [row.number(metric) for row in self._rows[number, policy]] for policy in sweep.policies}
            baseline = columns[sweep.baseline]
            for policy, values in columns.items():
                mean = interval([value for value in values if math.isfinite(value)])
                against = None if policy == sweep.baseline else paired(values, baseline)
                found.append(Comparison(point, policy, metric, mean, against))
        return found

    def overall(self, metric: str) -> list[Overall]:
        """Every policy but the baseline, over all points at which it can be compared."""
        sign = 1 if more_is_better(metric) else -1
        found = []
        compared = self.compare(metric)
        for policy in self.sweep.policies:
            pairs = [
                (each, each.against)
                for each in compared
                if each.policy == policy and each.against is not None and math.isfinite(each.against.gain)
            ]
            if not pairs:
                continue
            ranked = sorted(pairs, key=lambda pair: sign * pair[1].gain)
            differing = [sign * against.gain > 0 for _, against in pairs if against.is_significant]
            found.append(
                Overall(
                    policy,
                    metric,
                    median(against.gain for _, against in pairs),
                    ranked[0][0],
                    ranked[-1][0],
                    differing.count(True),
                    differing.count(False),
                )
            )
        return found

    @cached_property
    def _rows(self) -> dict[tuple[int, str], list[Row]]:
        """By the number of the point and the policy, in the seeds' order."""
        found: dict[tuple[int, str], list[Row]] = {}
        num_each = len(self.sweep.policies) * len(self.sweep.seeds)
        for index, row in enumerate(self.rows):
            found.setdefault((index // num_each, row.policy), []).append(row)
        return found


def more_is_better(metric: str) -> bool:
    """Whether a number of a summary should be high."""
    return any(part in metric for part in MORE_IS_BETTER)


def results_of(sweep: Sweep, found: Mapping[str, Mapping[str, float]], errors: Mapping[str, str]) -> SweepResults:
    """Rows from what `run_jobs` tells by key, and why the others failed."""
    rows = []
    for point in sweep.points():
        for policy in sweep.policies:
            for seed in sweep.seeds:
                key = key_of(point, policy, seed)
                rows.append(Row(point, policy, seed, found.get(key, {}), errors.get(key)))
    return SweepResults(sweep, rows)
