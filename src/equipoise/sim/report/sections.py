"""What a report shows of a simulation: its summary and scenario in words, then plots."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from equipoise.sim.report import plots
from equipoise.sim.report.page import Figures, Folded, Section, Table
from equipoise.sim.report.run import Run
from equipoise.sim.report.words import fleet_in_words, milliseconds, number, seconds, share
from equipoise.sim.results import PERCENTILES
from equipoise.sim.scenario import DEFAULTS, as_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from equipoise.sim.report.page import Part
    from equipoise.sim.report.series import StepSeries
    from equipoise.sim.run import Results

LATENCIES = (
    ("ttft", "Time to first token (TTFT)"),
    ("queue", "of that in the queue"),
    ("itl", "Between tokens (ITL)"),
    ("tpot", "Per output token (TPOT)"),
    ("e2e", "End to end"),
)
STAGES = (
    ("reserve", "TTFT: until the decode rank has room"),
    ("prefill_queue", "until the prefill rank begins"),
    ("prefill", "the prompt"),
    ("send_queue", "until the link is free"),
    ("transfer", "the way of its KV"),
    ("join", "until the decode batch"),
)


def sections(results: Results, series: StepSeries) -> list[Section]:
    """All of the report."""
    run = Run(results, series)
    found = [
        Section("Summary", [*_summary(run)]),
        Section("Scenario", [*_scenario(run)]),
        Section("Latency", [tuple(plots.latencies(run))]),
        Section("Over time", [tuple(plots.rates(run)), plots.queue(run)]),
        Section("Ranks", [plots.about_ranks(run), *plots.ranks(run)]),
    ]
    if run.is_lockstep:
        found.append(Section("Lost to the slowest rank", [plots.lost(run)]))
    found.append(Section("Steps", [plots.durations(run)]))
    if run.summary["prefix_hit_share"] > 0:
        found.append(Section("Prefix cache", [plots.prefix_hits(run)]))
    if run.outcomes.is_done.any():
        found.append(Section("Requests", [tuple(plots.requests(run))]))
    return found


def subtitle(results: Results) -> str:
    """The fleet in a line."""
    return f"A simulation by Equipoise: {fleet_in_words(results.scenario.fleet)}, seed {results.scenario.seed}"


def _summary(run: Run) -> Iterator[Part]:
    summary, objectives = run.summary, run.results.scenario.objectives
    figures = [
        ("output tokens per second", number(summary["throughput_tok_s"]), ""),
        ("good requests per second", number(summary["goodput_req_s"]), f"{share(summary['good_share'])} of all"),
        ("TTFT, median", milliseconds(summary["ttft_p50_ms"]), f"p99 {milliseconds(summary['ttft_p99_ms'])}"),
        ("TPOT, median", milliseconds(summary["tpot_p50_ms"]), f"p99 {milliseconds(summary['tpot_p99_ms'])}"),
    ]
    if run.is_lockstep:
        figures.append(("lost to the slowest rank", share(summary["lost_share"]), "of ranks' time in steps"))
    yield Figures(figures)
    yield (
        f"{number(summary['num_finished'])} requests in {seconds(summary['duration_s'])} of virtual time. A request is "
        f"good when its TTFT is at most {milliseconds(objectives.ttft_ms)} and its TPOT at most "
        f"{milliseconds(objectives.tpot_ms)}."
    )
    parts = ("mean", *(f"p{percent}" for percent in PERCENTILES))
    labels = [*LATENCIES, *(STAGES if run.results.legs is not None else ())]
    rows = [[label, *(number(summary[f"{name}_{part}_ms"]) for part in parts)] for name, label in labels]
    yield (Table(["milliseconds", *parts], rows), _counts(summary))


def _counts(summary: Mapping[str, float]) -> Table:
    def row(label: str, *names: str, remark: str = "") -> list[str]:
        return [label, *(number(summary[name]) if name else "" for name in names), remark]

    rows = [
        row("Requests finished", "num_finished", "throughput_req_s"),
        row("of them good", "", "goodput_req_s", remark=share(summary["good_share"])),
        row("Requests refused", "num_refused", ""),
        row("Tokens of outputs", "", "throughput_tok_s"),
        row("Tokens of outputs and prompts", "", "total_throughput_tok_s"),
        row("Steps, share of ranks' time", "num_steps", "", remark=share(summary["busy_share"])),
        row("Steps with a prefill", "num_prefill_steps", ""),
        row("Preemptions", "num_preemptions", ""),
        row("Prefix hits, share of prompts", "", "", remark=share(summary["prefix_hit_share"])),
    ]
    return Table(["", "in all", "per second", "share"], rows)


def _scenario(run: Run) -> Iterator[Part]:
    table = as_table(run.results.scenario)
    defaults = dict(_flat(as_table(DEFAULTS)))
    changed = [(path, value) for path, value in _flat(table) if defaults.get(path) != value and path != "name"]
    yield f"Cost of a step: {run.results.cost_source}."
    rows = [[path, _setting(value), _setting(defaults.get(path))] for path, value in changed]
    half = -(-len(rows) // 2)
    head = ["what differs", "here", "default"]
    yield tuple(Table(head, some) for some in (rows[:half], rows[half:]) if some)
    yield Folded("The whole scenario, every default filled in", msgspec.yaml.encode(table).decode())


def _flat(table: Mapping[str, object], path: str = "") -> Iterator[tuple[str, object]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def _setting(value: object) -> str:
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
