"""A data plane on real sockets before workers whose every byte a test decides."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING

from equipoise.config.worker import WorkerSpec
from equipoise.gateway.fleet.fleet import Fleet, FleetLimits
from equipoise.gateway.fleet.outliers import OutlierLimits
from equipoise.gateway.fleet.policies import make_policies
from equipoise.gateway.fleet.router import Router
from equipoise.gateway.fleet.slow_start import SlowStartLimits
from equipoise.gateway.fleet.worker import Found, rank_place
from equipoise.gateway.http.client import ClientLimits
from equipoise.gateway.http.descriptors import Descriptors
from equipoise.gateway.http.pool import Pool, PoolLimits
from equipoise.gateway.operate.metrics import GatewayMetrics
from equipoise.gateway.relay.plane import Plane, PlaneLimits, PlaneSettings
from equipoise.gateway.relay.retry import RetryRules
from equipoise.gateway.relay.routes import Answer, worker_routes
from equipoise.gateway.relay.sweep import Sweep
from equipoise.gateway.relay.way import OneLeg
from equipoise.route.lengths import Lengths

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from equipoise.gateway.fleet.worker import Worker
    from equipoise.gateway.operate.access_log import AccessLog

WAIT_S = 20.0
"""Longest that a test waits for what must happen."""
MODEL = "m"
BODY = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}).encode()
STREAM = json.dumps({"model": MODEL, "messages": [], "stream": True}).encode()
OK_BODY = b'{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}'
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(OK_BODY), OK_BODY)
SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def answer(status: int, body: bytes = b"", *headers: bytes) -> bytes:
    """A whole answer of a worker."""
    lines = b"".join(header + b"\r\n" for header in headers)
    return b"HTTP/1.1 %d X\r\n%bContent-Length: %d\r\n\r\n%b" % (status, lines, len(body), body)


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def post(body: bytes = BODY, path: str = "/v1/chat/completions", *headers: str) -> bytes:
    """A whole request of a client."""
    lines = "".join(f"{header}\r\n" for header in headers)
    head = f"POST {path} HTTP/1.1\r\nHost: gateway\r\n{lines}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


class Peer:
    """One connection, from either end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def head(self) -> bytes:
        """The next head, its blank line included."""
        async with asyncio.timeout(WAIT_S):
            return await self.reader.readuntil(b"\r\n\r\n")

    async def exactly(self, num_bytes: int) -> bytes:
        async with asyncio.timeout(WAIT_S):
            return await self.reader.readexactly(num_bytes)

    async def message(self) -> tuple[bytes, bytes]:
        """The next head and its body, framed by Content-Length or chunks; heads of 1xx are messages too."""
        head = await self.head()
        fields = head.lower()
        if b"transfer-encoding: chunked" in fields:
            return head, await self._chunks()
        at = fields.find(b"content-length:")
        if at < 0:
            return head, b""
        return head, await self.exactly(int(fields[at + 15 : fields.index(b"\r\n", at)]))

    async def _chunks(self) -> bytes:
        body = b""
        while True:
            async with asyncio.timeout(WAIT_S):
                line = await self.reader.readuntil(b"\r\n")
            size = int(line, 16)
            if size == 0:
                while (await self.reader.readuntil(b"\r\n")) != b"\r\n":
                    pass
                return body
            body += (await self.exactly(size + 2))[:-2]

    async def rest(self) -> bytes:
        """All that comes until the other side closes; what came before a reset counts."""
        data = b""
        async with asyncio.timeout(WAIT_S):
            with contextlib.suppress(ConnectionError):
                while piece := await self.reader.read(65536):
                    data += piece
        return data

    async def closed(self) -> bool:
        """Waits until the other side closed; whether that came with a reset."""
        async with asyncio.timeout(WAIT_S):
            try:
                while await self.reader.read(65536):
                    pass
            except ConnectionError:
                return True
        return False

    def reset(self) -> None:
        """Close without a goodbye."""
        self.writer.transport.abort()

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


