"""Which worker the policies without memory of prompts take."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.route.rig import idle, worker

from equipoise.route.catalog import worker_policy
from equipoise.route.policy import Ask
from equipoise.route.workers import relative_loads

ASK = Ask(100, 20)


def names(policy, workers, num_asks=1, ask=ASK):
    return [policy.choose(ask, workers).name for _ in range(num_asks)]


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ([worker("a", 100), worker("b", 50)], [100, 50]),
        ([worker("a", 100, 100), worker("b", 100)], [100, 100]),  # two ranks carry twice as much
        ([worker("a", 100, capacity=3000), worker("b", 100, capacity=1000)], [200 / 3, 200]),  # mean capacity 2000
        ([worker("a", 100, capacity=3000), worker("b", 100)], [100, 100]),  # unknown: as the mean
        ([worker("a", 100, weight=0.5), worker("b", 100)], [200, 100]),
    ],
)
def test_loads_are_per_rank_of_mean_capacity_at_full_weight(workers, expected):
    assert relative_loads(workers, 0) == pytest.approx(expected)


def test_the_request_itself_weighs_more_on_a_worker_that_starts_slowly():
    assert relative_loads([worker("a", 0, weight=0.1), worker("b", 500)], 100) == [1000, 600]


def test_least_tokens_takes_the_emptiest_and_rotates_among_equals():
    assert names(worker_policy("least_tokens"), [worker("a", 9), worker("b", 3), worker("c", 5)]) == ["b"]
    assert names(worker_policy("least_tokens"), idle(3), 5) == ["w0", "w1", "w2", "w0", "w1"]
    assert names(worker_policy("least_tokens", seed=1), idle(3), 2) == ["w1", "w2"]


def test_dead_ranks_make_a_worker_smaller():
    whole, half = worker("whole", 60, 60), worker("half", 100, 0)
    half.ranks[1].is_dead = True
    assert names(worker_policy("least_tokens"), [whole, half]) == ["whole"]


@pytest.mark.parametrize("name", ["random", "round_robin"])
def test_turns_are_in_proportion_to_live_ranks_and_weight(name):
    workers = [worker("big", 0, 0, 0, 0), worker("small", 0), worker("starting", 0, 0, weight=0.25)]
    workers[0].ranks[3].is_dead = True
    counts = Counter(names(worker_policy(name, seed=3), workers, 4500))
    for each, share in (("big", 3), ("small", 1), ("starting", 0.5)):
        assert counts[each] == pytest.approx(1000 * share, rel=0 if name == "round_robin" else 0.15)


def test_round_robin_interleaves():
    workers = [worker("a", 0, 0), worker("b", 0)]
    assert names(worker_policy("round_robin"), workers, 6) == ["a", "b", "a"] * 2


def test_round_robin_goes_on_when_workers_come_and_go():
    policy, workers = worker_policy("round_robin"), idle(3)
    names(policy, workers, 4)
    policy.left(workers[1])
    counts = Counter(names(policy, [workers[0], workers[2]], 100))
    assert abs(counts["w0"] - counts["w2"]) <= 2


def test_round_robin_keeps_nothing_of_workers_that_left():
    policy = worker_policy("round_robin")
    for i in range(100):
        load = worker(f"w{i}", 0)
        policy.choose(ASK, [load])
        policy.left(load)
    assert not policy._credits


def test_power_of_two_never_takes_the_fullest_and_spreads_over_the_rest():
    workers = [worker("a", 9000), worker("b", 10), worker("c", 10), worker("d", 20)]
    counts = Counter(names(worker_policy("power_of_two"), workers, 600))
    assert set(counts) == {"b", "c", "d"}
    assert min(counts.values()) > 60
    assert names(worker_policy("power_of_two"), workers[:1]) == ["a"]


def test_least_load_takes_the_shortest_wait():
    slow, fast = worker("slow", 5, waiting=2, throughput=100.0), worker("fast", 9, waiting=6, throughput=1000.0)
    assert names(worker_policy("least_load"), [slow, fast]) == ["fast"]


def test_least_load_takes_a_worker_where_nobody_waits_the_one_with_fewest_tokens():
    busy = worker("busy", 5, waiting=1, throughput=5000.0)
    workers = [busy, worker("b", 90, throughput=10.0), worker("c", 80)]
    assert names(worker_policy("least_load"), workers) == ["c"]


@pytest.mark.parametrize(
    ("throughputs", "waiting", "expected"),
    [
        ((None, None), (3, 2), "b"),  # none is known
        ((0.0, 100.0), (3, 5), "a"),  # 0 is not known: counts as the other
        ((None, 100.0), (5, 3), "b"),
    ],
)
def test_a_worker_without_throughput_counts_as_the_others(throughputs, waiting, expected):
    workers = [
        worker(name, 5, waiting=num, throughput=rate)
        for name, num, rate in zip("ab", waiting, throughputs, strict=True)
    ]
    assert names(worker_policy("least_load"), workers) == [expected]


def test_a_worker_that_starts_slowly_is_to_have_the_shorter_queue():
    whole, starting = worker("whole", 5, waiting=4), worker("starting", 5, waiting=3, weight=0.5)
    assert names(worker_policy("least_load"), [whole, starting]) == ["whole"]


def test_least_load_counts_what_it_sent_itself():
    workers = [worker("a", 5, throughput=100.0), worker("b", 5, throughput=100.0)]
    policy = worker_policy("least_load")
    counts = Counter()
    for _ in range(10):
        chosen = policy.choose(ASK, workers)
        chosen.charge(None, ASK.prompt, ASK.output, 2.0)
        counts[chosen.name] += 1
    assert counts == {"a": 5, "b": 5}
