"""Why a request waits, and the ring of past decisions."""

from __future__ import annotations

import msgspec
from tests.sched.rig import Rig

from equipoise.sched.extend import Extension
from equipoise.sched.resources import LoraSlots


def why(rig, name):
    (explanation,) = rig.scheduler.explain(name)
    return explanation


def test_the_head_tells_its_rule_and_since_when_and_the_others_their_turn():
    rig = Rig(max_running=1)
    rig.clock.advance(10.0)
    for name in "abc":
        rig.add(name, 4, max_tokens=9)
    rig.step()
    rig.clock.advance(2.0)
    rig.step()
    assert (why(rig, "a").place, why(rig, "a").held_by, why(rig, "a").num_output) == ("decoding", "", 2)
    assert (why(rig, "b").held_by, why(rig, "b").held_for_s, why(rig, "b").num_ahead) == ("max_running", 2.0, 0)
    assert (why(rig, "c").held_by, why(rig, "c").head_held_by, why(rig, "c").num_ahead) == ("order", "max_running", 1)
    assert rig.scheduler.explain("unknown") == []


def test_a_gate_a_pause_and_an_event_are_named():
    rig = Rig(Extension(admission_gates=[lambda _view: 0]))
    rig.add("a", 4)
    rig.add("b", 4, wait_for="grammar")
    rig.step()
    assert why(rig, "a").held_by.startswith("test_a_gate_a_pause")  # where the rule was made
    assert why(rig, "b").held_by == "grammar"
    rig.scheduler.pause("new")
    rig.step()
    assert why(rig, "a").held_by == "pause"


def test_a_parked_and_a_blocked_request_tell_since_when():
    rig = Rig(Extension(resources=[LoraSlots(1)]))
    rig.add("a", 4, max_tokens=1, lora="x")
    rig.add("b", 4, max_tokens=9, lora="x")
    rig.add("c", 4, lora="y")
    rig.add("d", 4, wait_for="grammar")
    assert why(rig, "d").held_for_s == 0.0
    rig.step()
    rig.clock.advance(2.0)
    rig.step()  # "a" has ended: who is blocked may be asked again, which is no new wait
    assert (why(rig, "c").held_by, why(rig, "c").held_for_s) == ("lora y", 2.0)
    assert (why(rig, "d").held_by, why(rig, "d").held_for_s) == ("grammar", 2.0)
    rig.scheduler.wake(next(r.handle for r in rig.scheduler.requests() if r.request_id == "d"))
    rig.step()
    assert (why(rig, "d").place, why(rig, "d").held_for_s) == ("decoding", None)


def test_the_trace_keeps_the_last_decisions():
    rig = Rig(trace_steps=2, max_running=1)
    rig.add("a", 6, max_tokens=3)
    rig.add("b", 4)
    rig.steps(2)
    first, second = rig.scheduler.trace.decisions()
    assert (first.step, first.chunks, first.admitted, first.held_by) == (0, {"a": (0, 6)}, ["a"], "max_running")
    assert (second.step, second.num_decodes, second.chunks, second.num_waiting) == (1, 1, {}, 1)
    rig.step()
    assert [decision["step"] for decision in msgspec.json.decode(rig.scheduler.trace.to_json())] == [1, 2]


def test_a_newcomer_that_a_limit_leaves_no_token_is_held_by_that_limit():
    rig = Rig(chunked_prefill=False, max_model_len=20, max_step_tokens=20)
    rig.add("first", 15, max_tokens=4)
    rig.add("second", 15, max_tokens=1)
    rig.plan()
    assert rig.scheduler.explain("second")[0].held_by == "whole_prompts"
