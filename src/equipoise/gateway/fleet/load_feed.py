"""Keeps the believed load of one worker true to what it reports.

A feed is what the worker tells its load by; of those its kind has, the best one that works is polled. When no report
came for `stale_s` seconds the feed is broken: charges alone count then, and the log says so, once, and once again when
reports are back.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from equipoise.gateway.fleet.backends.discovery import FEEDS
from equipoise.gateway.fleet.backends.reports import ReportError
from equipoise.gateway.fleet.fetch import FetchError, NotAskedError
from equipoise.route.account import RankReport

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from equipoise.gateway.fleet.backends.reports import Feed, RankSample
    from equipoise.gateway.fleet.fetch import Site
    from equipoise.gateway.fleet.worker import Worker

log = logging.getLogger(__name__)

MISSES_UNTIL_DEAD = 3
"""Reports in a row that must leave a rank out, or say nonsense of it, until it counts as dead."""
POLLS_UNTIL_BETTER = 60
"""Polls of a feed that is not the best one until the better ones are tried again."""


class LoadFeed:
    """The load reports of one worker, from when it was found until it is found again."""

    def __init__(self, worker: Worker, site: Site, stale_s: float, clock: Callable[[], float]) -> None:
        self._worker = worker
        self._site = site
        self._stale_s = stale_s
        self._clock = clock
        self._begun_at = clock()
        self._current: Feed | None = None
        self._num_polls = 0
        self._is_broken = False
        self._num_misses = [0] * len(worker.rank_labels)
        self._generated: dict[int, tuple[float, float]] = {}  # rank number: (when, output tokens until then)
        self.has_other_ranks = False
        """The last report was of other ranks than the worker is known to have."""

    async def poll(self) -> None:
        """Ask once and take over what is answered. Never raises for what the worker does."""
        worker = self._worker
        try:
            await self._ask()
        except NotAskedError as error:
            worker.feed_error = str(error)
        except (FetchError, ReportError) as error:
            worker.num_feed_failures += 1
            worker.feed_error = str(error)
        else:
            worker.feed_error = None
        self._judge()

    async def _ask(self) -> None:
        """Ask the current feed; where it answers nonsense, or there is none, the first that works.

        Raises FetchError or ReportError, of the first one tried, when none works."""
        self._num_polls += 1
        if self._current is not None and self._num_polls % POLLS_UNTIL_BETTER:
            try:
                await self._ask_feed(self._current)
            except ReportError:
                self._current = None
            else:
                return
        first_error: ReportError | None = None
        for feed in FEEDS[self._worker.kind] if self._worker.kind else ():
            try:
                await self._ask_feed(feed)
            except ReportError as error:
                first_error = first_error or error
            else:
                self._settle_on(feed)
                return
        raise first_error or ReportError("it has no load reports that are known")

    async def _ask_feed(self, feed: Feed) -> None:
        sent_at = self._clock()
        answer = await self._site.get(feed.path)
        if not answer.is_ok:
            raise ReportError(f"{feed.path} answered {answer.status}")
        try:
            samples = feed.parse(answer.body)
        except ReportError as error:
            raise ReportError(f"{feed.path}: {error}") from None
        self._take(samples, sent_at)

    def _take(self, samples: Sequence[RankSample], sent_at: float) -> None:
        labels = self._worker.rank_labels
        self.has_other_ranks = tuple(sorted(sample.number for sample in samples)) != labels
        place_of = {number: place for place, number in enumerate(labels)}
        self._note_dead({place_of.get(sample.number) for sample in samples})
        self._worker.load.report(
            RankReport(
                place_of[sample.number],
                sample.tokens,
                sample.num_running,
                sample.num_waiting,
                sample.max_total_tokens,
                self._throughput(sample, sent_at),
                sent_at - sample.age_s,
            )
            for sample in samples
            if sample.number in place_of
        )

    def _note_dead(self, present: Container[int | None]) -> None:
        """Tell from the places of the ranks that a report speaks of which ones are dead."""
        for place, account in enumerate(self._worker.load.ranks):
            num_misses = 0 if place in present else self._num_misses[place] + 1
            self._num_misses[place] = num_misses
            is_dead = num_misses >= MISSES_UNTIL_DEAD
            if account.is_dead != is_dead:
                account.is_dead = is_dead
                now = "reports no more: left out" if is_dead else "reports again"
                log.warning("worker %s: rank %d %s", self._worker.url, self._worker.rank_labels[place], now)

    def _throughput(self, sample: RankSample, now: float) -> float | None:
        """Output tokens per second: as told, or by how far the count of them has come since the last report."""
        if sample.num_generated is None:
            return sample.gen_throughput
        then, num_then = self._generated.get(sample.number, (now, sample.num_generated))
        self._generated[sample.number] = (now, sample.num_generated)
        if now <= then or sample.num_generated < num_then:
            return None
        return (sample.num_generated - num_then) / (now - then)

    def _settle_on(self, feed: Feed) -> None:
        if feed is not self._current:
            log.info("worker %s: its load comes from %s", self._worker.url, feed.name)
        self._current = feed
        self._worker.feed = feed.name

    def _judge(self) -> None:
        """Find out which ranks are stale, and say once that the feed broke or is back."""
        worker, now = self._worker, self._clock()
        worker.load.check_ages(now, self._stale_s)
        if worker.load.feed_ok:
            if self._is_broken:
                log.info("worker %s: its load reports are back", worker.url)
            self._is_broken = False
            self._begun_at = now
        elif not self._is_broken and now - self._begun_at >= self._stale_s:
            self._is_broken = True
            why = worker.feed_error or "its reports are too old"
            log.warning("worker %s: no load reports, charges alone count: %s", worker.url, why)
