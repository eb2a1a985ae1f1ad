"""Page-aligned prefill: chunks end on page boundaries, are charged by pages, and always get there."""

from __future__ import annotations

import pytest
from tests.sched.rig import Rig


def aligned(**settings):
    return Rig(page_aligned_prefill=True, page_size=8, **settings)


def test_a_chunk_that_is_not_the_last_ends_on_a_page():
    rig = aligned(max_step_tokens=20)
    rig.add("a", 37, max_tokens=1)
    assert rig.drain() == [[("a", 16)], [("a", 16)], [("a", 5)]]


def test_the_boundary_is_counted_from_the_start_of_the_prompt_after_a_prefix_hit():
    rig = aligned(max_step_tokens=16, prefix_cache=True)
    shared = list(range(8))
    rig.add("a", shared, max_tokens=1)
    rig.step()
    rig.add("b", [*shared, *range(100, 130)], max_tokens=1)
    assert rig.step() == [("b", 16)]
    assert rig.last.prefills[0].start == 8
    assert rig.step() == [("b", 14)]


def test_chunks_are_charged_by_whole_pages():
    # 3 + 12 tokens are 15 of 24, but 8 + 16 charged: nothing is left for c
    rig = aligned(max_step_tokens=24)
    rig.add("a", 3, max_tokens=1)
    rig.add("b", 12, max_tokens=1)
    rig.add("c", 1, max_tokens=1)
    assert rig.drain() == [[("a", 3), ("b", 12)], [("c", 1)]]


def test_the_last_chunk_is_not_cut_for_alignment():
    rig = aligned(max_step_tokens=16)
    rig.add("a", 13, max_tokens=1)
    assert rig.drain() == [[("a", 13)]]


def test_decodes_take_single_tokens_of_the_budget_and_chunks_the_pages_that_are_left():
    rig = aligned(max_step_tokens=17)
    rig.add("a", 8, max_tokens=9)
    rig.step()
    rig.add("b", 30, max_tokens=1)
    assert rig.step() == [("a", 1), ("b", 16)]
    rig.add("c", 8, max_tokens=9)
    assert rig.step() == [("a", 1), ("b", 14)]
    assert rig.step() == [("a", 1), ("c", 8)]
    # two decodes leave 15: one page
    rig.add("d", 30, max_tokens=1)
    assert rig.step() == [("a", 1), ("c", 1), ("d", 8)]


@pytest.mark.parametrize("cap", [1, 7, 8, 9, 15])
def test_a_cap_is_rounded_to_whole_pages_and_never_stalls(cap):
    rig = aligned(long_prefill_cap=cap, max_step_tokens=64)
    rig.add("a", 30, max_tokens=1)
    rig.add("b", 30, max_tokens=1)
    assert rig.step() == [("a", 8), ("b", 8)]
    rig.drain()
    assert rig.ended == {"a": "length", "b": "length"}


def test_a_budget_smaller_than_a_page_still_makes_progress():
    rig = aligned(max_step_tokens=5)
    rig.add("a", 12, max_tokens=3)
    rig.add("b", 12, max_tokens=3)
    assert rig.step() == [("a", 5)]
    rig.drain()
    assert rig.ended == {"a": "length", "b": "length"}


def test_a_page_of_budget_used_by_decodes_delays_prefill_until_they_end():
    rig = aligned(max_step_tokens=8)
    rig.add("a", 8, max_tokens=3)
    rig.add("b", 20, max_tokens=1)
    assert rig.drain() == [[("a", 8)], [("a", 1)], [("a", 1)], [("b", 8)], [("b", 8)], [("b", 4)]]


def test_a_resumed_request_is_aligned_over_its_outputs_too():
    rig = aligned(max_step_tokens=16, num_pages=4)
    rig.add("a", 7, max_tokens=18)
    rig.add("b", 7, max_tokens=18)
    rows = rig.drain()
    assert rig.requests["b"].num_preemptions == 1
    # b comes back with 7 prompt tokens and the outputs it had
    resumed = [n for step in rows for name, n in step if name == "b" and n > 1]
    assert resumed[0] == 7
    assert all(n % 8 == 0 for n in resumed[1:-1])
    assert len(rig.tokens["b"]) == 18
