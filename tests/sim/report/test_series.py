"""Series and timelines of random scenarios: they sum to the step log, and leaping shows in none of them."""

from __future__ import annotations

from io import StringIO
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.obs.trace_rules import read, steps_of, total

from equipoise.sim.fleet import first_ranks
from equipoise.sim.report.bins import as_us
from equipoise.sim.report.series import (
    BUSY,
    DECODE_TOKENS,
    DURATION_EDGES_S,
    KV_TOKENS,
    MOST_BINS_OF_RANKS,
    PARTS,
    PREFILL_TOKENS,
    RUNNING,
    WAITED,
    StepSeries,
    per_second,
)
from equipoise.sim.report.timeline import Timeline
from equipoise.sim.run import simulate
from equipoise.sim.scenario import make_scenario
from equipoise.sim.step_log import StepLog

if TYPE_CHECKING:
    from equipoise.sim.run import Results


class Told(NamedTuple):
    """What a run told its listeners."""

    results: Results
    log: StepLog
    series: StepSeries
    trace: str


def run(table: dict[str, Any], *, leaps: bool = True) -> Told:
    scenario = make_scenario(table)
    log, series, file = StepLog(), StepSeries(), StringIO()
    timeline = Timeline(file, scenario.fleet)
    results = simulate(scenario, leaps=leaps, sinks=[log, series, timeline], loss_sinks=[series])
    timeline.finish(results)
    return Told(results, log, series, file.getvalue())


LENGTHS = st.fixed_dictionaries({"mean": st.integers(1, 120), "spread": st.sampled_from([0.0, 0.6])})
TABLES = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 5),
        "fleet": st.sampled_from(
            [
                {"workers": 2, "ranks": 2},
                {"ranks": 3, "lockstep": True},
                {"prefill_workers": 1, "prefill_ranks": 2, "decode_workers": 2, "decode_ranks": 2, "lockstep": True},
            ]
        ),
        "workload": st.fixed_dictionaries(
            {"num_requests": st.integers(1, 12), "concurrency": st.integers(1, 8), "prompt": LENGTHS, "output": LENGTHS}
        ),
        "scheduler": st.fixed_dictionaries(
            {"depth": st.sampled_from([0, 1]), "max_running": st.integers(1, 8), "max_step_tokens": st.just(64)}
        ),
        "cost": st.just({"step_ms": 9, "eager_step_ms": 11.3, "prefill_token_ms": 0.7, "decode_row_ms": 1.1}),
    }
)


@settings(deadline=None, max_examples=30)
@given(TABLES)
def test_bins_and_slices_sum_to_the_step_log(table: dict[str, Any]) -> None:
    results, log, series, trace = run(table)
    firsts = first_ranks(results.scenario.fleet)
    columns = log.columns(firsts)
    ranks = np.array(firsts)[columns["worker"]] + columns["rank"]
    lasts_us = as_us(columns["ends_s"]) - as_us(columns["ends_s"] - columns["step_s"])
    bins = series.ranks
    for rank in range(firsts[-1]):
        own = ranks == rank
        sums = bins.sums[rank].sum(axis=0) if rank < len(bins.sums) else np.zeros(6, np.int64)
        last_us, decodes = lasts_us[own], columns["decode_rows"][own]
        assert sums[BUSY] == last_us.sum()
        assert sums[KV_TOKENS] == (columns["kv_tokens"][own] * last_us).sum()
        assert sums[PREFILL_TOKENS] == columns["prefill_tokens"][own].sum() * PARTS
        assert sums[DECODE_TOKENS] == decodes.sum() * PARTS
        assert sums[WAITED] == as_us(columns["wait_s"][own]).sum()
        assert sums[RUNNING] >= (decodes * last_us).sum()
    is_prefill = columns["prefill_tokens"] > 0
    assert series.durations.sum(axis=1).tolist() == [(~is_prefill).sum(), is_prefill.sum()]
    assert series.times_us.sum() == lasts_us.sum()
    assert series.lost.sums.sum() / 1e9 == pytest.approx(sum(results.steps.lost_s.values()), abs=1e-6)
    events = read(trace)
    assert len(steps_of(events)) == len(ranks)
    for name in ("prefill_tokens", "decode_rows", "kv_tokens"):
        assert total(events, name) == columns[name].sum()
    slices_us = sum(event["dur"] for event in events if event["ph"] == "X")
    assert slices_us == pytest.approx(columns["step_s"].sum() * 1e6, abs=0.01 * len(ranks))
    waits_us = sum(event["dur"] for event in events if event["name"] == "wait for the slowest")
    assert waits_us == pytest.approx(columns["wait_s"].sum() * 1e6, abs=0.01 * len(ranks))


@settings(deadline=None, max_examples=25)
@given(TABLES)
def test_leaps_show_neither_in_series_nor_in_a_timeline(table: dict[str, Any]) -> None:
    leapt, stepped = (run(table, leaps=leaps) for leaps in (True, False))
    assert stepped.results.steps.num_leapt == 0
    for one, other in ((leapt.series.ranks, stepped.series.ranks), (leapt.series.lost, stepped.series.lost)):
        assert one.width_us == other.width_us
        assert (one.sums == other.sums).all()
    assert (leapt.series.durations == stepped.series.durations).all()
    # Ranks take turns in writing; each one's lines are the same.
    assert sorted(leapt.trace.replace("\n]", ",\n]").splitlines()) == sorted(
        stepped.trace.replace("\n]", ",\n]").splitlines()
    )


def test_heat_maps_by_hand() -> None:
    # A prompt of 100 tokens takes 1 s, then two decodes that read 101 and 102 tokens take 0.5 s each.
    table = {
        "workload": {"num_requests": 1, "concurrency": 1, "prompt": {"mean": 100}, "output": {"mean": 3}},
        "scheduler": {"depth": 0},
        "cost": {"step_ms": 500, "eager_step_ms": 1000, "prefill_token_ms": 0, "decode_row_ms": 0, "kv_token_us": 0},
    }
    told = run(table)
    bins = told.series.ranks
    per_bin = per_second(bins, RUNNING)[0]
    assert (per_bin[:-1] == 1.0).all()
    assert per_bin.sum() * bins.width_s == pytest.approx(2.0)
    prefills, kv = per_second(bins, PREFILL_TOKENS)[0], per_second(bins, KV_TOKENS)[0]
    at_1_s = int(1.0 / bins.width_s)
    assert prefills[at_1_s + 1 :].sum() == kv[:at_1_s].sum() == 0
    assert prefills[:at_1_s] == pytest.approx(100.0)
    assert (kv[at_1_s + 2], kv[-2]) == (101, 102)
    assert MOST_BINS_OF_RANKS / 2 < bins.num_used <= MOST_BINS_OF_RANKS
    steps, halves = told.series.durations.sum(axis=0), np.searchsorted(DURATION_EDGES_S, [0.5, 1.0], side="right")
    assert steps[halves].tolist() == [2, 1]
    slices = [(event["name"], event["ts"], event["dur"]) for event in read(told.trace) if event["ph"] == "X"]
    assert slices == [("prefill", 0, 1e6), ("decode", 1e6, 5e5), ("decode", 1.5e6, 5e5)]
