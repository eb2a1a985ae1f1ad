"""One step: whom it runs, in which order, and how requests come and go."""

from __future__ import annotations

import numpy as np
import pytest
from tests.sched.rig import Rig, make_request

from equipoise.errors import InvalidValueError, InvariantError, QueueFullError
from equipoise.sched.extend import Extension
from equipoise.sched.rules import OPEN

# ---------------------------------------------------------------- the order of a step


def test_a_step_holds_decodes_then_running_prefills_then_admissions():
    rig = Rig(max_step_tokens=10)
    rig.add("a", 4)
    rig.add("b", 15)
    assert rig.step() == [("a", 4), ("b", 6)]
    rig.add("c", 4)
    assert rig.step() == [("a", 1), ("b", 9)]
    assert rig.step() == [("a", 1), ("b", 1), ("c", 4)]


def test_decodes_keep_the_order_in_which_they_began():
    rig = Rig()
    for name in "abc":
        rig.add(name, 4, max_tokens=8)
    rig.step()
    rig.abort("b")
    rig.add("d", 4)
    assert rig.step() == [("a", 1), ("c", 1), ("d", 4)]
    assert rig.step() == [("a", 1), ("c", 1), ("d", 1)]


def test_more_decodes_than_the_budget_leave_the_later_ones_out():
    rig = Rig(max_step_tokens=2)
    for name in "abc":
        rig.add(name, 1, max_tokens=3)
    assert rig.step() == [("a", 1), ("b", 1)]
    assert rig.step() == [("a", 1), ("b", 1)]
    assert rig.step() == [("a", 1), ("b", 1)]
    assert rig.step() == [("c", 1)]
    rig.drain()
    assert set(rig.ended.values()) == {"length"}


def test_a_request_runs_exactly_prompt_plus_max_tokens_minus_one_tokens():
    for depth in (0, 1, 2):
        rig = Rig(depth=depth, max_step_tokens=5)
        rig.add("a", 7, max_tokens=4)
        scheduled = 0
        while rig.scheduler.num_requests:
            scheduled += sum(n for _, n in rig.plan())
            if len(rig.outstanding) > depth or rig.last.is_empty:
                rig.land()
        assert scheduled == 7 + 4 - 1
        assert not rig.outstanding
        assert len(rig.tokens["a"]) == 4
        assert rig.ended == {"a": "length"}
        assert rig.is_clean()


def test_max_tokens_one_ends_with_the_prefill():
    rig = Rig()
    rig.add("a", 4, max_tokens=1)
    assert rig.step() == [("a", 4)]
    assert rig.ended == {"a": "length"}
    assert rig.tokens["a"] == [500]


def test_a_request_ends_at_the_models_length():
    rig = Rig(max_model_len=10)
    rig.add("a", 8, max_tokens=None)
    rig.drain()
    assert len(rig.tokens["a"]) == 2


def test_seats_bound_the_running():
    rig = Rig(max_running=2)
    for name in "abc":
        rig.add(name, 4, max_tokens=2)
    assert rig.step() == [("a", 4), ("b", 4)]
    assert rig.places()["c"] == "waiting"
    rig.step()
    assert rig.step() == [("c", 4)]


# ---------------------------------------------------------------- chunks


def test_a_long_prompt_is_split_by_the_budget():
    rig = Rig(max_step_tokens=5)
    rig.add("a", 12, max_tokens=1)
    assert rig.drain() == [[("a", 5)], [("a", 5)], [("a", 2)]]


def test_without_chunks_a_prompt_runs_whole_or_waits_and_nobody_passes_it():
    rig = Rig(max_step_tokens=20, max_model_len=20, chunked_prefill=False)
    rig.add("a", 12, max_tokens=2)
    rig.add("b", 12, max_tokens=1)
    rig.add("c", 1, max_tokens=1)
    assert rig.drain() == [[("a", 12)], [("a", 1), ("b", 12), ("c", 1)]]


