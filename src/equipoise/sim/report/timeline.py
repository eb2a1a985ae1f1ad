"""The timeline of a simulation: a sink that writes each step to a trace file as it is planned."""

from __future__ import annotations

import gzip
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from equipoise.obs.timeline import StepSpan, TraceWriter
from equipoise.sim.fleet import sizes_of
from equipoise.sim.report.measures import sample

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import IO

    from numpy.typing import NDArray

    from equipoise.exec.cost import StepLoad
    from equipoise.sim.run import Results
    from equipoise.sim.scenario import FleetConfig

    Floats = NDArray[np.float64]

MOST_REQUESTS = 2000
"""Requests that are drawn one by one."""
MOST_CHANGES = 20_000
"""Changes of the number that waits for a rank; of more, every so manieth is written."""


class Timeline:
    """A sink of steps. Call `finish` when the run has ended."""

    def __init__(self, file: IO[str], fleet: FleetConfig) -> None:
        self._writer = TraceWriter(file)
        self._place: list[tuple[int, int]] = []
        worker = 0
        sizes = sizes_of(fleet)
        for role, size in sizes.items():
            for _ in range(size.workers):
                self._writer.name_worker(worker, f"{role} worker {worker}" if len(sizes) > 1 else f"worker {worker}")
                for rank in range(size.ranks):
                    self._place.append((worker, rank))
                    self._writer.name_rank(worker, rank, f"rank {rank}")
                worker += 1

    def add(self, rank: int, ends_s: float, step_s: float, wait_s: float, load: StepLoad) -> None:
        work = load.prefill_tokens, load.num_chunks, load.decode_rows, load.kv_tokens
        self._writer.step(*self._place[rank], StepSpan(ends_s - step_s, ends_s, wait_s, *work))

    def add_decodes(
        self,
        rank: int,
        ends_s: Floats,
        step_s: Floats,
        wait_s: Floats,
        decode_rows: int,
        kv_tokens: NDArray[np.int64],
    ) -> None:
        place, begins_s = self._place[rank], ends_s - step_s
        columns = (begins_s.tolist(), ends_s.tolist(), wait_s.tolist(), kv_tokens.tolist())
        for begin_s, end_s, waited_s, kv in zip(*columns, strict=True):
            self._writer.step(*place, StepSpan(begin_s, end_s, waited_s, 0, 0, decode_rows, kv))

    def finish(self, results: Results) -> None:
        """Add who waits for each rank, and some requests, and end the trace."""
        columns = results.requests.columns()
        done = np.flatnonzero(~np.isnan(columns["last_s"]))
        for place in self._place:
            of_rank = done[(columns["worker"][done] == place[0]) & (columns["rank"][done] == place[1])]
            changes = _changes(columns["arrival_s"][of_rank], columns["admitted_s"][of_rank])
            for at_s, num_waiting in changes:
                self._writer.waiting(*place, at_s, num_waiting)
        stages = ("queued", "prefill", "decode", "")
        for i in sample(done, MOST_REQUESTS).tolist():
            times = (float(columns[name][i]) for name in ("arrival_s", "admitted_s", "first_s", "last_s"))
            names = ("prompt_len", "output_len", "num_cached", "num_preemptions", "rank")
            args = {name: int(columns[name][i]) for name in names}
            self._writer.request(int(columns["worker"][i]), i, args, zip(stages, times, strict=True))
        self._writer.close()


def _changes(came_s: NDArray[np.generic], left_s: NDArray[np.generic]) -> list[tuple[float, int]]:
    """Times, and how many there are from then on."""
    times_s = np.concatenate([came_s, left_s]).astype(np.float64)
    moves = np.repeat([1, -1], [len(came_s), len(left_s)])
    order = np.lexsort((-moves, times_s))
    counts = moves[order].cumsum()
    stride = -(-max(len(order), 1) // MOST_CHANGES)
    return list(zip(times_s[order][::stride].tolist(), counts[::stride].tolist(), strict=True))


@contextmanager
def open_trace(path: Path) -> Iterator[IO[str]]:
    """The file to write to, compressed when its name ends in .gz. Raises OSError."""
    if path.suffix == ".gz":
        with gzip.open(path, "wt", compresslevel=5, encoding="utf-8") as file:
            yield file
    else:
        with path.open("w", encoding="utf-8") as file:
            yield file
