"""Prompts that arrive in pieces, and a flush that starts the running anew."""

from __future__ import annotations

import numpy as np
import pytest
from tests.sched.rig import Rig

from equipoise.errors import InvalidValueError, InvariantError
from equipoise.sched.drafts import NgramDrafter
from equipoise.sched.extend import Extension


def extend(rig, name, tokens):
    rig.scheduler.extend_prompt(rig.requests[name].handle, np.array(tokens, np.int32))


# ---------------------------------------------------------------- prompts in pieces


def test_pieces_make_one_prompt_that_runs_when_it_is_woken():
    rig = Rig()
    request = rig.add("a", [1, 2, 3], max_tokens=2, wait_for="input")
    assert rig.step() == []
    assert rig.scheduler.explain("a")[0].held_by == "input"
    extend(rig, "a", [4, 5])
    extend(rig, "a", [6])
    assert request.prompt_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert rig.scheduler.load().num_waiting_tokens == 0
    rig.scheduler.wake(request.handle)
    assert rig.scheduler.load().num_waiting_tokens == 6
    assert rig.drain() == [[("a", 6)], [("a", 1)]]


def test_pieces_share_the_pages_of_a_whole_prompt():
    rig = Rig(prefix_cache=True)
    rig.add("whole", list(range(12)), max_tokens=1)
    rig.step()
    rig.add("pieces", [0, 1, 2], max_tokens=1, wait_for="input")
    extend(rig, "pieces", [3, 4, 5, 6])
    extend(rig, "pieces", [7, 8, 99])
    rig.scheduler.wake(1)
    assert rig.step() == [("pieces", 2)]


@pytest.mark.parametrize(
    ("max_tokens", "before", "after"),
    [(4, 8, 18), (None, 40, 40), (36, 40, 40), (32, 36, 40)],
)
def test_outputs_move_with_the_prompt_up_to_the_models_length(max_tokens, before, after):
    rig = Rig(max_model_len=40)
    request = rig.add("a", 4, max_tokens, wait_for="input")
    assert request.stop_len == before
    extend(rig, "a", range(10))
    assert request.stop_len == after


def test_a_prompt_that_grows_too_long_is_refused_and_stays_as_it_was():
    rig = Rig(max_model_len=40)
    request = rig.add("a", 4, 4, wait_for="input")
    extend(rig, "a", range(35))
    with pytest.raises(InvalidValueError, match="prompt: 40 tokens, at most 39") as refused:
        extend(rig, "a", [1])
    assert refused.value.field == "prompt"
    assert request.num_prompt == 39
    rig.scheduler.wake(0)
    rig.drain()
    assert len(rig.tokens["a"]) == 1


@pytest.mark.parametrize("place", ["waiting", "decoding"])
def test_a_request_that_was_woken_takes_no_more_input(place):
    rig = Rig()
    rig.add("a", 4, wait_for="input")
    rig.scheduler.wake(0)
    if place == "decoding":
        rig.step()
    with pytest.raises(InvariantError, match="takes no more input"):
        extend(rig, "a", [1])


def test_input_for_a_request_that_ended_is_ignored():
    rig = Rig()
    rig.add("a", 4, wait_for="input")
    rig.abort("a")
    extend(rig, "a", [1])
    assert rig.is_clean()


# ---------------------------------------------------------------- flush


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_flush_with_preemption_starts_anew_and_keeps_the_outputs(depth):
    rig = Rig(prefix_cache=True, depth=depth)
    rig.add("a", 8, max_tokens=6)
    rig.add("b", 9, max_tokens=6)
    for _ in range(depth + 1):
        rig.plan()
    rig.land()
    assert rig.scheduler.flush_cache(preempt_running=True) >= 4
    assert rig.free == 64
    assert set(rig.places().values()) == {"returning" if depth else "waiting"}
    while rig.outstanding:
        rig.land()
    known = dict.fromkeys("ab", 1 + depth)
    assert rig.step() == [("a", 8 + known["a"]), ("b", 9 + known["b"])]
    rig.drain()
    assert {name: len(tokens) for name, tokens in rig.tokens.items()} == {"a": 6, "b": 6}
    assert rig.scheduler.totals.preemptions == 2
    assert rig.is_clean()


def test_a_flush_with_preemption_ends_no_chunk_halfway():
    rig = Rig(max_step_tokens=8)
    rig.add("a", 20, max_tokens=1)
    rig.step()
    rig.scheduler.flush_cache(preempt_running=True)
    assert rig.drain() == [[("a", 8)], [("a", 8)], [("a", 4)]]


def test_a_row_to_verify_comes_back_before_its_request_starts_anew():
    rig = Rig(Extension(drafter=NgramDrafter(2)), depth=1)
    rig.add("a", [5, 6, 7, 5, 6, 7, 5, 6], max_tokens=9)
    rig.plan()
    rig.scheduler.flush_cache(preempt_running=True)
    assert rig.places() == {"a": "verifying"}
    rig.land()
    assert rig.places() == {"a": "waiting"}
    assert rig.step() == [("a", 9)]


@pytest.mark.parametrize("depth", [1, 2])
def test_pages_computed_before_a_flush_are_never_found_after_it(depth):
    rig = Rig(prefix_cache=True, depth=depth)
    rig.add("a", [0, 1, 2, 3, 4, 5], max_tokens=1 + depth)
    for _ in range(depth + 1):
        rig.plan()
    assert rig.places() == {"a": "draining"}
    rig.scheduler.flush_cache(preempt_running=True)
    rig.land(a=6)
    while rig.outstanding:
        rig.land(a=7)
    rig.add("b", [0, 1, 2, 3], max_tokens=1)
    rig.drain()  # the first page is there again
    rig.add("c", [0, 1, 2, 3, 4, 5, 6, 7, 8], max_tokens=1)
    rig.step()
    assert rig.requests["c"].num_cached == 4  # not 8: a's second page is of before the flush
