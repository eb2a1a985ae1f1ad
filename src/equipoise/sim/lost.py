"""What ranks of a lockstep group lose to their slowest, by the prefills, rows and KV that it has and they have not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from equipoise.exec.cost import StepLoad

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from equipoise.exec.cost import CostModel
    from equipoise.sim.results import Steps

    Seconds = NDArray[np.float64]


class Lost:
    """Adds up rank-seconds, of steps one by one or of many at once with the same sums."""

    def __init__(self, steps: Steps, cost: CostModel, num_ranks: int) -> None:
        self._steps = steps
        self._cost = cost
        self._num_ranks = num_ranks
        self._by_rows: dict[int, float] = {}

    def add(self, loads: Sequence[StepLoad], own_s: Sequence[float], ends_s: float) -> None:
        """A step in which ranks computed `loads`, which cost them `own_s`."""
        decode_s = [self._decode_s(load, seconds) for load, seconds in zip(loads, own_s, strict=True)]
        rows_s = [self._rows_s(load.decode_rows) for load in loads]
        own, decode, rows = np.array([own_s, decode_s, rows_s])[:, :, None]
        self._add(own, decode, rows, np.array([ends_s]))

    def add_each(self, own_s: Sequence[Seconds], rows_s: Sequence[float], ends_s: Seconds) -> None:
        """Steps that end at `ends_s`, (n,), in which ranks only decoded: it cost them `own_s`, (n,) each, and would
        have cost them `rows_s` without KV."""
        own = np.array(own_s)
        self._add(own, own, np.repeat(np.array(rows_s)[:, None], len(ends_s), axis=1), ends_s)

    def _add(self, own_s: Seconds, decode_s: Seconds, rows_s: Seconds, ends_s: Seconds) -> None:
        """(ranks, n) seconds: of everything, without prefills, and without KV too."""
        slowest = own_s.argmax(axis=0), np.arange(len(ends_s))
        # Added rank by rank: `sum` would add in another order when there is one step.
        sums = [np.add.accumulate(each, axis=0)[-1] for each in (own_s, decode_s, rows_s)]
        all_own, all_decode, all_rows = (
            self._num_ranks * each[slowest] - total for each, total in zip((own_s, decode_s, rows_s), sums, strict=True)
        )
        parts = {"prefill": all_own - all_decode, "kv": all_decode - all_rows, "seats": all_rows}
        for part, lost_s in parts.items():
            self._steps.lose(part, lost_s)
        for sink in self._steps.loss_sinks:
            each = (parts[name].tolist() for name in ("prefill", "seats", "kv"))
            for end_s, prefill_s, seats_s, kv_s in zip(ends_s.tolist(), *each, strict=True):
                sink.add_lost(end_s, prefill_s, seats_s, kv_s)

    def _decode_s(self, load: StepLoad, own_s: float) -> float:
        """What the step would cost without its prefills."""
        if not load.prefill_tokens:
            return own_s
        return self._cost.rank_s(StepLoad(decode_rows=load.decode_rows, kv_tokens=load.kv_tokens))

    def _rows_s(self, num_rows: int) -> float:
        """What they cost without KV."""
        found = self._by_rows.get(num_rows)
        if found is None:
            found = self._by_rows[num_rows] = self._cost.rank_s(StepLoad(decode_rows=num_rows))
        return found
