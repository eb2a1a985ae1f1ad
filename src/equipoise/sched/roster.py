"""The decoding requests' seats, in the order in which they began to decode."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Roster:
    """An ordered set of seats kept as one packed array."""

    def __init__(self, num_seats: int) -> None:
        self._seats = np.empty(num_seats, np.int64)
        self._num = 0
        self._leaves = np.zeros(num_seats, np.bool_)

    def __len__(self) -> int:
        return self._num

    def seats(self) -> NDArray[np.int64]:
        """(len,) int64 view: valid until the roster changes."""
        return self._seats[: self._num]

    def append(self, seat: int) -> None:
        """`seat` begins to decode."""
        self._seats[self._num] = seat
        self._num += 1

    def remove(self, seat: int) -> None:
        """`seat` decodes no more."""
        self._keep(self.seats() != seat)

    def remove_all(self, seats: NDArray[np.int64]) -> None:
        """`seats`, some of which may not be here, decode no more."""
        self._leaves[seats] = True
        self._keep(~self._leaves[self.seats()])
        self._leaves[seats] = False

    def _keep(self, mask: NDArray[np.bool_]) -> None:
        kept = self.seats()[mask]
        self._num = len(kept)
        self._seats[: self._num] = kept
