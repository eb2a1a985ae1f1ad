"""Preemption: who goes, what happens to its outputs in flight, and how it comes back."""

from __future__ import annotations

import pytest
from tests.sched.rig import Rig

from equipoise.sched.extend import Extension
from equipoise.sched.rules import OPEN


def test_the_last_in_order_is_preempted_and_comes_back_first():
    rig = Rig(num_pages=4)
    rig.add("a", 4, max_tokens=8)
    rig.add("b", 4, max_tokens=8)
    rig.add("c", 4, max_tokens=1)
    assert rig.step() == [("a", 4), ("b", 4), ("c", 4)]
    rig.steps(4)
    assert rig.step() == [("a", 1)]
    assert [request.request_id for request in rig.last.preempted] == ["b"]
    rig.add("d", 4, max_tokens=1)
    rows = rig.drain()
    came_back = next(step for step in rows if any(name in "bd" for name, _ in step))
    assert came_back == [("b", 9), ("d", 4)]
    assert rig.tokens["b"][:5] == [501, 504, 506, 508, 510]
    assert len(rig.tokens["b"]) == 8
    assert rig.scheduler.totals.preemptions == 1
    assert rig.is_clean()


def test_nobody_is_admitted_in_a_step_that_preempted():
    rig = Rig(num_pages=4)
    rig.add("a", 4, max_tokens=12)
    rig.add("b", 4, max_tokens=12)
    rig.steps(5)
    rig.add("tiny", 1, max_tokens=1)
    assert rig.step() == [("a", 1)]  # b's two pages are free now, yet nobody enters


def test_the_last_in_order_preempts_itself():
    rig = Rig(num_pages=4)
    rig.add("a", 8, max_tokens=5)
    rig.add("b", 7, max_tokens=6)
    rig.step()
    assert rig.step() == [("b", 1)] or rig.requests["b"].num_preemptions
    rig.drain()
    assert rig.requests["a"].num_preemptions == 0
    assert rig.requests["b"].num_preemptions == 1
    assert {name: len(tokens) for name, tokens in rig.tokens.items()} == {"a": 5, "b": 6}


@pytest.mark.parametrize("depth", [1, 2])
def test_outputs_in_flight_of_a_preempted_request_are_delivered_before_it_waits(depth):
    rig = Rig(depth=depth, num_pages=4)
    rig.add("a", 4, max_tokens=12)
    rig.add("b", 4, max_tokens=12)
    rig.plan()
    while not rig.requests["b"].num_preemptions:
        if len(rig.outstanding) > depth:
            rig.land()
        rig.plan()
    assert rig.places()["b"] == "returning"
    assert rig.scheduler.load().num_waiting == 1
    before = len(rig.tokens["b"])
    landed = 0
    while rig.places()["b"] == "returning":
        assert "b" in rig.land()
        landed += 1
    assert landed == len(rig.tokens["b"]) - before == depth
    assert rig.places()["b"] == "waiting"
    assert rig.requests["b"].output_ids == rig.tokens["b"]
    while rig.scheduler.num_requests:
        rig.plan()
        if rig.outstanding and (rig.last.is_empty or len(rig.outstanding) > depth):
            rig.land()
    assert {name: len(tokens) for name, tokens in rig.tokens.items()} == {"a": 12, "b": 12}


def returning(depth=1, **more):
    """A rig whose request b was preempted with outputs in flight."""
    rig = Rig(depth=depth, num_pages=4)
    rig.add("a", 4, max_tokens=12)
    rig.add("b", 4, max_tokens=12, **more)
    rig.plan()
    while not rig.requests["b"].num_preemptions:
        if len(rig.outstanding) > depth:
            rig.land()
        rig.plan()
    assert rig.places()["b"] == "returning"
    return rig


def test_a_stop_token_ends_a_returning_request():
    rig = returning(depth=2, stop_token_ids=(7,))
    delivered = rig.land(b=7)
    assert delivered["b"] == 7
    assert rig.ended == {"b": "stop"}
    assert "b" not in rig.land()  # the surplus row
    rig.abort("a")
    while rig.outstanding:
        rig.land()
    assert rig.is_clean()


def test_a_stop_token_beyond_the_columns_ends_a_returning_request():
    rig = returning(stop_token_ids=tuple(range(10, 30)))
    rig.land(b=29)
    assert rig.ended == {"b": "stop"}


def test_a_returning_request_can_be_aborted():
    rig = returning()
    rig.abort("b")
    assert "b" not in rig.land()
    rig.abort("a")
    while rig.outstanding:
        rig.land()
    assert rig.is_clean()


def test_rows_of_a_preempted_request_are_taken_out_of_the_plan():
    rig = Rig(num_pages=4)
    rig.add("a", 4, max_tokens=12)
    rig.add("b", 4, max_tokens=12)
    rig.steps(5)
    seat = rig.requests["b"].seat
    rig.plan()
    plan = rig.last
    assert seat not in plan.decode_seats.tolist()
    assert plan.num_tokens == len(plan.sampled_handles) == 1
    assert rig.requests["b"].seat is None
    assert rig.requests["b"].num_computed == 0


def test_draining_requests_are_not_preempted():
    rig = Rig(depth=1, num_pages=4)
    rig.add("a", 7, max_tokens=9)
    rig.add("b", 7, max_tokens=2)
    rig.plan()
    rig.plan()
    assert rig.places() == {"a": "decoding", "b": "draining"}
    rig.land()
    assert rig.plan() == []  # a needs a third page, b holds two: a can only make room by leaving
    assert rig.requests["a"].num_preemptions == 1
    assert rig.requests["b"].num_preemptions == 0
    while rig.scheduler.num_requests:
        if rig.outstanding:
            rig.land()
        rig.plan()
    assert {name: len(tokens) for name, tokens in rig.tokens.items()} == {"a": 9, "b": 2}


