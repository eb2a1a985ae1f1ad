"""Numbers as people read them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from equipoise.sim.fleet import sizes_of

if TYPE_CHECKING:
    from equipoise.sim.scenario import FleetConfig


def number(value: float) -> str:
    """With three digits or more, thousands apart; a dash for what is none."""
    if not math.isfinite(value):
        return "-"
    if abs(value) >= 1000 or math.isclose(value, round(value), rel_tol=1e-9):  # sums of floats
        return f"{value:,.0f}"
    return f"{value:,.{1 if abs(value) >= 100 else 2 if abs(value) >= 1 else 3}f}"


def share(value: float) -> str:
    """In per cent."""
    return f"{value:.1%}" if math.isfinite(value) else "-"


def milliseconds(value: float) -> str:
    """Milliseconds, or seconds when there are many of them."""
    if not math.isfinite(value):
        return "-"
    return f"{number(value)} ms" if value < 10_000 else f"{number(value / 1e3)} s"


def seconds(value: float) -> str:
    """Seconds, or minutes and hours when there are many of them."""
    if value < 600:
        return f"{number(value)} s"
    return f"{number(value / 60)} min" if value < 4 * 3600 else f"{number(value / 3600)} h"


def many(count: int, word: str) -> str:
    """`3 ranks`, `1 rank`."""
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def fleet_in_words(fleet: FleetConfig) -> str:
    """Workers and ranks of each role, and whether they step together."""
    sizes = sizes_of(fleet)
    kinds = {role: f"{role} worker" if len(sizes) > 1 else "worker" for role in sizes}
    words = ", ".join(
        f"{many(size.workers, kinds[role])} of {many(size.ranks, 'rank')}" for role, size in sizes.items()
    )
    return words + (", in lockstep" if fleet.lockstep else ", independent")
