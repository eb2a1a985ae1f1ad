"""Encoder items: a budget per step, a cache that requests share, and chunks cut before what has no room."""

from __future__ import annotations

import pytest
from tests.sched.rig import Rig, make_request

from equipoise.errors import InvalidValueError
from equipoise.request import EncoderItem
from equipoise.sched.encoder import EncoderCache
from equipoise.sched.extend import Extension


def encoder_rig(budget, num_cache_tokens, extension=None, **settings):
    whole = settings.get("chunked_prefill") is False
    cache = EncoderCache(budget, num_cache_tokens, whole_prompts=whole)
    own = Extension(resources=[cache], limits=[cache.limit_rule])
    rig = Rig(own.and_then(extension or Extension()), **settings)
    rig.cache = cache
    return rig


def items(*triples):
    return tuple(EncoderItem(*triple) for triple in triples)


def add(rig, name, prompt, *triples, **more):
    return rig.add(name, prompt, max_tokens=more.pop("max_tokens", 1), encoder_items=items(*triples), **more)


# ---------------------------------------------------------------- what can never fit


@pytest.mark.parametrize(
    ("triples", "settings", "message"),
    [
        ([(0, 5, "x")], {}, "an input of 5 embeddings, at most 4 are allowed"),
        ([(0, 4, "x"), (4, 5, "y")], {}, "an input of 5 embeddings, at most 4 are allowed"),
        ([(0, 3, "x"), (3, 3, "y")], {"chunked_prefill": False, "max_step_tokens": 128}, "inputs of 6 embeddings"),
        ([(3, 3, "y"), (0, 4, "x")], {}, "inputs at positions 0 to 4 and 3 overlap"),
    ],
)
def test_what_could_never_be_encoded_is_refused_when_it_is_added(triples, settings, message):
    rig = encoder_rig(4, 6, **settings)
    with pytest.raises(InvalidValueError, match=message) as refused:
        add(rig, "a", 20, *triples)
    assert refused.value.field == "prompt"
    assert rig.scheduler.num_requests == 0
    add(rig, "b", 20, (0, 4, "x"))
    rig.drain()
    assert rig.ended == {"b": "length"}


# ---------------------------------------------------------------- budget


def test_a_chunk_ends_before_an_item_that_the_steps_budget_does_not_hold():
    rig = encoder_rig(6, 100)
    add(rig, "a", 20, (2, 4, "x"), (10, 4, "y"))
    assert rig.drain() == [[("a", 10)], [("a", 10)]]


def test_the_budget_is_one_for_all_requests_of_a_step():
    rig = encoder_rig(6, 100)
    add(rig, "a", 8, (2, 4, "x"))
    add(rig, "b", 8, (2, 4, "y"))
    assert rig.drain() == [[("a", 8), ("b", 2)], [("b", 6)]]


def test_an_item_is_encoded_whole_even_when_the_chunk_ends_inside_it():
    rig = encoder_rig(6, 6, max_step_tokens=4)
    add(rig, "a", 12, (2, 6, "x"))
    rig.step()
    assert rig.cache.is_cached("x")
    add(rig, "b", 4, (0, 1, "y"))
    assert rig.drain() == [[("a", 4)], [("a", 4)], [("b", 4)]]


def test_an_item_at_the_start_waits_for_a_later_step():
    rig = encoder_rig(4, 100)
    add(rig, "a", 8, (0, 4, "x"))
    add(rig, "b", 8, (0, 4, "y"))
    assert rig.drain() == [[("a", 8)], [("b", 8)]]


def test_items_larger_than_budget_or_cache_are_refused_by_check():
    cache = EncoderCache(6, 4)
    cache.check(make_request(prompt=20, encoder_items=items((0, 4, "x"), (4, 4, "y"))))
    with pytest.raises(InvalidValueError, match="an input of 5 embeddings, at most 4 are allowed") as refused:
        cache.check(make_request(prompt=20, encoder_items=items((0, 5, "x"))))
    assert refused.value.field == "prompt"


def test_a_prompt_that_runs_whole_has_all_its_items_in_one_step():
    rig = encoder_rig(6, 100, chunked_prefill=False, max_step_tokens=128)
    rig.cache.check(add(rig, "a", 20, (0, 3, "x"), (8, 3, "y"), (12, 3, "y")))
    add(rig, "b", 8, (2, 4, "z"))
    assert rig.drain() == [[("a", 20)], [("b", 8)]]
    with pytest.raises(InvalidValueError, match="inputs of 8 embeddings in all, at most 6 fit a step"):
        rig.cache.check(make_request(prompt=20, encoder_items=items((0, 4, "x"), (8, 4, "y"))))


# ---------------------------------------------------------------- the cache


def test_equal_keys_are_encoded_once():
    rig = encoder_rig(4, 4)
    add(rig, "a", 8, (2, 4, "x"))
    add(rig, "b", 12, (3, 4, "x"), (8, 4, "x"))
    assert rig.step() == [("a", 8), ("b", 12)]
    add(rig, "c", 8, (2, 4, "x"))
    add(rig, "d", 8, (2, 4, "y"))
    assert rig.step() == [("c", 8), ("d", 2)]  # x is there, but held


def test_what_is_computed_past_gives_its_room_to_the_next_item_of_the_request():
    rig = encoder_rig(6, 8)
    add(rig, "a", 12, (0, 6, "x"), (6, 6, "y"))
    assert rig.drain() == [[("a", 6)], [("a", 6)]]


