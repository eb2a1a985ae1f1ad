"""Token-exactness with transformers, whatever a step mixes."""

from __future__ import annotations

import random
import threading
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoints import FAMILIES, VOCAB_SIZE, checkpoint, copy_checkpoint
from tests.exec.torch.driver import build, drive, greedy, reference_model, references
from tokenizers import Tokenizer

from equipoise import LLM
from equipoise.config import CacheConfig, ModelConfig, SchedulerConfig
from equipoise.errors import InvalidValueError, InvariantError
from equipoise.exec.torch import executor as executor_module
from equipoise.exec.torch.executor import build_torch_executor
from equipoise.exec.torch.torch_ops import TorchOps
from equipoise.request import Grammar, Request, SamplingParams
from equipoise.sched.columns import Columns
from equipoise.sched.plan import PrefillRow, StepPlan

if TYPE_CHECKING:
    from pathlib import Path

    from equipoise.exec.torch.executor import TorchExecutor

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


def test_tokens_do_not_depend_on_depth_or_page_size() -> None:
    prompts = prompts_of(5, 33, 18, seed=4)
    expected = references("llama", prompts, NUM_TOKENS)
    for depth, page_size in ((0, 1), (1, 64), (3, 16)):
        cache = CacheConfig(page_size=page_size, num_pages=1024)
        scheduler = SchedulerConfig(depth=depth, max_step_tokens=24)
        with closing(build("llama", cache=cache)) as executor:
            outcome = drive(executor, prompts, greedy(NUM_TOKENS), cache=cache, scheduler=scheduler)
        assert outcome.tokens == expected, (depth, page_size)


