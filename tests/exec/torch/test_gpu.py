"""The same code on a GPU: torch's operations, steps launched ahead of the device."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from tests.checkpoints import checkpoint
from tests.exec.torch.driver import drive, greedy, references
from tests.exec.torch.test_executor import NUM_TOKENS, prompts_of

from equipoise.config import CacheConfig, ModelConfig, SchedulerConfig
from equipoise.exec.torch.executor import build_torch_executor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma2", "gpt_oss", "qwen3_moe"])
def test_tokens_are_those_of_transformers(family: str, depth: int) -> None:
    shared, *tails = prompts_of(37, 3, 11, 20, seed=1)
    prompts = [*prompts_of(1, 9, 40, 70), *(shared + tail for tail in tails)]
    cache = CacheConfig(page_size=4, num_pages=60)
    scheduler = SchedulerConfig(max_running=6, max_step_tokens=21, depth=depth)
    model = ModelConfig(model=str(checkpoint(family)), device="cuda", dtype="float32")
    with closing(build_torch_executor(model, cache, scheduler)) as executor:
        assert executor.info.device == "cuda"
        outcome = drive(executor, prompts, greedy(NUM_TOKENS), cache=cache, scheduler=scheduler)
    assert outcome.tokens == references(family, prompts, NUM_TOKENS)


def test_pages_fill_the_memory_given() -> None:
    model = ModelConfig(model=str(checkpoint("llama")), device="cuda")
    with closing(build_torch_executor(model, CacheConfig(kv_memory_gb=1.0), SchedulerConfig())) as executor:
        page_bytes = 2 * 2 * 2 * 16 * 16 * 4
        assert executor.info.num_pages == 2**30 // page_bytes
