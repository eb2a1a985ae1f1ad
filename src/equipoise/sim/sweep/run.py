"""A sweep, run: from Python as by `equipoise sweep`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equipoise.machine import num_cores
from equipoise.sim.sweep.jobs import Job, run_jobs
from equipoise.sim.sweep.read import make_sweep
from equipoise.sim.sweep.results import SweepResults, results_of
from equipoise.sim.sweep.spec import METRICS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from typing import Any

    from equipoise.sim.sweep.spec import Settings, Sweep
    from equipoise.sim.sweep.values import Json

RUNS = "runs.jsonl"
"""Finished runs, in the folder of results."""


def sweep(
    scenario: Mapping[str, Any],
    *,
    vary: Mapping[str, Json] | Sequence[Mapping[str, Json]] = (),
    policies: Mapping[str, Settings] | None = None,
    baseline: str | None = None,
    seeds: int | Sequence[int] = 1,
    metrics: Sequence[str] = METRICS,
    folder: Path | None = None,
    out: Path | None = None,
    num_processes: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> SweepResults:
    """Simulate `scenario`, settings as a file holds them, at every point, with every policy and every seed.

    vary: values, or text like "2,4" or "0..0.3:0.1", by field; a list of such has the fields of each vary together
    policies: by name, what each sets; with fewer than two, "base" is there too and sets nothing
    baseline: the policy that others are compared with on the same seeds, the first by default
    seeds: how many from the scenario's own on, or a list
    folder: where relative paths of the scenario are; out: a folder in which runs are kept, so that the next call goes
    on where this one was ended; num_processes: as many as there are cores; with more than one, a script calls this
    under `if __name__ == "__main__":`. A run that fails is a row with an error; the others go on.
    Raises ConfigError, before anything runs, that names the setting which is wrong."""
    spec = make_sweep(
        scenario, folder=folder, vary=vary, policies=policies, baseline=baseline, seeds=seeds, metrics=metrics
    )
    return run_sweep(spec, spec.jobs(), num_processes=num_processes, out=out, on_progress=on_progress)


def run_sweep(
    spec: Sweep,
    jobs: Sequence[Job],
    *,
    num_processes: int | None = None,
    out: Path | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> SweepResults:
    """Run `jobs`, those of `spec`."""
    errors: dict[str, str] = {}

    def fail(job: Job, message: str) -> None:
        errors[job.key] = message

    found = run_jobs(
        jobs,
        num_processes=num_processes or num_cores(),
        kept=None if out is None else out / RUNS,
        on_progress=on_progress,
        on_failure=fail,
    )
    return results_of(spec, found, errors)
