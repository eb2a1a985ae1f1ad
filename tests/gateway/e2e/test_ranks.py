"""Which worker and which rank a request reaches, for each kind of server and each way it reports its load."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from tests.gateway.client import CHAT, GENERATE, Reply, ask, ask_now, chat, gather
from tests.server.raw import wait_for

if TYPE_CHECKING:
    from tests.gateway.processes import Fleet, Gateway, Worker

PREFIX = "equipoise_gateway_"
BY_TOKENS = ("--policy", "least_tokens", "--rank-policy", "minimum_tokens")


def burst(gateway: Gateway, num: int, path: str = CHAT, **more: Any) -> list[Reply]:
    """So many requests at once, all answered."""

    async def run() -> list[Reply]:
        return await gather(*(ask(gateway.port, path, chat(f"number {index:4}", **more)) for index in range(num)))

    replies = asyncio.run(run())
    assert [(reply.status, reply.is_whole) for reply in replies] == [(200, True)] * num
    return replies


def named(worker: Worker) -> list[tuple[str | None, int | None, int]]:
    """Of each request that the worker saw: rank in the header, rank in the body, rank that served it."""
    return [
        (
            dict(seen["headers"]).get("x-data-parallel-rank"),
            json.loads(seen["body"]).get("routed_dp_rank"),
            seen["rank"],
        )
        for seen in worker.seen()
    ]


def test_sglang_ranks_are_named_in_header_and_body(fleet: Fleet) -> None:
    worker = fleet.sglang("--dp-size", "4", "--ttft-s", "0.3").wait_ready()
    gateway = fleet.before([worker], *BY_TOKENS)
    burst(gateway, 12)
    assert worker.served() == [3, 3, 3, 3]
    assert all(header == str(body) == str(rank) for header, body, rank in named(worker))
    generate = {"text": "a", "sampling_params": {"max_new_tokens": 2}}
    assert ask_now(gateway.port, GENERATE, generate).status == 200  # reads no header: the body decides
    _, body, rank = named(worker)[-1]
    assert body == rank


def test_a_rank_that_the_client_names_is_respected(fleet: Fleet) -> None:
    worker = fleet.sglang("--dp-size", "4").wait_ready()
    gateway = fleet.before([worker])
    given = [
        chat(routed_dp_rank=2),
        chat(data_parallel_rank=3),
    ]
    for body in given * 3:
        assert ask_now(gateway.port, CHAT, body).status == 200
    seen = [json.loads(one["body"]) for one in worker.seen()]
    assert seen == given * 3
    assert worker.served() == [0, 0, 3, 3]
    assert all(header is None for header, _, _ in named(worker))
    assert ask_now(gateway.port, CHAT, chat(), X_Data_Parallel_Rank="1").status == 200
    assert named(worker)[-1] == ("1", None, 1)


def test_one_rank_is_never_named(fleet: Fleet) -> None:
    workers = [fleet.sglang(), fleet.vllm()]
    gateway = fleet.before(workers, "--policy", "round_robin")
    burst(gateway, 8)
    assert [name for worker in workers for name in named(worker)] == [(None, None, 0)] * 8
    assert [worker.num_seen() for worker in workers] == [4, 4]


def test_vllm_internal(fleet: Fleet) -> None:
    worker = fleet.vllm("--dp-size", "3", "--ttft-s", "0.3").wait_ready()
    burst(fleet.before([worker], *BY_TOKENS), 9)
    assert worker.served() == [3, 3, 3]
    assert all(header == str(rank) and body is None for header, body, rank in named(worker))


def test_vllm_hybrid_ranks_are_numbered_by_node(fleet: Fleet) -> None:
    mode = ("--dp-mode", "hybrid", "--dp-size", "2", "--ttft-s", "0.5")
    workers = [fleet.vllm(*mode, "--first-rank", first) for first in ("0", "2")]
    gateway = fleet.before(workers, *BY_TOKENS)
    burst(gateway, 12)
    asked = [[name for name in named(worker) if name[2] is not None][-6:] for worker in workers]
    assert [Counter(rank for _, _, rank in names) for names in asked] == [{0: 3, 1: 3}] * 2
    assert all(header == str(rank) for names in asked for header, _, rank in names)
    labels = {(worker.url, rank) for worker, ranks in zip(workers, ("01", "23"), strict=True) for rank in ranks}
    for url, rank in labels:
        assert gateway.metric(f"{PREFIX}rank_live", worker=url, dp_rank=rank) == 1
    assert gateway.metric(f"{PREFIX}rank_live") == 4


def test_vllm_external_workers_are_one_rank_each(fleet: Fleet) -> None:
    workers = [fleet.vllm("--dp-mode", "external", "--first-rank", first, "--ttft-s", "0.3") for first in "01"]
    gateway = fleet.before(workers, *BY_TOKENS)
    burst(gateway, 8)
    assert [worker.num_seen() for worker in workers] == [4, 4]
    assert all(header is None for worker in workers for header, _, _ in named(worker))


def test_a_mixed_fleet(fleet: Fleet) -> None:
    workers = [fleet.sglang("--dp-size", "2"), fleet.vllm("--dp-size", "2"), fleet.sglang()]
    for worker in workers:
        worker.wait_ready().change(ttft_s=0.5)
    gateway = fleet.before(workers, "--policy", "round_robin")
    burst(gateway, 10)
    assert [worker.served() for worker in workers] == [[2, 2], [2, 2], [2]]  # a turn for each rank
    assert [body is not None for _, body, _ in named(workers[0])] == [True] * 4
    assert [(header is not None, body) for header, body, _ in named(workers[1])] == [(True, None)] * 4


def test_models_are_kept_apart(fleet: Fleet) -> None:
    workers = [fleet.sglang("--model", name) for name in "abb"]
    gateway = fleet.before(workers, "--policy", "round_robin")
    burst(gateway, 6, model="b")
    burst(gateway, 2, model="a")
    assert [worker.num_seen() for worker in workers] == [2, 3, 3]
    reply = ask_now(gateway.port, CHAT, chat(model="c"))
    assert reply.status == 404
    assert "a, b" in reply.error()["message"]


def test_rank_policies(fleet: Fleet) -> None:
    worker = fleet.sglang("--dp-size", "4").wait_ready()
    burst(fleet.before([worker], "--rank-policy", "none"), 5)
    assert {name[:2] for name in named(worker)} == {(None, None)}
    gateway = fleet.before([worker], "--rank-policy", "round_robin")
    for index in range(8):
        assert ask_now(gateway.port, CHAT, chat(f"{index}")).status == 200
    assert Counter(body for _, body, _ in named(worker)[5:]) == dict.fromkeys(range(4), 2)


def test_every_kind_of_load_report_is_read(fleet: Fleet) -> None:
    """1,000 tokens that came to rank 1 of a worker past the gateway show up in its reports, and go again."""
    ranks = ("--dp-size", "2", "--ttft-s", "1.5")
    no_loads, no_metrics = ("--without", "/v1/loads"), ("--without", "/metrics")
    workers = [
        fleet.sglang(*ranks),
        fleet.sglang(*ranks, *no_loads, *no_metrics),
        fleet.sglang(*ranks, *no_loads),
        fleet.sglang(*ranks, *no_loads, "--gauge-prefix", "sglang_"),
        fleet.vllm(*ranks),
        fleet.vllm(*ranks, "--old-gauges"),
    ]
    gateway = fleet.before(workers)
    assert [worker["feed"] for worker in gateway.workers()] == [
        *("/v1/loads", "/get_load", "sglang metrics", "sglang metrics", "vllm metrics", "vllm metrics")
    ]
    page = 16  # vLLM's gauge is a share of pages
    bounds = [(1000 - page, 1000 + page)] * len(workers)

    def reported(rank: str) -> list[float]:
        name = f"{PREFIX}rank_reported_tokens"
        return [gateway.metric(name, worker=worker.url, dp_rank=rank) for worker in workers]

    async def past_the_gateway() -> None:
        long = chat("x" * (4000 - 36))
        asking = [asyncio.create_task(ask(worker.port, CHAT, long, X_Data_Parallel_Rank="1")) for worker in workers]
        async with asyncio.timeout(10):
            while not all(
                low <= tokens <= high
                for tokens, (low, high) in zip(await asyncio.to_thread(reported, "1"), bounds, strict=True)
            ):
                await asyncio.sleep(0.02)
        assert reported("0") == [0] * len(workers)
        assert {reply.status for reply in await gather(*asking)} == {200}

    asyncio.run(past_the_gateway())
    wait_for(lambda: reported("1") == [0] * len(workers), "the reports say that it is over")


def test_load_from_elsewhere_is_avoided(fleet: Fleet) -> None:
    worker = fleet.sglang("--dp-size", "2").wait_ready()
    gateway = fleet.before([worker], *BY_TOKENS)

    async def run() -> None:
        worker.change(ttft_s=3.0)
        other = asyncio.create_task(ask(worker.port, CHAT, chat("x" * 40000, routed_dp_rank=0)))
        async with asyncio.timeout(10):
            while not await asyncio.to_thread(gateway.metric, f"{PREFIX}rank_believed_tokens", dp_rank="0"):
                await asyncio.sleep(0.02)
        worker.change(ttft_s=0.0)
        for _ in range(6):
            assert (await ask(gateway.port, CHAT, chat())).status == 200
        assert (await other).status == 200

    asyncio.run(run())
    assert worker.served() == [1, 6]


def test_dead_ranks_are_skipped(fleet: Fleet) -> None:
    worker = fleet.sglang("--dp-size", "3").wait_ready()
    gateway = fleet.before([worker], "--load-stale", "0.5")
    worker.change(dead_ranks=[1])
    wait_for(lambda: gateway.metric(f"{PREFIX}rank_live", dp_rank="1") == 0, "rank 1 is known to be dead")
    burst(gateway, 12)
    assert worker.served()[1] == 0
    worker.change(dead_ranks=[])
    wait_for(lambda: gateway.metric(f"{PREFIX}rank_live", dp_rank="1") == 1, "rank 1 is back")
    burst(gateway, 12)
    assert worker.served()[1] > 0


def test_stale_loads_do_not_draw_a_herd(fleet: Fleet) -> None:
    worker = fleet.sglang("--dp-size", "4", "--frozen-loads-s", "3600", "--ttft-s", "0.5").wait_ready()
    gateway = fleet.before([worker], *BY_TOKENS)
    burst(gateway, 40)
    assert worker.served() == [10, 10, 10, 10]
    wait_for(lambda: gateway.metric(f"{PREFIX}rank_charged_tokens") == 0, "charges are given back")


def test_broken_feeds_fall_back_to_charges_and_say_so_once(fleet: Fleet) -> None:
    feeds = ("500", "garbage", "missing", "hang")
    workers = [fleet.sglang("--dp-size", "2", "--ttft-s", "1").wait_ready() for _ in feeds]
    gateway = fleet.before(workers, *BY_TOKENS, "--load-stale", "0.5", "--health-check-timeout", "0.4")
    for worker, feed in zip(workers, feeds, strict=True):
        worker.change(load_feed=feed)
    wait_for(lambda: gateway.metric(f"{PREFIX}worker_feed_broken") == len(feeds), "the metric says it")
    burst(gateway, 24)
    assert [worker.served() for worker in workers] == [[3, 3]] * len(feeds)
    for worker in workers:
        lines = [line for line in gateway.read_log().splitlines() if "no load reports" in line and worker.url in line]
        assert len(lines) == 1, lines
        worker.change(load_feed="ok")
    wait_for(lambda: gateway.metric(f"{PREFIX}worker_feed_broken") == 0, "they work again")


def test_a_worker_that_never_reported_is_balanced_by_charges(fleet: Fleet) -> None:
    workers = [fleet.sglang("--load-feed", "500", "--ttft-s", "0.3"), fleet.sglang("--ttft-s", "0.3")]
    burst(fleet.before(workers, *BY_TOKENS), 20)
    assert [worker.num_seen() for worker in workers] == [10, 10]
