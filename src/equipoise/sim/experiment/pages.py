"""What do chunks that end on page boundaries cost, and what must page-wise KV writes save to be worth it?

vllm-project/vllm#19878 claims about 5% of a step's time on TPUs when prefill writes whole pages of KV; for that every
chunk must begin and end on a boundary (the last of a prompt excepted), which leaves a part of the step's tokens unused.
The cost is simulated with the scheduler's own page alignment, the saving is a lower price of prefill tokens, and what
whole pages save at writing is measured here with numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from equipoise.sim.experiment.measure import in_turns, machine
from equipoise.sim.experiment.rows import Experiment, Options, Row, Table, Trial, by_point, points_of
from equipoise.sim.experiment.show import number, percent
from equipoise.sim.report.charts import Axis, lines
from equipoise.sim.scenario import make_scenario

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from equipoise.sim.experiment.rows import Point, Value
    from equipoise.sim.report.charts import Row as Drawn
    from equipoise.sim.report.look import Chart
    from equipoise.sim.scenario import Scenario

    Policies = Mapping[str, Mapping[str, float]]

QUESTION = "What do chunks that end on page boundaries cost, and what must page-wise KV writes save to be worth it?"
PAGE_SIZES = (16, 32, 64, 128, 256)
STEP_TOKENS = (256, 512, 1024, 2048, 8192)
UNALIGNED, ALIGNED, SAVING = "by token", "aligned, no saving", "aligned, saving 5%"
WRITES = "writes"
"""The axis of rows that are measured."""
CLAIMED = 0.05
"""Of a step's time: vllm-project/vllm#19878, on TPUs."""
STEP_MS, TOKEN_MS, ROW_MS, KV_TOKEN_US = 8.0, 0.06, 0.05, 0.13
"""Round numbers of the size of an 8B model on one small GPU, as in examples/azure.yaml."""
SEATS, NUM_REQUESTS = 64, 512
PROMPT, OUTPUT = 1000, 200
KV_HEADS, HEAD_DIM = 8, 128
NUM_TOKENS = 2048
"""Tokens of the chunk whose KV is written in the measurement, of one layer: a fair share of a large step."""
NUM_WINDOWS, QUICK_WINDOWS = 30, 8


def experiment(options: Options) -> Experiment:
    """Pages of 16 to 256 tokens, steps of 256 to 8,192. Quick: a corner of it, half the requests."""
    page_sizes, step_tokens = ((16, 256), (512, 2048)) if options.quick else (PAGE_SIZES, STEP_TOKENS)
    num_requests = NUM_REQUESTS // 4 if options.quick else NUM_REQUESTS
    trials = [
        Trial(
            {"page_size": page_size, "max_step_tokens": max_tokens},
            policy,
            scenario_of(page_size, max_tokens, policy, num_requests),
        )
        for page_size in page_sizes
        for max_tokens in step_tokens
        for policy in (UNALIGNED, ALIGNED, SAVING)
    ]
    num_windows = QUICK_WINDOWS if options.quick else NUM_WINDOWS

    def measured() -> list[Row]:
        return [row for page_size in page_sizes for row in measure(page_size, num_windows)]

    return Experiment("pages", QUESTION, trials, tables, charts, measured)


