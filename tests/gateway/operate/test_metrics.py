"""The gateway's page of metrics, as Prometheus' own parser reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.gateway.pure_fleet import empty_fleet, join, router_of

from equipoise import __version__
from equipoise.gateway.fleet.workers_file import WorkersFile
from equipoise.gateway.operate.metrics import MAX_FORMER_WORKERS, MAX_MODELS, OTHER_MODELS, PREFIX, GatewayMetrics
from equipoise.route.account import RankReport
from equipoise.route.policy import Ask

if TYPE_CHECKING:
    from pathlib import Path

    from equipoise.gateway.fleet.fleet import Fleet


class Scrape:
    """One page, parsed."""

    def __init__(self, metrics: GatewayMetrics, fleet: Fleet, now: float = 0.0) -> None:
        self.families = list(text_string_to_metric_families(metrics.page(fleet, now).decode()))
        self.samples = [sample for family in self.families for sample in family.samples]

    def value(self, name: str, **labels: str) -> float:
        """The only sample of a name with all of `labels`."""
        (sample,) = (
            each
            for each in self.samples
            if each.name in (name, PREFIX + name) and labels.items() <= each.labels.items()
        )
        return float(sample.value)

    def labels(self, name: str, label: str) -> list[str]:
        """The values of a label in all samples of a name."""
        return [sample.labels[label] for sample in self.samples if sample.name == PREFIX + name]


def test_requests_are_counted_by_route_worker_and_code() -> None:
    metrics = GatewayMetrics()
    for status in (200, 200, 503):
        metrics.answered("/generate", "http://a:1", status)
    metrics.answered("/generate", "", 429)
    metrics.failed_tries["http://a:1", "connect"] += 2
    metrics.retries["connect"] += 2
    metrics.refused["queue_full"] += 1
    metrics.num_clients_gone = metrics.num_connections = 3
    metrics.num_queued = 4
    metrics.queue_wait.observe(0.3)
    page = Scrape(metrics, empty_fleet())
    assert page.value("requests_total", worker="http://a:1", code="200", route="/generate") == 2
    assert page.value("requests_total", worker="http://a:1", code="503") == 1
    assert page.value("requests_total", worker="", code="429") == 1
    assert page.value("failed_tries_total", worker="http://a:1", phase="connect") == 2
    assert page.value("retries_total", reason="connect") == 2
    assert page.value("refused_total", code="queue_full") == 1
    assert [page.value(name) for name in ("clients_gone_total", "connections", "queue_length")] == [3, 3, 4]
    assert page.value("queue_wait_seconds_count") == 1
    assert page.value("build_info", version=__version__) == 1
    assert page.value("process_resident_memory_bytes") > 1e6
    assert page.value("process_open_fds") > 2
    assert page.value("process_cpu_seconds_total") > 0
    names = [family.name for family in page.families]
    assert len(names) == len(set(names))
    assert all(family.documentation for family in page.families)


def test_latencies_are_kept_by_model() -> None:
    metrics = GatewayMetrics()
    metrics.generated("m", 10, 5, 1.0, 0.2)
    metrics.generated("m", 10, 1, 3.0, 0.2, num_cached=7)
    metrics.generated("m", 10, 0, 7.0, None)
    metrics.generated('odd"name', 1, 1, 0.1, 0.1)
    page = Scrape(metrics, empty_fleet())
    assert page.value("e2e_request_latency_seconds_count", model="m") == 3
    assert page.value("e2e_request_latency_seconds_sum", model="m") == pytest.approx(11)
    assert page.value("time_to_first_token_seconds_count", model="m") == 2, "one answer came in one piece"
    assert page.value("time_per_output_token_seconds_count", model="m") == 1, "one token has no gap"
    assert page.value("time_per_output_token_seconds_sum", model="m") == pytest.approx(0.2)
    assert (page.value("prompt_tokens_total", model="m"), page.value("output_tokens_total", model="m")) == (30, 6)
    assert page.value("prompt_tokens_total", model='odd"name') == 1
    assert page.value("cached_tokens_total", model="m") == 7


def test_models_are_bounded() -> None:
    metrics = GatewayMetrics()
    for number in range(2 * MAX_MODELS):
        metrics.generated(f"m{number}", 1, 1, 1.0, 1.0)
    page = Scrape(metrics, empty_fleet())
    models = page.labels("prompt_tokens_total", "model")
    assert len(models) == MAX_MODELS + 1
    assert page.value("prompt_tokens_total", model=OTHER_MODELS) == MAX_MODELS
    assert page.value("prompt_tokens_total", model="m0") == 1


def test_workers_that_left_are_bounded() -> None:
    metrics, fleet = GatewayMetrics(), empty_fleet()
    kept = join(fleet, "kept")
    metrics.answered("/generate", kept.url, 200)
    num_former = MAX_FORMER_WORKERS + 5
    for number in range(num_former):
        metrics.answered("/generate", f"http://gone{number}:1", 200)
        metrics.failed_tries[f"http://gone{number}:1", "connect"] += 1
    metrics.answered("/health", "", 200)
    page = Scrape(metrics, fleet)
    expected = [kept.url, *(f"http://gone{number}:1" for number in range(5, num_former)), ""]
    assert page.labels("requests_total", "worker") == expected
    assert page.labels("failed_tries_total", "worker") == expected[1:-1]


def test_ranks_are_shown_as_reported_and_as_believed() -> None:
    fleet = empty_fleet()
    worker = join(fleet, "a", num_ranks=2, first_number=4)
    router = router_of(fleet)
    worker.load.report([RankReport(0, 700, 3, 2, 10_000, 55.0, taken_at=1.0)])
    worker.load.check_ages(2.0, 10.0)
    route = router.route(Ask(100, 20), "m", "mixed", (), 2.0)
    page = Scrape(GatewayMetrics(), fleet, now=4.5)
    rank = {"worker": worker.url, "dp_rank": "4"}
    assert page.value("rank_reported_tokens", **rank) == 700
    assert page.value("rank_report_age_seconds", **rank) == 3.5
    assert page.value("rank_believed_tokens", **rank) == 820, "the other rank is stale"
    assert page.value("rank_charged_tokens", **rank) == page.value("rank_pending_tokens", **rank) == 120
    assert page.value("rank_inflight_requests", **rank) == page.value("rank_live", **rank) == 1
    assert page.value("rank_live", worker=worker.url, dp_rank="5") == 0
    assert page.labels("rank_reported_tokens", "dp_rank") == ["4"], "the other never reported"
    assert page.value("worker_inflight_requests", worker=worker.url) == 1
    router.finished(route, "ok", 5.0)
    assert Scrape(GatewayMetrics(), fleet, now=5.0).value("rank_charged_tokens", **rank) == 0


def test_workers_are_shown_with_their_states() -> None:
    fleet = empty_fleet()
    worker, other = join(fleet, "a"), join(fleet, "b")
    fleet.became_unhealthy(other, "no answer")
    router = router_of(fleet)
    for _ in range(fleet.limits.breaker.max_failures):
        router.finished(router.route(Ask(1), "m", "mixed", (), 1.0), "failed", 1.0)
    page = Scrape(GatewayMetrics(), fleet, now=1.0)
    assert page.value("worker_state", worker=worker.url, state="ready") == 1
    assert page.value("worker_state", worker=worker.url, state="unhealthy") == 0
    assert page.value("worker_state", worker=other.url, state="unhealthy") == 1
    assert page.value("worker_breaker_state", worker=worker.url) == 2
    assert page.value("worker_breaker_opened_total", worker=worker.url) == 1
    assert page.value("worker_eligible", worker=worker.url) == 0
    assert page.value("worker_feed_broken", worker=worker.url) == 1


def test_a_workers_file_that_is_wrong_is_told(tmp_path: Path) -> None:
    file = WorkersFile(tmp_path / "w.toml")
    metrics, fleet = GatewayMetrics(file), empty_fleet()
    file.path.write_text("workers = ['a:1']")
    file.read()
    assert Scrape(metrics, fleet).value("workers_file_ok") == 1
    file.path.write_text("workers = 3")
    file.read()
    assert Scrape(metrics, fleet).value("workers_file_ok") == 0
    assert Scrape(GatewayMetrics(), fleet).labels("workers_file_ok", "") == []


def test_legs_of_pairs_are_counted_by_role_worker_and_outcome() -> None:
    metrics = GatewayMetrics()
    metrics.legs["prefill", "http://p:1", "ok"] += 2
    metrics.legs["decode", "http://d:1", "cancelled"] += 1
    scrape = Scrape(metrics, empty_fleet())
    assert scrape.value("pair_legs_total", role="prefill", worker="http://p:1", outcome="ok") == 2
    assert scrape.value("pair_legs_total", role="decode") == 1
