"""The scheduler of one rank. There are no phases: a step lets the tokens computed catch up with the tokens known.

Places of a request (`request.place`), and what moves it:

    new ──add──> waiting ──admit──> prefilling ──last chunk──> decoding ──length certain──> draining ──> ended
     │              ▲                   │                          │                           │
     └─> parked ────┘ wake              └────────preempt───────────┤                           └ its last tokens
                    ▲                                              ▼                             are in flight
                    └───────────── outputs came back ───────── returning
    abort, a stop token and a deadline end a request in any place.

`schedule` plans one step and advances every counter as if the step had run; `apply` reconciles with
the tokens that came. Up to `depth` plans may be outstanding when `schedule` is called.
"""

from __future__ import annotations

import heapq
from bisect import insort
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from equipoise.errors import InvalidValueError, InvariantError, QueueFullError
from equipoise.sched.columns import STOP_IDS_WIDTH, Columns
from equipoise.sched.ledger import Ledger
from equipoise.sched.plan import PrefillRow, StepPlan, StepResult
from equipoise.sched.roster import Roster
from equipoise.sched.rules import OPEN, RankState, StepView
from equipoise.sched.waiting import WaitingQueue

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Literal

    from numpy.typing import NDArray

    from equipoise.clock import Clock
    from equipoise.exec.protocol import StepOutput
    from equipoise.kv.protocol import KVMemory
    from equipoise.request import FinishReason, Request
    from equipoise.sched.resources import TokenBudget
    from equipoise.sched.rules import Gate, Limit, LimitRule, Order, Resource

PRUNE_DEADLINES_AT = 1024


@dataclass(frozen=True, slots=True)
class LoadCounters:
    """Load of a rank at one moment; see the design's load table. Tokens, pages, requests."""

    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_used_tokens: int
    num_total_tokens: int
    max_running: int


