"""The gate that weighs empty seats against prefill: what it opens for, how long it waits, what it learns."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sched.rig import Rig
from tests.sched.views import make_view

from equipoise.sched.rent_or_buy import RentOrBuy, StepPrices
from equipoise.sched.rules import OPEN, RankState

STEP_S = 0.05
START_S = 0.1
TOKEN_S = 0.0002
PROMPT = 1000


def rank(num_empty=0, *, running=8, prompt=PROMPT, prefilling=0, admitted=0, step_s=STEP_S, prefilled=0):
    """A rank with `num_empty` seats that as many requests of `prompt` tokens wait for."""
    return RankState(
        running,
        num_empty,
        bool(num_empty or prefilling),
        num_admitted=admitted,
        num_admissible=num_empty,
        next_tokens=prompt if num_empty else 0,
        admissible_tokens=num_empty * prompt,
        prefilling_tokens=prefilling,
        step_s=step_s,
        step_prefill_tokens=prefilled,
    )


def ask(gate, *ranks):
    return gate(make_view(ranks=ranks))


def make_gate(num_ranks=2, *, start_s=START_S, token_s=TOKEN_S, gap_s=9.0, **bounds):
    """A gate that has learned its prices: decodes take STEP_S, prefills `start_s` and `token_s` more; and that seats
    turn up every `gap_s`."""
    gate = RentOrBuy(**{"max_step_tokens": 8192, **bounds})
    for _ in range(2):
        ask(gate, *[rank(step_s=0.0)] * num_ranks)
        ask(gate, rank(1, step_s=gap_s), *[rank(step_s=0.0)] * (num_ranks - 1))
    for tokens in (500, 1000, 3000, 2000):
        for step_s, prefilled in ((STEP_S, 0), (STEP_S + start_s + token_s * tokens, tokens)):
            ask(gate, *[rank(step_s=step_s, prefilled=prefilled)] * num_ranks)
    return gate


def closed_steps(gate, *ranks, most=2000):
    """How many steps the gate stays closed while nothing changes, and what it answers then."""
    for n in range(most):
        if answer := ask(gate, *ranks):
            return n, answer
    raise AssertionError(f"closed for {most} steps")


# ---------------------------------------------------------------- when it opens


def test_open_while_nobody_waits_for_an_empty_seat():
    assert ask(make_gate(), rank(), rank()) == OPEN


def test_open_while_nobody_runs():
    assert ask(make_gate(), rank(3, running=0), rank(running=0)) == OPEN


def test_a_lone_prefill_waits_and_company_opens():
    gate = make_gate(4)
    assert [ask(gate, rank(1), rank(), rank(), rank()) for _ in range(9)] == [0] * 9
    assert ask(gate, rank(1), rank(1), rank(1), rank(1)) == 0  # what starting costs is not paid yet
    together, _ = closed_steps(make_gate(4), *[rank(1)] * 4)
    alone, _ = closed_steps(make_gate(4), rank(1), rank(), rank(), rank())
    assert together * 8 < alone


def test_a_balanced_prefill_is_free_when_starting_costs_nothing():
    assert ask(make_gate(start_s=0.0), rank(3), rank(3)) == 3
    assert ask(make_gate(start_s=0.0), rank(2), rank()) == 0


def test_a_lone_rank_whose_prefills_start_for_nothing_is_never_held_up():
    gate = make_gate(1, start_s=0.0)
    assert [ask(gate, rank(n)) for n in (1, 2, 3)] == [1, 2, 3]


def test_a_prefill_under_way_has_paid_for_the_start():
    assert ask(make_gate(), rank(1), rank(1)) == 0
    assert ask(make_gate(), rank(1, prefilling=100), rank(1, prefilling=100)) == 1


@pytest.mark.parametrize(
    ("empty", "level"), [((1, 1, 1, 1), 1), ((2, 2, 2, 2), 2), ((1, 1, 1, 6), 1), ((2, 2, 2, 9), 2)]
)
def test_the_level_is_what_most_ranks_have(empty, level):
    _, answer = closed_steps(make_gate(4), *[rank(n) for n in empty])
    assert answer == level


def test_rent_is_kept_by_the_seats_that_stay_empty():
    fresh, _ = closed_steps(make_gate(4), rank(1), rank(), rank(), rank())
    gate = make_gate(4)
    _, level = closed_steps(gate, rank(2), rank(1), rank(1), rank(1))
    assert level == 1
    assert ask(gate, rank(1, admitted=1), *[rank(admitted=1)] * 3) == 0
    left, _ = closed_steps(gate, rank(1), rank(), rank(), rank())
    assert left < fresh - 1


def test_it_stays_open_until_somebody_enters():
    gate = make_gate()
    n, level = closed_steps(gate, rank(1), rank(1))
    assert [ask(gate, rank(1), rank(1)) for _ in range(3)] == [level] * 3
    assert ask(gate, rank(1, admitted=1), rank(1, admitted=1)) == 0
    assert n > 0


def test_the_next_request_counts_by_its_own_tokens_and_the_rest_on_average():
    def uneven(first, all_tokens):
        return replace(rank(2), next_tokens=first, admissible_tokens=all_tokens)

    free = {"num_ranks": 2, "start_s": 0.0}
    assert ask(make_gate(**free), uneven(3000, 3500), uneven(3000, 3500)) == 2
    assert ask(make_gate(**free), uneven(3000, 3500), rank(2, prompt=1750)) == 2
    assert ask(make_gate(**free), uneven(3000, 3500), rank(2, prompt=3000)) == 1
    assert ask(make_gate(**free), uneven(3000, 3500), rank(2, prompt=300)) == 0


@pytest.mark.parametrize("max_delay_s", [0.2, 1.0, 3.0])
def test_nobody_waits_longer_than_the_bound(max_delay_s):
    dear = make_gate(start_s=50.0, max_delay_s=max_delay_s)
    n, level = closed_steps(dear, rank(1), rank())
    assert level == 1
    assert n * STEP_S == pytest.approx(max_delay_s, abs=2 * STEP_S)


def test_who_came_later_does_not_wait_longer_either():
    gate = make_gate(start_s=50.0, max_delay_s=1.0)
    for _ in range(10):
        ask(gate, rank(1), rank())
    n, _ = closed_steps(gate, rank(1), rank(1))
    assert n * STEP_S < 0.6
    ask(gate, rank(0, admitted=1), rank(1))
    n, _ = closed_steps(gate, rank(), rank(1))
    assert n * STEP_S == pytest.approx(0.5, abs=3 * STEP_S)


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_no_company_is_awaited_once_none_has_come_for_long(num_ranks):
    gate = make_gate(num_ranks, start_s=50.0, gap_s=0.5)
    n, level = closed_steps(gate, rank(2), *[rank()] * (num_ranks - 1))
    assert level in (1, 2)
    assert n * STEP_S == pytest.approx((0.5 + STEP_S / 2) / 2 * (4 + num_ranks / 2), rel=0.3)


def test_a_seat_that_turns_up_ends_a_lull():
    gate = make_gate(start_s=50.0, gap_s=0.5)
    n, _ = closed_steps(gate, rank(1), rank())
    assert n > 10
    assert ask(gate, rank(1), rank(1)) == 0


def test_answers_last_only_while_no_seat_waits():
    gate = RentOrBuy(8192)
    assert not gate.lasts
    ask(gate, rank(), rank())
    assert gate.lasts
    ask(gate, rank(1), rank())
    assert not gate.lasts


# ---------------------------------------------------------------- what it learns


def test_prices_are_nothing_until_both_kinds_of_steps_were_seen():
    prices = StepPrices()
    prices.learn(0.5, 1000)
    assert prices.prices() == (0.0, 0.0)
    prices.learn(0.05, 0)
    assert prices.prices()[1] > 0


def test_prices_converge_to_what_steps_cost():
    prices, draw = StepPrices(), random.Random(1)
    for _ in range(200):
        prices.learn(STEP_S * draw.uniform(0.98, 1.02), 0)
        tokens = draw.choice((3500, 7000, 10500))
        prices.learn((STEP_S + START_S + TOKEN_S * tokens) * draw.uniform(0.98, 1.02), tokens)
    start_s, token_s = prices.prices()
    assert start_s == pytest.approx(START_S, rel=0.25)
    assert token_s == pytest.approx(TOKEN_S, rel=0.05)


def test_prices_follow_a_change():
    prices = StepPrices()
    for token_s in (0.001, 0.0002):
        for n in range(200):
            prices.learn(STEP_S, 0)
            prices.learn(STEP_S + token_s * (1000 + n % 7), 1000 + n % 7)
    assert sum(price * times for price, times in zip(prices.prices(), (1, 1000), strict=True)) == pytest.approx(
        0.2, rel=0.05
    )


def test_prefills_of_one_size_are_priced_by_their_tokens():
    prices = StepPrices()
    for _ in range(50):
        prices.learn(STEP_S, 0)
        prices.learn(STEP_S + 0.4, 2000)
    start_s, token_s = prices.prices()
    assert start_s == pytest.approx(0.0, abs=1e-6)
    assert token_s == pytest.approx(0.0002)


def test_a_price_that_falls_with_tokens_is_taken_for_one_of_the_start():
    prices = StepPrices()
    prices.learn(STEP_S, 0)
    for tokens, extra_s in ((1000, 0.3), (2000, 0.2)) * 9:
        prices.learn(STEP_S + extra_s, tokens)
    start_s, token_s = prices.prices()
    assert token_s == 0.0
    assert start_s == pytest.approx(0.25, rel=0.03)


steps = st.tuples(st.floats(0, 10), st.one_of(st.just(0), st.integers(1, 16384)))


@given(st.lists(steps, max_size=30))
def test_prices_are_never_below_nothing(history):
    prices = StepPrices()
    for step_s, tokens in history:
        prices.learn(step_s, tokens)
        assert min(prices.prices()) >= 0
        assert max(prices.prices()) < 1e9


# ---------------------------------------------------------------- ranks decide alike

states = st.builds(
    rank,
    st.integers(0, 100),
    running=st.integers(0, 100),
    prompt=st.integers(1, 9000),
    prefilling=st.sampled_from((0, 0, 0, 5000)),
    admitted=st.integers(0, 5),
    step_s=st.floats(0, 3),
    prefilled=st.sampled_from((0, 0, 700, 3000, 8192)),
)


@given(st.integers(1, 5).flatmap(lambda n: st.lists(st.tuples(*[states] * n), max_size=25)))
def test_ranks_that_are_told_the_same_answer_the_same(history):
    gates = [RentOrBuy(8192) for _ in range(3)]
    for number, ranks in enumerate(history):
        views = [make_view(ranks=ranks, step=number * k, now_s=7.0 * k, num_running=k, num_waiting=k) for k in range(3)]
        answers = {gate(view) for gate, view in zip(gates, views, strict=True)}
        assert len(answers) == 1
        (answer,) = answers
        most = max(state.num_admissible for state in ranks)
        assert answer == OPEN or 0 <= answer <= most
        if not any(state.num_running for state in ranks):
            assert answer == OPEN


# ---------------------------------------------------------------- a group of schedulers

requests = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 2), st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=25
)


@given(requests, st.integers(2, 3), st.sampled_from((0.3, 15.0)), st.integers(0, 1))
def test_every_request_of_a_group_ends_and_ranks_agree(requests, num_ranks, max_delay_s, depth):
    """`requests`: (step of its arrival, rank, prompt, output). A step lasts as long as its slowest rank."""
    rigs = [
        Rig(rent_or_buy=True, rent_or_buy_max_delay_s=max_delay_s, max_running=3, max_step_tokens=32, depth=depth)
        for _ in range(num_ranks)
    ]
    arrivals, number = sorted(requests), 0
    while arrivals or any(rig.scheduler.num_requests for rig in rigs):
        while arrivals and arrivals[0][0] <= number:
            _, place, prompt, output = arrivals.pop(0)
            rig = rigs[place % num_ranks]
            rig.add(f"r{rig.handles}", prompt, output)
        states = tuple(rig.scheduler.state() for rig in rigs)
        plans = []
        for rig in rigs:
            plan = rig.scheduler.schedule(states) if rig.scheduler.has_work else None
            if plan is None:
                rig.scheduler.look(states)
            elif not plan.is_empty:
                plans.append(plan)
                rig.outstanding.append(plan)
        waiting = {rig.scheduler.held_by for rig in rigs if rig.scheduler.state().num_admissible}
        assert waiting <= {"", "RentOrBuy", "max_step_tokens"}
        step_s = max([0.01 + 0.002 * plan.num_prefill_tokens for plan in plans], default=0.01)
        for rig in rigs:
            rig.clock.advance(step_s)
            if rig.outstanding and (len(rig.outstanding) > depth or not plans):
                rig.land()
        number += 1
        assert number < 3000, "livelock"
    for rig in rigs:
        assert set(rig.ended.values()) <= {"length"}
        assert len(rig.ended) == rig.handles
