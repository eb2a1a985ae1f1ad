"""Load in O(1): counters changed by one transition function, never by measuring again (sgl-project/sglang#13203).

A request remembers what it was charged when it began to wait, and exactly that is given back: its
prompt or outputs may have changed since.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from equipoise.request import Request

WAITING = frozenset({"waiting", "blocked", "returning"})
"""Places whose requests count as waiting: "blocked" waits for a resource, "returning" was preempted with
outputs still in flight. A parked request does not: it would not run if it could."""


class Ledger:
    """Waiting requests and the tokens they bring."""

    __slots__ = ("num_moves", "num_waiting_reqs", "num_waiting_tokens")

    def __init__(self) -> None:
        self.num_moves = 0
        self.num_waiting_reqs = 0
        self.num_waiting_tokens = 0

    def move(self, request: Request, to: str) -> None:
        """`request` goes from `request.place` to the place `to`; the only writer of both."""
        waited, waits = request.place in WAITING, to in WAITING
        request.place = to
        self.num_moves += 1
        if waits and not waited:
            request.charge = request.num_known
            self.num_waiting_reqs += 1
            self.num_waiting_tokens += request.charge
        elif waited and not waits:
            self.num_waiting_reqs -= 1
            self.num_waiting_tokens -= request.charge
            request.charge = 0

    def rescan(self, requests: Iterable[Request]) -> tuple[int, int]:
        """(num_waiting_reqs, num_waiting_tokens) counted anew: equal to the counters, or there is a bug."""
        charges = [request.charge for request in requests if request.place in WAITING]
        return len(charges), sum(charges)


@dataclass(frozen=True, slots=True)
class LoadCounters:
    """Load of a rank at one moment; see the design's load table. Requests and tokens."""

    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_used_tokens: int
    num_total_tokens: int
    max_running: int


@dataclass(slots=True)
class Totals:
    """Counts since the scheduler was built."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    aborted: int = 0
