"""Slow start: the weight of a worker that became ready."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.gateway.fleet.slow_start import SlowStart, SlowStartLimits


@pytest.mark.parametrize(("now", "weight"), [(5.0, 0.2), (10.0, 0.2), (15.0, 0.6), (19.99, 0.9992), (20.0, 1.0)])
def test_weight_grows_in_a_straight_line(now: float, weight: float) -> None:
    start = SlowStart(SlowStartLimits(duration_s=10.0, min_weight=0.2))
    start.begin(10.0)
    assert start.weight(now) == pytest.approx(weight)
    assert start.is_over(now) == (weight == 1.0)


def test_weight_is_full_before_any_begin_and_without_a_duration() -> None:
    assert SlowStart(SlowStartLimits()).weight(0.0) == 1.0
    start = SlowStart(SlowStartLimits(duration_s=0.0))
    start.begin(5.0)
    assert start.weight(5.0) == 1.0


@settings(deadline=None)
@given(st.floats(0.1, 100.0), st.floats(0.01, 1.0), st.lists(st.floats(0.0, 200.0), max_size=20))
def test_weight_never_falls(duration_s: float, least: float, times: list[float]) -> None:
    start = SlowStart(SlowStartLimits(duration_s, least))
    start.begin(0.0)
    weights = [start.weight(now) for now in sorted(times)]
    assert weights == sorted(weights)
    assert all(least <= weight <= 1.0 for weight in weights)
