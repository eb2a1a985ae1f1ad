"""Gates: may this step prefill, how many requests may it admit. Sources are named by pull request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equipoise.sched.rules import OPEN, Lasting

if TYPE_CHECKING:
    from equipoise.sched.rules import Gate, StepView


def admission_cap(cap: int) -> Gate:
    """At most `cap` requests run at once, fewer than there are seats."""

    def gate(view: StepView) -> int:
        return max(0, cap - view.num_running)

    return Lasting(gate)


def balance(max_running: int, margin: int = 1) -> Gate:
    """Closed while any rank of the group is full: max(running) >= max_running - margin (vllm-project/vllm-ascend#5212).

    Margin 1 gains more throughput, margin 0 keeps the time to the first token lower."""
    full = max_running - margin

    def gate(view: StepView) -> int:
        return 0 if max([rank.num_running for rank in view.ranks]) >= full else OPEN

    return Lasting(gate)


def prefill_cadence(interval: int) -> Gate:
    """While something decodes, prefill (running chunks too) `interval` steps after the last step that did, at the
    earliest (vllm-project/vllm#44558): decodes run undisturbed, and who comes after a long pause does not wait.

    Lifted when the last step that could admit left requests waiting: a saturated rank must not be held back."""

    def gate(view: StepView) -> int:
        is_due = view.num_steps_since_prefill >= interval
        return OPEN if is_due or view.has_backlog or not view.num_decoding else 0

    # Once open it is so until the next prefill; while it is closed and nobody waits it does not matter.
    return Lasting(gate, lambda view, answer: answer == OPEN or not view.num_waiting)


def min_free_seats(num_seats: int) -> Gate:
    """Admit only when at least `num_seats` seats are free, so that prefills come in groups; open while nothing runs."""

    def gate(view: StepView) -> int:
        return OPEN if view.num_free_seats >= num_seats or not view.num_running else 0

    return Lasting(gate)


class PrefillAlignment:
    """A gate that waits for company: closed while only some ranks want to prefill, for a bounded time.

    Every rank of a lockstep group sees the same `ranks`, counts the same passes and so decides alike. A
    prefill that already runs obeys too, or one rank would go on alone (sgl-project/sglang#35241)."""

    def __init__(self, max_passes: int = 30, max_delay_s: float = 5.0, num_open: int = 1) -> None:
        """Open again after `max_passes` closed steps or `max_delay_s` seconds, whichever comes first, for `num_open`
        steps.

        With a cadence beside it `num_open` is the cadence's interval: each rank then finds one step in which both
        are open, whatever its own count of steps."""
        self._max_passes = max_passes
        self._max_delay_s = max_delay_s
        self._num_open = num_open
        self._num_left = 0
        self._num_passes = 0
        self._closed_since: float | None = None
        self.lasts = False

    def __call__(self, view: StepView) -> int:
        wanting = sum(rank.wants_prefill for rank in view.ranks)
        self.lasts = wanting in (0, len(view.ranks))
        if self.lasts:
            self._num_left = 0
        elif self._num_left:
            self._num_left -= 1
        elif self._is_over(view.now_s):
            self._num_left = self._num_open - 1
        else:
            self._num_passes += 1
            if self._closed_since is None:
                self._closed_since = view.now_s
            return 0
        self._num_passes, self._closed_since = 0, None
        return OPEN

    def _is_over(self, now_s: float) -> bool:
        if self._num_passes >= self._max_passes:
            return True
        return self._closed_since is not None and now_s - self._closed_since >= self._max_delay_s
