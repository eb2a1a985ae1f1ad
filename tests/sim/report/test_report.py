"""The page of a simulation: its numbers, its size, and that a browser without a network draws it all."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.browser import Browser, find_chromium

from equipoise.sim.report.files import save_report
from equipoise.sim.report.measures import banded, curve, curve_of_gaps, level, merged, quantile_of_counts, rate, sample
from equipoise.sim.report.sections import sections
from equipoise.sim.report.series import StepSeries
from equipoise.sim.report.words import number
from equipoise.sim.results import GapHistogram
from equipoise.sim.run import simulate
from equipoise.sim.scenario import make_scenario

if TYPE_CHECKING:
    from pathlib import Path

    from equipoise.sim.run import Results

CHROMIUM = find_chromium()
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (Debian: chromium)")
LOCKSTEP: dict[str, Any] = {
    "name": "of <two> ranks",
    "fleet": {"ranks": 2, "lockstep": True},
    "workload": {
        "kind": "sessions",
        "num_requests": 40,
        "rate": 4,
        "shared_len": 64,
        "think_s": 1,
        "output": {"mean": 30},
    },
    "cost": {"step_ms": 10, "prefill_token_ms": 0.2, "decode_row_ms": 1, "kv_token_us": 1, "source": "a & b"},
}


def run(table: dict[str, Any]) -> tuple[Results, StepSeries]:
    series = StepSeries()
    return simulate(make_scenario(table), sinks=[series], loss_sinks=[series]), series


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    save_report(*run(LOCKSTEP), path)
    return path


def test_a_page_tells_the_summary_the_scenario_and_its_cost(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    results, _ = run(LOCKSTEP)
    for words in (
        "<title>of &lt;two&gt; ranks</title>",
        "1 worker of 2 ranks, in lockstep, seed 0",
        "Cost of a step: a &amp; b.",
        '<th scope="row">fleet.lockstep</th><td>true</td><td>false</td>',
        f"<td>{results.summary()['ttft_p99_ms']:,.0f}</td>",
        "kind: sessions",
        "Prompt tokens found in the cache",
        "Time that ranks waited for the slowest",
    ):
        assert words in text, words
    captions = re.findall(r"<figcaption[^>]*>([^<]+)</figcaption>", text)
    assert len(captions) == len(re.findall('class="chart"', text)) >= 14
    assert all(re.search(r"\d", caption) and caption.endswith(".") for caption in captions), captions


def test_a_page_says_which_steps_are_meant_and_has_no_space_before_per_cent(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "steps of ranks that decode alone" in text
    assert "A step of a group in lockstep, one in the summary, is one here for each rank" in text
    assert not re.search(r"\d %", text)


def test_a_page_of_nothing_but_refused_requests_can_be_written(tmp_path: Path) -> None:
    table = {"workload": {"num_requests": 3, "rate": 1}, "fleet": {"max_model_len": 100}}
    results, series = run(table)
    assert results.summary()["num_finished"] == 0
    save_report(results, series, tmp_path / "page.html")
    titles = [section.title for section in sections(results, series)]
    assert titles == ["Summary", "Scenario", "Latency", "Over time", "Ranks", "Steps"]


def test_a_page_stays_small_however_many_the_ranks_and_steps(tmp_path: Path) -> None:
    table = {
        "fleet": {"workers": 300, "ranks": 2},
        "cache": {"num_pages": 512},
        "workload": {"num_requests": 700, "rate": 2000, "output": {"mean": 30}},
    }
    results, series = run(table)
    assert len(series.ranks.sums) == 600
    save_report(results, series, tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 3e6
    assert "a row is the mean of 2 ranks" in (tmp_path / "page.html").read_text(encoding="utf-8")


@needs_chromium
@pytest.mark.parametrize("width", [1240, 420])
def test_a_browser_without_a_network_draws_every_chart(page: Path, tmp_path: Path, width: int) -> None:
    with Browser(CHROMIUM or "", tmp_path / "profile") as browser:
        browser.call("Network.enable")
        offline = {"offline": True, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        browser.call("Network.emulateNetworkConditions", **offline)
        browser.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        browser.open(page.as_uri())
        drawn = "document.querySelectorAll('.chart svg.marks, .chart canvas.marks').length"
        browser.wait(f"{drawn} === specs.length")
        assert browser.run("document.documentElement.scrollWidth") <= width
        assert browser.run("performance.getEntriesByType('resource').length") == 0
        assert browser.errors == []


# ---------------------------------------------------------------- measures


def test_levels_are_averages_between_edges() -> None:
    begins, ends = np.array([0.0, 1.0, 1.5]), np.array([2.0, 1.5, 4.0])
    assert level(begins, ends, np.array([0.0, 1.0, 2.0, 4.0])).tolist() == [1.0, 2.0, 1.0]
    assert level(np.zeros(0), np.zeros(0), np.array([0.0, 1.0])).tolist() == [0.0]


def test_rates_count_or_weigh_events() -> None:
    times, edges = np.array([0.1, 0.2, 3.0]), np.array([0.0, 2.0, 4.0])
    assert rate(times, edges).tolist() == [1.0, 0.5]
    assert rate(times, edges, np.array([10, 20, 6])).tolist() == [15.0, 3.0]


def test_curves_rise_to_a_hundred_per_cent() -> None:
    found = curve(np.array([3.0, np.nan, 1.0, 2.0]))
    assert (found[0]["value"], found[-1]) == (1.0, {"value": 3.0, "share": 100.0})
    assert curve(np.array([np.nan])) == []
    gaps = GapHistogram()
    assert curve_of_gaps(gaps) == []
    gaps.add(0.010, 99)
    gaps.add(0.100, 1)
    assert [round(point["share"]) for point in curve_of_gaps(gaps)] == [99, 100]
    assert curve_of_gaps(gaps)[0]["value"] == pytest.approx(10, rel=0.012)


def test_samples_are_the_same_every_time_and_in_order() -> None:
    all_of_them = np.arange(10_000)
    chosen = sample(all_of_them, 50)
    assert chosen.tolist() == sample(all_of_them, 50).tolist() == sorted(set(chosen.tolist()))
    assert len(chosen) == 50
    assert sample(np.arange(7), 50).tolist() == list(range(7))


def test_bands_are_means_of_neighbours() -> None:
    values = np.arange(10.0).reshape(5, 2)
    shown, band = banded(values, 2)
    assert (band, shown.tolist()) == (3, [[2.0, 3.0], [7.0, 8.0]])
    assert banded(values, 5)[1] == 1


def test_merged_columns_are_means_of_neighbours() -> None:
    shown, width = merged(np.arange(6.0).reshape(2, 3), 2)
    assert (width, shown.tolist()) == (4, [[0.75], [3.0]])
    assert merged(np.ones((2, 3)), 6)[1] == 1


def test_quantiles_of_counts_are_edges() -> None:
    edges = np.array([1.0, 2.0, 3.0])
    assert quantile_of_counts(np.array([0, 5, 5, 0]), edges, 0.5) == 2.0
    assert quantile_of_counts(np.array([0, 0, 0, 9]), edges, 0.5) == 3.0
    assert np.isnan(quantile_of_counts(np.zeros(4, np.int64), edges, 0.5))


@pytest.mark.parametrize(
    ("value", "text"),
    [(64.0, "64"), (64 - 1e-12, "64"), (63.99, "63.99"), (0.0, "0"), (1234.5, "1,234"), (0.1, "0.100")],
)
def test_numbers_that_are_whole_but_for_rounding_are_told_whole(value: float, text: str) -> None:
    assert number(value) == text
