"""What a rank tells the others: counters of what it could prefill, and how long its last step took."""

from __future__ import annotations

import pytest
from tests.sched.rig import Rig

from equipoise.sched.extend import Extension
from equipoise.sched.rules import RankState


def closed(_view):
    return 0


def test_what_waits_is_told_as_far_as_seats_go():
    rig = Rig(Extension(admission_gates=[closed]), max_running=2)
    for name, prompt in (("a", 6), ("b", 8), ("c", 10)):
        rig.add(name, prompt)
    rig.step()
    state = rig.scheduler.state()
    assert (state.num_running, state.num_waiting, state.wants_prefill) == (0, 3, True)
    assert (state.num_admissible, state.next_tokens, state.admissible_tokens) == (2, 6, 15)
    assert state.prefill_tokens == 15


@pytest.mark.parametrize(("num_pages", "expected"), [(64, 3), (5, 2), (4, 1), (2, 0)])
def test_what_waits_is_told_as_far_as_pages_go(num_pages, expected):
    rig = Rig(num_pages=num_pages, max_model_len=12)
    for name in "abc":
        rig.add(name, 8, max_tokens=1)
    assert rig.scheduler.state().num_admissible == expected


def test_a_step_bounds_what_it_would_prefill_and_decodes_go_first():
    rig = Rig(max_step_tokens=10)
    rig.add("a", 4, max_tokens=9)
    rig.step()
    rig.add("b", 20)
    assert rig.scheduler.state().prefill_tokens == 9
    rig.step()
    state = rig.scheduler.state()
    assert (state.prefilling_tokens, state.prefill_tokens) == (11, 9)
    assert (state.num_admissible, state.admissible_tokens) == (0, 0)


def test_who_is_paused_could_admit_nobody():
    rig = Rig()
    rig.add("a", 4)
    rig.scheduler.pause("new")
    assert rig.scheduler.state().num_admissible == 0
    rig.scheduler.resume()
    assert rig.scheduler.state().num_admissible == 1


def test_whom_the_last_plan_admitted_is_told():
    rig = Rig(max_running=2)
    for name in "abc":
        rig.add(name, 4)
    assert rig.scheduler.state().num_admitted == 0
    rig.step()
    assert rig.scheduler.state().num_admitted == 2
    rig.step()
    assert rig.scheduler.state().num_admitted == 0


def test_a_rank_with_nothing_to_plan_shows_the_step_to_its_gates():
    seen = []

    def gate(view):
        seen.append(view.ranks)
        return 0

    rig = Rig(Extension(prefill_gates=[gate], admission_gates=[gate]))
    rig.scheduler.look((rig.scheduler.state(), RankState(3, 2)))
    assert [ranks[1].num_running for ranks in seen] == [3, 3]


def test_admission_gates_are_asked_when_prefill_is_closed_and_while_paused():
    seen = []
    rig = Rig(Extension(prefill_gates=[closed], admission_gates=[lambda view: seen.append(view.step) or 1]))
    rig.add("a", 4)
    rig.step()
    rig.scheduler.pause("new")
    rig.step()
    assert len(seen) == 2


def step(rig, seconds):
    rig.plan()
    rig.clock.move_to(rig.clock.now() + seconds)
    rig.land()


def test_the_last_step_is_told_until_the_next_is_planned():
    rig = Rig()
    rig.add("a", 6)
    assert rig.scheduler.state().step_s == 0.0
    rig.clock.move_to(5.0)  # idle until here
    step(rig, 0.5)
    state = rig.scheduler.state()
    assert (state.step_s, state.step_prefill_tokens) == (0.5, 6)
    step(rig, 0.25)
    state = rig.scheduler.state()
    assert (state.step_s, state.step_prefill_tokens) == (0.25, 0)
    rig.plan()
    assert rig.scheduler.state().step_s == 0.0
    rig.land()


def test_steps_planned_ahead_last_from_landing_to_landing():
    rig = Rig(depth=1)
    rig.add("a", 6, max_tokens=5)
    rig.plan()
    rig.clock.move_to(1.0)
    rig.plan()
    rig.clock.move_to(4.0)
    rig.land()
    assert rig.scheduler.state().step_s == 4.0
    rig.clock.move_to(4.5)
    rig.plan()
    rig.clock.move_to(6.0)
    rig.land()
    assert rig.scheduler.state().step_s == 2.0


def test_time_in_which_nothing_could_run_belongs_to_no_step():
    gate = {"is_open": True}
    rig = Rig(Extension(admission_gates=[lambda _: int(gate["is_open"])]))
    rig.add("a", 4, max_tokens=1)
    step(rig, 1.0)
    gate["is_open"] = False
    rig.add("b", 4)
    rig.step()
    rig.clock.move_to(9.0)
    gate["is_open"] = True
    step(rig, 2.0)
    assert rig.scheduler.state().step_s == 2.0


def test_rows_that_verify_drafts_are_no_prefill():
    rig = Rig(num_drafts=2)
    rig.add("a", [1, 2, 3, 1, 2, 3, 1, 2], max_tokens=20)
    rig.step(a=3)
    assert rig.scheduler.state().step_prefill_tokens == 8
    rig.step()
    assert rig.scheduler.state().step_prefill_tokens == 0
