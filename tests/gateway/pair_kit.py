"""A data plane in memory before workers whose answers a test tells piece by piece: nothing goes over a socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
from random import Random
from typing import TYPE_CHECKING, Any

import httptools
from tests.gateway.plane_kit import post
from tests.gateway.pure_fleet import AT_ONCE

from equipoise.config.worker import WorkerSpec
from equipoise.gateway.fleet.fleet import Fleet
from equipoise.gateway.fleet.policies import make_policies
from equipoise.gateway.fleet.router import Router
from equipoise.gateway.fleet.worker import Found, rank_place
from equipoise.gateway.operate.metrics import GatewayMetrics
from equipoise.gateway.relay.pairs import Pairs
from equipoise.gateway.relay.plane import Plane, PlaneLimits, PlaneSettings
from equipoise.gateway.relay.retry import RetryRules
from equipoise.gateway.relay.rooms import Rooms
from equipoise.gateway.relay.routes import worker_routes
from equipoise.gateway.relay.sweep import Sweep
from equipoise.route.lengths import Lengths

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from equipoise.config.worker import WorkerRole
    from equipoise.gateway.fleet.worker import Kind, Worker
    from equipoise.gateway.transport import Header, Leg, Outgoing, Phase

MODEL = "m"
JSON = [(b"content-type", b"application/json")]
SSE = [(b"content-type", b"text/event-stream")]
EVENT = b'data: {"x":1}\n\n'


class FakeCall:
    """One try at a worker, played by the test; as strict as the protocol allows."""

    def __init__(self, outgoing: Outgoing, leg: Leg) -> None:
        self.outgoing = outgoing
        self.leg = leg
        self.has_head = self.is_over = self.is_aborted = self.is_paused = False

    @property
    def is_live(self) -> bool:
        return not (self.is_over or self.is_aborted)

    @property
    def fields(self) -> dict[str, Any]:
        """The body that was sent."""
        return json.loads(self.outgoing.body)  # type: ignore[no-any-return]

    @property
    def rank(self) -> bytes | None:
        """The rank in the headers."""
        return dict(self.outgoing.headers).get(b"X-Data-Parallel-Rank")

    def head(self, status: int = 200, headers: Iterable[Header] = JSON) -> None:
        assert self.is_live
        assert not self.has_head
        self.has_head = True
        self.leg.head(status, [*headers])
        self._flush()

    def body(self, data: bytes) -> None:
        assert self.is_live
        assert self.has_head
        self.leg.body(data)
        self._flush()

    def end(self) -> None:
        assert self.is_live
        assert self.has_head
        self.is_over = True
        self.leg.ended([])

    def fail(self, phase: Phase = "worker", reason: str = "it broke") -> None:
        assert self.is_live
        self.is_over = True
        self.leg.failed(phase, reason)

    def answer(self, status: int = 200, data: bytes = b"{}", headers: Iterable[Header] = JSON) -> None:
        """All of an answer in one read, as far as it is wanted."""
        assert self.is_live
        self.has_head = True
        self.leg.head(status, [*headers, (b"content-length", b"%d" % len(data))])
        if self.is_live:
            self.leg.body(data)
        if self.is_live:
            self.end()

    def _flush(self) -> None:
        if self.is_live:
            self.leg.flush()

    # Call

    def abort(self) -> None:
        assert self.is_live, "a call that is over was aborted"
        self.is_aborted = True

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False


class FakeTransport:
    """Remembers its calls, in order."""

    def __init__(self) -> None:
        self.calls: list[FakeCall] = []

    def start(self, outgoing: Outgoing, leg: Leg) -> FakeCall:
        self.calls.append(FakeCall(outgoing, leg))
        return self.calls[-1]

    def close(self) -> None:
        for call in self.calls:
            if call.is_live:
                call.fail("worker", "the gateway closed its connections")


class Client(asyncio.Transport):
    """A client's connection; what it was sent is parsed when asked for."""

    def __init__(self, plane: Plane) -> None:
        super().__init__()
        self.sent = b""
        self.is_closed = False
        self._protocol = plane.connection()
        self._protocol.connection_made(self)

    def ask(self, request: bytes) -> None:
        self._protocol.data_received(request)

    def leave(self) -> None:
        self._close()

    def slow_down(self) -> None:
        self._protocol.pause_writing()

    def catch_up(self) -> None:
        self._protocol.resume_writing()

    def answers(self) -> list[tuple[int, bytes]]:
        """Status and body of each answer that is complete."""
        return self._parse().whole

    def num_ends(self) -> int:
        """Answers that are complete, and one that is cut."""
        parsed = self._parse()
        return len(parsed.whole) + int(self.is_closed and parsed.is_open)

    def error(self) -> str:
        """The message of the only answer, an error of the gateway's own."""
        ((_, body),) = self.answers()
        return str(json.loads(body)["error"]["message"])

    def _parse(self) -> _Parsed:
        parsed = _Parsed()
        parsed.parser.feed_data(self.sent)
        return parsed

    def _close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._protocol.connection_lost(None)

    # asyncio.Transport

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        self.sent += data

    def close(self) -> None:
        asyncio.get_running_loop().call_soon(self._close)

    def abort(self) -> None:
        self.close()

    def is_closing(self) -> bool:
        return self.is_closed

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else default

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class _Parsed:
    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.whole: list[tuple[int, bytes]] = []
        self.is_open = False
        self.body = b""

    def on_message_begin(self) -> None:
        self.is_open = True
        self.body = b""

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.is_open = False
        self.whole.append((self.parser.get_status_code(), self.body))


