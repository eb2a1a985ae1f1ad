"""Which rank each policy takes, dead and stale ones skipped."""

from __future__ import annotations

import pytest
from tests.route.rig import worker

from equipoise.route.catalog import RANK_POLICIES, rank_policy
from equipoise.route.policy import Ask


def chosen(name, load, *asks):
    policy = rank_policy(name)
    return [policy.choose(ask, load) for ask in asks]


ASK = Ask(100)


@pytest.mark.parametrize("name", RANK_POLICIES)
def test_a_worker_with_one_rank_is_never_pinned(name):
    assert rank_policy(name).choose(Ask(10, room=3), worker("w", 5)) is None


def test_minimum_tokens_takes_the_least_loaded_live_rank():
    load = worker("w", 50, 10, 30, 20)
    assert chosen("minimum_tokens", load, ASK) == [1]
    load.ranks[1].is_dead = True
    load.ranks[3].is_stale = True
    assert chosen("minimum_tokens", load, ASK) == [2]


def test_minimum_tokens_rotates_among_equals():
    assert chosen("minimum_tokens", worker("w", 5, 9, 5, 5), *[ASK] * 5) == [0, 2, 3, 0, 2]


def test_ties_rotate_for_each_worker_apart():
    policy, first, second = rank_policy("minimum_tokens"), worker("a", 0, 0), worker("b", 0, 0)
    assert [policy.choose(ASK, load) for load in (first, second) * 2] == [0, 0, 1, 1]


def test_round_robin_skips_the_dead():
    load = worker("w", 50, 10, 30)
    load.ranks[1].is_dead = True
    assert chosen("round_robin", load, *[ASK] * 4) == [0, 2, 0, 2]


def test_follow_room_goes_where_the_other_leg_looks():
    load = worker("w", 50, 10, 30)
    rooms = [Ask(10, room=room) for room in (0, 4, 2**62 + 1)]
    assert chosen("follow_room", load, *rooms) == [0, 1, (2**62 + 1) % 3]
    load.ranks[1].is_dead = True
    assert chosen("follow_room", load, *rooms[:2]) == [0, 2]
    assert chosen("follow_room", load, ASK) == [None]


def test_none_leaves_it_to_the_engine():
    assert chosen("none", worker("w", 5, 6), ASK) == [None]


@pytest.mark.parametrize("name", RANK_POLICIES)
def test_when_no_rank_is_live_the_engine_chooses(name):
    load = worker("w", 5, 6)
    load.ranks[0].is_dead = load.ranks[1].is_stale = True
    assert chosen(name, load, Ask(10, room=3)) == [None]
