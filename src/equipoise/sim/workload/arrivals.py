"""When requests arrive in an open loop: seconds from the start, without end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equipoise.errors import ConfigError
from equipoise.sim.workload.lengths import DRAWN_AT_ONCE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.random import Generator


def gamma(rate: float, cv: float, rng: Generator, start_s: float = 0.0) -> Iterator[float]:
    """Arrivals `rate` a second whose gaps have the coefficient of variation `cv`.

    1 is a Poisson process, above 1 they come in bursts, 0 is a beat."""
    if not rate > 0:
        raise ConfigError(f"rate: {rate} must be more than 0 requests per second")
    if not cv >= 0:
        raise ConfigError(f"cv: {cv} must be at least 0")
    now_s = start_s
    while True:
        gaps = [1 / rate] * DRAWN_AT_ONCE if cv == 0 else rng.gamma(cv ** (-2), cv**2 / rate, DRAWN_AT_ONCE).tolist()
        for gap in gaps:
            now_s += gap
            yield now_s


def poisson(rate: float, rng: Generator) -> Iterator[float]:
    """Arrivals `rate` a second, each independent of the others."""
    return gamma(rate, 1.0, rng)
