"""Gates that all ranks of a group share where they live in one process, on virtual time.

A gate over ranks answers by the states that ranks exchange alone, so that each rank's own gives the same answer: one
for all is asked once for each exchange, whatever the number of ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from equipoise.sched.rules import rule_name

if TYPE_CHECKING:
    from equipoise.sched.rules import LastingGate, RankState, StepView


class Shared:
    """A gate that is asked once for each exchange of states, and answers all ranks alike."""

    def __init__(self, gate: LastingGate) -> None:
        self.__qualname__ = rule_name(gate)
        self._gate = gate
        self._ranks: tuple[RankState, ...] | None = None
        self._answer = 0

    @property
    def lasts(self) -> bool:
        """As the gate says."""
        return self._gate.lasts

    def __call__(self, view: StepView) -> int:
        if view.ranks is not self._ranks:  # each exchange is a tuple of its own
            self._ranks, self._answer = view.ranks, self._gate(view)
        return self._answer


class GroupGates:
    """The gates over ranks of one group, by name."""

    def __init__(self) -> None:
        self._made: dict[str, Shared] = {}

    def shared(self, name: str, gate: LastingGate) -> Shared:
        """The gate of that name: `gate` when it is the first."""
        return self._made.setdefault(name, Shared(gate))
