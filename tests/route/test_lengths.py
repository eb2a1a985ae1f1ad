"""What replies teach of lengths, and what a few odd ones cannot."""

from __future__ import annotations

import pytest

from equipoise.route.lengths import Lengths


def taught(num_replies, prompt_bytes, prompt_tokens, output_tokens):
    lengths = Lengths()
    for _ in range(num_replies):
        lengths.learn("m", prompt_bytes, prompt_tokens, output_tokens)
    return lengths


def test_before_any_reply_priors_hold():
    assert Lengths().num_prompt("m", 4000) == 1000
    assert Lengths().num_output("m", None) == 256
    assert Lengths().num_prompt("m", 1) == 1


@pytest.mark.parametrize("bytes_per_token", [1, 3, 12])
def test_bytes_per_token_are_learnt(bytes_per_token):
    lengths = taught(300, 1000 * bytes_per_token, 1000, None)
    assert lengths.num_prompt("m", 60_000) == pytest.approx(60_000 / bytes_per_token, rel=0.02)
    assert lengths.num_prompt("other", 60_000) == 15_000
    assert lengths.num_output("m", None) == 256


@pytest.mark.parametrize("output", [0, 7, 3000])
def test_outputs_are_learnt_and_bounded(output):
    lengths = taught(500, 0, 0, output)
    assert lengths.num_output("m", None) == pytest.approx(output, rel=0.02, abs=1)
    assert lengths.num_output("m", 5) == min(5, output)
    assert lengths.num_prompt("m", 4000) == 1000


@pytest.mark.parametrize(("prompt_bytes", "prompt_tokens"), [(4_000_000, 1), (4000, 10**9)])
def test_one_absurd_reply_moves_little(prompt_bytes, prompt_tokens):
    lengths = taught(300, 4000, 1000, 100)
    lengths.learn("m", prompt_bytes, prompt_tokens, 10**9)
    assert 600 < lengths.num_prompt("m", 4000) < 1100
    assert lengths.num_output("m", None) < 110


@pytest.mark.parametrize(("prompt_bytes", "prompt_tokens", "output"), [(0, 10, -1), (10, 0, None), (-5, -5, -5)])
def test_counts_that_say_nothing_teach_nothing(prompt_bytes, prompt_tokens, output):
    lengths = taught(100, prompt_bytes, prompt_tokens, output)
    assert (lengths.num_prompt("m", 4000), lengths.num_output("m", None)) == (1000, 256)


def test_models_are_bounded_and_the_one_longest_silent_is_forgotten():
    lengths = Lengths(max_models=2)
    for model in ("a", "b", "a", "c"):
        for _ in range(200):
            lengths.learn(model, 8000, 1000, 10)
    assert len(lengths) == 2
    assert [lengths.num_output(model, None) for model in "abc"] == [10, 256, 10]
