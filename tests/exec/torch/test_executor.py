"""Token-exactness with transformers, whatever a step mixes."""

from __future__ import annotations

import random

import pytest
from tests.checkpoints import FAMILIES, VOCAB_SIZE
from tests.exec.torch.driver import build, drive, greedy, references

from equipoise.config import CacheConfig, SchedulerConfig

NUM_TOKENS = 30


def prompts_of(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("family", FAMILIES)
def test_plain(family: str) -> None:
    prompts = prompts_of(1, 9, 40, 70)
    executor = build(family)
    outcome = drive(executor, prompts, greedy(NUM_TOKENS), scheduler=SchedulerConfig(depth=0))
    executor.close()
    assert outcome.tokens == references(family, prompts, NUM_TOKENS)


@pytest.mark.parametrize("family", FAMILIES)
def test_everything_at_once(family: str) -> None:
    """Staggered arrivals, tiny chunks, shared prefixes, preemption and a plan in flight."""
    shared, *tails = prompts_of(37, 3, 11, 20, 34, seed=1)
    prompts = [*prompts_of(1, 9, 40, 70), *(shared + tail for tail in tails), shared]
    cache = CacheConfig(page_size=4, num_pages=60)
    scheduler = SchedulerConfig(max_running=6, max_step_tokens=13, depth=1)
    executor = build(family, cache=cache)
    outcome = drive(
        executor,
        prompts,
        greedy(NUM_TOKENS),
        cache=cache,
        scheduler=scheduler,
        arrivals=[0, 0, 3, 3, 8, 8, 30, 30, 60],
    )
    executor.close()
    assert outcome.totals.preemptions > 0
    assert outcome.totals.cached_tokens > 0
    assert outcome.tokens == references(family, prompts, NUM_TOKENS)
