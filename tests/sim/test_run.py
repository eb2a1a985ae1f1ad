"""Whole simulations: leaps change nothing, the same scenario gives the same results, and nothing is lost."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.errors import ConfigError
from equipoise.sim.fleet import first_ranks
from equipoise.sim.run import Simulation, simulate
from equipoise.sim.scenario import make_scenario
from equipoise.sim.step_log import StepLog

if TYPE_CHECKING:
    from pathlib import Path

    from equipoise.sim.run import Results

NUM_PREFIXES = 4
PIECE_LEN = 512
A_64TH_MS = 15.625
"""Sums of 64ths of a second are exact, and an eighth has eight: steps and arrivals that meet do so to the bit."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recorded requests: bursts that share prefixes, some longer than a rank can hold."""
    path = tmp_path_factory.mktemp("traces")
    draw = random.Random(5)
    time_ms = 0
    with (path / "trace.jsonl").open("w", encoding="utf-8") as file:
        for number in range(40):
            time_ms += draw.choice((0, 0, 125, 750))
            prompt_len = draw.choice((3, 90, 600, 1300, 2600))
            first = draw.randrange(NUM_PREFIXES)
            ids = [100 * first, *(1000 * number + piece for piece in range(1, -(-prompt_len // PIECE_LEN)))]
            row = {"timestamp": time_ms, "input_length": prompt_len, "output_length": draw.choice((1, 2, 40, 150))}
            file.write(json.dumps(row | {"hash_ids": ids}) + "\n")
    return path


def lengths(mean: int, spread: float) -> dict[str, Any]:
    return {"mean": mean, "spread": spread, "shape": "lognormal"}


workloads = st.one_of(
    st.fixed_dictionaries(
        {
            "num_requests": st.integers(1, 25),
            "prompt": st.builds(lengths, st.integers(1, 120), st.sampled_from([0, 0.6])),
            "output": st.builds(lengths, st.integers(1, 60), st.sampled_from([0, 0.6])),
        },
        optional={"seed": st.just(0)},
    ).flatmap(
        lambda table: st.one_of(
            st.integers(1, 12).map(lambda n: {**table, "concurrency": n}),
            st.sampled_from([2.0, 20.0]).map(lambda rate: {**table, "rate": rate, "cv": 2.0}),
        )
    ),
    st.fixed_dictionaries(
        {
            "kind": st.just("sessions"),
            "num_requests": st.integers(1, 5),
            "rate": st.sampled_from([1.0, 10.0]),
            "think_s": st.sampled_from([0, 0.5]),
            "shared_len": st.sampled_from([0, 40]),
            "prompt": st.just(lengths(30, 0.5)),
            "output": st.just(lengths(30, 0.5)),
        }
    ),
    st.fixed_dictionaries(
        {"kind": st.just("file"), "path": st.just("trace.jsonl"), "rate_scale": st.sampled_from([0.5, 1.0, 4.0])},
        optional={"concurrency": st.integers(1, 10)},
    ),
).map(lambda table: {key: value for key, value in table.items() if key != "seed"})


def with_gates(scheduler: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(lambda gates, table: {**table, **gates}, gates, st.fixed_dictionaries(scheduler))


gates = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"balance": st.just(True), "balance_margin": st.just(0)}),
    st.fixed_dictionaries({"min_free_seats": st.integers(2, 3)}),
    st.fixed_dictionaries({"rent_or_buy": st.just(True), "rent_or_buy_max_delay_s": st.sampled_from([0.2, 10.0])}),
    st.fixed_dictionaries({"admission_cap": st.integers(1, 4)}),
    st.fixed_dictionaries({"rent_or_buy": st.just(True), "rent_or_buy_max_delay_s": st.sampled_from([None, 0.1])}),
    st.fixed_dictionaries(
        {
            "prefill_alignment": st.just(True),
            "prefill_alignment_passes": st.sampled_from([2, 30]),
            "prefill_alignment_delay_s": st.sampled_from([0.1, 5.0]),
        }
    ),
)

tables = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 3),
        "workload": workloads,
        "fleet": st.fixed_dictionaries(
            {"workers": st.integers(1, 2), "ranks": st.integers(1, 5), "lockstep": st.booleans()}
        ),
        "scheduler": with_gates(
            {
                "depth": st.integers(0, 2),
                "max_running": st.integers(3, 8),
                "max_step_tokens": st.sampled_from([16, 64, 300]),
                "reserve_full_prompt": st.booleans(),
                "max_bypass": st.integers(0, 2),
                "prefill_interval": st.integers(1, 3),
                "preempt": st.sampled_from(["last", "cheapest"]),
            }
        ),
        "cache": st.fixed_dictionaries(
            {
                "page_size": st.sampled_from([4, 16]),
                "num_pages": st.sampled_from([12, 60, 170, 700]),
                "prefix_cache": st.booleans(),
            }
        ),
        "cost": st.fixed_dictionaries(
            {
                "step_ms": st.sampled_from([3.7, 20.0, A_64TH_MS]),
                "prefill_token_ms": st.sampled_from([0.0, 0.1]),
                "eager_step_ms": st.sampled_from([None, 31.0]),
                "decode_row_ms": st.sampled_from([0.0, 0.9]),
                "kv_token_us": st.sampled_from([0.0, 3.3]),
            }
        ),
        "host": st.fixed_dictionaries(
            {"step_us": st.sampled_from([0.0, 0.0, 700.0, 3800.0]), "row_us": st.sampled_from([0.0, 90.0, 900.0])}
        ),
        "routing": st.fixed_dictionaries(
            {
                "worker_policy": st.sampled_from(["prefix_tokens", "least_load", "round_robin", "power_of_two"]),
                "rank_policy": st.sampled_from(["minimum_tokens", "none", "round_robin"]),
                "report_interval_s": st.sampled_from([0.0, 0.05, 1.0]),
                "report_delay_s": st.sampled_from([0.0, 0.3]),
                "charges": st.booleans(),
            }
        ),
    }
)


