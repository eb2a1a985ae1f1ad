"""The engine loop in a lockstep group whose other ranks are a script."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from tests.engine.test_loop import Rig, SlowGrammars

from equipoise.config import CacheConfig, SchedulerConfig
from equipoise.engine.exchange import ExchangeTotals
from equipoise.engine.loop import IDLE, EngineLoop
from equipoise.engine.messages import Stop
from equipoise.sched.assemble import build_scheduler
from equipoise.sched.extend import Extension
from equipoise.sched.rules import OPEN, RankState

if TYPE_CHECKING:
    from collections.abc import Callable

    from equipoise.exec.sim import GroupStep, SimStep
    from equipoise.sched.plan import StepPlan
    from equipoise.sched.rules import StepView


class Script:
    """An Exchange with one other rank, that begins a round whenever `calls` says so."""

    def __init__(self, other: RankState) -> None:
        self.other = other
        self.calls: deque[bool] = deque()
        self.met: list[RankState] = []
        self.num_rests = 0
        self.has_left = False
        self.totals = ExchangeTotals(7, 0.5)

    def is_due(self, *, has_work: bool) -> bool:
        return has_work or (bool(self.calls) and self.calls.popleft())

    def meet(self, state: Callable[[], RankState]) -> tuple[RankState, ...]:
        self.met.append(state())
        return (self.met[-1], self.other)

    def rest(self) -> bool:
        self.num_rests += 1
        return not self.calls

    def leave(self) -> None:
        self.has_left = True


class Counting(SlowGrammars):
    """Notes what is submitted."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.submitted: list[int] = []  # rows

    def submit(self, plan: StepPlan) -> SimStep:
        self.submitted.append(plan.num_rows)
        return super().submit(plan)

    def submit_idle(self) -> SimStep | GroupStep:
        self.submitted.append(0)
        return super().submit_idle()


class GroupRig(Rig):
    """A loop that is not alone."""

    def __init__(self, depth: int = 1, other: RankState | None = None, **limits: object) -> None:
        super().__init__(depth, **limits)
        self.script = Script(other or RankState(0, 0))
        self.counting = Counting(self.executor.info, self.executor._cost, self.clock)
        self.loop = EngineLoop(self.scheduler, self.counting, self.channel, self.clock, 0, self.script)


def test_a_rank_without_work_takes_part_when_another_begins() -> None:
    rig = GroupRig()
    rig.script.calls.extend([True, True, True])
    rig.turn(3)
    assert rig.counting.submitted == [0, 0, 0]
    assert len(rig.script.met) == 3
    assert [plan for plan, _, _ in rig.loop._outstanding] == [IDLE]  # one step ahead, as those with work
    assert not rig.channel.sent


def test_nobody_meets_while_nobody_has_work() -> None:
    rig = GroupRig()
    rig.turn(5)
    assert not rig.script.met
    assert not rig.counting.submitted
    assert rig.script.num_rests == 5
    assert rig.channel.waits == [None] * 5


def test_every_turn_with_something_to_run_or_to_land_meets_once() -> None:
    rig = GroupRig()
    rig.add(1, [1, 2], max_tokens=3, ignore_eos=True)
    rig.until_idle()
    assert len(rig.tokens(1)) == 3
    # The last step is landed beside one more round: the others may launch a step before it ends.
    assert rig.counting.submitted == [1, 1, 1, 0]
    assert len(rig.script.met) == 4
    assert [state.num_running for state in rig.script.met] == [0, 1, 1, 1]


def test_synchronous_steps_meet_once_each() -> None:
    rig = GroupRig(depth=0)
    rig.add(1, [1, 2], max_tokens=3, ignore_eos=True)
    rig.until_idle()
    assert rig.counting.submitted == [1, 1, 1]
    assert [state.num_running for state in rig.script.met] == [0, 1, 1]


def test_gates_see_all_ranks() -> None:
    rig = GroupRig(other=RankState(4, 0), max_running=4, balance=True, balance_margin=0)
    rig.add(1, [1, 2], max_tokens=3, ignore_eos=True)
    rig.turn(3)
    assert rig.counting.submitted[0] == 0
    assert not rig.tokens(1)
    rig.script.other = RankState(3, 0)
    rig.until_idle()
    assert len(rig.tokens(1)) == 3


def test_gates_of_a_rank_without_work_see_what_the_others_do() -> None:
    rig = GroupRig(other=RankState(3, 2))
    seen: list[int] = []

    def gate(view: StepView) -> int:
        seen.append(view.ranks[1].num_running)
        return OPEN

    extension = Extension(admission_gates=[gate])
    settings, cache = SchedulerConfig(), CacheConfig(page_size=4, num_pages=64)
    scheduler = build_scheduler(settings, cache, rig.executor.info, rig.clock, extension)
    loop = EngineLoop(scheduler, rig.counting, rig.channel, rig.clock, 0, rig.script)
    rig.script.calls.extend([True, True])
    loop.turn()
    rig.script.other = RankState(4, 2)
    loop.turn()
    assert seen == [3, 4]


def test_a_closed_gate_is_asked_again_after_a_pause() -> None:
    rig = GroupRig(other=RankState(4, 0), max_running=4, balance=True, balance_margin=0)
    rig.add(1, [1, 2], max_tokens=3, ignore_eos=True)
    rig.turn(4)
    assert rig.channel.waits
    assert all(wait is not None and wait > 0 for wait in rig.channel.waits)


def test_the_others_do_not_wait_for_a_rank_that_stops() -> None:
    rig = GroupRig()
    rig.add(1, [1, 2], max_tokens=50, ignore_eos=True)
    rig.turn(3)
    num_met = len(rig.script.met)
    rig.channel.incoming.append(Stop())
    rig.loop.run()
    assert rig.script.has_left
    assert len(rig.script.met) == num_met
    assert not rig.loop._outstanding


def test_what_lockstep_costs_is_told() -> None:
    rig = GroupRig()
    group = rig.loop.load().group
    assert group is not None
    assert (group.total_exchanges, group.total_exchange_s, group.total_wait_s) == (7, 0.5, 0.0)
    assert Rig().loop.load().group is None