def test_a_cap_or_alignment_cuts_nothing_when_prompts_run_whole():
    # 18 tokens fit 19, but not the 16 that 19 holds in whole pages: charged by pages it would wait for ever.
    rig = Rig(
        max_step_tokens=19,
        max_model_len=19,
        num_pages=8,
        chunked_prefill=False,
        page_aligned_prefill=True,
        long_prefill_cap=4,
    )
    rig.add("a", 18, max_tokens=1)
    rig.add("b", 7, max_tokens=1)
    assert rig.drain() == [[("a", 18)], [("b", 7)]]


def test_the_long_prefill_cap_leaves_room_for_others_and_is_void_when_alone():
    rig = Rig(max_step_tokens=20, long_prefill_cap=6)
    rig.add("a", 30, max_tokens=1)
    assert rig.step() == [("a", 20)]
    rig.add("b", 9, max_tokens=1)
    assert rig.step() == [("a", 6), ("b", 6)]
    assert rig.step() == [("a", 4), ("b", 3)]


# ---------------------------------------------------------------- gates, resources, orders


def test_an_admission_gate_counts_the_requests_that_may_enter():
    answers = iter([1, 0, OPEN])
    rig = Rig(Extension(admission_gates=[lambda view: next(answers)]))
    for name in "abc":
        rig.add(name, 4, max_tokens=9)
    assert rig.step() == [("a", 4)]
    assert rig.step() == [("a", 1)]
    assert rig.step() == [("a", 1), ("b", 4), ("c", 4)]


def test_several_admission_gates_combine_by_the_smallest():
    rig = Rig(Extension(admission_gates=[lambda view: 2, lambda view: 1, lambda view: OPEN]))
    rig.add("a")
    rig.add("b")
    assert rig.step() == [("a", 4)]


def test_a_closed_prefill_gate_stops_running_prefills_and_admissions_alike():
    is_open = [True]
    rig = Rig(Extension(prefill_gates=[lambda view: OPEN if is_open[0] else 0]), max_step_tokens=6)
    rig.add("a", 4, max_tokens=9)
    rig.add("b", 9)
    assert rig.step() == [("a", 4), ("b", 2)]
    is_open[0] = False
    assert rig.step() == [("a", 1)]
    is_open[0] = True
    assert rig.step() == [("a", 1), ("b", 5)]


def test_the_view_tells_a_gate_what_runs_and_waits():
    views = []
    rig = Rig(Extension(admission_gates=[lambda view: views.append(view) or OPEN]), max_step_tokens=6)
    rig.add("a", 4)
    rig.add("b", 4)
    rig.add("c", 4)
    rig.step()
    rig.step()
    first, second = views
    assert (first.step, first.num_running, first.num_waiting) == (0, 0, 3)
    assert (second.step, second.num_running, second.num_waiting) == (1, 2, 1)
    assert (second.num_decoding, second.num_prefilling, second.num_free_seats) == (1, 1, 6)
    assert [(rank.num_running, rank.num_waiting) for rank in second.ranks] == [(2, 1)]


def test_a_rule_may_bind_no_limit_for_a_step():
    rig = Rig(Extension(limits=[lambda view: None, lambda view: lambda request, n: min(n, 3)]))
    rig.add("a", 7, max_tokens=1)
    assert rig.drain() == [[("a", 3)], [("a", 3)], [("a", 1)]]


def test_limits_cut_one_after_the_other():
    asked = []

    def halve(request, n):
        asked.append(n)
        return n // 2

    rig = Rig(Extension(limits=[lambda view: lambda request, n: min(n, 6), lambda view: halve]))
    rig.add("a", 20)
    assert rig.step() == [("a", 3)]
    assert asked == [6]


def test_a_limit_of_nothing_leaves_the_head_waiting_without_a_seat():
    rig = Rig(Extension(limits=[lambda view: lambda request, n: 0]))
    rig.add("a")
    assert rig.step() == []
    assert rig.places() == {"a": "waiting"}
    assert rig.is_clean() is False
    rig.abort("a")
    assert rig.is_clean()


class Adapters:
    """At most `cap` of a thing, one per request."""

    name = "adapters"

    def __init__(self, cap):
        self.cap = cap
        self.log = []
        self.held = []

    def begin_step(self):
        self.log.append("step")
        return True

    def share(self, request):
        return ""

    def fit(self, request, n):
        return len(self.held) < self.cap

    def take(self, request, n):
        self.log.append(f"take {request.request_id} {n}")
        self.held.append(request.request_id)

    def check(self, request):
        pass

    def give_back(self, request):
        self.log.append(f"give {request.request_id}")
        self.held.remove(request.request_id)


