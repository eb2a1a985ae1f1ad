"""The plots of a report, each with a sentence that states its numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from equipoise.sim.report.charts import Axis, Plot, grid, lines, points
from equipoise.sim.report.measures import (
    banded,
    curve,
    curve_of_gaps,
    level,
    merged,
    quantile_of_counts,
    rate,
    sample,
    time_edges,
)
from equipoise.sim.report.series import (
    DECODE_TOKENS,
    DURATION_EDGES_S,
    KV_TOKENS,
    LOST_PARTS,
    PREFILL_TOKENS,
    RUNNING,
    WAITED,
    per_second,
)
from equipoise.sim.report.words import milliseconds, number, seconds, share

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from equipoise.sim.report.charts import Row
    from equipoise.sim.report.look import Chart
    from equipoise.sim.report.run import Run

    Floats = NDArray[np.floating[Any]]
    Numbers = NDArray[np.floating[Any]] | NDArray[np.integer[Any]]

MOST_ROWS = 512
"""Rows of a heat map; of more ranks a row shows the mean of neighbours."""
MOST_CELLS = 65_536
"""Of a heat map: browsers take a second for so many."""
CAUSES = {"prefill": "prefill", "seats": "requests", "kv": "KV tokens"}
"""What the slowest rank has more of."""


# -------------------------------------------------------------------- times of requests


def latencies(run: Run) -> Iterator[Plot]:
    """Distributions of TTFT, TPOT, gaps between tokens, and E2E."""
    objectives, found, summary = run.results.scenario.objectives, run.outcomes, run.summary
    gaps = curve_of_gaps(run.results.steps.gaps)
    yield _distribution("Time to first token", "ttft", curve(found.ttft_ms), summary, objectives.ttft_ms)
    yield _distribution("Time per output token", "tpot", curve(found.tpot_ms), summary, objectives.tpot_ms)
    yield _distribution("Between tokens", "itl", gaps, summary, None)
    yield _distribution("End to end", "e2e", curve(found.e2e_ms), summary, None)


def _distribution(
    title: str, name: str, points: list[dict[str, float]], summary: Mapping[str, float], objective: float | None
) -> Plot:
    scale, unit = (1e3, "s") if summary[f"{name}_p50_ms"] >= 10_000 else (1.0, "ms")
    p50, p90, p99 = (milliseconds(summary[f"{name}_p{percent}_ms"]) for percent in (50, 90, 99))
    of_all = "of all gaps " if name == "itl" else ""
    sentence = f"Half {of_all}are at most {p50}, 90% at most {p90}, 99% at most {p99}."
    if objective is not None:
        met = max((point["share"] for point in points if point["value"] <= objective), default=0.0)
        sentence += f" {met:.0f}% meet the objective of {milliseconds(objective)}."
    values = [point["value"] / scale for point in points]
    rows = [{"value": value, "share": point["share"]} for value, point in zip(values, points, strict=True)]
    is_long_tailed = bool(values) and values[0] > 0 and values[-1] > 30 * values[len(values) // 2]
    x = Axis("value", f"{name.upper()}, {unit}", log=is_long_tailed, zero=False)
    # An objective far out would leave the curve no room.
    is_near = objective is not None and bool(values) and objective / scale <= 2 * values[-1]
    marked = {"objective": objective / scale} if objective is not None and is_near else None
    return Plot(title, sentence, lines(rows, x, Axis("share", "% are at most"), marked=marked))


# -------------------------------------------------------------------- over time


def rates(run: Run) -> Iterator[Plot]:
    """Throughput and goodput over time."""
    columns, found, summary = run.columns, run.outcomes, run.summary
    bins = run.series.ranks
    edges = np.arange(bins.num_used + 1) * bins.width_s
    outputs = per_second(bins, DECODE_TOKENS).sum(axis=0)
    if bins.num_used:  # first tokens come from prefills
        outputs = outputs + rate(columns["first_s"][found.is_done], edges)
    prefills = per_second(bins, PREFILL_TOKENS).sum(axis=0)
    yield Plot(
        "Tokens",
        f"{number(summary['throughput_tok_s'])} output tokens per second over the whole run, {number(_top(outputs))} "
        f"at most; {number(_mean(prefills))} prefill tokens, {number(_top(prefills))} at most.",
        _over_time(run, edges, {"output": outputs, "prefill": prefills}, "tokens per second"),
    )
    edges = time_edges(run.end_s)[::5]
    ended, good = (rate(columns["last_s"][which], edges) for which in (found.is_done, found.is_good))
    yield Plot(
        "Requests that ended",
        f"{number(summary['throughput_req_s'])} requests per second ended, {number(summary['goodput_req_s'])} of them "
        f"good ({share(summary['good_share'])}).",
        _over_time(run, edges, {"all": ended, "good": good}, "requests per second"),
    )


def queue(run: Run) -> Plot:
    """Requests that run and wait over time."""
    columns, done = run.columns, run.outcomes.is_done
    edges = time_edges(run.end_s)
    arrival, admitted, last = (columns[name][done] for name in ("arrival_s", "admitted_s", "last_s"))
    waiting, running = level(arrival, admitted, edges), level(admitted, last, edges)
    return Plot(
        "Running and waiting",
        f"On average {number(_mean(running))} requests ran and {number(_mean(waiting))} waited; at most "
        f"{number(_top(running))} ran and {number(_top(waiting))} waited.",
        _over_time(run, edges, {"running": running, "waiting": waiting}, "requests"),
    )


def lost(run: Run) -> Plot:
    """What ranks in lockstep lose to the slowest over time, by causes."""
    bins, summary = run.series.lost, run.summary
    edges = np.arange(bins.num_used + 1) * bins.width_s
    # Nanoseconds of all ranks over microseconds of each.
    shares = bins.sums[:, : bins.num_used].sum(axis=0) / (1e3 * bins.width_us * run.num_ranks) * 100
    named = {f"more {CAUSES[part]}": np.maximum(shares[:, i], 0.0) for i, part in enumerate(LOST_PARTS)}
    parts = [f"{share(summary[f'lost_to_{part}_share'])} since it had more {CAUSES[part]}" for part in LOST_PARTS]
    return Plot(
        "Time that ranks waited for the slowest, by what it had more of",
        f"{share(summary['lost_share'])} of all ranks' time in steps went by waiting for the slowest: "
        f"{parts[0]}, {parts[1]}, {parts[2]}.",
        _over_time(run, edges, named, "% of all ranks' time", stacked=True),
    )


def prefix_hits(run: Run) -> Plot:
    """Share of prompts that the prefix cache had over time."""
    columns, done = run.columns, run.outcomes.is_done
    arrival, cached, prompt = (columns[name][done] for name in ("arrival_s", "num_cached", "prompt_len"))
    edges = time_edges(run.end_s)[::10]
    asked, found = rate(arrival, edges, prompt), rate(arrival, edges, cached)
    hits = np.divide(found, asked, out=np.full(len(asked), np.nan), where=asked > 0) * 100
    return Plot(
        "Prompt tokens found in the cache, by arrival",
        f"{share(run.summary['prefix_hit_share'])} of all prompt tokens were found in the prefix cache; "
        f"{share(_mean(cached > 0))} of the requests found some.",
        _over_time(run, edges, {"prefix hits": hits}, "% of prompt tokens"),
    )


def _over_time(run: Run, edges_s: Floats, named: Mapping[str, Floats], title: str, *, stacked: bool = False) -> Chart:
    """A line for each name, with points at the middle of the spans between edges."""
    middles = ((edges_s[1:] + edges_s[:-1]) / 2 / run.unit.seconds).tolist()
    rows: list[Row] = [
        {"time": time, "value": value, "what": name}
        for name, values in named.items()
        for time, value in zip(middles, values.tolist(), strict=True)
    ]
    by = "what" if len(named) > 1 else None
    return lines(rows, Axis("time", run.unit.name), Axis("value", title), by=by, stacked=stacked)


def _top(values: Numbers) -> float:
    return float(values.max()) if values.size else 0.0


def _mean(values: Numbers | NDArray[np.bool_]) -> float:
    return float(values.mean()) if values.size else 0.0


# -------------------------------------------------------------------- ranks and steps


def about_ranks(run: Run) -> str:
    """How to read the heat maps."""
    bins = run.series.ranks
    _, width = merged(banded(per_second(bins, RUNNING), MOST_ROWS)[0], MOST_CELLS)
    text = f"A row for each rank, averages over {seconds(bins.width_s * width)}."
    spans, first = [], 0
    for role, size in run.sizes.items():
        each = f", {size.ranks} for each worker" if size.workers > 1 and size.ranks > 1 else ""
        spans.append(f"{first} to {first + size.num_ranks - 1} {role}{each}")
        first += size.num_ranks
    if len(spans) > 1:
        text += f" Ranks are numbered over all workers: {'; '.join(spans)}."
    elif each:
        text += f" Ranks are numbered over all workers{each}."
    return text


def ranks(run: Run) -> Iterator[Plot]:
    """Heat maps of ranks over time."""
    bins = run.series.ranks
    yield _heat(run, "Requests in a step", per_second(bins, RUNNING), "requests")
    yield _heat(run, "KV tokens that decodes read", per_second(bins, KV_TOKENS), "KV tokens")
    yield _heat(run, "Prefill", per_second(bins, PREFILL_TOKENS), "prefill tokens per second")
    if run.is_lockstep:
        waited = per_second(bins, WAITED) * 100
        yield _heat(run, "Waiting for the slowest rank, of those that computed", waited, "% of the time")


def _heat(run: Run, title: str, values: Floats, unit: str) -> Plot:
    idle = np.zeros((run.num_ranks - len(values), values.shape[1]))
    values = np.concatenate([values, idle])  # the last ranks, if they never had a step
    rows, band = banded(values, MOST_ROWS)
    shown, width = merged(rows, MOST_CELLS)
    step = run.series.ranks.width_s * width / run.unit.seconds
    axes = Axis("from", run.unit.name), Axis("row", "rank"), Axis("data", unit)
    of_ranks = values.mean(axis=1) if values.size else np.zeros(1)
    sentence = f"{_with_unit(_mean(of_ranks), unit)} on average"
    if np.allclose(of_ranks, of_ranks[0], rtol=1e-3):
        sentence += ", the same on every rank" if len(of_ranks) > 1 else ""
    else:
        most, least = int(of_ranks.argmax()), int(of_ranks.argmin())
        sentence += (
            f": most on rank {most} ({number(of_ranks[most])}), least on rank {least} ({number(of_ranks[least])})"
        )
    if len(of_ranks) > 1:
        sentence += f"; at one time ranks differ by {number(_mean(values.std(axis=0)))} (standard deviation)"
    if band > 1:
        sentence += f"; a row is the mean of {band} ranks"
    return Plot(title, f"{sentence}.", grid(shown, *axes, x_step=step, y_step=band))


def _with_unit(value: float, unit: str) -> str:
    """`3 requests`, `3% of the time`."""
    return number(value) + (unit if unit.startswith("%") else f" {unit}")


def durations(run: Run) -> Plot:
    """How long steps take, with a prefill on the rank and without."""
    counts, times_us = run.series.durations, run.series.times_us
    shares = times_us / max(int(times_us.sum()), 1) * 100
    of_ranks = {"decodes alone": "steps of ranks that decode alone", "with a prefill": "of ranks with a prefill"}
    names = tuple(of_ranks)
    words = []
    for name, some, part in zip(names, counts, shares.sum(axis=1), strict=True):
        if some.any():
            p50, p99 = (milliseconds(quantile_of_counts(some, DURATION_EDGES_S, at) * 1e3) for at in (0.5, 0.99))
            told = f"{int(some.sum()):,} {of_ranks[name]} (median at most {p50}, p99 at most {p99})"
            words.append(f"{told} take {part:.1f}% of the time in steps")
    used = np.flatnonzero(counts.any(axis=0))
    # A step down on either side ends the outline.
    shown = range(max(int(used[0]) - 1, 0), int(used[-1]) + 2) if len(used) else range(0)
    edges_ms = np.append(DURATION_EDGES_S, DURATION_EDGES_S[-1] * 2) * 1e3
    rows: list[Row] = [
        {
            "ms": float(edges_ms[i]),
            "share": part[i] if i < len(part) else 0.0,
            "steps": int(some[min(i, len(part) - 1)]),
            "what": name,
        }
        for name, some, part in zip(names, counts, shares.tolist(), strict=True)
        for i in shown
    ]
    x = Axis("ms", "milliseconds, at most", log=True, zero=False)
    y = Axis("share", "% of ranks' time in steps")
    chart = lines(rows, x, y, by="what", stacked=True, interpolate="step-before")
    sentence = f"{'; '.join(words) or 'No steps'}."
    if run.is_lockstep:
        sentence += " A step of a group in lockstep, one in the summary, is one here for each rank that computes in it."
    return Plot("Where the time in steps goes, by how long they take", sentence, chart)


# -------------------------------------------------------------------- requests


def requests(run: Run) -> Iterator[Plot]:
    """A sample of requests: TTFT by their prompts' lengths and by arrival."""
    columns, ttft_ms = run.columns, run.outcomes.ttft_ms
    done = np.flatnonzero(run.outcomes.is_done)
    chosen = sample(done)
    prompt, ttft = columns["prompt_len"][done], ttft_ms[done]
    sentence = (
        f"{len(chosen):,} of {len(done):,} requests" if len(chosen) < len(done) else f"All {len(done):,} requests"
    )
    rows = _rows(run, chosen)
    y = Axis("ttft_ms", "TTFT, ms", log=_is_wide(ttft), zero=False)
    is_longer = prompt > np.median(prompt)
    if is_longer.any():
        x = Axis("prompt_len", "prompt tokens", log=_is_wide(prompt), zero=False)
        longer, shorter = (milliseconds(float(np.median(ttft[mask]))) for mask in (is_longer, ~is_longer))
        told = (
            f"{sentence}; the longer half of all prompts has a median TTFT of {longer}, the shorter one of {shorter}."
        )
        yield Plot("Prompt length and TTFT", told, points(rows, x, y, by="what", order=VERDICTS))
    first, last = (milliseconds(float(np.median(half))) for half in np.array_split(ttft, 2) if len(half))
    told = f"{sentence}; those that came first have a median TTFT of {first}, the later half of {last}."
    time = Axis("arrival", f"arrival, {run.unit.name}")
    yield Plot("Arrival and TTFT", told, points(rows, time, y, by="what", order=VERDICTS))


