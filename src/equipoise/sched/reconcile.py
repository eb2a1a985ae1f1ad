"""Reconciles the counters, which ran ahead, with the tokens that a step drew."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from equipoise.sched.columns import ONE
from equipoise.sched.plan import StepResult

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from equipoise.exec.protocol import StepOutput
    from equipoise.kv.protocol import KVMemory
    from equipoise.request import FinishReason, Request
    from equipoise.sched.ledger import Totals
    from equipoise.sched.places import Places
    from equipoise.sched.plan import PrefillRow, StepPlan


class Reconciler:
    """Delivers tokens, ends requests and publishes pages whose tokens are known now.

    restarting: handles of requests that are to start anew once their row to verify is back
    """

    def __init__(self, places: Places, kv: KVMemory, totals: Totals) -> None:
        self.restarting: set[int] = set()
        self._places = places
        self._columns = places.columns
        self._kv = kv
        self._totals = totals

    def end(self, request: Request, reason: FinishReason) -> None:
        """End `request`, wherever it is, and count it."""
        self._places.end(request, reason)
        if reason in ("stop", "length"):
            self._totals.finished += 1
        else:
            self._totals.aborted += 1

    def preempt(self, request: Request) -> None:
        """Have a running request start anew, outside of any plan, and count it."""
        self._totals.preemptions += 1
        self._places.preempt(request)

    def apply(self, plan: StepPlan, output: StepOutput) -> StepResult:
        """Reconcile with what a step drew. Plans are applied in the order in which they were scheduled.

        Rows of requests that have ended since are dropped; a preempted request still gets its token."""
        columns = self._columns
        plain = plan.num_plain
        seats, tokens, at = plan.sampled_seats[:plain], output.tokens[:plain], plan.sampled_at[:plain]
        rows = np.arange(plain)
        live = columns.handle[seats] == plan.sampled_handles[:plain]
        late: list[int] = []
        if np.count_nonzero(live) < plain:
            late = [row for row in np.flatnonzero(~live).tolist() if self._deliver_late(plan, row, tokens)]
            rows = rows[live]
            seats, tokens, at = seats[live], tokens[live], at[live]
        columns.tokens[seats, at] = tokens
        known = at + ONE
        columns.known[seats] = known
        self._places.ledger.deliver(len(rows))
        self._publish_decodes(plan)
        finished = self._end_stopped(seats, tokens, known)
        finished += [request for row in late if (request := self._ended_late(plan, row))]
        late += self._settle_drafts(plan, output.tokens, finished)
        if late:
            rows = np.concatenate([rows, np.array(late, rows.dtype)])
        self._totals.output_tokens += len(rows)
        return StepResult(rows, plan.sampled_handles[rows], output.tokens[rows], finished)

    def _publish_decodes(self, plan: StepPlan) -> None:
        """Pages that this step's decodes filled hold known tokens now."""
        columns = self._columns
        is_last_of_page = plan.decode_starts & columns.page_mask == columns.page_mask
        rows = is_last_of_page.nonzero()[0]
        if not len(rows):
            return
        rows = rows[columns.handle[plan.decode_seats[rows]] == plan.sampled_handles[rows]]
        seats = plan.decode_seats[rows]
        requests = [self._places.at(seat) for seat in seats.tolist()]
        self._kv.publish_next(requests, columns.last_page_tokens(seats, plan.decode_starts[rows]))

    def _end_stopped(
        self, seats: NDArray[np.int64], tokens: NDArray[np.int32], known: NDArray[np.int64]
    ) -> list[Request]:
        """End the requests that drew a stop token or reached their length."""
        ended: dict[int, FinishReason] = dict.fromkeys(self._rows_stopped(seats, tokens), "stop")
        for row in (known >= self._columns.stop_len[seats]).nonzero()[0].tolist():
            ended.setdefault(row, "length")
        finished = []
        for row in sorted(ended):
            request = self._places.at(int(seats[row]))
            if self._places.role.inflight:
                self._places.send(request)
            else:
                self.end(request, ended[row])
            finished.append(request)
        return finished

    def _rows_stopped(self, seats: NDArray[np.int64], tokens: NDArray[np.int32]) -> list[int]:
        """Rows that drew one of their stop tokens."""
        columns, many_stops = self._columns, self._places.many_stops
        rows: list[int] = []
        for stop_ids in columns.stop_ids[: columns.stop_width]:
            rows += (stop_ids[seats] == tokens).nonzero()[0].tolist()
        if many_stops:
            pairs = enumerate(zip(seats.tolist(), tokens.tolist(), strict=True))
            rows += [row for row, (seat, token) in pairs if token in many_stops.get(seat, ())]
        return rows

    def _settle_drafts(self, plan: StepPlan, tokens: NDArray[np.int32], finished: list[Request]) -> list[int]:
        """Keep the drafts that were drawn, and the token after them; returns their sampled rows."""
        delivered: list[int] = []
        first = plan.num_plain
        for row in plan.verifies:
            # Nobody preempts a request with a row to verify in flight: it is where it was, or it has ended.
            if row.request.place == "verifying":
                drawn = tokens[first : first + row.num_samples].tolist()
                delivered += range(first, first + self._settle_row(row, drawn, finished))
                if row.request.handle in self.restarting and row.request.place == "drafting":
                    self.preempt(row.request)
            self.restarting.discard(row.request.handle)
            first += row.num_samples
        return delivered

    def _settle_row(self, row: PrefillRow, drawn: list[int], finished: list[Request]) -> int:
        """Reconcile one row; returns how many of the tokens drawn count, at least 1."""
        columns, request, seat = self._columns, row.request, row.seat
        num_kept = 1
        while num_kept <= len(row.drafts) and row.drafts[num_kept - 1] == drawn[num_kept - 1] not in request.stop_ids:
            num_kept += 1
        known = int(columns.known[seat]) + num_kept
        columns.tokens[seat, known - num_kept : known] = drawn[:num_kept]
        columns.known[seat] = columns.length[seat] = known
        self._places.ledger.deliver(num_kept)
        columns.computed[seat] = request.num_computed = known - 1
        self._kv.publish(request, columns.tokens[seat], known - 1)
        stopped = drawn[num_kept - 1] in request.stop_ids
        if stopped or known >= request.stop_len:
            self.end(request, "stop" if stopped else "length")
            finished.append(request)
        else:
            self._places.draft(request)
        return num_kept

    def _deliver_late(self, plan: StepPlan, row: int, tokens: NDArray[np.int32]) -> bool:
        """The token of a row whose request left its seat: kept if it was preempted, dropped if it ended."""
        request = self._places.requests.get(int(plan.sampled_handles[row]))
        if request is None:
            return False
        request.output_ids.append(int(tokens[row]))
        request.num_inflight -= 1
        return True

    def _ended_late(self, plan: StepPlan, row: int) -> Request | None:
        """End or queue a preempted request after `_deliver_late`; returns it when it ended."""
        request = self._places.requests[int(plan.sampled_handles[row])]
        if request.output_ids[-1] in request.stop_ids:
            self.end(request, "stop")
        elif request.num_inflight == 0:
            # Not at its length yet: a request whose length is certain is draining, and nobody preempts it.
            self._places.come_back(request)
        return None if request.finish_reason is None else request
