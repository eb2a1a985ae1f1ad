"""What a rank of a group tells the others before a step: its state in a few counters, and how long its last one was."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equipoise.sched.rules import RankState

if TYPE_CHECKING:
    from equipoise.clock import Clock
    from equipoise.kv.protocol import KVMemory
    from equipoise.sched.places import Places
    from equipoise.sched.plan import StepPlan


class StepTimer:
    """Measures steps: a step lasts from the landing of the one before to its own, or from its plan after an idle time.

    num_admitted: requests that the last plan admitted
    step_s, step_prefill_tokens: of the step that landed since the last plan, 0 when none did. Rows that verify drafts
        are decodes here"""

    __slots__ = ("_begins_s", "_clock", "_is_idle", "num_admitted", "step_prefill_tokens", "step_s")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._begins_s = 0.0
        self._is_idle = True
        self.num_admitted = 0
        self.step_s = 0.0
        self.step_prefill_tokens = 0

    def planned(self, now_s: float, num_admitted: int, *, is_idle: bool) -> None:
        """A plan was made at `now_s`; what landed before it has been told. `is_idle`: no step is outstanding still."""
        self.num_admitted = num_admitted
        self.step_s, self.step_prefill_tokens = 0.0, 0
        if self._is_idle:
            self._begins_s = now_s
        self._is_idle = is_idle

    def landed(self, plan: StepPlan, *, is_idle: bool) -> None:
        """The step of `plan` ended now. `is_idle`: none is outstanding, and there is nothing to run."""
        now_s = self._clock.now()
        self.step_s = now_s - self._begins_s
        self.step_prefill_tokens = sum([row.n for row in plan.prefills if row.n > row.num_samples])
        self._begins_s, self._is_idle = now_s, is_idle

    def leapt(self, landed_s: float, step_s: float) -> None:
        """Steps of decodes were leapt over; the last of them took `step_s` and ended at `landed_s`."""
        self.num_admitted = 0
        self.step_s, self.step_prefill_tokens = step_s, 0
        self._begins_s = landed_s


def rank_state(
    places: Places, kv: KVMemory, timer: StepTimer, max_step_tokens: int, *, may_admit: bool, num_pages_owed: int = 0
) -> RankState:
    """The state of a rank now, in O(1). `num_pages_owed`: free pages that steps have taken which are leapt over."""
    ledger = places.ledger
    num_waiting, num_running = ledger.num_startable_reqs, places.num_running
    if not num_waiting and not places.prefilling:
        return RankState(
            num_running, 0, False, timer.num_admitted, 0, 0, 0, 0, 0, timer.step_s, timer.step_prefill_tokens
        )
    prefilling = ledger.num_prefilling_tokens
    num_admissible = first = admissible = 0
    head = places.waiting.head()
    if head is not None and may_admit and (num_free := places.num_open_seats):
        waiting = ledger.num_waiting_uncached_tokens - prefilling
        num_free_tokens = (kv.num_free - num_pages_owed) * kv.page_size
        num_admissible = min(num_free, len(places.waiting), num_free_tokens // (waiting // num_waiting + 1))
        if num_admissible:
            first = ledger.num_uncached(head)
            admissible = first + (num_admissible - 1) * ((waiting - first) // max(1, num_waiting - 1))
    return RankState(
        num_running,
        num_waiting,
        bool(num_waiting or places.prefilling),
        timer.num_admitted,
        num_admissible,
        first,
        admissible,
        prefilling,
        max(0, min(prefilling + admissible, max_step_tokens - len(places.decoding))),
        timer.step_s,
        timer.step_prefill_tokens,
    )