@dataclass(slots=True)
class Totals:
    """Counts since the scheduler was built."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    aborted: int = 0


@dataclass(frozen=True)
class Rules:
    """Every optional feature of a scheduler, by shape. A disabled feature is not in here."""

    order: Order
    limits: Sequence[LimitRule] = ()
    prefill_gates: Sequence[Gate] = ()
    admission_gates: Sequence[Gate] = ()
    resources: Sequence[Resource] = ()


class Scheduler:
    """Decides what each step computes, and for whom. Single-threaded; does no I/O."""

    def __init__(
        self,
        *,
        kv: KVMemory,
        clock: Clock,
        budget: TokenBudget,
        rules: Rules,
        max_running: int,
        max_model_len: int,
        depth: int = 0,
        reserve_full_prompt: bool = True,
        watermark_pages: int = 0,
        max_waiting_reqs: int = 4096,
        max_waiting_tokens: int | None = None,
    ) -> None:
        self.kv = kv
        self.depth = depth
        self.max_running = max_running
        self.max_model_len = max_model_len
        self.columns = Columns(max_running, max_model_len, kv.page_size)
        self.totals = Totals()
        self._clock = clock
        self._budget = budget
        self._rules = rules
        self._reserve_full_prompt = reserve_full_prompt
        self._watermark_pages = watermark_pages
        self._max_waiting_reqs = max_waiting_reqs
        self._max_waiting_tokens = max_waiting_tokens
        self._ledger = Ledger()
        self._requests: dict[int, Request] = {}
        self._by_seat: list[Request | None] = [None] * max_running
        self._free_seats = list(range(max_running - 1, -1, -1))
        self._waiting = WaitingQueue(rules.order)
        self._prefilling: list[Request] = []
        self._roster = Roster(max_running)
        self._draining: dict[int, Request] = {}
        self._many_stops: dict[int, frozenset[int]] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._pause: Literal["", "new", "all"] = ""
        self._step = 0
        self._has_backlog = False
        self._num_outstanding = 0

    # ---------------------------------------------------------------- requests come and go

    def add(self, request: Request, wait_for: str | None = None) -> None:
        """Take a new request. With `wait_for` it is parked under that name until `wake`.

        Raises QueueFullError when the waiting queue is full, InvalidValueError when it can never run."""
        self._check_room_to_wait(request)
        if request.handle in self._requests:
            raise InvariantError(f"handle {request.handle} is in use by {self._requests[request.handle]}")
        self._requests[request.handle] = request
        if request.deadline_s is not None:
            heapq.heappush(self._deadlines, (request.deadline_s, request.handle))
        if wait_for is None:
            self._wait(request)
        else:
            self._ledger.move(request, "parked")

    def wake(self, handle: int) -> None:
        """What a parked request waited for is there. Ignored when the request has ended."""
        request = self._requests.get(handle)
        if request is not None and request.place == "parked":
            self._wait(request)

    def abort(self, handle: int, reason: FinishReason = "abort") -> Request | None:
        """End a request wherever it is; rows of it that are in flight are dropped. None when it is unknown or ended."""
        request = self._requests.get(handle)
        if request is not None:
            self._end(request, reason)
        return request

    def expire(self) -> list[Request]:
        """End the requests whose deadline has passed."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= self._clock.now():
            _, handle = heapq.heappop(self._deadlines)
            request = self.abort(handle)
            if request is not None:
                expired.append(request)
        return expired

    @property
    def next_deadline_s(self) -> float | None:
        """When `expire` has something to do next, at the earliest."""
        return self._deadlines[0][0] if self._deadlines else None

    def pause(self, mode: Literal["new", "all"]) -> None:
        """ "new": admit nobody, let the running finish. "all": plan nothing."""
        self._pause = mode

    def resume(self) -> None:
        """Undo `pause`."""
        self._pause = ""

    def flush_cache(self) -> int:
        """Forget all cached prefixes; returns the pages dropped."""
        return self.kv.flush()

    # ---------------------------------------------------------------- what others may read

    @property
    def paused(self) -> Literal["", "new", "all"]:
        """The mode of `pause` in force, "" when there is none."""
        return self._pause

    @property
    def has_work(self) -> bool:
        """May `schedule` find something to run? False when idle and when what is left is paused."""
        if self._pause == "all":
            return False
        return bool(self._prefilling or len(self._roster) or (self._waiting and not self._pause))

    @property
    def num_requests(self) -> int:
        """Requests that have not ended, parked ones included."""
        return len(self._requests)

    def requests(self) -> Iterable[Request]:
        """Every request that has not ended."""
        return self._requests.values()

    def load(self) -> LoadCounters:
        """Load now, in O(1)."""
        kv, ledger = self.kv, self._ledger
        return LoadCounters(
            num_running=self._num_running,
            num_waiting=ledger.num_waiting_reqs,
            num_waiting_tokens=ledger.num_waiting_tokens,
            num_used_tokens=(kv.num_pages - kv.num_free) * kv.page_size,
            num_total_tokens=kv.num_pages * kv.page_size,
            max_running=self.max_running,
        )

    def state(self) -> RankState:
        """What the other ranks of a lockstep group must know of this one."""
        waiting = self._ledger.num_waiting_reqs
        return RankState(self._num_running, waiting, wants_prefill=bool(waiting or self._prefilling))

    # ---------------------------------------------------------------- plan a step

    def schedule(self, ranks: tuple[RankState, ...] | None = None) -> StepPlan:
        """Plan the next step and count it as run: decodes, then running prefills, then admissions.

        `ranks`: the state of every rank of a lockstep group, this one included; None when alone.
        A plan that is empty must not be submitted nor applied."""
        view = self._view(ranks)
        plan = StepPlan(self._step)
        self._budget.begin_step()
        for resource in self._rules.resources:
            resource.begin_step()
        self._plan_decodes(plan)
        if _answer(self._rules.prefill_gates, view):
            limits = [limit for rule in self._rules.limits if (limit := rule(view)) is not None]
            self._plan_prefills(plan, limits)
            for row in plan.prefills:
                self._publish_chunk(row)
            if not plan.preempted:
                self._plan_admissions(plan, limits, self._num_admissible(view))
        self._commit(plan)
        return plan

    def _view(self, ranks: tuple[RankState, ...] | None) -> StepView:
        num_running, num_waiting = self._num_running, self._ledger.num_waiting_reqs
        return StepView(
            step=self._step,
            now_s=self._clock.now(),
            num_running=num_running,
            num_decoding=len(self._roster),
            num_prefilling=len(self._prefilling),
            num_waiting=num_waiting,
            num_free_seats=len(self._free_seats),
            has_backlog=self._has_backlog,
            ranks=ranks or (self.state(),),
        )

    def _plan_decodes(self, plan: StepPlan) -> None:
        columns = self.columns
        seats = self._roster.seats()[: self._budget.left].copy()
        if self._num_outstanding > self.depth:
            # Planned further ahead than `depth`: rows that already run that far ahead sit this step out.
            seats = seats[columns.length[seats] - columns.known[seats] <= self.depth]
        plan.decode_seats = seats
        self._budget.charge_decodes(len(seats))
        for seat in seats[columns.capacity[seats] <= columns.computed[seats]].tolist():
            request = self._by_seat[seat]
            if request is not None:  # not preempted for one before it
                self._grow_or_preempt(plan, request, seat, int(columns.capacity[seat]) + 1)

    def _plan_prefills(self, plan: StepPlan, limits: list[Limit]) -> None:
        for request in tuple(self._prefilling):
            seat = request.seat
            if seat is None:
                continue  # preempted for one before it
            n = self._chunk(request, limits)
            if n and self._grow_or_preempt(plan, request, seat, request.num_computed + n):
                self._plan_chunk(plan, request, seat, n)

    def _plan_admissions(self, plan: StepPlan, limits: list[Limit], num_admissible: int) -> None:
        num_admissible = min(num_admissible, len(self._free_seats))
        while num_admissible > 0 and self._budget.room > 0:
            request = self._waiting.head()
            if request is None or not self._admit(plan, request, limits):
                break
            num_admissible -= 1
        self._has_backlog = bool(self._waiting)

    def _num_admissible(self, view: StepView) -> int:
        return 0 if self._pause else _answer(self._rules.admission_gates, view)

    def _admit(self, plan: StepPlan, request: Request, limits: list[Limit]) -> bool:
        """Give the head of the queue a seat, pages and its first chunk, if it has room everywhere."""
        match = self.kv.match(request)
        request.num_computed = match.num_tokens
        n = self._chunk(request, limits)
        resources = self._rules.resources
        if not n or not all(resource.fit(request, n) for resource in resources):
            return False
        upto = match.num_tokens + n
        if not self.kv.admit(request, match, upto, self._pages_to_reserve(request, upto, len(match.pages))):
            return False
        self._waiting.remove(request)
        for resource in resources:
            resource.take(request, n)
        seat = self._take_seat(request)
        if request.num_preemptions == 0:
            request.num_cached = match.num_tokens
        self.totals.cached_tokens += match.num_tokens
        self.totals.prompt_tokens += request.num_known
        plan.seated.append(request)
        # A request admitted later in this very step may share the pages that this chunk computes.
        self._publish_chunk(self._plan_chunk(plan, request, seat, n))
        return True

    def _pages_to_reserve(self, request: Request, upto: int, num_matched: int) -> int:
        """Pages that must be free at the admission: those of its first chunk, or of all it will compute."""
        tokens = request.num_known if self._reserve_full_prompt else upto
        pages = -(-tokens // self.kv.page_size) - num_matched
        # With nobody running there is nobody to leave pages for.
        return pages + (self._watermark_pages if self._num_running else 0)

    def _chunk(self, request: Request, limits: list[Limit]) -> int:
        """Tokens of a prefilling request that this step computes: what is left, cut by the budget and every limit."""
        n = request.num_known - request.num_computed
        room = self._budget.room
        if n > room:
            n = room
        for limit in limits:
            n = limit(request, n)
        return n

    def _plan_chunk(self, plan: StepPlan, request: Request, seat: int, n: int) -> PrefillRow:
        start = request.num_computed
        self._budget.charge_chunk(n)
        row = PrefillRow(request, seat, start, n, samples=start + n == request.num_known)
        plan.prefills.append(row)
        return row

    def _publish_chunk(self, row: PrefillRow) -> None:
        """No undo can reach `row` any more in this step: others may match what it computes."""
        self.kv.publish(row.request, self.columns.tokens[row.seat], row.start + row.n)

    def _grow_or_preempt(self, plan: StepPlan, request: Request, seat: int, upto: int) -> bool:
        """Pages for [0, upto) of a running request; the last in order make room. False when it was the last itself."""
        while not self.kv.grow(request, upto):
            victim = self._victim()
            self._preempt(plan, victim)
            if victim is request:
                return False
        self.columns.write_pages(request, seat)
        return True

    def _victim(self) -> Request:
        """The running request that is last in order. Draining ones are about to leave by themselves."""
        order = self._rules.order
        decoding = (self._seated(seat) for seat in self._roster.seats().tolist())
        running = [*decoding, *self._prefilling]
        return max(running, key=lambda request: (order(request), request.handle))

    def _preempt(self, plan: StepPlan, request: Request) -> None:
        """Take seat and pages from a running request; it waits again, after its outputs in flight came back."""
        plan.preempted.append(request)
        self._budget.refund(*plan.drop(request))
        self.totals.preemptions += 1
        request.num_preemptions += 1
        self._vacate(request)
        request.num_computed = 0
        if request.num_inflight:
            self._ledger.move(request, "returning")
        else:
            self._wait(request)

    # ---------------------------------------------------------------- count a plan as run

    def _commit(self, plan: StepPlan) -> None:
        """Advance every counter as if the step had run, and name the rows that draw a token."""
        columns = self.columns
        seats = plan.decode_seats
        plan.decode_starts = columns.computed[seats]
        columns.computed[seats] += 1
        plan.num_tokens = len(seats) + sum(row.n for row in plan.prefills)
        if plan.num_tokens == 0:
            return
        samplers = [self._commit_chunk(row) for row in plan.prefills]
        sampled = [seat for seat in samplers if seat is not None]
        plan.sampled_seats = np.concatenate([seats, np.array(sampled, np.int32)]) if sampled else seats
        plan.sampled_handles = columns.handle[plan.sampled_seats]
        plan.sampled_at = columns.length[plan.sampled_seats]
        columns.length[plan.sampled_seats] += 1
        certain = plan.sampled_at + 1 >= columns.stop_len[plan.sampled_seats]
        if certain.any():
            self._drain(plan.sampled_seats[certain])
        self._step += 1
        self._num_outstanding += 1
        self.totals.steps += 1

    def _commit_chunk(self, row: PrefillRow) -> int | None:
        """The chunk counts as computed. Its seat, when it was the last one and draws a token."""
        request = row.request
        request.num_computed = row.start + row.n
        self.columns.computed[row.seat] = request.num_computed
        if not row.samples:
            return None
        self._prefilling.remove(request)
        self._roster.append(row.seat)
        self._ledger.move(request, "decoding")
        return row.seat

    def _drain(self, seats: NDArray[np.int32]) -> None:
        """These requests' lengths are certain: no step is planned for them any more."""
        self._roster.keep(~np.isin(self._roster.seats(), seats))
        for seat in seats.tolist():
            request = self._seated(seat)
            self._draining[request.handle] = request
            self._ledger.move(request, "draining")

    # ---------------------------------------------------------------- reconcile

    def apply(self, plan: StepPlan, output: StepOutput) -> StepResult:
        """Reconcile with what a step drew. Plans are applied in the order in which they were scheduled.

        Rows of requests that have ended since are dropped; a preempted request still gets its token."""
        self._num_outstanding -= 1
        columns = self.columns
        seats, tokens, at = plan.sampled_seats, output.tokens, plan.sampled_at
        rows = np.arange(len(seats))
        live = columns.handle[seats] == plan.sampled_handles
        late: list[int] = []
        if not live.all():
            late = [row for row in np.flatnonzero(~live).tolist() if self._deliver_late(plan, row, tokens)]
            rows = rows[live]
            seats, tokens, at = seats[live], tokens[live], at[live]
        columns.tokens[seats, at] = tokens
        columns.known[seats] = at + 1
        self._publish_decodes(plan)
        finished = self._end_stopped(seats, tokens, at)
        finished += [request for row in late if (request := self._ended_late(plan, row))]
        if late:
            rows = np.concatenate([rows, np.array(late, rows.dtype)])
        self.totals.output_tokens += len(rows)
        return StepResult(rows, plan.sampled_handles[rows], output.tokens[rows], finished)

    def _publish_decodes(self, plan: StepPlan) -> None:
        """Pages that this step's decodes filled hold known tokens now."""
        columns = self.columns
        full = (plan.decode_starts + 1) & (columns.page_size - 1) == 0
        if not full.any():
            return
        for row in np.flatnonzero(full).tolist():
            seat = int(plan.decode_seats[row])
            if columns.handle[seat] == plan.sampled_handles[row]:
                upto = int(plan.decode_starts[row]) + 1
                self.kv.publish(self._seated(seat), columns.tokens[seat], upto)

    def _end_stopped(self, seats: NDArray[np.int32], tokens: NDArray[np.int32], at: NDArray[np.int64]) -> list[Request]:
        """End the requests that drew a stop token or reached their length."""
        columns = self.columns
        stopped = (columns.stop_ids[seats] == tokens[:, None]).any(axis=1)
        if self._many_stops:
            for row, seat in enumerate(seats.tolist()):
                stopped[row] |= int(tokens[row]) in self._many_stops.get(seat, ())
        ended = stopped | (at + 1 >= columns.stop_len[seats])
        finished = []
        for row in np.flatnonzero(ended).tolist():
            request = self._seated(int(seats[row]))
            self._end(request, "stop" if stopped[row] else "length")
            finished.append(request)
        return finished

    def _deliver_late(self, plan: StepPlan, row: int, tokens: NDArray[np.int32]) -> bool:
        """The token of a row whose request left its seat: kept if it was preempted, dropped if it ended."""
        request = self._requests.get(int(plan.sampled_handles[row]))
        if request is None:
            return False
        request.output_ids.append(int(tokens[row]))
        request.num_inflight -= 1
        return True

    def _ended_late(self, plan: StepPlan, row: int) -> Request | None:
        """End or queue a preempted request after `_deliver_late`; returns it when it ended."""
        request = self._requests[int(plan.sampled_handles[row])]
        if request.output_ids[-1] in request.stop_ids:
            self._end(request, "stop")
        elif request.num_known >= request.stop_len:
            self._end(request, "length")
        elif request.num_inflight == 0:
            self._wait(request)
        return None if request.finish_reason is None else request

    # ---------------------------------------------------------------- places

    def _wait(self, request: Request) -> None:
        self._ledger.move(request, "waiting")
        self._waiting.push(request)

    def _take_seat(self, request: Request) -> int:
        seat = self._free_seats.pop()
        self.columns.seat(request, seat)
        self._by_seat[seat] = request
        if len(request.stop_ids) > STOP_IDS_WIDTH:
            self._many_stops[seat] = frozenset(request.stop_ids)
        order = self._rules.order
        insort(self._prefilling, request, key=lambda r: (order(r), r.handle))
        self._ledger.move(request, "prefilling")
        return seat

    def _vacate(self, request: Request) -> None:
        """Take seat, pages and resources from a running request."""
        seat = request.seat
        if seat is None:
            raise InvariantError(f"{request} has no seat to leave")
        if request.place == "prefilling":
            self._prefilling.remove(request)
        elif request.place == "decoding":
            self._roster.remove(seat)
        else:
            del self._draining[request.handle]
        request.num_inflight = int(self.columns.length[seat] - self.columns.known[seat])
        self.columns.unseat(request, seat)
        self._by_seat[seat] = None
        self._free_seats.append(seat)
        self._many_stops.pop(seat, None)
        self.kv.release(request)
        for resource in self._rules.resources:
            resource.give_back(request)

    def _end(self, request: Request, reason: FinishReason) -> None:
        """The one way out: exactly once for every request."""
        if request.seat is not None:
            self._vacate(request)
        elif request.place == "waiting":
            self._waiting.remove(request)
        self._ledger.move(request, "ended")
        request.finish_reason = reason
        del self._requests[request.handle]
        if reason in ("stop", "length"):
            self.totals.finished += 1
        else:
            self.totals.aborted += 1
        if len(self._deadlines) > 2 * len(self._requests) + PRUNE_DEADLINES_AT:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._requests]
            heapq.heapify(self._deadlines)

    # ---------------------------------------------------------------- small facts

    @property
    def _num_running(self) -> int:
        return self.max_running - len(self._free_seats)

    def _seated(self, seat: int) -> Request:
        request = self._by_seat[seat]
        if request is None:
            raise InvariantError(f"seat {seat} is in a place but holds no request")
        return request

    def _check_room_to_wait(self, request: Request) -> None:
        if request.stop_len > self.max_model_len:
            raise InvalidValueError(
                f"prompt: stops at {request.stop_len} tokens, at most {self.max_model_len} fit", "prompt"
            )
        ledger = self._ledger
        if ledger.num_waiting_reqs >= self._max_waiting_reqs:
            raise QueueFullError(f"{ledger.num_waiting_reqs} requests wait, at most {self._max_waiting_reqs} may")
        most = self._max_waiting_tokens
        # A prompt longer than the limit may wait alone, or no retry could ever bring it in.
        if most is not None and ledger.num_waiting_reqs and ledger.num_waiting_tokens + request.num_known > most:
            raise QueueFullError(f"{ledger.num_waiting_tokens} tokens wait, at most {most} may")


def _answer(gates: Sequence[Gate], view: StepView) -> int:
    """The strictest answer. Every gate is asked: some count the steps that they see."""
    return min([gate(view) for gate in gates], default=OPEN)
