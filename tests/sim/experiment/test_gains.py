"""Policies compared at points: tables made by hand."""

from __future__ import annotations

import pytest

from equipoise.sim.experiment.gains import Compared, has, spread_of
from equipoise.sim.experiment.rows import Row, by_point

TOK_S = "throughput_tok_s"


def rows(table: dict[str, dict[str, float]]) -> list[Row]:
    """{"none": {"a": 100}}: a policy's throughput at points."""
    return [
        Row({"place": place}, policy, {TOK_S: value})
        for policy, found in table.items()
        for place, value in found.items()
    ]


TABLE = {
    "none": {"a": 100.0, "b": 100.0, "c": 200.0},
    "old": {"a": 110.0, "b": 90.0, "c": 100.0},
    "older": {"a": 105.0, "b": 95.0},
    "ours": {"a": 120.0, "b": 97.0, "c": 190.0},
}


@pytest.fixture
def compared() -> Compared:
    return Compared(rows(TABLE), "none")


def test_gains_are_over_the_baseline_of_the_same_point(compared):
    assert compared.gains("old", TOK_S) == pytest.approx({"place=a": 0.1, "place=b": -0.1, "place=c": -0.5})
    assert compared.ratios("old", TOK_S, has("place", "c")) == {"place=c": 0.5}


def test_the_best_other_is_taken_at_each_point_and_no_gate_is_one_of_them(compared):
    found = compared.over_best("ours", ["old", "older", "ours"], TOK_S)
    assert found == pytest.approx({"place=a": 0.1, "place=b": -0.03, "place=c": -0.05})


def test_policies_and_axes_keep_the_order_of_the_rows(compared):
    assert compared.policies == ["old", "older", "ours"]
    assert compared.values_of("place") == ["a", "b", "c"]
    assert len(compared) == 3


def test_a_point_without_the_baseline_is_left_out():
    compared = Compared([*rows(TABLE), Row({"place": "d"}, "ours", {TOK_S: 1.0})], "none")
    assert "place=d" not in compared.gains("ours", TOK_S)


def test_seeds_are_averaged():
    table = [Row({"place": "a"}, policy, {TOK_S: value}, seed) for policy, value, seed in SEEDS]
    assert Compared(table, "none").gains("ours", TOK_S) == pytest.approx({"place=a": 0.5})


SEEDS = (("none", 80.0, 0), ("none", 120.0, 1), ("ours", 100.0, 0), ("ours", 200.0, 1))


def test_a_spread_has_the_middle_and_the_ends():
    assert spread_of([3.0, 1.0, 10.0]) == (3.0, 1.0, 10.0)


def test_numbers_of_a_point_are_means_over_its_seeds():
    table = [Row({"place": "a"}, "none", {TOK_S: value}, seed) for seed, value in enumerate((80.0, 120.0))]
    assert by_point(table) == {"place=a": {"none": {TOK_S: 100.0}}}