def _rows(run: Run, chosen: NDArray[np.int64]) -> list[Row]:
    """All that is known of these requests."""
    columns, found, objectives = run.columns, run.outcomes, run.results.scenario.objectives
    named: dict[str, Sequence[float]] = {
        "prompt_len": columns["prompt_len"][chosen].tolist(),
        "ttft_ms": found.ttft_ms[chosen].tolist(),
        "arrival": (columns["arrival_s"][chosen] / run.unit.seconds).tolist(),
        "request": chosen.tolist(),
        "output tokens": columns["output_len"][chosen].tolist(),
        "cached tokens": columns["num_cached"][chosen].tolist(),
        "TPOT, ms": found.tpot_ms[chosen].tolist(),
        "worker": columns["worker"][chosen].tolist(),
        "rank": columns["rank"][chosen].tolist(),
        "preemptions": columns["num_preemptions"][chosen].tolist(),
    }
    late = (found.ttft_ms[chosen] > objectives.ttft_ms).tolist()
    slow = (found.tpot_ms[chosen] > objectives.tpot_ms).tolist()
    verdicts = [_verdict(is_late, is_slow) for is_late, is_slow in zip(late, slow, strict=True)]
    rows: list[Row] = [
        dict(zip((*named, "what"), values, strict=True)) for values in zip(*named.values(), verdicts, strict=True)
    ]
    return rows


VERDICTS = ("good", "TTFT too long", "TPOT too long", "TTFT and TPOT too long")


def _verdict(is_late: bool, is_slow: bool) -> str:
    return VERDICTS[is_late + 2 * is_slow]


def _is_wide(values: Numbers) -> bool:
    least = float(values.min())
    return least > 0 and float(values.max()) > 50 * least
