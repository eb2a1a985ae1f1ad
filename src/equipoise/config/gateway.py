"""Settings of the gateway: workers, routing, health, tries, time limits, queue, and where it listens."""

from __future__ import annotations

from dataclasses import dataclass, field

from equipoise.config.checks import MAX_SECONDS, at_least, header_value, one_of, seconds, within
from equipoise.config.server import LOG_LEVELS, MAX_BODY_MB, LogLevel
from equipoise.config.worker import WORKER_KINDS, WorkerKind, WorkerSpec, prefill_worker
from equipoise.errors import ConfigError

MAX_RETRIES = 100
MAX_FAILURES = 100_000
MIN_INTERVAL_S = 0.01
"""Between two things that are done again and again: more often, the gateway and its workers would do little else."""
_TOKEN_CHARS = frozenset("!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyz")


@dataclass(frozen=True)
class WorkersConfig:
    """Who does the work."""

    worker: tuple[str, ...] = ()
    """URL of a worker that prefills and decodes; once for each."""

    prefill: tuple[str, ...] = ()
    """URL of a prefill worker, or URL,PORT with its bootstrap port; once for each."""

    decode: tuple[str, ...] = ()
    """URL of a decode worker; once for each."""

    workers_file: str | None = None
    """File (TOML, YAML or JSON) that lists workers; read again whenever it changes."""

    worker_kind: WorkerKind = "auto"
    """Which server the workers of the command line are; "auto" asks each."""

    worker_api_key: str | None = None
    """Key that the gateway's own requests to workers carry as a bearer token (health, loads, models)."""

    tokenizer: str | None = None
    """Folder of a tokenizer that counts prompt tokens; by bytes per token, learnt per model, when not given."""

    def __post_init__(self) -> None:
        one_of("worker-kind", self.worker_kind, WORKER_KINDS)
        header_value("worker-api-key", self.worker_api_key)
        urls = [spec.url for spec in self.specs()]
        twice = next((url for url in urls if urls.count(url) > 1), None)
        if twice is not None:
            raise ConfigError(f"worker: {twice} is named twice")
        if self.workers_file is None and bool(self.prefill) != bool(self.decode):
            have, lack = ("prefill", "decode") if self.prefill else ("decode", "prefill")
            raise ConfigError(f"{lack}: workers for {have} need workers for {lack} too: --{lack} URL")

    def specs(self) -> tuple[WorkerSpec, ...]:
        """The workers that the settings name, in their order. Raises ConfigError for one that is no URL."""
        return (
            *(WorkerSpec(url, "mixed", self.worker_kind) for url in self.worker),
            *(prefill_worker(text, self.worker_kind) for text in self.prefill),
            *(WorkerSpec(url, "decode", self.worker_kind) for url in self.decode),
        )


@dataclass(frozen=True)
class RoutingConfig:
    """Which worker and which of its ranks a request goes to."""

    policy: str = "prefix_tokens"
    """Worker policy: prefix_tokens, cache_aware, consistent_hashing, least_tokens, least_load, power_of_two,
    round_robin, random, or your own (an entry point of equipoise.worker_policies, or "module:attribute"). Options
    follow it: "prefix_tokens,load_weight=0.2"."""

    rank_policy: str = "minimum_tokens"
    """Rank policy: minimum_tokens, round_robin, follow_room, none, or your own (an entry point of
    equipoise.rank_policies, or "module:attribute")."""

    prefill_policy: str | None = None
    """Worker policy among prefill workers; `policy` when not given."""

    decode_policy: str | None = None
    """Worker policy among decode workers; `policy` when not given."""

    routing_seed: int = 0
    """Seed of all that policies and waits draw."""

    session_header: str = "x-session-id"
    """Header whose value names a session, for policies that keep sessions together."""

    load_check_interval_s: float = 1.0
    """Seconds between two load reports of a worker, 0 to ask for none."""

    load_stale_s: float = 10.0
    """Seconds after which a load report is too old to go by."""

    def __post_init__(self) -> None:
        for name in ("policy", "rank_policy", "prefill_policy", "decode_policy"):
            if getattr(self, name) == "":
                raise ConfigError(f"{name.replace('_', '-')}: it must not be empty")
        if not -(2**63) <= self.routing_seed < 2**63:
            raise ConfigError(f"routing-seed: {self.routing_seed} must be at least {-(2**63)} and at most {2**63 - 1}")
        _header_name("session-header", self.session_header)
        _interval("load-check-interval", self.load_check_interval_s)
        seconds("load-stale", self.load_stale_s)
        if self.load_stale_s <= self.load_check_interval_s:
            raise ConfigError(
                f"load-stale: {self.load_stale_s} must be more than load-check-interval, {self.load_check_interval_s}"
            )


