"""Every policy on random fleets, and herds: many requests between two reports."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.route.rig import report

from equipoise.route.account import WorkerLoad
from equipoise.route.catalog import RANK_POLICIES, WORKER_POLICIES, rank_policy, worker_policy
from equipoise.route.policy import Ask


def random_fleet(rng):
    """Workers of all sizes: some without reports, capacity, throughput, with dead ranks, starting slowly."""
    fleet = []
    for i in range(rng.randint(1, 12)):
        load = WorkerLoad(f"w{i}", rng.choice([1, 1, 2, 8]))
        capacity, rate = rng.choice([None, 1000, 400_000]), rng.choice([None, 0.0, 900.0])
        if rng.random() < 0.7:
            load.report(
                report(
                    r, rng.choice([0, 5, 90_000]), 1.0, waiting=rng.randint(0, 3), capacity=capacity, throughput=rate
                )
                for r in range(len(load.ranks))
                if rng.random() < 0.9
            )
        for account in load.ranks:
            account.is_dead = rng.random() < 0.1
        load.check_ages(rng.choice([1.0, 50.0]), 10.0)
        load.weight = rng.choice([1.0, 1.0, 0.01, 0.5])
        fleet.append(load)
    return fleet


def live_through(name, rank_name, seed):
    """What is chosen when requests, ends, reports and workers come and go."""
    rng = random.Random(seed)
    policy, ranks = worker_policy(name, seed=seed), rank_policy(rank_name)
    fleet, charges, chosen = random_fleet(rng), [], []
    for step in range(60):
        eligible = [load for load in fleet if rng.random() < 0.8] or fleet[:1]
        keys = tuple(rng.randint(0, 2) * 1000 + depth for depth in range(rng.randint(0, 5)))
        session = rng.choice([None, b"a", b"b", b""])
        ask = Ask(rng.randint(1, 5000), rng.randint(0, 500), keys, session, rng.choice([None, rng.getrandbits(63)]))
        load = policy.choose(ask, eligible)
        assert any(load is each for each in eligible)
        policy.routed(ask, load)
        rank = ranks.choose(ask, load)
        assert rank is None or load.ranks[rank].is_live
        charges.append(load.charge(rank, ask.prompt, ask.output, 2.0 + step))
        chosen.append((load.name, rank))
        if rng.random() < 0.3:
            charges.pop(rng.randrange(len(charges))).end(2.5 + step)
        if rng.random() < 0.1:
            policy.left(rng.choice(fleet))
    for charge in charges:
        charge.end(100.0)
    assert all(account.active == account.pending == 0 for load in fleet for account in load.ranks)
    return chosen


@pytest.mark.parametrize("name", WORKER_POLICIES)
@given(rank_name=st.sampled_from(sorted(RANK_POLICIES)), seed=st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_choices_are_eligible_and_the_same_by_seed(name, rank_name, seed):
    assert live_through(name, rank_name, seed) == live_through(name, rank_name, seed)


@pytest.mark.parametrize(("num_workers", "num_ranks"), [(2, 4), (4, 2), (8, 8), (4, 16)])
@pytest.mark.parametrize("name", ["least_tokens", "prefix_tokens", "power_of_two"])
@pytest.mark.parametrize("reported", [True, False])
def test_a_herd_between_two_reports_spreads(name, num_workers, num_ranks, reported):
    rng = random.Random(5)
    policy, ranks = worker_policy(name), rank_policy("minimum_tokens")
    fleet = [WorkerLoad(f"w{i}", num_ranks) for i in range(num_workers)]
    for load in fleet:
        if reported:
            load.report(report(rank, 0, 1.0, capacity=400_000) for rank in range(num_ranks))
            load.check_ages(1.0, 10.0)
    for i in range(1000):
        keys = (1, 2, 3, *(1000 * i + depth for depth in range(20)))  # 768 bytes are shared by all
        ask = Ask(rng.randint(1481, 4120), min(1160, rng.choice([400, 1500, 4000])), keys)
        load = policy.choose(ask, fleet)
        policy.routed(ask, load)
        load.charge(ranks.choose(ask, load), ask.prompt, ask.output, 2.0)
    tokens = [account.load() for load in fleet for account in load.ranks]
    assert max(tokens) <= 1.2 * sum(tokens) / len(tokens)


@pytest.mark.parametrize("num_workers", [8, 64])
@pytest.mark.parametrize("name", ["least_tokens", "prefix_tokens"])
def test_a_herd_spreads_over_workers_of_one_rank(name, num_workers):
    rng = random.Random(6)
    policy, fleet = worker_policy(name), [WorkerLoad(f"w{i}") for i in range(num_workers)]
    for _ in range(1000):
        ask = Ask(rng.randint(1481, 4120), 1160)
        policy.choose(ask, fleet).charge(None, ask.prompt, ask.output, 2.0)
    tokens = [load.load() for load in fleet]
    assert max(tokens) <= 1.2 * sum(tokens) / len(tokens)