def test_priority_preempts_the_lowest():
    rig = Rig(num_pages=4, order="priority")
    rig.add("low", 4, max_tokens=8, priority=5)
    rig.add("high", 4, max_tokens=8, priority=1)
    rig.drain()
    assert rig.requests["low"].num_preemptions == 1
    assert rig.requests["high"].num_preemptions == 0


def test_a_waiting_request_takes_the_seat_of_a_lower_priority_but_not_of_an_equal():
    rig = Rig(max_running=1, order="priority")
    rig.add("low", 4, max_tokens=9, priority=5)
    rig.step()
    rig.add("equal", 4, max_tokens=1, priority=5)
    rig.steps(2)
    assert rig.requests["low"].num_preemptions == 0
    rig.add("high", 4, max_tokens=1, priority=1)
    rows = rig.steps(2)
    assert [("high", 4)] in rows
    assert rig.requests["low"].num_preemptions == 1
    rig.drain()
    assert len(rig.tokens["low"]) == 9


@pytest.mark.parametrize("kind", ["prefill_gates", "admission_gates"])
def test_nobody_is_preempted_for_a_newcomer_that_a_gate_keeps_out(kind):
    is_open = [True]
    rig = Rig(Extension(**{kind: [lambda view: OPEN if is_open[0] else 0]}), max_running=1, order="priority")
    rig.add("low", 4, max_tokens=9, priority=5)
    rig.step()
    rig.add("high", 4, max_tokens=1, priority=1)
    rig.step()
    is_open[0] = False
    assert rig.steps(2) == [[("low", 1)]] * 2
    is_open[0] = True
    assert [("high", 4)] in rig.steps(2)
    rig.drain()
    assert rig.is_clean()


def test_a_waiting_request_takes_the_pages_of_lower_priorities():
    rig = Rig(num_pages=5, order="priority")
    rig.add("low", 4, max_tokens=9, priority=5)
    rig.add("mid", 4, max_tokens=9, priority=4)
    rig.step()
    rig.add("high", 12, max_tokens=1, priority=0)
    rows = rig.steps(2)
    assert ("high", 12) in rows[-1]
    assert rig.requests["low"].num_preemptions == 1
    assert rig.requests["mid"].num_preemptions == 0
    rig.drain()
    assert rig.is_clean()


def test_the_cheapest_victim_has_the_fewest_tokens_to_compute_again():
    rig = Rig(num_pages=6, preempt="cheapest")
    rig.add("short", 4, max_tokens=12)
    rig.add("long", 12, max_tokens=12)
    rig.steps(4)
    rig.drain()
    assert rig.requests["long"].num_preemptions == 0
    assert rig.requests["short"].num_preemptions >= 1


def test_a_victim_order_of_ones_own_chooses():
    rig = Rig(Extension(victim_order=lambda request, num_computed: (request.request_id == "a",)), num_pages=4)
    rig.add("a", 4, max_tokens=8)
    rig.add("b", 4, max_tokens=8)
    rig.drain()
    assert rig.requests["a"].num_preemptions >= 1
    assert rig.requests["b"].num_preemptions == 0


def test_a_request_without_pages_is_passed_only_so_often():
    rig = Rig(num_pages=4, max_bypass=2)
    rig.add("a", 4, max_tokens=12)
    rig.step()
    rig.add("big", 16, max_tokens=1)
    for name in "cde":
        rig.add(name, 1, max_tokens=1)
    assert rig.step() == [("a", 1), ("c", 1), ("d", 1)]
    assert rig.step() == [("a", 1)]
    assert rig.requests["big"].num_bypassed == 2
    rig.drain()
    assert set(rig.ended.values()) == {"length"}


def victim(name):
    """Rules under which `name` is preempted first."""
    return Extension(victim_order=lambda request, num_computed: (request.request_id == name,))


def test_the_tokens_of_a_row_that_was_taken_back_go_to_the_next():
    rig = Rig(victim("b"), num_pages=3, page_size=16, max_step_tokens=6, reserve_full_prompt=False)
    rig.add("a", 16, max_tokens=9)
    rig.add("b", 1, max_tokens=9)
    rig.add("c", 14, max_tokens=1)
    assert rig.steps(3)[-1] == [("a", 4), ("b", 1), ("c", 1)]
    # a needs the page that b holds: of 6 tokens, c has all but a's one
    assert rig.step() == [("a", 1), ("c", 5)]
    rig.drain()
    assert rig.is_clean()


def test_pages_of_a_chunk_that_was_taken_back_are_not_matched():
    rig = Rig(victim("x"), num_pages=6, long_prefill_cap=8, reserve_full_prompt=False, prefix_cache=True)
    rig.add("x", 22, max_tokens=2)
    rig.add("y", 12, max_tokens=1)
    assert rig.step() == [("x", 8), ("y", 8)]
    # x's next chunk gets two pages, y then lacks one: x leaves before it computed them
    assert rig.step() == [("y", 4)]
    rig.step()
    assert [(row.request.request_id, row.start) for row in rig.last.prefills] == [("x", 8)]


def test_nobody_is_preempted_in_vain():
    rig = Rig(num_pages=7, order="priority")
    rig.add("high", 12, max_tokens=4, priority=0)
    rig.add("low", 2, max_tokens=4, priority=5)
    rig.step()
    rig.add("mid", 16, max_tokens=1, priority=3)
    rig.steps(2)
    assert rig.places()["low"] == "decoding"  # its page beside the two that are free would not do for four
    rig.drain()
    assert rig.requests["low"].num_preemptions == 0
    assert rig.is_clean()
