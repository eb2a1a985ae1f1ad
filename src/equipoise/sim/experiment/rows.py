"""What an experiment is: trials, each a policy at a point; rows, what they came to; what is told and drawn of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equipoise.sim.report.look import Chart
    from equipoise.sim.scenario import Scenario

Value = str | int | float | bool
Point = Mapping[str, Value]
"""Where on the map: a value for each axis. Rows of the same point are compared."""

METRICS = (
    "throughput_tok_s",
    "duration_s",
    "ttft_mean_ms",
    "ttft_p90_ms",
    "tpot_mean_ms",
    "itl_p99_ms",
    "goodput_req_s",
    "num_steps",
    "num_prefill_steps",
    "lost_share",
)
"""Columns of a summary that rows keep unless an experiment names its own."""
DIGITS = 6
"""Significant ones, of numbers in files."""


@dataclass(frozen=True)
class Options:
    """What the user asks of an experiment.

    quick: a cut of the whole that takes about a minute on two cores
    traces: the folder of recorded traces, for experiments that replay some
    """

    quick: bool = False
    traces: Path | None = None


@dataclass(frozen=True)
class Trial:
    """One simulation: `policy` at `point`. Its name in files, `key`, is unique in an experiment.

    Relative paths of the scenario are under `folder`."""

    point: Point
    policy: str
    scenario: Scenario
    folder: Path = Path()

    @property
    def key(self) -> str:
        """Like "ranks=4 spread=0.1 / none"."""
        return f"{name_of(self.point)} / {self.policy}"


@dataclass(frozen=True)
class Row:
    """What `policy` came to at `point`: numbers by name, as of `Results.summary()`, NaN for what did not happen."""

    point: Point
    policy: str
    values: Mapping[str, float]
    seed: int = 0

    def __getitem__(self, name: str) -> float:
        return self.values[name]

    def as_json(self) -> dict[str, object]:
        """Flat, with the point as an object; null for NaN."""
        return {"point": dict(self.point), "policy": self.policy, "seed": self.seed} | {
            name: None if math.isnan(value) else float(f"{value:.{DIGITS}g}") for name, value in self.values.items()
        }


@dataclass(frozen=True)
class Table:
    """A table of an answer. `rows` are cells as shown, the first of each a label; `notes` stand below it."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Experiment:
    """A question, and how it is answered.

    trials: simulations to run; a row each (and for each seed)
    measured: rows that are measured on this machine instead, if any
    tables: the answer in a screen, from the rows; the rows of several seeds are all there
    charts: by name, "gain" is saved as NAME-gain.svg; needs altair
    metrics: the columns of a summary that rows keep
    """

    name: str
    question: str
    trials: Sequence[Trial]
    tables: Callable[[Sequence[Row]], Sequence[Table]]
    charts: Callable[[Sequence[Row]], Mapping[str, Chart]]
    measured: Callable[[], Sequence[Row]] | None = None
    metrics: Sequence[str] = field(default=METRICS)


def name_of(point: Point) -> str:
    """A point in words, like "ranks=4 spread=0.1"."""
    return " ".join(f"{axis}={value}" for axis, value in point.items())


def by_point(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, float]]]:
    """The mean over seeds of every number: by the point's name, then policy, then the number's name."""
    gathered: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        gathered.setdefault(name_of(row.point), {}).setdefault(row.policy, []).append(row)
    return {point: {policy: _mean(found) for policy, found in policies.items()} for point, policies in gathered.items()}


def points_of(rows: Sequence[Row]) -> dict[str, Point]:
    """Every point by its name, in the rows' order."""
    return {name_of(row.point): row.point for row in rows}


def _mean(rows: Sequence[Row]) -> dict[str, float]:
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0].values}
