"""Ranks that step together, on virtual time: each with the engine's own scheduler. A rank by itself is a group of one.

    launch   every rank plans a step; it ends after the shared part of its cost and the largest of the ranks' own
    land     the oldest step ends: tokens come, requests end, and the next one is launched

As in the engine's loop up to `depth` steps are planned ahead, and who arrives waits for the next launch. Ranks that do
nothing but decode are not touched meanwhile (`lane`), and while all ranks are such the group leaps over its steps until
somebody looks: an arrival or a report.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from equipoise.errors import InvariantError
from equipoise.exec.cost import load_of
from equipoise.exec.protocol import StepOutput
from equipoise.sim.events import Priority
from equipoise.sim.lane import Lane
from equipoise.sim.lost import Lost
from equipoise.sim.token_times import TokenTimes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from equipoise.exec.cost import CostModel, StepLoad
    from equipoise.request import Request
    from equipoise.sched.ledger import LoadCounters
    from equipoise.sched.plan import StepPlan
    from equipoise.sched.rules import RankState
    from equipoise.sched.scheduler import Scheduler
    from equipoise.sim.events import Events
    from equipoise.sim.results import Requests, Steps

Told = TypeVar("Told")
RETRY_S = 0.05
"""Seconds until ranks that have work and may not start any look again: as the engine's loop does."""
HOPELESS_S, LASTING_S = 600.0, 2.0
"""Seconds of looking again, with nothing else to happen, after which nothing ever will: while gates might change their
mind, and when they say that they do not."""
MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class HostCost:
    """Seconds that planning takes, hidden behind the step before when steps are planned ahead."""

    step_s: float = 0.0
    row_s: float = 0.0

    def __call__(self, num_rows: int) -> float:
        return self.step_s + self.row_s * num_rows


class Step(NamedTuple):
    """A step of a group that is under way: plans by rank, None of those that have none or are not up to date; when it
    ends, and how long planning it took."""

    plans: list[StepPlan | None]
    ends_s: float
    host_s: float


