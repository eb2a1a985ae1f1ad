"""Amounts by row and time, in so many bins whatever the length of the run: their width doubles when there are more.

Times are whole microseconds and amounts whole numbers, so that sums depend neither on the order in which amounts come
nor on when the width doubled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

US = 1_000_000
LEAST_WIDTH_US = 128


def as_us(seconds: NDArray[np.float64]) -> Ints:
    """Whole microseconds."""
    whole: Ints = np.rint(seconds * US).astype(np.int64)
    return whole


class TimeBins:
    """`sums`, (rows, bins, quantities) int64: what fell into [bin * width_us, (bin + 1) * width_us).

    There are at most `most` bins, an even number; once time is long, at least half of them are used."""

    def __init__(self, most: int, num_quantities: int) -> None:
        self.most = most
        self.width_us = LEAST_WIDTH_US
        self.sums: Ints = np.zeros((0, most, num_quantities), np.int64)

    def add(self, rows: Ints, begins_us: Ints, ends_us: Ints, *, rates: Ints, amounts: Ints) -> None:
        """Spans of time [begin, end), (n,), each in a row. `rates`, (n, r), hold throughout: rate * microseconds are
        added to the first r quantities. `amounts`, (n, a), are spread over their spans for those that follow."""
        if not len(rows):
            return
        ends_us = np.maximum(ends_us, 1)
        begins_us = np.minimum(begins_us, ends_us - 1)
        self._make_room(int(rows.max()) + 1, int(ends_us.max()))
        first = begins_us // self.width_us
        num_pieces = (ends_us - 1) // self.width_us - first + 1
        if (num_pieces == 1).all():
            values = np.concatenate([rates * (ends_us - begins_us)[:, None], amounts], axis=1)
            np.add.at(self.sums, (rows, first), values)
            return
        span = np.repeat(np.arange(len(rows)), num_pieces)
        bins = first[span] + np.arange(len(span)) - np.repeat(num_pieces.cumsum() - num_pieces, num_pieces)
        begins, lasts = begins_us[span], (ends_us - begins_us)[span]
        upto = np.minimum((bins + 1) * self.width_us - begins, lasts)
        since = np.maximum(bins * self.width_us - begins, 0)
        # What has come by a time is a whole number, so the pieces add up to the amount; no product leaves 64 bits.
        whole, rest = np.divmod(amounts[span], lasts[:, None])
        pieces = whole * (upto - since)[:, None] + rest * upto[:, None] // lasts[:, None]
        pieces -= rest * since[:, None] // lasts[:, None]
        values = np.concatenate([rates[span] * (upto - since)[:, None], pieces], axis=1)
        np.add.at(self.sums, (rows[span], bins), values)

    @property
    def num_used(self) -> int:
        """Bins up to the last in which anything is."""
        used = np.flatnonzero(self.sums.any(axis=(0, 2)))
        return int(used[-1]) + 1 if len(used) else 0

    @property
    def width_s(self) -> float:
        """Seconds of a bin."""
        return self.width_us / US

    def _make_room(self, num_rows: int, end_us: int) -> None:
        while end_us > self.most * self.width_us:
            rows, most, quantities = self.sums.shape
            halves = self.sums.reshape(rows, most // 2, 2, quantities).sum(axis=2)
            self.sums = np.concatenate([halves, np.zeros_like(halves)], axis=1)
            self.width_us *= 2
        if num_rows > len(self.sums):
            more = np.zeros((num_rows - len(self.sums), *self.sums.shape[1:]), np.int64)
            self.sums = np.concatenate([self.sums, more])
