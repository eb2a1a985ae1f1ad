"""The router: candidates, tries, ranks, charges, breakers, errors; and its invariants on random fleets."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.gateway.pure_fleet import AT_ONCE, ask, empty_fleet, join, policies, router_of

from equipoise.config.worker import WorkerSpec
from equipoise.errors import InvalidValueError, NotFoundError, NoWorkerError
from equipoise.gateway.fleet.breaker import BreakerLimits
from equipoise.gateway.fleet.fleet import FleetLimits
from equipoise.gateway.fleet.router import MAX_GROUPS, UNKNOWN_GRACE_S, Policies, Router
from equipoise.gateway.fleet.worker import Found, rank_place
from equipoise.route.ranks import EngineChoice, RoundRobin
from equipoise.route.workers import LeastTokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from equipoise.gateway.fleet.router import Outcome, Route
    from equipoise.gateway.fleet.worker import Worker
    from equipoise.route.account import WorkerLoad
    from equipoise.route.policy import Ask

QUICK_BREAKER = FleetLimits(breaker=BreakerLimits(max_failures=2, open_s=5.0, max_probes=1, num_successes=1),
                            slow_start=AT_ONCE.slow_start)  # fmt: skip


def test_a_request_goes_to_a_worker_of_its_model_and_role() -> None:
    fleet = empty_fleet()
    router = router_of(fleet)
    for name, model, role in (("a", "m", "prefill"), ("b", "m", "decode"), ("c", "n", "decode")):
        join(fleet, name, model, role=role)  # type: ignore[arg-type]
    assert router.route(ask(), "m", "prefill", (), 0.0).worker.host == "a"
    assert router.route(ask(), "m", "decode", (), 0.0).worker.host == "b"
    assert router.route(ask(), "n", "decode", (), 0.0).worker.host == "c"


def test_adapters_are_models_too() -> None:
    fleet = empty_fleet()
    router = router_of(fleet)
    join(fleet, "a", "base", "poet")
    join(fleet, "b", "base")
    assert {router.route(ask(), "poet", "mixed", (), 0.0).worker.host for _ in range(4)} == {"a"}
    assert {router.route(ask(), "base", "mixed", (), 0.0).worker.host for _ in range(9)} == {"a", "b"}


def test_a_request_without_a_model_goes_anywhere_where_that_is_clear() -> None:
    fleet = empty_fleet()
    router = router_of(fleet)
    join(fleet, "a", "m", "adapter")
    join(fleet, "b", "m")
    assert {router.route(ask(), None, "mixed", (), 0.0).worker.host for _ in range(4)} == {"a", "b"}
    join(fleet, "c", "n")
    with pytest.raises(InvalidValueError, match="several are served: m, n"):
        router.route(ask(), None, "mixed", (), 0.0)


def test_a_worker_that_names_no_models_serves_any() -> None:
    fleet = empty_fleet()
    router = router_of(fleet)
    worker = fleet.add(WorkerSpec("a:1"), 0.0)
    fleet.found(worker, Found("openai"), 0.0)
    assert router.route(ask(), "whatever", "mixed", (), 0.0).worker is worker


def test_names_that_clients_make_up_share_one_policy_and_few_groups() -> None:
    fleet = empty_fleet()
    router = router_of(fleet)
    made = []
    before = router.policies("mixed")

    def make() -> LeastTokens:
        made.append(LeastTokens())
        return made[-1]

    router.set_policies("mixed", Policies("counted", make, before.rank_name, before.rank_policy))
    fleet.found(fleet.add(WorkerSpec("a:1"), 0.0), Found("openai"), 0.0)
    tracemalloc.start()
    try:
        peaks = []
        for part in range(2):
            tracemalloc.reset_peak()
            for number in range(part * 2 * MAX_GROUPS, (part + 1) * 2 * MAX_GROUPS):
                router.finished(router.route(ask(), f"made up {number}", "mixed", (), 0.0), "ok", 0.0)
            peaks.append(tracemalloc.get_traced_memory()[1])
        assert peaks[1] < 1.2 * peaks[0]
    finally:
        tracemalloc.stop()
    assert len(made) <= 2


def test_an_empty_fleet_refuses_for_the_moment_only() -> None:
    fleet = empty_fleet()
    router = router_of(fleet)
    with pytest.raises(NoWorkerError, match="there is none"):
        router.route(ask(), "m", "mixed", (), 0.0)
    fleet.add(WorkerSpec("a:1"), 0.0)
    with pytest.raises(NoWorkerError, match="1 starting"):
        router.route(ask(), "m", "mixed", (), 2 * UNKNOWN_GRACE_S)


def test_of_many_models_an_error_names_some() -> None:
    fleet = empty_fleet()
    router = router_of(fleet)
    join(fleet, "a", *(f"m{number}" for number in range(1000)))
    with pytest.raises(NotFoundError, match=r"models: m0, m1, .* and 968 more$") as caught:
        router.route(ask(), "unknown", "mixed", (), 0.0)
    assert len(str(caught.value)) < 500


class Broken:
    """A worker policy of an operator's own that fails where it is told to."""

    wants_keys = False

    def __init__(self, fails_at: str) -> None:
        self.fails_at = fails_at

    def choose(self, ask: Ask, workers: Sequence[WorkerLoad]) -> WorkerLoad:
        self._fail("choose")
        return workers[0]

    def routed(self, ask: Ask, worker: WorkerLoad) -> None:
        self._fail("routed")

    def left(self, worker: WorkerLoad) -> None:
        self._fail("left")

    def _fail(self, where: str) -> None:
        if where == self.fails_at:
            raise KeyError(where)


