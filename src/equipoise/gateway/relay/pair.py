"""A request run by two workers: a prefill worker computes the prompt, a decode worker the answer.

    prefill leg ──> its worker ── KV, in a room ──┐        answer: read and dropped
    decode leg  ──────────────> its worker <──────┘        answer: the client's

Both go out at once and find each other in a room that was drawn for this try. Whichever fails first, or answers with
anything but success, ends the other at once, and is the one that the router and the client are told of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from equipoise.gateway.relay.merge import MAX_HELD_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from equipoise.config.worker import WorkerRole
    from equipoise.gateway.fleet.router import Outcome, Route, Router
    from equipoise.gateway.fleet.worker import Worker
    from equipoise.gateway.operate.metrics import GatewayMetrics
    from equipoise.gateway.relay.exchange import Exchange
    from equipoise.gateway.relay.merge import Merging
    from equipoise.gateway.relay.rooms import Rooms
    from equipoise.gateway.relay.sweep import Sweep
    from equipoise.gateway.transport import Call, Header, Outgoing, Phase

MAX_LINGER_S = 5.0
"""Seconds that a prefill leg has to end once the decode leg's answer is complete: it has nothing left to do by then."""


class PairsShared:
    """What all tries of pairs share. `clock`: the loop's."""

    __slots__ = ("clock", "metrics", "rooms", "router", "sweep")

    def __init__(
        self, router: Router, sweep: Sweep, metrics: GatewayMetrics, rooms: Rooms, clock: Callable[[], float]
    ) -> None:
        self.router = router
        self.sweep = sweep
        self.metrics = metrics
        self.rooms = rooms
        self.clock = clock


