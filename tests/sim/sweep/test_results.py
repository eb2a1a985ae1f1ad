"""Rows compared by policy and point, told as a table, as files and as a page."""

from __future__ import annotations

import csv
import json
import math
from typing import TYPE_CHECKING, Any

import pytest

from equipoise.sim.report.charts import Axis
from equipoise.sim.report.page import Plot
from equipoise.sim.sweep.alike import alike
from equipoise.sim.sweep.files import flat_rows, results_json, save
from equipoise.sim.sweep.page import save_report, sections
from equipoise.sim.sweep.plots import banded_lines, fronts
from equipoise.sim.sweep.read import make_sweep
from equipoise.sim.sweep.results import SweepResults, more_is_better, results_of
from equipoise.sim.sweep.run import sweep
from equipoise.sim.sweep.spec import METRICS
from equipoise.sim.sweep.table import percent, short_names, table

if TYPE_CHECKING:
    from pathlib import Path

    from equipoise.sim.report.charts import Row

BASE = {"workload": {"concurrency": 4, "num_requests": 8, "prompt": {"mean": 50, "spread": 0.5}, "output": {"mean": 5}}}
POLICIES: dict[str, dict[str, Any]] = {"plain": {}, "quick": {"cost.step_ms": 5}}


def made_up(throughputs: dict[tuple[int, str], list[float]], errors: dict[str, str] | None = None) -> SweepResults:
    """Results by ranks and policy, a throughput for each seed; TTFT is 1000 over it."""
    ranks = list(dict.fromkeys(rank for rank, _ in throughputs))
    policies: dict[str, dict[str, Any]] = {policy: {} for _, policy in throughputs}
    num_seeds = len(next(iter(throughputs.values())))
    spec = make_sweep(BASE, vary={"fleet.ranks": list(ranks)}, policies=policies, seeds=num_seeds)
    found = {
        f"fleet.ranks={rank} / {policy} / seed {seed}": {"throughput_tok_s": value, "ttft_mean_ms": 1000 / value}
        for (rank, policy), values in throughputs.items()
        for seed, value in enumerate(values)
        if not math.isnan(value)
    }
    return results_of(spec, found, errors or {})


THREE = made_up(
    {
        (1, "none"): [100, 200],
        (1, "gate"): [110, 220],  # 10% more at both seeds
        (2, "none"): [100, 100],
        (2, "gate"): [50, 200],  # anything
        (4, "none"): [100, 200],
        (4, "gate"): [90, 180],
    }
)


def test_policies_are_compared_on_the_same_seeds() -> None:
    gains = {each.point["fleet.ranks"]: each.against for each in THREE.compare("throughput_tok_s") if each.against}
    assert [gains[ranks].gain for ranks in (1, 2, 4)] == pytest.approx([0.1, 0, -0.1])
    assert [gains[ranks].is_significant for ranks in (1, 2, 4)] == [True, False, True]
    means = [each.mean.mean for each in THREE.compare("throughput_tok_s")]
    assert means == pytest.approx([150, 165, 100, 125, 150, 135])


def test_over_all_points_the_worst_is_what_users_would_call_so() -> None:
    (more,) = THREE.overall("throughput_tok_s")
    assert more.median == pytest.approx(0, abs=1e-12)
    assert (more.num_better, more.num_worse) == (1, 1)
    assert (more.worst.point["fleet.ranks"], more.best.point["fleet.ranks"]) == (4, 1)
    (less,) = THREE.overall("ttft_mean_ms")
    assert (less.worst.point["fleet.ranks"], less.best.point["fleet.ranks"]) == (4, 1)
    assert (less.num_better, less.num_worse) == (1, 1)


def test_which_numbers_should_be_high(real: SweepResults) -> None:
    high = {name for name in real.rows[0].numbers if more_is_better(name)}
    assert {"throughput_tok_s", "total_throughput_tok_s", "goodput_req_s", "good_share", "prefix_hit_share"} <= high
    assert not {"ttft_mean_ms", "duration_s", "lost_share", "num_preemptions", "itl_p99_ms", "num_refused"} & high


def test_a_table_tells_means_gains_and_what_failed() -> None:
    failing = made_up(
        {(1, "none"): [100, 200], (1, "gate"): [110, math.nan]}, {"fleet.ranks=1 / gate / seed 1": "it broke"}
    )
    lines = table(failing).splitlines()
    assert lines[0] == "scenario: 1 points, 2 policies, 2 seeds from 0 to 1"
    assert lines[2] == "throughput_tok_s  policy         mean    on none  95% interval"
    assert lines[3] == "ranks=1           none            150"
    assert lines[4] == "                  gate            110     +10.0%"
    assert lines[-2:] == ["1 of 4 runs failed and are left out:", "  ranks=1 / gate / seed 1: it broke"]
    rows = flat_rows(failing)
    assert [row["error"] for row in rows] == [None, None, None, "it broke"]
    assert math.isnan(float(rows[3]["throughput_tok_s"] or 0))
    text = table(THREE)
    assert "+10.0%  +10.0% to +10.0% *" in text
    assert "better *" in text
    assert "seeds change nothing" not in text


def test_no_star_where_seeds_change_nothing() -> None:
    text = table(made_up({(1, "none"): [100, 100], (1, "gate"): [110, 110]}))
    assert "+10.0% to +10.0%\n" in text
    assert "seeds change nothing here: nothing is drawn that differs" in text


