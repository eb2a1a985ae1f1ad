"""Clocks: wall time and virtual time satisfy one protocol, so no policy knows which one it runs on."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of monotonic seconds."""

    def now(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        ...


class WallClock:
    """Monotonic wall time."""

    def now(self) -> float:
        return time.monotonic()


class VirtualClock:
    """Time that moves only when it is told to."""

    __slots__ = ("_now",)

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move `seconds` forward. Raises ValueError on a negative amount."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back: advance({seconds})")
        self._now += seconds

    def move_to(self, time_s: float) -> None:
        """Be at `time_s`, to the last bit. Raises ValueError when that has passed."""
        if time_s < self._now:
            raise ValueError(f"a clock cannot go back: from {self._now} to {time_s}")
        self._now = time_s
