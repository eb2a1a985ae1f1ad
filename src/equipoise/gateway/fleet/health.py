"""What a row of health checks says of a worker. Pure: it only counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """How workers are checked.

    path: answered with 2xx by a healthy worker
    interval_s: seconds from one check to the next; timeout_s: seconds that a check may take
    max_failures: checks in a row that must fail until a worker is unhealthy
    num_successes: checks in a row that must succeed until it is healthy again
    """

    path: str = "/health"
    interval_s: float = 5.0
    timeout_s: float = 5.0
    max_failures: int = 3
    num_successes: int = 2


class Health:
    """Healthy until max_failures checks in a row failed, unhealthy until num_successes in a row succeeded."""

    __slots__ = ("_limits", "_num_against", "is_healthy")

    def __init__(self, limits: HealthLimits) -> None:
        self._limits = limits
        self._num_against = 0
        """Checks in a row that spoke against the state it is in."""
        self.is_healthy = True

    def checked(self, is_good: bool) -> bool:
        """One check was made. True when `is_healthy` changed."""
        if is_good == self.is_healthy:
            self._num_against = 0
            return False
        self._num_against += 1
        if self._num_against < (self._limits.max_failures if self.is_healthy else self._limits.num_successes):
            return False
        self.is_healthy = is_good
        self._num_against = 0
        return True

    def reset(self) -> None:
        """The worker was found anew: it is healthy."""
        self.is_healthy = True
        self._num_against = 0
