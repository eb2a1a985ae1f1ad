"""Results as a table for a terminal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from equipoise.sim.fleet import sizes_of
from equipoise.sim.pd import STAGES
from equipoise.sim.report.words import fleet_in_words
from equipoise.sim.results import PERCENTILES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from equipoise.sim.run import Results

LABEL, COLUMN = 24, 11
TIMES = (
    ("ttft", "time to first token"),
    ("queue", "of that in the queue"),
    ("itl", "between tokens (ITL)"),
    ("tpot", "per request (TPOT)"),
    ("e2e", "end to end"),
)
STAGE_LABELS = (
    "room on decode rank",
    "queue of prefill rank",
    "prompt",
    "wait for the link",
    "KV on its way",
    "until it decodes",
)
"""Of `equipoise.sim.pd.STAGES`."""


def table(results: Results) -> str:
    """A screen full: requests, throughput, times, cache, ranks."""
    return "\n".join(_lines(results, results.summary()))


def _lines(results: Results, summary: Mapping[str, float]) -> Iterator[str]:
    scenario, objectives = results.scenario, results.scenario.objectives
    yield f"{scenario.name}: {fleet_in_words(scenario.fleet)}, seed {scenario.seed}"
    yield f"cost: {results.cost_source}"
    yield ""
    yield _row("requests", "finished", "refused", "seconds")
    yield _row("", *(_number(summary[name]) for name in ("num_finished", "num_refused", "duration_s")))
    yield ""
    yield _row("per second", "output tok", "all tokens", "requests", "good ones")
    names = ("throughput_tok_s", "total_throughput_tok_s", "throughput_req_s", "goodput_req_s")
    yield _row("", *(_number(summary[name]) for name in names))
    goals = f"TTFT at most {objectives.ttft_ms:g} ms, TPOT at most {objectives.tpot_ms:g} ms"
    yield f"good: {goals}: {_share(summary['good_share'])} of all"
    yield ""
    parts = ("mean", *(f"p{percent}" for percent in PERCENTILES))
    yield _row("milliseconds", *parts)
    for name, label in TIMES:
        yield _row(label, *(_number(summary[f"{name}_{part}_ms"]) for part in parts))
    yield ""
    yield _row("steps", "all", "prefill", "preempted", "prefix hits", "ranks busy")
    counts = (_number(summary[name]) for name in ("num_steps", "num_prefill_steps", "num_preemptions"))
    yield _row("", *counts, _share(summary["prefix_hit_share"]), _share(summary["busy_share"]))
    if results.legs is not None:
        yield ""
        yield _row("pairs, milliseconds", *parts)
        for name, label in zip(STAGES, STAGE_LABELS, strict=True):
            yield _row(label, *(_number(summary[f"{name}_{part}_ms"]) for part in parts))
        yield ""
        roles = list(sizes_of(scenario.fleet))
        yield _row("ranks busy", *roles)
        yield _row("", *(_share(summary[f"{role}_busy_share"]) for role in roles))
    if scenario.fleet.lockstep and any(size.ranks > 1 for size in sizes_of(scenario.fleet).values()):
        yield ""
        yield _row("lost to the slowest rank", "all", "prefill", "seats", "KV")
        lost = ("lost_share", "lost_to_prefill_share", "lost_to_seats_share", "lost_to_kv_share")
        yield _row("", *(_share(summary[name]) for name in lost))


def _row(label: str, *cells: str) -> str:
    return (label.ljust(LABEL) + "".join(cell.rjust(COLUMN + 1) for cell in cells)).rstrip()


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:,.0f}" if value == int(value) or value >= 1000 else f"{value:,.{1 if value >= 100 else 2}f}"


def _share(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1%}"
