"""Keys of prefixes and the index of who has seen them, against a plain record of what was added."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.route.prefix import ENDS, PrefixMap, matched_share, prefix_keys


@pytest.mark.parametrize(
    ("num_bytes", "num_keys"),
    [(0, 0), (255, 0), (256, 1), (4095, 15), (4096, 16), (5119, 16), (5120, 17), (65536, 76), (65537, 76)],
)
def test_there_is_a_key_per_step(num_bytes, num_keys):
    assert len(prefix_keys(os.urandom(num_bytes))) == num_keys


def test_keys_of_long_prompts_are_bounded():
    assert len(prefix_keys(bytes(3 << 20))) == len(ENDS) == 196
    assert list(ENDS[14:18]) == [3840, 4096, 5120, 6144]


@given(st.integers(0, 70_000), st.integers(0, 70_000), st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_as_many_keys_are_equal_as_steps_are_shared(num_shared, num_own, seed):
    rng = random.Random(seed)
    stem = rng.randbytes(num_shared)
    one, other = (
        prefix_keys(stem + rng.randbytes(num_own)),
        prefix_keys(memoryview(stem + b"x" + rng.randbytes(num_own))),
    )
    num_equal = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    assert num_equal == sum(1 for end in ENDS if end <= num_shared)


def test_a_salt_keeps_models_apart():
    assert not set(prefix_keys(bytes(4096))) & set(prefix_keys(bytes(4096), salt=7))


def test_keys_are_equal_in_every_process():
    code = "from equipoise.route.prefix import prefix_keys; print(prefix_keys(bytes(range(256)) * 20))"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == str(prefix_keys(bytes(range(256)) * 20))


def test_matched_share_is_of_bytes():
    assert matched_share(0, 76) == 0
    assert matched_share(16, 76) == 4096 / 65536
    assert matched_share(76, 76) == 1


def test_each_worker_has_its_longest_match():
    seen = PrefixMap()
    seen.add([1, 2, 3, 4], "a")
    seen.add([1, 2, 9], "b")
    assert seen.match([1, 2, 3, 4, 5]) == {"a": 4, "b": 2}
    assert seen.match([1, 2, 9]) == {"a": 2, "b": 3}
    assert seen.match([7, 2]) == seen.match([]) == {}


def test_a_worker_that_left_is_forgotten_also_when_it_comes_back():
    seen = PrefixMap()
    seen.add([1, 2], "a")
    seen.add([1], "b")
    seen.remove("a")
    seen.remove("never there")
    assert seen.match([1, 2]) == {"b": 1}
    seen.add([7], "a")
    assert seen.match([1, 2]) == {"b": 1}
    assert (seen.num_keys("a"), seen.num_keys("b")) == (1, 1)


def test_what_is_not_used_leaves_and_what_is_used_stays():
    seen = PrefixMap(max_keys=100)
    for i in range(1000):
        seen.add([1, 2, 3], "a")
        seen.add([1000 + i], "b")
    assert seen.match([1, 2, 3]) == {"a": 3}
    assert seen.match([1000]) == {}
    assert seen.match([1999]) == {"b": 1}


def test_what_was_seen_is_remembered_for_half_of_the_bound_at_least():
    seen = PrefixMap(max_keys=100)
    for i in range(500):
        seen.add([i], "a")
        assert all(seen.match([key]) for key in range(max(0, i - 49), i + 1))


def test_a_hot_prefix_does_not_keep_alive_who_saw_it_long_ago():
    seen = PrefixMap(max_keys=100)
    seen.add([1, 2, 3], "a")
    for i in range(1000):
        seen.add([1, 2, 3], "b")
        seen.add([1000 + i], "b")
    assert seen.match([1, 2, 3]) == {"b": 3}


def test_churn_without_traffic_keeps_the_index_small():
    seen = PrefixMap()
    for i in range(5000):
        seen.add([1, 2, 3], f"worker-{i}")
        seen.remove(f"worker-{i}")
    assert max(seen._young.values()).bit_length() < 200
    assert seen.match([1, 2, 3]) == {}


def test_a_bound_too_small_is_refused():
    with pytest.raises(ValueError, match="max_keys is 1, it must be at least 2"):
        PrefixMap(1)


@given(
    st.integers(2, 60),
    st.lists(st.tuples(st.sampled_from("abcdefgh"), st.lists(st.integers(0, 30), max_size=12), st.booleans())),
)
@settings(max_examples=300, deadline=None)
def test_the_index_never_invents_and_keeps_its_bound(max_keys, events):
    seen, added = PrefixMap(max_keys), {}
    for worker, path, leaves in events:
        keys = [hash(tuple(path[: i + 1])) & 0xFFFFFFFF for i in range(len(path))]
        if leaves:
            seen.remove(worker)
            added.pop(worker, None)
        else:
            seen.add(keys, worker)
            added.setdefault(worker, set()).update(keys)
            assert seen.match(keys).get(worker, 0) >= min(len(keys), max_keys // 2)
        assert len(seen) <= max_keys
        for name, depth in seen.match(keys).items():
            assert 0 < depth <= len(keys)
            assert added[name].issuperset(keys[:depth])


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.lists(st.integers(0, 3), max_size=8)), max_size=40))
@settings(max_examples=200, deadline=None)
def test_within_its_bound_the_index_is_exact(events):
    seen, added = PrefixMap(100_000), {}
    for worker, path in events:
        keys = [hash(tuple(path[: i + 1])) & 0xFFFFFFFF for i in range(len(path))]
        expected = {}
        for name, held in added.items():
            depth = next((i for i, key in enumerate(keys) if key not in held), len(keys))
            if depth:
                expected[name] = depth
        assert seen.match(keys) == expected
        seen.add(keys, worker)
        added.setdefault(worker, set()).update(keys)
        assert seen.num_keys(worker) == len(added[worker])
