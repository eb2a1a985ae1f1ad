"""A simulation's results and series, and what several plots need of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from equipoise.sim.fleet import sizes_of
from equipoise.sim.report.measures import Unit
from equipoise.sim.results import outcomes

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    from equipoise.config.worker import WorkerRole
    from equipoise.sim.fleet import RoleSize
    from equipoise.sim.report.series import StepSeries
    from equipoise.sim.results import Outcomes
    from equipoise.sim.run import Results

    Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Run:
    """A simulation's results, and what several plots need of them."""

    results: Results
    series: StepSeries

    @cached_property
    def summary(self) -> Mapping[str, float]:
        """One number per question."""
        return self.results.summary()

    @cached_property
    def columns(self) -> Mapping[str, NDArray[np.float64] | NDArray[np.int64]]:
        """By request."""
        return self.results.requests.columns()

    @cached_property
    def outcomes(self) -> Outcomes:
        """By request."""
        objectives = self.results.scenario.objectives
        return outcomes(self.results.requests, objectives.ttft_ms, objectives.tpot_ms)

    @cached_property
    def end_s(self) -> float:
        """When the last request ended."""
        last = self.columns["last_s"][self.outcomes.is_done]
        return float(last.max()) if len(last) else 0.0

    @cached_property
    def unit(self) -> Unit:
        """Of time."""
        return Unit.of(self.end_s)

    @cached_property
    def sizes(self) -> Mapping[WorkerRole, RoleSize]:
        """Workers and ranks of each role."""
        return sizes_of(self.results.scenario.fleet)

    @property
    def num_ranks(self) -> int:
        """Of all workers."""
        return sum(size.num_ranks for size in self.sizes.values())

    @property
    def is_lockstep(self) -> bool:
        """Ranks wait for each other."""
        return self.results.scenario.fleet.lockstep and any(size.ranks > 1 for size in self.sizes.values())
