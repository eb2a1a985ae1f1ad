"""The owner of all that runs in the background: what tends each worker, the workers' file, the fleet's clock."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING

from equipoise.gateway.fleet.tend import Tender, TendLimits

if TYPE_CHECKING:
    from equipoise.gateway.fleet.fleet import Fleet
    from equipoise.gateway.fleet.worker import Worker
    from equipoise.gateway.fleet.workers_file import WorkersFile

log = logging.getLogger(__name__)

TICK_S = 0.5
"""Seconds between two looks at what time alone changes in a fleet without traffic."""
FILE_CHECK_S = 1.0


class Watch:
    """Tends every worker of `fleet` from `start` to `stop`, those that come later too.

    Needs a running event loop from `start` on; time is the loop's."""

    def __init__(
        self, fleet: Fleet, limits: TendLimits, workers_file: WorkersFile | None = None, seed: int = 0
    ) -> None:
        self._fleet = fleet
        self._limits = limits
        self._workers_file = workers_file
        self._random = random.Random(seed)
        self._tenders: dict[str, Tender] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping: list[asyncio.Task[None]] = []
        self._is_running = False

    def start(self) -> None:
        """Tend the workers that there are, and those that the workers' file names."""
        self._is_running = True
        self._fleet.listeners.append(self)
        for worker in self._fleet.workers:
            self.added(worker)
        self._tasks.append(asyncio.create_task(self._tick(), name="fleet's clock"))
        if self._workers_file is not None:
            self._tasks.append(asyncio.create_task(self._follow_file(self._workers_file), name="workers' file"))

    async def stop(self) -> None:
        """End all background tasks; returns once they have ended. The fleet stays as it is."""
        self._is_running = False
        if self in self._fleet.listeners:
            self._fleet.listeners.remove(self)
        for url in list(self._tenders):
            self._let_go(url)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._stopping, return_exceptions=True)
        self._tasks.clear()

    # What the fleet tells

    def added(self, worker: Worker) -> None:
        """Tend `worker`, from the beginning if it is tended already."""
        if not self._is_running:
            return
        self._let_go(worker.url)
        draw = random.Random(self._random.random())
        tender = Tender(self._fleet, worker, self._limits, draw, asyncio.get_running_loop().time)
        self._tenders[worker.url] = tender
        tender.start()

    def left(self, worker: Worker) -> None:
        """It is tended while it drains."""

    def removed(self, worker: Worker) -> None:
        """Leave `worker` alone."""
        self._let_go(worker.url)

    def _let_go(self, url: str) -> None:
        tender = self._tenders.pop(url, None)
        if tender is None:
            return
        self._stopping = [task for task in self._stopping if not task.done()]
        self._stopping.append(asyncio.create_task(tender.stop()))

    # Tasks

    async def _tick(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(TICK_S)
            self._fleet.tick(clock())

    async def _follow_file(self, file: WorkersFile) -> None:
        """Take over what the file lists, now and whenever it changes. It is read in a thread: a disk may be slow."""
        clock = asyncio.get_running_loop().time
        while True:
            try:
                if file.has_changed() and (specs := await asyncio.to_thread(file.read)) is not None:
                    file.take_over(self._fleet, specs, clock())
            except Exception:
                log.exception("workers' file: taking it over failed")
            await asyncio.sleep(FILE_CHECK_S)
