"""The waiting queue against a sorted list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.sched.rig import make_request

from equipoise.sched.orders import fcfs
from equipoise.sched.waiting import COMPACT_AT, WaitingQueue


def test_ties_fall_to_the_smaller_handle():
    queue = WaitingQueue(fcfs)
    for handle in (2, 0, 1):
        queue.push(make_request(handle, arrival_s=1.0))
    assert queue.head().handle == 0


def test_a_request_can_leave_and_come_back():
    queue = WaitingQueue(fcfs)
    requests = [make_request(handle) for handle in range(3)]
    for request in requests:
        queue.push(request)
    queue.remove(requests[1])
    queue.push(requests[1])
    queue.remove(requests[0])
    assert queue.head() is requests[1]
    assert len(queue) == 2
    assert queue.head_key() == ((1.0,), 1)
    assert queue.num_ahead(requests[2]) == 1
    assert queue.num_ahead(requests[1]) == 0


def test_an_empty_queue_has_no_head():
    queue = WaitingQueue(fcfs)
    assert queue.head() is None
    queue.push(make_request(0))
    queue.remove(queue.head())
    assert queue.head() is None
    assert list(queue) == []


def test_those_who_left_do_not_pile_up():
    queue = WaitingQueue(fcfs)
    queue.push(make_request(0))
    for handle in range(1, 10 * COMPACT_AT):
        request = make_request(handle)
        queue.push(request)
        queue.remove(request)
    assert len(queue._heap) <= 2 * len(queue) + COMPACT_AT + 1


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 200)), max_size=300))
def test_the_head_is_the_smallest_that_waits(script):
    queue = WaitingQueue(fcfs)
    waiting = []
    for handle, (leaves, arrival, which) in enumerate(script):
        if leaves and waiting:
            queue.remove(waiting.pop(which % len(waiting)))
        else:
            waiting.append(make_request(handle, arrival_s=float(arrival)))
            queue.push(waiting[-1])
        expected = min(waiting, key=lambda r: (r.arrival_s, r.handle), default=None)
        assert queue.head() is expected
        assert len(queue) == len(waiting)
        assert {request.handle for request in queue} == {request.handle for request in waiting}