def test_a_resource_is_taken_at_admission_and_given_back_once_at_the_end():
    adapters = Adapters(1)
    rig = Rig(Extension(resources=[adapters]))
    rig.add("a", 6, max_tokens=2)
    rig.add("b", 4, max_tokens=1)
    rig.drain()
    assert adapters.log == ["step", "take a 6", "step", "give a", "step", "take b 4", "give b"]


def test_a_request_without_room_in_a_resource_is_blocked_and_counted_as_waiting():
    rig = Rig(Extension(resources=[Adapters(1)]))
    rig.add("a", 4, max_tokens=2)
    rig.add("b", 4, max_tokens=1)
    rig.step()
    assert rig.places() == {"a": "decoding", "b": "blocked"}
    assert rig.scheduler.load().num_waiting == 1
    assert rig.scheduler.explain("b")[0].held_by == "adapters"
    rig.abort("b")
    rig.drain()
    assert rig.is_clean()


def test_a_resource_is_given_back_at_preemption_and_abort():
    adapters = Adapters(2)
    rig = Rig(Extension(resources=[adapters]), num_pages=3)
    rig.add("a", 4, max_tokens=8)
    rig.add("b", 4, max_tokens=8)
    rig.step()
    assert adapters.held == ["a", "b"]
    rig.steps(5)
    assert rig.requests["b"].num_preemptions == 1
    assert adapters.held == ["a"]
    rig.abort("a")
    assert adapters.held == []
    rig.drain()
    assert adapters.held == []


def test_priority_goes_first_and_ties_fall_to_the_first_come():
    rig = Rig(order="priority", max_running=1)
    rig.add("late", 4, max_tokens=1, priority=1)
    rig.add("first", 4, max_tokens=1, priority=0)
    rig.add("second", 4, max_tokens=1, priority=0)
    assert rig.drain() == [[("first", 4)], [("second", 4)], [("late", 4)]]


def test_any_function_of_a_request_is_an_order():
    rig = Rig(Extension(order=lambda request: (request.num_prompt,)), max_step_tokens=8)
    rig.add("long", 8, max_tokens=1)
    rig.add("short", 2, max_tokens=1)
    rig.add("middle", 5, max_tokens=1)
    assert rig.drain() == [[("short", 2), ("middle", 5), ("long", 1)], [("long", 7)]]


# ---------------------------------------------------------------- pages at admission


def test_reserving_the_whole_prompt_keeps_a_request_out_until_it_fits():
    rig = Rig(num_pages=6, max_step_tokens=8, reserve_full_prompt=True)
    rig.add("a", 8, max_tokens=2)
    rig.add("b", 16, max_tokens=1)
    rig.step()
    assert rig.step() == [("a", 1)]  # 3 pages are left, b needs 4
    assert rig.step() == [("b", 8)]


def test_reserving_the_first_chunk_lets_it_in_at_once():
    rig = Rig(num_pages=6, max_step_tokens=8, reserve_full_prompt=False)
    rig.add("a", 8, max_tokens=2)
    rig.add("b", 16, max_tokens=1)
    rig.step()
    assert rig.step() == [("a", 1), ("b", 7)]


def test_a_watermark_is_left_free_unless_nobody_runs():
    rig = Rig(num_pages=10, watermark=0.5)
    rig.add("a", 24, max_tokens=3)
    rig.add("b", 4, max_tokens=1)
    assert rig.step() == [("a", 24)]  # 6 pages of 10 though 5 are to stay free
    assert rig.step() == [("a", 1)]
    rig.step()
    assert rig.step() == [("b", 4)]


def test_nobody_passes_a_head_that_does_not_fit():
    rig = Rig(num_pages=4)
    rig.add("a", 8, max_tokens=3)
    rig.add("big", 12, max_tokens=1)
    rig.add("small", 1, max_tokens=1)
    assert rig.step() == [("a", 8)]
    assert rig.step() == [("a", 1)]


# ---------------------------------------------------------------- coming and going


