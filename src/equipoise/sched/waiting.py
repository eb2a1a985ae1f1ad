"""The waiting queue: a heap in the scheduler's order, from which any request can leave at once."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from equipoise.request import Request
    from equipoise.sched.rules import Order

COMPACT_AT = 64
"""Entries that have left may outnumber those that wait by this many before the heap is rebuilt."""

Entry = tuple[tuple[float, ...], int, int, "Request"]
"""(order key, handle, serial, request): no two entries compare equal before the request."""


class WaitingQueue:
    """Requests by order, ties by handle. `remove` is O(1): the entry stays in the heap and is skipped later."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._heap: list[Entry] = []
        self._serial = 0
        self._live: dict[int, Entry] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request: Request) -> bool:
        return request.handle in self._live

    def __iter__(self) -> Iterator[Request]:
        """Requests in no particular order."""
        return (entry[3] for entry in self._live.values())

    def push(self, request: Request) -> None:
        """Queue `request`, which does not wait yet."""
        self._serial += 1
        entry = (self._order(request), request.handle, self._serial, request)
        self._live[request.handle] = entry
        heapq.heappush(self._heap, entry)

    def head(self) -> Request | None:
        """The next request, still queued; None when nobody waits."""
        heap = self._heap
        while heap:
            entry = heap[0]
            if self._live.get(entry[1]) is entry:
                return entry[3]
            heapq.heappop(heap)
        return None

    def head_key(self) -> tuple[tuple[float, ...], int]:
        """Order and handle of the next request of a queue that is not empty."""
        self.head()
        return self._heap[0][:2]

    def num_ahead(self, request: Request) -> int:
        """Requests that go before `request`, which waits. O(n)."""
        own = self._live[request.handle]
        return sum(entry[:2] < own[:2] for entry in self._live.values())

    def remove(self, request: Request) -> None:
        """`request`, which waits, leaves the queue."""
        entry = self._live.pop(request.handle)
        if self._heap[0] is entry:
            heapq.heappop(self._heap)
        elif len(self._heap) > 2 * len(self._live) + COMPACT_AT:
            self._heap = list(self._live.values())
            heapq.heapify(self._heap)