def bits(results: Results, log: StepLog | None = None) -> dict[str, bytes]:
    """Everything that came of a simulation, to the last bit."""
    found = {name: column.tobytes() for name, column in results.requests.columns().items()}
    if log is not None:
        columns = log.columns(first_ranks(results.scenario.fleet))
        found |= {f"step_{name}": column.tobytes() for name, column in columns.items()}
    return found | {name: np.float64(value).tobytes() for name, value in results.summary().items()}


@settings(deadline=None, max_examples=150)
@given(tables)
def test_leaps_change_nothing(folder: Path, table: dict[str, Any]) -> None:
    scenario = make_scenario(table)
    logs = {leaps: StepLog() for leaps in (True, False)}
    leapt, stepped = (simulate(scenario, folder=folder, leaps=leaps, sinks=[log]) for leaps, log in logs.items())
    assert bits(leapt, logs[True]) == bits(stepped, logs[False])
    assert stepped.steps.num_leapt == 0


@settings(deadline=None, max_examples=60)
@given(tables)
def test_every_request_ends_once_and_nothing_is_left_over(folder: Path, table: dict[str, Any]) -> None:
    scenario = make_scenario(table)
    simulation = Simulation(scenario, folder)
    ended: list[int] = []
    simulation.on_progress = lambda num_ended, _now: ended.append(num_ended)
    simulation.run()
    columns = simulation.results().requests.columns()
    is_done = ~np.isnan(columns["last_s"])
    assert ended == list(range(1, int(is_done.sum()) + 1))
    assert (columns["arrival_s"] <= columns["admitted_s"])[is_done].all()
    assert (columns["admitted_s"] < columns["first_s"])[is_done].all()
    assert (columns["first_s"] <= columns["last_s"])[is_done].all()
    for times in ("admitted_s", "first_s"):
        assert np.isnan(columns[times][~is_done]).all()
    assert (columns["worker"] >= 0).all()
    assert (columns["rank"] < scenario.fleet.ranks).all()
    assert (columns["num_cached"] < columns["prompt_len"]).all()
    for scheduler in simulation.schedulers():
        scheduler.check()
        assert not scheduler.has_work
        assert scheduler.num_requests == 0
    for load in simulation.front.loads:
        assert [(rank.num_active, rank.active) for rank in load.ranks] == [(0, 0)] * scenario.fleet.ranks


@settings(deadline=None, max_examples=60)
@given(tables)
def test_every_token_but_the_first_of_each_request_has_a_gap(folder: Path, table: dict[str, Any]) -> None:
    results = simulate(make_scenario(table), folder=folder)
    columns = results.requests.columns()
    is_done = ~np.isnan(columns["last_s"])
    gaps = results.steps.gaps
    assert gaps.num == (columns["output_len"][is_done] - 1).sum()
    between_s = (columns["last_s"] - columns["first_s"])[is_done].sum()
    assert gaps.sum_ps / 1e12 == pytest.approx(between_s, rel=1e-9, abs=1e-9)


