"""Ranks that step together, on virtual time: each with the engine's own scheduler. A rank by itself is a group of one.

    launch   every rank plans a step; it ends after the shared part of its cost and the largest of the ranks' own
    land     the oldest step ends: tokens come, requests end, and the next one is launched

As in the engine's loop up to `depth` steps are planned ahead, and who arrives waits for the next launch. Steps of a
lone rank in which nothing happens to any request are leapt over until somebody looks: an arrival or a report.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from equipoise.exec.cost import StepLoad, load_of
from equipoise.exec.protocol import StepOutput
from equipoise.sim.events import Priority

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from equipoise.exec.cost import CostModel
    from equipoise.request import Request
    from equipoise.sched.ledger import LoadCounters
    from equipoise.sched.plan import StepPlan
    from equipoise.sched.scheduler import Scheduler
    from equipoise.sim.events import Events
    from equipoise.sim.results import Requests, Steps

Told = TypeVar("Told")
RETRY_S = 0.05
"""Seconds until ranks that have work and may not start any look again: as the engine's loop does."""
MOST_LEAPT = 1 << 20


@dataclass(frozen=True, slots=True)
class HostCost:
    """Seconds that planning takes, hidden behind the step before when steps are planned ahead."""

    step_s: float = 0.0
    row_s: float = 0.0

    def __call__(self, num_rows: int) -> float:
        return self.step_s + self.row_s * num_rows


class Step(NamedTuple):
    """A step of a group that is under way: plans by rank, when it ends, and how long planning it took."""

    plans: list[tuple[int, StepPlan]]
    ends_s: float
    host_s: float


class Quiet(NamedTuple):
    """Steps that will be leapt over, all of the same `num_rows`: `ends_s`, (n + 1 + depth,), begins with the end of
    the step before them; `step_s`, (n,), is what they cost, `kv_tokens`, (n,), what they read."""

    num_rows: int
    kv_tokens: NDArray[np.int64]
    step_s: NDArray[np.float64]
    ends_s: NDArray[np.float64]

    @property
    def n(self) -> int:
        """How many."""
        return len(self.step_s)

    def num_landed(self, now: float) -> int:
        """Those that have ended by `now`."""
        return min(self.n, int(self.ends_s[1:].searchsorted(now, side="right")))


