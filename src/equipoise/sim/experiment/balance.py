"""Which gate over the ranks of a lockstep group, and where does each help and hurt?

The setting is the published one of balance scheduling (vllm-project/vllm-ascend#5212): DeepSeek-V3.1 on data-parallel
ranks in lockstep, prompts of 3,500 tokens, outputs of 1,500, 512 requests, 128 at any time, seats for as many. Two
cost models are fitted to the ungated row of its table: a calibration. What gates do is simulated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from equipoise.config import SchedulerConfig
from equipoise.sim.experiment.balance_answer import BASELINE, OURS, charts, tables
from equipoise.sim.experiment.rows import Experiment, Options, Trial
from equipoise.sim.scenario import make_scenario

if TYPE_CHECKING:
    from equipoise.sim.experiment.rows import Point, Value
    from equipoise.sim.scenario import Scenario

QUESTION = "Which gate over the ranks of a lockstep group, and where does each help and hurt?"
PAGE_SIZE = 128
ROOM = 1.6
"""Pages for so many times the mean lengths of all that run: gates are compared without preemptions."""
NUM_REQUESTS = 512


class Fit(NamedTuple):
    """A linear cost model, milliseconds, and the spread of output lengths that came with it."""

    ranks: int
    step_ms: float
    eager_step_ms: float
    prefill_token_ms: float
    decode_row_ms: float
    spread: float


FITS = {
    "dp4": Fit(4, 36.7, 112, 0.208, 0.44, 0.029),
    "dp2": Fit(2, 42.9, 42.9, 0.177, 0.011, 0.20),
}
SHAPES = {"3500/1500": (3500, 1500), "8000/1000": (8000, 1000), "803/3653": (803, 3653)}
"""Mean tokens of prompts and outputs: the published one, one heavy in prefills, and that of TensorRT-LLM's ADP
balance, heavy in decodes."""
RANKS = (2, 4, 8, 16)
SPREADS = (0.0, 0.1, 0.2, 0.3)
CONCURRENCY = (64, 128, 256)

Settings = Mapping[str, object]


POLICIES: Mapping[str, Settings] = {
    BASELINE: {},
    "balance margin 0": {"balance": True, "balance_margin": 0},
    "balance margin 1": {"balance": True, "balance_margin": 1},
    "cadence": {"prefill_interval": 4},
    "alignment": {"prefill_alignment": True},
    "free seats": {"min_free_seats": 2},
    OURS: {"rent_or_buy": True},
}
"""Settings of the scheduler by the gate's name. Of cadence (4, 16, 64 steps) and free seats (2 to 16) those that lose
least throughput at six points of the map."""


def experiment(options: Options) -> Experiment:
    """The table that was published, then the whole map. Quick: the first on four ranks, and two
    points of the second with half the requests."""
    if options.quick:
        trials = [*trials_at(next(published_points()))]
        trials += [trial for point in QUICK for trial in trials_at(point, NUM_REQUESTS // 2)]
    else:
        trials = [trial for point in (*published_points(), *map_points()) for trial in trials_at(point)]
    return Experiment("balance", QUESTION, trials, tables, charts)


def published_points() -> Iterator[Point]:
    """The published setting at each fit's own ranks and spread."""
    for name, fit in FITS.items():
        yield point_of("published", name, fit.ranks, fit.spread, 128, "3500/1500")


def map_points() -> Iterator[Point]:
    """The map: every crossing of the axes at the fit of four ranks; at that of two, those at concurrency 128; and
    a spread of 0.1 at twice the seats that the load takes."""
    for ranks, spread, concurrency, shape in product(RANKS, SPREADS, CONCURRENCY, SHAPES):
        yield point_of("map", "dp4", ranks, spread, concurrency, shape)
    for ranks, spread, shape in product(RANKS, SPREADS, SHAPES):
        yield point_of("map", "dp2", ranks, spread, 128, shape)
    for ranks, concurrency, shape in product(RANKS, CONCURRENCY, SHAPES):
        yield point_of("map", "dp4", ranks, 0.1, concurrency, shape, filled=0.5)


def point_of(
    part: str, cost: str, ranks: int, spread: float, concurrency: int, shape: str, filled: float = 1.0
) -> dict[str, Value]:
    """A point; `filled`: the share of all seats that the load takes."""
    return {
        "part": part,
        "cost": cost,
        "ranks": ranks,
        "spread": spread,
        "concurrency": concurrency,
        "shape": shape,
        "filled": filled,
    }


QUICK = (
    point_of("map", "dp4", 4, 0.0, 64, "3500/1500"),
    point_of("map", "dp4", 8, 0.2, 64, "3500/1500"),
)


def trials_at(point: Point, num_requests: int = NUM_REQUESTS) -> Iterator[Trial]:
    """Every policy at `point`; those that this version lacks are left out."""
    known = {field.name for field in dataclasses.fields(SchedulerConfig)}
    for policy, settings in POLICIES.items():
        if known.issuperset(settings):
            yield Trial(point, policy, scenario_of(point, settings, num_requests))


def seats_of(point: Point) -> int:
    """Seats of a rank."""
    return max(2, round(int(point["concurrency"]) / int(point["ranks"]) / float(point["filled"])))


def scenario_of(point: Point, settings: Settings, num_requests: int = NUM_REQUESTS) -> Scenario:
    """The scenario of a point with these settings of the scheduler."""
    fit, (prompt, output) = FITS[str(point["cost"])], SHAPES[str(point["shape"])]
    seats = seats_of(point)
    return make_scenario(
        {
            "fleet": {"ranks": point["ranks"], "lockstep": True},
            "workload": {
                "num_requests": num_requests,
                "concurrency": point["concurrency"],
                "prompt": {"mean": prompt},
                "output": {"mean": output, "spread": point["spread"]},
            },
            "scheduler": {"max_running": seats, "max_step_tokens": 16384, "depth": 0, **settings},
            "cache": {
                "page_size": PAGE_SIZE,
                "num_pages": round(ROOM * seats * (prompt + output) / PAGE_SIZE),
                "prefix_cache": False,
            },
            "cost": {
                "step_ms": fit.step_ms,
                "eager_step_ms": fit.eager_step_ms,
                "prefill_token_ms": fit.prefill_token_ms,
                "decode_row_ms": fit.decode_row_ms,
                "source": f"fitted to the published table, {fit.ranks} ranks",
            },
            "routing": {"rank_policy": "round_robin"},
        }
    )
