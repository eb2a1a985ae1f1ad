"""What `/metrics` shows: loads read from the ranks when asked, and latencies observed as requests go on.

Names begin with `equipoise_`; the four gauges that routers read are there under SGLang's names too.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from equipoise.obs.page import E2E_S, GAP_S, TOKENS, TTFT_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from prometheus_client.metrics_core import Metric


class GroupLoad(Protocol):
    """What lockstep cost a rank."""

    total_exchanges: int
    total_exchange_s: float
    total_wait_s: float


class Load(Protocol):
    """The fields of a rank's load that are shown."""

    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_waiting_tokens: int
    num_used_tokens: int
    num_tokens: int
    max_total_num_tokens: int
    max_running_requests: int
    token_usage: float
    gen_throughput: float
    cache_hit_rate: float
    total_steps: int
    total_prompt_tokens: int
    total_cached_tokens: int
    total_output_tokens: int
    total_preemptions: int
    total_finished: int
    total_aborted: int
    step_ms: float
    num_waiting_uncached_tokens: int
    num_prefilling_tokens: int
    num_inflight_rows: int
    num_expected_output_tokens: int
    num_reserved_tokens: int
    num_sent_reqs: int
    num_sent_tokens: int

    @property
    def group(self) -> GroupLoad | None:
        """None for a rank that is not in lockstep."""


GAUGES = {
    "num_running_reqs": "Requests that hold a seat",
    "num_waiting_reqs": "Requests that wait for a seat",
    "num_waiting_tokens": "Tokens that waiting requests will need",
    "num_waiting_uncached_tokens": "Prefill tokens owed: waiting ones not known to be cached, and the rest of prompts "
    "that run",
    "num_prefilling_tokens": "Tokens of running prompts that no step computes yet",
    "num_inflight_rows": "Rows of the steps launched and not yet back",
    "num_expected_output_tokens": "Tokens still to come of running requests, up to their stop lengths",
    "num_reserved_tokens": "Room promised to requests whose KV comes from elsewhere, in tokens",
    "num_sent_reqs": "Requests whose KV was sent to a decode rank that has not acknowledged it",
    "num_sent_tokens": "Tokens of KV sent to a decode rank that has not acknowledged them",
    "num_used_tokens": "KV tokens in use, those that can be evicted left out",
    "num_tokens": "Used and waiting tokens together",
    "max_total_num_tokens": "KV tokens that fit",
    "max_running_requests": "Seats",
    "token_usage": "Share of the KV tokens in use, 0 to 1",
    "gen_throughput": "Output tokens per second, over the last seconds",
    "cache_hit_rate": "Share of prompt tokens that the prefix cache served, 0 to 1",
    "step_ms": "Milliseconds of a step, over the last steps",
}
TOTALS = {
    "total_steps": ("steps", "Steps run"),
    "total_prompt_tokens": ("prompt_tokens", "Prompt tokens of admitted requests"),
    "total_cached_tokens": ("cached_tokens", "Prompt tokens that the prefix cache served"),
    "total_output_tokens": ("output_tokens", "Tokens drawn"),
    "total_preemptions": ("preemptions", "Requests that lost their seat for lack of pages"),
    "total_finished": ("requests_finished", "Requests that ended"),
    "total_aborted": ("requests_aborted", "Requests that were aborted"),
}
GROUP_TOTALS = {
    "total_exchanges": ("exchanges", "Exchanges of states with the other ranks of a lockstep group"),
    "total_exchange_s": ("exchange_seconds", "Seconds in such exchanges, until the last rank has come"),
    "total_wait_s": ("group_wait_seconds", "Seconds of steps in which a rank had done its part and waited for others"),
}
SGLANG = {
    "num_used_tokens": "sglang:num_used_tokens",
    "num_running_reqs": "sglang:num_running_reqs",
    "num_waiting_reqs": "sglang:num_queue_reqs",
    "token_usage": "sglang:token_usage",
}


class GapHistogram:
    """Gaps between tokens. One call counts all tokens that came together: 0.3 us, whatever their number."""

    def __init__(self, name: str, help_text: str, buckets: tuple[float, ...]) -> None:
        self._name = name
        self._help = help_text
        self._buckets = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, gap_s: float, count: int) -> None:
        """`count` tokens, each `gap_s` after the one before."""
        self._counts[bisect_left(self._buckets, gap_s)] += count
        self._sum += gap_s * count

    def collect(self) -> Iterator[Metric]:
        """For the registry: the histogram as it stands."""
        rows, total = [], 0
        for bound, count in zip((*map(str, self._buckets), "+Inf"), self._counts, strict=True):
            total += count
            rows.append((bound, total))
        family = HistogramMetricFamily(self._name, self._help)
        family.add_metric([], rows, self._sum)
        yield family


