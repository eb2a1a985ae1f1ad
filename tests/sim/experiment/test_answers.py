"""What experiments tell, from rows made by hand."""

from __future__ import annotations

import pytest

from equipoise.sim.experiment import balance, balance_answer, load, overlap, pages, together_answer
from equipoise.sim.experiment.gains import Compared
from equipoise.sim.experiment.rows import Row, Table


def cells(table: Table) -> dict[str, tuple[str, ...]]:
    """Cells of a table by the label of their line."""
    return {line[0]: tuple(line[1:]) for line in table.rows}


# ---------------------------------------------------------------- balance


def gate_rows(table: dict[str, list[tuple[float, float]]]) -> list[Row]:
    """Throughput and TTFT of policies at spreads 0, 0.1, ... of the map."""
    return [
        Row(
            balance.point_of("map", "dp4", 4, spread / 10, 128, "3500/1500"),
            policy,
            {"throughput_tok_s": tok_s, "ttft_mean_ms": ttft_ms},
        )
        for policy, found in table.items()
        for spread, (tok_s, ttft_ms) in enumerate(found)
    ]


OTHERS = {
    "none": [(100.0, 1000.0), (100.0, 1000.0), (100.0, 1000.0)],
    "balance margin 0": [(88.0, 1500.0), (120.0, 1200.0), (130.0, 1200.0)],
    "alignment": [(99.0, 900.0), (125.0, 950.0), (120.0, 900.0)],
}


@pytest.mark.parametrize(
    ("ours", "met", "below"),
    [
        ([(101.0, 1100.0), (135.0, 1000.0), (142.0, 1300.0)], ["met", "met", "met"], 0),
        ([(98.0, 1100.0), (135.0, 1000.0), (142.0, 1300.0)], ["met", "met", "met"], 0),  # 2 points exactly
        ([(97.0, 1100.0), (130.0, 1300.0), (150.0, 1300.0)], ["missed", "missed", "missed"], 1),
        ([(100.0, 1100.0), (122.0, 1000.0), (138.0, 1250.0)], ["missed", "missed", "met"], 1),
    ],
)
def test_bars_of_the_gate_of_our_own(ours, met, below):
    compared = Compared(gate_rows(OTHERS | {"rent or buy": ours}), "none")
    table = balance_answer.bars_table(compared)
    assert [line[-1] for line in table.rows] == met
    assert f"({below} of 3 points are)" in table.rows[0][0]


def test_gains_over_the_map():
    tables = balance_answer.tables(gate_rows(OTHERS))
    gains, axes, extremes = (cells(table) for table in tables)
    assert gains["balance margin 0"] == ("+20.0%", "-12.0%", "+30.0%", "-5.0%", "-12.0%", "1.20x", "1.50x")
    assert axes["spread 0.0"] == ("-12.0%", "-1.0%")
    assert "ranks 4" not in axes  # there is no other
    assert "spread 0.2" in extremes["alignment"][0] or "spread 0.0" in extremes["alignment"][0]
    assert len(tables) == 3  # ours is not in them: no bars


def test_the_published_table_stands_beside_what_was_simulated():
    values = {"throughput_tok_s": 100.0, "duration_s": 590.0, "ttft_mean_ms": 5900.0, "tpot_mean_ms": 92.0}
    point = next(balance.published_points())
    rows = [Row(point, "none", values), Row(point, "alignment", values | {"throughput_tok_s": 120.0})]
    (table,) = balance_answer.tables(rows)
    assert cells(table)["published: none"] == ("591.9", "6,600", "86.8", "")
    assert cells(table)["dp4: none"] == ("590.0", "5,900", "92.0", "")
    assert cells(table)["dp4: alignment"][-1] == "+20.0%"


def test_the_map_crosses_all_axes():
    points = list(balance.map_points())
    assert len(points) == 144 + 48 + 36
    assert len({tuple(point.items()) for point in points}) == len(points)
    for point in points:
        seats = balance.seats_of(point) * int(point["ranks"])
        assert seats == int(point["concurrency"]) / float(point["filled"])


# ---------------------------------------------------------------- async


def test_the_share_at_which_a_gain_is_reached():
    curve = [(0.1, 0.05, 0.1), (0.3, 0.15, 0.3)]
    assert overlap.share_at(curve, 0.025) == pytest.approx(0.05)
    assert overlap.share_at(curve, 0.1) == pytest.approx(0.2)
    assert overlap.share_at(curve, 0.2) is None


