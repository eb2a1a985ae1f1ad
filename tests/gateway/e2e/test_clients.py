"""Clients that leave, that read slowly, that come in crowds."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import TYPE_CHECKING

import psutil
import pytest
from tests.gateway.client import CHAT, COMPLETIONS, Reply, ask, chat, completion, gather, read, request_bytes
from tests.server.raw import wait_for

if TYPE_CHECKING:
    from tests.gateway.processes import Fleet, Gateway, Worker

MIB = 1 << 20
LARGE = {"answer_tokens": 512, "padding_bytes": 65536}  # more than the system's buffers on the way hold
LARGE_BYTES = 32 * MIB
LEAVE_BOUND_S = 2.0  # 0.1 s is promised on a quiet machine, and a few milliseconds are usual


@pytest.fixture(scope="module")
def worker(shared_fleet: Fleet) -> Worker:
    return shared_fleet.sglang("--dp-size", "2").wait_ready()


@pytest.fixture(scope="module")
def gateway(shared_fleet: Fleet, worker: Worker) -> Gateway:
    return shared_fleet.before([worker])


def no_charges(gateway: Gateway) -> bool:
    """Whether nothing is charged to any rank."""
    return gateway.metric("equipoise_gateway_rank_charged_tokens") == 0


def leave(gateway: Gateway, worker: Worker, body: dict[str, object], num_bytes: int, how: str) -> float:
    """Ask, read so many bytes, leave; seconds until the worker saw its connection closed."""
    num_before = len(worker.debug()["disconnects"])
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=20) as connection:
        connection.sendall(request_bytes(CHAT, body))
        num_read = 0
        while num_read < num_bytes:
            num_read += len(connection.recv(65536))
        if not num_bytes:
            wait_for(lambda: any(rank["running"] for rank in worker.debug()["ranks"]), "it runs")
        left_at = time.monotonic()
        if how == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    wait_for(lambda: len(worker.debug()["disconnects"]) > num_before, "the worker sees it")
    return float(worker.debug()["disconnects"][-1]["at"]) - left_at


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_the_worker(gateway: Gateway, worker: Worker, stream: bool, how: str) -> None:
    worker.change(token_s=0.02, answer_tokens=5000)
    waits = [leave(gateway, worker, chat(stream=stream), 600 if stream else 0, how) for _ in range(3)]
    worker.change(token_s=0.0, answer_tokens=16)
    assert max(waits) < LEAVE_BOUND_S, waits
    wait_for(lambda: no_charges(gateway), "charges are given back")
    assert gateway.metric("equipoise_gateway_worker_inflight_requests") == 0


def test_clients_that_read_slowly_cost_little_memory(gateway: Gateway, worker: Worker) -> None:
    """Four streams that are not read at first: the worker is held back, and everything arrives in the end."""
    process = psutil.Process(gateway.pid)

    async def run() -> tuple[int, list[Reply]]:
        before = process.memory_info().rss
        streams = [await open_stream(gateway.port, index) for index in range(4)]
        generated, last = -1, -2
        while generated != last or not generated:
            await asyncio.sleep(0.5)
            seen = (await asyncio.to_thread(worker.seen))[-4:]
            generated, last = sum(one["num_tokens"] for one in seen), generated
        grown = process.memory_info().rss - before
        assert generated < 4 * LARGE["answer_tokens"]
        replies = [Reply() for _ in streams]
        async with asyncio.timeout(60):
            for (reader, writer), reply in zip(streams, replies, strict=True):
                writer.transport.resume_reading()  # type: ignore[attr-defined]
                await read(reader, reply)
                writer.close()
        return grown, replies

    worker.change(**LARGE)
    grown, replies = asyncio.run(run())
    worker.change(answer_tokens=16, padding_bytes=0)
    assert all(reply.is_done() and len(reply.body) > LARGE_BYTES for reply in replies)
    assert grown < 12 * MIB, f"{grown / MIB:.1f} MiB for {4 * LARGE_BYTES / MIB} MiB of answers"
    wait_for(lambda: no_charges(gateway), "charges are given back")


async def open_stream(port: int, number: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A stream that is asked for and not read."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=4096)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(request_bytes(COMPLETIONS, completion(f"slow {number}", stream=True)))
    return reader, writer


def test_a_client_that_sends_slowly_is_timed_out(fleet: Fleet, worker: Worker) -> None:
    gateway = fleet.before([worker], "--client-timeout", "0.5")

    async def run() -> Reply:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
        reply = Reply()
        async with asyncio.timeout(20):
            await read(reader, reply)
        writer.close()
        return reply

    assert asyncio.run(run()).status in (0, 408)


def test_a_client_that_never_reads_is_let_go(fleet: Fleet, worker: Worker) -> None:
    gateway = fleet.before([worker], "--client-timeout", "0.5")
    worker.change(**LARGE)
    num_before = len(worker.debug()["disconnects"])
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", gateway.port))
        connection.sendall(request_bytes(COMPLETIONS, completion(stream=True)))
        wait_for(lambda: len(worker.debug()["disconnects"]) > num_before, "the worker is freed")
    worker.change(answer_tokens=16, padding_bytes=0)
    wait_for(lambda: no_charges(gateway), "charges are given back")


def test_five_hundred_streams_at_once(gateway: Gateway, worker: Worker) -> None:
    worker.change(token_s=0.02)

    async def run() -> list[Reply]:
        bodies = (chat(f"crowd {index}", stream=True, max_tokens=10) for index in range(500))
        return await gather(*(ask(gateway.port, CHAT, body) for body in bodies))

    replies = asyncio.run(run())
    worker.change(token_s=0.0)
    assert all(reply.is_done() for reply in replies)
    assert abs(worker.served()[0] - worker.served()[1]) < 60
    wait_for(lambda: no_charges(gateway), "charges are given back")
    assert psutil.Process(gateway.pid).num_fds() < 600