@dataclass(frozen=True)
class HealthConfig:
    """When a worker is taken out, and when it comes back."""

    health_check_interval_s: float = 5.0
    """Seconds between two health checks of a worker, 0 for none."""

    health_check_timeout_s: float = 5.0
    """Seconds that a worker has to answer a health check or a load report."""

    unhealthy_after: int = 3
    """Failed health checks in a row that take a worker out."""

    healthy_after: int = 2
    """Passed health checks in a row that bring it back."""

    breaker_failures: int = 10
    """Failed requests within `breaker_window` that open a worker's breaker; 4xx do not count."""

    breaker_window_s: float = 120.0
    """Seconds within which failures count."""

    breaker_failure_share: float = 0.1
    """Share of the requests since the first of those failures (0 to 1) that must have failed too."""

    breaker_open_s: float = 5.0
    """Seconds that an open breaker waits before requests try again; doubled, to a minute, each time that fails."""

    breaker_successes: int = 3
    """Requests that must then succeed to close it."""

    outlier_interval_s: float = 10.0
    """Seconds between two comparisons of workers with their peers, which leave out outliers; 0 for none."""

    outlier_ttft_ratio: float = 5.0
    """An outlier's mean time to the first token is this many times its peers' median, and a second more."""

    outlier_failure_excess: float = 0.3
    """Or its share of failed requests (0 to 1) is above its peers' median by this much."""

    outlier_eject_s: float = 15.0
    """Seconds that an outlier stays out, longer each time."""

    max_ejected_share: float = 0.34
    """Share of the workers (0 to 1) that may be out as outliers at once."""

    slow_start_s: float = 10.0
    """Seconds over which a worker that came (back) is given its full share, 0 for at once."""

    drain_timeout_s: float = 600.0
    """Seconds that a drained or removed worker has to finish its requests."""

    def __post_init__(self) -> None:
        _interval("health-check-interval", self.health_check_interval_s)
        seconds("health-check-timeout", self.health_check_timeout_s)
        at_least("unhealthy-after", self.unhealthy_after, 1)
        at_least("healthy-after", self.healthy_after, 1)
        at_least("breaker-failures", self.breaker_failures, 1, MAX_FAILURES)
        seconds("breaker-window", self.breaker_window_s)
        seconds("breaker-open", self.breaker_open_s)
        at_least("breaker-successes", self.breaker_successes, 1)
        within("breaker-failure-share", self.breaker_failure_share, 0, 1)
        _interval("outlier-interval", self.outlier_interval_s)
        within("outlier-ttft-ratio", self.outlier_ttft_ratio, 1, 1e6)
        within("outlier-failure-excess", self.outlier_failure_excess, 0, 1)
        seconds("outlier-eject", self.outlier_eject_s)
        within("max-ejected-share", self.max_ejected_share, 0, 1)
        seconds("slow-start", self.slow_start_s, may_be_zero=True)
        seconds("drain-timeout", self.drain_timeout_s, may_be_zero=True)


