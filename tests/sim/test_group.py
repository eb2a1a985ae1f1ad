"""Ranks in lockstep against steps that were worked out by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from equipoise.sim.run import simulate
from equipoise.sim.scenario import make_scenario

if TYPE_CHECKING:
    from pathlib import Path

    from equipoise.sim.run import Results

TWO_REQUESTS = "arrival_s,input_tokens,output_tokens\n0,100,3\n0,50,5\n"


def lockstep(folder: Path, trace: str, **sections: Any) -> Results:
    """Two ranks that take turns; a step costs 10 ms, and 1 ms per prefill token, 2 per decode row, of the slowest."""
    (folder / "trace.csv").write_text(trace, encoding="utf-8")
    table = {
        "workload": {"kind": "file", "path": "trace.csv"},
        "fleet": {"ranks": 2, "lockstep": True},
        "scheduler": {"depth": 0, "max_step_tokens": 60},
        "cost": {"step_ms": 10, "prefill_token_ms": 1, "decode_row_ms": 2},
        "routing": {"rank_policy": "none"},
    }
    return simulate(make_scenario({**table, **sections}), folder=folder)


def test_a_step_lasts_as_long_as_its_slowest_rank(tmp_path: Path) -> None:
    results = lockstep(tmp_path, TWO_REQUESTS)
    columns = results.requests.columns()
    assert columns["rank"].tolist() == [0, 1]
    #        rank 0            rank 1
    # step 1 60 of 100 tokens  idle, its request comes when the step is under way     70 ms
    # step 2 40 left           50 tokens                                              60 ms
    # 3, 4   decodes 2 tokens  decodes                                                12 ms each
    # 5, 6   idle              decodes 2 more                                         12 ms each
    assert columns["first_s"].tolist() == pytest.approx([0.130, 0.130])
    assert columns["last_s"].tolist() == pytest.approx([0.154, 0.178])
    steps = results.steps
    assert (steps.num_steps, steps.num_prefill_steps) == (6, 2)
    assert steps.busy_s == pytest.approx(2 * 0.178)
    # Rank 1 lost 60 ms of the first step, rank 0 10 ms of the second and 2 ms of each of the last two.
    assert steps.lost_s == pytest.approx({"prefill": 0.070, "seats": 0.004, "kv": 0.0})


def test_the_seed_gate_holds_newcomers_back_while_another_rank_is_full(tmp_path: Path) -> None:
    trace = "arrival_s,input_tokens,output_tokens\n0,10,9\n0,10,2\n0.05,10,2\n0.05,10,2\n"
    # Rank 0 has its only seat taken until the end of its nine tokens: balance keeps rank 1 from the fourth request.
    scheduler = {"depth": 0, "max_step_tokens": 60, "max_running": 1}
    free = lockstep(tmp_path, trace, scheduler=scheduler).requests.columns()["admitted_s"]
    held = lockstep(tmp_path, trace, scheduler={**scheduler, "balance": True, "balance_margin": 0})
    ended_s = held.requests.columns()["last_s"][0]
    assert free[3] < ended_s
    assert held.requests.columns()["admitted_s"][3] >= ended_s


def test_ranks_by_themselves_do_not_wait_for_each_other(tmp_path: Path) -> None:
    columns = lockstep(tmp_path, TWO_REQUESTS, fleet={"ranks": 2}).requests.columns()
    assert columns["first_s"].tolist() == pytest.approx([0.120, 0.060])
    assert columns["last_s"].tolist() == pytest.approx([0.144, 0.108])


def test_gaps_of_preempted_requests_span_the_time_without_a_seat(tmp_path: Path) -> None:
    # 12 pages of 4 tokens: both fit until they grow, then the second gives its pages to the first.
    trace = "arrival_s,input_tokens,output_tokens\n0,17,20\n0,17,20\n"
    results = lockstep(tmp_path, trace, fleet={}, cache={"page_size": 4, "num_pages": 12})
    columns = results.requests.columns()
    assert columns["num_preemptions"].tolist() == [0, 1]
    gaps = results.steps.gaps
    assert gaps.num == 2 * 19
    assert gaps.sum_ps == 257 * 10**9 + 394 * 10**9
    # The first: 29 ms beside the other's chunk, 6 of 14 ms beside its decodes, 12 of 12 ms alone. The second: 6, 12
    # and the time that it was out.
    assert columns["last_s"].tolist() == pytest.approx([0.027 + 0.257, 0.056 + 0.394])
    assert gaps.percentile(1.0) == pytest.approx(0.394 - 6 * 0.014 - 12 * 0.012, rel=0.012)


@pytest.mark.parametrize(("depth", "between_ms"), [(0, 35), (1, 20), (2, 20)])
def test_a_host_slower_than_the_steps_sets_the_pace(tmp_path: Path, depth: int, between_ms: float) -> None:
    """Planning takes 20 ms, a step 15: one after the other at depth 0, else planning alone counts."""
    results = lockstep(
        tmp_path,
        "arrival_s,input_tokens,output_tokens\n0,1,50\n",
        scheduler={"depth": depth},
        cost={"step_ms": 15, "prefill_token_ms": 0, "decode_row_ms": 0},
        host={"step_us": 20_000},
    )
    columns = results.requests.columns()
    mean_s = (columns["last_s"][0] - columns["first_s"][0]) / 49
    assert mean_s == pytest.approx(between_ms / 1e3)


def test_ranks_plan_side_by_side(tmp_path: Path) -> None:
    """A rank has one row, and planning a row takes 20 ms: the other rank's row costs nothing more."""
    results = lockstep(
        tmp_path,
        "arrival_s,input_tokens,output_tokens\n0,1,5\n0,1,5\n",
        cost={"step_ms": 15, "prefill_token_ms": 0, "decode_row_ms": 0},
        host={"row_us": 20_000},
    )
    columns = results.requests.columns()
    assert (columns["last_s"] - columns["first_s"]).tolist() == pytest.approx([4 * 0.035] * 2)
