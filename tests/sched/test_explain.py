"""The ring of past decisions."""

from __future__ import annotations

import json

import msgspec
import pytest
from tests.sched.rig import Rig

from equipoise.sched.explain import Decision
from equipoise.sched.extend import Extension
from equipoise.sched.rules import OPEN


class Door:
    """An admission gate that a test opens and shuts."""

    def __init__(self):
        self.allowed = 0

    def __call__(self, view):
        return self.allowed


def rows(rig):
    """The trace: (requests that ran, waiting, repeats)."""
    return [
        (kept.num_decodes + len(kept.chunks), kept.num_waiting, kept.repeats)
        for kept in rig.scheduler.trace.decisions()
    ]


def test_a_held_queue_is_one_row_however_long_it_is_held():
    door = Door()
    rig = Rig(Extension(admission_gates=[door]), trace_steps=8)
    rig.add("a", max_tokens=3)
    rig.steps(100)
    [held] = rig.scheduler.trace.decisions()
    assert (held.held_by, held.num_waiting, held.repeats) == ("Door", 1, 99)
    rig.add("b")
    rig.steps(10)
    assert rows(rig) == [(0, 1, 99), (0, 2, 9)], "another queue is another row"
    assert json.loads(rig.scheduler.trace.to_json())[1]["repeats"] == 9
    door.allowed = OPEN
    rig.step()
    assert rows(rig)[2] == (2, 2, 0)


def test_steps_in_which_something_ran_are_never_merged():
    rig = Rig(trace_steps=8)
    rig.add("a", max_tokens=5)
    rig.steps(5)
    assert [(ran, repeats) for ran, _, repeats in rows(rig)] == [(1, 0)] * 5
    assert "repeats" not in json.loads(rig.scheduler.trace.to_json())[0], "only what was repeated says so"


def test_a_step_that_ran_something_stands_between():
    door = Door()
    rig = Rig(Extension(admission_gates=[door]), trace_steps=8)
    for name in ("a", "b"):
        door.allowed = 0
        rig.add(name, max_tokens=1)
        rig.steps(2)
        door.allowed = OPEN
        rig.step()
    assert rows(rig) == [(0, 1, 1), (1, 1, 0)] * 2


def test_the_ring_keeps_the_latest():
    rig = Rig(trace_steps=3)
    rig.add("a", max_tokens=9)
    rig.steps(9)
    steps = [kept.step for kept in rig.scheduler.trace.decisions()]
    assert steps == [6, 7, 8]


HELD = Decision(step=3, at_s=1.0, num_decodes=0, num_waiting=2, num_free_seats=4, held_by="gate")


@pytest.mark.parametrize(
    "change",
    [
        {"num_decodes": 1},
        {"chunks": {"a": (0, 4)}},
        {"admitted": ["a"]},
        {"preempted": ["a"]},
        {"num_waiting": 3},
        {"num_free_seats": 5},
        {"held_by": "pages"},
    ],
)
def test_what_makes_another_row(change):
    other = msgspec.structs.replace(HELD, **change)
    assert not other.is_again(HELD)
    assert not HELD.is_again(other)
    assert msgspec.structs.replace(HELD, step=4, at_s=2.0, repeats=7).is_again(HELD)
