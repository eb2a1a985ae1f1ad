"""Tables of answers as text for a terminal and as Markdown for the docs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from equipoise.sim.experiment.rows import Table

GAP = "  "
THOUSANDS_FROM = 1000


def as_text(tables: Sequence[Table]) -> str:
    """One below the other, labels on the left, numbers on the right."""
    return "\n\n".join("\n".join(_text(table)) for table in tables)


def as_markdown(tables: Sequence[Table]) -> str:
    """The same as tables of Markdown, each under its title in bold."""
    return "\n\n".join("\n".join(_markdown(table)) for table in tables) + "\n"


def percent(share: float, *, digits: int = 1) -> str:
    """0.183 as "+18.3%"; "-" for what is not a number."""
    return "-" if math.isnan(share) else f"{share:+.{digits}%}"


def number(value: float, *, digits: int = 1) -> str:
    """A number with as many decimals, none from 1,000 on; "-" for what is not one."""
    if math.isnan(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= THOUSANDS_FROM else f"{value:,.{digits}f}"


def _text(table: Table) -> Iterator[str]:
    lines = [table.header, *table.rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(table.header))]
    yield table.title
    for line in lines:
        first, *others = (
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        yield GAP.join((first, *others)).rstrip()
    yield from table.notes


def _markdown(table: Table) -> Iterator[str]:
    yield f"**{table.title}**"
    yield ""
    yield _cells(table.header)
    yield _cells(("---", *("---:" for _ in table.header[1:])))
    yield from (_cells(row) for row in table.rows)
    for note in table.notes:
        yield ""
        yield note


def _cells(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
