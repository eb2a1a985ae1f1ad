"""What does choosing ranks by tokens gain, by topology, by what a step is made of, by load and by the age of loads?
(sgl-project/sglang#20435)

Lengths are a quarter of the published ones, at four times the price per token: requests take a quarter of the time, and
steps as long as they did. Requests arrive at random. `load` sets the price of prompts, the share of their time that two
prefill ranks compute; `kv` that of KV in a decode step of a rank that runs its mean of requests.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from equipoise.sim.experiment.routing_answer import RANKS, WORKERS, charts, tables
from equipoise.sim.experiment.rows import Experiment, Options, Trial
from equipoise.sim.scenario import make_scenario

if TYPE_CHECKING:
    from collections.abc import Iterator

    from equipoise.sim.experiment.rows import Point, Value
    from equipoise.sim.scenario import Scenario

QUESTION = "What does choosing ranks by tokens gain over random rooms and over round robin, and where?"
SCALE = 4
PROMPT = {"mean": 2560 / SCALE, "spread": 0.22, "least": 1481 // SCALE, "most": 4120 // SCALE}
OUTPUT = {"mean": 1249 / SCALE, "spread": 1.43, "shape": "lognormal", "least": 187 // SCALE, "most": 4068 // SCALE}
"""Cut to its bounds the mean output is 1,160 / SCALE, as published."""
MEAN_OUTPUT, MEAN_HELD = 1160 / SCALE, 3465 / SCALE
"""Tokens: of an output, and of KV that a running request holds on average."""
STEP_S = 0.04
"""Of a decode step of a rank that runs its mean of requests."""
RUNNING = 32
"""That mean."""
PREFILL_RANKS = 2
PREFILL_STEP_MS = 2.0
PAGE_SIZE = 16
NUM_REQUESTS, QUICK_REQUESTS = 600, 240
AGES_S = (0.0, 1.0, 2.0, 5.0, 10.0)


class Topology(NamedTuple):
    """Workers that serve outputs, ranks of each; in pairs with one prefill worker, and in lockstep, or not."""

    workers: int
    ranks: int
    pairs: bool
    lockstep: bool = False


TOPOLOGIES = {
    "mixed 4x2": Topology(4, 2, pairs=False),
    "P/D 2x2": Topology(2, 2, pairs=True),
    "P/D 2x4": Topology(2, 4, pairs=True),
    "P/D 2x4 lockstep": Topology(2, 4, pairs=True, lockstep=True),
}
MAP = ((0.2, 0.6), (0.2, 0.8), (0.2, 0.95), (0.5, 0.8), (0.6, 0.7), (0.8, 0.6), (0.8, 0.8), (0.8, 0.95))
"""(kv, load)."""


def experiment(options: Options) -> Experiment:
    """Nine policies and two of ours at one point; three ways to choose ranks on the map, on full ranks too; loads of
    0 to 10 s. Quick: three policies, five points, one age, and fewer requests."""
    num_requests = QUICK_REQUESTS if options.quick else NUM_REQUESTS
    trials = [
        Trial(point, policy, scenario_of(point, policy, num_requests))
        for point, policies in (_quick_points() if options.quick else _points())
        for policy in policies
    ]
    return Experiment("routing", QUESTION, trials, tables, charts)


def _policies(*workers: str) -> list[str]:
    return [f"{worker} / {ranks}" for worker, ranks in product(workers, RANKS)]


def _points() -> Iterator[tuple[Point, list[str]]]:
    yield point_of("policies"), _policies(*WORKERS)
    for topology, (kv, load) in product(TOPOLOGIES, MAP):
        yield point_of("map", topology, kv, load), _policies("round_robin")
    for topology in ("mixed 4x2", "P/D 2x4"):
        yield point_of("full", topology, 0.5, 0.8, filled=0.95), _policies("round_robin")
    for age_s, charges in product(AGES_S, (True, False)):
        yield point_of("stale", age_s=age_s, charges=charges), ["round_robin / tokens"]


def _quick_points() -> Iterator[tuple[Point, list[str]]]:
    yield point_of("policies"), _policies(*WORKERS[:3])
    for topology in TOPOLOGIES:
        yield point_of("map", topology, 0.8, 0.8), _policies("round_robin")
    for charges in (True, False):
        yield point_of("stale", age_s=5.0, charges=charges), ["round_robin / tokens"]


def point_of(
    part: str,
    topology: str = "P/D 2x4 lockstep",
    kv: float = 0.8,
    load: float = 0.8,
    *,
    filled: float = 0.5,
    age_s: float = 1.0,
    charges: bool = True,
) -> dict[str, Value]:
    """A point. `filled`: the share of pages that the mean of requests holds; `age_s`: seconds between load reports."""
    return {
        "part": part,
        "topology": topology,
        "kv": kv,
        "load": load,
        "filled": filled,
        "age_s": age_s,
        "charges": charges,
    }


def scenario_of(point: Point, policy: str, num_requests: int) -> Scenario:
    """The scenario of a point, with workers and ranks chosen as `policy` says."""
    topology, kv, load = TOPOLOGIES[str(point["topology"])], float(point["kv"]), float(point["load"])
    worker_policy, ranks = policy.split(" / ")
    rate = topology.workers * topology.ranks * RUNNING / (MEAN_OUTPUT * STEP_S)
    held = RUNNING * MEAN_HELD
    sizes = {"workers": topology.workers, "ranks": topology.ranks}
    if topology.pairs:
        sizes = {f"decode_{name}": number for name, number in sizes.items()}
        sizes |= {"prefill_workers": 1, "prefill_ranks": PREFILL_RANKS}
    return make_scenario(
        {
            "fleet": {**sizes, "lockstep": topology.lockstep},
            "workload": {"num_requests": num_requests, "rate": rate, "prompt": PROMPT, "output": OUTPUT},
            "scheduler": {"max_running": 4 * RUNNING, "max_step_tokens": 8192 // SCALE},
            "cache": {
                "page_size": PAGE_SIZE,
                "prefix_cache": False,
                "num_pages": round(held / float(point["filled"]) / PAGE_SIZE),
            },
            "cost": {
                "step_ms": (1 - kv) * STEP_S * 1e3,
                "kv_token_us": kv * STEP_S * 1e6 / held,
                "prefill_token_ms": load * PREFILL_RANKS / (rate * PROMPT["mean"]) * 1e3,
                "decode_row_ms": 0.0,
            },
            "prefill": {"cost": {"step_ms": PREFILL_STEP_MS}, "cache": {"num_pages": 4096}},
            "routing": {
                "worker_policy": worker_policy,
                "rank_policy": RANKS[ranks],
                "report_interval_s": point["age_s"],
                "charges": point["charges"],
            },
        }
    )
