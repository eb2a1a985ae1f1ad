"""Drafts change how many steps a request takes, and nothing that its user sees."""

from __future__ import annotations

import pytest

from equipoise import LLM, SamplingParams

# Two of them say, before they end, how they go on: drafts are kept there.
PROMPTS = ["Count on: 3, 4, 5,", "12+7=", "21 22 23 24 21 22 23", "Count on: 3, 4, 5, 6, 7, 8, 3, 4, 5,"]
PARAMS = {
    "greedy": SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, logprobs=2),
    "seeded": SamplingParams(max_tokens=40, seed=3, ignore_eos=True),
    "end of text": SamplingParams(max_tokens=40, temperature=0, logprobs=0),
    "stop string": SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, stop=("24", "7,")),
    "stop token": SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, stop_token_ids=(ord("4"), ord("7"))),
    "penalty": SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, repetition_penalty=1.3),
}


@pytest.fixture(scope="module")
def plain():
    with LLM("demo", max_running=3, num_threads=1) as llm:
        yield [llm.generate(PROMPTS, params) for params in PARAMS.values()]


def shown(outputs):
    """What a user sees, with logprobs rounded: the batch decides their last bits."""
    return [
        (
            choice.text,
            choice.token_ids,
            choice.finish_reason,
            choice.stop_reason,
            choice.logprobs and [(entry.token_id, round(entry.logprob, 3), entry.rank) for entry in choice.logprobs],
        )
        for output in outputs
        for choice in output.outputs
    ]


@pytest.mark.parametrize("settings", [{"depth": 1}, {"depth": 0, "page_size": 4, "num_pages": 30}], ids=str)
def test_drafts_change_nothing_that_is_seen(plain, settings):
    with LLM("demo", max_running=3, num_threads=1, num_drafts=4, **settings) as llm:
        for (name, params), expected in zip(PARAMS.items(), plain, strict=True):
            assert shown(llm.generate(PROMPTS, params)) == shown(expected), name