class Group:
    """`ranks` schedulers that step together. Calls `on_end(request, now)` for each request that ends.

    `number`: of its first rank among all; of steps that end together those of the lowest land first."""

    def __init__(
        self,
        number: int,
        ranks: Sequence[Scheduler],
        cost: CostModel,
        host: HostCost,
        events: Events,
        requests: Requests,
        steps: Steps,
        on_end: Callable[[Request, float], None],
        *,
        leaps: bool = True,
    ) -> None:
        self.ranks = ranks
        self._number = number
        self._priority = Priority.LAND + number
        self._cost = cost
        self._host = host
        self._events = events
        self._requests = requests
        self._steps = steps
        self._on_end = on_end
        self._depth = ranks[0].depth
        self._leaps = leaps and len(ranks) == 1
        self._pending: deque[Step] = deque()
        self._quiet: Quiet | None = None
        self._free_at = 0.0
        self._landed_at = 0.0
        self._turn = 0  # events of earlier turns are void
        self._joining: set[int] = set()  # requests whose first step of decodes is in flight
        self._preempted: dict[int, float] = {}  # when requests that were preempted had their last token

    # ---------------------------------------------------------------- from outside

    def add(self, rank: int, request: Request, now: float) -> None:
        """A request comes to `rank`. Raises RequestError when it cannot be served."""
        self.tell(rank, lambda scheduler: scheduler.add(request), now)

    def tell(self, rank: int, change: Callable[[Scheduler], Told], now: float) -> Told:
        """`change` what `rank` knows: a request or its KV came, or is gone."""
        self.settle(now)
        told = change(self.ranks[rank])
        if not self._pending:
            self._launch(now)
        return told

    def load(self, rank: int, now: float) -> LoadCounters:
        """The load of `rank` at `now`."""
        quiet, scheduler = self._quiet, self.ranks[rank]
        return scheduler.load() if quiet is None else scheduler.load_after(quiet.num_landed(now))

    def settle(self, now: float) -> None:
        """Take the quiet steps that have ended by now; the one that is under way at `now` is launched."""
        quiet = self._quiet
        if quiet is None:
            return
        n = quiet.num_landed(now)
        self._leap(quiet, n)
        self._launch(float(quiet.ends_s[n]))

    # ---------------------------------------------------------------- steps

    def _launch(self, now: float) -> None:
        """Plan as many steps ahead as may be, and wait for the oldest."""
        self._quiet = None
        plans_at = now
        while len(self._pending) <= self._depth:
            step = self._plan(plans_at)
            if step is None:
                break
            self._pending.append(step)
            plans_at += step.host_s if self._depth else 0.0
        self._turn += 1
        if self._pending:
            self._wake_at(self._pending[0].ends_s)
        elif any(rank.has_work for rank in self.ranks):
            self._wake_at(now + RETRY_S)

    def _wake_at(self, time_s: float) -> None:
        turn = self._turn
        self._events.at(time_s, self._priority, lambda: self._wake(turn, time_s))

    def _wake(self, turn: int, now: float) -> None:
        if turn != self._turn:
            return
        if self._quiet is not None:
            self._leap(self._quiet, self._quiet.n)
        elif self._pending:
            self._land(self._pending.popleft(), now)
        if not self._begin_quiet(now):
            self._launch(now)

    def _plan(self, now: float) -> Step | None:
        """Every rank's plan, and when the step ends; None when nobody can run anything."""
        plans = self._plans()
        if not plans and any(rank.has_work for rank in self.ranks):
            plans = self._plans()  # a plan of preemptions alone made room for another
        if not plans:
            return None
        loads = [(rank, load_of(plan)) for rank, plan in plans]
        host_s = self._host(sum([load.decode_rows + load.num_chunks for _, load in loads]))
        begins_s = max(self._free_at, now + host_s) if self._depth else max(self._free_at, now) + host_s
        any_prefill = any(load.prefill_tokens for _, load in loads)
        own_s = [self._cost.rank_s(load) for _, load in loads]
        step_s = self._cost.shared_s(any_prefill=any_prefill) + max(own_s)
        self._free_at = begins_s + step_s
        self._steps.count(step_s, len(self.ranks), any_prefill=any_prefill)
        if len(self.ranks) > 1:
            self._attribute(loads, own_s)
        if self._steps.sinks:
            slowest_s = max(own_s)
            for (rank, load), rank_s in zip(loads, own_s, strict=True):
                for sink in self._steps.sinks:
                    sink.add(self._number + rank, self._free_at, step_s, slowest_s - rank_s, load)
        for _, plan in plans:
            for request in plan.seated:
                if request.num_preemptions == 0:
                    self._requests.admitted_s[request.handle] = begins_s
                if request.output_ids and math.isnan(self._requests.first_s[request.handle]):
                    self._token_before_decode(request.handle, begins_s)
        return Step(plans, self._free_at, host_s)

    def _plans(self) -> list[tuple[int, StepPlan]]:
        """The plans in which something runs, by rank."""
        states = tuple([rank.state() for rank in self.ranks]) if len(self.ranks) > 1 else None
        plans = [(number, rank.schedule(states)) for number, rank in enumerate(self.ranks) if rank.has_work]
        for _, plan in plans:
            for request in plan.preempted:
                self._preempted.setdefault(request.handle, self._landed_at)
        return [(number, plan) for number, plan in plans if plan.num_tokens]

    def _land(self, step: Step, now: float) -> None:
        steps, requests = self._steps, self._requests
        for number, plan in step.plans:
            num_decodes = len(plan.decode_seats)
            if num_decodes:
                num_joined = self._add_first_gaps(plan, now) if self._joining else 0
                steps.gaps.add(now - self._landed_at, num_decodes - num_joined)
            if self._preempted:
                for handle in plan.sampled_handles[:num_decodes].tolist():
                    if handle in self._preempted:  # since this step was planned
                        self._preempted[handle] = now
            for row in plan.prefills:
                if row.samples:
                    self._token_after_chunk(row.request, now)
            output = StepOutput(tokens=np.zeros(len(plan.sampled_seats), np.int32))
            for request in self.ranks[number].apply(plan, output).finished:
                requests.last_s[request.handle] = now
                requests.num_cached[request.handle] = request.num_cached
                requests.num_preemptions[request.handle] = request.num_preemptions
                self._on_end(request, now)
        self._landed_at = now

    def _token_before_decode(self, handle: int, begins_s: float) -> None:
        """A request joins the decode batch with its first token: it is told now."""
        self._requests.first_s[handle] = begins_s
        if handle in self._preempted:  # by the very plan that it joins
            self._preempted[handle] = begins_s
        else:
            self._joining.add(handle)

    def _add_first_gaps(self, plan: StepPlan, now: float) -> int:
        """Those that joined with `plan` have another gap than the rest: since their first token. Returns how many."""
        joined = [request.handle for request in plan.seated if request.handle in self._joining]
        for handle in joined:
            self._joining.remove(handle)
            self._steps.gaps.add(now - self._requests.first_s[handle], 1)
        return len(joined)

    def _token_after_chunk(self, request: Request, now: float) -> None:
        """The last chunk of `request` drew a token: its first, or the first since it was preempted."""
        handle = request.handle
        last_s = self._preempted.pop(handle, None)
        if math.isnan(self._requests.first_s[handle]):
            self._requests.first_s[handle] = now
        elif last_s is not None:
            self._steps.gaps.add(now - last_s, 1)
        if request.seat is None:  # preempted again, with this token in flight
            self._preempted[handle] = now

    # ---------------------------------------------------------------- quiet steps

    def _begin_quiet(self, now: float) -> bool:
        """See how many steps will be quiet, and sleep over them; the step at `now` has landed, and none is launched."""
        if not self._leaps or len(self._pending) != self._depth or self._joining:
            return False
        (rank,) = self.ranks
        n = rank.quiet_steps(MOST_LEAPT)
        if n < 2:
            return False
        columns = rank.columns
        seats = np.flatnonzero(columns.handle >= 0)
        num_rows = len(seats)
        # Step i of 1..n reads what its rows have computed before it, and their own token.
        kv_tokens = int(columns.computed[seats].sum()) + num_rows * np.arange(1, n + 1)
        host_s = self._host(num_rows)
        step_s = self._cost.shared_s(any_prefill=False) + self._cost.decode_s(num_rows, kv_tokens)
        if self._depth:
            ends_s = np.empty(n + 1 + self._depth)
            ends_s[0] = now
            ends_s[1 : 1 + self._depth] = [step.ends_s for step in self._pending]
            ends_s[1 + self._depth :] = step_s
            np.add.accumulate(ends_s[self._depth :], out=ends_s[self._depth :])
            if host_s and (ends_s[self._depth : -1] < ends_s[: -1 - self._depth] + host_s).any():
                return False  # the host holds up a step: their ends are no plain sum
        else:
            ends_s = self._ends_after_host(now, host_s, step_s)
        self._quiet = Quiet(num_rows, kv_tokens, step_s, ends_s)
        self._turn += 1
        self._wake_at(float(ends_s[n]))
        return True

    def _ends_after_host(self, now: float, host_s: float, step_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Ends of steps that are planned one after the other; the same additions in the same order as `_plan`'s."""
        terms = np.empty(2 * len(step_s) + 1)
        terms[0], terms[1::2], terms[2::2] = now, host_s, step_s
        ends_s: NDArray[np.float64] = np.add.accumulate(terms)[::2]
        return ends_s

    def _leap(self, quiet: Quiet, n: int) -> None:
        """Take the first `n` of the quiet steps."""
        self._quiet = None
        if n == 0:
            return
        (rank,) = self.ranks
        rank.leap(n)
        ends_s = quiet.ends_s
        self._steps.gaps.add_each(ends_s[1 : n + 1] - ends_s[:n], quiet.num_rows)
        ahead = [float(end) for end in ends_s[n + 1 : n + 1 + self._depth]]
        self._pending = deque(step._replace(ends_s=end) for step, end in zip(self._pending, ahead, strict=True))
        self._landed_at = float(ends_s[n])
        self._free_at = ahead[-1] if ahead else self._landed_at
        self._steps.count_leapt(quiet.step_s[:n])
        if self._steps.sinks:
            planned_s, wait_s = ends_s[1 + self._depth : 1 + self._depth + n], np.zeros(n)
            for sink in self._steps.sinks:
                sink.add_decodes(self._number, planned_s, quiet.step_s[:n], wait_s, quiet.num_rows, quiet.kv_tokens[:n])

    # ---------------------------------------------------------------- sums

    def _attribute(self, loads: list[tuple[int, StepLoad]], own_s: list[float]) -> None:
        """What the other ranks lose to the slowest: by the prefills, rows and KV that it has and they have not."""
        slowest = max(range(len(loads)), key=own_s.__getitem__)
        rank_s, lost_s, num_ranks = self._cost.rank_s, self._steps.lost_s, len(self.ranks)
        all_loads = [load for _, load in loads]
        rows_s = [rank_s(StepLoad(decode_rows=load.decode_rows)) for load in all_loads]
        decode_s = [rank_s(StepLoad(decode_rows=load.decode_rows, kv_tokens=load.kv_tokens)) for load in all_loads]
        prefill_s = num_ranks * (own_s[slowest] - decode_s[slowest]) - (sum(own_s) - sum(decode_s))
        kv_s = num_ranks * (decode_s[slowest] - rows_s[slowest]) - (sum(decode_s) - sum(rows_s))
        seats_s = num_ranks * rows_s[slowest] - sum(rows_s)
        lost_s["prefill"] += prefill_s
        lost_s["kv"] += kv_s
        lost_s["seats"] += seats_s
        for sink in self._steps.loss_sinks:
            sink.add_lost(self._free_at, prefill_s, seats_s, kv_s)
