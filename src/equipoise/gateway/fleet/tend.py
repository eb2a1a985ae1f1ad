"""Tends one worker: finds out what it is, checks its health, polls its load. Two tasks of its own, so that a worker
that hangs delays nobody else.

    find ── found ──> ready: check health, look for new models ── unhealthy ──> wait until healthy ──> find ...
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from math import inf
from typing import TYPE_CHECKING

from equipoise.gateway.fleet.backends.discovery import FEEDS, discover
from equipoise.gateway.fleet.backends.models import list_models
from equipoise.gateway.fleet.fetch import FetchError, NotAskedError, Site
from equipoise.gateway.fleet.load_feed import LoadFeed

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable

    from equipoise.gateway.fleet.fleet import Fleet
    from equipoise.gateway.fleet.worker import Found, Kind, Worker

log = logging.getLogger(__name__)

FIRST_RETRY_S, MAX_RETRY_S = 0.25, 5.0
"""Waits between two tries to find out what a worker is: doubled from the first to the last."""
JITTER = 0.1
AFTER_FAULT_S = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class TendLimits:
    """How workers are tended; health checks are the fleet's limits.

    load_interval_s: seconds between two load reports, 0 for none
    load_stale_s: seconds after which a report is too old to go by
    timeout_s: seconds that a worker has to answer anything but a health check
    api_key: the bearer token that the gateway's own requests carry
    refresh_s: seconds between two looks at the models of a worker, since adapters come and go while it runs; and
        from finding it until it is asked anew because it reports other ranks
    """

    load_interval_s: float = 1.0
    load_stale_s: float = 10.0
    timeout_s: float = 5.0
    api_key: str | None = None
    refresh_s: float = 30.0


class Tender:
    """The two tasks that tend one worker, from `start` to `stop`."""

    def __init__(
        self, fleet: Fleet, worker: Worker, limits: TendLimits, draw: random.Random, clock: Callable[[], float]
    ) -> None:
        health = fleet.limits.health
        self._fleet = fleet
        self._worker = worker
        self._limits = limits
        self._health = health
        self._random = draw
        self._clock = clock
        self._site = Site(worker.url, worker.transport, limits.timeout_s, limits.api_key)
        self._health_site = Site(worker.url, worker.transport, health.timeout_s, limits.api_key)
        self._found: Found | None = None
        self._feed: LoadFeed | None = None
        self._found_at = -inf
        self._must_find = asyncio.Event()
        self._must_poll = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin. Needs a running event loop."""
        self._tasks.append(asyncio.create_task(self._go_on(self._attend), name=f"health {self._worker.url}"))
        if self._limits.load_interval_s > 0:
            self._tasks.append(asyncio.create_task(self._go_on(self._poll_loads), name=f"load {self._worker.url}"))

    async def stop(self) -> None:
        """End both tasks; returns once they have ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _go_on(self, what: Callable[[], Awaitable[None]]) -> None:
        """Do `what` again and again; a bug in it must not leave the worker untended."""
        while True:
            try:
                await what()
            except Exception:
                log.exception("worker %s: tending it failed", self._worker.url)
                await asyncio.sleep(AFTER_FAULT_S)

    # Health

    async def _attend(self) -> None:
        """One life of the worker: find it, then watch it until it is unhealthy and healthy again."""
        await self._find()
        await self._while_healthy()
        while not self._worker.health.is_healthy:
            await asyncio.sleep(self._jittered(self._health.interval_s))
            await self._check_health()

    async def _find(self) -> None:
        """Ask the worker what it is until it says so."""
        worker, delay_s = self._worker, FIRST_RETRY_S
        while True:
            try:
                if (error := await self._health_error()) is not None:
                    raise FetchError(error)
                self._found = await discover(self._site, worker.spec.kind)
                break
            except NotAskedError:
                pass
            except FetchError as error:
                self._not_found(str(error))
            await asyncio.sleep(self._jittered(delay_s))
            delay_s = min(2 * delay_s, MAX_RETRY_S)
        self._must_find.clear()
        self._found_at = self._clock()
        self._warn_of_role(self._found)
        worker.health.reset()
        before = (worker.state, worker.kind, worker.load)
        self._fleet.found(worker, self._found, self._found_at)
        if before != (worker.state, worker.kind, worker.load):
            self._feed = self._new_feed(self._found.kind)
            self._must_poll.set()

    async def _while_healthy(self) -> None:
        """Check health and models in turn; returns when the worker is unhealthy or must be found anew."""
        refresh_s = self._limits.refresh_s
        interval_s = self._health.interval_s or refresh_s
        refresh_at = self._clock() + refresh_s
        while not self._must_find.is_set():
            await _wait(self._must_find, self._jittered(interval_s))
            if self._health.interval_s:
                await self._check_health()
                if not self._worker.health.is_healthy:
                    return
            if self._clock() >= refresh_at:
                refresh_at = self._clock() + refresh_s
                await self._refresh_models()

    async def _check_health(self) -> None:
        try:
            error = await self._health_error()
        except NotAskedError:
            return
        if self._worker.health.checked(error is None) and error is not None:
            self._fleet.became_unhealthy(self._worker, error)

    async def _health_error(self) -> str | None:
        """What is wrong with the worker's health, in one clause; None when nothing is. Raises NotAskedError."""
        path = self._health.path
        try:
            answer = await self._health_site.get(path)
        except NotAskedError:
            raise
        except FetchError as error:
            return str(error)
        if answer.is_ok or (answer.status in (404, 405) and self._worker.kind in (None, "openai")):
            return None
        return f"{path} answered {answer.status}"

    async def _refresh_models(self) -> None:
        """Take over the models that the worker lists now. One that does not answer is the health checks' affair.

        One with several ranks that could not tell how they are named is asked for that again."""
        if self._found is not None and len(self._found.rank_labels) > 1 and not self._found.places:
            self._must_find.set()
        try:
            models = await list_models(self._site)
        except FetchError:
            return
        kind = self._worker.kind
        if self._worker.spec.kind == "auto" and models.owner in FEEDS and models.owner != kind != "openai":
            self._must_find.set()  # another kind of server took its place between two health checks
            return
        if self._found is not None and models.names and models.names != self._found.models:
            self._found = dataclasses.replace(self._found, models=models.names, cards=models.cards)
            self._fleet.found(self._worker, self._found, self._clock())

    def _new_feed(self, kind: Kind) -> LoadFeed | None:
        if not FEEDS[kind]:
            return None
        return LoadFeed(self._worker, self._site, self._limits.load_stale_s, self._clock)

    def _not_found(self, error: str) -> None:
        """The worker did not say what it is. The log says why, once per reason; one that was ready fails its health."""
        worker = self._worker
        if error != worker.error:
            log.warning("worker %s: %s: %s; trying on", worker.url, worker.state, error)
        worker.error = error
        if worker.health.checked(False):
            self._fleet.became_unhealthy(worker, error)

    def _warn_of_role(self, found: Found) -> None:
        if found.role is not None and found.role != self._worker.role:
            log.warning("worker %s: it runs as %s but is used as %s", self._worker.url, found.role, self._worker.role)

    # Load

    async def _poll_loads(self) -> None:
        """One poll, then a pause. The next poll never begins before this one ended."""
        started_at = self._clock()
        self._must_poll.clear()
        feed = self._feed
        if feed is not None and self._worker.state != "unhealthy":
            await feed.poll()
            if feed.has_other_ranks and self._clock() - self._found_at > self._limits.refresh_s:
                self._must_find.set()  # it was restarted with other ranks, or lost some
        pause_s = self._jittered(self._limits.load_interval_s)
        await _wait(self._must_poll, max(0.0, started_at + pause_s - self._clock()))

    def _jittered(self, seconds: float) -> float:
        return seconds * self._random.uniform(1.0 - JITTER, 1.0 + JITTER)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    """Until `event` is set, at most so long."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass
