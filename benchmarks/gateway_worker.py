"""A worker that answers at once: as much of SGLang's HTTP surface as routers ask for, no model behind it.

    python benchmarks/gateway_worker.py --port 9001 [--num-ranks 4] [--interval-ms 10] [--role prefill]

For measuring what stands in front of it: one process, one core, some 10 us per request. A streamed token leaves every
`--interval-ms` and carries the moment it was sent (`"sent_ns"`, CLOCK_MONOTONIC), which a client on the same machine
can compare. Tokens are accounted per rank as a scheduler would: prompt (4 bytes each) and max_tokens, from arrival to
the last token. A prefill worker answers with one token. `/counts` tells the requests and unfinished ones per rank.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
from typing import TYPE_CHECKING, Any, cast

import httptools
import uvloop

if TYPE_CHECKING:
    from collections.abc import Callable

MODEL = "bench-model"
MAX_TOTAL_TOKENS = 1_000_000
BYTES_PER_TOKEN = 4
TICK_S = 0.001
MAX_SLOTS = 200
BACKLOG = 8192
GENERATION = frozenset({b"/v1/chat/completions", b"/v1/completions", b"/generate"})
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
LAST_CHUNKS = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
TOKEN = (
    b'data: {"id":"chatcmpl-5f0c2b7a9d1e4c36","object":"chat.completion.chunk","created":1750000000,"model":"'
    + MODEL.encode()
    + b'","sent_ns":%d,"choices":[{"index":0,"delta":{"content":" word%d"},"logprobs":null,"finish_reason":null}]}\n\n'
)


def answer(content: object, status: str = "200 OK", kind: str = "application/json") -> bytes:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


SHORT_ANSWER = answer(
    {
        "id": "chatcmpl-5f0c2b7a9d1e4c36",
        "object": "chat.completion",
        "created": 1750000000,
        "model": MODEL,
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "Four short words only."}, "finish_reason": "stop"}
        ],
        "usage": {"prompt_tokens": 12, "completion_tokens": 6, "total_tokens": 18},
    }
)


def field(body: bytes, name: bytes) -> bytes | None:
    """The text of a top-level scalar by its last mention: prompts here never contain quotes."""
    at = body.rfind(b'"' + name + b'"')
    if at < 0:
        return None
    start = body.index(b":", at) + 1
    ends = [end for end in (body.find(b",", start), body.find(b"}", start)) if end >= 0]
    return body[start : min(ends)].strip()


class Ranks:
    """What is asked of each data-parallel rank."""

    def __init__(self, num_ranks: int) -> None:
        self.tokens = [0] * num_ranks
        self.running = [0] * num_ranks
        self.served = [0] * num_ranks
        self._turn = 0

    def place(self, asked: bytes | None) -> int:
        """The rank that was asked for, else the next; IndexError when there is no such rank."""
        if asked is None:
            self._turn = (self._turn + 1) % len(self.tokens)
            return self._turn
        rank = int(asked)
        if not 0 <= rank < len(self.tokens):
            raise IndexError(rank)
        return rank

    def start(self, rank: int, num_tokens: int) -> None:
        self.tokens[rank] += num_tokens
        self.running[rank] += 1

    def end(self, rank: int, num_tokens: int) -> None:
        self.tokens[rank] -= num_tokens
        self.running[rank] -= 1


class Stream:
    """One streamed answer; `send` writes the next token and says whether more follow."""

    __slots__ = ("connection", "num_charged", "num_left", "num_sent", "rank")

    def __init__(self, connection: Connection, num_tokens: int, rank: int, num_charged: int) -> None:
        self.connection = connection
        self.num_left = num_tokens
        self.num_sent = 0
        self.rank = rank
        self.num_charged = num_charged

    def send(self) -> bool:
        transport = self.connection.transport
        if transport is None or transport.is_closing():
            return False
        self.num_sent += 1
        self.num_left -= 1
        event = TOKEN % (time.monotonic_ns(), self.num_sent)
        chunk = b"%x\r\n%b\r\n" % (len(event), event)
        transport.write(chunk if self.num_left else chunk + LAST_CHUNKS)
        return self.num_left > 0


class Wheel:
    """Streams spread over the slots of an interval, so that tokens leave evenly and not all at once."""

    def __init__(self, interval_s: float, ended: Callable[[Stream], None]) -> None:
        num_slots = max(1, min(round(interval_s / TICK_S), MAX_SLOTS))
        self._tick_s = interval_s / num_slots
        self._slots: list[list[Stream]] = [[] for _ in range(num_slots)]
        self._at = 0
        self._ended = ended

    def add(self, stream: Stream) -> None:
        """Send the first token now and the others an interval apart."""
        if stream.send():
            self._slots[self._at].append(stream)
        else:
            self._ended(stream)

    async def turn(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + self._tick_s, loop.time() - 1.0)
            await asyncio.sleep(max(due - loop.time(), 0.0))
            slot = (self._at + 1) % len(self._slots)
            streams, self._slots[slot] = self._slots[slot], []
            self._at = slot
            for stream in streams:
                self.add(stream)


class Worker:
    """State shared by all connections, and the routes that routers ask besides generation."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.ranks = Ranks(args.num_ranks)
        self.wheel = Wheel(args.interval_ms / 1000, self._ended)
        self.role: str = args.role
        self._info: dict[str, Any] = {
            "model_path": f"/models/{MODEL}",
            "served_model_name": MODEL,
            "tokenizer_path": "",
            "version": "0.5.23",
            "is_generation": True,
            "dp_size": args.num_ranks,
            "tp_size": 1,
            "max_running_requests": 16_384,
            "max_total_num_tokens": MAX_TOTAL_TOKENS,
            "load_balance_method": "round_robin",
            "disaggregation_mode": args.role,
            "disaggregation_bootstrap_port": 8998,
        }
        self.routes: dict[bytes, Callable[[], bytes]] = {
            b"/v1/loads": lambda: answer(self._loads()),
            b"/get_load": lambda: answer(self._get_load()),
            b"/metrics": lambda: answer(self._metrics(), kind="text/plain; version=0.0.4"),
            b"/v1/models": lambda: answer({"object": "list", "data": [self._model()]}),
            b"/counts": lambda: answer({"served": self.ranks.served, "running": self.ranks.running}),
        }
        for path in (b"/server_info", b"/get_server_info", b"/model_info", b"/get_model_info"):
            self.routes[path] = lambda: answer(self._info)
        for path in (b"/health", b"/health_generate", b"/ping"):
            self.routes[path] = lambda: answer(b"", kind="text/plain")

    def generate(self, connection: Connection, body: bytes, rank_header: bytes | None) -> bytes | None:
        """The whole answer, or None when a stream has begun."""
        asked = rank_header or field(body, b"routed_dp_rank") or field(body, b"data_parallel_rank")
        try:
            rank = self.ranks.place(asked)
        except (IndexError, ValueError):
            return answer({"error": {"message": f"no rank {asked!r}"}}, "400 Bad Request")
        self.ranks.served[rank] += 1
        if field(body, b"stream") != b"true":
            return SHORT_ANSWER
        asked_tokens = field(body, b"max_tokens") or field(body, b"max_completion_tokens")
        num_tokens = 1 if self.role == "prefill" else int(asked_tokens or 16)
        num_charged = len(body) // BYTES_PER_TOKEN + num_tokens
        self.ranks.start(rank, num_charged)
        assert connection.transport is not None
        connection.transport.write(STREAM_HEAD)
        self.wheel.add(Stream(connection, num_tokens, rank, num_charged))
        return None

    def _ended(self, stream: Stream) -> None:
        self.ranks.end(stream.rank, stream.num_charged)

    def _model(self) -> dict[str, object]:
        named = {"id": MODEL, "object": "model", "created": 1750000000, "owned_by": "sglang", "root": MODEL}
        return {**named, "max_model_len": 131_072}

    def _loads(self) -> dict[str, object]:
        now = time.time()
        loads = [
            {
                "timestamp": now,
                "dp_rank": rank,
                "num_running_reqs": running,
                "num_waiting_reqs": 0,
                "num_total_reqs": running,
                "num_waiting_uncached_tokens": 0,
                "num_used_tokens": tokens,
                "num_total_tokens": tokens,
                "num_active_tokens": tokens,
                "max_total_num_tokens": MAX_TOTAL_TOKENS,
                "max_running_requests": 16_384,
                "token_usage": tokens / MAX_TOTAL_TOKENS,
                "gen_throughput": 0.0,
                "cache_hit_rate": 0.0,
                "utilization": 0.0,
            }
            for rank, (running, tokens) in enumerate(zip(self.ranks.running, self.ranks.tokens, strict=True))
        ]
        return {"timestamp": str(now), "version": "0.5.23", "dp_rank_count": len(loads), "loads": loads}

    def _get_load(self) -> list[dict[str, int]]:
        pairs = zip(self.ranks.running, self.ranks.tokens, strict=True)
        return [
            {"dp_rank": rank, "num_reqs": running, "num_waiting_reqs": 0, "num_tokens": tokens}
            for rank, (running, tokens) in enumerate(pairs)
        ]

    def _metrics(self) -> bytes:
        waiting = [0] * len(self.ranks.tokens)
        columns = {
            "num_used_tokens": self.ranks.tokens,
            "num_running_reqs": self.ranks.running,
            "num_queue_reqs": waiting,
        }
        lines = []
        for name, values in columns.items():
            lines.append(f"# TYPE sglang:{name} gauge")
            lines += [
                f'sglang:{name}{{model_name="{MODEL}",dp_rank="{rank}",tp_rank="0"}} {float(value)}'
                for rank, value in enumerate(values)
            ]
        return ("\n".join(lines) + "\n").encode()