@pytest.mark.parametrize(("host_us", "bound"), [(500.0, 0.05), (10_000.0, 1.0), (20_000.0, 0.5)])
def test_overlap_hides_the_shorter_of_the_two(host_us, bound):
    assert overlap.bound_of({"step_ms": 10.0, "host_us": host_us}) == pytest.approx(bound)


def test_the_curve_and_the_planners_on_it():
    gains = {0.02: 1.01, 0.1: 1.05, 0.3: 1.25}
    points = {share: {"planner": "a share", "step_ms": 10.0, "host_us": share * 1e4} for share in gains}
    rows = [
        Row(points[share], policy, {"throughput_tok_s": tok_s})
        for share, gain in gains.items()
        for policy, tok_s in (("depth 0", 100.0), ("depth 1", 100.0 * gain))
    ]
    planner = {"planner": "vLLM, elsewhere", "seats": 64, "step_ms": 10.0, "host_us": 1400.0}
    rows += [Row(planner, f"depth {depth}", {"throughput_tok_s": 100.0 + 9 * depth}) for depth in (0, 1)]
    curve, planners = overlap.tables(rows)
    assert cells(curve)["10%"] == ("+5.0%", "+10.0%")
    assert "6.0% to 20.0%" in curve.notes[0]
    assert cells(planners)["vLLM, elsewhere, 64 rows"] == ("1.400", "+9.0%", "7.0 to 23.3 ms")


# ---------------------------------------------------------------- pages


@pytest.mark.parametrize(
    ("aligned", "saving", "even"),
    [(98.0, 102.0, 0.025), (100.0, 104.0, 0.0), (90.0, 92.0, 0.25), (101.0, 103.0, -0.025)],
)
def test_the_saving_from_which_alignment_pays(aligned, saving, even):
    values = {pages.UNALIGNED: 100.0, pages.ALIGNED: aligned, pages.SAVING: saving}
    found = pages.break_even({policy: {"throughput_tok_s": tok_s} for policy, tok_s in values.items()})
    assert found == pytest.approx(even)


def test_the_saving_is_a_share_of_a_full_prefill_step():
    plain, saving = (pages.scenario_of(16, 1000, policy, 10).cost for policy in (pages.ALIGNED, pages.SAVING))

    def step_ms(token_ms: float) -> float:
        return plain.step_ms + 1000 * token_ms

    assert step_ms(saving.prefill_token_ms) == pytest.approx(0.95 * step_ms(plain.prefill_token_ms))


# ---------------------------------------------------------------- load, together


def test_load_reports_side_by_side():
    times = {load.COUNTERS: 2.0, load.ONE_SUM: 100.0, load.RESCAN: 300.0, load.MOVES: 5.0}
    rows = [Row({"num_waiting": 1000}, way, {"least_us": us, "median_us": us}) for way, us in times.items()]
    (table,) = load.tables(rows)
    assert cells(table)["1,000"] == ("2.00", "100.00", "300.00", "50.0x", "5.00")


def test_all_beside_the_best_alone_and_what_leaving_out_costs():
    found = {"plain": 100.0, "balance": 120.0, "token routing": 90.0, "all": 132.0, "all but balance": 99.0}
    point = {"trace": "azure", "load": together_answer.OVER, "ranks": 8}
    rows = [
        Row(point, policy, {"throughput_tok_s": tok_s, "e2e_mean_ms": 5.0, "ttft_mean_ms": 2.0})
        for policy, tok_s in found.items()
    ]
    fleets, features = map(cells, together_answer.tables(rows))
    assert fleets["azure, 8 ranks, over capacity"] == ("balance", "+20.0%", "+32.0%", "+10.0%")
    assert features["balance"] == ("+20.0%", "-25.0%", "1.00x")
    assert features["token routing"] == ("-10.0%", "-", "1.00x")
    assert features["all"][0] == "+32.0%"


def test_below_capacity_the_time_of_requests_counts():
    point = {"trace": "azure", "load": together_answer.BELOW, "ranks": 8}
    times = {"plain": 10.0, "balance": 8.0, "all": 5.0}
    rows = [
        Row(point, policy, {"throughput_tok_s": 1.0, "e2e_mean_ms": e2e, "ttft_mean_ms": 2.0})
        for policy, e2e in times.items()
    ]
    fleets = cells(together_answer.tables(rows)[0])
    assert fleets["azure, 8 ranks, 0.7 of capacity"] == ("balance", "+25.0%", "+100.0%", "+60.0%")
