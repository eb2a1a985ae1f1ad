"""Paged KV memory: match, admit, grow, publish, release, flush."""

from __future__ import annotations

import numpy as np
import pytest
from tests.sched.rig import make_request

from equipoise.errors import PageError
from equipoise.kv.paged import PagedKV, known_tokens
from equipoise.kv.protocol import PrefixMatch

NOTHING = PrefixMatch([], 0)


def make_kv(num_pages=8, *, prefix_cache=True):
    return PagedKV(num_pages, 4, prefix_cache=prefix_cache)


def admit(kv, request, upto=None, reserve=0):
    upto = request.num_known if upto is None else upto
    return kv.admit(request, kv.match(request), upto, reserve)


def run(kv, request, upto=None):
    """Admit and publish, as a step does."""
    assert admit(kv, request, upto)
    kv.publish(request, known_tokens(request), request.num_known if upto is None else upto)
    kv.check()


@pytest.mark.parametrize(("upto", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2), (32, 8)])
def test_grow_gives_the_pages_that_tokens_need(upto, pages):
    kv, request = make_kv(), make_request(prompt=32)
    assert kv.grow(request, upto)
    assert len(request.pages) == pages
    assert kv.num_free == 8 - pages
    assert kv.grow(request, upto)  # again: nothing more
    assert len(request.pages) == pages


def test_grow_is_all_or_nothing():
    kv, request = make_kv(), make_request()
    assert kv.grow(request, 8)
    assert not kv.grow(request, 33)
    assert len(request.pages) == 2
    assert kv.num_free == 6


def test_grow_refuses_nonsense():
    with pytest.raises(PageError, match="asks for pages up to -1"):
        make_kv().grow(make_request(), -1)


