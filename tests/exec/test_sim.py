"""The sim executor: seeded tokens that depend on nothing but request and position, and time by the cost model."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.clock import VirtualClock, WallClock
from equipoise.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SimExecutorConfig
from equipoise.errors import ConfigError, InvalidValueError
from equipoise.exec.cost import LinearCost
from equipoise.exec.sim import SimExecutor, SimVocabulary, StepPart, sim_info
from equipoise.request import Grammar, Request, SamplingParams
from equipoise.sched.assemble import build_scheduler
from equipoise.sched.columns import Columns
from equipoise.sched.plan import PrefillRow, StepPlan

SIM = SimExecutorConfig(sim_vocab_size=50, sim_num_pages=64, sim_max_model_len=200)


def executor(clock: VirtualClock | WallClock | None = None, **settings: object) -> SimExecutor:
    info = sim_info(EngineConfig(sim=SIM, cache=CacheConfig(page_size=4)))
    return SimExecutor(info, LinearCost(step_s=1.0), clock or VirtualClock(), **settings)  # type: ignore[arg-type]


def request(handle: int, prompt: list[int], **params: object) -> Request:
    sampling = SamplingParams(**{"max_tokens": 12, **params})  # type: ignore[arg-type]
    return Request(handle, f"r{handle}", np.array(prompt, np.int32), sampling, max_model_len=200)


def serve(
    requests: list[Request], seed: int = 0, *, num_pages: int = 64, **limits: object
) -> tuple[dict[int, list[int]], int]:
    """Run the real scheduler over a sim executor: (tokens by handle, preemptions)."""
    clock = VirtualClock()
    config = EngineConfig(sim=SIM, cache=CacheConfig(page_size=4, num_pages=num_pages))
    sim = SimExecutor(sim_info(config), LinearCost(0.01), clock, seed=seed)
    scheduler = build_scheduler(SchedulerConfig(depth=0, **limits), config.cache, sim.info, clock)  # type: ignore[arg-type]
    sim.bind(scheduler.columns)
    for each in requests:
        scheduler.add(each)
    finished: dict[int, list[int]] = {}
    for _ in range(2000):
        if not scheduler.has_work:
            break
        plan = scheduler.schedule()
        for ended in scheduler.apply(plan, sim.submit(plan).result()).finished:
            finished[ended.handle] = ended.output_ids
    return finished, scheduler.totals.preemptions


prompts = st.lists(st.lists(st.integers(0, 49), min_size=1, max_size=12), min_size=1, max_size=6)


@settings(max_examples=25, deadline=None)
@given(prompts, st.integers(1, 4), st.integers(8, 20))
def test_tokens_do_not_depend_on_company(prompts: list[list[int]], max_running: int, num_pages: int) -> None:
    together, _ = serve(
        [request(i, prompt) for i, prompt in enumerate(prompts)],
        num_pages=num_pages,
        max_running=max_running,
        max_step_tokens=7,
    )
    for i, prompt in enumerate(prompts):
        alone, _ = serve([request(99, prompt)])
        assert together[i] == alone[99]
        assert len(alone[99]) == 12


def test_tokens_survive_preemption() -> None:
    crowd = [request(i, [i] * 8, max_tokens=20) for i in range(4)]
    together, num_preemptions = serve(crowd, num_pages=10, max_running=4)
    assert num_preemptions > 0
    assert together[3] == serve([request(3, [3] * 8, max_tokens=20)])[0][3]


def test_seeds() -> None:
    def tokens(sim_seed: int, **params: object) -> list[int]:
        return serve([request(1, [1, 2, 3], **params)], sim_seed)[0][1]

    assert tokens(0) == tokens(0)
    assert tokens(0) != tokens(1)
    assert tokens(0, seed=5) != tokens(0, seed=6)
    assert tokens(0, seed=-1) == tokens(0, seed=-1)
    by_seed = [serve([request(1, [p, 2, 3], seed=5)])[0][1] for p in (1, 9)]
    assert by_seed[0] == by_seed[1]


def test_hidden_tokens_are_never_drawn() -> None:
    sim = executor(hidden_ids=tuple(range(45)))
    sim.bind(Columns(1, 200, 4))
    one = request(1, [1])
    one.seat = 0
    tokens = np.concatenate([sim.submit(_sampling(one, at)).result().tokens for at in range(300)])
    assert set(tokens.tolist()) == set(range(45, 50))
    with pytest.raises(ConfigError, match="special tokens only"):
        executor(hidden_ids=tuple(range(50)))


def _sampling(one: Request, at: int) -> StepPlan:
    plan = StepPlan(at)
    plan.seated = [one]
    plan.prefills = [PrefillRow(one, 0, 0, 1, True)]
    plan.sampled_seats, plan.sampled_handles = np.array([0], np.int32), np.array([one.handle])
    plan.sampled_at = np.array([at])
    plan.num_tokens = 1
    return plan


def test_steps_end_one_after_the_other() -> None:
    clock = VirtualClock()
    sim = executor(clock)
    sim.bind(Columns(1, 200, 4))
    one = request(1, [1])
    one.seat = 0
    first, second = sim.submit(_sampling(one, 1)), sim.submit(_sampling(one, 2))
    assert not first.done()
    clock.advance(1.5)
    assert first.done()
    assert not second.done()
    second.result()
    assert clock.now() == pytest.approx(2.0)
    clock.advance(10)
    sim.submit(_sampling(one, 3)).result()
    assert clock.now() == pytest.approx(13.0)


def test_wall_clock_is_waited_for() -> None:
    sim = SimExecutor(executor().info, LinearCost(0.02), WallClock())
    sim.bind(Columns(1, 200, 4))
    one = request(1, [1])
    one.seat = 0
    start = time.monotonic()
    step = sim.submit(_sampling(one, 1))
    assert not step.done()
    step.result()
    assert time.monotonic() - start >= 0.02
    assert step.done()


def test_logprobs_are_sane() -> None:
    sim = executor()
    sim.bind(Columns(1, 200, 4))
    one = request(7, [3, 4, 5], logprobs=4, prompt_logprobs=2)
    one.seat = 0
    plan = _sampling(one, 3)
    plan.prefills = [PrefillRow(one, 0, 0, 3, True)]
    output = sim.submit(plan).result()
    drawn = output.logprobs[0]
    assert drawn.token_id == output.tokens[0] == drawn.top_ids[0]
    assert drawn.rank == 1
    assert len(set(drawn.top_ids)) == len(drawn.top_logprobs) == 4
    assert drawn.top_logprobs == sorted(drawn.top_logprobs, reverse=True)
    assert sum(math.exp(logprob) for logprob in drawn.top_logprobs) <= 1
    assert [each.token_id for each in output.prompt_logprobs[7]] == [4, 5]
    sim.forget(one)
    plan.seated = []
    assert not sim.submit(plan).result().logprobs


def test_grammars_are_refused() -> None:
    refused = executor().prepare(request(1, [1], grammar=Grammar("regex", "a+")))
    assert refused is not None
    with pytest.raises(InvalidValueError, match="random tokens") as caught:
        refused.result()
    assert caught.value.field == "grammar"
    assert executor().prepare(request(1, [1])) is None


def test_info_follows_the_settings() -> None:
    config = EngineConfig(model=ModelConfig(max_model_len=77), cache=CacheConfig(page_size=8, num_pages=9), sim=SIM)
    info = sim_info(config, SimVocabulary(123, (1,), (0, 1)))
    assert (info.vocab_size, info.eos_ids, info.max_model_len) == (123, (1,), 77)
    assert (info.page_size, info.num_pages) == (8, 9)
    assert sim_info(EngineConfig(sim=SIM)).vocab_size == 50


# ---------------------------------------------------------------- lockstep


class Table:
    """A GroupClock: ranks put their parts on it, step by step."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.steps: list[list[StepPart]] = []

    def rank(self) -> Seat:
        return Seat(self)


