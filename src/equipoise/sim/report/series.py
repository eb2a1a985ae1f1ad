"""What steps did over time, gathered while a simulation runs: so many numbers, however many the steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from equipoise.sim.report.bins import US, TimeBins, as_us

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from equipoise.exec.cost import StepLoad

    Floats = NDArray[np.float64]

MOST_BINS_OF_LOSSES = 160
MOST_BINS_OF_RANKS = 240
MOST_WAITING = 1 << 15
"""Steps that are kept until they are counted together."""

RUNNING, KV_TOKENS, BUSY, PREFILL_TOKENS, DECODE_TOKENS, WAITED = range(6)
"""Quantities of `StepSeries.ranks`. Over a bin's microseconds the first three are averages: requests in the step,
KV tokens that its decodes read, and whether there is a step. Then sums, in parts of PARTS: tokens of chunks, tokens of
decode rows, and seconds in which the rank waited for the slowest of its group."""
NUM_RATES = 3
PARTS = 1_000_000
"""Of a token or a second: a step may be spread over several bins."""

DURATIONS_PER_DECADE, LEAST_DURATION_S, DURATION_DECADES = 12, 1e-5, 8
DURATION_EDGES_S: Floats = LEAST_DURATION_S * 10 ** (
    np.arange(DURATIONS_PER_DECADE * DURATION_DECADES + 1) / DURATIONS_PER_DECADE
)
LOST_PARTS = ("prefill", "seats", "kv")


class StepSeries:
    """A sink of steps and of losses.

    ranks: quantities by rank and time; lost: nanoseconds of ranks that waited for the slowest, one row, by LOST_PARTS
    durations: (2, bins) steps of ranks by duration, those without a chunk and those with one; below
    DURATION_EDGES_S[0], from there to the next, and so on; times_us: microseconds in them
    """

    def __init__(self) -> None:
        self._ranks = TimeBins(MOST_BINS_OF_RANKS, 6)
        self._lost = TimeBins(MOST_BINS_OF_LOSSES, len(LOST_PARTS))
        self._durations = np.zeros((2, len(DURATION_EDGES_S) + 1), np.int64)
        self._times_us = np.zeros_like(self._durations)
        self._steps: list[tuple[float, ...]] = []
        self._decodes: list[Floats] = []
        self._losses: list[tuple[float, ...]] = []
        self._num_waiting = 0

    # ---------------------------------------------------------------- as a sink

    def add(self, rank: int, ends_s: float, step_s: float, wait_s: float, load: StepLoad) -> None:
        running = load.decode_rows + load.num_chunks
        self._steps.append(
            (rank, ends_s, step_s, wait_s, running, load.kv_tokens, load.prefill_tokens, load.decode_rows)
        )
        self._num_waiting += 1
        if self._num_waiting >= MOST_WAITING:
            self._count()

    def add_decodes(
        self,
        rank: int,
        ends_s: Floats,
        step_s: Floats,
        wait_s: Floats,
        decode_rows: int,
        kv_tokens: NDArray[np.int64],
    ) -> None:
        for first in range(0, len(ends_s), MOST_WAITING):
            part = slice(first, first + MOST_WAITING)
            rows = np.empty((len(ends_s[part]), 8))
            rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3] = rank, ends_s[part], step_s[part], wait_s[part]
            rows[:, 4], rows[:, 5], rows[:, 6], rows[:, 7] = decode_rows, kv_tokens[part], 0, decode_rows
            self._decodes.append(rows)
            self._num_waiting += len(rows)
            if self._num_waiting >= MOST_WAITING:
                self._count()

    def add_lost(self, ends_s: float, prefill_s: float, seats_s: float, kv_s: float) -> None:
        self._losses.append((ends_s, prefill_s, seats_s, kv_s))
        if len(self._losses) >= MOST_WAITING:
            self._count_losses()

    # ---------------------------------------------------------------- what came of it

    @property
    def ranks(self) -> TimeBins:
        """By rank, numbered over all workers."""
        self._count()
        return self._ranks

    @property
    def lost(self) -> TimeBins:
        """In one row."""
        self._count_losses()
        return self._lost

    @property
    def durations(self) -> NDArray[np.int64]:
        """Counts of steps of ranks."""
        self._count()
        return self._durations

    @property
    def times_us(self) -> NDArray[np.int64]:
        """Microseconds of ranks in steps."""
        self._count()
        return self._times_us

    # ---------------------------------------------------------------- counting many at once

    def _count(self) -> None:
        if not self._num_waiting:
            return
        parts = [np.array(self._steps)] if self._steps else []
        rows = np.concatenate([*parts, *self._decodes])
        self._steps, self._decodes, self._num_waiting = [], [], 0
        ends_us, begins_us = as_us(rows[:, 1]), as_us(rows[:, 1] - rows[:, 2])
        counts = rows[:, [0, 4, 5, 6, 7]].astype(np.int64)
        self._ranks.add(
            counts[:, 0],
            begins_us,
            ends_us,
            rates=np.column_stack([counts[:, 1:3], np.ones(len(rows), np.int64)]),
            amounts=np.column_stack([counts[:, 3:] * PARTS, as_us(rows[:, 3])]),
        )
        bins = DURATION_EDGES_S.searchsorted(rows[:, 2], side="right")
        kinds = (counts[:, 3] > 0).astype(np.int64)
        np.add.at(self._durations, (kinds, bins), 1)
        np.add.at(self._times_us, (kinds, bins), ends_us - begins_us)

    def _count_losses(self) -> None:
        if not self._losses:
            return
        rows = np.array(self._losses)
        self._losses = []
        ends_us = as_us(rows[:, 0])
        nothing = np.zeros((len(rows), 0), np.int64)
        zeros = np.zeros(len(rows), np.int64)
        lost_ns = np.rint(rows[:, 1:] * 1e9).astype(np.int64)
        self._lost.add(zeros, ends_us - 1, ends_us, rates=nothing, amounts=lost_ns)


def per_second(bins: TimeBins, quantity: int) -> Floats:
    """(rows, bins in use) of a quantity of `StepSeries.ranks`: its average, or what comes in a second of it."""
    return bins.sums[:, : bins.num_used, quantity] / (bins.width_us * (1 if quantity < NUM_RATES else PARTS / US))
