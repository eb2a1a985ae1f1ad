"""A scenario: everything that a simulation depends on, so that the same file gives the same result.

Sections are frozen dataclasses; a field's docstring is its help and names its unit. `scheduler` and `cache` take
every setting that the engine's own scheduler has.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

from equipoise.config import CacheConfig, SchedulerConfig
from equipoise.config.checks import at_least, one_of, seconds, within
from equipoise.config.cost import MAX_PRICE, CostConfig
from equipoise.config.files import read_table
from equipoise.errors import ConfigError
from equipoise.sim.tables import merge, override, section
from equipoise.sim.workload.lengths import Lengths, Shape

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

MIN_GBPS = 1e-3
"""Slower links have the KV of one prompt take days, and load reports go on all the while."""
WorkloadKind = Literal["lengths", "file", "mix", "sessions"]


def _more_than_0(name: str, value: float | None) -> None:
    if value is not None and not value > 0:
        raise ConfigError(f"{name}: {value} must be more than 0")


@dataclass(frozen=True)
class FleetConfig:
    """Workers and their ranks: those that serve requests alone, and those that serve them in pairs."""

    workers: int = 1
    """Workers: model servers; 0 when not given and there are prefill and decode workers."""

    ranks: int = 1
    """Data-parallel ranks of a worker; of prefill and decode workers see below."""

    prefill_workers: int = 0
    """Workers that compute prompts for decode workers."""

    prefill_ranks: int = 1
    """Data-parallel ranks of a prefill worker."""

    decode_workers: int = 0
    """Workers that compute outputs from the KV of prompts that prefill workers send."""

    decode_ranks: int = 1
    """Data-parallel ranks of a decode worker."""

    transfer_gbps: float = 400.0
    """Gigabits per second between a prefill rank and a decode rank; each carries one prompt's KV at a time."""

    transfer_ms: float = 1.0
    """Milliseconds that a transfer takes beside its bytes."""

    kv_bytes_per_token: float = 131072.0
    """Bytes of a token's KV: layers x 2 x KV heads x head size x bytes of a number; 131072 is Llama-3.1-8B in bf16."""

    lockstep: bool = False
    """Ranks of a worker step together: a step lasts as long as its slowest rank, as with mixture-of-experts models."""

    max_model_len: int = 262144
    """Most tokens of a request, prompt and output together."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name.endswith("ranks"):
                at_least(name.replace("_", "-"), value, 1, 1024)
            elif name.endswith("workers"):
                at_least(name.replace("_", "-"), value, 0, 100_000)
        if bool(self.prefill_workers) != bool(self.decode_workers):
            raise ConfigError(
                f"prefill-workers: {self.prefill_workers} beside {self.decode_workers} decode-workers, "
                "a request needs one of each"
            )
        if not (self.workers or self.prefill_workers):
            raise ConfigError("workers: 0 is too few, at least 1 is allowed where no prefill and decode workers are")
        if not self.workers and self.ranks != 1:
            raise ConfigError(
                f"ranks: {self.ranks} is for workers, and there are none beside prefill and decode workers: "
                "give prefill-ranks and decode-ranks"
            )
        within("transfer-gbps", self.transfer_gbps, MIN_GBPS, math.inf)
        within("transfer-ms", self.transfer_ms, 0, MAX_PRICE)
        within("kv-bytes-per-token", self.kv_bytes_per_token, 0, MAX_PRICE)
        at_least("max-model-len", self.max_model_len, 2)


@dataclass(frozen=True)
class HostConfig:
    """What planning a step costs the host; hidden behind the step before it when `scheduler.depth` is 1 or more."""

    step_us: float = 0.0
    """Microseconds per step."""

    row_us: float = 0.0
    """Microseconds per request in the step."""

    def __post_init__(self) -> None:
        for name, price in vars(self).items():
            within(name.replace("_", "-"), price, 0, MAX_PRICE)


@dataclass(frozen=True)
class LengthsConfig:
    """Tokens with a mean and a spread."""

    mean: float = 1000.0
    """Mean tokens."""

    spread: float = 0.0
    """Coefficient of variation: standard deviation over mean."""

    shape: Shape = "normal"
    """Of the distribution."""

    least: int = 1
    """Fewest tokens."""

    most: int = 2**31 - 1
    """Most tokens."""

    def __post_init__(self) -> None:
        self.lengths()

    def lengths(self) -> Lengths:
        """What draws them. Raises ConfigError when there is no such distribution."""
        return Lengths(self.mean, self.spread, self.shape, self.least, self.most)


@dataclass(frozen=True)
class WorkloadConfig:
    """What arrives, and when."""

    kind: WorkloadKind = "lengths"
    """"lengths" draws them, "file" reads CSV, JSONL or Parquet (Azure's and Mooncake's traces too), "mix" reads clients
    as ServeGen describes them, "sessions" draws conversations."""

    path: str | None = None
    """file, mix: where the trace is."""

    num_requests: int | None = None
    """Most requests; all of a file when not given, 1,000 of those that are drawn."""

    concurrency: int | None = None
    """Closed loop: requests at any time. Times of a file do not count then."""

    rate: float | None = None
    """Open loop: requests per second, sessions per second of sessions. Of a file: instead of the times recorded."""

    cv: float = 1.0
    """Coefficient of variation of the gaps between arrivals; 1 is a Poisson process."""

    rate_scale: float = 1.0
    """file, mix: how many times as fast as recorded."""

    prompt: LengthsConfig = field(default_factory=lambda: LengthsConfig(mean=1000))
    """lengths, sessions: of prompts; of what is new in a turn."""

    output: LengthsConfig = field(default_factory=lambda: LengthsConfig(mean=200))
    """lengths, sessions: of outputs."""

    turns: LengthsConfig = field(default_factory=lambda: LengthsConfig(mean=4))
    """sessions: turns of a session."""

    think_s: float = 10.0
    """sessions: mean seconds between an answer's end and the next turn."""

    shared_len: int = 0
    """sessions: tokens of an opening that all sessions share."""

    arrival_column: str | None = None
    """file: column of the arrivals; found by the usual names when not given."""

    prompt_column: str | None = None
    """file: column of the prompts' lengths."""

    output_column: str | None = None
    """file: column of the outputs' lengths."""

    arrival_unit: Literal["s", "ms"] | None = None
    """file: unit of the arrivals, when the column's name does not tell."""

    def __post_init__(self) -> None:
        one_of("kind", self.kind, get_args(WorkloadKind))
        at_least("num-requests", self.num_requests, 1)
        at_least("concurrency", self.concurrency, 1)
        at_least("shared-len", self.shared_len, 0)
        within("cv", self.cv, 0, 1000)
        seconds("think-s", self.think_s, may_be_zero=True)
        _more_than_0("rate-scale", self.rate_scale)
        _more_than_0("rate", self.rate)
        if self.kind in ("file", "mix") and self.path is None:
            raise ConfigError(f"path: a workload of kind {self.kind} needs one")
        if self.kind not in ("file", "mix") and self.path is not None:
            raise ConfigError(f"path: {self.path} is for a workload of kind file or mix, kind is {self.kind}")
        if self.kind == "sessions" and self.rate is None:
            raise ConfigError("rate: sessions need one, in sessions per second")
        if self.kind == "lengths" and self.rate is None and self.concurrency is None:
            raise ConfigError("rate: give either rate (an open loop) or concurrency (a closed one)")
        if self.rate is not None and self.concurrency is not None:
            raise ConfigError(f"rate: {self.rate} makes an open loop, concurrency {self.concurrency} a closed one")