class Beyond:
    """A rank policy that chooses a rank that there is not."""

    def choose(self, ask: Ask, worker: WorkerLoad) -> int | None:
        return 7


@pytest.mark.parametrize("fails_at", ["choose", "routed", "rank"])
def test_a_policy_that_fails_takes_nothing(fails_at: str) -> None:
    fleet = empty_fleet(QUICK_BREAKER)
    router = router_of(fleet)
    rank_policy = Beyond() if fails_at == "rank" else EngineChoice()
    router.set_policies("mixed", Policies("own", lambda: Broken(fails_at), "own", rank_policy))
    worker = join(fleet, "a", "m", num_ranks=2)
    for now in (0.0, 0.0):
        worker.breaker.failed(worker.breaker.epoch, now)
    worker.breaker.tick(6.0)
    fleet.changed()
    with pytest.raises((KeyError, IndexError)):
        router.route(ask(), "m", "mixed", (), 6.0)
    assert (worker.num_inflight, worker.load.num_active, worker.breaker.num_probes) == (0, 0, 0)


def test_a_worker_leaves_though_a_policy_fails_to_forget_it() -> None:
    fleet = empty_fleet()
    router = router_of(fleet)
    router.set_policies("mixed", Policies("own", lambda: Broken("left"), "own", EngineChoice()))
    join(fleet, "a", "m")
    route = router.route(ask(), "m", "mixed", (), 0.0)
    fleet.drain(route.worker, 0.0)
    with pytest.raises(NoWorkerError):
        router.route(ask(), "m", "mixed", (), 0.0)
    router.finished(route, "ok", 1.0)
    assert fleet.workers == []


def test_an_unknown_model_is_not_found_and_the_known_are_named() -> None:
    fleet = empty_fleet()
    router = router_of(fleet)
    join(fleet, "a", "m", "adapter")
    join(fleet, "b", "n")
    with pytest.raises(NotFoundError, match="no model 'x' here; models: m, adapter, n") as caught:
        router.route(ask(), "x", "mixed", (), 0.0)
    assert caught.value.field == "model"


def test_a_model_of_another_role_is_known_but_has_no_worker() -> None:
    fleet = empty_fleet()
    router = router_of(fleet)
    join(fleet, "a", "m", role="prefill")
    with pytest.raises(NoWorkerError, match="no decode worker takes requests for model 'm' now: there is none"):
        router.route(ask(), "m", "decode", (), 0.0)


