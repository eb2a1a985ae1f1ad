"""A seeded row's token depends on nothing but its own request, logits and position."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.exec.torch.sampler import Sampler
from equipoise.request import Request, SamplingParams

CPU = torch.device("cpu")
EOS = 3

params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 4.0]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    top_k=st.sampled_from([0, 1, 4, 40]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, -0.5]),
    logit_bias=st.sampled_from([None, {2: 1.5}, {EOS: -100.0}]),
    min_tokens=st.sampled_from([0, 6]),
    logprobs=st.sampled_from([None, 0, 3]),
    seed=st.integers(-(2**63), 2**63 - 1),
)


@st.composite
def crowds(draw: st.DrawFn):
    """Requests with logits for a few steps each, and the order in which each step takes them to seats."""
    vocab = draw(st.sampled_from([5, 33, 1500]))
    members = draw(st.lists(params, min_size=1, max_size=7))
    steps = draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = rng.normal(0, draw(st.sampled_from([0.0, 1.0, 20.0])), (len(members), steps, vocab)).astype(np.float32)
    shuffles = [rng.permutation(len(members)) for _ in range(steps)]
    moves = rng.random((steps, len(members))) < 0.3
    return members, logits, shuffles, moves, rng


def make_requests(members: list[SamplingParams]) -> list[Request]:
    return [
        Request(i, f"r{i}", np.array([1, 2, i % 4], np.int32), member, max_model_len=100, eos_ids=(EOS,))
        for i, member in enumerate(members)
    ]


def alone(request: Request, logits: np.ndarray) -> tuple[list[int], list[object]]:
    sampler = Sampler(1, logits.shape[1], CPU)
    sampler.seat(0, request, request.prompt_ids)
    tokens, reports = [], []
    for step, row in enumerate(logits):
        sampled = sampler.sample(torch.from_numpy(row[None].copy()), np.zeros(1, np.int64), np.array([3 + step]))
        assert sampled.failed == {}
        tokens.append(int(sampled.tokens[0]))
        reports.append(sampled.logprobs.get(0))
    return tokens, reports


@settings(max_examples=80, deadline=None)
@given(crowds())
def test_a_row_is_the_same_alone_and_in_any_crowd(crowd):
    members, logits, shuffles, moves, rng = crowd
    requests = make_requests(members)
    expected = [alone(request, logits[i]) for i, request in enumerate(requests)]
    num_seats = 2 * len(members)
    sampler = Sampler(num_seats, logits.shape[2], CPU)
    seats = rng.permutation(num_seats)[: len(members)].astype(np.int64)
    drawn: list[list[int]] = [[] for _ in members]
    for i, request in enumerate(requests):
        sampler.seat(int(seats[i]), request, request.prompt_ids)
    for step, order in enumerate(shuffles):
        for i in np.flatnonzero(moves[step]):  # preempted and resumed in a seat that is free
            seats[i] = rng.choice(np.setdiff1d(np.arange(num_seats), seats))
            sampler.seat(int(seats[i]), requests[i], np.array([*requests[i].prompt_ids, *drawn[i]], np.int32))
        batch = torch.from_numpy(logits[order, step])
        sampled = sampler.sample(batch, seats[order], np.full(len(order), 3 + step))
        assert sampled.failed == {}
        for row, i in enumerate(order):
            drawn[i].append(int(sampled.tokens[row]))
            reported, wanted = sampled.logprobs.get(row), expected[i][1][step]
            assert (reported is None) == (wanted is None)
            if reported is not None:
                assert (reported.token_id, reported.rank) == (wanted.token_id, wanted.rank)
    assert drawn == [tokens for tokens, _ in expected]