def test_a_match_leaves_out_the_last_token():
    kv = make_kv()
    run(kv, make_request(0, prompt=list(range(8))))
    for prompt, num_tokens in ((range(8), 4), (range(9), 8), (range(5), 4), (range(4), 0), ([9] * 9, 0)):
        match = kv.match(make_request(1, prompt=list(prompt)))
        assert (match.num_tokens, len(match.pages)) == (num_tokens, num_tokens // 4)


def test_a_match_is_owned_by_both():
    kv = make_kv()
    a, b = (make_request(i, prompt=[*range(8), 90 + i]) for i in range(2))
    run(kv, a)
    run(kv, b)
    assert a.pages[:2] == b.pages[:2]
    assert kv.num_free == 4
    kv.release(a)
    assert (kv.num_free, kv.num_cached) == (5, 0)
    kv.release(b)
    assert (kv.num_free, kv.num_cached) == (8, 2)
    kv.check()


def test_nothing_is_matched_without_a_prefix_cache_or_for_prompt_logprobs():
    for kv, more in ((make_kv(prefix_cache=False), {}), (make_kv(), {"prompt_logprobs": 0})):
        run(kv, make_request(0, prompt=list(range(9))))
        assert kv.match(make_request(1, prompt=list(range(9)), **more)) == NOTHING


def test_admission_is_all_or_nothing_and_keeps_the_match_cached():
    kv = make_kv()
    first = make_request(0, prompt=list(range(8)))
    run(kv, first)
    kv.release(first)
    other = make_request(1, prompt=24)
    run(kv, other)
    late = make_request(2, prompt=[*range(8), *range(50, 60)])
    match = kv.match(late)
    assert match.num_tokens == 8
    assert not kv.admit(late, match, 18, reserve=3)
    assert late.pages == []
    assert (kv.num_free, kv.num_cached) == (2, 2)
    kv.check()


def test_cached_pages_of_the_match_are_no_room_for_the_rest():
    kv = make_kv(4)
    first = make_request(0, prompt=list(range(8)))
    run(kv, first)
    kv.release(first)
    late = make_request(1, prompt=[*range(8), *range(50, 59)])
    match = kv.match(late)
    assert kv.num_free == 4
    assert not kv.admit(late, match, 17, reserve=3)  # 2 matched + 3 new of 4
    assert kv.admit(late, match, 16, reserve=2)
    assert kv.num_free == 0
    kv.check()


def test_a_reserve_beyond_the_first_chunk_is_kept_free():
    kv = make_kv()
    assert not admit(kv, make_request(0, prompt=30), upto=4, reserve=9)
    assert admit(kv, make_request(0, prompt=30), upto=4, reserve=8)
    assert kv.num_free == 7


def test_a_request_with_pages_takes_no_match():
    kv, request = make_kv(), make_request()
    assert admit(kv, request)
    with pytest.raises(PageError, match="has 1 pages and cannot take a match"):
        kv.admit(request, PrefixMatch(list(request.pages), 4), 4, 0)


def test_a_request_whose_pages_were_filled_elsewhere_matches_what_is_in_them():
    kv, request = make_kv(), make_request(prompt=12)
    assert admit(kv, request, upto=8)
    request.num_loaded = 8
    assert kv.match(request) == PrefixMatch([], 8)
    assert admit(kv, request, upto=12)
    assert len(request.pages) == 3
    kv.release(request)
    assert request.num_loaded == 0
    kv.check()


def test_only_full_pages_are_published():
    kv = make_kv()
    request = make_request(0, prompt=list(range(8)))
    assert admit(kv, request)
    kv.publish(request, known_tokens(request), 7)
    assert kv.match(make_request(1, prompt=list(range(12)))).num_tokens == 4
    kv.publish(request, known_tokens(request), 8)
    assert kv.match(make_request(1, prompt=list(range(12)))).num_tokens == 8


def test_a_requests_last_page_is_evicted_first():
    kv = make_kv(4)
    a = make_request(0, prompt=list(range(16)))
    run(kv, a)
    kv.release(a)
    assert kv.num_cached == 4
    assert kv.grow(make_request(1), 4)
    assert kv.match(make_request(2, prompt=list(range(17)))).num_tokens == 12
    kv.check()


def test_the_least_recently_used_request_is_evicted_first():
    kv = make_kv(4)
    a, b = make_request(0, prompt=list(range(8))), make_request(1, prompt=list(range(100, 108)))
    for request in (a, b):
        run(kv, request)
    for request in (b, a):
        kv.release(request)
    assert kv.grow(make_request(2), 8)
    assert kv.match(make_request(3, prompt=list(range(9)))).num_tokens == 8
    assert kv.match(make_request(4, prompt=list(range(100, 109)))).num_tokens == 0


def test_flush_forgets_cached_and_owned_prefixes():
    kv = make_kv()
    a, b = make_request(0, prompt=list(range(8))), make_request(1, prompt=list(range(100, 108)))
    run(kv, a)
    run(kv, b)
    kv.release(a)
    assert kv.flush() == 2
    for prompt in (range(9), range(100, 109)):
        assert kv.match(make_request(2, prompt=list(prompt))) == NOTHING
    kv.release(b)
    assert (kv.num_free, kv.num_cached) == (8, 0)
    kv.check()


def test_known_tokens_are_prompt_and_outputs():
    request = make_request(prompt=[1, 2])
    assert known_tokens(request).tolist() == [1, 2]
    request.output_ids = [3]
    assert known_tokens(request).tolist() == [1, 2, 3]


def test_requests_are_extended_all_or_not_at_all():
    kv = make_kv(4)
    a, b = make_request(0, prompt=4), make_request(1, prompt=4)
    assert admit(kv, a)
    assert admit(kv, b)
    assert kv.extend([b, a]) == [b.pages[1], a.pages[1]]
    assert len({*a.pages, *b.pages}) == 4
    assert kv.extend([a]) is None
    assert (len(a.pages), len(b.pages)) == (2, 2)
    kv.check()


def test_pages_published_together_are_found_like_those_published_alone():
    kv = make_kv()
    a, b = make_request(0, prompt=list(range(8))), make_request(1, prompt=list(range(20, 28)))
    for request in (a, b):
        run(kv, request, upto=4)
        assert kv.grow(request, 8)
    kv.publish_next([b, a], np.stack([known_tokens(b)[4:8], known_tokens(a)[4:8]]))
    for request in (a, b):
        late = make_request(2, prompt=[*request.prompt_ids.tolist(), 9])
        assert kv.match(late).pages == request.pages
    kv.publish_next([], np.empty((0, 4), np.int32))
    kv.check()


def test_nothing_is_published_without_a_prefix_cache():
    kv, request = make_kv(prefix_cache=False), make_request(prompt=4)
    assert admit(kv, request)
    kv.publish_next([request], known_tokens(request)[None])
    assert request.page_keys == []
    assert kv.match(make_request(1, prompt=5)) == NOTHING


def test_preparing_hashes_what_the_match_needs():
    kv, request = make_kv(), make_request(prompt=9)
    kv.prepare(request)
    keys = list(request.page_keys)
    assert len(keys) == 2
    kv.match(request)
    assert request.page_keys == keys


# ---------------------------------------------------------------- the remembered match


def test_a_remembered_match_grows_when_the_next_page_is_published():
    kv = make_kv()
    a, late = make_request(0, prompt=list(range(8))), make_request(1, prompt=list(range(9)))
    assert kv.match(late) == NOTHING
    run(kv, a, upto=4)
    assert kv.match(late).num_tokens == 4
    assert kv.grow(a, 8)
    kv.publish(a, known_tokens(a), 8)
    assert kv.match(late).num_tokens == 8


def test_a_remembered_match_grows_when_the_next_page_is_published_with_others():
    kv = make_kv()
    a, late = make_request(0, prompt=list(range(8))), make_request(1, prompt=list(range(9)))
    run(kv, a, upto=4)
    assert kv.match(late).num_tokens == 4
    assert kv.grow(a, 8)
    kv.publish_next([a], known_tokens(a)[None, 4:8])
    assert kv.match(late).num_tokens == 8


def test_a_remembered_match_shrinks_when_its_page_is_evicted():
    kv = make_kv(3)
    a, late = make_request(0, prompt=list(range(8))), make_request(1, prompt=list(range(9)))
    run(kv, a)
    kv.release(a)
    assert kv.match(late).num_tokens == 8
    assert kv.grow(make_request(2), 8)  # one free page and the last cached one
    assert kv.match(late).num_tokens == 4
    kv.check()


def test_a_remembered_match_ends_with_a_flush():
    kv = make_kv()
    a, late = make_request(0, prompt=list(range(8))), make_request(1, prompt=list(range(9)))
    run(kv, a)
    assert kv.match(late).num_tokens == 8
    kv.flush()
    assert kv.match(late) == NOTHING


def test_check_sees_a_free_page_that_can_still_be_matched():
    kv, request = make_kv(), make_request(prompt=8)
    run(kv, request)
    kv._pool.give_back(request.pages[0], keep=False)
    with pytest.raises(PageError, match=f"page {request.pages[0]} has no owner"):
        kv.check()
