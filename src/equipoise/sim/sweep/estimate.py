"""How long a sweep will take, from a second of a few of its runs."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from equipoise.sim.run import simulate
from equipoise.sim.workload.build import DRAWN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from equipoise.sim.sweep.jobs import Job

NUM_TRIED = 3
MOST_S = 1.0
"""For each that is tried."""


class _EnoughError(Exception):
    """A second is over."""


def estimate_s(jobs: Sequence[Job], num_processes: int) -> float | None:
    """About how many seconds `jobs` take: the first, the middle and the last are tried, at most a second each.

    None when it cannot be told: of a recorded trace without `num_requests`, when a second does not suffice."""
    tried = [jobs[index] for index in dict.fromkeys((0, len(jobs) // 2, len(jobs) - 1))][:NUM_TRIED]
    each = [_seconds(job) for job in tried]
    known = [seconds for seconds in each if seconds is not None]
    return sum(known) / len(known) * len(jobs) / min(num_processes, len(jobs)) if known else None


def _seconds(job: Job) -> float | None:
    """Of one job: as long as it takes, or what its first second says of the rest; None when it fails."""
    began = time.perf_counter()
    num_ended = 0

    def watch(num: int, _now_s: float) -> None:
        nonlocal num_ended
        num_ended = num
        if time.perf_counter() - began > MOST_S:
            raise _EnoughError

    try:
        with suppress(_EnoughError):
            simulate(job.scenario, folder=job.folder, on_progress=watch)
            return time.perf_counter() - began
    except Exception:  # it will fail again where that is told
        return None
    workload = job.scenario.workload
    total = workload.num_requests or (DRAWN if workload.kind in ("lengths", "sessions") else None)
    if total is None:
        return None
    if workload.kind == "sessions":
        total = round(total * workload.turns.mean)
    running = min(workload.concurrency or 0, total - num_ended)  # half done, on average
    return (time.perf_counter() - began) * total / min(total, num_ended + running / 2)
