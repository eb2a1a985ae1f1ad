"""Workloads that are drawn: lengths, arrivals, closed loops, sessions and mixes of clients."""

from __future__ import annotations

import gzip
import json
from itertools import islice, pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.errors import ConfigError
from equipoise.sim.workload.arrivals import gamma, poisson
from equipoise.sim.workload.closed import ClosedLoop
from equipoise.sim.workload.lengths import SHAPES, Histogram, Lengths, pairs
from equipoise.sim.workload.request import OpenLoop, SimRequest
from equipoise.sim.workload.servegen import mix, read_mix
from equipoise.sim.workload.sessions import PIECE_LEN, Sessions, Talk

if TYPE_CHECKING:
    from pathlib import Path


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.mark.parametrize("shape", SHAPES)
def test_lengths_have_the_mean_and_spread_that_was_asked_for(shape: str) -> None:
    spread = {"constant": 0.0, "exponential": 1.0}.get(shape, 0.3)
    drawn = Lengths(1000, spread, shape).draw(rng(), 100_000)  # type: ignore[arg-type]
    assert drawn.mean() == pytest.approx(1000, rel=0.01)
    assert drawn.std() / drawn.mean() == pytest.approx(spread, abs=0.01)


@given(st.floats(1, 5000), st.floats(0, 0.5), st.sampled_from(SHAPES), st.integers(1, 100), st.integers(0, 1000))
def test_lengths_stay_within_their_bounds(mean: float, spread: float, shape: str, least: int, more: int) -> None:
    drawn = Lengths(mean, spread, shape, least, least + more).draw(rng(), 100)  # type: ignore[arg-type]
    assert drawn.min() >= least
    assert drawn.max() <= least + more


@pytest.mark.parametrize(
    ("given_fields", "message"),
    [
        ({"mean": 0}, "mean: 0 must be at least 1"),
        ({"mean": 5, "spread": -1}, "spread: -1 must"),
        ({"mean": 5, "shape": "flat"}, "shape: 'flat' must be one of constant, uniform"),
        ({"mean": 5, "spread": 0.9, "shape": "uniform"}, "spread: 0.9 must be at most 0.577"),
        ({"mean": 5, "least": 9, "most": 3}, "least: 9 must"),
    ],
)
def test_lengths_that_cannot_be_are_refused(given_fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Lengths(**given_fields)  # type: ignore[arg-type]


def test_a_histogram_draws_its_shares() -> None:
    drawn = Histogram({10: 1.0, 20: 3.0}).draw(rng(), 40_000)
    assert set(drawn.tolist()) == {10, 20}
    assert (drawn == 20).mean() == pytest.approx(0.75, abs=0.01)
    with pytest.raises(ConfigError, match="histogram"):
        Histogram({})


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 3.0])
def test_arrivals_have_rate_and_burstiness(cv: float) -> None:
    times = list(islice(gamma(4.0, cv, rng()), 50_000))
    gaps = np.diff(np.array([0.0, *times]))
    assert gaps.min() >= 0
    assert 1 / gaps.mean() == pytest.approx(4.0, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05, abs=1e-9)


def test_arrivals_are_the_same_for_the_same_seed() -> None:
    assert list(islice(poisson(2.0, rng()), 5000)) == list(islice(poisson(2.0, rng()), 5000))
    with pytest.raises(ConfigError, match="rate: 0"):
        next(gamma(0, 1, rng()))
    with pytest.raises(ConfigError, match="cv: -1"):
        next(gamma(1, -1, rng()))


def bodies(n: int) -> list[SimRequest]:
    return [SimRequest(99.0, prompt_len, 1) for prompt_len in range(1, n + 1)]


def test_a_closed_loop_keeps_its_number() -> None:
    loop = ClosedLoop(iter(bodies(5)), 3)
    running = list(loop.first())
    assert [(body.arrival_s, body.prompt_len) for body in running] == [(0.0, 1), (0.0, 2), (0.0, 3)]
    fourth = loop.after(running[0], 7.5)
    assert fourth is not None
    assert (fourth.arrival_s, fourth.prompt_len) == (7.5, 4)
    assert loop.after(running[1], 8.0) is not None
    assert loop.after(running[2], 9.0) is None
    with pytest.raises(ConfigError, match="concurrency: 0"):
        ClosedLoop(iter(()), 0)


