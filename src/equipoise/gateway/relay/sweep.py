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

    Limits are kept to within a step: `step_s` for what runs, `slow_step_s` for what was added as slow."""

    def __init__(self, step_s: float = SWEEP_S, slow_step_s: float = SLOW_SWEEP_S) -> None:
        self._step_s = step_s
        self._slow_step_s = slow_step_s
        self._running: dict[Checked, None] = {}
        self._slow: dict[Checked, None] = {}
        self.add = self._running.setdefault
        self._loop = asyncio.get_running_loop()
        self._slow_at = self._loop.time() + slow_step_s
        self._timer = self._loop.call_later(step_s, self._pass)

    @property
    def num_running(self) -> int:
        """How many are looked at at each step."""
        return len(self._running)

    def remove(self, checked: Checked) -> None:
        """Look at it no more."""
        self._running.pop(checked, None)

    def add_slow(self, checked: Checked) -> None:
        """Look at it at each slow step."""
        self._slow[checked] = None

    def remove_slow(self, checked: Checked) -> None:
        """Look at it no more."""
        self._slow.pop(checked, None)

    def close(self) -> None:
        """Look at nothing any more."""
        self._timer.cancel()

    def _pass(self) -> None:
        self._timer = self._loop.call_later(self._step_s, self._pass)
        now = self._loop.time()
        for checked in list(self._running):
            checked.check(now)
        if now >= self._slow_at:
            self._slow_at = now + self._slow_step_s
            for checked in list(self._slow):
                checked.check(now)