class Connection(asyncio.Protocol):
    __slots__ = ("_body", "_parser", "_path", "_rank", "_worker", "transport")

    def __init__(self, worker: Worker) -> None:
        self.transport: asyncio.Transport | None = None
        self._worker = worker
        self._parser = httptools.HttpRequestParser(self)
        self._path = b""
        self._rank: bytes | None = None
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if self.transport is not None:
                self.transport.write(answer({"error": {"message": str(error)}}, "400 Bad Request"))
                self.transport.close()

    def on_url(self, url: bytes) -> None:
        self._path = url

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(name) == 20 and name.lower() == b"x-data-parallel-rank":
            self._rank = value
        elif len(name) == 6 and name.lower() == b"expect" and self.transport is not None:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        if self.transport is None:
            return
        path, rank, body = self._path, self._rank, b"".join(self._body)
        self._rank = None
        self._body.clear()
        if path in GENERATION:
            whole = self._worker.generate(self, body, rank)
        else:
            route = self._worker.routes.get(path.partition(b"?")[0])
            whole = route() if route else answer({"detail": "Not Found"}, "404 Not Found")
        if whole is not None:
            self.transport.write(whole)


async def serve(args: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    worker = Worker(args)
    server = await loop.create_server(lambda: Connection(worker), "127.0.0.1", args.port, backlog=BACKLOG)
    async with server:
        await worker.wheel.turn()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--num-ranks", type=int, default=4)
    parser.add_argument("--interval-ms", type=float, default=10.0, help="time between two tokens of a stream")
    parser.add_argument("--role", choices=("null", "prefill", "decode"), default="null")
    gc.freeze()
    uvloop.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