def test_a_handle_in_use_is_refused():
    rig = Rig()
    rig.add("a")
    with pytest.raises(InvariantError, match="handle 0 is in use"):
        rig.scheduler.add(make_request(0))


def test_a_request_longer_than_the_pages_is_refused_by_name():
    rig = Rig(num_pages=2)
    assert rig.scheduler.max_model_len == 9
    with pytest.raises(InvalidValueError, match="stops at 12 tokens, at most 9 fit") as refused:
        rig.scheduler.add(make_request(0, 8, max_tokens=4))
    assert refused.value.field == "prompt"
    assert rig.scheduler.num_requests == 0


def test_a_full_queue_refuses_by_requests():
    rig = Rig(max_waiting_reqs=2, max_running=1)
    rig.add("a")
    rig.add("b")
    with pytest.raises(QueueFullError, match="2 requests wait, at most 2 may"):
        rig.add("c")
    rig.step()
    rig.add("c")
    assert rig.scheduler.load().num_waiting == 2


def test_a_full_queue_refuses_by_tokens_but_a_long_prompt_may_wait_alone():
    rig = Rig(max_waiting_tokens=10, max_running=1)
    rig.add("long", 20)
    with pytest.raises(QueueFullError, match="20 tokens wait, at most 10 may"):
        rig.add("b", 1)
    rig.step()
    rig.add("b", 6)
    rig.add("c", 4)
    with pytest.raises(QueueFullError, match="10 tokens wait"):
        rig.add("d", 1)


def test_a_parked_request_runs_once_it_is_woken():
    rig = Rig()
    rig.add("a", 4, max_tokens=1, wait_for="grammar")
    rig.add("b", 4, max_tokens=1)
    assert rig.scheduler.load().num_waiting == 1
    assert rig.step() == [("b", 4)]
    assert not rig.scheduler.has_work
    rig.scheduler.wake(0)
    assert rig.places() == {"a": "waiting"}
    assert rig.step() == [("a", 4)]
    rig.scheduler.wake(0)  # ended: ignored
    assert rig.is_clean()


def test_waking_a_running_request_changes_nothing():
    rig = Rig()
    rig.add("a", 4)
    rig.step()
    rig.scheduler.wake(0)
    assert rig.places() == {"a": "decoding"}
    rig.drain()
    assert rig.is_clean()


def test_deadlines_end_requests_in_any_place():
    rig = Rig(max_running=1)
    rig.add("runs", 4, max_tokens=20, deadline_s=5.0)
    rig.add("waits", 4, deadline_s=3.0)
    rig.add("parked", 4, deadline_s=3.0, wait_for="grammar")
    rig.add("early", 4, deadline_s=1.0)
    rig.abort("early")
    rig.step()
    assert rig.scheduler.next_deadline_s <= 3.0
    rig.clock.advance(2.5)
    assert rig.scheduler.expire() == []
    rig.clock.advance(0.5)
    assert [request.request_id for request in rig.scheduler.expire()] == ["waits", "parked"]
    rig.clock.advance(2.0)
    assert [request.request_id for request in rig.scheduler.expire()] == ["runs"]
    assert rig.scheduler.next_deadline_s is None
    assert rig.is_clean()
    assert rig.scheduler.totals.aborted == 4


def test_many_ended_requests_leave_few_deadlines_behind():
    rig = Rig()
    for i in range(3000):
        rig.add(f"r{i}", 1, deadline_s=1e9 - i)
        rig.abort(f"r{i}")
    rig.add("last", 1, deadline_s=2e9)
    rig.abort("r0")
    rig.clock.advance(1.5e9)
    assert rig.scheduler.expire() == []
    assert rig.scheduler.next_deadline_s == 2e9


def test_pause_new_lets_the_running_finish_and_admits_nobody():
    rig = Rig(max_running=1)
    rig.add("a", 4, max_tokens=2)
    rig.add("b", 4, max_tokens=1)
    rig.step()
    rig.scheduler.pause("new")
    assert rig.scheduler.has_work
    assert rig.step() == [("a", 1)]
    assert not rig.scheduler.has_work
    assert rig.step() == []
    rig.scheduler.resume()
    assert rig.scheduler.has_work
    assert rig.step() == [("b", 4)]


