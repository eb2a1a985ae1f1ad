"""The routing experiment: what it tells from rows made by hand, and that old loads without charges draw herds."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from equipoise.sim.experiment import build_experiment, routing, routing_answer
from equipoise.sim.experiment.rows import Options, Row, Table
from equipoise.sim.run import simulate

if TYPE_CHECKING:
    from equipoise.sim.experiment.rows import Point
    from equipoise.sim.run import Results


def cells(table: Table) -> dict[str, tuple[str, ...]]:
    """Cells of a table by the label of their line."""
    return {line[0]: tuple(line[1:]) for line in table.rows}


def rows_at(point: Point, found: dict[str, list[tuple[float, float]]]) -> list[Row]:
    """TTFT and TPOT by policy, for seeds 0, 1, ..."""
    return [
        Row(point, policy, {"ttft_mean_ms": ttft_ms, "tpot_mean_ms": tpot_ms}, seed)
        for policy, times in found.items()
        for seed, (ttft_ms, tpot_ms) in enumerate(times)
    ]


WAYS = {
    "round_robin / random rooms": [(200.0, 20.0), (100.0, 10.0)],
    "round_robin / round robin": [(150.0, 20.0), (75.0, 10.0)],
    "round_robin / tokens": [(160.0, 18.0), (88.0, 9.2)],
}
ROWS = [
    *rows_at(routing.point_of("policies"), WAYS),
    *rows_at(routing.point_of("map", "P/D 2x4"), WAYS),
    *rows_at(routing.point_of("map", "mixed 4x2"), WAYS | {"round_robin / tokens": [(198.0, 19.0), (99.0, 9.5)]}),
    *rows_at(routing.point_of("stale", charges=True), {"round_robin / tokens": [(180.0, 19.0), (90.0, 9.5)]}),
    *rows_at(routing.point_of("stale", charges=False), {"round_robin / tokens": [(400.0, 22.0), (300.0, 11.0)]}),
]


def test_changes_are_of_the_same_seeds():
    policies, found, where, stale = routing_answer.tables(ROWS)
    assert cells(policies)["round_robin"] == (
        "150.0",
        "15.0",
        "-16.0% (-20.0% to -12.0%)",
        "-9.0% (-10.0% to -8.0%)",
        "+12.0% (+6.7% to +17.3%)",
        "-9.0% (-10.0% to -8.0%)",
        "-18.2%, -11.6%",
    )
    assert cells(found)["P/D 2x4, KV 80%, load 80%"][2] == "-25.0% (-25.0% to -25.0%)"
    assert cells(where) == {
        "TTFT": ("P/D 2x4, KV 80%, load 80%",),
        "TPOT": ("P/D 2x4, KV 80%, load 80%",),
        "both": ("P/D 2x4, KV 80%, load 80%",),
    }
    assert cells(stale)["1"][2] == "+150.0% (+100.0% to +200.0%)"


def test_one_seed_has_no_range():
    policies, *_ = routing_answer.tables([row for row in ROWS if row.seed == 0])
    assert cells(policies)["round_robin"][2] == "-20.0%"


def test_charts_have_the_published_changes():
    charts = routing_answer.charts(ROWS)
    (drawn,) = charts["map"].to_dict()["datasets"].values()
    assert [row["at"] for row in drawn if row["topology"] == "published"] == ["random", "round_robin", "cache_aware"]
    assert set(charts) == {"map", "load", "stale"}


@pytest.mark.parametrize("quick", [True, False])
def test_trials_have_scenarios_of_their_points(quick: bool):
    built = build_experiment("routing", Options(quick=quick))
    keys = [trial.key for trial in built.trials]
    assert len(keys) == len(set(keys)) == (23 if quick else 127)
    for trial in built.trials:
        fleet = trial.scenario.fleet
        num_ranks = fleet.workers * fleet.ranks + fleet.decode_workers * fleet.decode_ranks
        assert num_ranks == (4 if trial.point["topology"] == "P/D 2x2" else 8)
        assert trial.scenario.routing.charges == trial.point["charges"]
    random_rooms = next(trial for trial in built.trials if trial.policy == "random / random rooms")
    assert random_rooms.scenario.routing.rank_policy == "follow_room"


def ran(age_s: float, *, charges: bool) -> Results:
    point = routing.point_of("stale", "P/D 2x4", age_s=age_s, charges=charges)
    scenario = routing.scenario_of(point, "least_tokens / tokens", 120)
    fleet = dataclasses.replace(scenario.fleet, decode_workers=1)
    return simulate(dataclasses.replace(scenario, fleet=fleet))


def longest_run(results: Results) -> int:
    """Most requests in a row that went to one decode rank."""
    ranks = results.columns()["rank"].tolist()
    longest = run = 1
    for before, after in pairwise(ranks):
        run = run + 1 if after == before else 1
        longest = max(longest, run)
    return longest


def test_old_loads_without_charges_draw_herds_and_charges_spread_them():
    # 43 requests come in the 2 s between two reports.
    herds, spread = ran(2.0, charges=False), ran(2.0, charges=True)
    assert longest_run(herds) > 10 * longest_run(spread)
    for metric in ("ttft_mean_ms", "tpot_mean_ms"):
        assert herds.summary()[metric] > 1.2 * spread.summary()[metric]
