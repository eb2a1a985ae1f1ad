"""What bounds a request's time in a rank: is there room for it to wait, and when does it give up."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from equipoise.errors import QueueFullError

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    from equipoise.request import Request
    from equipoise.sched.ledger import Ledger

PRUNE_AT = 1024


class WaitingRoom:
    """How many requests, and tokens of them, may wait."""

    def __init__(self, ledger: Ledger, max_reqs: int, max_tokens: int | None) -> None:
        """`max_tokens` None: any."""
        self._ledger = ledger
        self._max_reqs = max_reqs
        self._max_tokens = max_tokens

    def check(self, request: Request) -> None:
        """Raise QueueFullError when `request` may not wait beside those that do."""
        ledger, most = self._ledger, self._max_tokens
        if ledger.num_waiting_reqs >= self._max_reqs:
            raise QueueFullError(f"{ledger.num_waiting_reqs} requests wait, at most {self._max_reqs} may")
        # A prompt longer than the limit may wait alone, or no retry could ever bring it in.
        if most is not None and ledger.num_waiting_reqs and ledger.num_waiting_tokens + request.num_known > most:
            raise QueueFullError(f"{ledger.num_waiting_tokens} tokens wait, at most {most} may")


class Deadlines:
    """When requests give up. `alive` are the handles of those that have not ended."""

    def __init__(self, alive: Container[int]) -> None:
        self._alive = alive
        self._heap: list[tuple[float, int]] = []
        self._prune_at = PRUNE_AT

    def keep(self, deadline_s: float, handle: int) -> None:
        """`handle` gives up at `deadline_s`."""
        heapq.heappush(self._heap, (deadline_s, handle))
        if len(self._heap) > self._prune_at:  # of requests that ended before theirs, mostly
            self._heap = [entry for entry in self._heap if entry[1] in self._alive]
            heapq.heapify(self._heap)
            self._prune_at = 2 * len(self._heap) + PRUNE_AT

    def due(self, now_s: float) -> Iterator[int]:
        """The handles whose deadline has passed, each once; some may have ended."""
        while self._heap and self._heap[0][0] <= now_s:
            yield heapq.heappop(self._heap)[1]

    @property
    def next_s(self) -> float | None:
        """The earliest deadline."""
        return self._heap[0][0] if self._heap else None
