"""The fleet as `/metrics` shows it: read from the workers when asked, nothing is counted here."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from equipoise.gateway.fleet.worker import State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from equipoise.gateway.fleet.fleet import Fleet
    from equipoise.gateway.fleet.worker import Worker
    from equipoise.obs.page import Kind, Labels, Page
    from equipoise.route.account import RankAccount

STATES: tuple[State, ...] = get_args(State)
BREAKER_STATES = {"closed": 0, "half_open": 1, "open": 2}


def fleet_families(page: Page, prefix: str, fleet: Fleet, now: float) -> None:
    """Add the families of workers and ranks to `page`, their names behind `prefix`."""
    workers = [((("worker", worker.url),), worker) for worker in fleet.workers]
    states = (((*key, ("state", state)), int(worker.state == state)) for key, worker in workers for state in STATES)
    page.family(f"{prefix}worker_state", "gauge", "1 for the state that the worker is in", states)
    for name, kind, help_text, read in _worker_quantities(fleet, now):
        page.family(prefix + name, kind, help_text, [(key, read(worker)) for key, worker in workers])
    ranks = [
        ((*key, ("dp_rank", str(number))), account)
        for key, worker in workers
        for number, account in zip(worker.rank_labels, worker.load.ranks, strict=True)
    ]
    for name, help_text, read_rank in _rank_quantities(now):
        samples = ((key, read_rank(account)) for key, account in ranks)
        page.family(prefix + name, "gauge", help_text, _known(samples))


def _worker_quantities(fleet: Fleet, now: float) -> list[tuple[str, Kind, str, Callable[[Worker], float]]]:
    return [
        (
            "worker_eligible",
            "gauge",
            "1 while the worker may be given requests",
            lambda worker: int(fleet.is_eligible(worker, now)),
        ),
        ("worker_inflight_requests", "gauge", "Requests under way there", lambda worker: worker.num_inflight),
        ("worker_weight", "gauge", "Share of a full load, below 1 in slow start", lambda worker: worker.load.weight),
        ("worker_healthy", "gauge", "1 while health checks pass", lambda worker: int(worker.health.is_healthy)),
        (
            "worker_breaker_state",
            "gauge",
            "0 closed, 1 half open, 2 open",
            lambda worker: BREAKER_STATES[worker.breaker.state],
        ),
        ("worker_breaker_opened_total", "counter", "Times it opened", lambda worker: worker.breaker.num_opened),
        (
            "worker_ejected",
            "gauge",
            "1 while left out as an outlier",
            lambda worker: int(worker.record.ejected_until > now),
        ),
        (
            "worker_feed_broken",
            "gauge",
            "1 while no load reports come and charges alone count",
            lambda worker: int(worker.is_known and not worker.load.feed_ok),
        ),
        ("worker_feed_failures_total", "counter", "Polls without a report", lambda worker: worker.num_feed_failures),
    ]


def _rank_quantities(now: float) -> list[tuple[str, str, Callable[[RankAccount], float | None]]]:
    return [
        ("rank_believed_tokens", "Tokens that routing goes by", lambda account: account.load()),
        (
            "rank_reported_tokens",
            "Tokens of the last report",
            lambda account: None if account.reported_at is None else account.reported,
        ),
        (
            "rank_report_age_seconds",
            "Age of the last report",
            lambda account: None if account.reported_at is None else max(0.0, now - account.reported_at),
        ),
        ("rank_charged_tokens", "Tokens of the requests under way", lambda account: account.active),
        ("rank_pending_tokens", "Those of them that no report includes yet", lambda account: account.pending),
        ("rank_inflight_requests", "Requests under way", lambda account: account.num_active),
        ("rank_live", "0 while dead or stale and skipped", lambda account: int(account.is_live)),
    ]


def _known(samples: Iterator[tuple[Labels, float | None]]) -> Iterator[tuple[Labels, float]]:
    for labels, value in samples:
        if value is not None:
            yield labels, value
