"""Numbers behind the plots, of bounded size: curves of distributions, levels and rates over time, and samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from equipoise.sim.results import EDGES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from equipoise.sim.results import GapHistogram

    Floats = NDArray[np.floating[Any]]
    Numbers = NDArray[np.floating[Any]] | NDArray[np.integer[Any]]

SHARES: Floats = np.concatenate([np.linspace(0, 0.98, 99), [0.985, 0.99, 0.995, 0.999, 1.0]])
"""Where curves of distributions have points."""
NUM_TIMES = 300
SAMPLE = 1000


@dataclass(frozen=True)
class Unit:
    """Of an axis of time."""

    seconds: float
    name: str

    @classmethod
    def of(cls, duration_s: float) -> Unit:
        """The one that a run so long is read in."""
        if duration_s <= 1200:
            return cls(1.0, "seconds")
        return cls(60.0, "minutes") if duration_s <= 4 * 3600 else cls(3600.0, "hours")


def curve(values: Floats) -> list[dict[str, float]]:
    """Points of a cumulative distribution: `value`, and the `share` in per cent that do not exceed it."""
    values = values[~np.isnan(values)]
    if not len(values):
        return []
    found = np.quantile(values, SHARES, method="inverted_cdf")
    return [{"value": float(v), "share": 100 * s} for v, s in zip(found, SHARES.tolist(), strict=True)]


def curve_of_gaps(gaps: GapHistogram) -> list[dict[str, float]]:
    """`curve` of the gaps between tokens in milliseconds, to a bin's width."""
    counts = np.array(gaps.counts)
    filled = np.flatnonzero(counts)
    if not len(filled):
        return []
    edges_ms = np.array([*EDGES, EDGES[-1]])[filled] * 1e3
    shares = counts.cumsum()[filled] / gaps.num * 100
    kept = np.unique(np.searchsorted(shares, SHARES * 100).clip(max=len(filled) - 1))
    return [{"value": float(edges_ms[i]), "share": float(shares[i])} for i in kept]


def level(begins_s: Numbers, ends_s: Numbers, edges_s: Floats) -> Floats:
    """How many of the spans [begin, end) there are on average between one edge and the next."""
    levels = np.diff(_integral(begins_s, edges_s) - _integral(ends_s, edges_s)) / np.diff(edges_s)
    return np.maximum(levels, 0.0)  # differences of long sums may fall short of nothing


def _integral(times_s: Numbers, at_s: Floats) -> Floats:
    """Of the number of `times_s` passed, up to each of `at_s`."""
    ordered = np.sort(times_s)
    sums = np.concatenate([[0.0], ordered.cumsum()])
    passed = ordered.searchsorted(at_s, side="right")
    integral: Floats = passed * at_s - sums[passed]
    return integral


def rate(times_s: Numbers, edges_s: Floats, weights: Numbers | None = None) -> Floats:
    """Events per second between one edge and the next, or the sum of their `weights`."""
    counts, _ = np.histogram(times_s, edges_s, weights=weights)
    return counts / np.diff(edges_s)


def time_edges(end_s: float) -> Floats:
    """Edges of equal steps from zero to the end."""
    return np.linspace(0, max(end_s, 1e-9), NUM_TIMES + 1)


def sample(indices: NDArray[np.int64], most: int = SAMPLE) -> NDArray[np.int64]:
    """At most so many of them, in their order; the same ones every time."""
    if len(indices) <= most:
        return indices
    return np.sort(np.random.default_rng(0).choice(indices, most, replace=False))


def banded(values: Floats, most: int) -> tuple[Floats, int]:
    """(rows, n) with at most `most` rows: means of neighbouring rows, and how many each stands for."""
    band = -(-len(values) // most)
    if band <= 1:
        return values, 1
    starts = np.arange(0, len(values), band)
    sizes = np.diff(np.append(starts, len(values)))
    return np.add.reduceat(values, starts, axis=0) / sizes[:, None], band


def merged(values: Floats, most_cells: int) -> tuple[Floats, int]:
    """(rows, n) with at most `most_cells`: means of neighbouring columns, and how many each stands for."""
    width = 1
    while values.size > most_cells and values.shape[1] > 1:
        if values.shape[1] % 2:
            values = np.concatenate([values, np.zeros((len(values), 1))], axis=1)
        values, width = (values[:, ::2] + values[:, 1::2]) / 2, width * 2
    return values, width


def quantile_of_counts(counts: NDArray[np.int64], edges: Floats, share: float) -> float:
    """The edge that `share` of those counted do not exceed; NaN when none was counted."""
    upto = np.cumsum(counts)
    if not len(upto) or not upto[-1]:
        return float("nan")
    index = int(np.searchsorted(upto, share * upto[-1]))
    return float(edges[min(index, len(edges) - 1)])
