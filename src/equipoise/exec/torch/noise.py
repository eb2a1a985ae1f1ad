"""Uniform numbers that are a function of (seed, position) alone: no state, no order, no batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Constants of the splitmix64 generator (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)


def as_unsigned(seed: int) -> np.uint64:
    """`seed`, a signed 64-bit integer, as the unsigned one with the same bits."""
    return np.uint64(seed & 0xFFFFFFFFFFFFFFFF)


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) per row, with 53 random bits.

    seeds, positions: (n,). Seeds that differ by little give unrelated sequences: the seed is mixed
    before the position joins it."""
    mixed = _mix(seeds + _STEP)
    mixed = _mix(mixed + positions.astype(np.uint64) * _STEP)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits = (bits ^ (bits >> np.uint64(30))) * _MIX_A
    bits = (bits ^ (bits >> np.uint64(27))) * _MIX_B
    return bits ^ (bits >> np.uint64(31))
