"""Who listens to the steps of a simulation, and one that keeps a row for each step of every rank that ran in it."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from equipoise.exec.cost import StepLoad

INTEGERS = ("rank", "prefill_tokens", "decode_rows", "kv_tokens")
FLOATS = ("ends_s", "step_s", "wait_s")


class StepSink(Protocol):
    """Hears of each step when it is planned, of one rank after the other; each rank's steps come in order.

    Ranks are numbered over all workers. `step_s` is what the whole group's step takes, `wait_s` the part of it in
    which this rank has finished and waits for the slowest. A rank of a lockstep group that computes nothing in a step
    has no row."""

    def add(self, rank: int, ends_s: float, step_s: float, wait_s: float, load: StepLoad) -> None:
        """One step of `rank`."""
        ...

    def add_decodes(
        self,
        rank: int,
        ends_s: NDArray[np.float64],
        step_s: NDArray[np.float64],
        wait_s: NDArray[np.float64],
        decode_rows: int,
        kv_tokens: NDArray[np.int64],
    ) -> None:
        """(n,) steps of `rank` that only decode `decode_rows`: the same as `add` for each of them."""
        ...


class LossSink(Protocol):
    """Hears what the ranks of a lockstep group lose in a step to their slowest."""

    def add_lost(self, ends_s: float, prefill_s: float, seats_s: float, kv_s: float) -> None:
        """Rank-seconds that they wait in the step that ends at `ends_s`, by what makes the slowest slow."""
        ...


class StepLog:
    """Columns by step and rank: when the step ended, what it took, and what the rank computed in it: 56 bytes a row.

    Ranks are numbered over all workers. Those of a lockstep group that had nothing to compute have no row."""

    def __init__(self) -> None:
        self._columns: dict[str, array[Any]] = {name: array("q") for name in INTEGERS}
        self._columns |= {name: array("d") for name in FLOATS}

    def add(self, rank: int, ends_s: float, step_s: float, wait_s: float, load: StepLoad) -> None:
        """One step of `rank`."""
        values = (rank, load.prefill_tokens, load.decode_rows, load.kv_tokens, ends_s, step_s, wait_s)
        for name, value in zip((*INTEGERS, *FLOATS), values, strict=True):
            self._columns[name].append(value)

    def add_decodes(
        self,
        rank: int,
        ends_s: NDArray[np.float64],
        step_s: NDArray[np.float64],
        wait_s: NDArray[np.float64],
        decode_rows: int,
        kv_tokens: NDArray[np.int64],
    ) -> None:
        """(n,) steps of `rank` that decoded `decode_rows`."""
        n = len(ends_s)
        values = (np.full(n, rank), np.zeros(n, np.int64), np.full(n, decode_rows), kv_tokens, ends_s, step_s, wait_s)
        for name, column in zip((*INTEGERS, *FLOATS), values, strict=True):
            self._columns[name].frombytes(np.ascontiguousarray(column).tobytes())

    def columns(self, first_ranks: Sequence[int]) -> dict[str, NDArray[Any]]:
        """All columns by name, in the order of the steps' ends; `worker`, and `rank` of it.

        `first_ranks`: the number of each worker's first rank (`equipoise.sim.fleet.first_ranks`)."""
        columns = {name: np.array(column) for name, column in self._columns.items()}
        order = np.lexsort((columns["rank"], columns["ends_s"]))
        columns = {name: column[order] for name, column in columns.items()}
        number, firsts = columns.pop("rank"), np.array(first_ranks)
        worker = firsts.searchsorted(number, side="right") - 1
        return {"worker": worker, "rank": number - firsts[worker], **columns}
