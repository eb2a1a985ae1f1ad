"""Simulations in parallel, kept as they end, so that a run that was ended goes on where it was."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from equipoise.errors import EquipoiseError
from equipoise.sim.sweep.digest import digest
from equipoise.sim.sweep.kept import Kept
from equipoise.sim.sweep.pool import Failure, Job, outcomes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    OnProgress = Callable[[int, int], None]
    OnFailure = Callable[[Job, str], None]

__all__ = ["Job", "missing", "run_jobs"]


def run_jobs(
    jobs: Sequence[Job],
    *,
    num_processes: int,
    kept: Path | None = None,
    on_progress: OnProgress | None = None,
    on_failure: OnFailure | None = None,
) -> dict[str, dict[str, float]]:
    """`Results.summary()` of every job, by key, in the order of `jobs`.

    With `num_processes` above 1 each process, started by spawn, has one job at a time: a script has its calls under
    `if __name__ == "__main__":`. Jobs that are the same simulation are run once. `kept` names a file of JSON lines to
    which every summary is appended as it comes; a simulation that is in it is not run again, unless settings, files
    that they name, or the code have changed. `on_progress(num_done, num_jobs)` is called at first and as jobs end.
    A job that fails ends no other, and is tried again by the next run: `on_failure(job, message)` hears of it, without
    it EquipoiseError names it when all others have ended. KeyboardInterrupt ends all processes at once."""
    failures: list[str] = []
    same = _by_digest(jobs)
    with Kept(kept) as file:
        found = {each: file.summaries[each] for each in same if each in file.summaries}
        num_done = sum(len(same[each]) for each in found)
        _tell(on_progress, num_done, len(jobs))
        first = {alike[0].key: each for each, alike in same.items() if each not in found}
        with closing(outcomes([same[each][0] for each in first.values()], num_processes)) as ended:
            for job, outcome in ended:
                each = first[job.key]
                if isinstance(outcome, Failure):
                    failures += _failed(same[each], outcome.message, on_failure)
                else:
                    found[each] = outcome
                    file.append(each, job.key, outcome)
                num_done += len(same[each])
                _tell(on_progress, num_done, len(jobs))
    if failures and on_failure is None:
        raise EquipoiseError(f"{len(failures)} of {len(jobs)} simulations failed: {'; '.join(failures)}")
    by_key = {job.key: found[each] for each, alike in same.items() if each in found for job in alike}
    return {job.key: by_key[job.key] for job in jobs if job.key in by_key}


def missing(jobs: Sequence[Job], kept: Path | None) -> list[Job]:
    """Those of `jobs` that `run_jobs` would run: not kept, and each simulation once."""
    with Kept(kept) as file:
        return [alike[0] for each, alike in _by_digest(jobs).items() if each not in file.summaries]


def _by_digest(jobs: Sequence[Job]) -> dict[str, list[Job]]:
    """Jobs by what they depend on: more than one of a digest when two policies come to the same at a point."""
    same: dict[str, list[Job]] = {}
    keys: set[str] = set()
    for job in jobs:
        if job.key in keys:
            raise ValueError(f"jobs: {job.key!r} is the key of two")
        keys.add(job.key)
        same.setdefault(digest(job.scenario, job.folder), []).append(job)
    return same


def _failed(alike: list[Job], message: str, on_failure: OnFailure | None) -> list[str]:
    if on_failure is not None:
        for job in alike:
            on_failure(job, message)
    return [f"{job.key}: {message}" for job in alike]


def _tell(on_progress: OnProgress | None, num_done: int, num_jobs: int) -> None:
    if on_progress is not None:
        on_progress(num_done, num_jobs)