def scenario_of(page_size: int, max_step_tokens: int, policy: str, num_requests: int) -> Scenario:
    """A closed loop with all seats taken. The saving is a lower price of each prefill token, such that a step full of
    them takes 5% less."""
    saved_ms = CLAIMED * (STEP_MS / max_step_tokens + TOKEN_MS) if policy == SAVING else 0.0
    return make_scenario(
        {
            "workload": {
                "num_requests": num_requests,
                "concurrency": SEATS,
                "prompt": {"mean": PROMPT, "spread": 1, "shape": "lognormal", "most": 16 * PROMPT},
                "output": {"mean": OUTPUT, "spread": 0.5, "shape": "lognormal"},
            },
            "scheduler": {
                "max_running": SEATS,
                "max_step_tokens": max_step_tokens,
                "page_aligned_prefill": policy != UNALIGNED,
            },
            "cache": {"page_size": page_size, "num_pages": 2 * SEATS * (PROMPT + OUTPUT) * 4 // page_size},
            "cost": {
                "step_ms": STEP_MS,
                "prefill_token_ms": TOKEN_MS - saved_ms,
                "decode_row_ms": ROW_MS,
                "kv_token_us": KV_TOKEN_US,
            },
        }
    )


def measure(page_size: int, num_windows: int) -> list[Row]:
    """Microseconds to write the keys of a chunk into a pool of pages, token by token and page by page."""
    pool = np.zeros((4 * NUM_TOKENS // page_size, KV_HEADS, page_size, HEAD_DIM), np.float16)  # as the engine's
    keys = np.ones((NUM_TOKENS, KV_HEADS, HEAD_DIM), np.float16)
    pages = np.random.default_rng(0).permutation(len(pool))[: NUM_TOKENS // page_size]
    page_of, offset = np.repeat(pages, page_size), np.tile(np.arange(page_size), len(pages))
    whole = keys.reshape(-1, page_size, KV_HEADS, HEAD_DIM).swapaxes(1, 2)  # (pages, KV_HEADS, page_size, HEAD_DIM)

    def by_token() -> None:
        pool[page_of, :, offset] = keys

    def by_page() -> None:
        pool[pages] = whole

    times = in_turns({"by token": by_token, "by page": by_page}, num_windows)
    point: dict[str, Value] = {"page_size": page_size, WRITES: f"{NUM_TOKENS} tokens"}
    return [Row(point, f"write {name}", found.values()) for name, found in times.items()]


def break_even(policies: Policies) -> float:
    """The share of a full prefill step's time that alignment must save to cost nothing: on the line through no saving
    and 5%; at most 0 when it costs nothing anyway, NaN when a saving does not help."""
    cost, kept = (gain_of(policies, policy) for policy in (ALIGNED, SAVING))
    return -cost * CLAIMED / (kept - cost) if kept > cost else float("nan")


def gain_of(policies: Policies, policy: str) -> float:
    """Throughput over that of chunks as they come, less one."""
    return policies[policy]["throughput_tok_s"] / policies[UNALIGNED]["throughput_tok_s"] - 1


def tables(rows: Sequence[Row]) -> list[Table]:
    """Costs and gains by page and step, and what writing takes."""
    simulated = [row for row in rows if WRITES not in row.point]
    found = by_point(simulated)
    cells = {(_axis(p, "page_size"), _axis(p, "max_step_tokens")): found[n] for n, p in points_of(simulated).items()}
    maps = (
        ("What aligned chunks cost: throughput with no saving", lambda each: percent(gain_of(each, ALIGNED))),
        ("Throughput with the saving claimed, 5% of a full prefill step", lambda each: percent(gain_of(each, SAVING))),
        ("Saving of a full prefill step from which on it pays", lambda each: _saving(break_even(each))),
    )
    return [*(_map(title, cells, show) for title, show in maps), *_writes([row for row in rows if WRITES in row.point])]


def _axis(point: Point, name: str) -> int:
    return int(point[name])


def _saving(share: float) -> str:
    return f"{max(0.0, share):.1%}" if share < 1 else "never"


def _map(title: str, cells: Mapping[tuple[int, int], Policies], show: Callable[[Policies], str]) -> Table:
    """Pages down, steps across."""
    page_sizes = sorted({page_size for page_size, _ in cells})
    steps = sorted({step for _, step in cells})
    lines = [(f"pages of {size}", *(show(cells[size, step]) for step in steps)) for size in page_sizes]
    return Table(title, ("", *(f"{step:,} a step" for step in steps)), lines)


def _writes(rows: Sequence[Row]) -> list[Table]:
    found, points = by_point(rows), points_of(rows)
    lines = []
    for name, ways in found.items():
        token_us, page_us = (ways[f"write {way}"]["least_us"] for way in ("by token", "by page"))
        saved = percent(page_us / token_us - 1, digits=0)
        lines.append((f"pages of {points[name]['page_size']}", number(token_us), number(page_us), saved))
    title = (
        f"Microseconds to write the keys of {NUM_TOKENS:,} tokens of a layer, {KV_HEADS} heads of {HEAD_DIM}, float16"
    )
    note = f"{machine()}; numpy, least of the windows, ways in turns. A CPU's figures, not a TPU's."
    return [Table(title, ("", "by token", "by page", "time"), lines, (note,))] if lines else []


def charts(rows: Sequence[Row]) -> Mapping[str, Chart]:
    """What alignment costs, by page and step."""
    simulated = [row for row in rows if WRITES not in row.point]
    found, points = by_point(simulated), points_of(simulated)
    drawn: list[Drawn] = [
        {
            "step": _axis(point, "max_step_tokens"),
            "page": f"pages of {point['page_size']}",
            "cost": 100 * gain_of(found[name], ALIGNED),
        }
        for name, point in points.items()
    ]
    step = Axis("step", "tokens of a step", log=True)
    return {"cost": lines(drawn, step, Axis("cost", "throughput of aligned chunks, %"), by="page", dots=True)}