def test_policies_that_come_to_the_same_are_named() -> None:
    gates: dict[str, dict[str, Any]] = {
        "none": {},
        "gate": {"scheduler.balance": True},
        "margin": {"scheduler.balance": True, "scheduler.balance_margin": 1},
        "early": {"scheduler.balance": True, "scheduler.balance_margin": 0},
    }
    spec = make_sweep(BASE, vary={"fleet.ranks": "1,2"}, policies=gates, seeds=2)
    assert alike(spec, spec.jobs()) == ["policies gate and margin have the same settings"]


@pytest.mark.parametrize(
    ("gain", "text"), [(0.0534, "+5.3%"), (-0.0004, "+0.0%"), (0.0, "+0.0%"), (-1, "-100.0%"), (math.nan, "-")]
)
def test_percents(gain: float, text: str) -> None:
    assert percent(gain) == text


def test_fields_are_told_apart_in_short() -> None:
    spec = make_sweep(BASE, vary={"workload.prompt.mean": "1,2", "workload.output.mean": "3", "fleet.ranks": "1"})
    assert list(short_names(spec).values()) == ["prompt.mean", "output.mean", "ranks"]


@pytest.fixture(scope="module")
def real() -> SweepResults:
    """Two fields, two policies, two seeds, run."""
    return sweep(
        BASE,
        vary={"fleet.ranks": "1,2", "cache.prefix_cache": "true,false"},
        policies=POLICIES,
        seeds=2,
        num_processes=1,
    )


def test_real_runs_make_rows(real: SweepResults) -> None:
    assert len(real.rows) == 16
    assert not real.failures
    assert all(row.number("num_finished") == 8 for row in real.rows)
    gains = [each.against.gain for each in real.compare("throughput_tok_s") if each.against]
    assert min(gains) > 0.5  # steps of 5 ms instead of 20


def test_files_hold_a_row_for_each_run(real: SweepResults, tmp_path: Path) -> None:
    from pyarrow import parquet

    save(real, tmp_path)
    rows = flat_rows(real)
    assert list(rows[0])[:4] == ["fleet.ranks", "cache.prefix_cache", "policy", "seed"]
    columns = parquet.read_table(tmp_path / "rows.parquet").to_pydict()
    assert repr(columns) == repr({name: [row[name] for row in rows] for name in rows[0]})
    with (tmp_path / "rows.csv").open(encoding="utf-8", newline="") as file:
        read = list(csv.DictReader(file))
    assert [float(row["ttft_mean_ms"]) for row in read] == columns["ttft_mean_ms"]
    assert (tmp_path / "sweep.json").read_bytes() == results_json(real)
    told = json.loads(results_json(real))
    assert len(told["points"]) == 4 * 2 * len(METRICS)
    assert {each["method"] for each in told["points"] if each["policy"] == "quick"} == {"log ratio"}


def test_a_page_has_gains_lines_and_a_front(real: SweepResults, tmp_path: Path) -> None:
    save_report(real, tmp_path)
    page = (tmp_path / "sweep.html").read_text(encoding="utf-8")
    for title in (
        "Against plain, on the same seeds",
        "throughput_tok_s: quick",  # the heat map
        "ttft_mean_ms at prefix_cache=false",
        "throughput_tok_s against ttft_mean_ms",
        "What was swept",
    ):
        assert title in page, title
    assert 'src="http' not in page


@pytest.mark.parametrize("vary", [{}, {"fleet.ranks": "1,2,4"}, {"routing.rank_policy": "none,round_robin"}])
@pytest.mark.parametrize("policies", [{}, POLICIES])
def test_pages_of_few_and_of_no_fields(vary: dict[str, Any], policies: dict[str, Any]) -> None:
    results = sweep(BASE, vary=vary, policies=policies, num_processes=1)
    found = list(sections(results))
    assert [section.title for section in found][-2:] == ["What is traded for what", "In numbers"]
    assert len(found) == 2 + bool(vary) + bool(policies)
    for part in found[-2].parts:
        assert isinstance(part, Plot)
        part.chart.to_dict()
    assert len(table(results).splitlines()) > 3


def rows_of(chart: dict[str, Any], layer: dict[str, Any]) -> list[dict[str, Any]]:
    """The data of a layer."""
    data: dict[str, str] = layer["data"] if "data" in layer else chart["data"]
    rows: list[dict[str, Any]] = chart["datasets"][data["name"]]
    return rows


def test_a_front_is_of_what_nobody_beats() -> None:
    places = {"a": (1, 1), "b": (2, 3), "c": (3, 2), "d": (4, 4), "same as d": (4, 4), "no": (math.nan, 9)}
    rows: list[Row] = [{"policy": name, "at": name, "x": float(x), "y": float(y)} for name, (x, y) in places.items()]
    chart: dict[str, Any] = fronts(rows, Axis("x", "x"), Axis("y", "y"), "at", ("min", "max")).to_dict()
    line, cloud, _ = chart["layer"]
    stands = {row["policy"]: row["stands"] for row in rows_of(chart, cloud)}
    assert stands == {name: "beaten" if name == "c" else "on the front" for name in places if name != "no"}
    assert [row["policy"] for row in rows_of(chart, line)] == ["a", "b", "d"]


def test_bands_are_the_intervals() -> None:
    rows: list[Row] = [{"x": 1.0, "policy": "a", "mean": 2.0, "low": 1.5, "high": math.nan}]
    chart: dict[str, Any] = banded_lines(rows, Axis("x", "ranks"), Axis("mean", "TTFT"), "low", "high").to_dict()
    band, line = chart["layer"]
    assert (band["encoding"]["y"]["field"], band["encoding"]["y2"]["field"]) == ("low", "high")
    assert line["encoding"]["y"]["field"] == "mean"
    assert rows_of(chart, band) == [{"x": 1.0, "policy": "a", "mean": 2.0, "low": 1.5, "high": None}]
