"""A rank of a group, brought up to date only when something happens to one of its requests.

While all that a rank does is decode, what its steps cost is known in advance: the group goes on without touching it,
and its scheduler takes all those steps in one move when a request comes to it, when one of its own is about to end, or
when its gates change their mind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from equipoise.exec.cost import StepLoad

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from equipoise.exec.cost import CostModel
    from equipoise.sched.ledger import LoadCounters
    from equipoise.sched.plan import StepPlan
    from equipoise.sched.rules import RankState
    from equipoise.sched.scheduler import Scheduler

MOST_QUIET = 1 << 20
LEAST_QUIET = 3
"""Fewer quiet steps are taken one by one: it costs less."""


class Quiet(NamedTuple):
    """Steps of one rank, all of the same `num_rows`: `kv_tokens`, (n,), is what they read, `own_s`, (n,), what they
    cost; `rows_s` is what they would cost without KV."""

    num_rows: int
    kv_tokens: NDArray[np.int64]
    own_s: NDArray[np.float64]
    rows_s: float


class Lane:
    """One rank of a group.

    quiet: steps that its scheduler has not taken yet, of which `num_planned` are planned and `num_landed` landed;
        None when it is up to date
    """

    __slots__ = ("_cost", "_refused_at", "num_landed", "num_planned", "number", "quiet", "rank")

    def __init__(self, number: int, rank: Scheduler, cost: CostModel) -> None:
        """`number`: among all ranks."""
        self.number = number
        self.rank = rank
        self.quiet: Quiet | None = None
        self.num_planned = 0
        self.num_landed = 0
        self._cost = cost
        self._refused_at = -1  # moves of requests when there were too few quiet steps: there are fewer by now

    @property
    def is_idle(self) -> bool:
        """Nothing runs and nothing is to run."""
        return not self.rank.has_work and not self.rank.outstanding

    @property
    def num_left(self) -> int:
        """Quiet steps that are not planned yet."""
        return 0 if self.quiet is None else len(self.quiet.own_s) - self.num_planned

    @property
    def num_rows(self) -> int:
        """Rows of a quiet step."""
        return self._quiet.num_rows

    @property
    def rows_s(self) -> float:
        """What they cost without KV."""
        return self._quiet.rows_s

    @property
    def _quiet(self) -> Quiet:
        assert self.quiet is not None
        return self.quiet

    def next_load(self) -> StepLoad:
        """What the next quiet step computes."""
        return StepLoad(decode_rows=self._quiet.num_rows, kv_tokens=int(self._quiet.kv_tokens[self.num_planned]))

    def own_s(self, load: StepLoad) -> float:
        """What the next step costs, which computes `load`."""
        return self._cost.rank_s(load) if self.quiet is None else float(self.quiet.own_s[self.num_planned])

    def own_s_ahead(self, n: int) -> NDArray[np.float64]:
        """What the next `n` quiet steps cost."""
        return self._quiet.own_s[self.num_planned : self.num_planned + n]

    def kv_tokens_ahead(self, n: int) -> NDArray[np.int64]:
        """KV tokens that the next `n` quiet steps read."""
        return self._quiet.kv_tokens[self.num_planned : self.num_planned + n]

    def rest(self) -> bool:
        """Fall quiet if several steps to come only decode. To be asked when as many steps are planned as are planned
        ahead, and none was since one landed."""
        rank = self.rank
        num_moves = rank.num_moves
        if num_moves == self._refused_at:
            return False
        n = rank.quiet_steps(MOST_QUIET)
        if n < LEAST_QUIET:
            if n:
                self._refused_at = num_moves
            return False
        columns = rank.columns
        seats = np.flatnonzero(columns.handle >= 0)
        num_rows = len(seats)
        # Step i of 1..n reads what its rows have computed before it, and their own token.
        kv_tokens = int(columns.computed[seats].sum()) + num_rows * np.arange(1, n + 1)
        own_s = self._cost.decode_s(num_rows, kv_tokens)
        self.quiet = Quiet(num_rows, kv_tokens, own_s, self._cost.rank_s(StepLoad(decode_rows=num_rows)))
        self.num_planned = self.num_landed = 0
        return True

    def wake(self, landed_s: float, step_s: float) -> Sequence[StepPlan]:
        """Bring the scheduler up to date: the last step landed at `landed_s`, after `step_s`. Returns its outstanding
        plans, the oldest first."""
        rank = self.rank
        self.quiet = None
        if self.num_landed:
            rank.leap(self.num_landed, landed_s, step_s)
        if self.num_planned > self.num_landed:
            rank.plan_quiet()
        return rank.outstanding

    def goes_on(self, ranks: tuple[RankState, ...] | None) -> bool:
        """Show the next step to the gates; False when it is no quiet one, by their answers."""
        return self.rank.goes_on(self.num_planned, ranks)

    def state(self, landed_s: float, step_s: float) -> RankState:
        """What the other ranks must know of this one before the next step; the last landed at `landed_s`, after
        `step_s`."""
        if self.quiet is None or not self.num_landed:
            return self.rank.state()
        return self.rank.state_after(self.num_landed, landed_s, step_s)

    def load(self, num_leapt: int) -> LoadCounters:
        """The load now, `num_leapt` steps of a leap of the whole group having landed."""
        return self.rank.load() if self.quiet is None else self.rank.load_after(self.num_landed + num_leapt)