class PairStage:
    """Plane, fleet and workers of one test; workers and transports in the order of joining."""

    def __init__(self, limits: PlaneLimits, retry: RetryRules, worker_policy: str, rank_policy: str) -> None:
        self.loop = asyncio.get_running_loop()
        self.sweep = Sweep(3600.0, 3600.0)
        self.transports: list[FakeTransport] = []
        self.workers: list[Worker] = []
        self.fleet = Fleet(self._open, AT_ONCE)
        policies = make_policies(worker_policy, rank_policy, 0)
        self.router = Router(self.fleet, {"mixed": policies, "prefill": policies, "decode": policies})
        self.metrics = GatewayMetrics()
        self.rooms = Rooms(Random(0))
        self.way = Pairs(self.router, self.fleet, self.sweep, self.metrics, self.rooms, self.loop.time)
        settings = PlaneSettings(limits, retry=retry)
        self.plane = Plane(self.way, Lengths(), self.sweep, self.metrics, worker_routes(), settings)

    def _open(self, host: str, port: int) -> FakeTransport:
        self.transports.append(FakeTransport())
        return self.transports[-1]

    def join(self, role: WorkerRole, num_ranks: int = 1, kind: Kind = "sglang", model: str = MODEL) -> Worker:
        """A worker that is ready."""
        name = f"{role}-{len(self.workers)}"
        port = 8998 if role == "prefill" else None
        worker = self.fleet.add(WorkerSpec(f"http://{name}:1", role, bootstrap_port=port), self.loop.time())
        self.workers.append(worker)
        places = tuple(rank_place(rank, "routed_dp_rank") for rank in range(num_ranks)) if num_ranks > 1 else ()
        found = Found(kind, (model,), tuple(range(num_ranks)), places)
        self.fleet.found(worker, found, self.loop.time())
        return worker

    def calls(self, role: WorkerRole) -> list[FakeCall]:
        """Of all workers of a role, in the order of the workers."""
        return [
            call
            for worker, transport in zip(self.workers, self.transports, strict=True)
            if worker.role == role
            for call in transport.calls
        ]

    def legs(self) -> tuple[FakeCall, FakeCall]:
        """The only calls that are live: prefill's and decode's."""
        live = [[call for call in self.calls(role) if call.is_live] for role in ("prefill", "decode")]
        ((prefill,), (decode,)) = live
        return prefill, decode

    def client(self, body: dict[str, Any] | None = None, path: str = "/v1/chat/completions", *headers: str) -> Client:
        """A client that has sent a request."""
        client = Client(self.plane)
        given = {"model": MODEL, "messages": [], "max_tokens": 5} if body is None else body
        client.ask(post(json.dumps(given).encode(), path, *headers))
        return client

    def charged(self, worker: Worker) -> int:
        return sum(rank.active for rank in worker.load.ranks)

    async def settle(self) -> None:
        """Let everything happen that is due."""
        for _ in range(4):
            await asyncio.sleep(0)

    def sweep_at(self, later_s: float) -> None:
        """The periodic pass, so much later."""
        for checked in list(self.sweep._running):
            checked.check(self.loop.time() + later_s)

    def assert_at_rest(self) -> None:
        """Everything that requests took is given back, once."""
        assert self.plane.num_busy == self.rooms.num_taken == self.sweep.num_running == 0
        for worker in self.workers:
            assert worker.num_inflight == 0
            assert all(rank.active == rank.num_active == 0 for rank in worker.load.ranks)
        calls = self.calls("prefill") + self.calls("decode")
        assert sum(self.metrics.legs.values()) == sum("bootstrap_room" in call.fields for call in calls)


@contextlib.asynccontextmanager
async def pair_stage(
    num_prefills: int = 2,
    num_decodes: int = 2,
    num_ranks: int = 1,
    *,
    limits: PlaneLimits | None = None,
    max_retries: int = 3,
    worker_policy: str = "round_robin",
    rank_policy: str = "round_robin",
) -> AsyncIterator[PairStage]:
    """A stage with workers for both roles; all must be at rest in the end."""
    retry = RetryRules(max_retries=max_retries, delay_s=0.0, max_delay_s=0.0)
    stage = PairStage(limits or PlaneLimits(), retry, worker_policy, rank_policy)
    for _ in range(num_prefills):
        stage.join("prefill", num_ranks)
    for _ in range(num_decodes):
        stage.join("decode", num_ranks)
    try:
        yield stage
        await stage.settle()
        stage.assert_at_rest()
    finally:
        stage.plane.close()
        stage.fleet.close()
        stage.sweep.close()
