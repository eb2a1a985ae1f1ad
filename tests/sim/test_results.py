"""Sums over requests and steps: exact whatever the order, and NaN where there is nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.sim.results import EDGES, GapHistogram, Requests, Steps, summary
from equipoise.sim.workload.request import SimRequest

gaps = st.lists(st.tuples(st.floats(0, 1e4), st.integers(1, 1000)), max_size=30)


@given(gaps, st.randoms())
def test_gaps_may_come_one_by_one_or_many_at_once_in_any_order(drawn: list[tuple[float, int]], random) -> None:  # type: ignore[no-untyped-def]
    one_by_one, at_once = GapHistogram(), GapHistogram()
    for gap_s, count in drawn:
        one_by_one.add(gap_s, count)
    random.shuffle(drawn)
    for gap_s, count in drawn:
        at_once.add_each(np.array([gap_s, gap_s]), count)
    assert [2 * count for count in one_by_one.counts] == at_once.counts
    assert 2 * one_by_one.sum_ps == at_once.sum_ps
    assert at_once.num == sum(at_once.counts) == 2 * sum(count for _, count in drawn)


def test_percentiles_of_gaps_are_right_to_a_bin() -> None:
    histogram = GapHistogram()
    histogram.add_each(np.linspace(0.001, 1, 1000), 3)
    for share in (0.1, 0.5, 0.99, 1.0):
        assert histogram.percentile(share) == pytest.approx(share, rel=0.0135)
    histogram.add(1e12, 1)
    assert histogram.percentile(1.0) == EDGES[-1]
    assert math.isnan(GapHistogram().percentile(0.5))


def test_a_summary_counts_by_hand() -> None:
    requests, steps = Requests(), Steps()
    for arrival_s, first_s, last_s in ((1.0, 1.5, 3.5), (2.0, 5.0, 6.0), (2.0, math.nan, math.nan)):
        index = requests.add(SimRequest(arrival_s, prompt_len=100, output_len=11), arrival_s)
        requests.admitted_s[index] = requests.first_s[index] = first_s
        requests.last_s[index] = last_s
    steps.count(2.0, 2, any_prefill=True)
    steps.count_leapt(np.array([0.25, 0.25]), 2)
    steps.lose("seats", np.array([0.25, 0.75]))
    found = summary(requests, steps, num_ranks=2, ttft_ms=1000, tpot_ms=200)
    expected = {
        "num_requests": 3,
        "num_finished": 2,
        "num_refused": 1,
        "duration_s": 5.0,
        "throughput_tok_s": 22 / 5,
        "total_throughput_tok_s": 222 / 5,
        "throughput_req_s": 2 / 5,
        "goodput_req_s": 1 / 5,
        "good_share": 0.5,
        "ttft_mean_ms": 1750.0,
        "tpot_p50_ms": 150.0,
        "e2e_mean_ms": 3250.0,
        "num_steps": 3,
        "num_prefill_steps": 1,
        "busy_share": 5 / 10,
        "lost_share": 0.2,
        "lost_to_seats_share": 0.2,
        "lost_to_kv_share": 0.0,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_a_summary_of_nothing_has_no_numbers_to_be_misled_by() -> None:
    found = summary(Requests(), Steps(), num_ranks=1, ttft_ms=1, tpot_ms=1)
    assert found["num_requests"] == found["throughput_tok_s"] == 0
    assert all(math.isnan(found[name]) for name in ("ttft_mean_ms", "itl_p50_ms", "good_share", "prefix_hit_share"))