@dataclass(frozen=True)
class RoutingConfig:
    """Who gets a request: the gateway's policies, on its own accounts."""

    worker_policy: str = "prefix_tokens"
    """Policy that chooses the worker; as of the gateway."""

    prefill_policy: str | None = None
    """Policy that chooses the prefill worker, when it is another one."""

    decode_policy: str | None = None
    """Policy that chooses the decode worker, when it is another one."""

    rank_policy: str = "minimum_tokens"
    """Policy that chooses the rank of a worker; as of the gateway. "none": round robin, as engines do by themselves;
    "follow_room": by a number drawn at random for each request, as SGLang does for pairs."""

    report_interval_s: float = 1.0
    """Seconds between load reports; 0 has fresh ones for every choice."""

    report_delay_s: float = 0.0
    """Seconds that a report is old when it comes."""

    charges: bool = True
    """A routed request counts at once, before a report knows of it."""

    def __post_init__(self) -> None:
        seconds("report-interval-s", self.report_interval_s, may_be_zero=True)
        seconds("report-delay-s", self.report_delay_s, may_be_zero=True)


@dataclass(frozen=True)
class ObjectivesConfig:
    """What makes a request a good one."""

    ttft_ms: float = 2000.0
    """Most milliseconds to the first token."""

    tpot_ms: float = 100.0
    """Most milliseconds per output token after the first."""

    def __post_init__(self) -> None:
        _more_than_0("ttft-ms", self.ttft_ms)
        _more_than_0("tpot-ms", self.tpot_ms)


