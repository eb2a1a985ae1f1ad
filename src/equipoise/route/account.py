"""Believed load per (worker, rank), in tokens, between and across load reports.

    load(rank) = max(reported - gone, 0) + pending      with a feed
    load(rank) = active                                 without: before the first report, or when the feed broke

Each routed request is charged at once, so a burst between two reports spreads. A report is true for a moment on
the gateway's clock, `taken_at`: it includes the requests charged at least `REPORT_LAG_S` before, and no others.
A charge is given back exactly as it was taken, whatever has been learnt since.

What requests already seen are still to generate is left out: counting them with all that was expected of them, as
max(reported - gone, their charges) + pending, changed TTFT and TPOT by less than 1% over 8 ranks in and out of
lockstep, with reports every 1 s or 5 s, and left KV a little less even (max/mean 1.033 to 1.116 in place of 1.032 to
1.105), even where each output was known beforehand. Leaving out `pending` is what hurts: TTFT 1.4 to 6 times as
long, KV at 1.2 to 1.9 times the mean (benchmarks/routing.py, load; 10 seeds).
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

REPORT_LAG_S = 0.1
"""From being routed to being counted by the rank: the way there, tokenising, queueing. Too long counts a request twice
until the next report, too short forgets it until then; to forget is worse, since the rank then draws a herd."""

PEAK_KEPT = 0.99
"""Of the peak throughput, what is kept at each report."""

MIN_UNSEEN_KEPT = 64


@dataclass(frozen=True, slots=True)
class RankReport:
    """A rank's load as it says. None: it does not say.

    tokens: used and waiting. max_total_tokens: its capacity. gen_throughput: output tokens per second.
    taken_at: when that was true, seconds on the gateway's clock: when the poll was sent, less the report's age."""

    rank: int
    tokens: int
    num_running: int
    num_waiting: int
    max_total_tokens: int | None
    gen_throughput: float | None
    taken_at: float


class Charge:
    """What one routed request adds to one rank, from being routed to its end.

    `output`: expected tokens, those generated once it ended. `is_seen`: a report includes it."""

    __slots__ = ("account", "ended_at", "is_seen", "output", "prompt", "taken_at")

    def __init__(self, account: RankAccount, prompt: int, output: int, taken_at: float) -> None:
        self.account = account
        self.prompt = prompt
        self.output = output
        self.taken_at = taken_at
        self.ended_at: float | None = None
        self.is_seen = False

    def end(self, now: float, num_output: int | None = None) -> None:
        """The request left the rank after `num_output` tokens (None: unknown). Later calls do nothing."""
        if self.ended_at is None:
            self.ended_at = now
            self.account.charge_ended(self, num_output)


class RankAccount:
    """Believed load of one rank. Every change is O(1), but for a heap of what ended since the last report.

    reported, reported_at, num_running, num_waiting, max_total_tokens, gen_throughput: as last reported.
    peak_throughput: the highest reported, forgotten slowly: what it can do, not what it is asked to do now.
    pending: charges that no report includes yet. num_pending: how many.
    gone: tokens that the last report includes but whose requests have ended since.
    active, num_active: all charges that have not ended.
    has_feed: reports come in, so they count. tokens: the load, kept up to date. num_queued: requests that wait, as
    reported, and those that no report includes; without a feed all.
    is_live: neither dead nor stale, so it may be chosen."""

    __slots__ = (
        "_gone_heap",
        "_is_dead",
        "_is_stale",
        "_sequence",
        "_unseen",
        "active",
        "gen_throughput",
        "gone",
        "has_feed",
        "is_live",
        "max_total_tokens",
        "num_active",
        "num_pending",
        "num_queued",
        "num_running",
        "num_waiting",
        "peak_throughput",
        "pending",
        "rank",
        "reported",
        "reported_at",
        "tokens",
        "worker",
    )

    def __init__(self, rank: int, worker: WorkerLoad) -> None:
        self.rank = rank
        self.worker = worker
        self.reported = 0
        self.reported_at: float | None = None
        self.num_running = 0
        self.num_waiting = 0
        self.max_total_tokens: int | None = None
        self.gen_throughput: float | None = None
        self.peak_throughput = 0.0
        self.pending = 0
        self.num_pending = 0
        self.gone = 0
        self.active = 0
        self.num_active = 0
        self.has_feed = False
        self.tokens = 0
        self.num_queued = 0
        self.is_live = True
        self._is_dead = False
        self._is_stale = False
        self._unseen: deque[Charge] = deque()  # in the order of taken_at; ended ones among them
        self._gone_heap: list[tuple[float, int, int]] = []  # (ended_at, sequence, tokens)
        self._sequence = 0

    @property
    def is_dead(self) -> bool:
        """The worker says that the rank does not run, or it was found out."""
        return self._is_dead

    @is_dead.setter
    def is_dead(self, value: bool) -> None:
        self._is_dead = value
        self._set_live()

    @property
    def is_stale(self) -> bool:
        """Its reports are too old while those of its sisters are not."""
        return self._is_stale

    @is_stale.setter
    def is_stale(self, value: bool) -> None:
        self._is_stale = value
        self._set_live()

    def load(self) -> int:
        """Tokens believed to be there, never below 0."""
        return self.tokens

    def charge(self, prompt: int, output: int, now: float) -> Charge:
        """A request of `prompt` tokens was routed here; `output` tokens are expected."""
        charge = Charge(self, prompt, output, now)
        num_tokens = prompt + output
        self.pending += num_tokens
        self.num_pending += 1
        self.active += num_tokens
        self.num_active += 1
        self.worker.num_active += 1
        self._unseen.append(charge)
        self._refresh()
        return charge

    def charge_ended(self, charge: Charge, num_output: int | None) -> None:
        """Called by `Charge.end`, once."""
        num_tokens = charge.prompt + charge.output
        self.active -= num_tokens
        self.num_active -= 1
        self.worker.num_active -= 1
        charge.output = num_output or 0  # unknown: the prompt is certain to be in the report
        if not charge.is_seen:
            self.pending -= num_tokens
            self.num_pending -= 1
            if not self.has_feed and len(self._unseen) > 2 * self.num_active + MIN_UNSEEN_KEPT:
                self._forget_ended()
        elif self.has_feed and self.reported_at != charge.ended_at:
            self._add_gone(charge)
        self._refresh()

    def report(self, report: RankReport) -> None:
        """Reconcile with what the rank says. One that is not newer than the last changes nothing."""
        if self.reported_at is not None and report.taken_at <= self.reported_at:
            return
        self.reported = report.tokens
        self.reported_at = report.taken_at
        self.num_running = report.num_running
        self.num_waiting = report.num_waiting
        self.gen_throughput = report.gen_throughput
        self.peak_throughput = max(report.gen_throughput or 0.0, PEAK_KEPT * self.peak_throughput)
        self.worker.forget_throughput()
        if not self.has_feed:
            self._forget_ended()
            self.has_feed = True
        self._reconcile(report.taken_at)
        self._refresh()
        if report.max_total_tokens != self.max_total_tokens:
            self.max_total_tokens = report.max_total_tokens
            self.worker.recount()

    def lose_feed(self) -> None:
        """Reports stopped: from now on charges alone count, until one comes."""
        self.has_feed = False
        self.gone = 0
        self._gone_heap.clear()
        self._refresh()

    def _forget_ended(self) -> None:
        """What ended without a feed is given back already, and not looked for in reports."""
        self._unseen = deque(each for each in self._unseen if each.ended_at is None)

    def _reconcile(self, taken_at: float) -> None:
        """Of what was charged and of what ended, tell what a report of `taken_at` includes."""
        while self._gone_heap and self._gone_heap[0][0] <= taken_at:
            self.gone -= heapq.heappop(self._gone_heap)[2]
        unseen = self._unseen
        while unseen and unseen[0].taken_at + REPORT_LAG_S <= taken_at:
            charge = unseen.popleft()
            charge.is_seen = True
            if charge.ended_at is None:
                self.pending -= charge.prompt + charge.output
                self.num_pending -= 1
            elif charge.ended_at > taken_at:
                self._add_gone(charge)

    def _add_gone(self, charge: Charge) -> None:
        """The last report includes `charge`, which has ended: with all its output, of which it lacked a little."""
        assert charge.ended_at is not None
        num_tokens = charge.prompt + charge.output
        self.gone += num_tokens
        self._sequence += 1
        heapq.heappush(self._gone_heap, (charge.ended_at, self._sequence, num_tokens))

    def _refresh(self) -> None:
        if self.has_feed:
            seen = self.reported - self.gone
            # what went cannot be more than what was there: a report or a usage that is wrong hides nothing pending
            tokens = self.pending + seen if seen > 0 else self.pending
        else:
            tokens = self.active
        num_queued = self.num_waiting + self.num_pending if self.has_feed else self.num_active
        worker = self.worker
        if self.is_live:
            worker.tokens += tokens - self.tokens
            worker.num_queued += num_queued - self.num_queued
        self.tokens = tokens
        self.num_queued = num_queued
        if not self.is_live:
            worker.recount()

    def _set_live(self) -> None:
        self.is_live = not (self._is_dead or self._is_stale)
        self.worker.recount()


class WorkerLoad:
    """A worker as policies see it.

    weight: its share of a full worker's load, in (0, 1]: below 1 while it starts slowly. num_active: requests there.
    feed_ok: load reports come in. turn: where the rank policy's rotation stands.
    tokens, num_queued, capacity, num_live: sums over live ranks (over all when none is live), kept up to date;
    capacity is None where a rank does not say."""

    __slots__ = (
        "_throughput",
        "capacity",
        "feed_ok",
        "name",
        "num_active",
        "num_live",
        "num_queued",
        "ranks",
        "tokens",
        "turn",
        "weight",
    )

    def __init__(self, name: str, num_ranks: int = 1) -> None:
        self.name = name
        self.weight = 1.0
        self.num_active = 0
        self.feed_ok = False
        self.tokens = 0
        self.capacity: int | None = None
        self.num_queued = 0
        self.turn = 0
        self._throughput: float | None = None
        self.num_live = num_ranks
        self.ranks = [RankAccount(rank, self) for rank in range(num_ranks)]

    def __repr__(self) -> str:
        return f"WorkerLoad({self.name!r}, {len(self.ranks)} ranks, {self.tokens} tokens)"

    def load(self) -> int:
        """Tokens believed to be on its live ranks."""
        return self.tokens

    def queue(self) -> int:
        """Requests that wait on its live ranks: as reported, and those that no report includes yet."""
        return self.num_queued

    def throughput(self) -> float:
        """Output tokens per second that its live ranks have shown lately; 0.0 when none was reported."""
        if self._throughput is None:
            self._throughput = sum(each.peak_throughput for each in self.ranks if each.is_live)
        return self._throughput

    def charge(self, rank: int | None, prompt: int, output: int, now: float) -> Charge:
        """A request was routed to `rank`; None or unknown: the engine chooses, and the least loaded is charged."""
        if rank is not None and 0 <= rank < len(self.ranks):
            return self.ranks[rank].charge(prompt, output, now)
        if len(self.ranks) == 1:
            return self.ranks[0].charge(prompt, output, now)
        likely = [each for each in self.ranks if each.is_live] or self.ranks
        return min(likely, key=RankAccount.load).charge(prompt, output, now)

    def report(self, reports: Iterable[RankReport]) -> None:
        """Reconcile with one answer of the worker. Ranks that it does not have are ignored."""
        for report in reports:
            if 0 <= report.rank < len(self.ranks):
                self.ranks[report.rank].report(report)

    def check_ages(self, now: float, max_age_s: float) -> None:
        """Find out which ranks are stale: their report is older than `max_age_s`, or they lost theirs.

        When that is so for all of them, the feed is broken and none is stale: charges alone count. To be called after
        each poll, failed ones too. Ranks that never reported are stale once a sister's report is fresh."""
        fresh = [each.reported_at is not None and now - each.reported_at <= max_age_s for each in self.ranks]
        self.feed_ok = any(fresh)
        for account, is_fresh in zip(self.ranks, fresh, strict=True):
            if account.has_feed and not is_fresh:
                account.lose_feed()
            is_stale = self.feed_ok and not is_fresh
            if account.is_stale != is_stale:
                account.is_stale = is_stale

    def forget_throughput(self) -> None:
        """A rank reported another one: sum anew when asked."""
        self._throughput = None

    def recount(self) -> None:
        """Sum anew over live ranks: one died, came back or told another capacity."""
        live = [each for each in self.ranks if each.is_live] or self.ranks
        self.num_live = len(live)
        self.tokens = sum(each.tokens for each in live)
        self.num_queued = sum(each.num_queued for each in live)
        self.forget_throughput()
        capacities = [each.max_total_tokens for each in live if each.max_total_tokens]
        self.capacity = sum(capacities) if capacities and len(capacities) == len(live) else None
