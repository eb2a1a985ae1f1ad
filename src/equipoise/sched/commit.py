"""Counts a planned step as run: the counters are ahead of the tokens, which come later."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from equipoise.sched.columns import ONE

if TYPE_CHECKING:
    from equipoise.request import Request
    from equipoise.sched.drafts import Drafter
    from equipoise.sched.ledger import Totals
    from equipoise.sched.places import Places
    from equipoise.sched.plan import PrefillRow, StepPlan


class Committer:
    """Advances columns, places and ledger by a plan."""

    def __init__(self, places: Places, drafter: Drafter | None, totals: Totals) -> None:
        self._places = places
        self._drafter = drafter
        self._totals = totals

    def commit(self, plan: StepPlan) -> None:
        """Advance every counter as if the step had run, and name the rows that draw a token."""
        columns = self._places.columns
        seats = plan.decode_seats
        plan.decode_starts = columns.computed[seats]
        plan.sampled_seats, plan.sampled_at = seats, plan.decode_starts + ONE
        columns.computed[seats] = plan.sampled_at
        plan.num_plain = len(seats)
        if plan.prefills or plan.verifies:
            self._commit_chunks(plan)
        plan.num_tokens = len(seats) + sum([row.n for row in plan.prefills])
        if plan.num_tokens == 0:
            return
        plan.sampled_handles = columns.handle[plan.sampled_seats]
        length = plan.sampled_at + ONE
        columns.length[plan.sampled_seats] = length
        plain = plan.sampled_seats[: plan.num_plain]
        certain = length[: plan.num_plain] >= columns.stop_len[plain]
        if np.count_nonzero(certain):
            self._places.drain(plain[certain])
        self._places.ledger.launch(plan.num_rows)
        self._totals.steps += 1

    def _commit_chunks(self, plan: StepPlan) -> None:
        """The chunks count as computed; rows to verify go last, and so do the rows that they sample."""
        plain: list[PrefillRow] = []
        verifies: list[PrefillRow] = []
        for row in plan.prefills:
            self._places.ledger.compute(row.request, row.n)
        for row in [*plan.prefills, *plan.verifies]:
            row.request.num_computed = row.start + row.n
            self._places.columns.computed[row.seat] = row.request.num_computed
            is_verified = row.samples and self._drafts_for(row.request)
            (verifies if is_verified else plain).append(row)
            if is_verified:
                self._places.verify(row.request)
            elif row.samples:
                self._places.decode(row.request, row.seat)
        plan.num_plain += sum([row.num_samples for row in plain])
        plan.verifies, plan.prefills = verifies, plain + verifies
        if not any(row.samples for row in plan.prefills):
            return
        seats = [np.full(row.num_samples, row.seat) for row in plan.prefills]
        ends = [row.start + row.n + 1 for row in plan.prefills]
        at = [np.arange(end - row.num_samples, end) for end, row in zip(ends, plan.prefills, strict=True)]
        plan.sampled_seats = np.concatenate([plan.sampled_seats, *seats])
        plan.sampled_at = np.concatenate([plan.sampled_at, *at])

    def _drafts_for(self, request: Request) -> bool:
        return self._drafter is not None and self._drafter.drafts_for(request)
