"""What the access log says of requests on a real data plane."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from tests.gateway.plane_kit import BODY, ScriptedWorker, answer, post, staged

from equipoise.gateway.operate.access_log import AccessLog

if TYPE_CHECKING:
    from pathlib import Path


def logged(path: Path, worker: ScriptedWorker, *requests: bytes) -> list[dict[str, Any]]:
    """The lines of `requests`, sent one after the other to a gateway before `worker`."""

    async def run() -> None:
        log = AccessLog(str(path))
        async with staged(worker, access_log=log) as stage:
            for request in requests:
                await stage.ask(request)
            await stage.is_at_rest()
        log.close()

    asyncio.run(run())
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_errors_of_the_gateway_have_their_code_and_those_of_workers_have_none(tmp_path: Path) -> None:
    async def refuses(worker: ScriptedWorker, peer: Any) -> None:
        await worker.take(peer)
        peer.send(answer(422, b'{"error":{"code":"theirs"}}'))

    lines = logged(tmp_path / "access.log", ScriptedWorker(refuses), post(b'{"model":"other"}'), post(b"["), post(BODY))
    assert [(line["status"], line["error_code"]) for line in lines] == [
        (404, "model_not_found"),
        (400, "invalid_type"),
        (422, None),
    ]


def test_tokens_are_told_as_the_answer_has_them(tmp_path: Path) -> None:
    async def says(worker: ScriptedWorker, peer: Any) -> None:
        for usage in (b'{"prompt_tokens":8,"completion_tokens":6,"cached_tokens":5}', b'{"completion_tokens":2}'):
            await worker.take(peer)
            peer.send(answer(200, usage))

    lines = logged(tmp_path / "access.log", ScriptedWorker(says), post(), post())
    assert [(line["cached_tokens"], line["output_tokens"]) for line in lines] == [(5, 6), (None, 2)]
    assert lines[0]["prompt_tokens"] == 8
