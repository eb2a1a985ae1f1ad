"""Nothing that is malformed reaches a worker, is answered but with an error, or harms who comes after it."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
from tests.gateway.malformed import MALFORMED, NOT_JSON
from tests.gateway.plane_kit import OK_BODY, ScriptedWorker, Stage, post, staged

from equipoise.gateway.http.client import ClientLimits

PIECES = (1 << 20, 7, 1)
"""Bytes of each write."""
SHORT = ClientLimits(receive_s=0.3, idle_s=0.3)


async def answer_to(stage: Stage, request: bytes, piece: int) -> bytes:
    """All that comes back until the gateway closes."""
    peer = await stage.connect()
    try:
        for start in range(0, min(len(request), 2000), piece):
            peer.send(request[start : start + piece])
            await asyncio.sleep(0)
        peer.send(request[2000 - 2000 % -piece :] if len(request) > 2000 else b"")
        return await peer.rest()
    finally:
        peer.reset()


def statuses(data: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", data)]


async def still_serves(stage: Stage, worker: ScriptedWorker, num_before: int) -> None:
    head, body = await stage.ask()
    assert head.startswith(b"HTTP/1.1 200 ")
    assert body == OK_BODY
    assert worker.num_connections <= num_before + 1


async def run_corpus(piece: int) -> None:
    worker = ScriptedWorker()
    wrong: list[str] = []
    async with staged(worker, client=SHORT) as stage:
        answers = await asyncio.gather(*(answer_to(stage, request, piece) for request in MALFORMED.values()))
        for name, data in zip(MALFORMED, answers, strict=True):
            found = statuses(data)
            # a whole request may come first, and is answered: then the rest must not be
            is_refused = not found or 400 <= found[-1] < 500
            if not is_refused or len(found) > 2 or (len(found) == 2 and not name.startswith(("garbage", "no length"))):
                wrong.append(f"{name}: {data[:200]!r}")
            if found and b"connection: close" not in data.lower():
                wrong.append(f"{name} may go on: {data[:200]!r}")
        assert not wrong, "\n".join(wrong)
        # "no length, then what looks like a body" is one request without a body: its answer is that it is no JSON
        assert worker.num_connections == 0
        await still_serves(stage, worker, 0)
        await stage.is_at_rest()


@pytest.mark.parametrize("piece", PIECES)
def test_what_is_malformed_reaches_nobody(piece: int) -> None:
    asyncio.run(run_corpus(piece))


def test_what_is_malformed_after_a_good_request_is_refused_in_its_turn() -> None:
    async def run() -> None:
        worker = ScriptedWorker()
        async with staged(worker, client=SHORT) as stage:
            for name, request in MALFORMED.items():
                if name.startswith(("garbage", "no length")):
                    continue
                num_seen = len(worker.seen)
                data = await answer_to(stage, post() + request, 1 << 20)
                found = statuses(data)
                assert found[0] == 200, name
                assert all(400 <= status < 500 for status in found[1:]), name
                assert len(found) <= 2, name
                assert len(worker.seen) == num_seen + 1, name

    asyncio.run(run())


def test_bodies_that_are_no_json_object_bother_no_worker() -> None:
    async def run() -> None:
        worker = ScriptedWorker()
        async with staged(worker) as stage:
            for name, body in NOT_JSON.items():
                head, text = await stage.ask(post(body))
                assert head.startswith(b"HTTP/1.1 400 "), name
                assert json.loads(text)["error"]["type"] == "invalid_request_error", name
            assert worker.num_connections == 0
            await still_serves(stage, worker, 0)
            await stage.is_at_rest()

    asyncio.run(run())
