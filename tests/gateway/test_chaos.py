"""Streams while workers are killed, frozen, slowed, broken, drained and added: all are answered, none hangs.

CHAOS_STREAMS=20000 makes it a long run; a few hundred are enough to meet each kind of trouble."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import psutil
import pytest
from tests.gateway.client import CHAT, COMPLETIONS, Reply, Session, chat, completion
from tests.gateway.processes import Fleet, Gateway, Worker
from tests.gateway.workers.shapes import Generation
from tests.server.raw import wait_for

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

NUM_STREAMS = int(os.environ.get("CHAOS_STREAMS", "500"))
CONCURRENCY = 64
HANG_S = 60.0  # far more than all of the gateway's limits together
LEAVING_SHARE = 0.05
PAUSE_S = 0.15  # between two troubles
LIMITS = (
    *("--first-token-timeout", "1.5", "--between-tokens-timeout", "1.5", "--connect-timeout", "1"),
    *("--health-check-timeout", "0.5", "--unhealthy-after", "2", "--healthy-after", "1", "--drain-timeout", "5"),
    *("--breaker-open", "1", "--queue-timeout", "5", "--max-inflight", "48"),
)
FLAGS = ("--dp-size", "2", "--token-s", "0.005", "--answer-tokens", "1000")
MAX_WORKERS = 8
FAULTS = ("500", "503", "429", "reset_before_head", "close_before_head", "reset_mid_stream", "close_mid_stream")


@dataclass
class Tally:
    """How requests ended: whole, with an error before or within the answer, cut (only an answer that is no stream)."""

    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def count(self, body: dict[str, object], path: str, reply: Reply) -> None:
        """Judge one reply."""
        end = ending(body, path, reply)
        self.ends[end] += 1
        if end == "wrong":
            self.wrong.append(f"{path} {body} -> {reply.status} {reply.trouble} {reply.body[-300:]!r}")


def ending(body: dict[str, object], path: str, reply: Reply) -> str:
    """What became of a request; "wrong" when it hung, lost or mixed up text, or failed without saying why."""
    if reply.trouble.startswith("left"):
        return "left"
    with contextlib.suppress(ValueError, KeyError, IndexError):
        if reply.status == 200 and reply.is_whole and text_of(path, reply) == expected_text(path, body):
            return "whole"
        if reply.status == 200 and reply.error()["message"]:
            return "error within"
        if reply.is_whole and (reply.json().get("message") or reply.error()["message"]):  # SGLang's own are flat
            return f"error {reply.status}"
    return "cut" if reply.trouble == "cut" and reply.status == 200 and not body["stream"] else "wrong"


def text_of(path: str, reply: Reply) -> str | None:
    """The text of a complete answer; None for a stream without its end."""
    if not reply.body.startswith(b"data: "):
        choice = reply.json()["choices"][0]
        return str(choice["message"]["content"] if path == CHAT else choice["text"])
    if not reply.is_done():
        return None
    choices = [event["choices"][0] for event in reply.events()]
    return "".join(choice["delta"]["content"] if path == CHAT else choice["text"] for choice in choices)


def expected_text(path: str, body: dict[str, object]) -> str:
    """What a worker says to this body."""
    num_tokens = body["max_tokens"]
    assert isinstance(num_tokens, int)
    return "".join(Generation(path, body, 1, num_tokens, "length").words())


async def one_request(session: Session, number: int, draw: random.Random, tally: Tally) -> None:
    """A request of some kind; some clients leave before the end."""
    stream = draw.random() < 0.85
    more = {"stream": stream, "max_tokens": draw.randint(1, 40)}
    text = f"{number} " + "x" * draw.randint(0, 4000)
    path, body = (CHAT, chat(text, **more)) if draw.random() < 0.5 else (COMPLETIONS, completion(text, **more))
    leaves_after_s = draw.random() * 0.3 if draw.random() < LEAVING_SHARE else None
    if leaves_after_s is None:
        reply = await session.ask(path, body, timeout_s=HANG_S)
    else:
        reply = await session.ask(path, body, timeout_s=leaves_after_s)
        reply.trouble = "left" if reply.trouble == "timeout" else reply.trouble
    tally.count(body, path, reply)


class Chaos:
    """Trouble of every kind, one after the other, seeded."""

    def __init__(self, make: Callable[[], Worker], gateway: Gateway, workers: list[Worker], seed: int) -> None:
        self._make = make
        self._gateway = gateway
        self._workers = workers
        self._random = random.Random(seed)
        self._busy: list[Worker] = []
        self.begun: Counter[str] = Counter()

    async def run(self) -> None:
        """Until cancelled; every second worker at most is in trouble at a time."""
        troubles = (self._kill, self._freeze, self._slow, self._break, self._blind, self._drain, self._join)
        async with asyncio.TaskGroup() as running:
            for turn in range(10**9):
                await asyncio.sleep(PAUSE_S)
                free = [worker for worker in self._workers if worker not in self._busy]
                if len(free) > len(self._workers) // 2:
                    running.create_task(self._play(troubles[turn % len(troubles)], self._random.choice(free)))

    async def _play(self, trouble: Callable[[Worker], Awaitable[None]], worker: Worker) -> None:
        self._busy.append(worker)
        self.begun[trouble.__name__] += 1
        try:
            await trouble(worker)
        finally:
            worker.thaw()
            self._busy.remove(worker)

    async def _kill(self, worker: Worker) -> None:
        worker.kill()
        await asyncio.sleep(self._random.random() * 0.5)
        await asyncio.to_thread(worker.restart)

    async def _freeze(self, worker: Worker) -> None:
        worker.freeze()
        await asyncio.sleep(0.3 + 2 * self._random.random())
        worker.thaw()

    async def _slow(self, worker: Worker) -> None:
        await self._changed(worker, {"token_s": 0.05, "ttft_s": 0.3}, {"token_s": 0.005, "ttft_s": 0.0})

    async def _break(self, worker: Worker) -> None:
        faults = dict.fromkeys(self._random.sample(FAULTS, 4), 0.1)
        await self._changed(worker, {"faults": faults, "retry_after_s": 0.1}, {"faults": {}})

    async def _blind(self, worker: Worker) -> None:
        feed = self._random.choice(("500", "garbage", "hang", "missing"))
        await self._changed(worker, {"load_feed": feed}, {"load_feed": "ok"})

    async def _changed(self, worker: Worker, there: dict[str, object], back: dict[str, object]) -> None:
        await asyncio.to_thread(lambda: worker.change(**there))
        await asyncio.sleep(0.5 + self._random.random())
        await asyncio.to_thread(lambda: worker.change(**back))

    async def _drain(self, worker: Worker) -> None:
        """Drain it, and add it again."""
        await asyncio.to_thread(self._gateway.drain, worker)
        await asyncio.sleep(self._random.random())
        await asyncio.to_thread(self._gateway.add, worker)

    async def _join(self, worker: Worker) -> None:
        """A worker that nobody named before, and that is slow to come."""
        if len(self._workers) < MAX_WORKERS:
            new = await asyncio.to_thread(self._make().wait_ready)
            await asyncio.to_thread(self._gateway.add, new)
            self._workers.append(new)


async def run_streams(port: int, num: int, tally: Tally) -> None:
    """`num` requests, CONCURRENCY at a time."""
    numbers = iter(range(num))
    draw = random.Random(11)

    async def loop() -> None:
        session = Session(port)
        for number in numbers:
            await one_request(session, number, draw, tally)
        session.close()

    await asyncio.gather(*(loop() for _ in range(CONCURRENCY)))


def at_rest(gateway: Gateway) -> bool:
    """Whether nothing is charged, under way or queued."""
    ranks = ("rank_charged_tokens", "rank_pending_tokens", "rank_inflight_requests")
    names = (*ranks, "worker_inflight_requests", "queue_length")
    return all(gateway.metric(f"equipoise_gateway_{name}") == 0 for name in names)


def run_chaos(make: Callable[[], Worker], gateway: Gateway, workers: list[Worker]) -> None:
    """NUM_STREAMS requests amid trouble; `make` starts a worker that may join. Raises AssertionError for any request
    that ended otherwise than it may, and for what is left over."""
    tally = Tally()

    async def run() -> Chaos:
        chaos = Chaos(make, gateway, workers, seed=5)
        trouble = asyncio.create_task(chaos.run())
        await run_streams(gateway.port, NUM_STREAMS, tally)
        trouble.cancel()
        await asyncio.gather(trouble, return_exceptions=True)
        return chaos

    chaos = asyncio.run(run())
    sys.stderr.write(f"{dict(tally.ends)} amid {dict(chaos.begun)}\n")
    assert not tally.wrong, (len(tally.wrong), tally.ends, tally.wrong[:5])
    assert sum(tally.ends.values()) == NUM_STREAMS
    assert tally.ends["whole"] > NUM_STREAMS // 2, tally.ends
    assert len(chaos.begun) >= 3, chaos.begun
    wait_for(lambda: at_rest(gateway), "all charges are given back", 30)
    assert psutil.Process(gateway.pid).num_fds() < 8 * CONCURRENCY


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_request_ends_well_or_with_a_clear_error(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        workers = [fleet.sglang(*FLAGS) for _ in range(4)] + [fleet.vllm(*FLAGS) for _ in range(2)]
        gateway = fleet.before(workers, *LIMITS)
        run_chaos(lambda: fleet.sglang(*FLAGS, "--ready-after-s", "0.5"), gateway, workers)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_pairs_of_prefill_and_decode_workers(tmp_path: Path) -> None:
    flags = (*FLAGS, "--prefill-dp-size", "2")
    with Fleet(tmp_path) as fleet:
        workers = [fleet.prefill(*flags) for _ in range(3)] + [fleet.decode(*flags) for _ in range(3)]
        gateway = fleet.before(workers, *LIMITS)
        run_chaos(lambda: fleet.prefill(*flags, "--ready-after-s", "0.5"), gateway, workers)
