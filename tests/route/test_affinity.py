"""Which worker the policies take that keep together what belongs together."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.route.rig import idle, worker

from equipoise.route.catalog import worker_policy
from equipoise.route.policy import Ask
from equipoise.route.prefix import ENDS

HOT = tuple(range(1000, 1020))  # 8 KB: 2048 tokens


def keyed(prompt=2048, keys=HOT, output=100):
    return Ask(prompt, output, keys)


def seen_by(policy, load, keys=HOT):
    policy.routed(keyed(keys=keys), load)
    return policy


def serve(policy, workers, asks, *, ends=False):
    """Route `asks`, charging each; with `ends` it has ended before the next comes."""
    names = []
    for ask in asks:
        load = policy.choose(ask, workers)
        assert load in workers
        policy.routed(ask, load)
        charge = load.charge(None, ask.prompt, ask.output, 2.0)
        if ends:
            charge.end(2.0, 1)
        names.append(load.name)
    return names


@pytest.mark.parametrize("name", ["prefix_tokens", "cache_aware", "consistent_hashing"])
def test_a_prompt_that_comes_again_goes_where_it_was(name):
    workers = idle(4)
    assert len(set(serve(worker_policy(name), workers, [keyed()] * 10, ends=True))) == 1


@pytest.mark.parametrize("name", ["prefix_tokens", "cache_aware", "consistent_hashing"])
def test_a_hot_prefix_spreads_over_all(name):
    workers = idle(4)
    counts = Counter(serve(worker_policy(name), workers, [keyed()] * 400))
    assert len(counts) == 4
    assert max(counts.values()) < 2 * 100


@pytest.mark.parametrize("name", ["prefix_tokens", "cache_aware"])
def test_a_worker_that_left_is_known_for_nothing(name):
    workers = idle(2)
    policy = seen_by(worker_policy(name), workers[1])
    assert policy.choose(keyed(), workers) is workers[1]
    policy.left(workers[1])
    assert policy.choose(keyed(), workers) is workers[0]


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(0, "b"), (20_000, "b"), (21_000, "a")],  # 2048 tokens saved are worth 20,480 tokens of load
)
def test_prefix_tokens_leaves_a_worker_that_is_more_loaded_than_the_prefix_saves(num_tokens, expected):
    workers = [worker("a", 0), worker("b", num_tokens)]
    policy = seen_by(worker_policy("prefix_tokens"), workers[1])
    assert policy.choose(keyed(), workers).name == expected


def test_prefix_tokens_weighs_load_as_asked():
    workers = [worker("a", 0), worker("b", 3000)]
    policy = seen_by(worker_policy("prefix_tokens", options={"load_weight": 1.0}), workers[1])
    assert policy.choose(keyed(), workers).name == "a"


def test_prefix_tokens_prefers_the_longer_match():
    workers = idle(3)
    policy = seen_by(worker_policy("prefix_tokens"), workers[1], HOT[:8])
    seen_by(policy, workers[2], HOT[:9])
    assert policy.choose(keyed(), workers) is workers[2]


def test_prefix_tokens_is_least_tokens_without_a_match():
    workers = [worker("a", 100), worker("b", 50), worker("c", 50)]
    policy = worker_policy("prefix_tokens")
    assert [policy.choose(Ask(100), workers).name for _ in range(3)] == ["b", "c", "b"]


@pytest.mark.parametrize(
    ("num_matched", "num_tokens", "expected"),
    [
        (20, 0, "b"),
        (17, 0, "b"),  # 5,120 of 8,192 bytes
        (16, 0, "a"),  # a half is not over a half
        (20, 17_000, "b"),  # the bound is 1.5 * 2,148 + 16,384, with the request
        (20, 18_000, "a"),
    ],
)
def test_cache_aware_takes_a_long_match_that_is_not_overloaded(num_matched, num_tokens, expected):
    workers = [worker("a", 0), worker("b", num_tokens)]
    policy = seen_by(worker_policy("cache_aware"), workers[1], HOT[:num_matched])
    assert ENDS[15] / ENDS[19] == 0.5
    assert policy.choose(keyed(), workers).name == expected


def test_cache_aware_takes_the_next_holder_when_the_first_is_overloaded():
    workers = [worker("a", 0), worker("b", 90_000), worker("c", 10_000)]
    policy = seen_by(seen_by(worker_policy("cache_aware"), workers[1]), workers[2], HOT[:18])
    assert policy.choose(keyed(), workers).name == "c"


def test_cache_aware_takes_the_less_loaded_of_two_holders():
    workers = [worker("a", 0), worker("b", 9_000), worker("c", 5_000), worker("d", 7_000)]
    policy = worker_policy("cache_aware")
    for holder in workers[1:]:
        seen_by(policy, holder)
    assert policy.choose(keyed(), workers).name == "c"


def test_cache_aware_gives_new_prompts_to_the_worker_with_the_smallest_share_of_the_index():
    workers = idle(3)
    policy = seen_by(seen_by(worker_policy("cache_aware"), workers[0]), workers[2], HOT[:3])
    assert policy.choose(Ask(100), workers) is workers[1]
    seen_by(policy, workers[1], HOT[:4])
    assert policy.choose(Ask(100), workers) is workers[2]


SESSIONS = [f"session-{i}".encode() for i in range(2000)]


def homes(policy, workers):
    return [policy.choose(Ask(100, session=session), workers).name for session in SESSIONS]


def test_sessions_spread_evenly_and_each_keeps_its_worker():
    workers, policy = idle(8), worker_policy("consistent_hashing")
    first = homes(policy, workers)
    assert first == homes(policy, workers) == homes(worker_policy("consistent_hashing"), workers[::-1])
    assert all(180 < num < 320 for num in Counter(first).values())


def test_only_the_sessions_of_a_worker_that_goes_move_and_come_back_with_it():
    workers, policy = idle(8), worker_policy("consistent_hashing")
    before = homes(policy, workers)
    policy.left(workers[3])
    after = homes(policy, workers[:3] + workers[4:])
    moved = Counter(new for old, new in zip(before, after, strict=True) if old == "w3")
    assert all(old == new for old, new in zip(before, after, strict=True) if old != "w3")
    assert len(moved) == 7
    assert homes(policy, workers) == before


def test_gateways_with_another_seed_draw_otherwise():
    workers = idle(8)
    pairs = zip(
        homes(worker_policy("consistent_hashing"), workers),
        homes(worker_policy("consistent_hashing", seed=1), workers),
        strict=True,
    )
    assert sum(one != other for one, other in pairs) > 1000


def test_consistent_hashing_keeps_nothing_of_workers_that_left():
    workers, policy = idle(8), worker_policy("consistent_hashing")
    homes(policy, workers)
    for load in workers:
        policy.left(load)
    assert not policy._salts


def test_sessions_are_in_proportion_to_ranks_and_weight():
    workers = [worker("a", 0, 0, 0), worker("b", 0), worker("c", 0, weight=0.25)]
    counts = Counter(homes(worker_policy("consistent_hashing", options={"slack_tokens": 10**9}), workers))
    assert counts["a"] / counts["b"] == pytest.approx(3, rel=0.25)
    assert counts["b"] / counts["c"] == pytest.approx(4, rel=0.25)


def test_a_session_passes_over_its_worker_while_that_is_overloaded():
    workers, policy = idle(4), worker_policy("consistent_hashing")
    ask = Ask(100, session=b"someone")
    home = policy.choose(ask, workers)
    charge = home.charge(None, 50_000, 0, 1.0)
    second = policy.choose(ask, workers)
    assert second is not home
    assert policy.choose(ask, workers) is second
    charge.end(2.0)
    assert policy.choose(ask, workers) is home


def test_without_a_session_the_first_kilobyte_decides():
    workers, policy = idle(16), worker_policy("consistent_hashing")
    assert policy.choose(keyed(keys=HOT[:4]), workers) is policy.choose(keyed(keys=(*HOT[:4], 77)), workers)
    others = {policy.choose(keyed(keys=(*HOT[:3], key)), workers).name for key in range(100)}
    assert len(others) > 8


def test_with_nothing_to_hash_the_least_loaded_is_taken():
    assert worker_policy("consistent_hashing").choose(Ask(9), [worker("a", 5), worker("b", 3)]).name == "b"
