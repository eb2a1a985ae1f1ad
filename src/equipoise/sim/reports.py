"""Load reports: every rank that is busy says so now and then, and the gateway hears of it some time later."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equipoise.sim.events import Priority

if TYPE_CHECKING:
    from collections.abc import Callable

    from equipoise.sched.ledger import LoadCounters
    from equipoise.sim.events import Events
    from equipoise.sim.fleet import Fleet
    from equipoise.sim.front import Choice, Front
    from equipoise.sim.scenario import RoutingConfig


class Reports:
    """Takes them as often as `config` says, while requests run."""

    def __init__(
        self, config: RoutingConfig, fleet: Fleet, front: Front, events: Events, now: Callable[[], float]
    ) -> None:
        self._interval_s = config.report_interval_s
        self._delay_s = config.report_delay_s
        self._fleet = fleet
        self._front = front
        self._events = events
        self._now = now
        self._busy: dict[tuple[int, int], int] = {}  # requests of each rank that has some, or had at the last report
        self._num_busy = 0
        self._is_on = False

    def someone_arrives(self, now: float) -> None:
        """A request is about to be routed: fresh reports, if it is by those."""
        if self._interval_s == 0:
            self._report()
        elif not self._is_on:
            self._is_on = True
            self._events.at(now + self._interval_s, Priority.REPORT, self._report_and_next)

    def began(self, choice: Choice) -> None:
        """A rank got a request, or one leg of it."""
        key = (choice.worker, choice.rank)
        self._busy[key] = self._busy.get(key, 0) + 1
        self._num_busy += 1

    def ended(self, choice: Choice) -> None:
        """It has left that rank."""
        self._busy[choice.worker, choice.rank] -= 1
        self._num_busy -= 1

    def _report_and_next(self) -> None:
        self._report()
        self._is_on = self._num_busy > 0
        if self._is_on:
            self._events.at(self._now() + self._interval_s, Priority.REPORT, self._report_and_next)

    def _report(self) -> None:
        now, delay_s = self._now(), self._delay_s
        for worker, rank in list(self._busy):
            seat = self._fleet.seat(worker, rank)
            load = seat.group.load(seat.place, now)
            if delay_s:
                self._events.at(now + delay_s, Priority.REPORT, self._later(worker, rank, load, now))
            else:
                self._front.report(worker, rank, load, now)
            if not self._busy[worker, rank]:
                del self._busy[worker, rank]

    def _later(self, worker: int, rank: int, load: LoadCounters, taken_at: float) -> Callable[[], None]:
        return lambda: self._front.report(worker, rank, load, taken_at)
