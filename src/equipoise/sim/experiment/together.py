"""What do five features together buy over the best of them alone, on recorded traces at 8 to 512 ranks?

Each of the five is a few settings of a scenario, so all of them together are the settings of all: planning ahead
(vllm#19970), a gate over the ranks (vllm-ascend#5212, or ours), token routing (sglang#20435), aligned chunks
(vllm#19878). Workers of 8 ranks in lockstep replay Azure's and Mooncake's conversations, at 0.7 times what the plain
fleet can do and at more than any can. What each one adds to the others is told by leaving it out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from equipoise.config import SchedulerConfig
from equipoise.errors import ConfigError
from equipoise.sim.experiment.balance import FITS
from equipoise.sim.experiment.rows import METRICS, Experiment, Options, Trial
from equipoise.sim.experiment.together_answer import ALL, BELOW, LEFT_OUT, OVER, PLAIN, charts, tables
from equipoise.sim.scenario import make_scenario
from equipoise.sim.tables import merge

if TYPE_CHECKING:
    from equipoise.sim.experiment.rows import Point
    from equipoise.sim.scenario import Scenario

Settings = Mapping[str, Mapping[str, Any]]
"""Of a scenario, by section."""
QUESTION = "What do five features together buy over the best of them alone, on recorded traces?"
HEADS = Path(__file__).parent / "traces"
RANKS_OF_WORKER = 8
RANKS = (8, 32, 128, 512)
NUM_DRAWS = {8: 4, 32: 2}
"""Draws of the arrivals on small fleets, which have few requests; one on others."""
MOST_LEFT_OUT = 128
"""Ranks up to which features are left out of all, one at a time, and both loads are replayed."""
ON_THE_MOST = ("plain", "rent or buy", "token routing", "all")
"""Policies on more ranks than that: each run takes minutes there."""


SEED_OF_DRAW = 1_000_000
PAGE_SIZE, MAX_STEP_TOKENS = 128, 8192
SEATS, NUM_PAGES = 8, 6000
"""Few seats: a rank of the largest fleet has few requests in all, and they should take turns."""
HOST_ROW_US = 22.0
"""Of planning a row: vLLM 0.33, 1.4 ms for 64 (the experiment async has the others)."""
SAVING = 0.05
"""Of a full prefill step, by writing whole pages: claimed in vllm-project/vllm#19878, on TPUs."""


class Trace(NamedTuple):
    """A recorded trace.

    head: the cut of it that ships here, of `head_len` requests
    files: what it is called in a folder of traces, any of these
    per_rank: requests for each rank, so that fleets of all sizes have as much to do
    plain_rate: requests per second and rank that the plain fleet ends when it never lacks any, about
    """

    head: str
    head_len: int
    files: tuple[str, ...]
    per_rank: int
    plain_rate: float


TRACES = {
    "azure": Trace(
        "azure_conv_head.csv.gz",
        2000,
        ("azure_llm_2023_conv.csv.gz", "AzureLLMInferenceTrace_conv.csv", "AzureLLMInferenceTrace_conv.csv.gz"),
        36,
        0.3,
    ),
    "mooncake": Trace(
        "mooncake_conversation_head.jsonl.gz",
        1000,
        ("mooncake_fast25_conversation.jsonl.gz", "conversation_trace.jsonl", "conversation_trace.jsonl.gz"),
        23,
        0.06,
    ),
}
LOADS = {BELOW: 0.7, OVER: 3.0}
"""Arrivals over `plain_rate`; with the second no policy ever lacks requests until the last have come."""
AHEAD: Settings = {"scheduler": {"depth": 1}}
ROUTED: Settings = {"routing": {"worker_policy": "least_tokens", "rank_policy": "minimum_tokens"}}
FIT = FITS["dp4"]
WHOLE_PAGES: Settings = {
    "scheduler": {"page_aligned_prefill": True},
    "cost": {"prefill_token_ms": FIT.prefill_token_ms * (1 - SAVING) - SAVING * FIT.eager_step_ms / MAX_STEP_TOKENS},
}
GATES: Mapping[str, Settings] = {
    "balance": {"scheduler": {"balance": True}},
    "alignment": {"scheduler": {"prefill_alignment": True}},
    "rent or buy": {"scheduler": {"rent_or_buy": True}},
}


