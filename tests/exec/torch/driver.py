"""Drives a TorchExecutor through the real scheduler, as the engine loop does; and the reference tokens."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from tests.checkpoints import checkpoint

from equipoise.clock import VirtualClock
from equipoise.config import CacheConfig, ModelConfig, SchedulerConfig
from equipoise.exec.torch.executor import build_torch_executor
from equipoise.request import Request, SamplingParams
from equipoise.sched.assemble import build_scheduler

if TYPE_CHECKING:
    from equipoise.exec.protocol import ExecutorInfo, StepOutput, TokenLogprobs
    from equipoise.exec.torch.executor import TorchExecutor
    from equipoise.sched.plan import StepPlan
    from equipoise.sched.scheduler import Totals


@dataclass
class Outcome:
    """tokens[i]: outputs of prompt i. Logprobs in the order of their positions."""

    tokens: list[list[int]]
    totals: Totals
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)


def greedy(max_tokens: int, **fields: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **fields)  # type: ignore[arg-type]


def build(
    family: str, *, cache: CacheConfig | None = None, scheduler: SchedulerConfig | None = None, model: str | None = None
) -> TorchExecutor:
    settings = ModelConfig(model=model or str(checkpoint(family)), device="cpu", num_threads=1)
    return build_torch_executor(settings, cache or CacheConfig(num_pages=256), scheduler or SchedulerConfig())


def drive(
    executor: TorchExecutor,
    prompts: list[list[int]],
    params: SamplingParams | list[SamplingParams],
    *,
    cache: CacheConfig | None = None,
    scheduler: SchedulerConfig | None = None,
    arrivals: list[int] | None = None,
) -> Outcome:
    """Run `prompts` to their ends. arrivals[i]: the step before which prompt i is added."""
    settings = scheduler or SchedulerConfig(max_running=len(prompts))
    sched = build_scheduler(settings, cache or CacheConfig(), executor.info, VirtualClock())
    executor.bind(sched.columns)
    each = params if isinstance(params, list) else [params] * len(prompts)
    requests = [_request(i, *pair, executor.info) for i, pair in enumerate(zip(prompts, each, strict=True))]
    waiting = deque(sorted(zip(arrivals or [0] * len(prompts), requests, strict=True), key=lambda pair: pair[0]))
    outcome = Outcome([[] for _ in prompts], sched.totals)
    outstanding: deque[tuple[StepPlan, object]] = deque()
    step = 0
    while waiting or sched.has_work or outstanding:
        while waiting and waiting[0][0] <= step:
            sched.add(waiting.popleft()[1])
        plan = sched.schedule()
        if not plan.is_empty:
            outstanding.append((plan, executor.submit(plan)))
        while len(outstanding) > settings.depth or (plan.is_empty and outstanding):
            done, handle = outstanding.popleft()
            output = handle.result()  # type: ignore[attr-defined]
            _note(outcome, done, output)
            for request in sched.apply(done, output).finished:
                outcome.tokens[request.handle] = list(request.output_ids)
                executor.forget(request)
        step += 1
    return outcome


def _request(handle: int, prompt: list[int], params: SamplingParams, info: ExecutorInfo) -> Request:
    ids = np.array(prompt, np.int32)
    return Request(handle, f"r{handle}", ids, params, max_model_len=info.max_model_len, eos_ids=info.eos_ids)


def _note(outcome: Outcome, plan: StepPlan, output: StepOutput) -> None:
    for row, entry in output.logprobs.items():
        outcome.logprobs.setdefault(int(plan.sampled_handles[row]), []).append(entry)
    for handle, entries in output.prompt_logprobs.items():
        outcome.prompt_logprobs.setdefault(handle, []).extend(entries)
    outcome.failed.update(output.failed)


@cache
def reference_model(family: str) -> object:
    """transformers' own model in float32."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint(family), dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model.eval()


@cache
def reference(family: str, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    """Greedy tokens of transformers' `generate`."""
    import torch

    ids = torch.tensor([prompt])
    made = reference_model(family).generate(  # type: ignore[attr-defined]
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False
    )
    return made[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def references(family: str, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    return [reference(family, tuple(prompt), num_tokens) for prompt in prompts]