def test_while_a_worker_is_not_known_yet_it_may_serve_any_model() -> None:
    fleet = empty_fleet()
    router = router_of(fleet)
    join(fleet, "a", "m")
    fleet.add(WorkerSpec("b:1"), 0.0)
    with pytest.raises(NoWorkerError, match="no worker takes requests for model 'x' now: 1 starting"):
        router.route(ask(), "x", "mixed", (), 10.0)
    with pytest.raises(NotFoundError):
        router.route(ask(), "x", "mixed", (), UNKNOWN_GRACE_S)


def test_without_a_worker_the_error_says_why_and_when_to_come_again() -> None:
    fleet = empty_fleet(QUICK_BREAKER)
    router = router_of(fleet)
    with pytest.raises(NoWorkerError, match="no decode worker takes requests now: there is none"):
        router.route(ask(), None, "decode", (), 0.0)
    a, b, c = join(fleet, "a"), join(fleet, "b"), join(fleet, "c")
    held = router.route(ask(), "m", "mixed", (b, c), 0.0)
    fleet.drain(a, 0.0)
    fleet.became_unhealthy(b, "it hangs")
    for _ in range(2):
        router.finished(router.route(ask(), "m", "mixed", (), 0.0), "failed", 0.0)
    with pytest.raises(NoWorkerError, match="1 draining, 1 unhealthy, 1 breaker open") as caught:
        router.route(ask(), "m", "mixed", (), 0.0)
    assert (caught.value.status, caught.value.retry_after_s) == (503, 1)
    router.finished(held, "ok", 0.0)
    fleet.remove(b)
    with pytest.raises(NoWorkerError) as caught:
        router.route(ask(), "m", "mixed", (), 0.5)
    assert caught.value.retry_after_s == 5, "the only worker's breaker half opens then"
    assert router.route(ask(), "m", "mixed", (), 5.0).worker is c


def test_tried_workers_are_avoided_while_there_are_others() -> None:
    fleet = empty_fleet()
    router = router_of(fleet)
    a, b = join(fleet, "a"), join(fleet, "b")
    assert all(router.route(ask(), "m", "mixed", (a,), 0.0).worker is b for _ in range(5))
    assert router.route(ask(), "m", "mixed", (a, b), 0.0).worker in (a, b)


def test_a_rank_is_chosen_named_and_charged() -> None:
    fleet = empty_fleet()
    router = router_of(fleet)
    worker = join(fleet, "a", num_ranks=3)
    for _ in range(3):
        route = router.route(ask(100, 20), "m", "mixed", (), 0.0)
        assert route.rank is not None
        assert route.charge.account is worker.load.ranks[route.rank]
    assert [account.load() for account in worker.load.ranks] == [120, 120, 120]
    headers, fields = [(b"Accept", b"*/*")], list[bytes]()
    worker.place_rank(2, headers, fields)
    assert headers == [(b"Accept", b"*/*"), (b"X-Data-Parallel-Rank", b"2")]
    assert fields == []


def test_a_rank_travels_in_the_body_where_the_worker_reads_it_there() -> None:
    assert rank_place(7, "routed_dp_rank").field == b'"routed_dp_rank":7'


def test_a_rank_that_the_request_names_is_charged_as_the_worker_counts() -> None:
    fleet = empty_fleet()
    router = router_of(fleet)
    worker = join(fleet, "a", num_ranks=2, first_number=4)
    for _ in range(3):
        route = router.route(ask(), "m", "mixed", (), 0.0, named_rank=5)
        assert route.charge.account is worker.load.ranks[1]
    assert router.route(ask(), "m", "mixed", (), 0.0, named_rank=9).rank is None


def test_a_worker_with_one_rank_or_none_that_can_be_named_is_never_pinned() -> None:
    fleet = empty_fleet()
    router = router_of(fleet)
    join(fleet, "a")
    worker = fleet.add(WorkerSpec("b:1"), 0.0)
    fleet.found(worker, Found("vllm", ("n",), (0, 2)), 0.0)
    assert router.route(ask(), "m", "mixed", (), 0.0, named_rank=0).rank is None
    for _ in range(4):
        assert router.route(ask(10), "n", "mixed", (), 0.0).rank is None
    assert [account.load() for account in worker.load.ranks] == [20, 20]


