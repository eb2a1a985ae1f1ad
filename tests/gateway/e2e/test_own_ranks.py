"""Our own server with several ranks behind the gateway."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from tests.gateway.client import COMPLETIONS, Reply, ask
from tests.gateway.processes import Fleet, Gateway, get
from tests.server.raw import wait_for
from tests.serving import Server, serve, sim_flags

if TYPE_CHECKING:
    from pathlib import Path

NUM_STREAMS = 8
PREFIX = "equipoise_gateway_"


def requests_of(server: Server) -> list[int]:
    """Requests on each rank, as the server says."""
    return [rank["num_reqs"] for rank in get(f"{server.url}/get_load")]


def charged(gateway: Gateway) -> list[float]:
    """Requests on each rank, as the gateway believes."""
    return [gateway.metric(f"{PREFIX}rank_inflight_requests", dp_rank=rank) for rank in "01"]


def during_streams(gateway: Gateway, server: Server, **headers: Any) -> tuple[list[int], list[float], list[Reply]]:
    """What server and gateway say while streams run, and their replies."""

    async def run() -> tuple[list[int], list[float], list[Reply]]:
        body = {"prompt": "abc", "max_tokens": 60, "stream": True, "ignore_eos": True}
        streams = asyncio.gather(*(ask(gateway.port, COMPLETIONS, body, **headers) for _ in range(NUM_STREAMS)))
        async with asyncio.timeout(20):
            while sum(there := await asyncio.to_thread(requests_of, server)) < NUM_STREAMS:
                await asyncio.sleep(0.01)
        return there, await asyncio.to_thread(charged, gateway), await streams

    return asyncio.run(run())


def test_ranks_of_our_own_server(fleet: Fleet, tiny_tokenizer: Path) -> None:
    with serve(*sim_flags(tiny_tokenizer, "--dp-size", "2", "--max-running", "16", step_ms=25)) as server:
        gateway = fleet.gateway("--worker", server.url, "--rank-policy", "minimum_tokens")
        assert gateway.worker(server.url)["kind"] == "equipoise"
        there, believed, replies = during_streams(gateway, server)
        assert all(reply.is_done() for reply in replies)
        assert there == believed == [4, 4]
        there, believed, replies = during_streams(gateway, server, X_Data_Parallel_Rank="1")
        assert all(reply.is_done() for reply in replies)
        assert there == believed == [0, 8]
        wait_for(lambda: gateway.metric(f"{PREFIX}rank_charged_tokens") == 0, "charges are given back")
