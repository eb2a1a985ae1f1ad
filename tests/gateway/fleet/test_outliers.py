"""Outliers: who is ejected, for how long, and how many at most."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.gateway.fleet.outliers import Judge, OutlierLimits, Record

LIMITS = OutlierLimits(min_requests=10, max_failure_excess=0.3, max_ttft_ratio=4.0, min_ttft_excess_s=1.0,
                       eject_s=15.0, max_eject_s=40.0, max_ejected_share=0.34)  # fmt: skip


def fill(record: Record, num_ok: int, num_failed: int = 0, ttft_s: float | None = 0.1) -> Record:
    """`record` after so many requests."""
    for _ in range(num_ok):
        record.succeeded(ttft_s)
    for _ in range(num_failed):
        record.failed()
    return record


def fleet(*each: tuple[int, int, float | None]) -> list[Record]:
    """One record per (succeeded, failed, TTFT)."""
    return [fill(Record(), *numbers) for numbers in each]


GOOD = (100, 0, 0.1)


@pytest.mark.parametrize(
    ("records", "ejected"),
    [
        (fleet(GOOD, GOOD, GOOD), []),
        (fleet(GOOD, GOOD, (50, 50, 0.1)), [2]),
        (fleet(GOOD, GOOD, (80, 20, 0.1)), []),  # within what is tolerated
        (fleet((40, 60, 0.1), (40, 60, 0.1), (30, 70, 0.1)), []),  # all fail: the fault is not theirs
        (fleet(GOOD, GOOD, (3, 6, 0.1)), []),  # too few to tell
        (fleet(GOOD, GOOD, (100, 0, 1.2)), [2]),
        (fleet(GOOD, GOOD, (100, 0, 1.05)), []),  # ten times as slow, but less than a second more
        (fleet((9, 0, 2.0), (99, 0, 2.0), (99, 0, 2.0), (99, 0, 7.9)), []),
        (fleet((99, 0, 2.0), (99, 0, 2.0), (99, 0, 8.1)), [2]),
        (fleet((99, 0, None), (99, 0, None), (99, 0, 9.0)), []),  # nobody to compare with
        (fleet(GOOD, GOOD, (20, 80, 0.1), (60, 40, 0.1), GOOD), [2]),  # a third of five is one: the worst
        (fleet(*[GOOD] * 6, (20, 80, 0.1), (60, 40, 0.1)), [6, 7]),
    ],
)
def test_who_is_ejected(records: list[Record], ejected: list[int]) -> None:
    assert Judge(LIMITS).judge(records, 5.0) == ejected
    for place, record in enumerate(records):
        assert (record.ejected_until > 5.0) == (place in ejected)
        assert record.num_requests == 0, "a new interval begins"


def test_ejections_grow_longer_up_to_a_bound_and_are_forgotten_after_good_intervals() -> None:
    judge, records, now, lasted = Judge(LIMITS), [Record() for _ in range(3)], 0.0, list[float]()

    def interval(num_failed: int) -> None:
        for record in records[:2]:
            fill(record, 100)
        fill(records[2], 100 - num_failed, num_failed)
        judge.judge(records, now)

    for _ in range(4):
        interval(num_failed=60)
        lasted.append(records[2].ejected_until - now)
        now = records[2].ejected_until
    assert lasted == [15.0, 30.0, 40.0, 40.0]
    for _ in range(4):
        now += 10.0
        interval(num_failed=0)
    interval(num_failed=60)
    assert records[2].ejected_until - now == 15.0


def test_an_interval_without_requests_forgets_no_ejection() -> None:
    judge, records = Judge(LIMITS), fleet(GOOD, GOOD, (20, 80, 0.1))
    judge.judge(records, 0.0)
    judge.judge(records, 20.0)
    for record, numbers in zip(records, (GOOD, GOOD, (20, 80, 0.1)), strict=True):
        fill(record, *numbers)
    judge.judge(records, 30.0)
    assert records[2].ejected_until == 60.0


def test_one_peer_is_no_majority_however_many_may_be_out() -> None:
    assert Judge(OutlierLimits(min_requests=10, max_ejected_share=1.0)).judge(fleet(GOOD, (50, 50, 9.0)), 0.0) == []


def test_who_is_out_already_counts_among_those_that_may_be_out() -> None:
    judge, records = Judge(LIMITS), fleet(GOOD, GOOD, (20, 80, 0.1))
    assert judge.judge(records, 0.0) == [2]
    fill(records[0], 100)
    fill(records[1], 20, 80)
    assert judge.judge(records, 1.0) == []


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.floats(0.0, 60.0)), max_size=12),
    st.floats(0.0, 1.0),
)
def test_never_more_than_the_share_is_out(numbers: list[tuple[int, int, float]], share: float) -> None:
    limits = OutlierLimits(min_requests=1, max_ejected_share=share)
    records = fleet(*numbers)
    for now in (0.0, 1.0, 2.0):
        Judge(limits).judge(records, now)
        assert sum(record.ejected_until > now for record in records) <= int(share * len(records))
        for record, each in zip(records, numbers, strict=True):
            fill(record, *each)