@dataclass(frozen=True)
class LimitsConfig:
    """How long each phase of a request may take, and how often it is tried."""

    connect_timeout_s: float = 5.0
    """Seconds to connect to a worker."""

    send_timeout_s: float = 60.0
    """Seconds for a worker to take in a request's body."""

    first_token_timeout_s: float = 600.0
    """Seconds from a request's last byte to the first byte of the worker's answer."""

    between_tokens_timeout_s: float = 120.0
    """Seconds between two reads of a worker's answer."""

    request_timeout_s: float | None = None
    """Seconds after which a request is ended; no limit when not given."""

    client_timeout_s: float = 60.0
    """Seconds for a client to send its request, or to take any of its answer while some waits for it."""

    keep_alive_s: float = 75.0
    """Seconds that a client's connection may be idle."""

    max_retries: int = 3
    """Further tries, elsewhere if possible, of a request that failed before a byte of its answer went out."""

    retry_delay_s: float = 0.05
    """Seconds before the second try; doubled from try to try, and jittered."""

    retry_max_delay_s: float = 2.0
    """Most seconds between two tries; a longer Retry-After is passed on to the client."""

    def __post_init__(self) -> None:
        for name in ("connect_timeout", "send_timeout", "first_token_timeout", "between_tokens_timeout"):
            seconds(name.replace("_", "-"), getattr(self, f"{name}_s"))
        seconds("request-timeout", self.request_timeout_s)
        seconds("client-timeout", self.client_timeout_s)
        seconds("keep-alive", self.keep_alive_s)
        at_least("max-retries", self.max_retries, 0, MAX_RETRIES)
        seconds("retry-delay", self.retry_delay_s, may_be_zero=True)
        seconds("retry-max-delay", self.retry_max_delay_s, may_be_zero=True)
        if self.retry_max_delay_s < self.retry_delay_s:
            raise ConfigError(
                f"retry-max-delay: {self.retry_max_delay_s} must be at least retry-delay, {self.retry_delay_s}"
            )


@dataclass(frozen=True)
class QueueConfig:
    """How many requests are at workers at once, and who waits."""

    max_inflight: int | None = None
    """Requests at workers at once, beyond which they queue; no limit when not given."""

    max_queue: int = 1024
    """Requests that may queue before new ones are refused with 429."""

    queue_timeout_s: float = 60.0
    """Seconds that a request may queue before it is refused with 503."""

    fairness_header: str = "authorization"
    """Header by whose value the queue takes turns."""

    def __post_init__(self) -> None:
        at_least("max-inflight", self.max_inflight, 1)
        at_least("max-queue", self.max_queue, 0)
        seconds("queue-timeout", self.queue_timeout_s)
        _header_name("fairness-header", self.fairness_header)


@dataclass(frozen=True)
class FrontConfig:
    """Where the gateway listens, who may steer it, what it writes down and how it stops."""

    host: str = "127.0.0.1"
    """Address to listen on."""

    port: int = 8080
    """Port to listen on; 0 takes a free one and prints it."""

    max_body_mb: float = 32.0
    """Largest request body, in MiB; a larger one is refused with 413."""

    shutdown_timeout_s: float = 30.0
    """Seconds that running requests are given to finish when the gateway is told to stop."""

    admin: bool = True
    """Serve the admin routes; without `admin_key` only when bound to a loopback address."""

    admin_key: str | None = None
    """Key that admin requests must send, as a bearer token or as X-Admin-Key."""

    metrics: bool = True
    """Serve /metrics."""

    access_log: str | None = None
    """Where a JSON line per request goes: stderr, stdout, or a file (opened anew on SIGHUP); nowhere by default."""

    log_level: LogLevel = "info"
    """Least that is logged."""

    def __post_init__(self) -> None:
        at_least("port", self.port, 0, 65535)
        if not 0 < self.max_body_mb <= MAX_BODY_MB:
            raise ConfigError(f"max-body-mb: {self.max_body_mb} must be more than 0 and at most {MAX_BODY_MB}")
        seconds("shutdown-timeout", self.shutdown_timeout_s, may_be_zero=True)
        header_value("admin-key", self.admin_key)
        if self.access_log == "":
            raise ConfigError("access-log: it must be stderr, stdout or the path of a file")
        one_of("log-level", self.log_level, LOG_LEVELS)


@dataclass(frozen=True)
class GatewayConfig:
    """Everything the gateway is told."""

    workers: WorkersConfig = field(default_factory=WorkersConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    queue: QueueConfig = field(default_factory=QueueConfig)
    front: FrontConfig = field(default_factory=FrontConfig)


def _interval(name: str, value: float) -> None:
    if value != 0 and not MIN_INTERVAL_S <= value <= MAX_SECONDS:
        raise ConfigError(
            f"{name}: {value} must be at least {MIN_INTERVAL_S:g} and at most {MAX_SECONDS:g}, or 0 for never"
        )


def _header_name(name: str, value: str) -> None:
    if not value or not _TOKEN_CHARS.issuperset(value.lower()):
        raise ConfigError(f"{name}: {value!r} is not the name of a header")
