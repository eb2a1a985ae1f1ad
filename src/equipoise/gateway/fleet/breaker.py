"""A circuit breaker: a worker whose requests keep failing gets none for a while, then a few to try with.

    closed ── enough failures ──> open ── open_s later ──> half open ── enough successes ──> closed
                                    ^──────── one failure ─────┘

Pure: time is passed in, and nothing but the tries that are reported moves it. Whether a worker refuses a request (4xx)
says nothing about its health: such a try only gives its place among the probes back.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf
from typing import Literal

BreakerState = Literal["closed", "open", "half_open"]

MAX_OPEN_S = 60.0
"""Seconds that a breaker stays open at most, unless it is told to be open longer at once."""


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """When a breaker opens and closes.

    max_failures: it opens at so many failures within window_s seconds ...
    min_failure_share: ... if they are at least this share of all tries since the first of them
    open_s: seconds without requests; doubled each time a probe fails, up to max(open_s, max_open_s)
    max_probes: tries at once while half open
    num_successes: probes that must succeed one after the other until it closes
    """

    max_failures: int = 10
    window_s: float = 120.0
    min_failure_share: float = 0.1
    open_s: float = 5.0
    max_open_s: float = MAX_OPEN_S
    max_probes: int = 2
    num_successes: int = 3


class Breaker:
    """The breaker of one worker.

    Every try is one `began`, then exactly one of `succeeded`, `failed`, `ended`, with the epoch that `began` gave: what
    began before the state last changed says nothing about the state it ends in and is not counted. The last four
    and `tick` answer whether `allows` may have changed."""

    __slots__ = ("_failures", "_limits", "_num_good", "_num_ok", "_open_s", "epoch", "next_change_at", "num_opened",
                 "num_probes", "state")  # fmt: skip

    def __init__(self, limits: BreakerLimits) -> None:
        self._limits = limits
        self._failures: deque[tuple[float, int]] = deque(maxlen=limits.max_failures)
        self._num_ok = 0
        self._num_good = 0
        self._open_s = limits.open_s
        self.state: BreakerState = "closed"
        self.epoch = 0
        """Number of changes of state so far."""
        self.num_probes = 0
        """Tries under way while half open."""
        self.num_opened = 0
        self.next_change_at = inf
        """When `tick` has something to do."""

    @property
    def allows(self) -> bool:
        """Whether one more try may begin."""
        if self.state == "half_open":
            return self.num_probes < self._limits.max_probes
        return self.state == "closed"

    def tick(self, now: float) -> bool:
        """Time passed: an open breaker becomes half open when its time is over."""
        if now < self.next_change_at:
            return False
        self._enter("half_open")
        return True

    def began(self) -> bool:
        """A try begins."""
        if self.state != "half_open":
            return False
        self.num_probes += 1
        return not self.allows

    def ended(self, epoch: int) -> bool:
        """A try is over and says nothing about the worker: it was cancelled or refused."""
        if self.state != "half_open" or epoch != self.epoch:
            return False
        self.num_probes -= 1
        return True

    def succeeded(self, epoch: int) -> bool:
        """A try was answered."""
        if self.state == "closed":
            self._num_ok += 1
            return False
        if not self.ended(epoch):
            return False
        self._num_good += 1
        if self._num_good >= self._limits.num_successes:
            self._open_s = self._limits.open_s
            self._enter("closed")
        return True

    def failed(self, epoch: int, now: float) -> bool:
        """A try failed: no connection, 5xx, an answer cut short, a time limit."""
        if epoch != self.epoch:
            return False
        if self.state == "half_open":
            self._open_s = max(self._limits.open_s, min(2 * self._open_s, self._limits.max_open_s))
            self._open(now)
            return True
        self._failures.append((now, self._num_ok))
        if not self._is_too_much(now):
            return False
        self._open(now)
        return True

    def reset(self) -> bool:
        """Close at once: the worker was found anew."""
        was_closed = self.state == "closed"
        self._open_s = self._limits.open_s
        self._enter("closed")
        return not was_closed

    def _is_too_much(self, now: float) -> bool:
        if len(self._failures) < self._limits.max_failures:
            return False
        since, num_ok_then = self._failures[0]
        num_ok = self._num_ok - num_ok_then
        share = len(self._failures) / (len(self._failures) + num_ok)
        return now - since <= self._limits.window_s and share >= self._limits.min_failure_share

    def _open(self, now: float) -> None:
        self._enter("open")
        self.num_opened += 1
        self.next_change_at = now + self._open_s

    def _enter(self, state: BreakerState) -> None:
        self.state = state
        self.epoch += 1
        self.num_probes = self._num_good = 0
        self._failures.clear()
        self.next_change_at = inf
