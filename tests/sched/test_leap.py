"""A leap leaves behind what its steps would have: counters, pages, prefixes, load and all that comes later."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.clock import VirtualClock
from equipoise.config import CacheConfig, SchedulerConfig
from equipoise.exec.protocol import ExecutorInfo, StepOutput
from equipoise.request import Request, SamplingParams
from equipoise.sched.assemble import build_scheduler

if TYPE_CHECKING:
    from equipoise.kv.paged import PagedKV
    from equipoise.sched.plan import StepPlan
    from equipoise.sched.scheduler import Scheduler

PAGE_SIZE = 4
MAX_MODEL_LEN = 400


class Ask(NamedTuple):
    """A request that comes when so many steps have landed."""

    at_step: int
    prompt: tuple[int, ...]
    num_output: int


class Runner:
    """Runs one scheduler until all is done; takes leaps of random lengths, or none."""

    def __init__(self, asks: list[Ask], config: SchedulerConfig, num_pages: int, leaps: list[int]) -> None:
        info = ExecutorInfo("sim", 100, MAX_MODEL_LEN, PAGE_SIZE, num_pages, (), "sim", "none")
        self.scheduler: Scheduler = build_scheduler(config, CacheConfig(page_size=PAGE_SIZE), info, VirtualClock())
        self._asks = deque(sorted(asks))
        self._leaps = leaps
        self._plans: deque[StepPlan] = deque()
        self.num_leapt = 0
        self.num_landed = 0
        self.ended: list[tuple[int, int, tuple[int, ...]]] = []
        self.snapshots: dict[int, object] = {}

    def run(self) -> Runner:
        number = 0
        while self._asks or self.scheduler.num_requests:
            while self._asks and self._asks[0].at_step <= self.num_landed:
                ask = self._asks.popleft()
                params = SamplingParams(max_tokens=ask.num_output, ignore_eos=True)
                prompt = np.array(ask.prompt, np.int32)
                request = Request(number, f"r{number}", prompt, params, max_model_len=MAX_MODEL_LEN)
                self.scheduler.add(request)
                number += 1
            self._turn()
        return self

    def _turn(self) -> None:
        launched = False
        if self.scheduler.has_work:
            plan = self.scheduler.schedule()
            launched = not plan.is_empty
            if launched:
                self._plans.append(plan)
        if self._plans and (not launched or len(self._plans) > self.scheduler.depth):
            self._land()
        elif not launched and self._asks:
            self.num_landed = max(self.num_landed, self._asks[0].at_step)  # idle until then

    def _land(self) -> None:
        plan = self._plans.popleft()
        result = self.scheduler.apply(plan, StepOutput(tokens=np.zeros(len(plan.sampled_seats), np.int32)))
        self.num_landed += 1
        self.ended += [(self.num_landed, r.handle, tuple(r.output_ids)) for r in result.finished]
        if len(self._plans) == self.scheduler.depth:
            self._leap()
        self.scheduler.check()
        self.snapshots[self.num_landed] = self._snapshot()

    def _leap(self) -> None:
        if not self._leaps:
            return
        most = self._asks[0].at_step - self.num_landed if self._asks else 1000
        quiet = self.scheduler.quiet_steps(most) if most > 0 else 0
        n = min(quiet, self._leaps[self.num_leapt % len(self._leaps)])
        if n:
            self.scheduler.leap(n, 0.0, 0.0)
            self.num_landed += n
            self.num_leapt += 1

    def _snapshot(self) -> object:
        scheduler = self.scheduler
        kv: PagedKV = scheduler.kv  # type: ignore[assignment]
        keys = kv._index._key_of
        requests = sorted(scheduler.requests(), key=lambda request: request.handle)
        seated = [request for request in requests if request.seat is not None]
        columns = scheduler.columns
        rows = [
            tuple(int(column[request.seat]) for column in (columns.computed, columns.known, columns.length))
            for request in seated
        ]
        owned = [(r.handle, r.place, [keys[page] for page in r.pages], r.num_published) for r in requests]
        cached = [keys[page] for page in kv._pool.cached()]
        plans = [(plan.step, plan.decode_starts.tolist(), plan.sampled_at.tolist()) for plan in self._plans]
        return rows, owned, cached, kv.num_free, scheduler.load(), replace(scheduler.totals), plans


prompts = st.one_of(
    st.integers(1, 30).map(lambda n: tuple(range(n))),  # prefixes of each other
    st.tuples(st.integers(50, 60), st.integers(1, 20)).map(lambda pair: (pair[0],) * pair[1]),
)
asks = st.builds(Ask, st.integers(0, 150), prompts, st.integers(1, 90))
configs = st.builds(
    SchedulerConfig,
    max_running=st.integers(1, 5),
    max_step_tokens=st.integers(2, 64),
    depth=st.integers(0, 2),
    reserve_full_prompt=st.booleans(),
    preempt=st.sampled_from(["last", "cheapest"]),
    order=st.sampled_from(["fcfs", "shortest-first"]),
    max_bypass=st.integers(0, 2),
)


@settings(deadline=None, max_examples=150)
@given(st.lists(asks, min_size=1, max_size=10), configs, st.integers(32, 120), st.lists(st.integers(1, 60), min_size=1))
def test_leaping_and_stepping_end_alike(
    given_asks: list[Ask], config: SchedulerConfig, num_pages: int, leaps: list[int]
) -> None:
    stepped = Runner(given_asks, config, num_pages, []).run()
    leapt = Runner(given_asks, config, num_pages, leaps).run()
    assert leapt.ended == stepped.ended
    for step, snapshot in leapt.snapshots.items():
        assert snapshot == stepped.snapshots[step], f"after step {step}"


def test_a_lone_request_is_leapt_to_its_end() -> None:
    runner = Runner([Ask(0, (1, 2, 3), 200)], SchedulerConfig(depth=1), 100, [1000]).run()
    assert runner.num_leapt == 1
    assert len(runner.snapshots) < 8
    assert runner.ended[0][0] == 200


@pytest.mark.parametrize("depth", [0, 1])
def test_nothing_is_quiet_while_something_is_about_to_happen(depth: int) -> None:
    runner = Runner([], SchedulerConfig(depth=depth, max_running=1), 100, [])
    scheduler = runner.scheduler
    assert scheduler.quiet_steps(10) == 0  # idle
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    for handle in range(2):
        prompt = np.arange(3, dtype=np.int32)
        scheduler.add(Request(handle, "r", prompt, params, max_model_len=MAX_MODEL_LEN))
    assert scheduler.quiet_steps(10) == 0  # not admitted
    plans = [scheduler.schedule() for _ in range(depth + 1)]
    assert scheduler.quiet_steps(10) == 0  # a prefill is in flight
    scheduler.apply(plans[0], StepOutput(tokens=np.zeros(1, np.int32)))
    plans = [*plans[1:], scheduler.schedule()]
    scheduler.apply(plans[0], StepOutput(tokens=np.zeros(1, np.int32)))
    # Quiet until the step after which the length is certain, though a request waits for the seat.
    length = int(scheduler.columns.length[0])
    assert scheduler.quiet_steps(10) == 3 + 8 - length - 1
    assert scheduler.quiet_steps(2) == 2


def test_requests_with_stop_tokens_are_not_leapt_over() -> None:
    runner = Runner([], SchedulerConfig(depth=0), 100, [])
    scheduler = runner.scheduler
    params = SamplingParams(max_tokens=50, stop_token_ids=(7,))
    scheduler.add(Request(0, "r", np.arange(3, dtype=np.int32), params, max_model_len=MAX_MODEL_LEN))
    for _ in range(3):
        scheduler.apply(scheduler.schedule(), StepOutput(tokens=np.zeros(1, np.int32)))
    assert scheduler.quiet_steps(10) == 0


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_load_after_quiet_steps_is_known_without_taking_them(depth: int) -> None:
    def quiet_one() -> tuple[Scheduler, deque[StepPlan]]:
        scheduler = Runner([], SchedulerConfig(depth=depth, max_running=2), 100, []).scheduler
        for handle in range(3):  # the last one waits for a seat
            params = SamplingParams(max_tokens=60 + handle, ignore_eos=True)
            prompt = np.arange(3 + handle, dtype=np.int32)
            scheduler.add(Request(handle, "r", prompt, params, max_model_len=MAX_MODEL_LEN))
        plans: deque[StepPlan] = deque()
        while not scheduler.quiet_steps(100):
            while len(plans) <= depth:
                plans.append(scheduler.schedule())
            land(scheduler, plans)
        return scheduler, plans

    def land(scheduler: Scheduler, plans: deque[StepPlan]) -> None:
        plan = plans.popleft()
        scheduler.apply(plan, StepOutput(tokens=np.zeros(len(plan.sampled_seats), np.int32)))

    scheduler, plans = quiet_one()
    ahead = [scheduler.load_after(n) for n in range(scheduler.quiet_steps(100))]
    assert len(ahead) > 40
    for expected in ahead:
        plans.append(scheduler.schedule())
        assert scheduler.load() == expected
        land(scheduler, plans)
