"""Numbers and tables as they are shown."""

from __future__ import annotations

import math

import pytest

from equipoise.sim.experiment.rows import Table
from equipoise.sim.experiment.show import as_markdown, as_text, number, percent

TABLE = Table("Gains", ("", "median", "x"), (("none", "-", "1"), ("a longer one", "+12.3%", "22")), ("A note.",))


@pytest.mark.parametrize(("share", "shown"), [(0.1834, "+18.3%"), (-0.02, "-2.0%"), (0.0, "+0.0%"), (math.nan, "-")])
def test_percent(share, shown):
    assert percent(share) == shown


@pytest.mark.parametrize(
    ("value", "shown"), [(0.25, "0.2"), (999.94, "999.9"), (1234.5, "1,234"), (-5000.0, "-5,000"), (math.nan, "-")]
)
def test_number(value, shown):
    assert number(value) == shown


def test_text_has_labels_on_the_left_and_numbers_on_the_right():
    assert as_text([TABLE, TABLE]).split("\n\n")[0].splitlines() == [
        "Gains",
        "              median   x",
        "none               -   1",
        "a longer one  +12.3%  22",
        "A note.",
    ]


def test_markdown_has_the_same_cells():
    assert as_markdown([TABLE]).splitlines() == [
        "**Gains**",
        "",
        "|  | median | x |",
        "| --- | ---: | ---: |",
        "| none | - | 1 |",
        "| a longer one | +12.3% | 22 |",
        "",
        "A note.",
    ]
