"""Each limit by itself: what it makes of n tokens."""

from __future__ import annotations

import pytest
from tests.sched.rig import make_request
from tests.sched.views import make_view

from equipoise.sched.limits import long_prefill_cap, page_aligned, whole_prompts


def limited(rule, prompt, computed, n, **view):
    request = make_request(prompt=prompt)
    request.num_computed = computed
    limit = rule(make_view(**view))
    return n if limit is None else limit(request, n)


@pytest.mark.parametrize(
    ("prompt", "computed", "n", "expected"),
    [(10, 0, 10, 10), (10, 0, 9, 0), (10, 4, 6, 6), (10, 4, 5, 0), (1, 0, 1, 1), (10, 0, 0, 0)],
)
def test_whole_prompts_runs_all_that_is_left_or_nothing(prompt, computed, n, expected):
    assert limited(whole_prompts(), prompt, computed, n) == expected


@pytest.mark.parametrize(("n", "expected"), [(0, 0), (5, 5), (6, 6), (7, 6), (100, 6)])
def test_the_cap_cuts_while_others_run_or_wait(n, expected):
    assert limited(long_prefill_cap(6), 100, 0, n, num_running=1, num_waiting=1) == expected
    assert limited(long_prefill_cap(6), 100, 0, n, num_running=2) == expected
    assert limited(long_prefill_cap(6), 100, 0, n, num_waiting=2) == expected


def test_the_cap_is_void_for_a_lone_request():
    for view in ({"num_running": 1}, {"num_waiting": 1}, {}):
        assert long_prefill_cap(6)(make_view(**view)) is None


@pytest.mark.parametrize(
    ("num_prefilling", "num_waiting", "expected"),
    [(2, 0, 50), (1, 1, 50), (3, 7, 10), (40, 20, 6), (0, 2, 50), (1, 0, 100), (0, 0, 100)],
)
def test_the_adaptive_cap_is_an_equal_share_of_the_step(num_prefilling, num_waiting, expected):
    rule = long_prefill_cap(6, shared_tokens=100)
    view = {"num_running": num_prefilling + 2, "num_prefilling": num_prefilling, "num_waiting": num_waiting}
    assert limited(rule, 100, 0, 100, **view) == expected


@pytest.mark.parametrize(
    ("prompt", "computed", "n", "expected"),
    [
        (37, 0, 20, 16),  # floored to a page
        (37, 0, 16, 16),  # on a page already
        (37, 32, 5, 5),  # the last chunk is not cut
        (37, 0, 37, 37),
        (37, 0, 7, 7),  # another limit cut it before the boundary, and may for ever
        (37, 5, 20, 19),  # from 5, the boundary is at 24: counted from the start of the prompt
        (37, 5, 2, 2),
        (37, 5, 3, 3),
    ],
)
def test_page_alignment_ends_on_a_page_counted_from_the_prompts_start(prompt, computed, n, expected):
    assert limited(page_aligned(8), prompt, computed, n) == expected
