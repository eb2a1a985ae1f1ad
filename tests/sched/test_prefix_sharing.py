"""Who shares whose pages, and when a page becomes matchable."""

from __future__ import annotations

import pytest
from tests.sched.rig import Rig

SHARED = list(range(50, 62))
"""Three pages of 4."""


def sharing(**settings):
    return Rig(prefix_cache=True, **settings)


def test_a_cached_prompt_is_not_computed_again_but_for_its_last_token():
    rig = sharing()
    rig.add("a", SHARED, max_tokens=1)
    rig.step()
    rig.add("b", SHARED, max_tokens=1)
    assert rig.step() == [("b", 4)]  # two pages are shared, the last must be computed: it draws the token
    assert rig.requests["b"].num_cached == 8
    rig.add("c", [*SHARED, 7], max_tokens=1)
    assert rig.step() == [("c", 1)]
    assert rig.requests["c"].num_cached == 12
    assert rig.scheduler.totals.cached_tokens == 20


def test_two_requests_admitted_in_one_step_compute_their_prefix_once():
    rig = sharing()
    rig.add("a", [*SHARED, 1], max_tokens=9)
    rig.add("b", [*SHARED, 2, 3], max_tokens=9)
    assert rig.step() == [("a", 13), ("b", 2)]
    a, b = rig.requests["a"], rig.requests["b"]
    assert a.pages[:3] == b.pages[:3]
    assert a.pages[3] != b.pages[3]
    assert rig.free == 64 - 5


def test_a_chunk_shares_only_the_pages_that_it_fills():
    rig = sharing(max_step_tokens=10)
    rig.add("a", [*SHARED, 1], max_tokens=2)
    rig.step()
    rig.add("b", [*SHARED, 2], max_tokens=2)
    # a's chunk of 10 filled two pages, its next one fills the third in this very step
    assert rig.step() == [("a", 3), ("b", 1)]


@pytest.mark.parametrize("difference", [{"cache_salt": "other"}, {"lora": "adapter"}])
def test_salts_and_adapters_never_share(difference):
    rig = sharing()
    rig.add("a", SHARED, max_tokens=1)
    rig.step()
    rig.add("b", SHARED, max_tokens=1, **difference)
    assert rig.step() == [("b", 12)]
    rig.add("c", SHARED, max_tokens=1, **difference)
    assert rig.step() == [("c", 4)]


def test_no_salt_can_pass_for_an_adapter():
    rig = sharing()
    rig.add("a", SHARED, max_tokens=1, lora="adapter")
    rig.step()
    for i, salt in enumerate(["adapter", "\0adapter", "adapter\0", "adapter\0\0"]):
        rig.add(f"b{i}", SHARED, max_tokens=1, cache_salt=salt)
        assert rig.step() == [(f"b{i}", 12)]


def test_prompt_logprobs_compute_every_token_and_still_share_afterwards():
    rig = sharing()
    rig.add("a", SHARED, max_tokens=1)
    rig.step()
    rig.add("b", SHARED, max_tokens=1, prompt_logprobs=0)
    assert rig.step() == [("b", 12)]
    assert rig.requests["b"].num_cached == 0


def test_generated_tokens_are_matchable_once_they_are_known():
    rig = sharing(depth=1)
    rig.add("a", 4, max_tokens=20)
    rig.plan()
    for i in range(4):
        rig.plan()
        rig.land(a=70 + i)
    # [4, 8) is planned to the end, but the token at 7 is drawn by a step that is still outstanding
    prompt = rig.requests["a"].prompt_ids.tolist()
    rig.add("early", [*prompt, 70, 71, 72, 73, 9], max_tokens=1)
    rig.plan()
    assert rig.requests["early"].num_cached == 4
    rig.land(a=74)
    rig.add("late", [*prompt, 70, 71, 72, 73, 9], max_tokens=1)
    rig.plan()
    assert rig.requests["late"].num_cached == 8
    rig.drain()
    assert rig.is_clean()


def test_the_page_of_a_surplus_row_is_never_matched():
    rig = sharing(depth=1)
    rig.add("a", 3, max_tokens=20, stop_token_ids=(9,))
    rig.plan()
    rig.plan()  # fills the page with the stop token, seen late
    rig.land(a=9)
    rig.land()
    assert rig.ended == {"a": "stop"}
    prompt = rig.requests["a"].prompt_ids.tolist()
    rig.add("b", [*prompt, 9, 1], max_tokens=1)
    assert rig.step() == [("b", 5)]


def test_a_preempted_request_finds_its_own_pages():
    rig = sharing(num_pages=6)
    rig.add("a", 8, max_tokens=9)
    rig.add("b", 12, max_tokens=4)
    rig.step()
    assert rig.step() == [("a", 1)]  # a's third page is the last but one, b needs one too: none is left
    assert rig.places()["b"] == "waiting"
    rows = rig.drain()
    assert rig.requests["b"].num_preemptions == 1
    # 13 tokens are to be there again; what was not evicted meanwhile is not computed again
    assert sum(n for step in rows for name, n in step if name == "b") < 13 + 3
    assert rig.requests["b"].num_cached == 0  # what a user is told counts the first admission


def test_flush_while_running_makes_owned_pages_private_and_harms_nobody():
    rig = sharing()
    rig.add("done", 12, max_tokens=1)
    rig.step()
    rig.add("a", SHARED, max_tokens=9)
    rig.step()
    assert rig.scheduler.flush_cache() == 3
    rig.add("b", SHARED, max_tokens=1)
    assert rig.step() == [("a", 1), ("b", 12)]
    rig.drain()
    assert rig.is_clean()
    rig.add("c", SHARED, max_tokens=1)
    assert rig.step() == [("c", 4)]


def test_an_aborted_requests_pages_stay_cached():
    rig = sharing(depth=1)
    rig.add("a", [*SHARED, 1], max_tokens=9)
    rig.plan()
    rig.abort("a")
    rig.add("b", [*SHARED, 2], max_tokens=1)
    assert rig.plan() == [("b", 1)]


def test_a_watermark_counts_cached_pages_as_free():
    rig = sharing(num_pages=10, watermark=0.3)
    rig.add("a", 4, max_tokens=20)
    rig.add("old", 20, max_tokens=1)
    rig.step()
    assert rig.free == 9
    rig.add("b", 20, max_tokens=1)
    assert ("b", 20) in rig.step()
