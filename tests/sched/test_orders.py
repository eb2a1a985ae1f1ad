"""Orders: lists of requests, and who goes first."""

from __future__ import annotations

import pytest
from tests.sched.rig import make_request

from equipoise.sched.orders import cheapest, fcfs, last_in, longest_first, outranks, priority, shortest_first

EARLY_LONG = make_request(0, prompt=30, name="early_long", arrival_s=1.0, priority=3)
MIDDLE = make_request(1, prompt=10, name="middle", arrival_s=2.0, priority=1)
LATE_SHORT = make_request(2, prompt=5, name="late_short", arrival_s=9.0, priority=1)
ALL = [LATE_SHORT, EARLY_LONG, MIDDLE]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (fcfs, ["early_long", "middle", "late_short"]),
        (priority, ["middle", "late_short", "early_long"]),
        (longest_first, ["early_long", "middle", "late_short"]),
        (shortest_first(100.0), ["late_short", "middle", "early_long"]),
        # every second makes up for ten tokens: 30 + 10, 10 + 20, 5 + 90
        (shortest_first(0.1), ["middle", "early_long", "late_short"]),
    ],
)
def test_orders(order, expected):
    assert [request.request_id for request in sorted(ALL, key=order)] == expected


def test_no_request_starves_under_shortest_first():
    order = shortest_first(0.1)
    long = make_request(0, prompt=100, arrival_s=0.0)
    assert order(long) < order(make_request(1, prompt=1, arrival_s=10.0))
    assert order(long) > order(make_request(1, prompt=1, arrival_s=9.0))


def test_only_a_strictly_higher_priority_outranks():
    assert outranks(MIDDLE, EARLY_LONG)
    assert not outranks(MIDDLE, LATE_SHORT)
    assert not outranks(EARLY_LONG, MIDDLE)


def test_victims():
    assert max(ALL, key=lambda request: last_in(fcfs)(request, 0)) is LATE_SHORT
    computed = {EARLY_LONG.handle: 5, MIDDLE.handle: 9, LATE_SHORT.handle: 6}
    assert max(ALL, key=lambda request: cheapest(request, computed[request.handle])) is EARLY_LONG
    equals = [MIDDLE, LATE_SHORT]
    assert max(equals, key=lambda request: cheapest(request, computed[request.handle])) is LATE_SHORT