SMALL = {
    "workload": {"num_requests": 30, "rate": 5.0, "prompt": lengths(200, 0.5), "output": lengths(50, 0.5)},
    "fleet": {"workers": 2, "ranks": 2},
    "routing": {"worker_policy": "power_of_two"},
}


def test_the_seed_decides() -> None:
    first, again = (simulate(make_scenario(SMALL)) for _ in range(2))
    other = simulate(make_scenario({**SMALL, "seed": 1}))
    assert bits(first) == bits(again)
    assert bits(first)["prompt_len"] != bits(other)["prompt_len"]


def test_a_lone_request_takes_the_steps_that_it_needs() -> None:
    table = {
        "workload": {"num_requests": 1, "concurrency": 1, "prompt": {"mean": 100}, "output": {"mean": 4}},
        "scheduler": {"max_step_tokens": 60, "depth": 0},
        "cost": {"step_ms": 10, "prefill_token_ms": 1, "decode_row_ms": 2},
    }
    results = simulate(make_scenario(table))
    columns = results.requests.columns()
    # Chunks of 60 and 40 tokens, then a decode for each of the other three tokens.
    assert columns["admitted_s"].tolist() == [0.0]
    assert columns["first_s"][0] == pytest.approx(0.070 + 0.050)
    assert columns["last_s"][0] == pytest.approx(0.120 + 3 * 0.012)
    summary = results.summary()
    assert (summary["num_steps"], summary["num_prefill_steps"]) == (5, 2)
    assert summary["tpot_mean_ms"] == pytest.approx(12)
    assert summary["throughput_tok_s"] == pytest.approx(4 / 0.156)


@pytest.mark.parametrize(("depth", "decode_ms"), [(0, 10 + 3), (1, 10)])
def test_planning_hides_behind_the_step_before_when_planned_ahead(depth: int, decode_ms: float) -> None:
    table = {
        "workload": {"num_requests": 1, "concurrency": 1, "prompt": {"mean": 10}, "output": {"mean": 101}},
        "scheduler": {"depth": depth},
        "cost": {"step_ms": 10, "prefill_token_ms": 0, "decode_row_ms": 0},
        "host": {"step_us": 1000, "row_us": 2000},
    }
    assert simulate(make_scenario(table)).summary()["tpot_mean_ms"] == pytest.approx(decode_ms)


def test_planning_that_takes_longer_than_steps_holds_them_up() -> None:
    table = {
        "workload": {"num_requests": 1, "concurrency": 1, "prompt": {"mean": 10}, "output": {"mean": 101}},
        "scheduler": {"depth": 1},
        "cost": {"step_ms": 10, "prefill_token_ms": 0, "decode_row_ms": 0},
        "host": {"step_us": 15000},
    }
    # The host plans one step after the other.
    assert simulate(make_scenario(table)).summary()["tpot_mean_ms"] == pytest.approx(15, rel=0.01)


@pytest.mark.parametrize("leaps", [True, False])
def test_who_comes_as_a_step_ends_is_in_the_next_but_those_planned(tmp_path: Path, leaps: bool) -> None:
    rows = ["arrival_s,input_tokens,output_tokens", "0,10,100", "0.125,10,2", "0.25,10,2"]
    (tmp_path / "trace.csv").write_text("\n".join(rows), encoding="utf-8")
    table = {
        "workload": {"kind": "file", "path": "trace.csv"},
        "scheduler": {"depth": 0},
        "cost": {"step_ms": A_64TH_MS, "prefill_token_ms": 0, "decode_row_ms": 0},
    }
    columns = simulate(make_scenario(table), folder=tmp_path, leaps=leaps).requests.columns()
    # The step that begins as they come is under way already.
    assert columns["admitted_s"].tolist() == [0, 9 / 64, 17 / 64]


def test_reports_come_as_often_as_the_scenario_says(tmp_path: Path) -> None:
    rows = ["arrival_s,input_tokens,output_tokens", "0,10,500", "3.25,10,2", "3.3,10,2"]
    (tmp_path / "trace.csv").write_text("\n".join(rows), encoding="utf-8")

    def last_report_s(interval_s: float, delay_s: float = 0.0) -> float | None:
        table = {
            "workload": {"kind": "file", "path": "trace.csv"},
            "routing": {"report_interval_s": interval_s, "report_delay_s": delay_s},
            "cost": {"step_ms": 10, "decode_row_ms": 0},
        }
        simulation = Simulation(make_scenario(table), tmp_path)
        simulation.run()
        return simulation.front.loads[0].ranks[0].reported_at

    assert last_report_s(0) == 3.3
    assert last_report_s(2) == last_report_s(2, delay_s=0.5) == 6  # the long one ends at 5 s
    assert last_report_s(1000) == 1000