def test_pause_all_reports_no_work():
    rig = Rig()
    rig.add("a")
    rig.step()
    rig.scheduler.pause("all")
    assert rig.scheduler.paused == "all"
    assert not rig.scheduler.has_work
    rig.scheduler.resume()
    assert rig.scheduler.paused == ""
    assert rig.scheduler.has_work


def test_load_and_totals_follow_the_requests():
    rig = Rig(max_running=2)
    for name in "abc":
        rig.add(name, 6, max_tokens=2)
    load = rig.scheduler.load()
    assert (load.num_running, load.num_waiting, load.num_waiting_tokens) == (0, 3, 18)
    rig.step()
    load = rig.scheduler.load()
    assert (load.num_running, load.num_waiting, load.num_waiting_tokens, load.num_used_tokens) == (2, 1, 6, 16)
    assert (load.num_total_tokens, load.max_running) == (256, 2)
    rig.abort("c")
    rig.drain()
    totals = rig.scheduler.totals
    assert (totals.finished, totals.aborted, totals.prompt_tokens, totals.output_tokens) == (2, 1, 12, 4)
    assert (totals.steps, totals.preemptions) == (2, 0)


# ---------------------------------------------------------------- stops


def test_a_stop_token_ends_the_request_and_is_delivered():
    rig = Rig()
    rig.add("a", 4, max_tokens=9, stop_token_ids=(7,))
    rig.step()
    rig.step(a=7)
    assert rig.ended == {"a": "stop"}
    assert rig.tokens["a"] == [500, 7]
    assert rig.is_clean()


def test_the_first_token_may_be_a_stop_token():
    rig = Rig()
    rig.add("a", 4, max_tokens=9, stop_token_ids=(7,))
    rig.step(a=7)
    assert rig.ended == {"a": "stop"}


def test_more_stop_ids_than_the_columns_hold_all_stop_and_leave_with_their_seat():
    ids = tuple(range(10, 31))
    for stop in (10, 17, 18, 30):
        rig = Rig(max_running=1)
        rig.add("a", 4, max_tokens=9, stop_token_ids=ids)
        rig.add("b", 4, max_tokens=3)
        rig.step()
        rig.step(a=stop)
        assert rig.ended == {"a": "stop"}
        rig.step(b=stop)  # the same seat: a's stop ids are gone
        rig.step(b=stop)
        assert "b" not in rig.ended


def test_eos_ids_stop_unless_they_are_ignored():
    rig = Rig()
    rig.add("stops", 4, max_tokens=2, eos_ids=(9,))
    rig.add("ignores", 4, max_tokens=2, eos_ids=(9,), ignore_eos=True)
    rig.step(stops=9, ignores=9)
    assert rig.ended == {"stops": "stop"}


def test_a_stop_token_in_the_last_place_is_a_stop():
    rig = Rig()
    rig.add("a", 4, max_tokens=2, stop_token_ids=(7,))
    rig.step()
    rig.step(a=7)
    assert rig.ended == {"a": "stop"}


# ---------------------------------------------------------------- abort


def test_abort_ends_a_request_in_every_place():
    rig = Rig(max_running=2, max_step_tokens=8)
    rig.add("decoding", 4, max_tokens=9)
    rig.add("prefilling", 20)
    rig.add("waiting", 4)
    rig.add("parked", 4, wait_for="grammar")
    rig.step()
    assert rig.places() == {name: name for name in rig.requests}
    for name in list(rig.requests):
        assert rig.abort(name)
        assert not rig.abort(name)
        assert rig.requests[name].finish_reason == "abort"
        assert rig.requests[name].place == "ended"
    assert rig.is_clean()
    assert rig.step() == []


