"""Leaving in good order: the gateway on SIGTERM, a worker when it is drained or removed; and coming, while it runs."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Any

from tests.gateway.client import CHAT, Reply, ask, ask_now, chat
from tests.server.raw import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.gateway.processes import Fleet, Gateway, Worker

BODY = chat(stream=True, max_tokens=30)


def during_streams(gateway: Gateway, worker: Worker, num: int, do: Callable[[], Any]) -> list[Reply]:
    """`do` while so many streams of 1.5 s run at `worker`; their replies."""
    worker.change(token_s=0.05, answer_tokens=30)

    async def run() -> list[Reply]:
        streams = asyncio.gather(*(ask(gateway.port, CHAT, BODY) for _ in range(num)))
        while sum(rank["running"] for rank in (await asyncio.to_thread(worker.debug))["ranks"]) < num:
            await asyncio.sleep(0.02)
        await asyncio.to_thread(do)
        return list(await streams)

    return asyncio.run(run())


def test_sigterm_lets_streams_end(fleet: Fleet) -> None:
    worker = fleet.sglang().wait_ready()
    gateway = fleet.before([worker])
    replies = during_streams(gateway, worker, 5, lambda: gateway.signal(signal.SIGTERM))
    assert all(reply.is_done() for reply in replies)
    assert gateway.process.wait(20) == 0
    assert ask_now(gateway.port, CHAT, chat()).trouble.startswith("connection")


def test_sigterm_ends_streams_that_take_too_long_with_an_error(fleet: Fleet) -> None:
    worker = fleet.sglang().wait_ready()
    gateway = fleet.before([worker], "--shutdown-timeout", "0.3")
    replies = during_streams(gateway, worker, 3, lambda: gateway.signal(signal.SIGTERM))
    assert gateway.process.wait(20) == 0
    for reply in replies:
        assert not reply.is_done()
        assert reply.trouble == "cut" or "message" in reply.error()
    wait_for(lambda: [seen["outcome"] for seen in worker.seen()] == ["left"] * 3, "the worker is freed")


def test_a_drained_worker_ends_its_streams_and_gets_no_more(fleet: Fleet) -> None:
    old, new = fleet.sglang().wait_ready(), fleet.sglang().wait_ready()
    gateway = fleet.before([old])
    answers: list[Reply] = []

    def exchange() -> None:
        gateway.add(new)
        gateway.wait_ready(2)
        gateway.drain(old)
        answers.extend(ask_now(gateway.port, CHAT, chat(f"{index}")) for index in range(6))

    assert all(reply.is_done() for reply in during_streams(gateway, old, 3, exchange))
    assert [answer.status for answer in answers] == [200] * 6
    assert (old.num_seen(), new.num_seen()) == (3, 6)
    wait_for(lambda: [worker["url"] for worker in gateway.workers()] == [new.url], "it is gone once it is idle")


def test_a_removed_worker_ends_its_streams(fleet: Fleet) -> None:
    worker = fleet.sglang().wait_ready()
    gateway = fleet.before([worker])
    replies = during_streams(gateway, worker, 3, lambda: gateway.remove(worker))
    assert all(reply.is_done() for reply in replies)
    assert gateway.workers() == []
    reply = ask_now(gateway.port, CHAT, chat())
    assert reply.status in (404, 503)


def test_workers_of_a_file_come_and_go_with_it(fleet: Fleet) -> None:
    workers = [fleet.sglang().wait_ready(), fleet.vllm().wait_ready()]
    file = fleet.folder / "workers.toml"

    def write(*some: Worker) -> None:
        file.write_text("".join(f'[[workers]]\nurl = "{worker.url}"\n' for worker in some))

    write(workers[0])
    gateway = fleet.before([], "--workers-file", str(file)).wait_ready(1)
    write(*workers)
    gateway.wait_ready(2)
    write(workers[1])
    wait_for(lambda: [worker["url"] for worker in gateway.workers()] == [workers[1].url], "one is left")
    assert ask_now(gateway.port, CHAT, chat()).status == 200
