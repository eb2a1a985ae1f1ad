"""A sweep as one page of plots that opens offline."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from equipoise.sim.sweep.results import SweepResults


def save_report(results: SweepResults, folder: Path) -> None:
    """Write sweep.html into `folder`."""
