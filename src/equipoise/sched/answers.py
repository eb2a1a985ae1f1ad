"""What rules answer, checked: gates once a step, limits for each chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from equipoise.errors import InvariantError
from equipoise.sched.rules import OPEN, rule_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from equipoise.request import Request
    from equipoise.sched.rules import Gate, Limit, Rules, StepView

PAUSED = "pause"


class Entry(NamedTuple):
    """What the gates answer in a step: may prompts be computed, how many requests may enter, and which gate says so."""

    may_prefill: bool
    allowed: int
    closed_by: str

    def is_like(self, other: Entry) -> bool:
        """Do both keep newcomers out, or let them in, for the same reason?"""
        return (self.may_prefill, self.allowed > 0, self.closed_by) == (
            other.may_prefill,
            other.allowed > 0,
            other.closed_by,
        )


def ask_gates(rules: Rules, view: StepView, *, may_admit: bool) -> Entry:
    """Show a step to every gate: some count those that they see. `may_admit` False: paused for newcomers.

    Raises InvariantError for an answer that is no whole number."""
    may_prefill, closed_by = _strictest(rules.prefill_gates, view)
    allowed, held_by = _strictest(rules.admission_gates, view)
    if not may_prefill:
        return Entry(False, 0, closed_by)
    return Entry(True, allowed, held_by) if may_admit else Entry(True, 0, PAUSED)


def limited(limit: Limit, request: Request, n: int) -> int:
    """Tokens, out of the next `n` of `request`, that `limit` leaves. Raises InvariantError for an answer that a limit
    must not give."""
    answer = limit(request, n)
    if answer.__class__ is int and 0 <= answer <= n:
        return answer
    raise InvariantError(f"the limit {rule_name(limit)} answered {answer!r} for {n} tokens, not a whole number of them")


def _strictest(gates: Sequence[Gate], view: StepView) -> tuple[int, str]:
    """The strictest answer and who gave it. Every gate is asked."""
    strictest, name = OPEN, ""
    for gate in gates:
        answer = gate(view)
        if answer.__class__ is not int:
            raise InvariantError(f"the gate {rule_name(gate)} answered {answer!r}, not a whole number")
        if answer < strictest:
            strictest, name = answer, rule_name(gate)
    return (strictest if strictest > 0 else 0), name
