"""Intervals against tables, and against chance: 95% of them hold the truth."""

from __future__ import annotations

import math

import numpy as np
import pytest

from equipoise.sim.sweep.stats import interval, paired, t_quantile

# scipy.stats.t.ppf(0.975, df), to 6 digits; as in any table.
T_95 = {1: 12.7062, 2: 4.30265, 3: 3.18245, 4: 2.77645, 5: 2.57058, 9: 2.26216, 10: 2.22814, 30: 2.04227}
T_95 |= {100: 1.98397, 1000: 1.96234}


@pytest.mark.parametrize(("df", "t"), T_95.items())
def test_quantiles_are_those_of_the_tables(df: int, t: float) -> None:
    assert t_quantile(df) == pytest.approx(t, rel=3e-6)


def test_quantiles_at_other_levels() -> None:
    assert t_quantile(7, 0.9) == pytest.approx(1.894579, rel=1e-6)
    assert t_quantile(6, 0.99) == pytest.approx(3.707428, rel=1e-6)


def test_an_interval_by_hand() -> None:
    # mean 3, standard deviation sqrt(2.5), over 5: 3 +- 2.77645 * 0.707107
    found = interval([1, 2, 3, 4, 5])
    assert (found.mean, found.low, found.high) == pytest.approx((3, 1.036757, 4.963243), rel=1e-6)
    one = interval([7.0])
    assert one.mean == 7
    assert math.isnan(one.low)
    assert math.isnan(interval([]).mean)


def test_gains_are_of_ratios_on_the_same_seeds() -> None:
    # ratios 1.1 and 1.21: logs 0.0953102 and 0.1906204, mean 0.1429653, deviation 0.0673945, 12.7062 / sqrt 2 of it
    found = paired([110, 242], [100, 200])
    assert found.method == "log ratio"
    assert found.gain == pytest.approx(math.sqrt(1.1 * 1.21) - 1)
    assert found.low == pytest.approx(math.exp(0.1429653 - 0.6055190) - 1, rel=1e-5)
    assert found.high == pytest.approx(math.exp(0.1429653 + 0.6055190) - 1, rel=1e-5)
    assert not found.is_significant


def test_what_may_be_zero_is_compared_by_differences() -> None:
    found = paired([0, 2, 4], [1, 3, 5])
    assert (found.method, found.num_pairs) == ("difference", 3)
    assert found.gain == pytest.approx(-1 / 3)
    assert (found.low, found.high) == pytest.approx((-1 / 3, -1 / 3))
    assert found.is_significant
    assert math.isnan(paired([1, 2], [0, 0]).gain)


@pytest.mark.parametrize(("value", "baseline"), [(90, 100), (3, 0.5), (-1, 2)])
def test_seeds_that_change_nothing_are_one_observation(value: float, baseline: float) -> None:
    found = paired([value] * 5, [baseline] * 5)
    assert found.low == found.gain == found.high
    assert not found.seeds_differ
    assert not found.is_significant
    assert paired([110, 220], [100, 200]).seeds_differ


def test_seeds_without_a_number_are_left_out_of_both() -> None:
    assert paired([110, math.nan, 130], [100, 1, math.nan]).gain == pytest.approx(0.1)
    assert paired([math.nan], [1.0]).num_pairs == 0


def test_one_seed_tells_a_gain_but_no_interval() -> None:
    found = paired([110], [100])
    assert found.gain == pytest.approx(0.1)
    assert math.isnan(found.low)
    assert not found.is_significant


@pytest.mark.parametrize("num_seeds", [2, 3, 5, 10])
def test_95_of_100_intervals_hold_the_true_gain(num_seeds: int) -> None:
    """Seeds differ by 30%, policies by 7% and a noise of 5%."""
    random = np.random.default_rng((1, num_seeds))
    num, truth = 5000, 0.07
    baseline = np.exp(random.normal(7, 0.3, (num, num_seeds)))
    values = baseline * (1 + truth) * np.exp(random.normal(0, 0.05, (num, num_seeds)))
    found = [paired(a, b) for a, b in zip(values.tolist(), baseline.tolist(), strict=True)]
    share = sum(each.low <= truth <= each.high for each in found) / num
    assert share == pytest.approx(0.95, abs=0.01)  # three standard deviations
