"""Times of calls on this machine, taken in turns, so that a slow moment falls on all of them."""

from __future__ import annotations

import gc
import platform
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from equipoise.machine import num_cores

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

WINDOW_S = 0.002
"""A window repeats a call for about so long; a call that takes longer is made once."""
MOST_CALLS = 1000


class Times(NamedTuple):
    """Microseconds of a call: of the fastest window, and of the one in the middle."""

    least_us: float
    median_us: float

    def values(self) -> dict[str, float]:
        """As numbers of a row."""
        return {"least_us": self.least_us, "median_us": self.median_us}


def in_turns(calls: Mapping[str, Callable[[], object]], num_windows: int) -> dict[str, Times]:
    """Time each of `calls` in `num_windows` windows: A B C A B C, CPU time of this thread, without the garbage
    collector."""
    windows: dict[str, list[float]] = {name: [] for name in calls}
    gc.collect()
    gc.disable()
    try:
        nums = {name: _num_calls(call) for name, call in calls.items()}
        for _ in range(num_windows):
            for name, call in calls.items():
                windows[name].append(_window_us(call, nums[name]))
    finally:
        gc.enable()
    return {name: Times(min(found), median(found)) for name, found in windows.items()}


def machine() -> str:
    """This machine in a line: processor, cores, Python."""
    return f"{_processor()}, {num_cores()} cores, Python {platform.python_version()}"


def _num_calls(call: Callable[[], object]) -> int:
    once_s = _window_us(call, 1) / 1e6
    return max(1, min(MOST_CALLS, int(WINDOW_S / max(once_s, 1e-9))))


def _window_us(call: Callable[[], object], num_calls: int) -> float:
    started = time.thread_time_ns()
    for _ in range(num_calls):
        call()
    return (time.thread_time_ns() - started) / num_calls / 1e3


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
