"""A simulation from a scenario: the engine's schedulers, the gateway's policies, a workload and virtual time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from equipoise.clock import VirtualClock
from equipoise.errors import RequestError
from equipoise.sim.events import Events, Priority
from equipoise.sim.fleet import Fleet, Observers, sizes_of
from equipoise.sim.front import Front, Pair
from equipoise.sim.pd import Handovers, Legs
from equipoise.sim.reports import Reports
from equipoise.sim.results import Requests, Steps, summary
from equipoise.sim.workload.build import build_workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from equipoise.config.worker import WorkerRole
    from equipoise.request import Request
    from equipoise.sched.scheduler import Scheduler
    from equipoise.sim.front import Choice
    from equipoise.sim.scenario import Scenario
    from equipoise.sim.step_log import LossSink, StepSink
    from equipoise.sim.workload.request import SimRequest


@dataclass(frozen=True)
class Results:
    """What came of a simulation. `legs`: of requests that pairs served, where there are any."""

    scenario: Scenario
    requests: Requests
    steps: Steps
    cost_source: str
    legs: Legs | None = None

    def summary(self) -> dict[str, float]:
        """One number per question."""
        sizes, objectives = sizes_of(self.scenario.fleet), self.scenario.objectives
        num_ranks = sum(size.num_ranks for size in sizes.values())
        found = summary(self.requests, self.steps, num_ranks, objectives.ttft_ms, objectives.tpot_ms)
        if self.legs is None:
            return found
        return found | self.legs.summary(self.requests) | self.legs.busy.shares(sizes, found["duration_s"])

    def columns(self) -> dict[str, NDArray[np.float64] | NDArray[np.int64]]:
        """Columns by request."""
        return self.requests.columns() | ({} if self.legs is None else self.legs.columns())


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
        self._scenario = scenario
        self._clock = VirtualClock()
        self._events = Events()
        self._requests = Requests()
        self._workload = build_workload(scenario.workload, scenario.seed, folder)
        sizes = sizes_of(scenario.fleet)
        legs = Legs(sum(size.num_ranks for size in sizes.values()))
        self._legs = legs if "prefill" in sizes else None
        self._steps = Steps([*sinks, legs.busy] if self._legs else sinks, loss_sinks)
        self._handovers = Handovers(scenario.fleet, self._events, legs, self._clock.now, self._handed, self._end_pair)
        self.front = Front(scenario.routing, sizes, self._workload.piece_len, scenario.seed)
        observers: dict[WorkerRole, Observers] = {
            "mixed": Observers(self._requests, self._end),
            "prefill": Observers(legs.prefill, self._handovers.computed),
            "decode": Observers(legs.decode, self._end_pair),
        }
        self.fleet = Fleet(
            scenario, folder, self._workload.piece_len, self._clock, self._events, self._steps, observers,
            self._handovers, leaps=leaps,
        )  # fmt: skip
        self._reports = Reports(scenario.routing, self.fleet, self.front, self._events, self._clock.now)
        self._running: dict[int, tuple[SimRequest, Choice | Pair]] = {}
        self._arrivals: Iterator[SimRequest] = iter(())
        self._num_ended = 0
        self.on_progress: Callable[[int, float], None] | None = None

    def results(self) -> Results:
        """What came of it so far."""
        return Results(self._scenario, self._requests, self._steps, self.fleet.cost_source, self._legs)

    def run(self) -> None:
        """Until nothing happens any more."""
        self._arrivals = self._workload.first()
        self._next_arrival()
        events, clock = self._events, self._clock
        while events:
            time_s, call = events.pop()
            clock.move_to(time_s)
            call()

    def schedulers(self) -> Iterator[Scheduler]:
        """That of every rank, worker after worker."""
        return self.fleet.schedulers()

    # ---------------------------------------------------------------- requests come

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
        if self._legs is not None:
            self._legs.add(body)
        self._reports.someone_arrives(now)
        choice = self.front.choose(body, now)
        self._running[index] = (body, choice)
        try:
            if isinstance(choice, Pair):
                self._start_pair(index, body, choice, now)
            else:
                self._start(index, body, choice, now)
        except RequestError:
            self._refuse(index, now)

    def _start(self, index: int, body: SimRequest, choice: Choice, now: float) -> None:
        self._place(self._requests, index, choice)
        seat = self.fleet.seat(choice.worker, choice.rank)
        seat.group.add(seat.place, self.fleet.parts["mixed"].content.request(index, body, now), now)

    def _start_pair(self, index: int, body: SimRequest, pair: Pair, now: float) -> None:
        assert self._legs is not None
        self._place(self._requests, index, pair.decode)
        self._place(self._legs.prefill, index, pair.prefill)
        prefill, decode = (self.fleet.seat(choice.worker, choice.rank) for choice in pair)
        request = self.fleet.parts["decode"].content.request(index, body, now)
        prompt = self.fleet.parts["prefill"].content.request(index, body._replace(output_len=1), now)
        self._handovers.begin(prefill, prompt, decode, request, now)

    def _place(self, columns: Requests, index: int, choice: Choice) -> None:
        columns.worker[index], columns.rank[index] = choice.worker, choice.rank
        self._reports.began(choice)

    # ---------------------------------------------------------------- and go

    def _end(self, request: Request, now: float) -> None:
        """A request has all its tokens."""
        num_output = self._requests.output_len[request.handle] = request.stop_len - request.num_prompt
        body, choice = self._running.pop(request.handle)
        self._over(choice.decode if isinstance(choice, Pair) else choice, num_output, now)
        self.front.learn(body.prompt_len, num_output)
        self._follow(body, now)
        self._num_ended += 1
        if self.on_progress is not None:
            self.on_progress(self._num_ended, now)

    def _end_pair(self, request: Request, now: float) -> None:
        assert self._legs is not None
        self._legs.settle(request.handle, self._requests)
        self._end(request, now)

    def _handed(self, handle: int, now: float) -> None:
        """The KV of a prompt has reached the decode rank."""
        _, choice = self._running[handle]
        if isinstance(choice, Pair):
            self._over(choice.prefill, None, now)

    def _refuse(self, index: int, now: float) -> None:
        """A rank does not take a request."""
        body, choice = self._running.pop(index)
        for leg in choice if isinstance(choice, Pair) else (choice,):
            self._over(leg, 0, now)
        self.front.learn(body.prompt_len, 0)
        self._follow(body, now)

    def _over(self, choice: Choice, num_output: int | None, now: float) -> None:
        self.front.over(choice, num_output, now)
        self._reports.ended(choice)

    def _follow(self, body: SimRequest, now: float) -> None:
        """A request has ended, or was refused: what it leads to comes now."""
        following = self._workload.after(body, now)
        if following is not None:
            self._events.at(following.arrival_s, Priority.ARRIVE, lambda: self._arrive(following))
