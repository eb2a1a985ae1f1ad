"""The fleet: which workers there are, and which of them may take a request.

Pure but for the transports that it opens and closes; time is passed in. `Fleet.tick` moves what time alone moves
(breakers that half open, ejections that end, weights that grow, drains that run out); it is due at `next_change_at`,
and whoever routes calls it then, so that no request ever sees an older state.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Protocol

from equipoise.errors import InvalidValueError, NotFoundError
from equipoise.gateway.fleet.breaker import Breaker, BreakerLimits
from equipoise.gateway.fleet.health import Health, HealthLimits
from equipoise.gateway.fleet.outliers import Judge, OutlierLimits, Record
from equipoise.gateway.fleet.slow_start import SlowStart, SlowStartLimits
from equipoise.gateway.fleet.worker import Found, Worker, host_and_port

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from equipoise.config.gateway import HealthConfig
    from equipoise.config.worker import WorkerRole, WorkerSpec
    from equipoise.gateway.transport import Transport

    OpenTransport = Callable[[str, int], Transport]
    """The way to the worker at a host and port."""

log = logging.getLogger(__name__)

WEIGHT_STEP_S = 0.2
"""Seconds between two looks at the weights of workers that start slowly."""


MAX_LISTED = 32


def listed(names: Sequence[str]) -> str:
    """`names` as errors tell them: the first MAX_LISTED, and how many more there are."""
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return (", ".join(names[:MAX_LISTED]) or "none") + more


@dataclass(frozen=True, slots=True)
class FleetLimits:
    """What decides which workers take requests. drain_s: seconds that a drained worker has to finish its requests."""

    breaker: BreakerLimits = field(default_factory=BreakerLimits)
    health: HealthLimits = field(default_factory=HealthLimits)
    outliers: OutlierLimits = field(default_factory=OutlierLimits)
    slow_start: SlowStartLimits = field(default_factory=SlowStartLimits)
    drain_s: float = 600.0


def fleet_limits(config: HealthConfig) -> FleetLimits:
    """The limits that the settings ask for."""
    return FleetLimits(
        breaker=BreakerLimits(
            max_failures=config.breaker_failures,
            window_s=config.breaker_window_s,
            min_failure_share=config.breaker_failure_share,
            open_s=config.breaker_open_s,
            num_successes=config.breaker_successes,
        ),
        health=HealthLimits(
            interval_s=config.health_check_interval_s,
            timeout_s=config.health_check_timeout_s,
            max_failures=config.unhealthy_after,
            num_successes=config.healthy_after,
        ),
        outliers=OutlierLimits(
            interval_s=config.outlier_interval_s,
            max_failure_excess=config.outlier_failure_excess,
            max_ttft_ratio=config.outlier_ttft_ratio,
            eject_s=config.outlier_eject_s,
            max_ejected_share=config.max_ejected_share,
        ),
        slow_start=SlowStartLimits(config.slow_start_s),
        drain_s=config.drain_timeout_s,
    )


class FleetListener(Protocol):
    """Whoever must know that workers come and go."""

    def added(self, worker: Worker) -> None:
        """`worker` is new, or its operator changed it: nothing is known of it yet."""

    def left(self, worker: Worker) -> None:
        """`worker` takes no requests any more, or lost what it had cached."""

    def removed(self, worker: Worker) -> None:
        """`worker` is gone."""


class Fleet:
    """The workers, in the order in which they were added.

    `version` grows whenever another set of workers may take requests: what was derived from the fleet is derived anew
    then."""

    def __init__(self, open_transport: OpenTransport, limits: FleetLimits | None = None) -> None:
        self.limits = limits or FleetLimits()
        self.workers: list[Worker] = []
        self.listeners: list[FleetListener] = []
        self.version = 0
        self.next_change_at = inf
        """When `tick` is due."""
        self._open_transport = open_transport
        self._by_url: dict[str, Worker] = {}
        self._judge = Judge(self.limits.outliers)
        self._judge_at = inf
        self._ticked_at = -inf

    # Coming and going

    def add(self, spec: WorkerSpec, now: float) -> Worker:
        """Take a worker in; it is `starting` until it was asked what it serves. One that is draining comes back.

        Raises InvalidValueError when it is in the fleet already."""
        worker = self._by_url.get(spec.url)
        if worker is not None:
            if worker.state != "draining":
                raise InvalidValueError(f"url: {spec.url} is a worker already", "url")
            self.change(worker, spec)
            return worker
        limits = self.limits
        worker = Worker(
            spec,
            self._open_transport(*host_and_port(spec.url)),
            Breaker(limits.breaker),
            Health(limits.health),
            SlowStart(limits.slow_start),
            Record(),
            now,
        )
        self.workers.append(worker)
        self._by_url[spec.url] = worker
        if self._judge_at == inf and limits.outliers.interval_s:
            self._judge_at = now + limits.outliers.interval_s
        self.changed(self._judge_at)
        log.info("worker %s: added as %s", worker.url, worker.role)
        for listener in self.listeners:
            listener.added(worker)
        return worker

    def change(self, worker: Worker, spec: WorkerSpec) -> None:
        """`worker` is now as `spec` says: it takes no new requests until it was asked again; running ones go on."""
        self._tell_left(worker)
        worker.restart(spec)
        self.changed()
        log.info("worker %s: changed, now %s", worker.url, worker.role)
        for listener in self.listeners:
            listener.added(worker)

    def get(self, url: str) -> Worker:
        """The worker at `url`. Raises NotFoundError, which names those that there are."""
        worker = self._by_url.get(url)
        if worker is None:
            raise NotFoundError(f"no worker at {url!r}; workers: {listed(list(self._by_url))}")
        return worker

    def drain(self, worker: Worker, now: float, timeout_s: float | None = None) -> None:
        """Give `worker` no more requests; it is removed when its last one ended, or after `timeout_s` (drain_s by
        default) seconds, those that still run then being ended."""
        if worker.state in ("draining", "removed"):
            return
        worker.state = "draining"
        worker.drain_until = now + (self.limits.drain_s if timeout_s is None else timeout_s)
        log.info("worker %s: drains %d requests", worker.url, worker.num_inflight)
        self._tell_left(worker)
        self.changed(worker.drain_until)
        self.ended(worker)

    def remove(self, worker: Worker, *, cancel: bool = False) -> None:
        """Take `worker` out at once. Requests that run there go on, unless `cancel`."""
        if worker.state == "removed":
            return
        if worker.state != "draining":
            self._tell_left(worker)
        worker.state = "removed"
        self.workers.remove(worker)
        del self._by_url[worker.url]
        self.changed()
        log.info("worker %s: removed, %d requests %s", worker.url, worker.num_inflight, "ended" if cancel else "go on")
        for listener in self.listeners:
            listener.removed(worker)
        if cancel or not worker.num_inflight:
            worker.transport.close()

    def ended(self, worker: Worker) -> None:
        """A request at `worker` ended: the last one of a draining worker ends the drain."""
        if worker.num_inflight:
            return
        if worker.state == "draining":
            self.remove(worker)
        elif worker.state == "removed":
            worker.transport.close()

    def close(self) -> None:
        """Remove all workers and end what runs there."""
        for worker in list(self.workers):
            self.remove(worker, cancel=True)

    # What is known of a worker

    def found(self, worker: Worker, what: Found, now: float) -> None:
        """`worker` said what it is; one that was starting or unhealthy is ready from now on, with a cold cache."""
        was_known, was_ready = worker.is_known, worker.state == "ready"
        old = (worker.models, worker.kind, worker.places)
        if was_ready and what.rank_labels != worker.rank_labels:
            self._tell_left(worker)
        has_new_ranks = worker.learn(what)
        if was_ready and not has_new_ranks and old == (worker.models, worker.kind, worker.places):
            return
        next_change_at = inf
        if worker.state in ("starting", "unhealthy"):
            worker.record.forget()
            worker.breaker.reset()
            if was_known or self._is_settled(now):
                worker.slow_start.begin(now)
            worker.state, worker.ready_at = "ready", now
            next_change_at = self._weigh(worker, now)
        self.changed(next_change_at)
        num_ranks = len(worker.load.ranks)
        log.info(
            "worker %s: %s: %s %s, %d rank%s, serves %s",
            worker.url, worker.state, worker.kind, worker.version, num_ranks, "s" * (num_ranks != 1),
            ", ".join(worker.models) or "any model",
        )  # fmt: skip

    def _is_settled(self, now: float) -> bool:
        """Whether a worker has been ready for as long as a slow start takes. In a fleet that starts as a whole, as when
        the gateway itself starts, all begin with full weights, or the first to answer would get nearly everything."""
        duration_s = self.limits.slow_start.duration_s
        return any(peer.state == "ready" and now - peer.ready_at >= duration_s for peer in self.workers)

    def became_unhealthy(self, worker: Worker, why: str) -> None:
        """`worker` failed its health checks: it gets no requests until it was found again."""
        worker.error = why
        if worker.state != "ready":
            return
        worker.state = "unhealthy"
        log.warning("worker %s: unhealthy: %s", worker.url, why)
        self._tell_left(worker)
        self.changed()

    # Which workers take requests

    def is_eligible(self, worker: Worker, now: float) -> bool:
        """Whether `worker` may take one more request."""
        is_up = worker.state == "ready" and worker.breaker.allows and worker.record.ejected_until <= now
        return is_up and worker.fits_role

    def why_not(self, worker: Worker, now: float) -> str | None:
        """What keeps `worker` from taking requests, in a few words; None when nothing does."""
        if worker.state != "ready":
            return worker.state
        if not worker.fits_role:
            return f"{worker.kind}, which cannot be paired"
        if not worker.breaker.allows:
            return "breaker open" if worker.breaker.state == "open" else "breaker half open"
        return "ejected as outlier" if worker.record.ejected_until > now else None

    def with_role(self, role: WorkerRole) -> list[Worker]:
        """The workers of a role, in order."""
        return [worker for worker in self.workers if worker.role == role]

    def models(self) -> list[str]:
        """The models that workers are known to serve, each once, in the order of the workers."""
        return list(dict.fromkeys(model for worker in self.workers for model in worker.models))

    # Time

    def changed(self, next_change_at: float = inf) -> None:
        """Another set of workers may take requests now; `tick` is due at `next_change_at` at the latest."""
        self.version += 1
        self.next_change_at = min(self.next_change_at, next_change_at)

    def tick(self, now: float) -> None:
        """Move what time alone moves. Does nothing before `next_change_at`."""
        if now < self.next_change_at:
            return
        if now >= self._judge_at:
            self._judge_at = now + self.limits.outliers.interval_s
            self._judge_all(now)
        next_at = self._judge_at
        for worker in list(self.workers):
            worker.breaker.tick(now)
            if now >= worker.drain_until:
                log.warning("worker %s: its time to drain is over", worker.url)
                self.remove(worker, cancel=True)
                continue
            next_at = min(next_at, worker.drain_until, worker.breaker.next_change_at, self._weigh(worker, now))
            if worker.record.ejected_until > now:
                next_at = min(next_at, worker.record.ejected_until)
            elif worker.record.ejected_until > self._ticked_at:
                worker.slow_start.begin(now)
                next_at = min(next_at, self._weigh(worker, now))
        self._ticked_at = now
        self.next_change_at = next_at
        self.version += 1

    def _weigh(self, worker: Worker, now: float) -> float:
        """Give `worker` its weight of the moment; answers when to look again."""
        worker.load.weight = worker.slow_start.weight(now)
        return inf if worker.slow_start.is_over(now) else now + WEIGHT_STEP_S

    def _judge_all(self, now: float) -> None:
        """Eject outliers, among the workers of each role that serve the same models."""
        groups: dict[tuple[str, tuple[str, ...]], list[Worker]] = {}
        for worker in self.workers:
            if worker.state == "ready":
                groups.setdefault((worker.role, worker.models), []).append(worker)
        for group in groups.values():
            for place in self._judge.judge([worker.record for worker in group], now):
                record = group[place].record
                ejected_s = record.ejected_until - now
                log.warning("worker %s: ejected as outlier for %.0f s", group[place].url, ejected_s)

    def _tell_left(self, worker: Worker) -> None:
        for listener in self.listeners:
            listener.left(worker)
