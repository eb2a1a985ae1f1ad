"""Gates: may this step prefill, how many requests may it admit. Sources are named by pull request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equipoise.sched.rules import OPEN

if TYPE_CHECKING:
    from equipoise.sched.rules import Gate, StepView


def admission_cap(cap: int) -> Gate:
    """At most `cap` requests run at once, fewer than there are seats."""
    return lambda view: max(0, cap - view.num_running)


def balance(max_running: int, margin: int = 1) -> Gate:
    """Closed while any rank of the group is full: max(running) >= max_running - margin (vllm-project/vllm-ascend#5212).

    Margin 1 gains more throughput, margin 0 keeps the time to the first token lower."""
    full = max_running - margin

    def gate(view: StepView) -> int:
        return 0 if max(rank.num_running for rank in view.ranks) >= full else OPEN

    return gate
