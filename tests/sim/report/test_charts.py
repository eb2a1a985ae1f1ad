"""Charts: what is drawn of which rows, that a page fetches nothing, and which points nothing beats."""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from equipoise.sim.report.charts import (
    Axis,
    Folded,
    Plot,
    Section,
    Table,
    bars,
    frontier,
    grid,
    heat,
    intervals,
    lines,
    pareto,
    points,
    save_page,
    save_svg,
)

if TYPE_CHECKING:
    from pathlib import Path

    from equipoise.sim.report.charts import Chart

X, Y = Axis("rate", "requests per second"), Axis("ttft", "TTFT, ms")
ROWS = [
    {"rate": rate, "ttft": rate * 100.123456789, "low": 0.0, "high": 9.0, "policy": policy}
    for policy in ("none", "balance")
    for rate in (1.0, 2.0)
]
CHARTS = {
    "lines": lines(iter(ROWS), X, Y, by="policy", dots=True, marked={"objective": 1.5}),
    "areas": lines(ROWS, X, Y, by="policy", stacked=True),
    "bars": bars(ROWS, Axis("policy", "policy"), Y, by="policy"),
    "points": points(ROWS, Axis("rate", "rate", log=True), Y),
    "pareto": pareto(ROWS, X, Y, by="policy", label="policy"),
    "intervals": intervals(ROWS, Y, Axis("policy", "policy"), "low", "high"),
    "heat": heat(ROWS, Axis("rate", "rate"), Axis("policy", "policy"), Y, middle=0),
    "plain heat": heat(ROWS, Axis("rate", "rate"), Axis("policy", "policy"), Y),
    "grid": grid(np.array([[1.0, math.nan], [3.5, 4.0]]), Axis("from", "seconds"), Axis("row", "rank"), Y, x_step=0.5),
}


@pytest.mark.parametrize("name", CHARTS)
def test_every_kind_of_chart_can_be_drawn(name: str, tmp_path: Path) -> None:
    save_svg(tmp_path / "chart.svg", CHARTS[name])
    svg = (tmp_path / "chart.svg").read_text(encoding="utf-8")
    assert svg.startswith("<svg")
    assert "TTFT, ms" in svg
    assert "NaN" not in svg


def values_of(chart: Chart) -> Any:
    spec: Any = chart.to_dict()
    return spec["datasets"][spec["data"]["name"]]


def test_numbers_travel_with_six_digits_and_gaps_as_null() -> None:
    rows = [{"rate": 1.0, "ttft": 100.123456789}, {"rate": math.inf, "ttft": math.nan}, {"rate": 3, "ttft": None}]
    assert values_of(lines(rows, X, Y)) == [
        {"rate": 1.0, "ttft": 100.123},
        {"rate": None, "ttft": None},
        {"rate": 3, "ttft": None},
    ]


def test_series_keep_their_order_and_the_tooltip_tells_every_field() -> None:
    spec: Any = lines(ROWS, X, Y, by="policy").to_dict()
    assert spec["encoding"]["color"]["scale"]["domain"] == ["none", "balance"]
    kinds = {each["field"]: each["type"] for each in spec["encoding"]["tooltip"]}
    assert kinds == {
        "policy": "nominal",
        "rate": "quantitative",
        "ttft": "quantitative",
        "low": "quantitative",
        "high": "quantitative",
    }


def test_a_grid_travels_as_bare_numbers() -> None:
    assert values_of(CHARTS["grid"]) == "[1,{},3.5,4]"
    wide = grid(np.random.default_rng(0).uniform(0, 1e5, (512, 200)), X, Axis("row", "rank"), Y, x_step=1)
    assert len(json.dumps(wide.to_dict())) < 8 * 512 * 200


@pytest.mark.parametrize(
    ("best", "kept"),
    [(("min", "max"), [(1, 2), (2, 3)]), (("min", "min"), [(1, 2), (2, 1)]), (("max", "max"), [(2, 3), (3, 2)])],
)
def test_a_frontier_is_what_nothing_beats(best: Any, kept: list[tuple[int, int]]) -> None:
    rows = [{"x": x, "y": y} for x, y in ((3, 2), (2, 3), (1, 2), (2, 1), (2, 2))]
    assert [(row["x"], row["y"]) for row in frontier(rows, "x", "y", best)] == kept


def test_a_page_holds_all_its_parts_and_fetches_nothing(tmp_path: Path) -> None:
    sections = [
        Section("First <one>", ["Words & more.", (Plot("Lines", "A sentence.", CHARTS["lines"]),)]),
        Section(
            "Second",
            [
                Table(["ms", "mean"], [["TTFT", "1.5"]]),
                Folded("Scenario", "name: </script><b>"),
                Plot("Heat", "Another.", heat([{"rate": 1, "policy": "</script>", "ttft": 1.0}], X, X, Y)),
            ],
        ),
    ]
    save_page(tmp_path / "page.html", "A & B", sections, subtitle="both")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<title>A &amp; B</title>" in page
    for words in ("First &lt;one&gt;", "Words &amp; more.", "A sentence.", "<td>1.5</td>", "&lt;/script&gt;&lt;b&gt;"):
        assert words in page
    assert page.count("</script>") == 2
    assert not re.search(
        r"""<(script|link|img)[^>]+(src|href)=|@import|url\(""", re.sub(r"<script>.*", "", page, flags=re.S)
    )
    assert len(page) < 1.2e6
