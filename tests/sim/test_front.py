"""The gateway's side: charges, what prompts share, turns of ranks."""

from __future__ import annotations

from typing import Any

import pytest

from equipoise.route.prefix import ENDS
from equipoise.sim.fleet import RoleSize
from equipoise.sim.front import BYTES_PER_TOKEN, Choice, Front, Pair, prefix_keys_of
from equipoise.sim.scenario import RoutingConfig
from equipoise.sim.workload.request import SimRequest


def front(num_workers: int = 1, num_ranks: int = 1, **config: Any) -> Front:
    return Front(RoutingConfig(**config), {"mixed": RoleSize(num_workers, num_ranks)}, 512, 0)


def one(gateway: Front, body: SimRequest, now: float) -> Choice:
    """Where one worker serves `body`."""
    choice = gateway.choose(body, now)
    assert isinstance(choice, Choice)
    return choice


@pytest.mark.parametrize("charges", [True, False])
def test_a_request_counts_at_once_if_charges_are_on(charges: bool) -> None:
    gateway = front(charges=charges)
    choice = one(gateway, SimRequest(0, 1000, 50), 0.0)
    assert (choice.charge is not None) == charges
    assert (gateway.loads[0].tokens > 1000) == charges
    gateway.over(choice, 50, 2.0)
    assert gateway.loads[0].tokens == 0


def test_engines_that_choose_themselves_take_turns() -> None:
    gateway = front(2, 3, worker_policy="round_robin", rank_policy="none")
    chosen = [one(gateway, SimRequest(0, 10, 10), 0.0) for _ in range(8)]
    ranks = [[choice.rank for choice in chosen if choice.worker == worker] for worker in (0, 1)]
    assert ranks == [[0, 1, 2, 0]] * 2


def test_prompts_share_keys_as_far_as_they_share_pieces() -> None:
    ours = prefix_keys_of(SimRequest(0, 1500, 10, (1, 2, 3)), 512)
    theirs = prefix_keys_of(SimRequest(0, 1500, 10, (1, 2, 9)), 512)
    ends = [end // BYTES_PER_TOKEN for end in ENDS]
    assert len(ours) == len(set(ours)) == sum(end <= 1500 for end in ends)
    assert [a == b for a, b in zip(ours, theirs, strict=True)] == [end <= 1024 for end in ends if end <= 1500]


def test_what_has_no_pieces_shares_nothing() -> None:
    assert prefix_keys_of(SimRequest(0, 1500, 10), 512) == []
    assert len(prefix_keys_of(SimRequest(0, 200, 10, (7,)), 512)) == sum(end // BYTES_PER_TOKEN <= 200 for end in ENDS)


def test_a_worker_that_has_the_prefix_is_preferred() -> None:
    gateway = front(4, worker_policy="prefix_tokens")
    first = one(gateway, SimRequest(0, 4096, 10, tuple(range(8))), 0.0)
    gateway.over(first, 10, 1.0)
    again = [one(gateway, SimRequest(0, 4096, 10, (*range(7), 100 + i)), 2.0 + i) for i in range(2)]
    for choice in again:
        gateway.over(choice, 10, 9.0)
    assert {choice.worker for choice in again} == {first.worker}


def pairs(num_mixed: int = 0, **config: Any) -> Front:
    mixed = {"mixed": RoleSize(num_mixed, 2)} if num_mixed else {}
    return Front(RoutingConfig(**config), {**mixed, "prefill": RoleSize(1, 2), "decode": RoleSize(1, 2)}, 512, 0)


def pair(gateway: Front) -> Pair:
    """Where a pair serves a request of 1,000 tokens."""
    choice = gateway.choose(SimRequest(0, 1000, 50), 0.0)
    assert isinstance(choice, Pair)
    return choice


def test_pairs_charge_the_prompt_to_both_and_the_output_where_it_is_drawn() -> None:
    gateway = pairs()
    legs = pair(gateway)
    prefill, decode = gateway.loads
    assert (legs.prefill.worker, legs.decode.worker) == (0, 1)
    assert prefill.tokens == 1000
    assert decode.tokens == 1256  # nothing is known of outputs yet
    gateway.over(legs.prefill, None, 1.0)
    assert (prefill.tokens, decode.tokens) == (0, 1256)
    gateway.over(legs.decode, 50, 2.0)
    assert decode.tokens == 0


def test_both_legs_of_a_pair_follow_one_room_that_is_drawn() -> None:
    gateway = pairs(rank_policy="follow_room")
    ranks = [(legs.prefill.rank, legs.decode.rank) for legs in (pair(gateway) for _ in range(40))]
    assert set(ranks) == {(0, 0), (1, 1)}
    assert ranks[::2] != [ranks[0]] * 20


def test_a_worker_that_does_both_is_chosen_while_its_ranks_carry_less() -> None:
    gateway = pairs(num_mixed=1)
    chosen = [gateway.choose(SimRequest(0, 1000, 50), 0.0) for _ in range(6)]
    assert [isinstance(choice, Pair) for choice in chosen] == [True, False] * 3
