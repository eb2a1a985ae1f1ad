"""What all exchanges share, and the way from a client's request to whoever answers it.

serve ── a path of workers ──> Exchange          refuse: what is no acceptable HTTP
      ── one of the gateway's own ──> OwnExchange, a task that ends when the client leaves
"""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import TYPE_CHECKING

from equipoise.errors import InternalError, LoopError, RequestError
from equipoise.gateway.http.client import ClientConnection, ClientLimits
from equipoise.gateway.http.request import ClientRequest, RequestHead, marked_names
from equipoise.gateway.http.wire import error_headers
from equipoise.gateway.relay.exchange import Exchange
from equipoise.gateway.relay.lines import exchange_line
from equipoise.gateway.relay.queue import FairQueue
from equipoise.gateway.relay.retry import Retries, RetryRules
from equipoise.gateway.relay.routes import NO_ENDPOINT, Answer, Endpoint

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable

    from equipoise.config.gateway import GatewayConfig
    from equipoise.gateway.fleet.router import Outcome
    from equipoise.gateway.http.request import Refusal
    from equipoise.gateway.operate.access_log import AccessLog
    from equipoise.gateway.operate.metrics import GatewayMetrics
    from equipoise.gateway.relay.count import PromptCounter
    from equipoise.gateway.relay.intake import Intake
    from equipoise.gateway.relay.routes import Handler, Routes
    from equipoise.gateway.relay.sweep import Sweep
    from equipoise.gateway.relay.tries import Way
    from equipoise.gateway.transport import Header
    from equipoise.route.lengths import Lengths

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlaneLimits:
    """Seconds that a request may take: in the queue, until the first byte of its answer, between two reads of it, in
    all (None: any)."""

    queue_s: float = 60.0
    first_token_s: float = 600.0
    between_tokens_s: float = 120.0
    total_s: float | None = None


@dataclass(frozen=True, slots=True)
class PlaneSettings:
    """Everything that the data plane is told; header names in lower case."""

    limits: PlaneLimits = field(default_factory=PlaneLimits)
    client: ClientLimits = field(default_factory=ClientLimits)
    retry: RetryRules = field(default_factory=RetryRules)
    max_inflight: int | None = None
    max_queue: int = 1024
    fairness_header: bytes = b"authorization"
    session_header: bytes = b"x-session-id"
    seed: int = 0


def plane_settings(config: GatewayConfig) -> PlaneSettings:
    """The settings that concern the data plane."""
    limits, queue = config.limits, config.queue
    return PlaneSettings(
        PlaneLimits(
            queue.queue_timeout_s,
            limits.first_token_timeout_s,
            limits.between_tokens_timeout_s,
            limits.request_timeout_s,
        ),
        ClientLimits(int(config.front.max_body_mb * 2**20), limits.client_timeout_s, limits.keep_alive_s),
        RetryRules(limits.max_retries, limits.retry_delay_s, limits.retry_max_delay_s),
        queue.max_inflight,
        queue.max_queue,
        queue.fairness_header.lower().encode(),
        config.routing.session_header.lower().encode(),
        config.routing.routing_seed,
    )


