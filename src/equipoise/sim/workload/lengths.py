"""Lengths of prompts and outputs, drawn by the thousand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from equipoise.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.random import Generator
    from numpy.typing import NDArray

DRAWN_AT_ONCE = 1024

Shape = Literal["constant", "uniform", "normal", "lognormal", "exponential"]
SHAPES: tuple[Shape, ...] = ("constant", "uniform", "normal", "lognormal", "exponential")


@dataclass(frozen=True)
class Lengths:
    """Tokens with a mean and a spread, cut to [`least`, `most`].

    `spread` is the coefficient of variation, standard deviation over mean. "constant" and a spread of 0 are the
    same; "exponential" has a spread of 1 by nature and ignores it; "uniform" reaches at most 1/sqrt(3).
    """

    mean: float
    spread: float = 0.0
    shape: Shape = "normal"
    least: int = 1
    most: int = 2**31 - 1

    def __post_init__(self) -> None:
        if not self.mean >= 1:
            raise ConfigError(f"mean: {self.mean} must be at least 1 token")
        if not self.spread >= 0:
            raise ConfigError(f"spread: {self.spread} must be at least 0")
        if self.shape not in SHAPES:
            raise ConfigError(f"shape: {self.shape!r} must be one of {', '.join(SHAPES)}")
        if self.shape == "uniform" and self.spread * 3**0.5 > 1:
            raise ConfigError(f"spread: {self.spread} must be at most {3**-0.5:.3f}, which a uniform shape reaches")
        if not 1 <= self.least <= self.most:
            raise ConfigError(f"least: {self.least} must be at least 1 and at most {self.most}, the most")

    def draw(self, rng: Generator, n: int) -> NDArray[np.int64]:
        """(n,) lengths."""
        return np.clip(np.rint(self._draw(rng, n)), self.least, self.most).astype(np.int64)

    def _draw(self, rng: Generator, n: int) -> NDArray[np.float64]:
        mean, spread = self.mean, self.spread
        if self.shape == "exponential":
            return rng.exponential(mean, n)
        if self.shape == "constant" or spread == 0:
            return np.full(n, mean)
        if self.shape == "uniform":
            half = spread * 3**0.5
            return rng.uniform(mean * (1 - half), mean * (1 + half), n)
        if self.shape == "normal":
            return rng.normal(mean, mean * spread, n)
        sigma2 = np.log1p(spread**2)
        return rng.lognormal(np.log(mean) - sigma2 / 2, sigma2**0.5, n)


class Histogram:
    """Lengths with given shares, such as ServeGen's clients have."""

    def __init__(self, shares: Mapping[int, float]) -> None:
        """`shares`: of each length, not negative; scaled to a sum of 1. Raises ConfigError when they sum to 0."""
        self._lengths = np.array(sorted(shares), np.int64)
        weights = np.array([shares[length] for length in sorted(shares)])
        if not len(weights) or weights.min() < 0 or weights.sum() <= 0:
            raise ConfigError("a histogram of lengths needs shares that are not negative and not all 0")
        self._upto = np.cumsum(weights / weights.sum())

    def draw(self, rng: Generator, n: int) -> NDArray[np.int64]:
        """(n,) lengths, at least 1."""
        index = np.minimum(np.searchsorted(self._upto, rng.random(n), side="right"), len(self._lengths) - 1)
        return np.maximum(self._lengths[index], 1)


def pairs(prompt: Lengths | Histogram, output: Lengths | Histogram, rng: Generator) -> Iterator[tuple[int, int]]:
    """Lengths of prompt and output, without end."""
    while True:
        prompts = prompt.draw(rng, DRAWN_AT_ONCE).tolist()
        yield from zip(prompts, output.draw(rng, DRAWN_AT_ONCE).tolist(), strict=True)
