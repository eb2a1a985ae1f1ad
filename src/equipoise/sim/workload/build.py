"""The workload that a scenario names."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from equipoise.errors import ConfigError
from equipoise.sim.workload.arrivals import gamma
from equipoise.sim.workload.closed import ClosedLoop
from equipoise.sim.workload.files import MOONCAKE_PIECE_LEN, Columns, read_requests
from equipoise.sim.workload.lengths import pairs
from equipoise.sim.workload.request import OpenLoop, SimRequest
from equipoise.sim.workload.servegen import mix, read_mix
from equipoise.sim.workload.sessions import Sessions, Talk

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from equipoise.sim.scenario import WorkloadConfig
    from equipoise.sim.workload.request import Workload

DRAWN = 1000
"""Requests of a workload without an end of its own, when no number is given."""


def build_workload(config: WorkloadConfig, seed: int, folder: Path) -> Workload:
    """The workload; relative paths are under `folder`. Raises ConfigError when a file is missing or broken."""
    if config.kind == "sessions":
        assert config.rate is not None
        starts = gamma(config.rate, config.cv, np.random.default_rng((seed, 1)))
        return Sessions(islice(starts, config.num_requests or DRAWN), _talk(config), seed)
    bodies = _bodies(config, seed, folder)
    if config.concurrency is not None:
        return ClosedLoop(bodies, config.concurrency, MOONCAKE_PIECE_LEN)
    return OpenLoop(bodies, MOONCAKE_PIECE_LEN)


def _bodies(config: WorkloadConfig, seed: int, folder: Path) -> Iterator[SimRequest]:
    if config.kind == "lengths":
        return islice(_drawn(config, seed), config.num_requests or DRAWN)
    assert config.path is not None
    path = folder / config.path
    if config.kind == "mix":
        return islice(mix(read_mix(path), seed, config.rate_scale), config.num_requests)
    columns = Columns(config.arrival_column, config.prompt_column, config.output_column, config.arrival_unit)
    needs_times = config.rate is None and config.concurrency is None
    recorded = islice(read_requests(path, columns, needs_times=needs_times), config.num_requests)
    if config.rate is not None:
        arrivals = gamma(config.rate, config.cv, np.random.default_rng((seed, 1)))
        return (body._replace(arrival_s=at_s) for body, at_s in zip(recorded, arrivals, strict=False))
    return (body._replace(arrival_s=body.arrival_s / config.rate_scale) for body in recorded)


def _drawn(config: WorkloadConfig, seed: int) -> Iterator[SimRequest]:
    lengths = pairs(config.prompt.lengths(), config.output.lengths(), np.random.default_rng((seed, 0)))
    if config.rate is None:
        return (SimRequest(0.0, *pair) for pair in lengths)
    arrivals = gamma(config.rate, config.cv, np.random.default_rng((seed, 1)))
    return (SimRequest(arrival_s, *pair) for arrival_s, pair in zip(arrivals, lengths, strict=False))


def _talk(config: WorkloadConfig) -> Talk:
    if config.concurrency is not None:
        raise ConfigError("concurrency: sessions come at a rate, each waits for its own answers")
    return Talk(
        num_turns=config.turns.lengths(),
        question=config.prompt.lengths(),
        answer=config.output.lengths(),
        think_s=config.think_s,
        shared_len=config.shared_len,
    )