class LoadCollector:
    """Gauges and totals of the ranks, read when `/metrics` is asked and at no other time."""

    def __init__(self, loads: Callable[[], Iterable[Load]], ups: Callable[[], Mapping[int, bool]]) -> None:
        self._loads = loads
        self._ups = ups

    def collect(self) -> Iterator[Metric]:
        """For the registry: one sample per quantity and rank that answers, and which ranks do."""
        loads = list(self._loads())
        up = GaugeMetricFamily("equipoise_rank_up", "1 for a rank that answers, 0 for another", labels=["dp_rank"])
        for dp_rank, is_up in self._ups().items():
            up.add_metric([str(dp_rank)], is_up)
        yield up
        for field, help_text in GAUGES.items():
            yield self._gauge(f"equipoise_{field}", help_text, field, loads)
        for field, name in SGLANG.items():
            yield self._gauge(name, GAUGES[field], field, loads)
        for field, (name, help_text) in TOTALS.items():
            counter = CounterMetricFamily(f"equipoise_{name}", help_text, labels=["dp_rank"])
            for load in loads:
                counter.add_metric([str(load.dp_rank)], getattr(load, field))
            yield counter
        for field, (name, help_text) in GROUP_TOTALS.items():
            counter = CounterMetricFamily(f"equipoise_{name}", help_text, labels=["dp_rank"])
            for load in loads:
                if load.group is not None:
                    counter.add_metric([str(load.dp_rank)], getattr(load.group, field))
            yield counter

    def _gauge(self, name: str, help_text: str, field: str, loads: list[Load]) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(name, help_text, labels=["dp_rank"])
        for load in loads:
            gauge.add_metric([str(load.dp_rank)], getattr(load, field))
        return gauge


class ServerMetrics:
    """Everything the HTTP server measures, in a registry of its own."""

    def __init__(self, loads: Callable[[], Iterable[Load]], ups: Callable[[], Mapping[int, bool]] = dict) -> None:
        """`loads`: of the ranks that answer; `ups`: which do, of all."""
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "equipoise_http_requests", "Requests answered", ["route", "status"], registry=self.registry
        )
        self.ttft = self._histogram("time_to_first_token_seconds", "From arrival to the first token", TTFT_S)
        self.tpot = self._histogram("time_per_output_token_seconds", "Mean gap between a request's tokens", GAP_S)
        self.e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the last token", E2E_S)
        self.prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request", TOKENS)
        self.output = self._histogram("request_output_tokens", "Output tokens of a request", TOKENS)
        self.gaps = GapHistogram("equipoise_inter_token_latency_seconds", "Gap between tokens", GAP_S)
        self.registry.register(self.gaps)
        self.registry.register(LoadCollector(loads, ups))

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"equipoise_{name}", help_text, buckets=buckets, registry=self.registry)

    def text(self) -> bytes:
        """The page, in Prometheus' text format."""
        return generate_latest(self.registry)


class Timing:
    """Latencies of one request, from its arrival on. Times are of the clock that the caller reads."""

    __slots__ = ("_metrics", "arrival_s", "finish_reason", "first_s", "last_s", "num_cached", "num_output")

    def __init__(self, metrics: ServerMetrics, arrival_s: float) -> None:
        self._metrics = metrics
        self.arrival_s = arrival_s
        self.first_s = 0.0
        self.last_s = 0.0
        self.num_output = 0
        self.num_cached = 0
        self.finish_reason: str | None = None

    def on_tokens(self, now: float, count: int) -> None:
        """`count` (at least 1) tokens came together."""
        if self.num_output:
            self._metrics.gaps.observe((now - self.last_s) / count, count)
        else:
            self.first_s = now
            self._metrics.ttft.observe(now - self.arrival_s)
        self.last_s = now
        self.num_output += count

    def finish(self, now: float, num_prompt: int, finish_reason: str, num_cached: int) -> None:
        """The request ended, and not by an error; `num_cached` of its prompt's tokens came from the prefix cache."""
        self.finish_reason = finish_reason
        self.num_cached = num_cached
        metrics, count = self._metrics, self.num_output
        metrics.e2e.observe(now - self.arrival_s)
        metrics.prompt.observe(num_prompt)
        metrics.output.observe(count)
        if count > 1:
            metrics.tpot.observe((self.last_s - self.first_s) / (count - 1))
