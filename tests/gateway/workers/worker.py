"""What every kind of test worker does: take a request, put it on a rank, answer it token by token, fail as told."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from typing import TYPE_CHECKING, Protocol

from tests.gateway.workers import shapes
from tests.gateway.workers.http import Answer, Request, Server
from tests.gateway.workers.quirks import (
    CUTS,
    FOREVER_S,
    SLOW_FEED_S,
    STATUSES,
    Dice,
    Quirks,
    changes_of,
    cut_before_head,
    cut_stream,
    from_flags,
    retry_after,
)
from tests.gateway.workers.ranks import Rank, Report, Reports
from tests.gateway.workers.record import Record, Seen

if TYPE_CHECKING:
    import argparse
    from collections.abc import Awaitable, Callable

    Own = Callable[[Request, Answer], Awaitable[None]]

ECHOED = ("/v1/rerank", "/rerank", "/v1/score", "/score", "/classify", "/v1/responses", "/v1/messages", "/pooling")


class RefusedError(Exception):
    """A request that the worker answers with an error of its own making."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Kind(Protocol):
    """What differs between the servers that are imitated."""

    def rank_named(self, request: Request, body: shapes.Body) -> int | None:
        """The rank that a request asks for. Raises RefusedError when there is no such rank."""

    def error(self, path: str, status: int, message: str) -> bytes:
        """The body of an error answer."""

    def owner(self) -> str:
        """`owned_by` in /v1/models."""

    def routes(self) -> dict[str, Own]:
        """Routes of its own; the load feeds are those in `feeds`."""

    def feeds(self) -> dict[str, Own]:
        """Routes that tell the load."""

    async def before(self, body: shapes.Body, rank: Rank) -> None:
        """What happens on the rank before the first token."""

    def input_logprobs(self, one: shapes.Generation) -> list[object]:
        """Of the prompt, in meta_info."""


