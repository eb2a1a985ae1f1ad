"""Load in O(1): counters changed by one transition function, never by measuring again (sgl-project/sglang#13203).

A request remembers what it was charged when it began to wait, and exactly that is given back: its
prompt or outputs may have changed since.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from equipoise.request import Request

WAITING = frozenset({"waiting", "returning"})
"""Places whose requests count as waiting: "returning" is preempted with outputs still in flight."""


class Ledger:
    """Waiting requests and the tokens they bring."""

    __slots__ = ("num_waiting_reqs", "num_waiting_tokens")

    def __init__(self) -> None:
        self.num_waiting_reqs = 0
        self.num_waiting_tokens = 0

    def move(self, request: Request, to: str) -> None:
        """`request` goes from `request.place` to the place `to`; the only writer of both."""
        waited, waits = request.place in WAITING, to in WAITING
        request.place = to
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
