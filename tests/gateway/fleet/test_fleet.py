"""The fleet: workers come, are found, fail, drain and go; time moves what it alone moves."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import pytest
from tests.gateway.pure_fleet import AT_ONCE, UnusedTransport, ask, empty_fleet, join, router_of

from equipoise.config.gateway import HealthConfig
from equipoise.config.worker import WorkerSpec
from equipoise.errors import InvalidValueError, NotFoundError
from equipoise.gateway.fleet.fleet import Fleet, FleetLimits, fleet_limits
from equipoise.gateway.fleet.outliers import OutlierLimits
from equipoise.gateway.fleet.slow_start import SlowStartLimits
from equipoise.gateway.fleet.worker import Found, host_and_port, rank_place

if TYPE_CHECKING:
    from equipoise.gateway.fleet.worker import Worker


class Diary:
    """A listener that writes down what it is told."""

    def __init__(self, fleet: Fleet) -> None:
        self.entries: list[str] = []
        fleet.listeners.append(self)

    def added(self, worker: Worker) -> None:
        self.entries.append(f"added {worker.host}")

    def left(self, worker: Worker) -> None:
        self.entries.append(f"left {worker.host}")

    def removed(self, worker: Worker) -> None:
        self.entries.append(f"removed {worker.host}")


def is_closed(worker: Worker) -> bool:
    """Whether its transport was closed."""
    assert isinstance(worker.transport, UnusedTransport)
    return worker.transport.is_closed


@pytest.mark.parametrize(
    ("url", "address"),
    [("http://a:1", ("a", 1)), ("http://[::1]:9000", ("::1", 9000)), ("http://10.0.0.1:80", ("10.0.0.1", 80))],
)
def test_address_of_a_url(url: str, address: tuple[str, int]) -> None:
    assert host_and_port(url) == address


def test_a_worker_is_starting_until_it_was_found() -> None:
    fleet = empty_fleet()
    diary = Diary(fleet)
    worker = fleet.add(WorkerSpec("a:1"), 0.0)
    assert (worker.state, worker.models, fleet.is_eligible(worker, 0.0)) == ("starting", (), False)
    fleet.found(worker, Found("vllm", ("m", "adapter"), version="0.33"), 1.0)
    assert (worker.state, worker.kind, worker.models, worker.version) == ("ready", "vllm", ("m", "adapter"), "0.33")
    assert fleet.is_eligible(worker, 1.0)
    assert fleet.models() == ["m", "adapter"]
    assert diary.entries == ["added a"]


def test_the_same_worker_cannot_be_added_twice() -> None:
    fleet = empty_fleet()
    join(fleet, "a")
    with pytest.raises(InvalidValueError, match="http://a:1 is a worker already"):
        fleet.add(WorkerSpec("http://a:1/"), 0.0)


def test_an_unknown_worker_is_refused_with_the_known_ones() -> None:
    fleet = empty_fleet()
    join(fleet, "a")
    join(fleet, "b")
    assert fleet.get("http://b:1").host == "b"
    with pytest.raises(NotFoundError, match="no worker at 'http://c:1'; workers: http://a:1, http://b:1"):
        fleet.get("http://c:1")


def test_what_the_operator_fixed_outranks_what_the_worker_says() -> None:
    fleet = empty_fleet()
    worker = fleet.add(WorkerSpec("a:1", "prefill", bootstrap_port=9, models=("alias",)), 0.0)
    fleet.found(worker, Found("sglang", ("m",), role="decode", bootstrap_port=8998), 0.0)
    assert (worker.models, worker.role, worker.bootstrap_port) == (("alias",), "prefill", 9)


def test_a_drained_worker_goes_with_its_last_request() -> None:
    fleet = empty_fleet()
    router, diary = router_of(fleet), Diary(fleet)
    a, b = join(fleet, "a"), join(fleet, "b")
    routes = [router.route(ask(), "m", "mixed", (b,), 0.0) for _ in range(2)]
    fleet.drain(a, 0.0)
    assert a.state == "draining"
    assert router.route(ask(), "m", "mixed", (), 0.0).worker is b
    router.finished(routes[0], "ok", 1.0)
    assert a in fleet.workers
    router.finished(routes[1], "cancelled", 1.0)
    assert (a.state, fleet.workers, is_closed(a), is_closed(b)) == ("removed", [b], True, False)
    assert diary.entries[2:] == ["left a", "removed a"]


def test_a_drained_worker_without_requests_goes_at_once() -> None:
    fleet = empty_fleet()
    worker = join(fleet, "a")
    fleet.drain(worker, 0.0)
    assert (fleet.workers, is_closed(worker)) == ([], True)
    fleet.drain(worker, 0.0)
    fleet.remove(worker)


def test_a_drain_ends_after_its_time() -> None:
    fleet = empty_fleet()
    router, worker = router_of(fleet), join(fleet, "a")
    route = router.route(ask(), "m", "mixed", (), 0.0)
    fleet.drain(worker, 10.0, timeout_s=5.0)
    fleet.tick(14.9)
    assert worker.state == "draining"
    fleet.tick(15.0)
    assert (worker.state, is_closed(worker)) == ("removed", True)
    router.finished(route, "failed", 15.1)
    assert worker.num_inflight == 0


@pytest.mark.parametrize("cancel", [False, True])
def test_requests_outlive_the_removal_of_their_worker_unless_cancelled(cancel: bool) -> None:
    fleet = empty_fleet()
    router, worker = router_of(fleet), join(fleet, "a")
    route = router.route(ask(), "m", "mixed", (), 0.0)
    fleet.remove(worker, cancel=cancel)
    assert fleet.workers == []
    assert is_closed(worker) is cancel
    router.finished(route, "ok", 1.0)
    assert is_closed(worker)


def test_a_draining_worker_can_come_back_as_something_else() -> None:
    fleet = empty_fleet()
    router, worker = router_of(fleet), join(fleet, "a")
    route = router.route(ask(), "m", "mixed", (), 0.0)
    fleet.drain(worker, 0.0)
    assert fleet.add(WorkerSpec("a:1", "decode"), 1.0) is worker
    assert (worker.state, worker.role, worker.drain_until) == ("starting", "decode", inf)
    router.finished(route, "ok", 2.0)
    fleet.tick(10_000.0)
    assert fleet.workers == [worker]
    assert not is_closed(worker)


def test_close_ends_everything() -> None:
    fleet = empty_fleet()
    workers = [join(fleet, "a"), join(fleet, "b")]
    fleet.close()
    assert fleet.workers == []
    assert all(is_closed(worker) for worker in workers)


def test_an_unhealthy_worker_is_left_out_until_it_is_found_again() -> None:
    fleet = empty_fleet()
    diary, worker = Diary(fleet), join(fleet, "a")
    fleet.became_unhealthy(worker, "it hangs")
    assert (worker.state, worker.error, fleet.is_eligible(worker, 0.0)) == ("unhealthy", "it hangs", False)
    assert diary.entries == ["added a", "left a"]
    fleet.found(worker, Found("sglang", ("other",)), 1.0)
    assert (worker.state, worker.error, worker.models) == ("ready", None, ("other",))


def test_what_was_held_against_a_worker_is_forgotten_when_it_is_found_again() -> None:
    fleet = empty_fleet()
    worker = join(fleet, "a")
    for _ in range(10):
        worker.breaker.failed(worker.breaker.epoch, 0.0)
        worker.record.failed()
    assert not fleet.is_eligible(worker, 0.0)
    fleet.became_unhealthy(worker, "it was restarted")
    fleet.found(worker, Found("sglang", ("m",)), 1.0)
    assert fleet.is_eligible(worker, 1.0)
    assert worker.record.num_requests == 0


def test_a_draining_worker_that_is_found_or_fails_goes_on_draining() -> None:
    fleet = empty_fleet()
    router, worker = router_of(fleet), join(fleet, "a")
    router.route(ask(), "m", "mixed", (), 0.0)
    fleet.drain(worker, 0.0)
    fleet.became_unhealthy(worker, "it hangs")
    fleet.found(worker, Found("sglang", ("m",)), 1.0)
    assert worker.state == "draining"


def test_other_ranks_start_with_empty_accounts_and_charges_end_where_they_were_taken() -> None:
    fleet = empty_fleet()
    router, diary = router_of(fleet), Diary(fleet)
    worker = join(fleet, "a", num_ranks=2)
    route = router.route(ask(100, 10), "m", "mixed", (), 0.0)
    old = worker.load
    fleet.found(worker, Found("sglang", ("m",), (0, 1, 2), tuple(map(rank_place, range(3)))), 1.0)
    assert (len(worker.load.ranks), worker.load.load()) == (3, 0)
    assert diary.entries == ["added a", "left a"]
    assert old.load() == 110
    router.finished(route, "ok", 2.0)
    assert (old.load(), worker.load.load()) == (0, 0)


def test_finding_the_same_again_changes_nothing() -> None:
    fleet = empty_fleet()
    worker = join(fleet, "a", num_ranks=2)
    before = fleet.version
    fleet.found(worker, Found("sglang", ("m",), (0, 1), worker.places), 1.0)
    assert fleet.version == before


def test_policies_hear_that_a_changed_worker_left() -> None:
    fleet = empty_fleet()
    diary, worker = Diary(fleet), join(fleet, "a")
    fleet.change(worker, WorkerSpec("a:1", "decode"))
    assert (worker.state, worker.role) == ("starting", "decode")
    assert diary.entries == ["added a", "left a", "added a"]


def test_weights_grow_for_those_that_join_others_or_come_back() -> None:
    fleet = empty_fleet(FleetLimits(slow_start=SlowStartLimits(10.0, 0.1)))
    first, second = join(fleet, "a", now=-10.0), join(fleet, "b", now=0.0)
    assert (first.load.weight, second.load.weight) == (1.0, pytest.approx(0.1))
    for now in (2.0, 5.0, 9.9, 10.2):
        assert now >= fleet.next_change_at
        fleet.tick(now)
        assert second.load.weight == pytest.approx(min(1.0, 0.1 + 0.09 * now))
    assert fleet.next_change_at > 11.0
    fleet.became_unhealthy(first, "gone")
    fleet.found(first, Found("sglang", ("m",)), 20.0)
    assert first.load.weight == pytest.approx(0.1)


def test_a_fleet_that_starts_as_a_whole_has_full_weights() -> None:
    fleet = empty_fleet(FleetLimits(slow_start=SlowStartLimits(10.0, 0.1)))
    weights = [join(fleet, name, now=now).load.weight for name, now in (("a", 0.0), ("b", 0.1), ("c", 9.0))]
    assert weights == [1.0, 1.0, 1.0]
    assert join(fleet, "d", now=10.5).load.weight == pytest.approx(0.1)


def test_an_outlier_is_ejected_and_starts_slowly_when_it_comes_back() -> None:
    outliers = OutlierLimits(interval_s=10.0, min_requests=10, eject_s=15.0)
    fleet = empty_fleet(FleetLimits(outliers=outliers, slow_start=SlowStartLimits(10.0, 0.1)))
    workers = [join(fleet, name) for name in "abc"]
    fleet.tick(fleet.next_change_at)  # all have their full weight from second 10 on
    fleet.tick(10.0)
    for worker in workers:
        for _ in range(20):
            worker.record.succeeded(9.0 if worker.host == "b" else 0.1)
    fleet.tick(20.0)
    assert [fleet.is_eligible(worker, 20.0) for worker in workers] == [True, False, True]
    assert fleet.why_not(workers[1], 20.0) == "ejected as outlier"
    fleet.tick(30.0)
    fleet.tick(34.9)
    assert not fleet.is_eligible(workers[1], 34.9)
    assert fleet.next_change_at == 35.0
    fleet.tick(35.0)
    assert fleet.is_eligible(workers[1], 35.0)
    assert workers[1].load.weight == pytest.approx(0.1)


def test_workers_of_other_models_or_roles_are_no_peers() -> None:
    fleet = empty_fleet(FleetLimits(outliers=OutlierLimits(min_requests=1), slow_start=AT_ONCE.slow_start))
    workers = [join(fleet, "a"), join(fleet, "b"), join(fleet, "c", "big"), join(fleet, "d", role="prefill")]
    for worker in workers:
        for _ in range(20):
            worker.record.succeeded(0.1 if worker.host in "ab" else 30.0)
    fleet.tick(10.0)
    assert all(fleet.is_eligible(worker, 10.0) for worker in workers)


def test_tick_does_nothing_before_it_is_due() -> None:
    fleet = empty_fleet()
    join(fleet, "a")
    before = fleet.version
    assert fleet.next_change_at == 10.0  # the outliers' first judgement
    fleet.tick(9.9)
    assert fleet.version == before


def test_limits_come_from_the_settings() -> None:
    limits = fleet_limits(
        HealthConfig(
            health_check_interval_s=1,
            health_check_timeout_s=2,
            unhealthy_after=4,
            healthy_after=5,
            breaker_failures=6,
            breaker_window_s=7,
            breaker_failure_share=0.8,
            breaker_open_s=90,
            breaker_successes=10,
            outlier_interval_s=11,
            outlier_ttft_ratio=12,
            outlier_failure_excess=0.13,
            outlier_eject_s=14,
            max_ejected_share=0.15,
            slow_start_s=16,
            drain_timeout_s=17,
        )
    )
    health, breaker, outliers = limits.health, limits.breaker, limits.outliers
    assert (health.interval_s, health.timeout_s, health.max_failures, health.num_successes) == (1, 2, 4, 5)
    assert (breaker.max_failures, breaker.window_s, breaker.min_failure_share) == (6, 7, 0.8)
    assert (breaker.open_s, breaker.num_successes) == (90, 10)
    assert (outliers.interval_s, outliers.max_ttft_ratio, outliers.max_failure_excess) == (11, 12, 0.13)
    assert (outliers.eject_s, outliers.max_ejected_share) == (14, 0.15)
    assert (limits.slow_start.duration_s, limits.drain_s) == (16, 17)
