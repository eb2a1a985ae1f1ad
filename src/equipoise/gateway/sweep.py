"""One periodic pass over whatever has a time limit, instead of a timer for each."""

from __future__ import annotations

import asyncio
from typing import Protocol

SWEEP_S = 0.1
"""Seconds between two looks at what runs."""
SLOW_SWEEP_S = 1.0
"""Seconds between two looks at connections, whose limits are longer."""


class Checked(Protocol):
    """Something with time limits."""

    def check(self, now: float) -> None:
        """Act on the limits that passed by `now` (the loop's clock, seconds)."""


class Sweep:
    """Calls `check` of everything that was added, in the order in which it was added.

    Limits are kept to within a step: SWEEP_S for what runs, SLOW_SWEEP_S for what was added as slow."""

    def __init__(self) -> None:
        self._running: dict[Checked, None] = {}
        self._slow: dict[Checked, None] = {}
        self.add = self._running.setdefault
        self._loop = asyncio.get_running_loop()
        self._slow_at = self._loop.time() + SLOW_SWEEP_S
        self._timer = self._loop.call_later(SWEEP_S, self._pass)

    @property
    def num_running(self) -> int:
        """How many are looked at every SWEEP_S."""
        return len(self._running)

    def remove(self, checked: Checked) -> None:
        """Look at it no more."""
        self._running.pop(checked, None)

    def add_slow(self, checked: Checked) -> None:
        """Look at it every SLOW_SWEEP_S."""
        self._slow[checked] = None

    def remove_slow(self, checked: Checked) -> None:
        """Look at it no more."""
        self._slow.pop(checked, None)

    def close(self) -> None:
        """Look at nothing any more."""
        self._timer.cancel()

    def _pass(self) -> None:
        self._timer = self._loop.call_later(SWEEP_S, self._pass)
        now = self._loop.time()
        for checked in list(self._running):
            checked.check(now)
        if now >= self._slow_at:
            self._slow_at = now + SLOW_SWEEP_S
            for checked in list(self._slow):
                checked.check(now)
