"""What is worth choosing from, when two things are wanted at once."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Row = Mapping[str, str | float | None]


def frontier(
    rows: Sequence[Row], x: str, y: str, best: tuple[Literal["min", "max"], Literal["min", "max"]]
) -> list[Row]:
    """The rows that no other is at least as good as in both fields and better in one, by `x`."""
    signs = [1 if each == "min" else -1 for each in best]

    def price(row: Row) -> tuple[float, float]:
        return signs[0] * float(row[x] or 0), signs[1] * float(row[y] or 0)

    front: list[Row] = []
    least = math.inf
    for row in sorted(rows, key=price):
        if price(row)[1] < least:
            least = price(row)[1]
            front.append(row)
    return sorted(front, key=lambda row: float(row[x] or 0))