@pytest.mark.parametrize("family", ["mistral", "gpt_oss", "gemma2"])
def test_torch_operations_give_the_same_tokens(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a C compiler, and as on a GPU."""
    monkeypatch.setattr(executor_module, "choose_ops", lambda *_: TorchOps())
    prompts = prompts_of(1, 9, 40, 70)
    with closing(build(family)) as executor:
        outcome = drive(executor, prompts, greedy(NUM_TOKENS), scheduler=SchedulerConfig(max_step_tokens=37))
    assert outcome.tokens == references(family, prompts, NUM_TOKENS)


def test_columns_may_change_once_a_plan_was_submitted() -> None:
    """The worker is kept busy while every column that the plan was gathered from is overwritten."""
    (prompt,) = prompts_of(20)
    request = Request(1, "r", np.array(prompt, np.int32), greedy(2), max_model_len=512)
    columns = Columns(2, 512, 16)
    with closing(build("llama")) as executor:
        executor.bind(columns)
        request.pages = [4, 2]
        columns.seat(request, 1)
        plan = StepPlan(0)
        plan.prefills, plan.seated, plan.num_tokens = [PrefillRow(request, 1, 0, 20, True)], [request], 20
        plan.sampled_seats, plan.sampled_at = np.array([1], np.int32), np.array([20])
        plan.sampled_handles = columns.handle[plan.sampled_seats]
        held = threading.Event()
        executor._worker.submit(held.wait)
        step = executor.submit(plan)
        assert not step.done()
        columns.tokens[:] = columns.page_table[:] = columns.computed[:] = columns.known[:] = 0
        plan.sampled_seats[:] = 0
        plan.sampled_at[:] = 0
        held.set()
        assert step.result().tokens.tolist() == references("llama", [prompt], 1)[0]
        assert step.done()


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_logprobs_are_those_of_the_model(family: str) -> None:
    """Prompt logprobs over chunks and a preemption: each position once, whatever was computed twice."""
    prompts = prompts_of(40, 26, 33, seed=9)
    params = greedy(12, logprobs=3, prompt_logprobs=2)
    cache = CacheConfig(page_size=4, num_pages=24)
    scheduler = SchedulerConfig(max_step_tokens=11, reserve_full_prompt=False)
    with closing(build(family, cache=cache)) as executor:
        outcome = drive(executor, prompts, params, cache=cache, scheduler=scheduler)
    assert outcome.totals.preemptions > 0
    for i, prompt in enumerate(prompts):
        ids = prompt + outcome.tokens[i]
        with torch.inference_mode():
            expected = reference_model(family)(torch.tensor([ids])).logits[0].log_softmax(-1)  # type: ignore[operator]
        scored = outcome.prompt_logprobs[i] + outcome.logprobs[i]
        assert [entry.token_id for entry in scored] == ids[1:]
        for entry, row in zip(scored, expected, strict=False):
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-3)
            assert entry.rank == int((row > row[entry.token_id]).sum()) + 1
            top = row.topk(len(entry.top_ids))
            assert entry.top_logprobs == pytest.approx(top.values.tolist(), abs=1e-3)
        assert [len(entry.top_ids) for entry in scored] == [2] * (len(prompt) - 1) + [3] * 12


def test_grammar_and_seeded_draws_survive_preemption() -> None:
    prompts = prompts_of(30, 30, 30, seed=2)
    seeded = SamplingParams(max_tokens=25, temperature=0.9, seed=5, ignore_eos=True)
    ruled = SamplingParams(max_tokens=25, temperature=1.0, seed=6, grammar=Grammar("regex", "[a-c]{20,30}"))
    params = [seeded, ruled, greedy(25)]
    alone = []
    for prompt, own in zip(prompts, params, strict=True):
        with closing(build("llama")) as executor:
            prepare(executor, prompt, own)
            alone += drive(executor, [prompt], [own]).tokens
    cache = CacheConfig(page_size=4, num_pages=28)
    with closing(build("llama", cache=cache)) as executor:
        prepare(executor, prompts[1], ruled, handle=1)
        outcome = drive(executor, prompts, params, cache=cache, scheduler=SchedulerConfig(max_step_tokens=40))
    assert outcome.totals.preemptions > 0
    assert outcome.tokens == alone
    assert set(decode(outcome.tokens[1])) <= set("abc")
    assert len(decode(outcome.tokens[1])) >= 20


def prepare(executor: TorchExecutor, prompt: list[int], params: SamplingParams, handle: int = 0) -> None:
    request = Request(handle, "g", np.array(prompt, np.int32), params, max_model_len=512, eos_ids=executor.info.eos_ids)
    ready = executor.prepare(request)
    if ready is not None:
        ready.result(timeout=30)


def decode(tokens: list[int]) -> str:
    return str(Tokenizer.from_file(str(checkpoint("llama") / "tokenizer.json")).decode(tokens))


def test_bfloat16_runs_on_a_cpu() -> None:
    settings = ModelConfig(model=str(checkpoint("llama")), device="cpu", dtype="bfloat16", num_threads=1)
    with closing(build_torch_executor(settings, CacheConfig(num_pages=64), SchedulerConfig())) as executor:
        assert executor.info.dtype == "bfloat16"
        outcome = drive(executor, prompts_of(20, 30), greedy(10))
    assert [len(tokens) for tokens in outcome.tokens] == [10, 10]


def test_info() -> None:
    with closing(build("llama", cache=CacheConfig(page_size=32, num_pages=7))) as executor:
        info = executor.info
    assert (info.model_type, info.vocab_size, info.max_model_len) == ("llama", VOCAB_SIZE, 512)
    assert (info.page_size, info.num_pages, info.eos_ids) == (32, 7, (2,))
    assert (info.device, info.dtype) == ("cpu", "float32")


def test_a_step_that_fails_raises_and_does_not_block_the_next() -> None:
    prompts = prompts_of(4)
    with closing(build("llama")) as executor:
        whole = executor._loaded.model.forward
        executor._loaded.model.forward = failing  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="no such kernel"):
            drive(executor, prompts, greedy(3))
        executor._loaded.model.forward = whole  # type: ignore[method-assign]
        plan_again = StepPlan(1)
        plan_again.decode_seats, plan_again.num_tokens = np.zeros(1, np.int32), 1
        plan_again.decode_starts = np.zeros(1, np.int64)
        plan_again.sampled_seats, plan_again.sampled_at = np.zeros(1, np.int32), np.ones(1, np.int64)
        assert executor.submit(plan_again).result().tokens.shape == (1,)


def failing(token_ids: torch.Tensor, batch: object) -> torch.Tensor:
    raise RuntimeError("no such kernel")


def test_close_ends_the_thread_and_may_be_repeated() -> None:
    executor = build("llama")
    drive(executor, prompts_of(3), greedy(2))
    names = {thread.name for thread in threading.enumerate()}
    assert any(name.startswith("equipoise-torch") for name in names)
    executor.close()
    executor.close()
    executor.forget(Request(0, "r", np.ones(1, np.int32), greedy(1), max_model_len=9))
    assert not any(thread.name.startswith("equipoise-torch") for thread in threading.enumerate())


def test_submitting_unbound_and_binding_twice_are_bugs() -> None:
    with closing(build("llama")) as executor:
        with pytest.raises(InvariantError, match="before the columns were bound"):
            executor.submit(StepPlan(0))
        executor.bind(Columns(1, 512, 16))
        with pytest.raises(InvariantError, match="bound already"):
            executor.bind(Columns(1, 512, 16))


def test_a_request_that_cannot_be_sampled_fails_by_its_own_handle(tmp_path: Path) -> None:
    """Requests are named by handle, not by row: the one that fails is the one that is at fault."""
    folder = copy_checkpoint("llama", tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][7] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    params = SamplingParams(max_tokens=3, temperature=0.0, logit_bias={7: -100.0})
    with LLM(str(folder), num_pages=64, device="cpu", dtype="float32") as llm:
        with pytest.raises(InvalidValueError, match="not finite"):
            llm.generate([7], params)
        with pytest.raises(InvalidValueError, match="not finite"):
            llm.generate([[1, 2], [7], [3]], params)