def test_everything_is_given_back_once() -> None:
    fleet = empty_fleet()
    router = router_of(fleet)
    worker = join(fleet, "a", num_ranks=2)
    route = router.route(ask(), "m", "mixed", (), 0.0)
    assert (worker.num_inflight, worker.load.num_active) == (1, 1)
    for _ in range(3):
        router.finished(route, "ok", 1.0, num_output=5, ttft_s=0.25)
    assert (worker.num_inflight, worker.load.num_active, worker.load.load()) == (0, 0, 0)
    assert (worker.record.num_ok, worker.record.mean_ttft_s) == (1, 0.25)


@pytest.mark.parametrize(
    ("outcome", "opens"), [("ok", False), ("refused", False), ("cancelled", False), ("failed", True)]
)
def test_only_failures_open_the_breaker(outcome: Outcome, opens: bool) -> None:
    fleet = empty_fleet(QUICK_BREAKER)
    router = router_of(fleet)
    worker = join(fleet, "a")
    for _ in range(5):
        if worker.breaker.allows:
            router.finished(router.route(ask(), "m", "mixed", (), 0.0), outcome, 0.0)
    assert (worker.breaker.state == "open") is opens


def test_a_half_open_breaker_lets_its_probes_through_and_no_more() -> None:
    fleet = empty_fleet(QUICK_BREAKER)
    router = router_of(fleet)
    a, b = join(fleet, "a"), join(fleet, "b")
    for _ in range(2):
        router.finished(router.route(ask(), "m", "mixed", (b,), 0.0), "failed", 0.0)
    assert all(router.route(ask(), "m", "mixed", (), 4.9).worker is b for _ in range(4))
    probe = router.route(ask(), "m", "mixed", (b,), 5.0)
    assert probe.worker is a
    assert all(router.route(ask(), "m", "mixed", (), 5.0).worker is b for _ in range(4))
    router.finished(probe, "ok", 6.0)
    assert a.breaker.state == "closed"
    assert router.route(ask(), "m", "mixed", (), 6.0).worker is a, "it has the fewest tokens"


def test_policies_are_exchanged_at_run_time() -> None:
    fleet = empty_fleet()
    router = router_of(fleet)
    worker = join(fleet, "a", num_ranks=2)
    before = router.route(ask(), "m", "mixed", (), 0.0)
    router.set_policies("mixed", Policies("least_tokens", LeastTokens, "none", EngineChoice()))
    assert router.policies("mixed").rank_name == "none"
    assert router.policies("decode").rank_name == "minimum_tokens"
    after = router.route(ask(), "m", "mixed", (), 0.0)
    assert (before.rank, after.rank) == (0, None)
    for route in (before, after):
        router.finished(route, "ok", 1.0)
    assert worker.load.load() == 0


class Remembering(LeastTokens):
    """A policy that wants keys and remembers whom it was told of."""

    wants_keys = True

    def __init__(self, told: list[tuple[str, str]]) -> None:
        super().__init__()
        self._told = told

    def choose(self, ask: Ask, workers: Sequence[WorkerLoad]) -> WorkerLoad:
        return workers[0]

    def routed(self, ask: Ask, worker: WorkerLoad) -> None:
        self._told.append(("routed", worker.name))

    def left(self, worker: WorkerLoad) -> None:
        self._told.append(("left", worker.name))


def test_each_model_has_a_policy_of_its_own_that_hears_who_leaves() -> None:
    fleet = empty_fleet()
    made: list[list[tuple[str, str]]] = []

    def make() -> Remembering:
        made.append([])
        return Remembering(made[-1])

    router = Router(
        fleet,
        {"mixed": Policies("own", make, "none", EngineChoice()), "prefill": policies(), "decode": policies()},
    )
    assert router.wants_keys == {"mixed": True, "prefill": False, "decode": False}
    made.clear()
    a, b = join(fleet, "a", "m"), join(fleet, "b", "n")
    for model in ("m", "n", "m"):
        router.finished(router.route(ask(), model, "mixed", (), 0.0), "ok", 0.0)
    assert made == [[("routed", a.url)] * 2, [("routed", b.url)]]
    router.set_policies("prefill", policies())
    router.finished(router.route(ask(), "m", "mixed", (), 0.0), "ok", 0.0)
    assert len(made) == 2, "what the other roles had learnt is kept"
    fleet.drain(a, 0.0)
    assert made[0][3:] == [("left", a.url)]


