"""The page pool: free, cached or owned, exactly once."""

from __future__ import annotations

import pytest

from equipoise.errors import PageError
from equipoise.kv.pages import PagePool


@pytest.fixture
def evicted():
    return []


@pytest.fixture
def pool(evicted):
    return PagePool(4, on_evict=evicted.extend)


def test_pages_are_given_out_all_or_nothing(pool):
    pages = pool.take(3)
    assert len(set(pages)) == 3
    assert pool.take(2) is None
    assert pool.num_free == 1
    assert [pool.num_owners(page) for page in pages] == [1, 1, 1]
    assert pool.take(0) == []
    pool.check()


def test_a_page_given_back_is_free_or_cached(pool):
    free, cached = pool.take(2)
    pool.give_back(free, keep=False)
    pool.give_back(cached, keep=True)
    assert (pool.num_free, pool.num_cached) == (4, 1)
    assert pool.is_cached(cached)
    assert not pool.is_cached(free)
    pool.check()


def test_a_shared_page_stays_owned_until_its_last_owner_leaves(pool):
    (page,) = pool.take(1)
    pool.share([page])
    pool.give_back(page, keep=True)
    assert (pool.num_owners(page), pool.num_cached) == (1, 0)
    pool.give_back(page, keep=True)
    assert (pool.num_owners(page), pool.num_cached) == (0, 1)


def test_a_cached_page_can_be_shared_again(pool):
    (page,) = pool.take(1)
    pool.give_back(page, keep=True)
    pool.share([page])
    assert (pool.num_owners(page), pool.num_cached, pool.num_free) == (1, 0, 3)
    pool.check()


def test_cached_pages_go_oldest_first_and_only_when_no_page_is_free(pool, evicted):
    a, b, c, d = pool.take(4)
    for page in (b, a, d):
        pool.give_back(page, keep=True)
    pool.give_back(c, keep=False)
    assert pool.take(1) == [c]
    assert evicted == []
    pool.take(2)
    assert evicted == [b, a]
    pool.check()


def test_sharing_makes_a_page_recent(pool, evicted):
    a, b, *_ = pool.take(4)
    pool.give_back(a, keep=True)
    pool.give_back(b, keep=True)
    pool.share([a])
    pool.give_back(a, keep=True)
    pool.take(1)
    assert evicted == [b]


def test_a_refused_take_evicts_nothing(pool, evicted):
    a, *_ = pool.take(4)
    pool.give_back(a, keep=True)
    assert pool.take(2) is None
    assert evicted == []


def test_dropping_the_cached_makes_them_free(pool, evicted):
    pages = pool.take(3)
    for page in pages[:2]:
        pool.give_back(page, keep=True)
    assert pool.drop_cached() == 2
    assert evicted == pages[:2]
    assert (pool.num_free, pool.num_cached) == (3, 0)
    pool.check()


def test_miscounting_is_an_error(pool):
    (page,) = pool.take(1)
    pool.give_back(page, keep=False)
    with pytest.raises(PageError, match=f"page {page} has no owner"):
        pool.give_back(page, keep=False)
    with pytest.raises(PageError, match=f"page {page} is free and cannot be shared"):
        pool.share([page])
    pool.check()


def test_check_sees_a_page_in_two_places(pool):
    (page,) = pool.take(1)
    pool._freed.append(page)
    with pytest.raises(PageError, match="4 free \\+ 0 cached \\+ 1 owned of 4 pages"):
        pool.check()


def test_check_sees_a_lost_page(pool):
    pool.give_back(pool.take(1)[0], keep=False)
    pool._freed.pop()
    with pytest.raises(PageError, match="3 free"):
        pool.check()