def test_abort_keeps_the_outputs_known_so_far_and_takes_a_reason():
    rig = Rig()
    request = rig.add("a", 4, max_tokens=9)
    rig.steps(3)
    rig.scheduler.abort(request.handle, "stop")
    assert request.output_ids == [500, 501, 502]
    assert request.finish_reason == "stop"
    assert rig.scheduler.totals.finished == 1


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_rows_in_flight_of_an_aborted_request_are_dropped(depth):
    rig = Rig(depth=depth)
    rig.add("a", 4, max_tokens=9)
    rig.add("b", 4, max_tokens=9)
    for _ in range(depth + 1):
        rig.plan()
    rig.abort("a")
    for i in range(depth + 1):
        assert rig.land() == {"b": 501 + 2 * i}
    assert rig.tokens["a"] == []
    rig.drain()
    assert rig.is_clean()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_draining_request_can_be_aborted(depth):
    rig = Rig(depth=depth)
    rig.add("a", 4, max_tokens=depth + 1)
    for _ in range(depth + 1):
        rig.plan()
    assert rig.places() == {"a": "draining"}
    assert not rig.scheduler.has_work
    rig.abort("a")
    while rig.outstanding:
        assert rig.land() == {}
    assert rig.is_clean()


def test_a_seat_freed_by_an_abort_is_reused_while_its_rows_are_in_flight():
    rig = Rig(depth=1, max_running=1)
    rig.add("a", 4, max_tokens=9)
    rig.plan()
    rig.abort("a")
    rig.add("b", 4, max_tokens=2)
    assert rig.plan() == [("b", 4)]
    assert rig.land() == {}
    assert rig.land() == {"b": 501}


# ---------------------------------------------------------------- asynchronous depth


def test_a_stop_token_is_seen_one_step_late_and_the_surplus_row_is_dropped():
    rig = Rig(depth=1)
    rig.add("a", 4, max_tokens=9, stop_token_ids=(7,))
    rig.plan()
    assert rig.plan() == [("a", 1)]
    assert rig.land(a=7) == {"a": 7}
    assert rig.ended == {"a": "stop"}
    assert rig.plan() == []
    assert rig.land() == {}
    assert rig.tokens["a"] == [7]
    assert rig.is_clean()


def test_no_step_is_planned_once_the_length_is_certain():
    rig = Rig(depth=2)
    rig.add("a", 4, max_tokens=2)
    assert rig.plan() == [("a", 4)]
    assert rig.plan() == [("a", 1)]
    assert rig.plan() == []
    assert rig.places() == {"a": "draining"}
    assert rig.land() == {"a": 500}
    assert rig.land() == {"a": 501}
    assert rig.ended == {"a": "length"}


def test_a_stop_token_ends_a_draining_request():
    rig = Rig(depth=1)
    rig.add("a", 4, max_tokens=2, stop_token_ids=(7,))
    rig.plan()
    rig.plan()
    assert rig.land(a=7) == {"a": 7}
    assert rig.ended == {"a": "stop"}
    assert rig.land() == {}
    assert rig.is_clean()


def test_planning_further_than_the_depth_lets_decodes_sit_out():
    rig = Rig(depth=0)
    rig.add("a", 4, max_tokens=9)
    rig.plan()
    rig.add("b", 4)
    assert rig.plan() == [("b", 4)]
    rig.land()
    assert rig.plan() == [("a", 1)]


def test_the_columns_name_each_row_of_a_plan():
    rig = Rig(depth=1, max_step_tokens=8)
    rig.add("a", 4, max_tokens=9)
    rig.add("b", 7, max_tokens=9)
    rig.plan()
    rig.plan()
    plan = rig.last
    a, b = rig.requests["a"], rig.requests["b"]
    assert plan.decode_seats.tolist() == [a.seat]
    assert plan.decode_starts.tolist() == [4]
    assert [(row.request, row.seat, row.start, row.n, row.samples) for row in plan.prefills] == [
        (b, b.seat, 4, 3, True)
    ]
    assert plan.sampled_seats.tolist() == [a.seat, b.seat]
    assert plan.sampled_handles.tolist() == [a.handle, b.handle]
    assert plan.sampled_at.tolist() == [5, 7]
    assert plan.seated == []
    assert (plan.num_tokens, plan.num_prefill_tokens) == (4, 3)
    assert plan.decode_seats.dtype == np.int64
    assert plan.sampled_handles.dtype == np.int64


def test_an_empty_plan_counts_no_step():
    rig = Rig()
    assert rig.step() == []
    assert rig.last.is_empty
    rig.add("a", 4, max_tokens=1)
    rig.step()
    assert rig.last.step == 0
    assert rig.scheduler.totals.steps == 1
