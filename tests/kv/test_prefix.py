"""Keys of full pages, and which page holds which."""

from __future__ import annotations

import numpy as np
import pytest

from equipoise.kv.prefix import PrefixIndex, extend_keys


def keys_of(tokens, salt="", page_size=4, num_pages=None):
    keys = []
    extend_keys(keys, salt, np.array(tokens, np.int32), page_size, len(tokens) // page_size)
    return keys


def test_equal_prefixes_have_equal_keys_and_only_those():
    a = keys_of([1, 2, 3, 4, 5, 6, 7, 8])
    b = keys_of([1, 2, 3, 4, 5, 6, 7, 9])
    assert a[0] == b[0]
    assert a[1] != b[1]


def test_a_key_depends_on_all_that_comes_before_its_page():
    assert keys_of([1, 2, 3, 4, 5, 6, 7, 8])[1] != keys_of([9, 2, 3, 4, 5, 6, 7, 8])[1]
    assert keys_of([5, 6, 7, 8])[0] != keys_of([1, 2, 3, 4, 5, 6, 7, 8])[1]


def test_salts_separate_every_page():
    plain, salted = keys_of(range(12)), keys_of(range(12), salt="tenant")
    assert not set(plain) & set(salted)


def test_extending_goes_on_where_it_stopped():
    tokens = np.arange(24, dtype=np.int32)
    keys = []
    for num_pages in (0, 1, 1, 4, 2, 6):
        extend_keys(keys, "", tokens, 4, num_pages)
    assert keys == keys_of(range(24))
    assert len(set(keys)) == 6


@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_there_is_one_key_a_page(page_size):
    assert len(set(keys_of(range(32), page_size=page_size))) == 32 // page_size


def test_find_stops_at_the_first_page_that_is_not_there():
    index = PrefixIndex(8)
    keys = keys_of(range(16))
    for i, page in ((0, 5), (1, 2), (3, 7)):
        index.publish(keys[i], page)
    assert index.find(keys, 4) == [5, 2]
    assert index.find(keys, 1) == [5]
    assert index.find(keys, 0) == []
    assert index.find(keys_of([9] * 16), 4) == []
    assert len(index) == 3


def test_the_first_page_published_under_a_key_keeps_it():
    index = PrefixIndex(4)
    index.publish(b"key", 1)
    index.publish(b"key", 2)
    assert index.find([b"key"], 1) == [1]
    assert index.has_key(1)
    assert not index.has_key(2)
    index.publish(b"other", 1)
    assert index.find([b"other"], 1) == []


def test_a_forgotten_page_can_be_published_anew():
    index = PrefixIndex(4)
    index.publish(b"key", 1)
    index.forget([1])
    index.forget([1])
    assert not index.has_key(1)
    index.publish(b"key", 2)
    index.publish(b"other", 1)
    assert index.find([b"key"], 1) == [2]
    assert index.find([b"other"], 1) == [1]


def test_clear_forgets_all():
    index = PrefixIndex(4)
    index.publish(b"key", 1)
    index.clear()
    assert len(index) == 0
    assert not index.has_key(1)
    assert index.find([b"key"], 1) == []