class Plane:
    """The Front of all clients' connections. Belongs to the running loop.

    Give `connection` to loop.create_server. To stop: close the server, `drain`, wait until `num_busy` is 0 or long
    enough, `close`."""

    def __init__(
        self,
        way: Way,
        lengths: Lengths,
        sweep: Sweep,
        metrics: GatewayMetrics,
        routes: Routes,
        settings: PlaneSettings | None = None,
        access_log: AccessLog | None = None,
        counter: PromptCounter | None = None,
    ) -> None:
        settings = settings or PlaneSettings()
        self.loop = asyncio.get_running_loop()
        self.way = way
        self.lengths = lengths
        self.sweep = sweep
        self.metrics = metrics
        self.limits = settings.limits
        self.client_limits = settings.client
        self._fairness_header = settings.fairness_header
        self._session_header = settings.session_header
        self.marked = marked_names((settings.fairness_header, settings.session_header))
        self.retries = Retries(settings.retry, Random(settings.seed))
        self.queue: FairQueue[Exchange] = FairQueue(settings.max_inflight, settings.max_queue, Exchange.displaced)
        self.is_draining = False
        self._routes = routes
        self._access_log = access_log
        self._counter = counter
        self._exchanges: dict[Exchange, None] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._connections: dict[ClientConnection, None] = {}
        self._id_prefix = os.urandom(6).hex().encode()
        self._ids = count(1)
        self._via = (b"via", b"1.1 equipoise-" + self._id_prefix)

    @property
    def num_busy(self) -> int:
        """Requests that are not answered yet."""
        return len(self._exchanges) + len(self._tasks)

    def num_prompt(self, intake: Intake) -> int:
        """Tokens of a prompt that is text: counted where there is a tokenizer, else by its bytes."""
        if self._counter is not None:
            counted = self._counter.count(intake.prompt)
            if counted is not None:
                return counted
        return self.lengths.num_prompt(intake.model, intake.num_prompt_bytes)

    def learn(self, intake: Intake, num_prompt: int, num_output: int | None) -> None:
        """An answer told its tokens: later requests for the model are expected to be like it."""
        per_choice = None if num_output is None else num_output // intake.num_choices
        num_bytes = intake.num_prompt_bytes if intake.num_prompt_ids is None else 0
        self.lengths.learn(intake.model, num_bytes, num_prompt, per_choice)

    def connection(self) -> ClientConnection:
        """A protocol for a new client."""
        return ClientConnection(self)

    def drain(self) -> None:
        """From now on each answer is the last one on its connection; idle connections close at once, what queues is
        refused."""
        self.is_draining = True
        for exchange in list(self._exchanges):
            exchange.drain()
        for connection in list(self._connections):
            connection.drain()

    def close(self) -> None:
        """End all that still runs, with an error where nothing was sent yet, and close all connections."""
        self.is_draining = True
        for exchange in list(self._exchanges):
            exchange.shut_down()
        for task in self._tasks:
            task.cancel()
        for connection in list(self._connections):
            connection.close()

    # The Front

    def opened(self, client: ClientConnection) -> None:
        """See Front."""
        self._connections[client] = None
        self.metrics.num_accepted += 1
        self.metrics.num_connections += 1

    def closed(self, client: ClientConnection) -> None:
        """See Front."""
        if self._connections.pop(client, self) is None:
            self.metrics.num_connections -= 1

    def serve(self, client: ClientConnection, request: ClientRequest) -> None:
        """See Front."""
        if not request.request_id:
            request.request_id = b"%b-%x" % (self._id_prefix, next(self._ids))
        endpoint = request.head.endpoint
        if endpoint is None:
            try:
                endpoint = self._look_into(request.head)
            except RequestError as error:
                self._answer_error(client, request, error, NO_ENDPOINT)
                return
        if endpoint.handler is not None:
            self._serve_own(client, request, endpoint, endpoint.handler)
            return
        exchange = Exchange(self, client, request, endpoint)
        client.served = exchange
        self._exchanges[exchange] = None
        exchange.begin(self.loop.time())

    def refuse(self, client: ClientConnection, refusal: Refusal) -> None:
        """See Front."""
        head = RequestHead(b"", b"", [], [])
        head.keeps_alive = False
        request = ClientRequest(head)
        request.request_id = b"%b-%x" % (self._id_prefix, next(self._ids))
        self._answer_error(client, request, refusal.error, NO_ENDPOINT)

    def _look_into(self, head: RequestHead) -> Endpoint:
        """What answers requests with `head`, which hears what the plane makes of it. Raises RequestError."""
        if head.via and self._via[1] in head.via:
            raise LoopError("the request came back to this gateway: it is one of its own workers")
        endpoint = self._routes.find(head.method, head.path)
        if endpoint.handler is None:
            head.headers.append(self._via)
        head.fairness_key = head.marked_value(self._fairness_header) or b""
        head.session = head.marked_value(self._session_header)
        head.method_text, head.target_text = head.method.decode(), head.target.decode(errors="replace")
        head.endpoint = endpoint
        return endpoint

    # Ends

    def ended(self, exchange: Exchange, outcome: Outcome, now: float) -> None:
        """An exchange is over, however it ended: its place goes to the next one in the queue, metrics and log hear of
        it."""
        del self._exchanges[exchange]
        queue = self.queue
        if exchange.has_place:
            queue.leave(now)
            while queue.num_waiting and (following := queue.next()) is not None:
                following.let_through()
        else:
            queue.withdraw(exchange)
        metrics = self.metrics
        metrics.num_queued = queue.num_waiting
        worker = exchange.worker
        if exchange.status:
            metrics.answered(exchange.endpoint.name, "" if worker is None else worker.url, exchange.status)
        if outcome == "cancelled":
            metrics.num_clients_gone += 1
        elif outcome == "ok" and exchange.endpoint.generates:
            started_at, first_at = exchange.started_at, exchange.first_byte_at
            metrics.generated(
                exchange.model or "",
                exchange.num_prompt or exchange.ask.prompt,
                exchange.num_output or 0,
                now - started_at,
                first_at - started_at if first_at is not None and exchange.intake.is_stream else None,
                exchange.num_cached,
            )
        if self._access_log is not None:
            self._access_log.write(exchange_line(exchange, outcome, now))

    def write_error(
        self, client: ClientConnection, request: ClientRequest, error: RequestError, endpoint: Endpoint
    ) -> None:
        """Answer with an error of the gateway's own."""
        headers = error_headers(error)
        if error.status == 405:
            headers.append((b"allow", self._routes.allowed(request.path)))
        elif error.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        self._write(client, request, error.status, headers, endpoint.error_body(error))

    def _write(
        self,
        client: ClientConnection,
        request: ClientRequest,
        status: int,
        headers: Iterable[Header],
        body: bytes,
    ) -> None:
        writer = client.writer
        length = (b"content-length", b"%d" % len(body))
        writer.begin(request, status, (*headers, length), not self.is_draining)
        if body:
            writer.send(body)
        writer.end()

    def _answer_error(
        self, client: ClientConnection, request: ClientRequest, error: RequestError, endpoint: Endpoint
    ) -> None:
        self.write_error(client, request, error, endpoint)
        self.metrics.answered(endpoint.name, "", error.status)
        self.metrics.refused[error.code or str(error.status)] += 1
        client.answered()

    # Own routes

    def _serve_own(
        self, client: ClientConnection, request: ClientRequest, endpoint: Endpoint, handler: Handler
    ) -> None:
        try:
            answer = handler(request)
        except RequestError as error:
            self._answer_error(client, request, error, endpoint)
            return
        except Exception:
            self._answer_bug(client, request, endpoint)
            return
        if isinstance(answer, Answer):
            self._answer(client, request, endpoint, answer)
            return
        task = self.loop.create_task(self._answer_later(client, request, endpoint, answer))
        self._tasks[task] = None
        task.add_done_callback(self._own_done)
        client.served = OwnExchange(task)

    async def _answer_later(
        self, client: ClientConnection, request: ClientRequest, endpoint: Endpoint, answer: Awaitable[Answer]
    ) -> None:
        try:
            self._answer(client, request, endpoint, await answer)
        except RequestError as error:
            self._answer_error(client, request, error, endpoint)
        except Exception:
            self._answer_bug(client, request, endpoint)

    def _answer_bug(self, client: ClientConnection, request: ClientRequest, endpoint: Endpoint) -> None:
        """Call it where the exception is handled: the log gets it."""
        log.exception("%s failed", endpoint.name)
        error = InternalError("the gateway failed to answer, its log says why")
        self._answer_error(client, request, error, endpoint)

    def _answer(self, client: ClientConnection, request: ClientRequest, endpoint: Endpoint, answer: Answer) -> None:
        self.metrics.answered(endpoint.name, "", answer.status)
        self._write(client, request, answer.status, answer.headers, answer.body)
        client.answered()

    def _own_done(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled():
            task.result()


class OwnExchange:
    """A request that the gateway answers itself."""

    __slots__ = ("_task",)

    def __init__(self, task: asyncio.Task[None]) -> None:
        self._task = task

    def client_gone(self) -> None:
        """See Served."""
        self._task.cancel()

    def pause(self) -> None:
        """Its answer comes in one piece."""

    def resume(self) -> None:
        """Its answer comes in one piece."""