class Leap(NamedTuple):
    """Steps that will be leapt over, all of the same `num_rows`: `ends_s`, (n + 1 + depth,), begins with the end of
    the step before them; `own_s`, (n,) for each rank that runs, is what they cost that rank, `slowest_s`, (n,), the
    slowest, and `step_s`, (n,), the group."""

    num_rows: int
    own_s: list[NDArray[np.float64]]
    slowest_s: NDArray[np.float64]
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
        self._lanes = [Lane(number + place, rank, cost) for place, rank in enumerate(ranks)]
        self._priority = Priority.LAND + number
        self._cost = cost
        self._host = host
        self._events = events
        self._times = TokenTimes(requests, steps)
        self._steps = steps
        self._lost = Lost(steps, cost, len(ranks))
        self._on_end = on_end
        self._depth = ranks[0].depth
        self._has_gates = any(rank.leaper.has_gates for rank in ranks)
        self._is_watched = any(rank.is_watched for rank in ranks)
        self._leaps = leaps
        self._pending: deque[Step] = deque()
        self._leap: Leap | None = None
        self._free_at = 0.0
        self._host_free_at = 0.0
        self._landed_at = 0.0
        self._gap_s = 0.0  # from the landing before to the last one
        self._moves_asked = -1  # moves of requests when the gates of all ranks were asked
        self._turn = 0  # events of earlier turns are void
        self._held_since: float | None = None  # ranks have work, and none may start any

    # ---------------------------------------------------------------- from outside

    def add(self, rank: int, request: Request, now: float) -> None:
        """A request comes to `rank`. Raises RequestError when it cannot be served."""
        self.tell(rank, lambda scheduler: scheduler.add(request), now)

    def tell(self, rank: int, change: Callable[[Scheduler], Told], now: float) -> Told:
        """`change` what `rank` knows: a request or its KV came, or is gone."""
        self.settle(now)
        self._wake_lane(rank)
        told = change(self.ranks[rank])
        self._held_since = None
        if not self._pending:
            self._launch(now)
        return told

    def load(self, rank: int, now: float) -> LoadCounters:
        """The load of `rank` at `now`."""
        return self._lanes[rank].load(0 if self._leap is None else self._leap.num_landed(now))

    def settle(self, now: float) -> None:
        """Take the steps of a leap that have ended by now; the one that is under way at `now` is launched."""
        leap = self._leap
        if leap is None:
            return
        n = leap.num_landed(now)
        self._take(leap, n)
        self._launch(float(leap.ends_s[n]))

    # ---------------------------------------------------------------- steps

    def _launch(self, now: float) -> None:
        """Plan as many steps ahead as may be, and wait for the oldest."""
        self._leap = None
        plans_at = max(now, self._host_free_at) if self._depth else now
        while len(self._pending) <= self._depth:
            step = self._plan(plans_at)
            if step is None:
                break
            self._pending.append(step)
            plans_at += step.host_s if self._depth else 0.0
        self._host_free_at = plans_at
        self._turn += 1
        if self._pending:
            self._held_since = None
            self._wake_at(self._pending[0].ends_s)
        elif any(rank.has_work for rank in self.ranks):
            self._check_hope(now)
            self._wake_at(now + RETRY_S, hopes=True)

    def _wake_at(self, time_s: float, *, hopes: bool = False) -> None:
        turn = self._turn
        self._events.at(time_s, self._priority, lambda: self._wake(turn, time_s), hopes=hopes)

    def _wake(self, turn: int, now: float) -> None:
        if turn != self._turn:
            return
        if self._leap is not None:
            self._take(self._leap, self._leap.n)
        elif self._pending:
            self._land(self._pending.popleft(), now)
        if not self._begin_leap(now):
            self._launch(now)

    def _check_hope(self, now: float) -> None:
        """Raise InvariantError when nothing but looking again has happened for so long that nothing ever will."""
        if self._held_since is None:
            self._held_since = now
        most_s = LASTING_S if all(rank.gates_last for rank in self.ranks) else HOPELESS_S
        if now - self._held_since < most_s or not self._events.only_hopes:
            return
        held = [rank for rank in self.ranks if rank.has_work]
        names = [f"#{request.handle}" for rank in held for request in rank.requests()]
        raise InvariantError(
            f"{' and '.join(sorted({rank.held_by for rank in held}))} let no request start for {most_s:g} s, and "
            f"nothing else will happen: {len(names)} wait, {', '.join(names[:MOST_NAMED])} first"
        )

    # ---------------------------------------------------------------- launch

    def _plan(self, now: float) -> Step | None:
        """Every rank's plan, and when the step ends; None when nobody can run anything."""
        plans = self._plans()
        running = self._running(plans)
        if not running and any(rank.has_work for rank in self.ranks):
            plans = self._plans()  # a plan of preemptions alone made room for another
            running = self._running(plans)
        if not running:
            return None
        loads = [load for _, load in running]
        host_s = self._host(max([load.decode_rows + load.num_chunks for load in loads]))  # ranks plan side by side
        begins_s = max(self._free_at, now + host_s) if self._depth else max(self._free_at, now) + host_s
        any_prefill = any(load.prefill_tokens for load in loads)
        own_s = [lane.own_s(load) for lane, load in running]
        slowest_s = max(own_s)
        step_s = self._cost.shared_s(any_prefill=any_prefill) + slowest_s
        self._free_at = begins_s + step_s
        self._steps.count(step_s, len(self.ranks), any_prefill=any_prefill)
        if len(self.ranks) > 1:
            self._lost.add(loads, own_s, self._free_at)
        if self._steps.sinks:
            for (lane, load), rank_s in zip(running, own_s, strict=True):
                for sink in self._steps.sinks:
                    sink.add(lane.number, self._free_at, step_s, slowest_s - rank_s, load)
        self._note_planned(plans, begins_s)
        return Step(plans, self._free_at, host_s)

    def _running(self, plans: list[StepPlan | None]) -> list[tuple[Lane, StepLoad]]:
        """The ranks that run something, and what."""
        return [
            (lane, lane.next_load() if plan is None else load_of(plan))
            for lane, plan in zip(self._lanes, plans, strict=True)
            if plan is not None or lane.quiet is not None
        ]

    def _note_planned(self, plans: list[StepPlan | None], begins_s: float) -> None:
        for lane, plan in zip(self._lanes, plans, strict=True):
            if plan is None:
                lane.num_planned += 1
            elif plan.seated:
                self._times.begin(plan, begins_s)

    def _plans(self) -> list[StepPlan | None]:
        """By rank the plan in which something runs; None of quiet ranks and of those that have nothing to run."""
        # One that plans asks its gates: all others' must see the same.
        some_plan = self._is_watched and not all(lane.num_left or lane.is_idle for lane in self._lanes)
        asks_all = self._has_gates and (some_plan or not self._gates_last())
        states = self._states() if some_plan or asks_all else None
        if asks_all:
            self._moves_asked = self._num_moves()
        plans: list[StepPlan | None] = []
        for place, lane in enumerate(self._lanes):
            rank, plan = lane.rank, None
            asks = asks_all and rank.leaper.asks_gates
            if lane.quiet is not None and (not lane.num_left or (asks and not lane.goes_on(states))):
                self._wake_lane(place)
            if lane.quiet is None and rank.has_work:
                plan = rank.schedule(states)
                if plan.preempted:
                    self._times.preempt(plan, self._landed_at)
            elif lane.quiet is None and asks and states is not None:
                rank.look(states)
            plans.append(plan if plan is not None and plan.num_tokens else None)
        return plans

    def _states(self) -> tuple[RankState, ...]:
        return tuple([lane.state(self._landed_at, self._gap_s) for lane in self._lanes])

    def _gates_last(self) -> bool:
        """Would no gate of any rank answer otherwise than when it was asked last?"""
        return self._moves_asked == self._num_moves() and all(rank.gates_last for rank in self.ranks)

    def _num_moves(self) -> int:
        return sum([rank.num_moves for rank in self.ranks])

    def _wake_lane(self, place: int) -> None:
        """Have the scheduler of a quiet rank take the steps that it owes."""
        lane = self._lanes[place]
        if lane.quiet is not None:
            for step, plan in zip(self._pending, lane.wake(self._landed_at, self._gap_s), strict=True):
                step.plans[place] = plan

    # ---------------------------------------------------------------- land

    def _land(self, step: Step, now: float) -> None:
        num_tokens, gap_s = 0, now - self._landed_at
        for lane, plan in zip(self._lanes, step.plans, strict=True):
            if lane.quiet is not None:
                lane.num_landed += 1
                num_tokens += lane.quiet.num_rows
            elif plan is not None:
                num_tokens += self._times.land(plan, now)
                output = StepOutput(tokens=np.zeros(len(plan.sampled_seats), np.int32))
                for request in lane.rank.apply(plan, output).finished:
                    self._times.end(request, now)
                    self._on_end(request, now)
        if num_tokens:
            self._steps.gaps.add(gap_s, num_tokens)
        self._landed_at, self._gap_s = now, gap_s

    # ---------------------------------------------------------------- leaps

    def _begin_leap(self, now: float) -> bool:
        """See how many steps will be quiet, and sleep over them; the step at `now` has landed, and none is launched."""
        if not self._leaps or len(self._pending) != self._depth or not self._all_rest():
            return False
        quiet = [lane for lane in self._lanes if lane.quiet is not None]
        n = min([lane.num_left for lane in quiet], default=0)
        if n < 2 or (self._has_gates and not self._gates_last()):
            return False
        rows = [lane.num_rows for lane in quiet]
        own_s = [lane.own_s_ahead(n) for lane in quiet]
        slowest_s = own_s[0] if len(own_s) == 1 else np.maximum.reduce(own_s)
        step_s = self._cost.shared_s(any_prefill=False) + slowest_s
        ends_s = self._ends(now, self._host(max(rows)), step_s)
        if ends_s is None:
            return False
        self._leap = Leap(sum(rows), own_s, slowest_s, step_s, ends_s)
        self._turn += 1
        self._wake_at(float(ends_s[n]))
        return True

    def _all_rest(self) -> bool:
        """Have every rank that may fall quiet do so. True when all are quiet or idle."""
        all_rest = True
        for place, lane in enumerate(self._lanes):
            if lane.quiet is not None or lane.is_idle:
                continue
            if not lane.rest():
                all_rest = False
                continue
            for step in self._pending:
                step.plans[place] = None
        return all_rest

    def _ends(self, now: float, host_s: float, step_s: NDArray[np.float64]) -> NDArray[np.float64] | None:
        """When steps that are launched from `now` on end, (n + 1 + depth,), by the same additions in the same order as
        `_plan`'s. None when they are no plain sum: planned ahead, and the host holds one up."""
        depth = self._depth
        if not depth:
            terms = np.empty(2 * len(step_s) + 1)
            terms[0], terms[1::2], terms[2::2] = now, host_s, step_s
            return np.add.accumulate(terms)[::2]
        ends_s = np.empty(len(step_s) + 1 + depth)
        ends_s[0] = now
        ends_s[1 : 1 + depth] = [step.ends_s for step in self._pending]
        ends_s[1 + depth :] = step_s
        np.add.accumulate(ends_s[depth:], out=ends_s[depth:])
        is_held_up = host_s and (ends_s[1:-depth] < ends_s[: -1 - depth] + host_s).any()
        return None if is_held_up or self._host_free_at > now else ends_s

    def _take(self, leap: Leap, n: int) -> None:
        """The first `n` steps of a leap have landed."""
        self._leap = None
        if n == 0:
            return
        ends_s, depth = leap.ends_s, self._depth
        planned_s = ends_s[1 + depth : 1 + depth + n]
        self._steps.gaps.add_each(ends_s[1 : n + 1] - ends_s[:n], leap.num_rows)
        self._steps.count_leapt(leap.step_s[:n], len(self.ranks))
        quiet = [lane for lane in self._lanes if lane.quiet is not None]
        if len(self.ranks) > 1:
            self._lost.add_each([own_s[:n] for own_s in leap.own_s], [lane.rows_s for lane in quiet], planned_s)
        for lane, own_s in zip(quiet, leap.own_s, strict=True):
            if self._steps.sinks:
                wait_s = leap.slowest_s[:n] - own_s[:n]
                for sink in self._steps.sinks:
                    sink.add_decodes(
                        lane.number, planned_s, leap.step_s[:n], wait_s, lane.num_rows, lane.kv_tokens_ahead(n)
                    )
            lane.num_planned += n
            lane.num_landed += n
        ahead = [float(end) for end in ends_s[n + 1 : n + 1 + depth]]
        self._pending = deque(step._replace(ends_s=end) for step, end in zip(self._pending, ahead, strict=True))
        self._landed_at = float(ends_s[n])
        self._gap_s = float(ends_s[n] - ends_s[n - 1])
        self._free_at = ahead[-1] if ahead else self._landed_at