def test_requests_spread_over_workers_and_ranks_between_two_reports() -> None:
    fleet = empty_fleet()
    router = router_of(fleet)
    for name in "abcd":
        join(fleet, name, num_ranks=8)
    counts = Counter(
        (route.worker.host, route.rank)
        for route in (router.route(ask(100, 50), "m", "mixed", (), 0.0) for _ in range(320))
    )
    assert set(counts.values()) == {10}
    assert len(counts) == 32


class Life(RuleBasedStateMachine):
    """Random workers and requests. At any time: counts add up, no request goes where none may go."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = empty_fleet(QUICK_BREAKER)
        self.router = router_of(self.fleet)
        self.router.set_policies("mixed", Policies("least_tokens", LeastTokens, "round_robin", RoundRobin()))
        self.now = 0.0
        self.routes: list[Route] = []
        self.workers: list[Worker] = []  # all that ever were

    @rule(name=st.sampled_from("abcd"), num_ranks=st.integers(1, 3))
    def add(self, name: str, num_ranks: int) -> None:
        try:
            worker = join(self.fleet, name, num_ranks=num_ranks, now=self.now)
        except InvalidValueError:
            return
        if worker not in self.workers:
            self.workers.append(worker)

    @precondition(lambda self: self.fleet.workers)
    @rule(data=st.data(), how=st.sampled_from(["drain", "remove", "unhealthy", "find", "grow"]))
    def disturb(self, data: st.DataObject, how: str) -> None:
        worker = data.draw(st.sampled_from(self.fleet.workers))
        if how == "drain":
            self.fleet.drain(worker, self.now, timeout_s=3.0)
        elif how == "remove":
            self.fleet.remove(worker)
        elif how == "unhealthy":
            self.fleet.became_unhealthy(worker, "it hangs")
        else:
            num_ranks = len(worker.load.ranks) + (how == "grow")
            places = tuple(map(rank_place, range(num_ranks))) if num_ranks > 1 else ()
            self.fleet.found(worker, Found("sglang", ("m",), tuple(range(num_ranks)), places), self.now)

    @rule(num_tried=st.integers(0, 2))
    def request(self, num_tried: int) -> None:
        tried = self.fleet.workers[:num_tried]
        try:
            route = self.router.route(ask(10, 5), "m", "mixed", tried, self.now)
        except NoWorkerError:
            assert not any(self.fleet.is_eligible(worker, self.now) for worker in self.fleet.workers)
            return
        except NotFoundError:
            assert not self.fleet.workers
            return
        worker = route.worker
        assert worker in self.fleet.workers
        assert worker.state == "ready"
        assert worker.breaker.state != "open"
        others = [each for each in self.fleet.workers if self.fleet.is_eligible(each, self.now) and each not in tried]
        assert worker not in tried or not others
        self.routes.append(route)

    @precondition(lambda self: self.routes)
    @rule(data=st.data(), outcome=st.sampled_from(["ok", "refused", "failed", "cancelled"]))
    def finish(self, data: st.DataObject, outcome: Outcome) -> None:
        route = self.routes.pop(data.draw(st.integers(0, len(self.routes) - 1)))
        self.router.finished(route, outcome, self.now, 5, 0.1)

    @rule(seconds=st.floats(0.0, 8.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.fleet.tick(self.now)

    @invariant()
    def counts_add_up(self) -> None:
        for worker in self.workers:
            assert worker.num_inflight == sum(route.worker is worker for route in self.routes)
            assert worker.breaker.num_probes <= 1
            assert worker.state != "draining" or worker.num_inflight
            assert (worker.state == "removed") == (worker not in self.fleet.workers)

    def teardown(self) -> None:
        for route in self.routes:
            self.router.finished(route, "ok", self.now)
        for worker in self.workers:
            assert (worker.num_inflight, worker.load.num_active, worker.load.load()) == (0, 0, 0)


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
