"""The scheduler of one rank. There are no phases: a step lets the tokens computed catch up with the tokens known.

`schedule` plans one step (`planner`), and advances every counter as if the step had run; `apply` reconciles
with the tokens that came (`reconcile`). Up to `depth` plans may be outstanding when `schedule` is called. Where a
request is and how it moves: `places`. Which features there are: `rules` and `assemble`.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Literal

from equipoise.errors import InvalidValueError, InvariantError
from equipoise.sched.arrivals import Deadlines, WaitingRoom
from equipoise.sched.commit import Committer
from equipoise.sched.explain import Explanation, Hold, explain
from equipoise.sched.leap import Leaper
from equipoise.sched.ledger import Totals
from equipoise.sched.load import load_counters
from equipoise.sched.places import Places
from equipoise.sched.planner import NO_PAGES, Planner
from equipoise.sched.reconcile import Reconciler
from equipoise.sched.remote import RemoteEvents
from equipoise.sched.roles import MIXED
from equipoise.sched.rules import StepView
from equipoise.sched.states import StepTimer, rank_state

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from equipoise.clock import Clock
    from equipoise.exec.protocol import StepOutput
    from equipoise.kv.protocol import KVMemory
    from equipoise.request import FinishReason, Request, Tokens
    from equipoise.sched.columns import Columns
    from equipoise.sched.explain import DecisionTrace
    from equipoise.sched.ledger import LoadCounters
    from equipoise.sched.plan import StepPlan, StepResult
    from equipoise.sched.resources import TokenBudget
    from equipoise.sched.roles import Role
    from equipoise.sched.rules import RankState, Rules

PauseMode = Literal["", "new", "all"]


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
        max_bypass: int = 0,
        max_waiting_reqs: int = 4096,
        max_waiting_tokens: int | None = None,
        trace: DecisionTrace | None = None,
        role: Role = MIXED,
    ) -> None:
        self.kv = kv
        self.trace = trace
        self.depth = depth
        self.max_running = max_running
        self.max_model_len = max_model_len
        self.totals = Totals()
        self._clock = clock
        self._resources = rules.resources
        self._places = Places(kv, rules.order, rules.resources, max_running, max_model_len, role)
        self._planner = Planner(
            self._places,
            kv,
            budget,
            rules,
            self.totals,
            depth=depth,
            reserve_full_prompt=reserve_full_prompt,
            watermark_pages=watermark_pages,
            max_bypass=max_bypass,
        )
        self._max_step_tokens = budget.max_step_tokens
        self._waiting_room = WaitingRoom(self._places.ledger, max_waiting_reqs, max_waiting_tokens)
        self._deadlines = Deadlines(self._places.requests)
        self._pause: PauseMode = ""
        self._committer = Committer(self._places, rules.drafter, self.totals)
        self._reconciler = Reconciler(self._places, kv, self.totals)
        self._remote_events = RemoteEvents(self._places, kv, self._reconciler)
        self.leaper = Leaper(
            self._places,
            kv,
            rules,
            self.totals,
            max_step_tokens=budget.max_step_tokens,
            bypasses=max_bypass > 0,
        )
        self._timer = StepTimer(clock)
        self.is_watched = bool(self.leaper.has_gates or rules.limits or rules.observers)
        self._planned_at = 0  # moves of requests that the last plan knew of
        self._hold = Hold("", clock.now())
        self._step = 0
        self._outstanding: deque[StepPlan] = deque()

    # ---------------------------------------------------------------- requests come and go

    def add(self, request: Request, wait_for: str | None = None) -> None:
        """Take a new request. With `wait_for` it is parked under that name until `wake`.

        Raises InvalidValueError when it can never run, QueueFullError when the waiting queue is full."""
        if request.stop_len > self.max_model_len:
            raise InvalidValueError(
                f"prompt: stops at {request.stop_len} tokens, at most {self.max_model_len} fit", "prompt"
            )
        for resource in self._resources:
            resource.check(request)
        self._waiting_room.check(request)
        requests = self._places.requests
        if request.handle in requests:
            raise InvariantError(f"handle {request.handle} is in use by {requests[request.handle]}")
        requests[request.handle] = request
        self.kv.prepare(request)
        if request.deadline_s is not None:
            self._deadlines.keep(request.deadline_s, request.handle)
        if wait_for is None:
            self._places.enter(request)
        else:
            self._places.park(request, wait_for, self._clock.now())

    def wake(self, handle: int) -> None:
        """What a parked request waited for is there, or the decode rank of one that bootstraps. Ignored when the
        request has ended."""
        request = self._places.requests.get(handle)
        if request is not None and request.place in ("parked", "bootstrap"):
            self._places.unpark(request)

    def kv_arrived(self, handle: int, num_tokens: int) -> None:
        """A remote store is done with a request's pages: tokens [0, num_tokens) are in them, 0 when it failed.

        Pages of a request that ended meanwhile are free from now on. Raises InvariantError when the request loads
        nothing, or less than that."""
        self._remote_events.arrived(handle, num_tokens)

    def kv_received(self, handle: int, first_token: int | None) -> Request | None:
        """Decode role: a prompt's KV is in the pages of its request, and the prefill rank drew `first_token`; None
        when it failed. The request joins the next step's decodes; returned when it has ended instead: by its first
        token or that failure. Raises InvariantError when the request is not in transfer."""
        return self._remote_events.received(handle, first_token)

    def kv_sent(self, handle: int) -> None:
        """Prefill role: the decode rank has the KV of a request whose prompt was computed, which ends. Ignored when
        it ended before."""
        self._remote_events.sent(handle)

    def extend_prompt(self, handle: int, tokens: Tokens) -> None:
        """More of a prompt that arrives in pieces: the request was added with `wait_for="input"`, and `wake` ends
        it. Raises InvalidValueError when it grows too long, InvariantError when it is not parked any more; ignored
        when the request has ended."""
        request = self._places.requests.get(handle)
        if request is not None:
            if request.place != "parked":
                raise InvariantError(f"{request} takes no more input")
            request.extend_prompt(tokens, self.max_model_len)
            self.kv.prepare(request)

    def abort(self, handle: int, reason: FinishReason = "abort") -> Request | None:
        """End a request wherever it is; rows of it that are in flight are dropped. None when it is unknown or ended."""
        request = self._places.requests.get(handle)
        if request is not None:
            self._reconciler.end(request, reason)
        return request

    def expire(self) -> list[Request]:
        """End the requests whose deadline has passed."""
        expired = (self.abort(handle) for handle in self._deadlines.due(self._clock.now()))
        return [request for request in expired if request is not None]

    @property
    def next_deadline_s(self) -> float | None:
        """When `expire` has something to do next, at the earliest."""
        return self._deadlines.next_s

    def pause(self, mode: Literal["new", "all"]) -> None:
        """ "new": admit nobody, let the running finish. "all": plan nothing."""
        self._pause = mode

    def resume(self) -> None:
        """Undo `pause`."""
        self._pause = ""

    def flush_cache(self, *, preempt_running: bool = False) -> int:
        """Forget all cached prefixes; returns the pages dropped. With `preempt_running` nothing computed before
        is used again, as when the weights have changed: who runs starts anew, at once or when its row to verify is
        back, and what a remote store brought or is bringing is computed instead."""
        if preempt_running:
            for request in tuple(self._places.preemptible()):
                self._reconciler.preempt(request)
            self._reconciler.restarting.update(self._places.verifying)
            for request in tuple(self._places.loaded.values()):
                self._places.unload(request)
            for request in self._places.loading.values():
                request.may_load = False
        return self.kv.flush()

    # ---------------------------------------------------------------- what others may read

    @property
    def columns(self) -> Columns:
        """The hot state that executors share."""
        return self._places.columns

    @property
    def paused(self) -> PauseMode:
        """The mode of `pause` in force, "" when there is none."""
        return self._pause

    @property
    def has_work(self) -> bool:
        """May `schedule` find something to run? False when idle and when what is left is paused."""
        if self._pause == "all":
            return False
        places = self._places
        if places.prefilling or places.drafting or len(places.decoding):
            return True
        return not self._pause and places.ledger.num_startable_reqs > 0

    @property
    def num_requests(self) -> int:
        """Requests that have not ended, parked ones included."""
        return len(self._places.requests)

    def requests(self) -> Iterable[Request]:
        """Every request that has not ended."""
        return self._places.requests.values()

    def load(self) -> LoadCounters:
        """Load now, in O(1)."""
        return load_counters(self._places, self.kv, self.max_running)

    def state(self, num_pages_owed: int = 0) -> RankState:
        """What the other ranks of a lockstep group must know of this one. `num_pages_owed`: free pages that quiet steps
        have taken which are not leapt over yet."""
        return rank_state(
            self._places,
            self.kv,
            self._timer,
            self._max_step_tokens,
            may_admit=not self._pause,
            num_pages_owed=num_pages_owed,
        )

    def explain(self, request_id: str) -> list[Explanation]:
        """Why requests of that name wait: the rule that holds each back, and since when. Those that ended are gone."""
        named = (request for request in self.requests() if request.request_id == request_id)
        return [explain(request, self._places, self._hold, self._clock.now()) for request in named]

    def check(self) -> None:
        """Raise InvariantError unless pages, seats and ledger agree with a rescan. Slow: for tests and idle times."""
        self.kv.check()
        places = self._places
        places.check_ledger()
        num_rows = sum(plan.num_rows for plan in self._outstanding)
        if num_rows != places.ledger.num_inflight_rows:
            raise InvariantError(f"the ledger says {places.ledger.num_inflight_rows} rows in flight, it is {num_rows}")
        seated = sum(request.seat is not None for request in places.requests.values())
        if seated != places.num_running:
            raise InvariantError(f"{seated} requests hold a seat, {places.num_running} seats are held")

    # ---------------------------------------------------------------- plan a step

    def schedule(self, ranks: tuple[RankState, ...] | None = None) -> StepPlan:
        """Plan the next step and count it as run: decodes, then running prefills, then admissions.

        `ranks`: the state of every rank of a lockstep group, this one included; None when alone.
        A plan that is empty must not be submitted nor applied."""
        view = self._view(ranks)
        plan = self._planner.plan(view, len(self._outstanding), may_admit=not self._pause)
        if self._planner.held_by != self._hold.rule:
            self._hold = Hold(self._planner.held_by, view.now_s)
        self._commit(plan)
        self._timer.planned(view.now_s, len(plan.seated), is_idle=not self._outstanding)
        self._planned_at = self._places.ledger.num_moves
        return plan

    def look(self, ranks: tuple[RankState, ...]) -> None:
        """Another rank of the group plans a step and this one has nothing to plan: its gates, some of which count the
        steps that they see, see it all the same, so that all ranks go on to decide alike."""
        self._planner.look(self._view(ranks), may_admit=not self._pause)
        self._timer.planned(self._clock.now(), 0, is_idle=not self._outstanding)

    def _view(self, ranks: tuple[RankState, ...] | None, num_ahead: int = 0) -> StepView:
        places = self._places
        step = self._step + num_ahead
        return StepView(
            step=step,
            now_s=self._clock.now(),
            num_running=places.num_running,
            num_decoding=len(places.decoding),
            num_prefilling=len(places.prefilling),
            num_waiting=places.ledger.num_startable_reqs,
            num_free_seats=places.num_open_seats,
            num_steps_since_prefill=step - self._planner.last_prefill_step,
            has_backlog=self._planner.has_backlog,
            ranks=ranks or ((self.state(),) if self.is_watched else ()),
        )

    def _commit(self, plan: StepPlan) -> None:
        """Advance every counter as if the step had run; one that is empty is no step."""
        self._committer.commit(plan)
        if plan.num_tokens:
            self._step += 1
            self._outstanding.append(plan)

    def apply(self, plan: StepPlan, output: StepOutput) -> StepResult:
        """Reconcile with what a step drew. Plans are applied in the order in which they were scheduled.

        Rows of requests that have ended since are dropped; a preempted request still gets its token. Raises
        InvariantError for any other plan than the oldest outstanding one."""
        if not self._outstanding or self._outstanding[0] is not plan:
            raise InvariantError(f"step {plan.step} is not the oldest of {len(self._outstanding)} outstanding steps")
        self._places.ledger.land(self._outstanding.popleft().num_rows)
        result = self._reconciler.apply(plan, output)
        self._timer.landed(plan, is_idle=not self._outstanding and not self.has_work)
        return result

    # ---------------------------------------------------------------- quiet steps, on virtual time

    def quiet_steps(self, most: int) -> int:
        """How many of the next `most` steps do nothing but decode all that runs, so that `leap` may take them; 0 when
        in doubt.

        To be asked after a step that was one, with a plan for each of the `depth` steps ahead. Limits are taken to
        answer alike as long as nothing happens to a request; gates must be asked in each of the steps by `goes_on`,
        unless `gates_last`."""
        if not self.knows_all_moves or (self.leaper.has_gates and self._timer.step_prefill_tokens):
            return 0  # a request came or went, or gates have not been told of a prefill: the next plan may differ
        return self.leaper.num_quiet(self._outstanding, self._planner, most)

    def goes_on(self, num_taken: int, ranks: tuple[RankState, ...] | None = None) -> bool:
        """Show the gates the quiet step after `num_taken` that have landed, and are not leapt over yet.

        False when by their answers it is no quiet one: after a leap, `schedule` goes by them."""
        return self._planner.goes_on(self._view(ranks, num_taken), may_admit=not self._pause)

    def leap(self, n: int, landed_s: float, step_s: float) -> None:
        """Take `n` quiet steps at once, as n pairs of `schedule` and `apply` would, all rows drawing token 0. The last
        of them landed at `landed_s` and took `step_s`."""
        self.leaper.leap(self._outstanding, self._planner.held_by, n)
        self._step += n
        self._timer.leapt(landed_s, step_s)

    def plan_quiet(self) -> None:
        """Plan the next quiet step, whose gates have been asked, and leave it outstanding."""
        plan = self._planner.plan_quiet(self._step)
        if self._planner.held_by == NO_PAGES:
            self.leaper.match_head()
        self._commit(plan)
        self._timer.planned(self._clock.now(), 0, is_idle=False)

    def load_after(self, n: int) -> LoadCounters:
        """The load when `n` of the quiet steps, not all, have landed and the next is planned, without taking them."""
        return self.leaper.load_after(self.load(), n)

    def state_after(self, n: int, landed_s: float, step_s: float) -> RankState:
        """The state when `n` quiet steps have landed, the last at `landed_s` after `step_s`, without taking them."""
        self._timer.leapt(landed_s, step_s)
        return self.state(self.leaper.num_pages_after(n) if self._places.waiting else 0)

    @property
    def gates_last(self) -> bool:
        """Nothing would come of asking the gates again, until a request moves on any rank: they have been told of every
        prefill, too."""
        is_told = not self._timer.step_prefill_tokens and not any(plan.prefills for plan in self._outstanding)
        return is_told and self.leaper.gates_last

    @property
    def num_moves(self) -> int:
        """Moves of requests from place to place, in all."""
        return self._places.ledger.num_moves

    @property
    def held_by(self) -> str:
        """What kept the head of the queue from being admitted in the last plan, "" when nobody waits."""
        return self._planner.held_by

    @property
    def knows_all_moves(self) -> bool:
        """No request has moved since the last plan."""
        return self._planned_at == self._places.ledger.num_moves

    @property
    def outstanding(self) -> Sequence[StepPlan]:
        """Plans that were not applied yet, the oldest first."""
        return self._outstanding
