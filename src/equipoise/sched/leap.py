"""Steps in which nothing happens to any request, taken in one move: for virtual time, where nobody looks in between.

What a leap of n steps leaves behind is what n pairs of `schedule` and `apply` would, pages and prefixes included:
pages are given out and published in the order of the steps.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from equipoise.errors import InvariantError
from equipoise.sched.planner import NO_PAGES, NO_SEAT
from equipoise.sched.rules import Lasting, LastingGate

if TYPE_CHECKING:
    from collections import deque

    from numpy.typing import NDArray

    from equipoise.kv.protocol import KVMemory
    from equipoise.sched.ledger import LoadCounters, Totals
    from equipoise.sched.places import Places
    from equipoise.sched.plan import StepPlan
    from equipoise.sched.planner import Planner
    from equipoise.sched.rules import Rules


class Leaper:
    """Knows how many steps will be quiet, and takes them.

    has_gates: some gate is to be asked in every step
    """

    def __init__(
        self, places: Places, kv: KVMemory, rules: Rules, totals: Totals, *, max_step_tokens: int, bypasses: bool
    ) -> None:
        """`bypasses`: requests that lack pages may be passed by others."""
        self._places = places
        self._columns = places.columns
        self._kv = kv
        self._totals = totals
        self._max_step_tokens = max_step_tokens
        self._rooms: list[int] = []  # tokens that fit the last page of each row, ascending; of the last `num_quiet`
        gates = (*rules.prefill_gates, *rules.admission_gates)
        self.has_gates = bool(gates)
        self._lasting = [gate for gate in gates if isinstance(gate, LastingGate)]
        self._all_may_last = len(self._lasting) == len(gates)
        self._all_forget = all(isinstance(gate, Lasting) for gate in gates)
        # Rules that look at every step are not leapt over.
        self._is_plain = not (rules.observers or rules.resources or rules.drafter)
        # A head that lacks pages asks in every step what is cached of it: gates may look at that.
        self._lasting_holds = {NO_SEAT} if bypasses or gates else {NO_SEAT, NO_PAGES}

    @property
    def asks_gates(self) -> bool:
        """Do gates matter to a step that only decodes: is there one that remembers what it is asked, or does somebody
        wait?"""
        return self.has_gates and (not self._all_forget or bool(self._places.waiting))

    @property
    def gates_last(self) -> bool:
        """Would asking the gates again change nothing, until a request moves on any rank?"""
        return not self.asks_gates or (self._all_may_last and all(gate.lasts for gate in self._lasting))

    def num_quiet(self, outstanding: deque[StepPlan], planner: Planner, most: int) -> int:
        """How many of the next `most` steps do nothing but decode all that decodes, as long as the gates answer as in
        the last plan; 0 when in doubt."""
        places, columns = self._places, self._columns
        if places.prefilling:
            return 0
        seats = places.decoding.seats()
        num_rows = len(seats)
        if not self._is_plain or not 0 < num_rows <= self._max_step_tokens or columns.stop_width:
            return 0
        if num_rows != places.num_running or places.ledger.num_startable_reqs != len(places.waiting):
            return 0  # somebody drains or is about to wait
        if places.waiting and not self._stays_out(planner):
            return 0
        if any(plan.prefills or plan.seated or not np.array_equal(plan.decode_seats, seats) for plan in outstanding):
            return 0
        # A step after which a length is certain moves its request: it is not quiet.
        most = min(most, int((columns.stop_len[seats] - columns.length[seats]).min()) - 1)
        return self._affordable(seats, most) if most > 0 else 0

    def _stays_out(self, planner: Planner) -> bool:
        """Does what held the head of the queue back in the last plan do so until somebody ends or a gate opens?"""
        held_by, entry = planner.held_by, planner.entry
        return held_by in self._lasting_holds or (entry.allowed == 0 and held_by == entry.closed_by)

    def _affordable(self, seats: NDArray[np.int64], most: int) -> int:
        """The largest n, at most `most`, for which there are pages."""
        self._rooms = np.sort(self._columns.capacity[seats] - self._columns.computed[seats]).tolist()
        num_free = self._kv.num_free
        if self.num_pages_after(most) <= num_free:
            return most
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.num_pages_after(middle) <= num_free else (low, middle)
        return low

    def num_pages_after(self, n: int) -> int:
        """Pages that `n` quiet steps take, of those that `num_quiet` told and that were not taken since."""
        rooms, page_size = self._rooms, self._kv.page_size
        if rooms[-1] >= page_size:
            return sum([max(0, -(-(n - room) // page_size)) for room in rooms])
        num_each, rest = divmod(n, page_size)
        return num_each * len(rooms) + bisect_left(rooms, rest)

    def load_after(self, load: LoadCounters, n: int) -> LoadCounters:
        """`load`, which is that of now, as it will be when `n` quiet steps have landed and one more is planned; what
        is cached of waiting requests counts as now."""
        num_rows = len(self._rooms)
        return msgspec.structs.replace(
            load,
            num_inflight_rows=load.num_inflight_rows + num_rows,
            num_expected_output_tokens=load.num_expected_output_tokens - n * num_rows,
            num_used_tokens=load.num_used_tokens + self.num_pages_after(n + 1) * self._kv.page_size,
        )

    def leap(self, outstanding: deque[StepPlan], held_by: str, n: int) -> None:
        """Take `n` quiet steps, in each of which every row draws token 0."""
        columns = self._columns
        seats = self._places.decoding.seats().copy()
        turns = self._turns(seats, n, len(outstanding))
        last_landing = bisect_left(turns, (2 * n + 1, 0))
        self._turn_pages(seats, turns[:last_landing], len(outstanding))
        if held_by == NO_PAGES:
            self.match_head()
        self._turn_pages(seats, turns[last_landing:], len(outstanding))
        columns.computed[seats] += n
        columns.known[seats] += n
        columns.length[seats] += n
        for plan in outstanding:
            plan.step += n
            plan.decode_starts = plan.decode_starts + n
            plan.sampled_at = plan.sampled_at + n
        self._places.ledger.deliver(n * len(seats))
        self._totals.steps += n
        self._totals.output_tokens += n * len(seats)

    def _turns(self, seats: NDArray[np.int64], n: int, num_outstanding: int) -> list[tuple[int, int]]:
        """(turn, row) of the pages that begin and fill, in the order of the steps, as what is evicted and who
        publishes a key first depend on it. In turn 2i step i of 1..n is planned, in turn 2i + 1 the oldest lands."""
        columns, page_size = self._columns, self._kv.page_size
        computed, known = columns.computed[seats], columns.known[seats]
        # Step i writes position computed + i - 1 of a row; the step that lands is `num_outstanding` positions behind.
        begins = _occasions(columns.capacity[seats] - computed + 1, page_size, n)
        fills = _occasions(page_size - (computed - num_outstanding) % page_size, page_size, n)
        for row, seat in enumerate(seats.tolist()):
            columns.tokens[seat, known[row] : known[row] + n] = 0
        return sorted([(2 * step, row) for step, row in begins] + [(2 * step + 1, row) for step, row in fills])

    def _turn_pages(self, seats: NDArray[np.int64], turns: list[tuple[int, int]], num_outstanding: int) -> None:
        """Give out and publish pages; the columns still stand where the leap began."""
        columns = self._columns
        for turn, row in turns:
            seat = int(seats[row])
            request = self._places.at(seat)
            step, lands = divmod(turn, 2)
            upto = int(columns.computed[seat]) + step
            if lands:
                self._kv.publish(request, columns.tokens[seat], upto - num_outstanding)
            elif self._kv.grow(request, upto):
                columns.write_pages(request, seat)
            else:
                raise InvariantError(f"step {step} of a leap lacks pages, {self._kv.num_free} are free")

    def match_head(self) -> None:
        """The head of the queue, which lacks pages, asks in every step for what is cached of it: so it does now."""
        head = self._places.waiting.head()
        if head is not None:
            self._places.ledger.recognise(head, self._kv.match(head).num_tokens)


def _occasions(first: NDArray[np.int64], every: int, n: int) -> list[tuple[int, int]]:
    """(step, row) of each row's steps `first`, `first + every`, ... that are among the steps 1 to `n`."""
    found: list[tuple[int, int]] = []
    for row in np.flatnonzero(first <= n).tolist():
        found += [(step, row) for step in range(int(first[row]), n + 1, every)]
    return found