class Seat:
    """One rank's place at a Table."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.num = 0

    def begin(self, part: StepPart) -> PartsOf:
        if self.num == len(self.table.steps):
            self.table.steps.append([])
        parts = self.table.steps[self.num]
        parts.append(part)
        self.num += 1
        return PartsOf(parts, self.table.num_ranks)


class PartsOf:
    """The parts of a step, when all are there."""

    def __init__(self, parts: list[StepPart], num_ranks: int) -> None:
        self.parts = parts
        self.num_ranks = num_ranks

    def done(self) -> bool:
        return len(self.parts) == self.num_ranks

    def wait(self) -> list[StepPart]:
        assert self.done(), "a rank would wait for ever"
        return self.parts


def group_of(num_ranks: int, cost: LinearCost) -> tuple[list[SimExecutor], list[VirtualClock]]:
    """Executors in lockstep, each with a clock of its own."""
    table, info = Table(num_ranks), sim_info(EngineConfig(sim=SIM, cache=CacheConfig(page_size=4)))
    clocks = [VirtualClock() for _ in range(num_ranks)]
    sims = [SimExecutor(info, cost, clock, group=table.rank()) for clock in clocks]
    for sim in sims:
        sim.bind(Columns(8, 200, 50))
    return sims, clocks


def decodes(*starts: int) -> StepPlan:
    """A plan that decodes a row at each of `starts`."""
    plan = StepPlan(0)
    plan.decode_seats = np.arange(len(starts), dtype=np.int64)
    plan.decode_starts = np.array(starts, np.int64)
    plan.sampled_seats, plan.sampled_at = plan.decode_seats, plan.decode_starts + 1
    plan.sampled_handles = plan.decode_seats
    plan.num_tokens = len(starts)
    return plan


def test_a_step_of_a_group_ends_with_its_slowest_rank() -> None:
    sims, clocks = group_of(3, LinearCost(step_s=10.0, decode_row_s=1.0))
    clocks[1].advance(0.5)  # it comes last
    steps = [sims[0].submit(decodes(5)), sims[1].submit(decodes(5, 6, 7)), sims[2].submit_idle()]
    outputs = [step.result() for step in steps]
    assert [clock.now() for clock in clocks] == [0.5 + 10 + 3] * 3
    assert [output.wait_s for output in outputs] == [2.0, 0.0, 0.0]
    assert [len(output.tokens) for output in outputs] == [1, 3, 0]


def test_steps_launched_ahead_follow_one_another() -> None:
    sims, clocks = group_of(2, LinearCost(step_s=10.0, decode_row_s=1.0))
    first = [sims[0].submit(decodes(5)), sims[1].submit_idle()]
    second = [sims[0].submit_idle(), sims[1].submit(decodes(5, 6))]
    assert not first[0].done()
    assert [step.result().wait_s for step in first] == [0.0, 0.0]
    assert [clock.now() for clock in clocks] == [11.0, 11.0]
    assert first[0].done()
    assert second[0].ends_at() == 11 + 12
    assert [step.result().wait_s for step in second] == [0.0, 0.0]
    assert [clock.now() for clock in clocks] == [23.0, 23.0]


def test_a_step_that_nobody_has_rows_for_takes_no_time() -> None:
    sims, clocks = group_of(2, LinearCost(step_s=10.0))
    for step in [sim.submit_idle() for sim in sims]:
        step.result()
    assert [clock.now() for clock in clocks] == [0.0, 0.0]