@dataclass(frozen=True)
class RoleConfig:
    """What prefill ranks, or decode ranks, have instead of the scenario's sections of the same names."""

    scheduler: SchedulerConfig
    cache: CacheConfig
    cost: CostConfig
    host: HostConfig

    def __post_init__(self) -> None:
        if self.cache.num_pages is None:
            raise ConfigError("cache.num-pages: it must be given, there is no memory to measure")
        if self.scheduler.num_drafts:
            raise ConfigError(f"scheduler.num-drafts: {self.scheduler.num_drafts} must be 0, there is no text to guess")


SHARED = tuple(each.name for each in dataclasses.fields(RoleConfig))


@dataclass(frozen=True)
class Scenario:
    """A whole experiment."""

    name: str = "scenario"
    """What results are called."""

    seed: int = 0
    """Of everything that is drawn."""

    fleet: FleetConfig = field(default_factory=FleetConfig)
    scheduler: SchedulerConfig = field(
        default_factory=lambda: SchedulerConfig(max_step_tokens=8192, max_waiting_reqs=2**31 - 1)
    )
    cache: CacheConfig = field(default_factory=lambda: CacheConfig(num_pages=32768))
    cost: CostConfig = field(default_factory=CostConfig)
    host: HostConfig = field(default_factory=HostConfig)
    workload: WorkloadConfig = field(default_factory=lambda: WorkloadConfig(concurrency=64))
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    objectives: ObjectivesConfig = field(default_factory=ObjectivesConfig)

    prefill: RoleConfig | None = None
    """Sections of prefill ranks; in a file, what they have otherwise than the rest."""

    decode: RoleConfig | None = None
    """Sections of decode ranks; in a file, what they have otherwise than the rest."""

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ConfigError(f"seed: {self.seed} must be at least 0")
        self.shared()

    def shared(self) -> RoleConfig:
        """The sections of ranks that have none of their own."""
        return RoleConfig(self.scheduler, self.cache, self.cost, self.host)


DEFAULTS = Scenario()


def read_scenario(path: Path, overrides: Iterable[str] = ()) -> Scenario:
    """The scenario of a YAML, TOML or JSON file; `overrides` such as "fleet.ranks=8" win over it.

    Raises ConfigError that names the field when something is unknown, of a wrong type or out of range."""
    return make_scenario(read_table(path, "scenario"), overrides)


def make_scenario(table: dict[str, Any], overrides: Iterable[str] = ()) -> Scenario:
    """The scenario of a table as a file holds it; the table stays as it is."""
    defaults: dict[str, Any] = msgspec.to_builtins(DEFAULTS)
    del defaults["prefill"], defaults["decode"], defaults["fleet"]["workers"]
    merged = merge(defaults, table, "")
    if "workload" in table:  # the default's own loop is no part of another workload
        merged["workload"] = copy.deepcopy(table["workload"])
    for each in overrides:
        override(merged, each)
    for role in ("prefill", "decode"):
        if isinstance(own := merged.get(role), dict):
            merged[role] = merge({name: merged[name] for name in SHARED}, own, f"{role}.")
    fleet = merged["fleet"]
    if isinstance(fleet, dict) and "workers" not in fleet:
        fleet["workers"] = 0 if fleet["prefill_workers"] or fleet["decode_workers"] else 1
    return section(merged, Scenario, "")


def as_table(scenario: Scenario) -> dict[str, Any]:
    """The scenario with every default filled in, as a file would hold it."""
    table: dict[str, Any] = msgspec.to_builtins(scenario)
    return table
