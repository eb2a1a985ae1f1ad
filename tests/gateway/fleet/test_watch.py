"""What runs in the background, against servers on sockets that come, go, hang and change."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from tests.gateway.pure_fleet import ask, router_of
from tests.gateway.scripted import Reply, Script, Server, in_loop, models, pool_to, serving, until
from tests.gateway.shortage import no_descriptors

from equipoise.config.worker import WorkerSpec
from equipoise.gateway.fleet.fleet import Fleet, FleetLimits
from equipoise.gateway.fleet.health import HealthLimits
from equipoise.gateway.fleet.slow_start import SlowStartLimits
from equipoise.gateway.fleet.tend import TendLimits
from equipoise.gateway.fleet.watch import Watch
from equipoise.gateway.fleet.workers_file import WorkersFile
from equipoise.gateway.http.descriptors import Descriptors
from equipoise.gateway.http.pool import Pool, PoolLimits
from equipoise.gateway.relay.sweep import Sweep

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import pytest

    from equipoise.gateway.fleet.worker import Worker

QUICK = TendLimits(load_interval_s=0.02, load_stale_s=0.5, timeout_s=5.0, refresh_s=0.1)
NEVER = Reply(delay_s=3600.0)


def a_fleet(num_successes: int = 2, timeout_s: float = 5.0) -> Fleet:
    """A fleet whose health checks come quickly."""
    health = HealthLimits(interval_s=0.02, timeout_s=timeout_s, max_failures=3, num_successes=num_successes)
    return Fleet(pool_to, FleetLimits(health=health, slow_start=SlowStartLimits(0.0)))


@contextlib.asynccontextmanager
async def watching(fleet: Fleet, limits: TendLimits = QUICK, file: WorkersFile | None = None) -> AsyncIterator[Watch]:
    """Watch `fleet` while the context is open; nothing runs on afterwards."""
    before = asyncio.all_tasks()
    watch = Watch(fleet, limits, file)
    watch.start()
    try:
        yield watch
    finally:
        async with asyncio.timeout(10.0):
            await watch.stop()
        fleet.close()
        names = [task.get_name() for task in asyncio.all_tasks() - before]
        assert not [name for name in names if name.startswith(("health", "load", "fleet", "workers"))], names


def add(fleet: Fleet, server: Server, **more: object) -> Worker:
    return fleet.add(WorkerSpec(server.url, **more), asyncio.get_running_loop().time())  # type: ignore[arg-type]


def report(*tokens: int, first: int = 0) -> Reply:
    """/v1/loads of ranks with so many tokens."""
    ranks = [
        {"dp_rank": number, "num_running_reqs": 1, "num_waiting_reqs": 0, "num_total_tokens": each}
        for number, each in enumerate(tokens, first)
    ]
    return Reply({"loads": ranks})


def sglang(*tokens: int, model: str = "m") -> Script:
    """An SGLang server with a rank for each of `tokens`."""
    return {
        "/health": Reply(),
        "/v1/models": models(model),
        "/server_info": Reply({"dp_size": len(tokens), "disaggregation_mode": "null"}),
        "/v1/loads": report(*tokens),
    }


def messages(caplog: pytest.LogCaptureFixture, part: str, level: int = logging.INFO) -> list[str]:
    return [each.getMessage() for each in caplog.records if part in each.getMessage() and each.levelno >= level]


@in_loop
async def test_workers_are_found_and_their_load_is_known() -> None:
    async with serving(sglang(100, 5)) as one, serving({"/v1/models": models("n", owner="acme")}) as other:
        fleet = a_fleet()
        workers = [add(fleet, one), add(fleet, other)]
        async with watching(fleet):
            await until(lambda: all(worker.state == "ready" for worker in workers))
            await until(lambda: workers[0].load.load() == 105)
            assert [(worker.kind, worker.models) for worker in workers] == [("sglang", ("m",)), ("openai", ("n",))]
            assert (workers[0].feed, workers[0].load.feed_ok, workers[0].feed_error) == ("/v1/loads", True, None)
            assert (workers[1].feed, workers[1].load.feed_ok, workers[1].feed_error) == (None, False, None)
            assert router_of(fleet).route(ask(), "m", "mixed", (), 0.0).rank == 1


@in_loop
async def test_a_gateway_without_descriptors_takes_no_worker_for_unhealthy() -> None:
    descriptors = Descriptors()

    def pool(host: str, port: int) -> Pool:
        return Pool(host, port, PoolLimits(max_idle=0), Sweep(), descriptors)

    async with serving(sglang(7)) as server:
        fleet = Fleet(pool, FleetLimits(health=HealthLimits(interval_s=0.02, timeout_s=60.0, max_failures=1)))
        worker = add(fleet, server)
        async with watching(fleet, TendLimits(load_interval_s=0.02, timeout_s=60.0)):
            await until(lambda: worker.state == "ready" and worker.load.load() == 7)
            num_before = worker.num_feed_failures
            with no_descriptors() as take_all:
                await until(lambda: take_all() or descriptors.num_lacked >= 20)
                assert (worker.state, worker.error, worker.health.is_healthy) == ("ready", None, True)
                assert worker.num_feed_failures == num_before


@in_loop
async def test_workers_that_are_down_at_first_are_said_to_be_and_found_later(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with serving(sglang(0)) as server:
        await server.stop()
        fleet = a_fleet()
        worker = add(fleet, server)
        async with watching(fleet):
            await until(lambda: worker.error is not None)
            assert worker.state == "starting"
            server.script["/health"] = Reply({"status": "loading"}, 503)
            await server.start()
            await until(lambda: worker.error == "/health answered 503" and not worker.health.is_healthy)
            server.served.clear()
            server.script["/health"] = Reply()
            await until(lambda: server.served.count("/v1/loads") >= 20)
            assert (worker.state, worker.error) == ("ready", None)
            assert server.served.count("/server_info") == 1
    assert len(messages(caplog, "starting: connect", logging.WARNING)) == 1
    assert len(messages(caplog, "starting: /health answered 503; trying on", logging.WARNING)) == 1


@in_loop
async def test_a_worker_that_comes_back_is_asked_anew_what_it_is() -> None:
    async with serving(sglang(1, 2)) as server:
        fleet = a_fleet()
        worker = add(fleet, server)
        async with watching(fleet):
            await until(lambda: worker.load.load() == 3)
            await server.stop()
            await until(lambda: worker.state == "unhealthy")
            assert worker.error is not None
            server.script = sglang(10, 20, 30, model="another")
            await server.start()
            await until(lambda: worker.state == "ready")
            assert (worker.models, len(worker.places)) == (("another",), 3)
            await until(lambda: worker.load.load() == 60)


@in_loop
async def test_failed_checks_make_a_worker_unhealthy_and_good_ones_bring_it_back() -> None:
    async with serving(sglang(0)) as server:
        fleet = a_fleet(num_successes=4)
        worker = add(fleet, server)
        async with watching(fleet):
            await until(lambda: worker.state == "ready")
            server.script["/health"] = Reply(b"", 500)
            await until(lambda: worker.state == "unhealthy")
            assert worker.error == "/health answered 500"
            server.served.clear()
            server.script["/health"] = Reply()
            await until(lambda: worker.state == "ready")
            assert server.served.count("/health") >= 4


@in_loop
async def test_a_worker_that_hangs_is_unhealthy_and_delays_nobody() -> None:
    async with serving(sglang(0)) as hanging, serving(sglang(7)) as other:
        fleet = a_fleet(timeout_s=0.5)
        workers = [add(fleet, hanging), add(fleet, other)]
        async with watching(fleet, TendLimits(0.02, 0.5, timeout_s=0.5)):
            await until(lambda: all(worker.state == "ready" for worker in workers))
            hanging.judge = lambda path, headers: NEVER
            num_before = other.served.count("/v1/loads")
            await until(lambda: workers[0].state == "unhealthy")
            assert other.served.count("/v1/loads") > num_before + 3
            assert workers[1].state == "ready"
            hanging.judge = lambda path, headers: None
            await until(lambda: workers[0].state == "ready")


@in_loop
async def test_load_is_asked_for_as_soon_as_a_worker_is_found() -> None:
    async with serving(sglang(8)) as server:
        fleet = a_fleet()
        worker = add(fleet, server)
        async with watching(fleet, TendLimits(load_interval_s=3600.0, load_stale_s=7200.0)):
            await until(lambda: worker.load.load() == 8)


@in_loop
async def test_polls_do_not_pile_up() -> None:
    async with serving(sglang(0)) as server:
        server.script["/v1/loads"] = Reply(server.script["/v1/loads"].body, delay_s=0.1)
        fleet = a_fleet()
        worker = add(fleet, server)
        async with watching(fleet):
            await until(lambda: server.served.count("/v1/loads") >= 4)
            assert server.max_running["/v1/loads"] == 1
            assert worker.load.feed_ok


@in_loop
async def test_a_broken_feed_leaves_charges_alone_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with serving(sglang(500)) as server:
        fleet = a_fleet()
        router, worker = router_of(fleet), add(fleet, server)
        async with watching(fleet):
            await until(lambda: worker.load.load() == 500)
            for broken in (Reply(b"", 500), Reply(b"what?"), Reply({"loads": [{"dp_rank": 0, "num_tokens": -5}]})):
                server.script["/v1/loads"] = broken
                await until(lambda: not worker.load.feed_ok)
                assert worker.state == "ready"
                assert worker.feed_error is not None
                route = router.route(ask(70, 5), "m", "mixed", (), asyncio.get_running_loop().time())
                assert worker.load.load() == 75, "its charges alone"
                router.finished(route, "ok", asyncio.get_running_loop().time())
                await until(lambda: bool(messages(caplog, "charges alone count")))
                server.script["/v1/loads"] = report(400)
                await until(lambda: worker.load.feed_ok)
                assert worker.load.load() == 400
                assert worker.feed_error is None
                assert len(messages(caplog, "charges alone count: /v1/loads", logging.WARNING)) == 1
                assert len(messages(caplog, "its load reports are back")) == 1
                caplog.clear()
            assert worker.num_feed_failures >= 3


@in_loop
async def test_the_next_feed_takes_over_from_one_that_answers_nonsense() -> None:
    async with serving(sglang(1)) as server:
        fleet = a_fleet()
        worker = add(fleet, server)
        async with watching(fleet):
            await until(lambda: worker.load.load() == 1)
            del server.script["/v1/loads"]
            server.script["/metrics"] = Reply(b'sglang_num_used_tokens{dp_rank="0"} 2\n')
            await until(lambda: worker.load.load() == 2)
            assert worker.feed == "sglang metrics"
            server.script["/metrics"] = Reply(b"", 404)
            server.script["/get_load"] = Reply([{"dp_rank": 0, "num_reqs": 1, "num_waiting_reqs": 0, "num_tokens": 3}])
            await until(lambda: worker.load.load() == 3)
            assert worker.feed == "/get_load"
            server.script["/v1/loads"] = report(4)
            await until(lambda: worker.load.load() == 4)


@in_loop
async def test_while_no_feed_works_each_is_asked_once_a_poll() -> None:
    async with serving(sglang(1)) as server:
        fleet = a_fleet()
        worker = add(fleet, server)
        async with watching(fleet):
            await until(lambda: worker.load.load() == 1)
            del server.script["/v1/loads"]
            await until(lambda: worker.num_feed_failures >= 2)
            server.served.clear()
            await until(lambda: server.served.count("/get_load") >= 10)
            assert abs(server.served.count("/v1/loads") - server.served.count("/get_load")) <= 1


@in_loop
async def test_a_report_that_the_worker_itself_says_is_old_does_not_count() -> None:
    async with serving(sglang(0)) as server:
        entry = {"timestamp": 990.0, "dp_rank": 0, "num_running_reqs": 1, "num_total_tokens": 7}
        server.script["/v1/loads"] = Reply({"timestamp": 1000.0, "loads": [entry]})
        fleet = a_fleet()
        worker = add(fleet, server)
        async with watching(fleet):
            await until(lambda: server.served.count("/v1/loads") >= 3)
            assert not worker.load.feed_ok
            assert worker.load.load() == 0
            entry["timestamp"] = 999.9
            server.script["/v1/loads"] = Reply({"timestamp": 1000.0, "loads": [entry]})
            await until(lambda: worker.load.feed_ok)
            assert worker.load.load() == 7


@in_loop
async def test_a_rank_that_reports_no_more_is_dead_until_it_does() -> None:
    async with serving(sglang(1, 2, 3)) as server:
        fleet = a_fleet()
        worker = add(fleet, server)
        async with watching(fleet):
            await until(lambda: worker.load.load() == 6)
            server.script["/v1/loads"] = report(2, 3, first=1)
            await until(lambda: worker.load.ranks[0].is_dead)
            assert [account.is_live for account in worker.load.ranks] == [False, True, True]
            server.script["/v1/loads"] = report(1, 2, 3)
            await until(lambda: worker.load.ranks[0].is_live)


@in_loop
async def test_a_worker_that_reports_other_ranks_is_asked_anew() -> None:
    async with serving(sglang(1, 2)) as server:
        fleet = a_fleet()
        worker = add(fleet, server)
        async with watching(fleet):
            await until(lambda: worker.load.load() == 3)
            server.script = sglang(1, 2, 3, 4)
            await until(lambda: len(worker.places) == 4)
            await until(lambda: worker.load.load() == 10)
            assert worker.state == "ready"


@in_loop
async def test_a_worker_that_cannot_say_any_more_what_it_is_becomes_unhealthy() -> None:
    async with serving(sglang(1, 2)) as server:
        fleet = a_fleet()
        worker = add(fleet, server)
        async with watching(fleet):
            await until(lambda: worker.load.load() == 3)
            server.script["/v1/models"] = Reply(b"", 500)
            server.script["/v1/loads"] = report(1, 2, 3)
            await until(lambda: worker.state == "unhealthy")
            assert worker.error == "/v1/models answered 500"
            server.script = sglang(1, 2, 3)
            await until(lambda: worker.state == "ready")
            assert len(worker.places) == 3


@in_loop
async def test_engines_of_vllm_are_told_apart_by_their_own_numbers() -> None:
    page = "\n".join(
        f'vllm:num_requests_running{{engine="{engine}"}} 1\nvllm:kv_cache_usage_perc{{engine="{engine}"}} 0.5\n'
        f'vllm:generation_tokens_total{{engine="{engine}"}} %d\n'
        f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{engine}00",engine="{engine}"}} 1'
        for engine in (2, 3)
    )
    script: Script = {
        "/health": Reply(),
        "/version": Reply({"version": "0.33"}),
        "/v1/models": models("m", owner="vllm"),
        "/metrics": Reply((page % (0, 0)).encode()),
        "/v1/completions": Reply({}),
    }
    async with serving(script) as server:
        fleet = a_fleet()
        worker = add(fleet, server)
        async with watching(fleet):
            await until(lambda: worker.load.feed_ok)
            assert [account.load() for account in worker.load.ranks] == [1600, 2400]
            assert worker.load.capacity == 8000
            script["/metrics"] = Reply((page % (1000, 0)).encode())
            await until(lambda: (worker.load.ranks[0].peak_throughput or 0) > 0)


@in_loop
async def test_a_busy_vllm_is_asked_again_how_it_counts_its_ranks(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    page = b"".join(b'vllm:num_requests_running{engine="%d"} 1\n' % engine for engine in (2, 3))
    script: Script = {
        "/health": Reply(),
        "/version": Reply({"version": "0.33"}),
        "/v1/models": models("m", owner="vllm"),
        "/metrics": Reply(page),
        "/v1/completions": NEVER,
    }
    async with serving(script) as server:
        fleet = a_fleet()
        router, worker = router_of(fleet), add(fleet, server)
        async with watching(fleet, TendLimits(0.02, 0.5, timeout_s=0.3, refresh_s=0.1)):
            await until(lambda: worker.state == "ready")
            assert router.route(ask(), "m", "mixed", (), 0.0).rank is None
            script["/v1/completions"] = Reply({})
            await until(lambda: [place.number for place in worker.places] == [2, 3])
            await until(lambda: worker.load.feed_ok)
            assert worker.load.num_active == 1, "its accounts are the same"
    assert len(messages(caplog, "its load comes from")) == 1


@in_loop
async def test_adapters_that_are_loaded_later_are_served() -> None:
    async with serving(sglang(0)) as server:
        fleet = a_fleet()
        worker = add(fleet, server)
        async with watching(fleet):
            await until(lambda: worker.models == ("m",))
            server.script["/v1/models"] = models("m", poet="m")
            await until(lambda: worker.models == ("m", "poet"))
            assert len(worker.cards) == 2


@in_loop
async def test_a_server_of_another_kind_in_the_same_place_is_noticed() -> None:
    async with serving(sglang(5)) as server:
        fleet = a_fleet()
        worker = add(fleet, server)
        async with watching(fleet):
            await until(lambda: worker.feed is not None)
            server.script = {
                "/health": Reply(),
                "/v1/models": models("m", owner="vllm"),
                "/version": Reply({"version": "0.33.0"}),
                "/metrics": Reply(b'vllm:num_requests_running{engine="0"} 3\n'),
            }
            await until(lambda: worker.kind == "vllm" and worker.feed == "vllm metrics")
            assert worker.state == "ready"


@in_loop
async def test_a_changed_worker_is_found_anew_and_a_removed_one_left_alone() -> None:
    async with serving(sglang(0)) as server:
        fleet = a_fleet()
        worker = add(fleet, server)
        async with watching(fleet):
            await until(lambda: worker.state == "ready")
            fleet.change(worker, WorkerSpec(server.url, "decode"))
            assert worker.state == "starting"
            await until(lambda: worker.state == "ready")
            assert worker.role == "decode"
            fleet.drain(worker, asyncio.get_running_loop().time())
            assert fleet.workers == []
            await until(lambda: not any(server.url in task.get_name() for task in asyncio.all_tasks()))


@in_loop
async def test_a_drain_without_traffic_ends_in_time() -> None:
    async with serving(sglang(0)) as server:
        fleet = a_fleet()
        router, worker = router_of(fleet), add(fleet, server)
        async with watching(fleet):
            await until(lambda: worker.state == "ready")
            router.route(ask(), "m", "mixed", (), asyncio.get_running_loop().time())
            fleet.drain(worker, asyncio.get_running_loop().time(), timeout_s=0.01)
            await until(lambda: worker.state == "removed")


@in_loop
async def test_no_health_checks_and_no_load_reports_where_none_are_wanted() -> None:
    async with serving(sglang(9)) as server:
        fleet = Fleet(pool_to, FleetLimits(health=HealthLimits(interval_s=0.0)))
        worker = add(fleet, server)
        async with watching(fleet, TendLimits(load_interval_s=0.0, refresh_s=0.02)):
            await until(lambda: worker.state == "ready")
            await until(lambda: server.served.count("/v1/models") >= 3)
            assert server.served.count("/health") == 1
            assert "/v1/loads" not in server.served


@in_loop
async def test_the_gateways_own_requests_carry_the_key_of_the_workers() -> None:
    async with serving(sglang(0)) as server:
        fleet = a_fleet()
        add(fleet, server)
        async with watching(fleet, TendLimits(0.02, 0.5, api_key="secret")):
            await until(lambda: "/v1/loads" in server.served)
            paths = ("/health", "/v1/models", "/server_info", "/v1/loads")
            assert {server.headers[path]["authorization"] for path in paths} == {"Bearer secret"}


@in_loop
async def test_workers_of_the_file_come_and_go(tmp_path: Path) -> None:
    path = tmp_path / "workers.yaml"
    async with serving(sglang(0)) as one, serving(sglang(0, model="n")) as other:
        path.write_text(f"workers: ['{one.url}']\n")
        fleet = a_fleet()
        async with watching(fleet, file=WorkersFile(path)):
            await until(lambda: fleet.models() == ["m"])
            (tmp_path / "new").write_text(f"# moved into place\nworkers: ['{other.url}']\n")
            (tmp_path / "new").replace(path)
            await until(lambda: fleet.models() == ["n"])
            assert [worker.url for worker in fleet.workers] == [other.url]


@in_loop
async def test_a_used_role_other_than_the_workers_own_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    script = sglang(0) | {"/server_info": Reply({"dp_size": 1, "disaggregation_mode": "prefill"})}
    async with serving(script) as server:
        fleet = a_fleet()
        worker = add(fleet, server)
        async with watching(fleet):
            await until(lambda: worker.state == "ready")
    assert len(messages(caplog, "it runs as prefill but is used as mixed", logging.WARNING)) == 1
