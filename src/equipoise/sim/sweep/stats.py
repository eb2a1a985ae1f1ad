"""Paired comparisons: two policies on the same seeds, and the interval that their difference lies in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean and, from two values on, the interval that the true one lies in with 95% confidence; else NaN."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Paired:
    """A policy against the baseline: `gain` is a share, 0.05 for 5% more, of `num_pairs` seeds.

    method: "log ratio" where all numbers are positive: the gain is the geometric mean of the seeds' ratios, less 1.
    "difference" else: the mean difference over the baseline's mean, which the interval takes for known
    seeds_differ: some seed's number is another than the first one's, of the policy or of the baseline"""

    gain: float
    low: float
    high: float
    num_pairs: int
    method: Literal["log ratio", "difference"]
    seeds_differ: bool = True

    @property
    def is_significant(self) -> bool:
        """The interval leaves zero out; never where seeds change nothing, which are one observation, not many."""
        return self.seeds_differ and (self.low > 0 or self.high < 0)


def interval(values: Sequence[float]) -> Interval:
    """Student's t interval of the mean of `values`; NaN without values."""
    if not values:
        return Interval(math.nan, math.nan, math.nan)
    mean = fmean(values)
    if len(values) < 2:
        return Interval(mean, math.nan, math.nan)
    reach = t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - reach, mean + reach)


def paired(values: Sequence[float], baseline: Sequence[float]) -> Paired:
    """`values` against `baseline`, seed by seed; seeds at which either is NaN are left out."""
    pairs = [(a, b) for a, b in zip(values, baseline, strict=True) if math.isfinite(a) and math.isfinite(b)]
    differ = len(set(pairs)) > 1
    if pairs and all(a > 0 and b > 0 for a, b in pairs):
        found = interval([math.log(a / b) for a, b in pairs])
        gain, low, high = map(math.expm1, (found.mean, found.low, found.high))
        return Paired(gain, low, high, len(pairs), "log ratio", differ)
    found = interval([a - b for a, b in pairs])
    base = abs(fmean(b for _, b in pairs)) if pairs else 0.0
    if base == 0:
        return Paired(math.nan, math.nan, math.nan, len(pairs), "difference", differ)
    return Paired(found.mean / base, found.low / base, found.high / base, len(pairs), "difference", differ)


@lru_cache(maxsize=1024)
def t_quantile(df: int, confidence: float = CONFIDENCE) -> float:
    """The t that |T| stays below with probability `confidence`, T of Student's distribution with `df` degrees.

    By bisection of the probability, which is a finite sum: to 12 digits."""
    low, high = 0.0, math.pi / 2  # of the angle arctan(t / sqrt(df))
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, df) < confidence else (low, middle)
    return math.tan(low) * math.sqrt(df)


def _within(angle: float, df: int) -> float:
    """P(|T| < tan(angle) * sqrt(df)). Source: Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    sine, square = math.sin(angle), math.cos(angle) ** 2
    odd = df % 2
    term = math.cos(angle) if odd else 1.0
    total = term if df > 1 else 0.0
    for k in range(2 + odd, df - 1, 2):
        term *= square * (k - 1) / k
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
