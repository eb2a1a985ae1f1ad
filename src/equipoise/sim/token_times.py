"""When requests of a group are admitted, have their tokens and end."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equipoise.request import Request
    from equipoise.sched.plan import StepPlan
    from equipoise.sim.results import Requests, Steps


class TokenTimes:
    """Writes times into the columns of requests, and gaps that are not those between two steps."""

    def __init__(self, requests: Requests, steps: Steps) -> None:
        self._requests = requests
        self._gaps = steps.gaps
        self._joining: set[int] = set()  # requests whose first step of decodes is in flight
        self._preempted: dict[int, float] = {}  # when requests that were preempted had their last token

    def preempt(self, plan: StepPlan, last_landed_s: float) -> None:
        """`plan` preempts, after the step that landed at `last_landed_s`."""
        for request in plan.preempted:
            self._preempted.setdefault(request.handle, last_landed_s)

    def begin(self, plan: StepPlan, begins_s: float) -> None:
        """The step of `plan` begins."""
        for request in plan.seated:
            if request.num_preemptions == 0:
                self._requests.admitted_s[request.handle] = begins_s
            if request.output_ids and math.isnan(self._requests.first_s[request.handle]):
                self._token_before_decode(request.handle, begins_s)

    def land(self, plan: StepPlan, now: float) -> int:
        """The tokens of `plan` come. Returns how many of them came one step after the one before."""
        num_tokens = len(plan.decode_seats)
        if self._joining:
            num_tokens -= self._add_first_gaps(plan, now)
        if self._preempted:
            for handle in plan.sampled_handles[: len(plan.decode_seats)].tolist():
                if handle in self._preempted:  # since this step was planned
                    self._preempted[handle] = now
        for row in plan.prefills:
            if row.samples:
                self._token_after_chunk(row.request, now)
        return num_tokens

    def end(self, request: Request, now: float) -> None:
        """`request` has ended."""
        self._requests.last_s[request.handle] = now
        self._requests.num_cached[request.handle] = request.num_cached
        self._requests.num_preemptions[request.handle] = request.num_preemptions

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
            self._gaps.add(now - self._requests.first_s[handle], 1)
        return len(joined)

    def _token_after_chunk(self, request: Request, now: float) -> None:
        """The last chunk of `request` drew a token: its first, or the first since it was preempted."""
        handle = request.handle
        last_s = self._preempted.pop(handle, None)
        if math.isnan(self._requests.first_s[handle]):
            self._requests.first_s[handle] = now
        elif last_s is not None:
            self._gaps.add(now - last_s, 1)
        if request.seat is None:  # preempted again, with this token in flight
            self._preempted[handle] = now
