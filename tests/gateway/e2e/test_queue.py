"""The queue before the workers: bounded, in turns by key, with an end to waiting."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tests.gateway.client import CHAT, Reply, ask, chat, gather
from tests.server.raw import wait_for

if TYPE_CHECKING:
    from tests.gateway.processes import Fleet


def test_a_full_queue_refuses_at_once(fleet: Fleet) -> None:
    worker = fleet.sglang("--ttft-s", "0.8").wait_ready()
    gateway = fleet.before([worker], "--max-inflight", "2", "--max-queue", "3")

    async def run() -> list[Reply]:
        return await gather(*(ask(gateway.port, CHAT, chat(f"{index}")) for index in range(9)))

    replies = asyncio.run(run())
    statuses = [reply.status for reply in replies]
    assert sorted(statuses) == [200] * 5 + [429] * 4
    for reply in replies:
        if reply.status == 429:
            assert int(reply.headers["retry-after"]) >= 1
            assert reply.ended_at - reply.began_at < 0.8
            assert "queue" in reply.error()["message"]
    assert worker.num_seen() == 5


def test_waiting_has_an_end(fleet: Fleet) -> None:
    worker = fleet.sglang("--ttft-s", "2").wait_ready()
    gateway = fleet.before([worker], "--max-inflight", "1", "--queue-timeout", "0.5")

    async def run() -> list[Reply]:
        return await gather(*(ask(gateway.port, CHAT, chat(f"{index}")) for index in range(3)))

    replies = asyncio.run(run())
    assert sorted(reply.status for reply in replies) == [200, 503, 503]
    assert worker.num_seen() == 1


def test_keys_take_turns(fleet: Fleet) -> None:
    worker = fleet.sglang("--ttft-s", "0.05").wait_ready()
    gateway = fleet.before([worker], "--max-inflight", "1")

    async def run() -> None:
        many = [asyncio.create_task(ask(gateway.port, CHAT, chat("many"), Authorization="many")) for _ in range(30)]
        while await asyncio.to_thread(worker.num_seen) < 2:
            await asyncio.sleep(0.01)
        few = [asyncio.create_task(ask(gateway.port, CHAT, chat("few"), Authorization="few")) for _ in range(3)]
        assert {reply.status for reply in await gather(*many, *few)} == {200}

    asyncio.run(run())
    keys = [dict(seen["headers"])["authorization"] for seen in worker.seen()]
    places = [place for place, key in enumerate(keys) if key == "few"]
    first = places[0]
    assert places == [first, first + 2, first + 4], keys
    assert first < 20


def test_a_client_that_leaves_the_queue_is_never_sent_on(fleet: Fleet) -> None:
    worker = fleet.sglang("--ttft-s", "1").wait_ready()
    gateway = fleet.before([worker], "--max-inflight", "1")

    async def run() -> list[Reply]:
        first = asyncio.create_task(ask(gateway.port, CHAT, chat("first")))
        while not await asyncio.to_thread(worker.num_seen):
            await asyncio.sleep(0.01)
        return await gather(first, ask(gateway.port, CHAT, chat("second"), timeout_s=0.3))

    first, second = asyncio.run(run())
    assert first.status == 200
    assert second.trouble == "timeout"
    wait_for(lambda: gateway.metric("equipoise_gateway_rank_charged_tokens") == 0, "charges are given back")
    assert worker.num_seen() == 1
