"""Run an experiment: its trials as jobs in processes, its measurements here."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from equipoise.errors import ConfigError, EquipoiseError
from equipoise.sim.experiment.rows import Row
from equipoise.sim.sweep.jobs import Job, run_jobs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from equipoise.sim.experiment.rows import Experiment, Trial


def run_experiment(
    experiment: Experiment,
    *,
    num_seeds: int = 1,
    num_processes: int = 1,
    kept: Path | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Row]:
    """The rows of every trial, in the trials' order, for each of `num_seeds` seeds; then those that are measured.

    `kept`: a file to which finished simulations are appended, and which a run that was ended goes on from.
    `on_progress(num_done, num_jobs)` is called as simulations end. Raises EquipoiseError when one
    of them fails, after all the others."""
    jobs = dict(_jobs(experiment, num_seeds))
    if len(jobs) < len(experiment.trials) * num_seeds:
        raise ConfigError(f"experiment: two trials of {experiment.name} have one name")
    failed: list[str] = []
    found = run_jobs(
        [job for job, _, _ in jobs.values()],
        num_processes=num_processes,
        kept=kept,
        on_progress=on_progress,
        on_failure=lambda job, message: failed.append(f"{job.key}: {message}"),
    )
    if failed:
        raise EquipoiseError(f"{len(failed)} of {len(jobs)} simulations failed, the first is {failed[0]}")
    rows = [_row(found[key], experiment, trial, seed) for key, (_, trial, seed) in jobs.items()]
    return [*rows, *(experiment.measured() if experiment.measured else ())]


def _jobs(experiment: Experiment, num_seeds: int) -> Iterator[tuple[str, tuple[Job, Trial, int]]]:
    for trial in experiment.trials:
        for seed in range(trial.scenario.seed, trial.scenario.seed + num_seeds):
            key = f"{experiment.name}: {trial.key} / {seed}"
            scenario = dataclasses.replace(trial.scenario, name=experiment.name, seed=seed)
            yield key, (Job(key, scenario, trial.folder), trial, seed)


def _row(summary: Mapping[str, float], experiment: Experiment, trial: Trial, seed: int) -> Row:
    return Row(trial.point, trial.policy, {name: summary[name] for name in experiment.metrics}, seed)
