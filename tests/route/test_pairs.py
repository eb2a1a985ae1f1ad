"""Requests run by two workers: what the prefill worker is asked for, and when one worker is the better choice."""

from __future__ import annotations

import pytest

from equipoise.route.account import WorkerLoad
from equipoise.route.pairs import mean_tokens, one_worker_is_better, prefill_ask
from equipoise.route.policy import Ask


def test_a_prefill_worker_is_asked_for_the_prompt_alone():
    ask = Ask(100, 50, (1, 2), b"session", 3)
    assert prefill_ask(ask, 9) == Ask(100, 0, (1, 2), b"session", 9)


def test_means_are_over_the_live_ranks_of_all_workers():
    one, other = WorkerLoad("a", 1), WorkerLoad("b", 3)
    one.charge(0, 700, 0, 0.0)
    other.charge(1, 200, 0, 0.0)
    other.ranks[0].is_dead = True
    assert mean_tokens([one, other]) == 300


@pytest.mark.parametrize(("mixed", "is_better"), [(9, True), (10, False), (11, False)])
def test_a_pair_is_as_busy_as_the_busier_of_its_roles(mixed, is_better):
    assert one_worker_is_better(mixed, 10, 3) == is_better
    assert one_worker_is_better(mixed, 3, 10) == is_better
