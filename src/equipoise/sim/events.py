"""What happens next: a heap keyed (time, priority, sequence), so that ties always fall the same way."""

from __future__ import annotations

import heapq
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Priority(IntEnum):
    """What goes first of what happens at the same moment. Steps add the number of their group to LAND, so that the
    order of those that end together does not depend on when they were launched."""

    LAND = 0
    REPORT = 1 << 40
    ARRIVE = REPORT + 1


class Events:
    """A queue of callbacks in virtual time, seconds."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, Callable[[], None]]] = []
        self._sequence = 0

    def __bool__(self) -> bool:
        return bool(self._heap)

    def at(self, time_s: float, priority: int, call: Callable[[], None]) -> None:
        """Have `call` called at `time_s`."""
        self._sequence += 1
        heapq.heappush(self._heap, (time_s, priority, self._sequence, call))

    def pop(self) -> tuple[float, Callable[[], None]]:
        """The next one and its time. Raises IndexError when there is none."""
        time_s, _, _, call = heapq.heappop(self._heap)
        return time_s, call