def test_what_is_computed_past_gives_its_room_to_others_while_its_request_decodes():
    rig = encoder_rig(4, 4)
    add(rig, "a", 8, (2, 4, "x"), max_tokens=50)
    rig.step()
    add(rig, "b", 8, (2, 4, "y"))
    assert rig.step() == [("a", 1), ("b", 8)]


def test_an_item_whose_key_comes_again_in_the_prompt_is_kept():
    rig = encoder_rig(4, 4, max_step_tokens=8)
    add(rig, "a", 24, (0, 4, "x"), (16, 4, "x"))
    rig.step()
    add(rig, "b", 4, (0, 4, "y"))
    assert rig.steps(2) == [[("a", 8)], [("a", 8)]]
    assert rig.step() == [("b", 4)]


def test_the_oldest_that_nobody_holds_is_evicted_first():
    rig = encoder_rig(4, 8)
    for name in "xyz":
        add(rig, name, 6, (0, 4, name))
        rig.step()
        if name == "y":
            assert rig.cache.is_cached("x")
    assert [rig.cache.is_cached(key) for key in "xyz"] == [False, True, True]


def test_use_makes_an_item_young_again():
    rig = encoder_rig(4, 8)
    for name, key in (("a", "x"), ("b", "y"), ("c", "x"), ("d", "z")):
        add(rig, name, 6, (0, 4, key))
        rig.step()
    assert [rig.cache.is_cached(key) for key in "xyz"] == [True, False, True]


@pytest.mark.parametrize("leaves", ["abort", "preempt"])
def test_a_request_that_leaves_in_the_middle_of_an_item_holds_it_no_more(leaves):
    rig = encoder_rig(6, 6, max_step_tokens=4)
    a = add(rig, "a", 12, (2, 6, "x"))
    rig.step()
    add(rig, "b", 4, (0, 6, "y"), arrival_s=-1.0)
    if leaves == "abort":
        rig.scheduler.abort(a.handle)
    else:
        rig.scheduler.flush_cache(preempt_running=True)
    assert rig.step() == [("b", 4)]
    rig.drain()
    assert rig.is_clean()


def test_an_item_of_a_row_that_is_taken_back_was_never_encoded():
    """The first to grow lacks a page, and the one planned before it is the victim."""
    rig = encoder_rig(
        4,
        4,
        Extension(victim_order=lambda request, _computed: (request.request_id == "a",)),
        num_pages=5,
        max_step_tokens=8,
        reserve_full_prompt=False,
        long_prefill_cap=4,
    )
    add(rig, "a", 12, (8, 2, "x"))
    add(rig, "b", 16, (12, 4, "y"))
    rig.steps(2)
    assert rig.step() == [("b", 4)]
    assert rig.last.preempted == [rig.requests["a"]]
    assert not rig.cache.is_cached("x")
    rig.drain()
    assert rig.is_clean()


def test_a_row_that_is_taken_back_gives_its_budget_back():
    cache = EncoderCache(4, 4)
    request = make_request(prompt=12, encoder_items=items((4, 2, "x")))
    other = make_request(1, prompt=8, encoder_items=items((0, 4, "y")))
    request.num_computed = 4
    cache.begin_step()
    cache.take(request, 4)
    assert cache.limit_rule(None)(other, 8) == 0
    cache.give_back(request)
    assert cache.limit_rule(None)(other, 8) == 8


# ---------------------------------------------------------------- KV pages and alignment


def test_prompts_of_equal_tokens_and_other_images_share_no_pages():
    rig = encoder_rig(8, 100, prefix_cache=True)
    prompt = list(range(12))
    add(rig, "a", prompt, (2, 4, "x"))
    rig.step()
    add(rig, "same", prompt, (2, 4, "x"))
    add(rig, "image", prompt, (2, 4, "y"))
    add(rig, "place", prompt, (3, 4, "x"))
    add(rig, "none", prompt)
    assert rig.step() == [("same", 4), ("image", 12), ("place", 12), ("none", 12)]


def test_a_prefix_hit_inside_an_item_needs_its_embeddings_again():
    rig = encoder_rig(6, 6, prefix_cache=True)
    prompt = list(range(12))
    add(rig, "a", prompt, (2, 4, "x"))
    rig.step()
    add(rig, "other", 8, (0, 6, "y"))
    rig.step()
    assert not rig.cache.is_cached("x")
    add(rig, "b", [*prompt[:5], *range(50, 57)], (2, 4, "x"))
    assert rig.step() == [("b", 8)]  # one page of four is shared
    assert rig.cache.is_cached("x")


@pytest.mark.parametrize("aligned", [False, True])
def test_items_of_one_page_that_fit_only_one_by_one_do_not_stall_an_aligned_prompt(aligned):
    rig = encoder_rig(2, 2, page_aligned_prefill=aligned, page_size=8)
    add(rig, "a", 20, (1, 2, "x"), (4, 2, "y"), (9, 2, "z"))
    rows = rig.drain()
    assert rows == [[("a", 4)], [("a", 4)], [("a", 12)]] if aligned else [[("a", 4)], [("a", 5)], [("a", 11)]]


def test_two_aligned_prompts_that_are_inside_an_item_do_not_lock_each_other_out():
    rig = encoder_rig(4, 4, page_aligned_prefill=True, max_step_tokens=8)
    add(rig, "a", 12, (3, 2, "a1"), (5, 2, "a2"))
    add(rig, "b", 12, (3, 2, "b1"), (5, 2, "b2"))
    rig.drain()
    assert rig.ended == {"a": "length", "b": "length"}