def test_requests_that_cannot_be_served_are_recorded_as_refused(tmp_path: Path) -> None:
    rows = ["arrival_s,input_tokens,output_tokens", "0,50,5", "0,900,5", "0,300,200", "0,200,20000", "1,40,5"]
    (tmp_path / "trace.csv").write_text("\n".join(rows), encoding="utf-8")
    table = {
        "workload": {"kind": "file", "path": "trace.csv"},
        "fleet": {"max_model_len": 800},
        "cache": {"num_pages": 25, "page_size": 16},
    }
    results = simulate(make_scenario(table), folder=tmp_path)
    # The second is longer than the model, the third and the fourth outgrow the 400 tokens that there are pages for.
    assert np.isnan(results.requests.columns()["last_s"]).tolist() == [False, True, True, True, False]
    summary = results.summary()
    assert (summary["num_requests"], summary["num_finished"], summary["num_refused"]) == (5, 2, 3)


def test_outputs_end_at_the_length_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("arrival_s,input_tokens,output_tokens\n0,50,500\n", encoding="utf-8")
    table = {"workload": {"kind": "file", "path": "trace.csv"}, "fleet": {"max_model_len": 80}}
    assert simulate(make_scenario(table), folder=tmp_path).requests.columns()["output_len"].tolist() == [30]


def test_a_full_queue_refuses() -> None:
    table = {
        "workload": {"num_requests": 10, "rate": 1e6},
        "scheduler": {"max_running": 2, "max_waiting_reqs": 3, "max_step_tokens": 8192},
    }
    assert 5 <= simulate(make_scenario(table)).summary()["num_refused"] <= 7


def test_closed_loops_go_on_after_a_refusal() -> None:
    table = {
        "workload": {
            "num_requests": 10,
            "concurrency": 1,
            "prompt": {"mean": 100, "spread": 1, "shape": "exponential"},
        },
        "fleet": {"max_model_len": 100},
    }
    summary = simulate(make_scenario(table)).summary()
    assert summary["num_requests"] == 10
    assert 0 < summary["num_refused"] < 10


def test_prefixes_of_a_trace_are_hits(folder: Path) -> None:
    table = {"workload": {"kind": "file", "path": "trace.jsonl"}, "scheduler": {"max_running": 1}}
    cached = simulate(make_scenario(table), folder=folder).requests.columns()["num_cached"]
    # Of those with a first piece that came before, all of it is there; of shorter ones all but the last page.
    assert sorted(set(cached.tolist())) == [0, 80, 512]
    table["cache"] = {"prefix_cache": False}
    assert not simulate(make_scenario(table), folder=folder).requests.columns()["num_cached"].any()


def test_the_time_lost_to_the_slowest_rank_is_told_apart() -> None:
    table = {
        "workload": {
            "num_requests": 40,
            "concurrency": 10,
            "prompt": lengths(500, 0.5),
            "output": lengths(50, 0.5),
        },
        "fleet": {"ranks": 3, "lockstep": True},
        "cost": {"kv_token_us": 2.0, "prefill_pair_ns": 20.0},
    }
    summary = simulate(make_scenario(table)).summary()
    parts = [summary[f"lost_to_{part}_share"] for part in ("prefill", "seats", "kv")]
    assert sum(parts) == pytest.approx(summary["lost_share"])
    assert 0 < summary["lost_share"] < 1
    assert all(parts)
    table["fleet"] = {"ranks": 3}
    assert simulate(make_scenario(table)).summary()["lost_share"] == 0


def test_policies_that_are_not_there_are_refused() -> None:
    with pytest.raises(ConfigError, match="worker policy: 'fastest' is not known, allowed are prefix_tokens"):
        simulate(make_scenario({**SMALL, "routing": {"worker_policy": "fastest"}}))


def test_progress_is_told() -> None:
    told: list[tuple[int, float]] = []
    simulate(make_scenario(SMALL), on_progress=lambda num, now: told.append((num, now)))
    assert [num for num, _ in told] == list(range(1, 31))
    assert [now for _, now in told] == sorted(now for _, now in told)
