"""A simulation from a scenario: the engine's schedulers, the gateway's policies, a workload and virtual time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from equipoise.clock import VirtualClock
from equipoise.errors import RequestError
from equipoise.exec.costs import build_cost
from equipoise.exec.protocol import ExecutorInfo
from equipoise.sched.assemble import build_scheduler
from equipoise.sim.content import Content
from equipoise.sim.events import Events, Priority
from equipoise.sim.front import Front
from equipoise.sim.group import Group, HostCost
from equipoise.sim.results import Requests, Steps, summary
from equipoise.sim.workload.build import build_workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from equipoise.request import Request
    from equipoise.sched.ledger import LoadCounters
    from equipoise.sched.scheduler import Scheduler
    from equipoise.sim.front import Choice
    from equipoise.sim.scenario import Scenario
    from equipoise.sim.step_log import LossSink, StepSink
    from equipoise.sim.workload.request import SimRequest


@dataclass(frozen=True)
class Results:
    """What came of a simulation."""

    scenario: Scenario
    requests: Requests
    steps: Steps
    cost_source: str

    def summary(self) -> dict[str, float]:
        """One number per question."""
        fleet, objectives = self.scenario.fleet, self.scenario.objectives
        num_ranks = fleet.workers * fleet.ranks
        return summary(self.requests, self.steps, num_ranks, objectives.ttft_ms, objectives.tpot_ms)


def simulate(
    scenario: Scenario,
    *,
    folder: Path | None = None,
    leaps: bool = True,
    sinks: Sequence[StepSink] = (),
    loss_sinks: Sequence[LossSink] = (),
    on_progress: Callable[[int, float], None] | None = None,
) -> Results:
    """Run `scenario` to its end. Relative paths in it are under `folder`, by default the current one.

    `leaps` False takes every step by itself: slower, with the same results. `sinks` are told of every
    step of every rank, `loss_sinks` of what each step of a lockstep group lost to its slowest rank
    (`equipoise.sim.step_log`). `on_progress(num_ended, now)` is called as requests end. Raises ConfigError when a file
    or a name in the scenario is wrong."""
    simulation = Simulation(scenario, folder or Path(), leaps=leaps, sinks=sinks, loss_sinks=loss_sinks)
    simulation.on_progress = on_progress
    simulation.run()
    return simulation.results()


class Simulation:
    """One run of a scenario."""

    def __init__(
        self,
        scenario: Scenario,
        folder: Path,
        *,
        leaps: bool = True,
        sinks: Sequence[StepSink] = (),
        loss_sinks: Sequence[LossSink] = (),
    ) -> None:
        fleet, cache = scenario.fleet, scenario.cache
        self._scenario = scenario
        self._clock = VirtualClock()
        self._events = Events()
        self._requests = Requests()
        self._steps = Steps(sinks, loss_sinks)
        self._cost = build_cost(scenario.cost, folder)
        self._workload = build_workload(scenario.workload, scenario.seed, folder)
        self._content = Content(
            cache.page_size, self._workload.piece_len, fleet.max_model_len, prefix_cache=cache.prefix_cache
        )
        self.front = Front(scenario.routing, fleet.workers, fleet.ranks, self._workload.piece_len, scenario.seed)
        self._groups = [self._worker(number, leaps=leaps) for number in range(fleet.workers)]
        self._running: dict[int, tuple[SimRequest, Choice]] = {}
        self._busy: dict[tuple[int, int], int] = {}
        self._reports_on = False
        self._arrivals: Iterator[SimRequest] = iter(())
        self._num_ended = 0
        self.on_progress: Callable[[int, float], None] | None = None

    def results(self) -> Results:
        """What came of it so far."""
        return Results(self._scenario, self._requests, self._steps, self._cost.source)

    def run(self) -> None:
        """Until nothing happens any more."""
        self._arrivals = self._workload.first()
        self._next_arrival()
        events, clock = self._events, self._clock
        while events:
            time_s, call = events.pop()
            clock.move_to(time_s)
            call()

    # ---------------------------------------------------------------- the fleet

    def schedulers(self) -> Iterator[Scheduler]:
        """That of every rank, worker after worker."""
        return (rank for groups in self._groups for group in groups for rank in group.ranks)

    def _worker(self, worker: int, *, leaps: bool) -> list[Group]:
        """The groups of a worker: one of all its ranks in lockstep, else one for each."""
        fleet = self._scenario.fleet
        sizes = [fleet.ranks] if fleet.lockstep else [1] * fleet.ranks
        groups, first = [], 0
        for size in sizes:
            groups.append(self._group(worker, first, size, leaps=leaps))
            first += size
        return groups

    def _group(self, worker: int, first: int, size: int, *, leaps: bool) -> Group:
        host, fleet = self._scenario.host, self._scenario.fleet

        return Group(
            worker * fleet.ranks + first,
            [self._scheduler() for _ in range(size)],
            self._cost,
            HostCost(host.step_us / 1e6, host.row_us / 1e6),
            self._events,
            self._requests,
            self._steps,
            self._end,
            leaps=leaps,
        )

    def _scheduler(self) -> Scheduler:
        scenario = self._scenario
        assert scenario.cache.num_pages is not None
        info = ExecutorInfo(
            model_type="sim",
            vocab_size=1,
            max_model_len=scenario.fleet.max_model_len,
            page_size=scenario.cache.page_size,
            num_pages=scenario.cache.num_pages,
            eos_ids=(),
            device="sim",
            dtype="none",
        )
        return build_scheduler(scenario.scheduler, scenario.cache, info, self._clock)

    def _group_of(self, worker: int, rank: int) -> tuple[Group, int]:
        """The group that a rank steps with, and its place there."""
        groups = self._groups[worker]
        return (groups[0], rank) if len(groups) == 1 else (groups[rank], 0)

    # ---------------------------------------------------------------- requests

    def _next_arrival(self) -> None:
        body = next(self._arrivals, None)
        if body is not None:
            self._events.at(body.arrival_s, Priority.ARRIVE, lambda: self._arrive_and_next(body))

    def _arrive_and_next(self, body: SimRequest) -> None:
        self._arrive(body)
        self._next_arrival()

    def _arrive(self, body: SimRequest) -> None:
        now = self._clock.now()
        index = self._requests.add(body, body.arrival_s)
        if self._scenario.routing.report_interval_s == 0:
            self._report()
        choice = self.front.choose(body, index, now)
        self._requests.worker[index], self._requests.rank[index] = choice.worker, choice.rank
        group, place = self._group_of(choice.worker, choice.rank)
        self._running[index] = (body, choice)
        key = (choice.worker, choice.rank)
        self._busy[key] = self._busy.get(key, 0) + 1
        self._start_reports()
        try:
            group.add(place, self._content.request(index, body, now), now)
        except RequestError:
            self._leave(index, 0, now)

    def _end(self, request: Request, now: float) -> None:
        num_output = self._requests.output_len[request.handle] = request.stop_len - request.num_prompt
        self._leave(request.handle, num_output, now)
        self._num_ended += 1
        if self.on_progress is not None:
            self.on_progress(self._num_ended, now)

    def _leave(self, index: int, num_output: int, now: float) -> None:
        """A request has ended, or was refused: what it leads to comes now."""
        body, choice = self._running.pop(index)
        self.front.ended(choice, body.prompt_len, num_output, now)
        self._busy[choice.worker, choice.rank] -= 1
        following = self._workload.after(body, now)
        if following is not None:
            self._events.at(following.arrival_s, Priority.ARRIVE, lambda: self._arrive(following))

    # ---------------------------------------------------------------- load reports

    def _start_reports(self) -> None:
        interval_s = self._scenario.routing.report_interval_s
        if interval_s and not self._reports_on:
            self._reports_on = True
            self._events.at(self._clock.now() + interval_s, Priority.REPORT, self._report_and_next)

    def _report_and_next(self) -> None:
        self._report()
        self._reports_on = False
        if self._running:
            self._start_reports()

    def _report(self) -> None:
        """Every rank that has requests, or had some at the last report, says how loaded it is."""
        now, delay_s = self._clock.now(), self._scenario.routing.report_delay_s
        for worker, rank in list(self._busy):
            group, place = self._group_of(worker, rank)
            load = group.load(place, now)
            if delay_s:
                self._events.at(now + delay_s, Priority.REPORT, self._later(worker, rank, load, now))
            else:
                self.front.report(worker, rank, load, now)
            if not self._busy[worker, rank]:
                del self._busy[worker, rank]

    def _later(self, worker: int, rank: int, load: LoadCounters, taken_at: float) -> Callable[[], None]:
        return lambda: self.front.report(worker, rank, load, taken_at)