class Worker:
    """The state of one process."""

    def __init__(self, flags: argparse.Namespace) -> None:
        self.flags = flags
        self.quirks: Quirks = from_flags(flags)
        self.dice = Dice(self.quirks, flags.seed)
        self.random = random.Random(flags.seed)
        self.ranks = [Rank(index, flags.max_running) for index in range(flags.dp_size)]
        self.reports = Reports(self.ranks)
        self.record = Record()
        self.born_at = time.monotonic()
        self.turn = 0
        self.kind: Kind

    # ---- dispatch

    async def handle(self, request: Request, answer: Answer) -> None:
        """Answer one request of any kind."""
        path = request.path
        if path == "/debug":
            await self._debug(request, answer)
        elif path in shapes.ROUTES or path == "/v1/embeddings":
            await self._generation(request, answer)
        else:
            self.record.poll(request)
            if path in self.kind.feeds():
                await self._feed(request, answer, self.kind.feeds()[path])
            elif not self.is_ready() and not path.startswith("/v1/models"):
                await answer.whole(503, self.kind.error(path, 503, "not ready yet"))
            else:
                await self._other(request, answer)

    def is_ready(self) -> bool:
        """Whether requests are served."""
        return self.quirks.is_healthy and time.monotonic() - self.born_at >= self.flags.ready_after_s

    async def _other(self, request: Request, answer: Answer) -> None:
        own = self.kind.routes().get(request.path)
        if own is not None:
            await own(request, answer)
        elif request.path in ("/health", "/health_generate", "/ping"):
            await answer.whole(200, b"", "text/plain")
        elif request.path == "/v1/models":
            model = {"id": self.flags.model, "object": "model", "created": shapes.CREATED, "max_model_len": 32768}
            model |= {"owned_by": self.kind.owner(), "root": self.flags.model, "parent": None}
            await answer.whole(200, json.dumps({"object": "list", "data": [model]}).encode())
        elif request.path in ECHOED:
            seen = self.record.begin(request)
            await answer.whole(200, json.dumps({"path": request.path, "echo": request.body.decode()}).encode())
            self.record.end(seen, "ended")
        else:
            await answer.whole(404, json.dumps({"detail": "Not Found"}).encode())

    async def _feed(self, request: Request, answer: Answer, feed: Own) -> None:
        how = self.quirks.load_feed
        if how == "500":
            await answer.whole(500, b"Internal Server Error", "text/plain")
        elif how == "garbage":
            await answer.whole(200, b'{"loads": [{"dp_rank": "x", num_used', "application/json")
        elif how == "missing":
            await answer.whole(404, json.dumps({"detail": "Not Found"}).encode())
        else:
            if how in ("slow", "hang"):
                await asyncio.sleep(SLOW_FEED_S if how == "slow" else FOREVER_S)
            await feed(request, answer)

    async def _debug(self, request: Request, answer: Answer) -> None:
        if request.method == "POST":
            try:
                self.quirks.change(changes_of(request.body))
            except ValueError as error:
                await answer.whole(400, str(error).encode(), "text/plain")
                return
        ranks = [
            {
                "rank": one.index,
                "served": one.served,
                "served_tokens": one.served_tokens,
                "peak": one.peak,
                "used": one.used,
                "running": one.running,
                "waiting": len(one.queue),
            }
            for one in self.ranks
        ]
        state = {"pid": os.getpid(), "now": time.monotonic(), "ranks": ranks, **self.record.as_json()}
        await answer.whole(200, json.dumps(state).encode())

    # ---- generation

    async def _generation(self, request: Request, answer: Answer) -> None:
        seen = self.record.begin(request)
        try:
            await self._answer(request, answer, seen)
        except RefusedError as refused:
            self.record.end(seen, "refused")
            if not answer.has_head:
                await answer.whole(refused.status, self.kind.error(request.path, refused.status, str(refused)))
            else:  # the status is gone: the error is an event
                await answer.chunk(b"data: " + self.kind.error(request.path, refused.status, str(refused)) + b"\n\n")
                await answer.end()
        except asyncio.CancelledError:
            self.record.end(seen, "failed" if answer.is_over else "left")
            raise

    async def _answer(self, request: Request, answer: Answer, seen: Seen) -> None:
        fault = self.dice.draw()
        if fault in CUTS:
            seen.outcome = f"fault {fault}"
            await cut_before_head(fault, answer)
            self.record.end(seen, "failed")
            return
        if fault in STATUSES:
            status = int(fault)
            headers = retry_after(self.quirks) if status in (429, 503) else ()
            payload = self.kind.error(request.path, status, f"told to answer {status}")
            await answer.whole(status, payload, "application/json", *headers)
            self.record.end(seen, "failed")
            return
        body = self._read(request)
        rank = self._place(request, body)
        seen.rank = rank.index
        if request.path == "/v1/embeddings":
            await self._embed(body, answer)
        else:
            await self._generate(request.path, body, rank, answer, seen, fault)
        self.record.end(seen, "failed" if fault else "ended")

    def _read(self, request: Request) -> shapes.Body:
        if request.method != "POST":
            raise RefusedError(405, "Method Not Allowed")
        if not self.is_ready():
            raise RefusedError(503, "The server is not ready")
        try:
            body = json.loads(request.body)
        except ValueError as error:
            raise RefusedError(400, f"Invalid JSON: {error}") from None
        if not isinstance(body, dict):
            raise RefusedError(400, "Input should be a valid dictionary")
        model = body.get("model")
        if request.path != shapes.GENERATE and model is not None and model != self.flags.model:
            raise RefusedError(404, f"The model `{model}` does not exist.")
        return body

    def _place(self, request: Request, body: shapes.Body) -> Rank:
        named = self.kind.rank_named(request, body)
        if named is None:
            live = [one for one in self.ranks if one.index not in self.quirks.dead_ranks]
            self.turn += 1
            return live[self.turn % len(live)]
        if named in self.quirks.dead_ranks:
            raise RefusedError(500, f"rank {named} is not active")
        return self.ranks[named]

    async def _embed(self, body: shapes.Body, answer: Answer) -> None:
        given = body.get("input")
        if given is None or given == "":
            raise RefusedError(400, "Input cannot be empty")
        texts = given if isinstance(given, list) else [given]
        data = [{"object": "embedding", "index": i, "embedding": [0.5, -0.5, len(t)]} for i, t in enumerate(texts)]
        usage = {"prompt_tokens": len(texts), "total_tokens": len(texts)}
        frame = {"object": "list", "data": data, "model": self.flags.model, "usage": usage}
        await answer.whole(200, json.dumps(frame).encode())

    def _generation_of(self, path: str, body: shapes.Body) -> shapes.Generation:
        asked = shapes.asked_tokens(path, body)
        if asked is not None and (not isinstance(asked, int) or asked < 1):
            raise RefusedError(400, f"max_tokens must be at least 1, got {asked}.")
        num_output = self.quirks.answer_tokens if asked is None else min(asked, self.quirks.answer_tokens)
        num_prompt = max(1, round(len(shapes.prompt_text(path, body).encode()) / self.flags.bytes_per_token))
        finish = "length" if num_output == asked else "stop"
        return shapes.Generation(path, body, num_prompt, num_output, finish, "." * self.quirks.padding_bytes)

    async def _generate(
        self, path: str, body: shapes.Body, rank: Rank, answer: Answer, seen: Seen, fault: str | None
    ) -> None:
        one = self._generation_of(path, body)
        seat = await rank.enter(one.num_prompt)
        try:
            await self.kind.before(body, rank)
            if self.quirks.ttft_s:
                await asyncio.sleep(self.quirks.ttft_s)
            logprobs = self.kind.input_logprobs(one)
            if body.get("stream"):
                answer.start(200, "text/event-stream; charset=utf-8", "cache-control: no-cache")
            if fault is not None and fault.endswith("after_head"):
                if not body.get("stream"):
                    answer.start(200, "application/json")
                await cut_stream(fault, answer)
                return
            for index in range(one.num_output):
                if fault is not None and index == (one.num_output + 1) // 2:
                    await cut_stream(fault, answer)
                    return
                if index and self.quirks.token_s:
                    await asyncio.sleep(self.quirks.token_s)
                rank.grow(seat)
                seen.num_tokens += 1
                if body.get("stream"):
                    await answer.chunk(shapes.event(one, index, logprobs))
            await self._finish(one, answer, logprobs)
        finally:
            rank.leave(seat)

    async def _finish(self, one: shapes.Generation, answer: Answer, logprobs: list[object]) -> None:
        if not one.body.get("stream"):
            await answer.whole(200, shapes.whole(one, logprobs), "application/json")
            return
        usage = shapes.usage_event(one)
        if usage is not None:
            await answer.chunk(usage)
        await answer.chunk(shapes.DONE)
        await answer.end()


def gauges(rows: list[tuple[str, str, float]]) -> bytes:
    """Prometheus text of (name, labels, value), grouped by name in order of first appearance."""
    names = list(dict.fromkeys(name for name, _, _ in rows))
    lines: list[str] = []
    for name in names:
        lines += [f"# HELP {name} As the real server has it.", f"# TYPE {name} gauge"]
        lines += [f"{one}{{{labels}}} {float(value)}" for one, labels, value in rows if one == name]
    return ("\n".join(lines) + "\n").encode()


def live(worker: Worker) -> list[Report]:
    """The reports of the ranks that are not dead."""
    taken = worker.reports.take(worker.quirks.frozen_loads_s)
    return [one for one in taken if one.rank not in worker.quirks.dead_ranks]


async def run(worker: Worker) -> None:
    """Listen, tell the port on stdout, serve until killed."""
    flags = worker.flags
    if flags.listen_after_s:
        await asyncio.sleep(flags.listen_after_s)
    server = Server(worker.handle, flags.max_per_connection)
    port = await server.listen(flags.host, flags.port)
    sys.stdout.write(f"listening on {port}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()
