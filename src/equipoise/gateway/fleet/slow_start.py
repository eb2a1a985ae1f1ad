"""Slow start: a worker that just became ready has cold caches and gets its share of requests little by little.

Pure: time is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class SlowStartLimits:
    """duration_s: seconds until a worker has its full weight; 0: at once. min_weight: the weight it starts with."""

    duration_s: float = 10.0
    min_weight: float = 0.1


class SlowStart:
    """The weight of one worker: from min_weight, in a straight line, to 1."""

    __slots__ = ("_began_at", "_limits")

    def __init__(self, limits: SlowStartLimits) -> None:
        self._limits = limits
        self._began_at = -inf

    def begin(self, now: float) -> None:
        """The worker became ready."""
        self._began_at = now

    def is_over(self, now: float) -> bool:
        """Whether the weight stays 1."""
        return now - self._began_at >= self._limits.duration_s

    def weight(self, now: float) -> float:
        """In [min_weight, 1]; never falls as time goes on."""
        if self.is_over(now):
            return 1.0
        share = max(0.0, now - self._began_at) / self._limits.duration_s
        return self._limits.min_weight + (1.0 - self._limits.min_weight) * share
