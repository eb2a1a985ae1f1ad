"""Who may go to a worker now, and whose turn is next. Pure: time is passed in.

At most `max_inflight` items are under way. Further ones wait, in line with those of the same key; keys take turns, so
that one key's thousand requests delay another's first one by one turn only. When the queue is full, a key that has no
more than its share of it still gets in: the last one in line of a key that has more goes.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, TypeVar

from equipoise.errors import QueueFullError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

T = TypeVar("T", bound="Hashable")

MAX_RETRY_AFTER_S = 60
PACE_KEPT = 0.9
"""Of the mean seconds between two departures, what is kept at each."""


class FairQueue(Generic[T]):
    """A bounded queue with turns per key.

    num_inflight: items that went ahead and have not left. num_waiting: items that wait."""

    def __init__(self, max_inflight: int | None, max_waiting: int, displaced: Callable[[T, QueueFullError], None]):
        """`displaced` is told each item that lost its place to another key's, and the error to answer it with."""
        self.num_inflight = 0
        self.num_waiting = 0
        self._limit = math.inf if max_inflight is None else max_inflight
        self._max_waiting = max_waiting
        self._displaced = displaced
        self._lines: OrderedDict[bytes, OrderedDict[T, None]] = OrderedDict()  # the next turn first
        self._keys: dict[T, bytes] = {}
        self._left_at: float | None = None
        self._interval_s = 1.0

    def enter(self, key: bytes, item: T, now: float) -> bool:
        """True: `item` may go ahead, and `leave` is due when it is over. False: it waits for `next` to name it.

        Raises QueueFullError, which says when to come again."""
        if not self.num_waiting and self.num_inflight < self._limit:
            self.num_inflight += 1
            return True
        if self.num_waiting >= self._max_waiting:
            self._make_room(key)
        if not self.num_waiting:
            self._left_at = now  # the pace counts from when something waits
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = OrderedDict()
        line[item] = None
        self._keys[item] = key
        self.num_waiting += 1
        return False

    def leave(self, now: float) -> None:
        """One of those under way is over."""
        self.num_inflight -= 1
        if self.num_waiting and self._left_at is not None:
            self._interval_s = PACE_KEPT * self._interval_s + (1 - PACE_KEPT) * (now - self._left_at)
            self._left_at = now

    def next(self) -> T | None:
        """The item whose turn it is, if there is a place: it is under way now."""
        if not self.num_waiting or self.num_inflight >= self._limit:
            return None
        key, line = next(iter(self._lines.items()))
        item = line.popitem(last=False)[0]
        if line:
            self._lines.move_to_end(key)
        else:
            del self._lines[key]
        del self._keys[item]
        self.num_waiting -= 1
        self.num_inflight += 1
        return item

    def withdraw(self, item: T) -> bool:
        """`item` waits no more. False when it did not."""
        key = self._keys.pop(item, None)
        if key is None:
            return False
        line = self._lines[key]
        del line[item]
        if not line:
            del self._lines[key]
        self.num_waiting -= 1
        return True

    def set_limit(self, max_inflight: int | None) -> None:
        """Let so many be under way from now on; those that are stay. `next` says who may go ahead."""
        self._limit = math.inf if max_inflight is None else max_inflight

    @property
    def retry_after_s(self) -> int:
        """Whole seconds until the queue, at its present pace, has worked off what waits; 1 to 60."""
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(self.num_waiting * self._interval_s)))

    def _make_room(self, key: bytes) -> None:
        """Displace the last item in line of a key that has more than its share. Raises QueueFullError if none has."""
        own = len(self._lines.get(key, ()))
        share = self._max_waiting // (len(self._lines) + (own == 0))
        if own < share:
            for line in self._lines.values():
                if len(line) > share:
                    item = next(reversed(line))
                    self.withdraw(item)
                    self._displaced(item, self._full())
                    return
        raise self._full()

    def _full(self) -> QueueFullError:
        return QueueFullError(f"the queue of {self._max_waiting} requests is full", self.retry_after_s)
