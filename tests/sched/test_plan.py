"""A plan: its one undo."""

from __future__ import annotations

import numpy as np
from tests.sched.rig import make_request

from equipoise.sched.plan import PrefillRow, StepPlan


def seated(handle, seat):
    request = make_request(handle)
    request.seat = seat
    return request


def test_drop_takes_back_every_row_of_a_request_and_says_what_they_were():
    a, b, c = (seated(i, i) for i in range(3))
    plan = StepPlan(step=5)
    plan.decode_seats = np.array([0, 1])
    plan.prefills = [PrefillRow(c, 2, 0, 7, samples=False)]
    assert plan.drop(b) == (1, 0)
    assert plan.decode_seats.tolist() == [0]
    assert plan.drop(b) == (0, 0)
    assert plan.drop(c) == (0, 7)
    assert plan.prefills == []
    assert plan.drop(a) == (1, 0)
    assert len(plan.decode_seats) == 0


def test_a_new_plan_is_empty():
    plan = StepPlan(step=0)
    assert plan.is_empty
    assert plan.num_prefill_tokens == 0
