"""A worker that behaves like a vLLM server, its oddities included: `python -m tests.gateway.workers.vllm_like`.

Data parallelism comes in three modes. Internal: one server for all ranks, numbered from 0 everywhere. Hybrid: a
server per node; the header names a rank of the node from 0, the gauges name it within the whole deployment. External:
a server per rank, the header may only say 0, the gauge says the rank within the whole deployment."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from tests.gateway.workers import shapes
from tests.gateway.workers.quirks import parser
from tests.gateway.workers.worker import RefusedError, Worker, gauges, live, run

if TYPE_CHECKING:
    import argparse
    from collections.abc import Awaitable, Callable

    from tests.gateway.workers.http import Answer, Request
    from tests.gateway.workers.ranks import Rank

VERSION = "0.33.0"
PAGE_SIZE = 16


class Vllm:
    """Implements worker.Kind."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.flags = worker.flags

    def owner(self) -> str:
        return "vllm"

    def routes(self) -> dict[str, Callable[[Request, Answer], Awaitable[None]]]:
        return {
            "/version": self._version,
            "/tokenize": self._tokenize,
            "/detokenize": self._tokenize,
            "/load": self._load,
        }

    def feeds(self) -> dict[str, Callable[[Request, Answer], Awaitable[None]]]:
        return {"/metrics": self._metrics}

    def error(self, path: str, status: int, message: str) -> bytes:
        kind = {400: "BadRequestError", 404: "NotFoundError"}.get(status, "InternalServerError")
        return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": status}}).encode()

    def rank_named(self, request: Request, body: shapes.Body) -> int | None:
        """The header alone; one that is no number is as good as none."""
        if request.path == shapes.GENERATE:
            raise RefusedError(404, "Not Found")
        header = request.header("x-data-parallel-rank")
        try:
            rank = int(header) if header is not None else None
        except ValueError:
            return None
        if rank is not None and not 0 <= rank < self.flags.dp_size:
            raise RefusedError(400, f"data_parallel_rank {rank} is out of range [0, {self.flags.dp_size}).")
        return rank

    async def before(self, body: shapes.Body, rank: Rank) -> None:
        """Nothing."""

    def input_logprobs(self, one: shapes.Generation) -> list[object]:
        return []

    async def _version(self, request: Request, answer: Answer) -> None:
        await answer.whole(200, json.dumps({"version": VERSION}).encode())

    async def _load(self, request: Request, answer: Answer) -> None:
        await answer.whole(200, json.dumps({"server_load": sum(one.running for one in self.worker.ranks)}).encode())

    async def _tokenize(self, request: Request, answer: Answer) -> None:
        seen = self.worker.record.begin(request)
        tokens = list(request.body[:16])
        await answer.whole(200, json.dumps({"count": len(tokens), "max_model_len": 32768, "tokens": tokens}).encode())
        self.worker.record.end(seen, "ended")

    async def _metrics(self, request: Request, answer: Answer) -> None:
        rows = []
        capacity = self.flags.max_total_tokens
        usage = "vllm:gpu_cache_usage_perc" if self.flags.old_gauges else "vllm:kv_cache_usage_perc"
        for one in live(self.worker):
            labels = f'engine="{one.rank + self.flags.first_rank}",model_name="{self.flags.model}"'
            cache = f'block_size="{PAGE_SIZE}",cache_dtype="auto",engine="{one.rank + self.flags.first_rank}"'
            rows += [
                ("vllm:num_requests_running", labels, one.running),
                ("vllm:num_requests_waiting", labels, one.waiting),
                (usage, labels, min(1.0, one.used / capacity)),
                ("vllm:cache_config_info", f'{cache},num_gpu_blocks="{capacity // PAGE_SIZE}"', 1.0),
                ("vllm:generation_tokens_total", labels, one.num_generated),
            ]
        await answer.whole(200, gauges(rows), "text/plain; version=0.0.4; charset=utf-8")


async def main(flags: argparse.Namespace) -> None:
    """Serve. Raises SystemExit when the mode and the number of ranks contradict each other."""
    if flags.dp_mode == "external" and flags.dp_size != 1:
        raise SystemExit(f"--dp-mode external has one rank per server, got --dp-size {flags.dp_size}")
    if flags.dp_mode == "internal" and flags.first_rank:
        raise SystemExit(f"--dp-mode internal numbers its ranks from 0, got --first-rank {flags.first_rank}")
    worker = Worker(flags)
    worker.kind = Vllm(worker)
    await run(worker)


def read_flags() -> argparse.Namespace:
    """The command line."""
    flags = parser("A worker that behaves like a vLLM server.")
    flags.add_argument("--dp-mode", default="internal", choices=["internal", "hybrid", "external"])
    flags.add_argument("--first-rank", type=int, default=0, help="of this server in the whole deployment")
    flags.add_argument("--old-gauges", action="store_true", help="vllm:gpu_cache_usage_perc")
    return flags.parse_args()


if __name__ == "__main__":
    asyncio.run(main(read_flags()))
