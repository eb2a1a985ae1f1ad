"""500 streams at once: every one is whole, and the server's memory stays where it was."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import psutil
from tests.server.raw import load, request_bytes, wait_for
from tests.serving import serve, sim_flags

if TYPE_CHECKING:
    from pathlib import Path

    from tests.serving import Server

NUM_STREAMS = 500
NUM_TOKENS = 60
ROUNDS = 4
MIB = 2**20


async def stream_text(port: int, prompt: str) -> str:
    """The text of one stream, which must end as it should."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "stream": True, "ignore_eos": True}
    writer.write(request_bytes("/v1/completions", json.dumps(body).encode(), "Connection: close"))
    data = await reader.read()
    writer.close()
    await writer.wait_closed()
    lines = [line for line in data.replace(b"\r\n", b"\n").split(b"\n") if line.startswith(b"data: ")]
    assert lines[-1] == b"data: [DONE]"
    choices = [json.loads(line.removeprefix(b"data: "))["choices"][0] for line in lines[:-1]]
    assert choices[-1]["finish_reason"] == "length"
    return "".join(choice["text"] for choice in choices)


async def all_streams(server: Server) -> list[str]:
    return list(await asyncio.gather(*(stream_text(server.port, f"p{number % 10}") for number in range(NUM_STREAMS))))


def test_500_streams(tiny_tokenizer: Path) -> None:
    with serve(*sim_flags(tiny_tokenizer, "--max-running", "512", step_ms=10)) as server:
        process = psutil.Process(server.pid)
        resident = []
        for _ in range(ROUNDS):
            texts = asyncio.run(all_streams(server))
            assert len(set(texts)) == 10  # a text per prompt, whichever stream it came in
            assert texts == texts[:10] * (NUM_STREAMS // 10)
            wait_for(lambda: load(server)["num_reqs"] == 0, "nothing is left over")
            resident.append(process.memory_info().rss / MIB)
        assert resident[-1] - resident[1] < 8, resident
        assert process.num_fds() < 100