class ScriptedWorker:
    """Runs `script` for each connection, ends it when the other side leaves. Without one it answers OK to everything.

    seen: the requests that `take` read, head and body."""

    def __init__(self, script: Callable[[ScriptedWorker, Peer], Awaitable[None]] | None = None) -> None:
        self.script = script or ScriptedWorker.ok
        self.num_connections = 0
        self.seen: list[tuple[bytes, bytes]] = []
        self.port = 0
        self._is_stopping = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=1 << 26)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Listen no more and drop all connections."""
        self._is_stopping = True
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # what was closed has still to be let go

    async def ok(self, peer: Peer) -> None:
        """Answer everything with OK."""
        while True:
            await self.take(peer)
            peer.send(OK)

    async def take(self, peer: Peer) -> tuple[bytes, bytes]:
        """The next request, remembered."""
        message = await peer.message()
        self.seen.append(message)
        return message

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self.script(self, Peer(reader, writer))
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort() if self._is_stopping else writer.close()
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()


class Stage:
    """The gateway's data plane with its workers."""

    def __init__(self, plane: Plane, fleet: Fleet, metrics: GatewayMetrics, sweep: Sweep, port: int) -> None:
        self.plane = plane
        self.fleet = fleet
        self.metrics = metrics
        self.sweep = sweep
        self.port = port
        self._peers: list[Peer] = []

    async def connect(self) -> Peer:
        """A client; it is closed in the end."""
        peer = Peer(*await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 26))
        self._peers.append(peer)
        return peer

    async def leave(self) -> None:
        """Close all clients."""
        for peer in self._peers:
            peer.reset()
            await peer.close()

    async def ask(self, request: bytes | None = None) -> tuple[bytes, bytes]:
        """Head and body of the answer to one request on a connection of its own."""
        peer = await self.connect()
        peer.send(post() if request is None else request)
        message = await peer.message()
        await peer.close()
        return message

    def worker(self, number: int = 0) -> Worker:
        return self.fleet.workers[number]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for what must happen."""
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(0.005)

    async def is_at_rest(self) -> None:
        """Everything that requests took is given back."""
        await self.until(lambda: not self.plane.num_busy)
        assert self.plane.queue.num_inflight == self.plane.queue.num_waiting == self.sweep.num_running == 0
        for worker in self.fleet.workers:
            assert worker.num_inflight == 0
            assert [(rank.active, rank.num_active) for rank in worker.load.ranks] == [(0, 0)] * len(worker.load.ranks)


FAST = RetryRules(max_retries=3, delay_s=0.001, max_delay_s=1.5)


@contextlib.asynccontextmanager
async def staged(
    *workers: ScriptedWorker,
    limits: PlaneLimits | None = None,
    client: ClientLimits | None = None,
    retry: RetryRules = FAST,
    pool: PoolLimits | None = None,
    max_inflight: int | None = None,
    max_queue: int = 1024,
    num_ranks: int = 1,
    access_log: AccessLog | None = None,
) -> AsyncIterator[Stage]:
    """A data plane before `workers`, which it starts; requests go round them in turn."""
    loop = asyncio.get_running_loop()
    sweep = Sweep(0.02, 0.05)
    off = FleetLimits(slow_start=SlowStartLimits(0), outliers=OutlierLimits(interval_s=0))
    descriptors = Descriptors()
    fleet = Fleet(lambda host, port: Pool(host, port, pool or PoolLimits(), sweep, descriptors), off)
    policies = make_policies("round_robin", "round_robin", 0)
    router = Router(fleet, {"mixed": policies, "prefill": policies, "decode": policies})
    places = tuple(rank_place(rank, "routed_dp_rank") for rank in range(num_ranks)) if num_ranks > 1 else ()
    for scripted in workers:
        await scripted.start()
        worker = fleet.add(WorkerSpec(scripted.url), loop.time())
        fleet.found(worker, Found("sglang", (MODEL,), tuple(range(num_ranks)), places), loop.time())
    routes = worker_routes()
    routes.own("GET", "/health", lambda request: Answer(200, b"{}"))
    settings = PlaneSettings(
        limits or PlaneLimits(), client or ClientLimits(), retry, max_inflight=max_inflight, max_queue=max_queue
    )
    metrics = GatewayMetrics(descriptors=descriptors)
    plane = Plane(OneLeg(router), Lengths(), sweep, metrics, routes, settings, access_log)
    server = await loop.create_server(plane.connection, "127.0.0.1", 0)
    stage = Stage(plane, fleet, metrics, sweep, server.sockets[0].getsockname()[1])
    try:
        yield stage
    finally:
        await stage.leave()
        server.close()
        plane.close()
        fleet.close()
        sweep.close()
        for scripted in workers:
            await scripted.stop()
