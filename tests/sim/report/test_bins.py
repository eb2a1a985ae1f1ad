"""Bins of time: nothing is lost, and neither order nor doubling shows."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from equipoise.sim.report.bins import LEAST_WIDTH_US, TimeBins

Span = tuple[int, int, int, int, int]
spans = st.lists(
    st.tuples(
        st.integers(0, 3), st.integers(0, 20_000), st.integers(0, 9_000), st.integers(0, 50), st.integers(0, 999)
    ),
    min_size=1,
    max_size=20,
)


def add(bins: TimeBins, drawn: list[Span]) -> None:
    rows, begins, lasts, rates, amounts = np.array(drawn, np.int64).T
    bins.add(rows, begins, begins + lasts, rates=rates[:, None], amounts=amounts[:, None])


@given(spans, st.randoms(use_true_random=False))
def test_bins_sum_to_what_was_added_in_any_order_and_split(drawn: list[Span], random) -> None:  # type: ignore[no-untyped-def]
    at_once, one_by_one = TimeBins(8, 2), TimeBins(8, 2)
    add(at_once, drawn)
    random.shuffle(drawn)
    for each in drawn:
        add(one_by_one, [each])
    assert at_once.width_us == one_by_one.width_us
    assert (at_once.sums == one_by_one.sums).all()
    for row in range(len(at_once.sums)):
        # A span without a length counts as one of a microsecond.
        rate_us = sum(max(last, 1) * rate for owner, _, last, rate, _ in drawn if owner == row)
        amount = sum(amount for owner, *_, amount in drawn if owner == row)
        assert at_once.sums[row].sum(axis=0).tolist() == [rate_us, amount]


def test_a_span_is_split_where_bins_meet() -> None:
    bins = TimeBins(4, 2)
    width = LEAST_WIDTH_US
    add(bins, [(0, width // 2, 2 * width, 3, 8)])
    assert bins.sums[0].tolist() == [[3 * width // 2, 2], [3 * width, 4], [3 * width // 2, 2], [0, 0]]
    assert bins.num_used == 3
    add(bins, [(1, 4 * width, width, 1, 1)])
    assert bins.width_us == 2 * width
    assert bins.sums[0].tolist() == [[9 * width // 2, 6], [3 * width // 2, 2], [0, 0], [0, 0]]
    assert bins.sums[1].tolist() == [[0, 0], [0, 0], [width, 1], [0, 0]]


def test_large_amounts_over_long_spans_do_not_overflow() -> None:
    bins = TimeBins(4, 2)
    add(bins, [(0, 0, 10**9, 10**7, 10**13)])
    assert bins.sums[0].sum(axis=0).tolist() == [10**16, 10**13]
    assert (bins.sums >= 0).all()
