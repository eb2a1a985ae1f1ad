"""Each gate by itself: what it answers to what it sees."""

from __future__ import annotations

import pytest
from tests.sched.views import make_view

from equipoise.sched.gates import PrefillAlignment, admission_cap, balance, min_free_seats, prefill_cadence
from equipoise.sched.rules import OPEN, RankState


@pytest.mark.parametrize(("num_running", "expected"), [(0, 3), (2, 1), (3, 0), (5, 0)])
def test_admission_cap_counts_down_to_nothing(num_running, expected):
    assert admission_cap(3)(make_view(num_running=num_running)) == expected


@pytest.mark.parametrize(
    ("running", "margin", "expected"),
    [
        ((0, 0), 1, OPEN),
        ((6, 3), 1, OPEN),
        ((7, 0), 1, 0),  # the seed's rule: max(running) >= max_running - 1
        ((0, 7), 1, 0),
        ((8, 8), 1, 0),
        ((7, 7), 0, OPEN),
        ((7, 8), 0, 0),
    ],
)
def test_balance_closes_while_any_rank_is_full(running, margin, expected):
    ranks = tuple(RankState(n, 0) for n in running)
    assert balance(8, margin)(make_view(ranks=ranks)) == expected


@pytest.mark.parametrize(
    ("since", "num_decoding", "has_backlog", "expected"),
    [
        (1, 5, False, 0),
        (3, 5, False, 0),
        (4, 5, False, OPEN),
        (9, 5, False, OPEN),  # the last prefill is long ago
        (1, 0, False, OPEN),  # nobody decodes: nobody is delayed
        (1, 5, True, OPEN),  # saturated
    ],
)
def test_cadence_opens_n_steps_after_the_last_prefill(since, num_decoding, has_backlog, expected):
    view = make_view(num_steps_since_prefill=since, num_decoding=num_decoding, has_backlog=has_backlog)
    assert prefill_cadence(4)(view) == expected


@pytest.mark.parametrize(("num_running", "expected"), [(0, OPEN), (4, OPEN), (5, 0), (8, 0)])
def test_min_free_seats_waits_for_a_group(num_running, expected):
    assert min_free_seats(4)(make_view(num_running=num_running)) == expected


def test_min_free_seats_is_open_while_nothing_runs():
    assert min_free_seats(9)(make_view()) == OPEN


def want(*wants, now_s=0.0):
    return make_view(ranks=tuple(RankState(1, 0, wants_prefill=bool(w)) for w in wants), now_s=now_s)


def test_alignment_is_open_when_all_or_none_want_to_prefill():
    gate = PrefillAlignment()
    assert gate(want(1, 1)) == OPEN
    assert gate(want(0, 0)) == OPEN
    assert gate(want(1)) == OPEN
    assert gate(want(1, 0)) == 0


def test_alignment_waits_for_so_many_passes_and_starts_anew():
    gate = PrefillAlignment(max_passes=3)
    answers = [gate(want(1, 0)) for _ in range(8)]
    assert answers == [0, 0, 0, OPEN, 0, 0, 0, OPEN]


def test_alignment_forgets_its_passes_when_company_comes():
    gate = PrefillAlignment(max_passes=3)
    assert [gate(want(1, 0)) for _ in range(2)] == [0, 0]
    assert gate(want(1, 1)) == OPEN
    assert [gate(want(1, 0)) for _ in range(4)] == [0, 0, 0, OPEN]


def test_alignment_stays_open_for_so_many_passes():
    gate = PrefillAlignment(max_passes=2, num_open=3)
    answers = [gate(want(1, 0)) for _ in range(10)]
    assert answers == [0, 0, OPEN, OPEN, OPEN, 0, 0, OPEN, OPEN, OPEN]
    assert gate(want(1, 1)) == OPEN


def test_alignment_closes_again_once_company_has_come():
    gate = PrefillAlignment(max_passes=1, num_open=3)
    assert [gate(want(1, 0)) for _ in range(2)] == [0, OPEN]
    assert gate(want(1, 1)) == OPEN
    assert gate(want(1, 0)) == 0


def test_alignment_waits_for_so_many_seconds():
    gate = PrefillAlignment(max_passes=1000, max_delay_s=5.0)
    assert gate(want(1, 0, now_s=10.0)) == 0
    assert gate(want(1, 0, now_s=14.9)) == 0
    assert gate(want(1, 0, now_s=15.0)) == OPEN
    assert gate(want(1, 0, now_s=15.1)) == 0