def test_an_open_loop_goes_on_by_itself() -> None:
    loop = OpenLoop(iter(bodies(2)))
    assert [body.prompt_len for body in loop.first()] == [1, 2]
    assert loop.after(bodies(1)[0], 5.0) is None


TALK = Talk(Lengths(4), Lengths(100, 0.3), Lengths(50, 0.3), think_s=3.0, shared_len=64)


def test_a_turn_continues_what_was_said() -> None:
    sessions = Sessions(iter([0.0, 1.0]), TALK, seed=3)
    first, other = sessions.first()
    turns = [first]
    while (turn := sessions.after(turns[-1], turns[-1].arrival_s + 2.0)) is not None:
        turns.append(turn)
    assert [turn.turn for turn in turns] == [0, 1, 2, 3]
    for before, turn in pairwise(turns):
        said = before.prompt_len + before.output_len
        assert turn.prompt_len > said
        assert turn.arrival_s > before.arrival_s + 2.0
        assert turn.pieces[: said // PIECE_LEN] == before.pieces[: said // PIECE_LEN]
    num_shared = 64 // PIECE_LEN
    assert other.pieces[:num_shared] == first.pieces[:num_shared]
    assert not set(other.pieces[num_shared:]) & set(first.pieces[num_shared:])


def test_turns_do_not_depend_on_the_order_in_which_sessions_go_on() -> None:
    one, two = (Sessions(iter([0.0, 1.0]), TALK, seed=3) for _ in range(2))
    first = list(one.first())
    second = list(two.first())
    assert [one.after(turn, 5.0) for turn in first] == [two.after(turn, 5.0) for turn in reversed(second)][::-1]


def test_a_session_ends_before_it_gets_too_long() -> None:
    talk = Talk(Lengths(50), Lengths(100), Lengths(50), most_len=500)
    sessions = Sessions(iter([0.0]), talk, seed=1)
    turn: SimRequest | None = next(iter(sessions.first()))
    seen = []
    while turn is not None:
        seen.append(turn.prompt_len + turn.output_len)
        turn = sessions.after(turn, 0.0)
    assert seen == [150, 300, 450]


def test_a_mix_has_the_clients_rates_and_lengths(tmp_path: Path) -> None:
    windows = [[600.0, 2.0, 1.0, None, 1.0, None], [1200.0, 0.0, 0.0, None, 0.0, None], [1800.0, 4.0, 1.0, None, 1.0]]
    shares = {"input_tokens": {"7": 1.0}, "output_tokens": {"3": 0.5, "5.0": 0.5}}
    quiet = [[600.0, 0.5, 2.0, None, 1.0, None]]
    clients = [
        {"id": 1, "windows_start_rate_cv_params": windows, "hist": shares},
        {"id": 2, "windows_start_rate_cv_params": quiet, "hist": {**shares, "input_tokens": {"900": 1.0}}},
        {"id": 3, "windows_start_rate_cv_params": [[600.0, 0.0, 0.0, None, 0.0]], "hist": {"input_tokens": {}}},
    ]
    path = tmp_path / "mix.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"category": "x", "clients": clients}).encode()))
    requests = list(mix(read_mix(path), seed=1))
    times = [request.arrival_s for request in requests]
    assert times == sorted(times)
    assert times[-1] < 1800
    busy = [request for request in requests if request.prompt_len == 7]
    assert sum(request.arrival_s < 600 for request in busy) == pytest.approx(1200, rel=0.1)
    assert not any(600 <= request.arrival_s < 1200 for request in busy)
    assert sum(request.arrival_s >= 1200 for request in busy) == pytest.approx(2400, rel=0.1)
    assert {request.output_len for request in requests} == {3, 5}
    assert requests == list(mix(read_mix(path), seed=1))
    doubled = sum(request.prompt_len == 7 for request in mix(read_mix(path), seed=1, scale=2.0))
    assert doubled == pytest.approx(2 * len(busy), rel=0.1)


@pytest.mark.parametrize("text", ["{}", '{"clients": 3}', '{"clients": [{"hist": {}}]}', "no json"])
def test_what_is_no_mix_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mix.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="is not a mix of clients"):
        read_mix(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_mix(tmp_path / "none.json")


def test_pairs_go_on_without_end() -> None:
    drawn = list(islice(pairs(Lengths(10), Lengths(20), rng()), 3000))
    assert drawn == [(10, 20)] * 3000
