"""Policies compared at each point of a map: gains over a baseline, and against the best of the others."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from equipoise.sim.experiment.rows import by_point, points_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from equipoise.sim.experiment.rows import Point, Row, Value


class Spread(NamedTuple):
    """The middle and the ends of some numbers."""

    median: float
    worst: float
    best: float


def spread_of(values: Sequence[float]) -> Spread:
    """Of at least one number; the worst is the lowest."""
    return Spread(median(values), min(values), max(values))


def has(axis: str, value: Value) -> Callable[[Point], bool]:
    """Whether a point has `value` on `axis`."""
    return lambda point: point[axis] == value


class Compared:
    """Rows by point and policy, each a mean over seeds; points that lack the baseline are left out.

    Gains are shares: 0.18 is 18% more than the baseline's."""

    def __init__(self, rows: Sequence[Row], baseline: str) -> None:
        self.points: Mapping[str, Point] = points_of(rows)
        self._found = {name: found for name, found in by_point(rows).items() if baseline in found}
        self._baseline = baseline

    def __len__(self) -> int:
        return len(self._found)

    @property
    def policies(self) -> list[str]:
        """All but the baseline, in the order of the rows."""
        return [
            name for name in dict.fromkeys(p for found in self._found.values() for p in found) if self._is_other(name)
        ]

    def _is_other(self, policy: str) -> bool:
        return policy != self._baseline

    def ratios(self, policy: str, metric: str, where: Callable[[Point], bool] | None = None) -> dict[str, float]:
        """The policy's number over the baseline's, by the names of the points that have both."""
        return {
            name: found[policy][metric] / found[self._baseline][metric]
            for name, found in self._found.items()
            if policy in found and (where is None or where(self.points[name]))
        }

    def gains(self, policy: str, metric: str, where: Callable[[Point], bool] | None = None) -> dict[str, float]:
        """`ratios` less one."""
        return {name: ratio - 1 for name, ratio in self.ratios(policy, metric, where).items()}

    def over_best(self, policy: str, others: Sequence[str], metric: str) -> dict[str, float]:
        """The policy's gain less that of the best of `others` and the baseline (0), by point: points of gain."""
        own = self.gains(policy, metric)
        theirs = [self.gains(other, metric) for other in others if other != policy]
        return {
            name: gain - max([0.0, *(found[name] for found in theirs if name in found)]) for name, gain in own.items()
        }

    def values_of(self, axis: str) -> list[Value]:
        """The values of an axis, in the order of the rows."""
        return list(dict.fromkeys(self.points[name][axis] for name in self._found if axis in self.points[name]))