class PairTry:
    """A Try with two legs. It is the Leg of the decode worker itself; `_PrefillLeg` tells it of the other one.

    A leg's call is None once that leg is over. _answers: the route whose answer the client gets, decode's until the
    prefill worker answers with an error. _blamed: the routes that failed, or that took too long."""

    __slots__ = (
        "_answers", "_blamed", "_decode", "_decode_call", "_is_finished", "_linger_until", "_merging", "_prefill",
        "_prefill_call", "_rooms", "_shared", "_started_at", "body", "exchange", "flush",
    )  # fmt: skip

    def __init__(
        self,
        shared: PairsShared,
        exchange: Exchange,
        prefill: Route,
        decode: Route,
        rooms: list[int],
        now: float,
        merging: Merging | None,
    ) -> None:
        self._shared = shared
        self.exchange = exchange
        self._prefill = prefill
        self._decode = decode
        self._rooms = rooms
        self._started_at = now
        self._merging = merging
        self._answers = decode
        self._blamed: tuple[Route, ...] = ()
        self._is_finished = False
        self._linger_until = 0.0
        self._prefill_call: Call | None = None
        self._decode_call: Call | None = None
        # what every token passes through costs no call more than it does without a pair
        self.body: Callable[[bytes], None] = exchange.body
        self.flush: Callable[[], None] = exchange.flush

    def send(self, prefill: Outgoing, decode: Outgoing) -> None:
        """Both legs at once."""
        self._prefill_call = self._prefill.worker.transport.start(prefill, _PrefillLeg(self))
        self._decode_call = self._decode.worker.transport.start(decode, self)

    # The Try

    @property
    def workers(self) -> Sequence[Worker]:
        """See Try."""
        return self._prefill.worker, self._decode.worker

    def blamed(self) -> Sequence[Worker]:
        """See Try. Each leg waits for the other one: which of them is silent cannot be told before one has spoken."""
        if not self._blamed:
            is_meeting = not self._prefill.is_over and self.exchange.first_byte_at is None
            is_unclear = is_meeting and self._answers is self._decode
            self._blamed = (self._prefill, self._decode) if is_unclear else (self._answers,)
        return [route.worker for route in self._blamed]

    def abort(self) -> None:
        """See Try."""
        self._abort_prefill()
        self._abort_decode()

    def pause(self) -> None:
        """See Try."""
        call = self._decode_call if self._answers is self._decode else self._prefill_call
        if call is not None:
            call.pause()

    def resume(self) -> None:
        """See Try."""
        call = self._decode_call if self._answers is self._decode else self._prefill_call
        if call is not None:
            call.resume()

    def finish(self, outcome: Outcome, now: float, num_output: int | None, ttft_s: float | None) -> None:
        """See Try. The leg that neither answered nor failed is cancelled, unless it is over."""
        self._is_finished = True
        told_of = self._blamed or (self._answers,)
        if len(told_of) > 1 and outcome == "failed":
            outcome = "unclear"
        self._abort_decode()
        decode_outcome: Outcome = outcome if self._decode in told_of else "cancelled"
        self._leg_over(self._decode, decode_outcome, now, num_output, ttft_s)
        if self._prefill_call is not None and decode_outcome == "ok":
            self._linger_until = now + MAX_LINGER_S
            self._shared.sweep.add(self, None)
            return
        self._abort_prefill()
        self._prefill_over(outcome if self._prefill in told_of else "cancelled", now)

    # The Leg of the decode worker; body and flush are attributes

    def head(self, status: int, headers: list[Header]) -> None:
        """See Leg."""
        if status >= 300:
            self._abort_prefill()
            self._merging = None
        if self._merging is None:
            self.exchange.head(status, headers)
        else:
            self.body = self._merged_body
            self._merging.head(status, headers)

    def ended(self, trailers: list[Header]) -> None:
        """See Leg."""
        self._decode_call = None
        if self._merging is None:
            self.exchange.ended(trailers)
        else:
            self._merging.ended(trailers)

    def failed(self, phase: Phase, reason: str) -> None:
        """See Leg."""
        self._blamed = (self._decode,)
        self._decode_call = None
        self.exchange.failed(phase, reason)

    def _merged_body(self, data: bytes) -> None:
        if self._merging is not None and not self._merging.body(data):
            self._abort_decode()
            self.failed("worker", _too_large())

    # The prefill leg

    def prefill_answers(self, status: int, headers: list[Header]) -> bool:
        """The prefill worker answers with an error: it is the client's answer from now on, where that can still be."""
        exchange = self.exchange
        if self._is_finished or exchange.is_begun:
            self._abort_prefill()
            self.prefill_failed("worker", f"it answered {status} to a request whose answer had begun")
            return False
        self._abort_decode()
        self._answers = self._prefill
        exchange.worker, exchange.rank = self._prefill.worker, self._prefill.rank
        exchange.forget_answer()
        exchange.head(status, headers)
        return True

    def prefill_body(self, data: bytes) -> None:
        """A piece of an answer that nobody needs, but for a prompt's log-probabilities."""
        if self._merging is not None and not self._is_finished and not self._merging.keep(data):
            self._abort_prefill()
            self.prefill_failed("worker", _too_large())

    def prefill_ended(self) -> None:
        """The prefill worker did its part."""
        self._prefill_call = None
        now = self._shared.clock()
        self._prefill_over("ok", now, now - self._started_at)
        if self._merging is not None and not self._is_finished:
            try:
                self._merging.prefilled()
            except ValueError as error:
                self.prefill_failed("worker", f"its answer is not JSON: {error}")

    def prefill_answered(self, trailers: list[Header]) -> None:
        """The error that the prefill worker answered with is complete."""
        self._prefill_call = None
        self.exchange.ended(trailers)

    def prefill_failed(self, phase: Phase, reason: str) -> None:
        """The prefill leg came to nothing."""
        self._prefill_call = None
        if self._is_finished:
            self._shared.metrics.failed_tries[self._prefill.worker.url, phase] += 1
            self._prefill_over("failed", self._shared.clock())
            return
        self._blamed = (self._prefill,)
        self.exchange.failed(phase, reason)

    def check(self, now: float) -> None:
        """See Checked: the decode leg is done, the prefill leg does not end."""
        if now > self._linger_until:
            self._abort_prefill()
            self._prefill_over("cancelled", now)

    def _abort_prefill(self) -> None:
        call, self._prefill_call = self._prefill_call, None
        if call is not None:
            call.abort()

    def _abort_decode(self) -> None:
        call, self._decode_call = self._decode_call, None
        if call is not None:
            call.abort()

    def _prefill_over(self, outcome: Outcome, now: float, ttft_s: float | None = None) -> None:
        self._leg_over(self._prefill, outcome, now, None, ttft_s)
        if self._is_finished:
            self._shared.rooms.give_back(self._rooms)
            self._shared.sweep.remove(self)

    def _leg_over(
        self, route: Route, outcome: Outcome, now: float, num_output: int | None, ttft_s: float | None
    ) -> None:
        if not route.is_over:
            role: WorkerRole = "prefill" if route is self._prefill else "decode"
            self._shared.metrics.legs[role, route.worker.url, outcome] += 1
            self._shared.router.finished(route, outcome, now, num_output, ttft_s)


class _PrefillLeg:
    """The Leg of the prefill worker. Its answer is dropped, unless it is an error."""

    __slots__ = ("_answers", "_try")

    def __init__(self, run: PairTry) -> None:
        self._try = run
        self._answers = False

    def head(self, status: int, headers: list[Header]) -> None:
        """See Leg."""
        if status >= 300:
            self._answers = self._try.prefill_answers(status, headers)

    def body(self, data: bytes) -> None:
        """See Leg."""
        if self._answers:
            self._try.exchange.body(data)
        else:
            self._try.prefill_body(data)

    def ended(self, trailers: list[Header]) -> None:
        """See Leg."""
        if self._answers:
            self._try.prefill_answered(trailers)
        else:
            self._try.prefill_ended()

    def failed(self, phase: Phase, reason: str) -> None:
        """See Leg."""
        self._try.prefill_failed(phase, reason)

    def flush(self) -> None:
        """See Leg."""
        if self._answers:
            self._try.exchange.flush()


def _too_large() -> str:
    return f"its answer is over the {MAX_HELD_BYTES >> 20} MiB that log-probabilities can be merged with"
