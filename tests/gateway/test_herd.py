"""A herd: a thousand requests at once, between two load reports, spread evenly over ranks of real processes."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest
from tests.gateway.client import COMPLETIONS, ask, completion
from tests.gateway.processes import Fleet, Worker

if TYPE_CHECKING:
    from pathlib import Path

NUM_REQUESTS = 1000
MAX_OVER_MEAN = 1.2
BETWEEN_REPORTS = ("--load-check-interval", "600", "--load-stale", "6000")
ARRIVAL_S = 60.0


def tokens_of(workers: list[Worker], name: str) -> list[int]:
    """A quantity of each rank of all workers."""
    return [rank[name] for worker in workers for rank in worker.debug()["ranks"]]


async def send_all(port: int, prompts: list[str], workers: list[Worker]) -> None:
    """Send a request for each prompt at once, and leave when all have arrived."""
    asked = [asyncio.create_task(ask(port, COMPLETIONS, completion(prompt, max_tokens=4))) for prompt in prompts]
    async with asyncio.timeout(ARRIVAL_S):
        while sum(await asyncio.to_thread(tokens_of, workers, "served")) < len(prompts):
            await asyncio.sleep(0.05)
    assert not any(task.done() for task in asked)
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)


@pytest.mark.parametrize(
    ("num_workers", "dp_size", "policy"),
    [(1, 8, "least_tokens"), (8, 8, "prefix_tokens")],
)
def test_no_rank_gets_much_more_than_its_share(tmp_path: Path, num_workers: int, dp_size: int, policy: str) -> None:
    draw = random.Random(7)
    prompts = [f"{index:04} " + "x" * draw.randint(400, 12000) for index in range(NUM_REQUESTS)]
    with Fleet(tmp_path) as fleet:
        workers = [fleet.sglang("--dp-size", str(dp_size), "--ttft-s", "600") for _ in range(num_workers)]
        gateway = fleet.before(workers, "--policy", policy, *BETWEEN_REPORTS)
        asyncio.run(send_all(gateway.port, prompts, workers))
        tokens = tokens_of(workers, "served_tokens")
    mean = sum(tokens) / len(tokens)
    assert len(tokens) == num_workers * dp_size
    assert max(tokens) <= MAX_OVER_MEAN * mean, sorted(tokens)
