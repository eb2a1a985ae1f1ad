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
        self._heap: list[tuple[float, int, int, Callable[[], None], bool]] = []
        self._sequence = 0
        self._num_deeds = 0

    def __bool__(self) -> bool:
        return bool(self._heap)

    @property
    def only_hopes(self) -> bool:
        """Do all that are queued only look whether something has happened?"""
        return not self._num_deeds

    def at(self, time_s: float, priority: int, call: Callable[[], None], *, hopes: bool = False) -> None:
        """Have `call` called at `time_s`. `hopes`: it only looks whether something has happened, as reports do."""
        self._sequence += 1
        is_deed = not hopes and priority != Priority.REPORT
        self._num_deeds += is_deed
        heapq.heappush(self._heap, (time_s, priority, self._sequence, call, is_deed))

    def pop(self) -> tuple[float, Callable[[], None]]:
        """The next one and its time. Raises IndexError when there is none."""
        time_s, _, _, call, is_deed = heapq.heappop(self._heap)
        self._num_deeds -= is_deed
        return time_s, call
