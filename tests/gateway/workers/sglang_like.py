"""A worker that behaves like an SGLang server, its oddities included: `python -m tests.gateway.workers.sglang_like`."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from tests.gateway.workers import bootstrap, shapes
from tests.gateway.workers.quirks import parser
from tests.gateway.workers.worker import RefusedError, Worker, gauges, live, run

if TYPE_CHECKING:
    import argparse
    from collections.abc import Awaitable, Callable

    from tests.gateway.workers.http import Answer, Request
    from tests.gateway.workers.ranks import Rank, Report

VERSION = "0.5.23"


class Sglang:
    """Implements worker.Kind."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.flags = worker.flags
        self.rooms = bootstrap.Rooms(worker.flags.bootstrap_timeout_s)
        self.bootstrap_port: int = worker.flags.bootstrap_port

    def owner(self) -> str:
        return "sglang"

    def routes(self) -> dict[str, Callable[[Request, Answer], Awaitable[None]]]:
        return {
            "/server_info": self._server_info,
            "/get_server_info": self._server_info,
            "/model_info": self._model_info,
            "/get_model_info": self._model_info,
            "/tokenize": self._tokenize,
            "/v1/tokenize": self._tokenize,
        }

    def feeds(self) -> dict[str, Callable[[Request, Answer], Awaitable[None]]]:
        feeds = {"/v1/loads": self._loads, "/get_load": self._get_load, "/metrics": self._metrics}
        return {path: feed for path, feed in feeds.items() if path not in self.flags.without}

    def error(self, path: str, status: int, message: str) -> bytes:
        if path == shapes.GENERATE:
            return json.dumps({"error": {"message": message}}).encode()
        kind = {400: "BadRequestError", 404: "NotFoundError"}.get(status, "InternalServerError")
        return json.dumps({"object": "error", "message": message, "type": kind, "param": None, "code": status}).encode()

    # ---- ranks

    def rank_named(self, request: Request, body: shapes.Body) -> int | None:
        """The header outranks `routed_dp_rank`, which outranks its old name; /generate does not read the header."""
        header = request.header("x-data-parallel-rank") if request.path != shapes.GENERATE else None
        named: Any = body.get("routed_dp_rank", body.get("data_parallel_rank"))
        if header is not None:
            named = header
        if named is None:
            return self._room_of(body) % self.flags.dp_size if self.flags.role == "prefill" else None
        try:
            rank = int(named)
        except (TypeError, ValueError):
            raise RefusedError(400, f"Invalid X-Data-Parallel-Rank header: must be an integer, got {named!r}") from None
        if self.flags.dp_size == 1 and rank == 0:
            return None
        if not 0 <= rank < self.flags.dp_size:
            raise RefusedError(400, f"routed_dp_rank={rank} out of range [0, {self.flags.dp_size})")
        return rank

    # ---- prefill and decode

    def _room_of(self, body: shapes.Body) -> int:
        room = _first(body.get("bootstrap_room"))
        if not isinstance(room, int):
            raise RefusedError(400, "Disaggregated request received without bootstrap room id")
        return room

    async def before(self, body: shapes.Body, rank: Rank) -> None:
        """Meet the other leg, where there is one."""
        try:
            if self.flags.role == "prefill":
                await self.rooms.prefill(rank.index, self._room_of(body))
            elif self.flags.role == "decode":
                await self._fetch(body)
        except bootstrap.RoomError as error:
            raise RefusedError(400 if "already used" in str(error) else 500, str(error)) from None

    async def _fetch(self, body: shapes.Body) -> None:
        room = self._room_of(body)
        host, port = (_first(body.get(name)) for name in ("bootstrap_host", "bootstrap_port"))
        if not isinstance(host, str) or not isinstance(port, int):
            raise RefusedError(400, f"bootstrap_host and bootstrap_port are needed, got {host!r} and {port!r}")
        rank = body.get("disagg_prefill_dp_rank")
        if rank is None:
            rank = room % self.flags.prefill_dp_size
        await bootstrap.fetch(host, port, rank, room, self.flags.bootstrap_timeout_s)

    def input_logprobs(self, one: shapes.Generation) -> list[object]:
        """The decode leg never saw the prompt's logits."""
        return [] if self.flags.role == "decode" else shapes.input_logprobs(one)

    # ---- what it tells about itself

    def _about(self) -> dict[str, object]:
        return {
            "model_path": f"/models/{self.flags.model}",
            "served_model_name": self.flags.model,
            "tp_size": 1,
            "dp_size": self.flags.dp_size,
            "version": VERSION,
            "is_generation": True,
            "model_type": "llama",
            "max_total_num_tokens": self.flags.max_total_tokens,
            "max_running_requests": self.flags.max_running,
            "disaggregation_mode": self.flags.role,
            "disaggregation_bootstrap_port": self.bootstrap_port,
            "load_balance_method": "round_robin",
            "tokenizer_path": f"/models/{self.flags.model}",
        }

    async def _server_info(self, request: Request, answer: Answer) -> None:
        await answer.whole(200, json.dumps({**self._about(), "internal_states": [{}]}).encode())

    async def _model_info(self, request: Request, answer: Answer) -> None:
        about = self._about()
        known = {name: about[name] for name in ("model_path", "tokenizer_path", "is_generation", "model_type")}
        await answer.whole(200, json.dumps(known).encode())

    async def _tokenize(self, request: Request, answer: Answer) -> None:
        seen = self.worker.record.begin(request)
        tokens = list(request.body[:16])
        await answer.whole(200, json.dumps({"tokens": tokens, "count": len(tokens), "max_model_len": 32768}).encode())
        self.worker.record.end(seen, "ended")

    def _rank_load(self, one: Report) -> dict[str, object]:
        capacity = self.flags.max_total_tokens
        waiting = {"waiting": one.waiting, "grammar": 0, "paused": 0, "retracted": 0}
        return {
            "timestamp": one.taken_at,
            "dp_rank": one.rank,
            "num_running_reqs": one.running,
            "num_waiting_reqs": one.waiting,
            "num_total_reqs": one.running + one.waiting,
            "num_waiting_uncached_tokens": one.waiting_tokens,
            "num_used_tokens": one.used,
            "num_total_tokens": one.used + one.waiting_tokens,
            "num_active_tokens": one.used,
            "max_total_num_tokens": capacity,
            "max_running_requests": self.flags.max_running,
            "token_usage": round(one.used / capacity, 4),
            "gen_throughput": 0.0,
            "cache_hit_rate": 0.0,
            "utilization": 0.0,
            "queues": waiting,
            **({} if self.flags.role == "null" else {"disaggregation": {"mode": self.flags.role}}),
        }

    async def _loads(self, request: Request, answer: Answer) -> None:
        loads = [self._rank_load(one) for one in live(self.worker)]
        wanted = request.query.get("dp_rank")
        if wanted is not None:
            loads = [one for one in loads if str(one["dp_rank"]) == wanted]
        top = {"timestamp": datetime.now(UTC).isoformat(), "version": VERSION, "dp_rank_count": len(loads)}
        await answer.whole(200, json.dumps({**top, "loads": loads}).encode())

    async def _get_load(self, request: Request, answer: Answer) -> None:
        loads = [
            {
                "dp_rank": one.rank,
                "num_reqs": one.running + one.waiting,
                "num_waiting_reqs": one.waiting,
                "num_tokens": one.used + one.waiting_tokens,
                "ts_tic": one.taken_at,
            }
            for one in live(self.worker)
        ]
        await answer.whole(200, json.dumps(loads).encode())

    async def _metrics(self, request: Request, answer: Answer) -> None:
        spelling = self.flags.gauge_prefix
        rows = []
        for one in live(self.worker):
            labels = f'model_name="{self.flags.model}",engine_type="unified",tp_rank="0",dp_rank="{one.rank}"'
            rows += [
                (f"{spelling}num_used_tokens", labels, one.used),
                (f"{spelling}num_running_reqs", labels, one.running),
                (f"{spelling}num_queue_reqs", labels, one.waiting),
                (f"{spelling}token_usage", labels, one.used / self.flags.max_total_tokens),
                (f"{spelling}max_total_num_tokens", labels, self.flags.max_total_tokens),
                (f"{spelling}gen_throughput", labels, 0.0),
            ]
        await answer.whole(200, gauges(rows), "text/plain; version=0.0.4; charset=utf-8")


def _first(value: object) -> Any:
    """The first of a batch's; the value itself of a single prompt."""
    return value[0] if isinstance(value, list) and value else value


async def main(flags: argparse.Namespace) -> None:
    """Serve; a prefill worker opens its registry of rooms first."""
    worker = Worker(flags)
    kind = Sglang(worker)
    worker.kind = kind
    if flags.role == "prefill":
        kind.bootstrap_port = await kind.rooms.listen(flags.host, flags.bootstrap_port)
    await run(worker)


def read_flags() -> argparse.Namespace:
    """The command line."""
    flags = parser("A worker that behaves like an SGLang server.")
    flags.add_argument("--role", default="null", choices=["null", "prefill", "decode"])
    flags.add_argument("--bootstrap-port", type=int, default=0)
    flags.add_argument("--bootstrap-timeout-s", type=float, default=30.0)
    flags.add_argument("--prefill-dp-size", type=int, default=1, help="of the prefill workers, for a decode worker")
    flags.add_argument("--gauge-prefix", default="sglang:", choices=["sglang:", "sglang_"])
    flags.add_argument("--without", action="append", default=[], help="a load feed that this version does not have")
    return flags.parse_args()


if __name__ == "__main__":
    asyncio.run(main(read_flags()))