def experiment(options: Options) -> Experiment:
    """Both traces at both loads on 8 to 128 ranks, each feature left out of all; a few over capacity on 512.

    Quick: the heads of the traces that ship here, on 8 ranks over capacity. Without `options.traces` the heads too, on
    8 and 32 ranks."""
    trials = [trial for point in _points(options) for trial in _trials_at(point, options)]
    return Experiment("together", QUESTION, trials, tables, charts, metrics=(*METRICS, "e2e_mean_ms"))


def _points(options: Options) -> Iterator[Point]:
    loads = (OVER,) if options.quick else tuple(LOADS)
    for name, trace in TRACES.items():
        for ranks in RANKS[:1] if options.quick else RANKS:
            if options.traces is not None or ranks * trace.per_rank <= trace.head_len:
                for load in loads if ranks <= MOST_LEFT_OUT else (OVER,):
                    yield {"trace": name, "load": load, "ranks": ranks}


def _trials_at(point: Point, options: Options) -> Iterator[Trial]:
    folder, file = _file(TRACES[str(point["trace"])], options.traces)
    leaves_out = not options.quick and int(point["ranks"]) <= MOST_LEFT_OUT
    found = policies(leaves_out=leaves_out)
    if int(point["ranks"]) > MOST_LEFT_OUT:
        found = {policy: found[policy] for policy in ON_THE_MOST if policy in found}
    for policy, settings in found.items():
        for draw in range(1 if options.quick else NUM_DRAWS.get(int(point["ranks"]), 1)):
            yield Trial(point, policy, scenario_of(point, file, settings, SEED_OF_DRAW * draw), folder)


def _file(trace: Trace, folder: Path | None) -> tuple[Path, str]:
    """The trace's folder and name. Raises ConfigError when it is not in `folder`."""
    if folder is None:
        return HEADS, trace.head
    found = next((name for name in trace.files if (folder / name).is_file()), None)
    if found is None:
        raise ConfigError(f"traces: {folder} has none of {', '.join(trace.files)}")
    return folder, found


def policies(*, leaves_out: bool) -> dict[str, list[Settings]]:
    """What each policy sets: nothing, one feature, all, and with `leaves_out` all but one. Of the gates, all take the
    last one that this version has; the others stand alone."""
    known = {field.name for field in dataclasses.fields(SchedulerConfig)}
    gates = {name: gate for name, gate in GATES.items() if known.issuperset(gate["scheduler"])}
    last = next(reversed(gates))
    features = {"planning ahead": AHEAD, last: gates[last], "token routing": ROUTED, "whole pages": WHOLE_PAGES}
    found: dict[str, list[Settings]] = {PLAIN: []}
    found |= {name: [settings] for name, settings in (gates | features).items()}
    found[ALL] = list(features.values())
    if leaves_out:
        for left in features:
            found[LEFT_OUT + left] = [settings for name, settings in features.items() if name != left]
    return found


def scenario_of(point: Point, file: str, settings: list[Settings], seed: int = 0) -> Scenario:
    """The trace's lengths and prefixes in its order; arrivals are drawn, so that the load of a rank is the same in
    fleets of all sizes."""
    trace, ranks = TRACES[str(point["trace"])], int(point["ranks"])
    plain: dict[str, Any] = {
        "seed": seed,
        "fleet": {"workers": ranks // RANKS_OF_WORKER, "ranks": RANKS_OF_WORKER, "lockstep": True},
        "workload": {
            "kind": "file",
            "path": file,
            "num_requests": trace.per_rank * ranks,
            "rate": trace.plain_rate * LOADS[str(point["load"])] * ranks,
        },
        "scheduler": {"max_running": SEATS, "max_step_tokens": MAX_STEP_TOKENS, "depth": 0},
        "cache": {"page_size": PAGE_SIZE, "num_pages": NUM_PAGES},
        "cost": {
            "step_ms": FIT.step_ms,
            "eager_step_ms": FIT.eager_step_ms,
            "prefill_token_ms": FIT.prefill_token_ms,
            "decode_row_ms": FIT.decode_row_ms,
            "source": "fitted to a published table of DeepSeek-V3.1 on 4 ranks",
        },
        "host": {"row_us": HOST_ROW_US},
        "routing": {"worker_policy": "round_robin", "rank_policy": "round_robin"},
    }
    return make_scenario(reduce(lambda under, over: merge(under, dict(over), ""), settings, plain))
