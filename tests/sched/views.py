"""StepViews for tests of rules."""

from __future__ import annotations

from equipoise.sched.rules import RankState, StepView

MAX_RUNNING = 8


def make_view(*, num_running=0, num_waiting=0, ranks=None, **facts):
    """A view of a lone rank with 8 seats, unless told otherwise."""
    facts = {
        "step": 0,
        "now_s": 0.0,
        "num_decoding": 0,
        "num_prefilling": 0,
        "num_free_seats": MAX_RUNNING - num_running,
        "num_steps_since_prefill": 1,
        "has_backlog": False,
        **facts,
    }
    own = (RankState(num_running, num_waiting),)
    return StepView(num_running=num_running, num_waiting=num_waiting, ranks=ranks or own, **facts)
