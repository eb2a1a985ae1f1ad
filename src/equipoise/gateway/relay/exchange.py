"""One client request, from its last body byte to its last answer byte.

    begin ─> queue ─> intake ─> try ─> relay ─> end
                                 ^  │
                                 └──┘ again, elsewhere, while nothing has reached the client

The exchange is the Leg of its tries; how a try is run (one leg, or prefill and decode) is a Way. Whatever ends it
passes through `_end`, once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from equipoise.errors import NoDescriptorsError, QueueTimeoutError, UnavailableError
from equipoise.gateway.relay.intake import Intake
from equipoise.gateway.relay.retry import RETRIED_PHASES, is_retried, retry_after_s
from equipoise.gateway.relay.tries import BLAMELESS, Held, as_request_error, failure, outcome_of
from equipoise.gateway.relay.usage import read_usage, tail_of
from equipoise.route.policy import Ask
from equipoise.route.prefix import MIN_KEY_BYTES, prefix_keys

if TYPE_CHECKING:
    from asyncio import TimerHandle
    from collections.abc import Sequence

    from equipoise.errors import QueueFullError, RequestError
    from equipoise.gateway.fleet.router import Outcome, Route
    from equipoise.gateway.fleet.worker import Worker
    from equipoise.gateway.http.answer import AnswerWriter
    from equipoise.gateway.http.client import ClientConnection
    from equipoise.gateway.http.request import ClientRequest
    from equipoise.gateway.relay.plane import Plane
    from equipoise.gateway.relay.routes import Endpoint
    from equipoise.gateway.relay.tries import Try
    from equipoise.gateway.transport import Header, Phase

MAX_TRIED = 64
NO_INTAKE = Intake()
NO_ASK = Ask(0)
"""Of requests that no body was read of."""


class Exchange:
    """One request through its tries. Times are the loop's, in seconds; None while not yet.

    Read by metrics and log when it is over: request, endpoint, intake, ask, model; started_at, admitted_at,
    first_byte_at (of the answer's body), ended_at; num_tries; worker and rank that answered the last try, or failed;
    pair: its prefill and decode route, where it had two; status as the client saw it, 0 for none; failed_phase;
    error_code of an error of the gateway's own; num_prompt and num_output tokens, None where the answer does not say,
    num_cached of the prompt, as it says."""

    __slots__ = (
        "_before_last", "_held", "_is_paused", "_is_queued", "_is_stream", "_kept", "_last", "_moved", "_moved_at",
        "_plane", "_run", "_send", "_timer", "_writer", "admitted_at", "ask", "client", "ended_at", "endpoint",
        "error_code", "failed_phase", "first_byte_at", "has_place", "intake", "model", "num_cached", "num_events",
        "num_output", "num_prompt", "num_tries", "pair", "rank", "request", "started_at", "status", "tried", "try_at",
        "worker",
    )  # fmt: skip

    def __init__(self, plane: Plane, client: ClientConnection, request: ClientRequest, endpoint: Endpoint) -> None:
        self._plane = plane
        self.client = client
        self.request = request
        self.endpoint = endpoint
        self._writer: AnswerWriter = client.writer
        self._send = client.writer.send
        self._run: Try | None = None
        self._timer: TimerHandle | None = None
        self._held: Held | None = None  # of the try under way
        self._kept: Held | None = None  # of the last try that brought one
        self._is_queued = self._is_paused = self._is_stream = self._moved = False
        self._moved_at = 0.0
        self._last = self._before_last = b""
        self.intake: Intake = NO_INTAKE
        self.ask: Ask = NO_ASK
        self.model: str | None = None
        self.started_at = self.try_at = 0.0
        self.admitted_at: float | None = None
        self.first_byte_at: float | None = None
        self.ended_at: float | None = None
        self.num_tries = self.num_events = self.num_cached = 0
        self.tried: list[Worker] = []
        self.worker: Worker | None = None
        self.rank: int | None = None
        self.pair: tuple[Route, Route] | None = None
        self.status = 0
        self.has_place = False
        self.failed_phase: Phase | None = None
        self.error_code: str | None = None
        self.num_prompt: int | None = None
        self.num_output: int | None = None

    # From the queue to a worker

    def begin(self, now: float) -> None:
        """Take a place at the workers, or in the queue."""
        plane = self._plane
        self.started_at = now
        plane.sweep.add(self, None)
        try:
            if plane.queue.enter(self.request.head.fairness_key, self, now):
                self.has_place = True
                self._admitted(now)
            else:
                self._is_queued = True
        except Exception as error:
            self._refuse(as_request_error(error), now)

    def let_through(self) -> None:
        """It is the request's turn."""
        self._is_queued = False
        self.has_place = True
        self._plane.metrics.queue_wait.observe(self._plane.loop.time() - self.started_at)
        self._plane.loop.call_soon(self._proceed)

    def displaced(self, error: QueueFullError) -> None:
        """The queue gave the request's place to another key's."""
        self._refuse(error, self._plane.loop.time())

    def _proceed(self) -> None:
        if self.ended_at is None:
            now = self._plane.loop.time()
            try:
                self._admitted(now)
            except Exception as error:
                self._refuse(as_request_error(error), now)

    def _admitted(self, now: float) -> None:
        plane, endpoint = self._plane, self.endpoint
        self.admitted_at = now
        intake = self.intake = endpoint.read(self.request.body)
        model = self.model = intake.model
        self._is_stream = intake.is_stream
        num_prompt = intake.num_prompt_ids
        if num_prompt is None:
            num_prompt = plane.num_prompt(intake)
        num_output = 0
        if endpoint.generates:
            num_output = plane.lengths.num_output(model, intake.max_tokens) * intake.num_choices
        keys = prefix_keys(intake.prompt) if len(intake.prompt) >= MIN_KEY_BYTES and plane.way.wants_keys else ()
        self.ask = Ask(num_prompt, num_output, keys, self.request.head.session or intake.session)
        self._try(now)

    def _try(self, now: float) -> None:
        self.try_at = now
        self.num_tries += 1
        try:
            self._run = self._plane.way.start(self, now)
        except Exception as error:
            if self.num_tries == 1:
                self.num_tries = 0
            self._give_up(as_request_error(error), now)
            return
        if self._is_paused:
            self._run.pause()

    # What comes back: the Leg

    def head(self, status: int, headers: list[Header]) -> None:
        """Relay the answer from here on, or keep it back and try again."""
        if status >= 400 and is_retried(status):
            now = self._plane.loop.time()
            delay_s = self._plane.retries.delay_s(self.num_tries, now - self.admitted(), retry_after_s(headers))
            if delay_s is not None:
                self._held = Held(status, headers, delay_s)
                return
        self.status = status
        self._writer.begin(self.request, status, headers, not self._plane.is_draining)

    def body(self, data: bytes) -> None:
        """Gather a piece."""
        if self._held is not None:
            self._held.add(data)
            return
        if self.first_byte_at is None:
            self.first_byte_at = self._plane.loop.time()
        self._before_last = self._last
        self._last = data
        if self._is_stream:
            self.num_events += data.count(b"data:")
        self._send(data)

    def flush(self) -> None:
        """Write what was gathered."""
        self._moved = True
        self._writer.flush()

    def ended(self, trailers: list[Header]) -> None:
        """The answer is complete."""
        now = self._plane.loop.time()
        held = self._held
        if held is not None:
            self._held, self._kept = None, held
            self._again(outcome_of(held.status), str(held.status), held.delay_s, now)
            return
        self._writer.end(trailers)
        self._count_tokens()
        self._end(outcome_of(self.status), now)
        self.client.answered()

    def failed(self, phase: Phase, reason: str) -> None:
        """The try came to nothing."""
        now = self._plane.loop.time()
        workers = self._blamed()
        self.worker = workers[-1]
        error = failure(phase, reason, workers)
        self.failed_phase = phase
        if phase != "gateway":
            for worker in workers:
                self._plane.metrics.failed_tries[worker.url, phase] += 1
        outcome: Outcome = "cancelled" if phase in BLAMELESS else "failed"
        if self.is_begun:
            self._cut(error, outcome, now)
            return
        self.forget_answer()
        delay_s = None
        if phase in RETRIED_PHASES:
            delay_s = self._plane.retries.delay_s(self.num_tries, now - self.admitted())
        if delay_s is None:
            self._end_try(outcome, now)
            self._give_up(error, now)
        else:
            self._again(outcome, phase, delay_s, now)

    # What the client does: Served

    def client_gone(self) -> None:
        """Nobody waits for the answer any more."""
        if self._run is not None:
            self._run.abort()
        self._end("cancelled", self._plane.loop.time())

    def pause(self) -> None:
        """The client does not keep up."""
        self._is_paused = True
        if self._run is not None:
            self._run.pause()

    def resume(self) -> None:
        """It does again."""
        self._is_paused = False
        self._moved = True
        if self._run is not None:
            self._run.resume()

    # Time limits

    def check(self, now: float) -> None:
        """Act on what took too long."""
        limits = self._plane.limits
        if self._is_queued:
            if now - self.started_at > limits.queue_s:
                self._refuse(QueueTimeoutError(f"no worker was free within {limits.queue_s:g} s"), now)
        elif limits.total_s is not None and now - self.started_at > limits.total_s:
            self._time_out("total", f"no complete answer within {limits.total_s:g} s", now)
        elif self._run is None or self._is_paused:
            return
        elif self.first_byte_at is None:
            if now - self.try_at > limits.first_token_s:
                self._time_out("first_token", f"no answer within {limits.first_token_s:g} s", now)
        elif self._moved:
            self._moved = False
            self._moved_at = now
        elif now - self._moved_at > limits.between_tokens_s:
            self._time_out("between_tokens", f"nothing came for {limits.between_tokens_s:g} s", now)

    def drain(self) -> None:
        """The gateway is to stop: no worker will be free for what queues."""
        if self._is_queued:
            self.shut_down()

    def shut_down(self) -> None:
        """The gateway stops before the answer is complete."""
        if self.ended_at is not None:
            return
        if self._run is not None:
            self._run.abort()
        now = self._plane.loop.time()
        error = UnavailableError("the gateway is shutting down")
        if self.is_begun:
            self._cut(error, "cancelled", now)
        else:
            self._refuse(error, now, "cancelled")

    @property
    def is_begun(self) -> bool:
        """Bytes of the answer have gone out: it cannot become another one any more."""
        return self.status != 0 and self._writer.is_begun

    def admitted(self) -> float:
        """When the first try began."""
        return self.started_at if self.admitted_at is None else self.admitted_at

    def _time_out(self, phase: Phase, reason: str, now: float) -> None:
        if self._run is not None:
            self._run.abort()
            self.failed(phase, reason)
        else:
            self.failed_phase = phase
            self._give_up(failure(phase, reason, self._blamed()), now)

    def _blamed(self) -> Sequence[Worker]:
        if self._run is not None:
            return self._run.blamed()
        assert self.worker is not None  # a try sets it
        return (self.worker,)

    # Trying again

    def _again(self, outcome: Outcome, reason: str, delay_s: float, now: float) -> None:
        self._end_try(outcome, now)
        self._plane.metrics.retries[reason] += 1
        self._timer = self._plane.loop.call_later(delay_s, self._retry)

    def _retry(self) -> None:
        self._timer = None
        self._try(self._plane.loop.time())

    def _end_try(self, outcome: Outcome, now: float) -> None:
        run, self._run = self._run, None
        if run is not None:
            ttft_s = None if self.first_byte_at is None else self.first_byte_at - self.try_at
            if outcome != "ok" and len(self.tried) < MAX_TRIED:
                self.tried += run.workers
            run.finish(outcome, now, self.num_output, ttft_s if self._is_stream else None)

    def forget_answer(self) -> None:
        """What the try has brought, of which nothing went out, is as if it had never come."""
        self._writer.drop()
        self.status = self.num_events = 0
        self.first_byte_at = None
        self._last = self._before_last = b""
        self._held = None

    # Ends

    def _give_up(self, error: RequestError, now: float) -> None:
        """Pass on the last answer that a worker gave of its own, or say what went wrong."""
        kept = self._kept
        if kept is None or not kept.is_whole:
            self._refuse(error, now)
            return
        self.status = kept.status
        self._writer.begin(self.request, kept.status, kept.headers, not self._plane.is_draining)
        for piece in kept.pieces:
            self._send(piece)
        self._writer.end()
        self._end(outcome_of(kept.status), now)
        self.client.answered()

    def _refuse(self, error: RequestError, now: float, outcome: Outcome | None = None) -> None:
        """Answer with an error of the gateway's own."""
        if isinstance(error, NoDescriptorsError):
            self.worker = self.rank = self.pair = None
        self.status = error.status
        self.error_code = error.code or str(error.status)
        self._plane.write_error(self.client, self.request, error, self.endpoint)
        self._end(outcome or outcome_of(error.status), now)
        if not self.num_tries:
            self._plane.metrics.refused[self.error_code] += 1
        self.client.answered()

    def _cut(self, error: RequestError, outcome: Outcome, now: float) -> None:
        """The answer breaks off: say so in a last event, and let no client take it for its end."""
        self.error_code = error.code
        lead = b"" if self._last.endswith(b"\n\n") else b"\n\n"
        event = b"event: error\n" if self.endpoint.names_events else b""
        self._writer.cut(b"%b%bdata: %b\n\n" % (lead, event, self.endpoint.error_body(error)))
        self._end(outcome, now)
        self.client.answered()

    def _count_tokens(self) -> None:
        """Tokens as the answer says, else as many as there were events."""
        if self.status != 200 or not self.endpoint.generates:
            return
        tail = tail_of(self._before_last, self._last)
        num_prompt, num_output, self.num_cached = read_usage(tail)
        if num_output is None and self.num_events:
            num_output = self.num_events - (b"data: [DONE]" in tail)
        self.num_prompt = num_prompt or None
        self.num_output = num_output
        self._plane.learn(self.intake, num_prompt, num_output)

    def _end(self, outcome: Outcome, now: float) -> None:
        """The exchange is over: give everything back and tell everybody, once."""
        if self.ended_at is not None:
            return
        self.ended_at = now
        plane = self._plane
        plane.sweep.remove(self)
        if self._is_queued:
            plane.metrics.queue_wait.observe(now - self.started_at)
        if self._run is not None:
            self._end_try(outcome, now)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        plane.ended(self, outcome, now)
