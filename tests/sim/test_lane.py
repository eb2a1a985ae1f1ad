"""Ranks that are brought up to date late: what gates are shown, who lands first, and gates that never open."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.clock import VirtualClock
from equipoise.config import CacheConfig, SchedulerConfig
from equipoise.errors import InvariantError
from equipoise.exec.cost import LinearCost
from equipoise.exec.protocol import ExecutorInfo
from equipoise.request import Request, SamplingParams
from equipoise.sched.assemble import build_scheduler
from equipoise.sched.extend import Extension
from equipoise.sched.rules import OPEN, Lasting, StepView
from equipoise.sim.events import Events
from equipoise.sim.group import Group, HostCost
from equipoise.sim.results import Requests, Steps
from equipoise.sim.run import simulate
from equipoise.sim.scenario import make_scenario
from equipoise.sim.workload.request import SimRequest

if TYPE_CHECKING:
    from pathlib import Path

    from equipoise.sched.scheduler import Scheduler

shown: list[list[tuple[Any, ...]]] = []
"""By rank, what its gate was shown."""


def _recorder(view_of: list[tuple[Any, ...]]) -> Any:
    def gate(view: StepView) -> int:
        since = view.num_steps_since_prefill
        counts = (view.num_running, view.num_decoding, view.num_prefilling, view.num_waiting, view.num_free_seats)
        view_of.append((view.step, view.now_s, *counts, since, view.has_backlog, view.ranks))
        return 0 if max(rank.num_running for rank in view.ranks) >= 4 else OPEN

    return gate


def watchful(_config: SchedulerConfig, _info: ExecutorInfo) -> Extension:
    """A gate that wants to see every step."""
    shown.append([])
    return Extension(admission_gates=[_recorder(shown[-1])])


def lasting(_config: SchedulerConfig, _info: ExecutorInfo) -> Extension:
    """The same gate, which says that its answers last."""
    shown.append([])
    return Extension(admission_gates=[Lasting(_recorder(shown[-1]))])


class Remembering:
    """A gate that remembers what it is shown, and whose answer lasts."""

    lasts = True

    def __init__(self) -> None:
        self._gate = _recorder(shown[-1])

    def __call__(self, view: StepView) -> int:
        answer: int = self._gate(view)
        return answer


def remembering(_config: SchedulerConfig, _info: ExecutorInfo) -> Extension:
    """One for each rank."""
    shown.append([])
    return Extension(admission_gates=[Remembering()])


def never_open(_config: SchedulerConfig, _info: ExecutorInfo) -> Extension:
    """A gate that lets nobody in, and might some day."""
    return Extension(admission_gates=[lambda _view: 0])


def closed_for_good(_config: SchedulerConfig, _info: ExecutorInfo) -> Extension:
    """A gate that lets nobody in, and says so."""
    return Extension(admission_gates=[Lasting(lambda _view: 0)])


def open_for_two(_config: SchedulerConfig, _info: ExecutorInfo) -> Extension:
    """A gate that opens when two wait."""
    return Extension(admission_gates=[Lasting(lambda view: OPEN if view.num_waiting >= 2 else 0)])


def table_of(rule: str, **changes: Any) -> dict[str, Any]:
    """Three ranks in lockstep, held back now and then."""
    lengths = {"mean": 40, "spread": 0.7, "shape": "lognormal"}
    table = {
        "workload": {"num_requests": 20, "concurrency": 14, "prompt": lengths, "output": lengths},
        "fleet": {"ranks": 3, "lockstep": True},
        "scheduler": {"max_running": 5, "max_step_tokens": 64, "rules": [f"tests.sim.test_lane:{rule}"]},
        "cache": {"page_size": 4, "num_pages": 90},
        "cost": {"step_ms": 11.0, "prefill_token_ms": 0.1, "decode_row_ms": 0.7, "kv_token_us": 1.3},
    }
    return {name: {**table.get(name, {}), **changes.get(name, {})} for name in {**table, **changes}}


@settings(deadline=None, max_examples=20)
@given(
    st.fixed_dictionaries({"depth": st.integers(0, 2), "max_step_tokens": st.sampled_from([16, 64, 500])}),
    st.fixed_dictionaries({"num_pages": st.sampled_from([60, 90, 500]), "prefix_cache": st.booleans()}),
    st.sampled_from([{"concurrency": 14}, {"concurrency": 5}, {"rate": 20.0}]),
    st.integers(0, 3),
)
def test_gates_are_shown_every_step_as_if_it_were_taken(
    scheduler: dict[str, Any], cache: dict[str, Any], load: dict[str, Any], seed: int
) -> None:
    table = table_of("watchful", scheduler=scheduler, cache=cache)
    table["seed"] = seed
    table["workload"] = {name: value for name, value in table["workload"].items() if name != "concurrency"} | load
    seen = []
    for leaps in (True, False):
        shown.clear()
        simulate(make_scenario(table), leaps=leaps)
        seen.append([list(views) for views in shown])
    assert seen[0] == seen[1]


def test_gates_whose_answers_last_are_not_asked_meanwhile() -> None:
    num_shown, results = [], []
    for rule in ("watchful", "lasting"):
        shown.clear()
        results.append(simulate(make_scenario(table_of(rule))))
        num_shown.append(sum(map(len, shown)))
    assert results[0].summary() == results[1].summary()
    assert results[0].steps.num_leapt == 0
    assert results[1].steps.num_leapt > 20
    assert num_shown[1] < num_shown[0] - 20


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_gates_of_all_ranks_are_shown_the_same_states(depth: int) -> None:
    shown.clear()
    results = simulate(make_scenario(table_of("remembering", scheduler={"depth": depth})))
    assert results.steps.num_leapt > 20
    states = [[view[-1] for view in views] for views in shown]
    assert len(states[0]) > 40
    assert states[0] == states[1] == states[2]


@pytest.mark.parametrize("report_interval_s", [0, 1.0])
@pytest.mark.parametrize(("rule", "ranks", "held_s"), [("never_open", 1, 600), ("closed_for_good", 3, 2)])
def test_a_gate_that_never_opens_ends_the_simulation(
    rule: str, ranks: int, held_s: int, report_interval_s: float
) -> None:
    routing = {"report_interval_s": report_interval_s}
    table = table_of(rule, routing=routing, workload={"num_requests": 3}, fleet={"ranks": ranks})
    with pytest.raises(InvariantError, match=f"{rule} let no request start for {held_s} s.*: 3 wait, #0, #"):
        simulate(make_scenario(table))


def test_a_gate_that_waits_for_who_comes_late_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("arrival_s,input_tokens,output_tokens\n0,9,3\n99,9,3\n", encoding="utf-8")
    table = table_of("open_for_two") | {"workload": {"kind": "file", "path": "trace.csv"}, "fleet": {}}
    admitted_s = simulate(make_scenario(table), folder=tmp_path).requests.columns()["admitted_s"]
    assert admitted_s.tolist() == pytest.approx([99, 99], abs=0.1)


@pytest.mark.parametrize("leaps", [True, False])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_groups_whose_steps_end_together_the_lowest_lands_first(order: tuple[int, int], leaps: bool) -> None:
    clock, events, requests, ended = VirtualClock(), Events(), Requests(), []
    info = ExecutorInfo("sim", 1, 200, 4, 64, (), "sim", "none")

    def group(number: int) -> Group:
        rank: Scheduler = build_scheduler(SchedulerConfig(depth=0), CacheConfig(page_size=4), info, clock)
        cost = LinearCost(step_s=1 / 64)
        return Group(
            number,
            [rank],
            cost,
            HostCost(),
            events,
            requests,
            Steps(),
            lambda request, _now: ended.append(request.handle),
            leaps=leaps,
        )

    groups = {number: group(number) for number in order}
    for number in order:
        index = requests.add(SimRequest(0.0, 4, 30), 0.0)
        params = SamplingParams(max_tokens=30, ignore_eos=True)
        groups[number].add(0, Request(index, "", np.zeros(4, np.int32), params, max_model_len=200), 0.0)
    while events:
        now, call = events.pop()
        clock.move_to(now)
        call()
    assert ended == [order.index(0), order.index(1)]
