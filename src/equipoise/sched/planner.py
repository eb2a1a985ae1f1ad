"""Plans one step: decodes, then running prefills, then admissions, within the budget and by the rules."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from equipoise.sched.answers import Entry, ask_gates, limited
from equipoise.sched.plan import PrefillRow, StepPlan
from equipoise.sched.rules import OPEN, rule_name

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from equipoise.kv.protocol import KVMemory, PrefixMatch
    from equipoise.request import Request
    from equipoise.sched.ledger import Totals
    from equipoise.sched.places import Places
    from equipoise.sched.resources import TokenBudget
    from equipoise.sched.rules import Limit, Outranks, RemoteKV, Resource, Rules, StepView

# What keeps a request from being admitted, beside the rules' own names.
NO_SEAT = "max_running"
NO_BUDGET = "max_step_tokens"
NO_PAGES = "pages"
PREEMPTED = "preemption in this step"
BLOCKED = "blocked"

MAX_PASSED = 8
"""Requests without pages that one step looks beyond: bounds its cost."""


class Planner:
    """Fills in a StepPlan. What it plans is counted as run by the scheduler's commit, not here.

    held_by: what kept the head of the queue from being admitted in the last plan, "" when nobody waits
    entry: what the gates answered then
    has_backlog: the last plan that could admit left requests waiting
    last_prefill_step: the last step that computed a prompt, more than its last token
    """

    def __init__(
        self,
        places: Places,
        kv: KVMemory,
        budget: TokenBudget,
        rules: Rules,
        totals: Totals,
        *,
        depth: int,
        reserve_full_prompt: bool,
        watermark_pages: int,
        max_bypass: int,
    ) -> None:
        self.held_by = ""
        self.entry = Entry(True, OPEN, "")
        self.has_backlog = False
        self.last_prefill_step = 0
        self._now_s = 0.0
        self._no_victim_at: tuple[int, int] | None = None
        self._asked: Entry | None = None  # what the gates answered for the next plan, when they were asked before it
        self._places = places
        self._columns = places.columns
        self._kv = kv
        self._budget = budget
        self._rules = rules
        self._totals = totals
        self._remote = rules.remote
        self._depth = depth
        self._reserve_full_prompt = reserve_full_prompt
        self._watermark_pages = watermark_pages
        self._max_bypass = max_bypass

    def plan(self, view: StepView, num_outstanding: int, *, may_admit: bool) -> StepPlan:
        """The rows of the next step. `may_admit` False: paused for newcomers."""
        plan = StepPlan(view.step)
        self._now_s = view.now_s
        self._budget.begin_step()
        self._wake_blocked()
        self.entry = self._asked or ask_gates(self._rules, view, may_admit=may_admit)
        self._asked = None
        may_prefill, allowed, closed_by = self.entry
        if allowed:
            self._make_way(plan)
        num_made_way = len(plan.preempted)
        self._plan_decodes(plan, num_outstanding)
        if may_admit and self._places.joining:
            self._join(plan)
        self._plan_drafts(plan)
        if may_prefill:
            limits = [limit for rule in self._rules.limits if (limit := rule(view)) is not None]
            self._plan_prefills(plan, limits)
            if len(plan.preempted) > num_made_way:
                allowed, closed_by = 0, PREEMPTED
            closed_by = self._plan_admissions(plan, limits, allowed) or closed_by
        self.held_by = closed_by if self._places.waiting else ""
        if plan.prefills and any(row.start < row.request.num_known - 1 for row in plan.prefills):
            self.last_prefill_step = plan.step
        for observer in self._rules.observers:
            observer(plan, view, self.held_by)
        return plan

    def look(self, view: StepView, *, may_admit: bool) -> None:
        """Show a step that is not planned here to the gates: some count those that they see."""
        ask_gates(self._rules, view, may_admit=may_admit)

    def goes_on(self, view: StepView, *, may_admit: bool) -> bool:
        """Ask the gates about a step that only decodes, if they answer as before or nobody waits. Else False, and the
        next plan goes by these answers."""
        entry = ask_gates(self._rules, view, may_admit=may_admit)
        if not self._places.waiting or entry.is_like(self.entry):
            return True
        self._asked = entry
        return False

    def plan_quiet(self, step: int) -> StepPlan:
        """The rows of a step that does nothing but decode all that decodes, and whose gates have been asked."""
        plan = StepPlan(step)
        self._budget.begin_step()
        self._plan_decodes(plan, 0)
        return plan

    # ---------------------------------------------------------------- running requests

    def _plan_decodes(self, plan: StepPlan, num_outstanding: int) -> None:
        columns = self._columns
        seats = self._places.decoding.seats()[: self._budget.left].copy()
        if num_outstanding > self._depth:
            # Planned further ahead than `depth`: rows that already run that far ahead sit this step out.
            seats = seats[columns.length[seats] - columns.known[seats] <= self._depth]
        plan.decode_seats = seats
        self._budget.charge_decodes(len(seats))
        full = seats[columns.capacity[seats] <= columns.computed[seats]]
        if len(full):
            self._grow_decodes(plan, full)

    def _join(self, plan: StepPlan) -> None:
        """Those whose KV has come decode at once: seats and pages were promised to them before it did."""
        seats: list[int] = []
        while len(seats) < self._budget.left and (request := self._places.joining.head()) is not None:
            seats.append(self._places.join(request))
            plan.seated.append(request)
        plan.decode_seats = np.concatenate([plan.decode_seats, np.array(seats, np.int64)])
        self._budget.charge_decodes(len(seats))

    def _grow_decodes(self, plan: StepPlan, seats: NDArray[np.int64]) -> None:
        """One more page for each of `seats`: for all at once, or one by one with victims that make room."""
        columns = self._columns
        pages = self._kv.extend([self._places.at(seat) for seat in seats.tolist()])
        if pages is not None:
            columns.add_pages(seats, pages)
            return
        for seat in seats.tolist():
            request = self._places.at_if_any(seat)
            if request is not None:  # not preempted for one before it
                self._grow_or_preempt(plan, request, seat, int(columns.capacity[seat]) + 1)

    def _plan_drafts(self, plan: StepPlan) -> None:
        """One row for each request at rest: its last token, and the drafts that budget, pages and length allow."""
        drafter = self._rules.drafter
        for request in tuple(self._places.drafting.values()):
            seat = request.seat
            if drafter is None or seat is None or self._budget.left <= 0:
                continue  # a seat is None when it was preempted for one before it
            known = int(self._columns.known[seat])
            most = min(self._budget.left, int(self._columns.stop_len[seat]) - known) - 1
            drafts = drafter.propose(request, self._columns.tokens[seat, :known], most)[:most] if most > 0 else []
            if drafts and not self._kv.grow(request, known + len(drafts)):
                drafts = []  # nobody is preempted for a guess
            if self._grow_or_preempt(plan, request, seat, known + len(drafts)):
                self._columns.tokens[seat, known : known + len(drafts)] = drafts
                plan.verifies.append(PrefillRow(request, seat, known - 1, 1 + len(drafts), samples=True, drafts=drafts))
                self._budget.charge_decodes(1 + len(drafts))

    def _plan_prefills(self, plan: StepPlan, limits: list[Limit]) -> None:
        for request in tuple(self._places.prefilling):
            seat = request.seat
            if seat is None:
                continue  # preempted for one before it
            n = self._chunk(request, limits)
            if n and self._grow_or_preempt(plan, request, seat, request.num_computed + n):
                self._plan_chunk(plan, request, seat, n)
        # Only now, when no preemption can take a row back any more.
        for row in plan.prefills:
            self._publish(row)

    def _grow_or_preempt(self, plan: StepPlan, request: Request, seat: int, upto: int) -> bool:
        """Pages for [0, upto) of a running request; victims make room. False when it became one itself."""
        while not self._kv.grow(request, upto):
            victim = self._victim()
            if victim is request and self._take_loaded(plan, request):
                continue
            self._preempt(plan, victim)
            if victim is request:
                return False
        self._columns.write_pages(request, seat)
        return True

    def _victim(self) -> Request:
        victim_order, computed = self._rules.victim_order, self._columns.computed
        return max(
            self._places.preemptible(),
            key=lambda request: (victim_order(request, int(computed[request.seat])), request.handle),
        )

    def _preempt(self, plan: StepPlan, request: Request) -> None:
        plan.preempted.append(request)
        self._budget.refund(*plan.drop(request))
        self._totals.preemptions += 1
        self._places.preempt(request)

    # ---------------------------------------------------------------- newcomers

    def _plan_admissions(self, plan: StepPlan, limits: list[Limit], allowed: int) -> str:
        """Admit up to `allowed` requests in order; returns what stopped it, "" when `allowed` did or nobody waits.

        A request that lacks pages may be passed, at most `max_bypass` times in its life."""
        waiting = self._places.waiting
        passed: list[Request] = []
        stopped_by = ""
        while allowed > 0 and (request := waiting.head()) is not None:
            outcome = self._admit(plan, request, limits)
            if not outcome:
                allowed -= 1
                for other in passed:
                    other.num_bypassed += 1
            elif outcome != BLOCKED:
                stopped_by = stopped_by or outcome
                if outcome != NO_PAGES or len(passed) == MAX_PASSED:
                    break
                waiting.remove(request)
                passed.append(request)
            if any(other.num_bypassed >= self._max_bypass for other in passed):
                break
        for request in passed:
            waiting.push(request)
        self.has_backlog = bool(waiting)
        return stopped_by

    def _admit(self, plan: StepPlan, request: Request, limits: list[Limit]) -> str:
        """Give the head of the queue a seat, pages and its first chunk, if it has room everywhere; else what lacks."""
        if self._places.num_open_seats <= 0:
            return NO_SEAT
        match = self._kv.match(request)
        self._places.ledger.recognise(request, match.num_tokens)
        if self._remote is not None and (outcome := self._load(plan, self._remote, request, match)):
            return outcome
        request.num_computed = match.num_tokens
        n = self._chunk(request, limits)
        if not n:
            return self._cut_by(request, limits)
        for resource in self._rules.resources:
            if not resource.fit(request, n):
                self._places.block(request, resource.name, resource.share(request), self._now_s)
                return BLOCKED
        upto = match.num_tokens + n
        if not self._kv.admit(request, match, upto, self._pages_to_reserve(request, upto, len(match.pages))):
            self._take_loaded(plan, request)
            return NO_PAGES
        seat = self._places.seat(request)
        self._count_admission(request, match.num_tokens)
        plan.seated.append(request)
        # A request admitted later in this very step may share the pages that this chunk computes.
        self._publish(self._plan_chunk(plan, request, seat, n))
        return ""

    def _load(self, plan: StepPlan, remote: RemoteKV, request: Request, match: PrefixMatch) -> str:
        """Have a remote store bring what it holds beyond the match: BLOCKED while it comes, "" when it has nothing.

        To a decode rank comes the whole prompt and the first token, which has room to be decoded then if it is not the
        last: a prompt of one output token may take all pages."""
        page_size, joins = self._kv.page_size, self._places.role.joins
        upto = min(remote.num_tokens(request), request.num_prompt)
        if not joins:
            upto = min(upto, request.num_known - 1) // page_size * page_size
        if request.pages or not request.may_load or upto <= match.num_tokens:
            return ""
        room = joins and request.num_known + 1 < request.stop_len
        needed = -(-(request.num_known + room) // page_size) - len(match.pages)
        reserve = needed + self._places.ledger.num_reserved_pages
        reserve += self._watermark_pages if self._places.num_running else 0
        if not self._kv.admit(request, match, upto + room, reserve):
            self._take_loaded(plan, request)
            return NO_PAGES
        self._places.load(request)
        remote.start(request, match.num_tokens, upto)
        return BLOCKED

    def _take_loaded(self, plan: StepPlan, request: Request) -> bool:
        """With nobody else running, one that waits with loaded pages gives them up for `request`, the last in order;
        False when there is none. Or each could wait for what the other holds, for ever."""
        num_others = self._places.num_running - (request.seat is not None)
        loaded = [other for other in self._places.loaded.values() if other is not request]
        if num_others or not loaded:
            return False
        victim = max(loaded, key=lambda other: (self._rules.order(other), other.handle))
        plan.preempted.append(victim)
        self._totals.preemptions += 1
        victim.num_preemptions += 1
        self._places.unload(victim)
        return True

    def _count_admission(self, request: Request, num_matched: int) -> None:
        if request.num_preemptions == 0:
            request.num_cached = num_matched
        self._totals.cached_tokens += num_matched
        self._totals.prompt_tokens += request.num_known

    def _pages_to_reserve(self, request: Request, upto: int, num_matched: int) -> int:
        """Pages that must be free at the admission: those of its first chunk, or of all it will compute."""
        tokens = request.num_known if self._reserve_full_prompt else upto
        pages = -(-tokens // self._kv.page_size) - num_matched - len(request.pages)
        pages += self._places.ledger.num_reserved_pages - self._places.ledger.reserved(request)
        # With nobody running there is nobody to leave pages for.
        return pages + (self._watermark_pages if self._places.num_running else 0)

    def _wake_blocked(self) -> None:
        """Resources that may have room again: their blocked requests wait in line once more."""
        for resource in self._rules.resources:
            if resource.begin_step():
                self._wake(resource)

    def _wake(self, resource: Resource) -> None:
        for _share, queue in self._places.blocked_by(resource.name):
            head = queue.head()
            if head is not None and resource.fit(head, 1):
                for request in tuple(queue):
                    self._places.unpark(request)

    def _make_way(self, plan: StepPlan) -> None:
        """Preempt whom the head of the queue outranks, if it lacked a seat or pages and gets them so."""
        outranks = self._rules.outranks
        if outranks is None or self.held_by not in (NO_SEAT, NO_PAGES):
            return
        places = self._places
        head = places.waiting.head()
        if head is None or self._no_victim_at == (head.handle, places.ledger.num_moves):
            return
        victims = self._victims_for(head, outranks)
        for victim in victims:
            self._preempt(plan, victim)
        if not victims:
            # The answer stands until a request moves; asking anew costs 14 us with 64 running.
            self._no_victim_at = (head.handle, places.ledger.num_moves)

    def _victims_for(self, head: Request, outranks: Outranks) -> list[Request]:
        """The fewest requests, last in order first, that give `head` room; none when they would not do."""
        order = self._rules.order
        outranked = [request for request in self._places.preemptible() if outranks(head, request)]
        outranked.sort(key=lambda request: (order(request), request.handle), reverse=True)
        victims: list[Request] = []
        for request in outranked:
            if self._has_room(head, victims):
                break
            victims.append(request)
        return victims if self._has_room(head, victims) else []

    def _has_room(self, request: Request, victims: list[Request]) -> bool:
        """A seat and pages once `victims` are gone: as if nothing of it were cached, and nothing of theirs shared."""
        num_seats = self._places.num_open_seats + len(victims)
        num_pages = self._kv.num_free + sum([len(victim.pages) for victim in victims])
        return num_seats > 0 and num_pages >= self._pages_to_reserve(request, request.num_known, 0)

    # ---------------------------------------------------------------- chunks

    def _chunk(self, request: Request, limits: list[Limit]) -> int:
        """Tokens of a prefilling request that this step computes: what is left, cut by the budget and every limit."""
        n = request.num_known - request.num_computed
        room = self._budget.room
        if n > room:
            n = room
        for limit in limits:
            n = limited(limit, request, n)
        return n

    def _cut_by(self, request: Request, limits: list[Limit]) -> str:
        """What leaves a newcomer no token: the budget, or the first limit that says so."""
        n = min(request.num_known - request.num_computed, self._budget.room)
        for limit in limits:
            if n and not (n := limited(limit, request, n)):
                return rule_name(limit)
        return NO_BUDGET

    def _plan_chunk(self, plan: StepPlan, request: Request, seat: int, n: int) -> PrefillRow:
        start = request.num_computed
        self._budget.charge_chunk(n)
        for resource in self._rules.resources:
            resource.take(request, n)
        row = PrefillRow(request, seat, start, n, samples=start + n == request.num_known)
        plan.prefills.append(row)
        return row

    def _publish(self, row: PrefillRow) -> None:
        """No undo can reach `row` any more: others may match what it computes."""
        self._kv.publish(row.request, self._columns.tokens[row.seat], row.start + row.n)
