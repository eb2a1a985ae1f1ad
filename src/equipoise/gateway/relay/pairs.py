"""How requests are run in a fleet that may have workers for prefill and for decode: by one worker, or by a pair."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equipoise.errors import InvalidValueError
from equipoise.gateway.relay.intake import splice
from equipoise.gateway.relay.merge import Merging
from equipoise.gateway.relay.pair import PairsShared, PairTry
from equipoise.gateway.relay.rooms import batch_size, bootstrap_fields
from equipoise.gateway.relay.way import OneLeg
from equipoise.gateway.transport import Outgoing
from equipoise.route.pairs import one_worker_is_better, prefill_ask

if TYPE_CHECKING:
    from collections.abc import Callable

    from equipoise.config.worker import WorkerRole
    from equipoise.gateway.fleet.fleet import Fleet
    from equipoise.gateway.fleet.router import Route, Router
    from equipoise.gateway.fleet.worker import Worker
    from equipoise.gateway.operate.metrics import GatewayMetrics
    from equipoise.gateway.relay.exchange import Exchange
    from equipoise.gateway.relay.rooms import Rooms
    from equipoise.gateway.relay.sweep import Sweep
    from equipoise.gateway.relay.tries import Try
    from equipoise.gateway.transport import Header

_RANK = b"x-data-parallel-rank"
_ACCEPT_ENCODING = b"accept-encoding"


class Pairs:
    """A Way: by a prefill and a decode worker, or by one worker that does both.

    Where a model is served in both ways, a request goes where there is less to do per rank: tokens believed to be on
    the workers that may take it, for pairs those of the busier role. Requests without output tokens need one worker
    only: one that does both, else one that prefills."""

    def __init__(
        self,
        router: Router,
        fleet: Fleet,
        sweep: Sweep,
        metrics: GatewayMetrics,
        rooms: Rooms,
        clock: Callable[[], float],
    ) -> None:
        self._router = router
        self._rooms = rooms
        self._shared = PairsShared(router, sweep, metrics, rooms, clock)
        self._fleet = fleet
        self._one_leg = OneLeg(router)
        self._has_pairs = self._has_mixed = False
        fleet.listeners.append(self)
        self._look()

    @property
    def wants_keys(self) -> bool:
        """See Way."""
        wants = self._router.wants_keys
        return wants["mixed"] or (self._has_pairs and (wants["prefill"] or wants["decode"]))

    def start(self, exchange: Exchange, now: float) -> Try:
        """See Way."""
        if not self._has_pairs:
            return self._one_leg.start(exchange, now)
        exchange.pair = None
        role = self._single_role(exchange, now)
        if role is not None:
            return self._one_leg.start(exchange, now, role)
        return self._start_pair(exchange, now)

    # What the fleet tells

    def added(self, worker: Worker) -> None:
        """See FleetListener."""
        self._look()

    def left(self, worker: Worker) -> None:
        """It may come back."""

    def removed(self, worker: Worker) -> None:
        """See FleetListener."""
        self._look()

    def _look(self) -> None:
        roles = [worker.role for worker in self._fleet.workers]
        self._has_mixed = "mixed" in roles
        self._has_pairs = "prefill" in roles or "decode" in roles

    # Choosing

    def _single_role(self, exchange: Exchange, now: float) -> WorkerRole | None:
        """The role of the one worker that is to serve the request; None: a pair is."""
        needs_pair = exchange.endpoint.generates
        if not self._has_mixed:
            return None if needs_pair else "prefill"
        model = exchange.intake.model
        mixed = self._router.mean_tokens(model, "mixed", now)
        prefill = self._router.mean_tokens(model, "prefill", now)
        if not needs_pair:
            return "mixed" if mixed is not None or prefill is None else "prefill"
        decode = self._router.mean_tokens(model, "decode", now)
        if prefill is None or decode is None:
            return "mixed" if mixed is not None or self._is_served_by_mixed(model) else None
        return "mixed" if mixed is not None and one_worker_is_better(mixed, prefill, decode) else None

    def _is_served_by_mixed(self, model: str | None) -> bool:
        mixed = self._fleet.with_role("mixed")
        return any(model is None or worker.serves(model) for worker in mixed)

    def _start_pair(self, exchange: Exchange, now: float) -> PairTry:
        intake = exchange.intake
        if intake.named_bootstrap is not None:
            raise InvalidValueError(
                f"{intake.named_bootstrap}: it must not be given, each try is led to a room of its own at a prefill "
                "worker that the gateway chooses",
                intake.named_bootstrap,
            )
        num_prompts = batch_size(intake.prompt)
        num_rooms = num_prompts if num_prompts is not None else intake.num_choices
        rooms = self._rooms.take(max(1, num_rooms))
        try:
            prefill, decode = self._route(exchange, rooms[0], now)
        except Exception:
            self._rooms.give_back(rooms)
            raise
        exchange.pair = (prefill, decode)
        exchange.worker, exchange.rank = decode.worker, decode.rank
        fields = bootstrap_fields(prefill.worker, rooms, is_batch=num_prompts is not None or num_rooms > 1)
        merges = intake.return_logprob and exchange.endpoint.name == "/generate"
        run = PairTry(self._shared, exchange, prefill, decode, rooms, now, Merging(exchange) if merges else None)
        run.send(_prefill_outgoing(exchange, prefill, fields), _decode_outgoing(exchange, prefill, decode, fields))
        return run

    def _route(self, exchange: Exchange, room: int, now: float) -> tuple[Route, Route]:
        """Charge a prefill worker with the prompt, a decode worker with prompt and output. Both or none."""
        router, ask, model, tried = self._router, exchange.ask, exchange.intake.model, exchange.tried
        named_rank = _named_rank(exchange)
        prefill_rank = exchange.intake.named_prefill_rank
        ask.room = room
        if prefill_rank is None:
            prefill_rank = named_rank
        prefill = router.route(prefill_ask(ask, room), model, "prefill", tried, now, prefill_rank)
        if model is None and prefill.worker.models:
            model = prefill.worker.models[0]  # both must be of one model
        try:
            return prefill, router.route(ask, model, "decode", tried, now, named_rank)
        except Exception:
            router.finished(prefill, "cancelled", now)
            raise


def _named_rank(exchange: Exchange) -> int | None:
    """The rank that the request itself names, for both legs."""
    named = exchange.request.head.named_rank
    return exchange.intake.named_rank if named is None else named


def _prefill_outgoing(exchange: Exchange, route: Route, bootstrap: bytes) -> Outgoing:
    headers, fields = _headers(exchange), [bootstrap]
    own = exchange.intake.named_prefill_rank
    if route.rank is not None and (own is not None or _named_rank(exchange) is None):
        if own is not None:
            headers = [header for header in headers if header[0].lower() != _RANK]
        route.worker.place_rank(route.rank, headers, fields)
    return _outgoing(exchange, headers, fields)


def _decode_outgoing(exchange: Exchange, prefill: Route, decode: Route, bootstrap: bytes) -> Outgoing:
    headers, fields = _headers(exchange), [bootstrap]
    if decode.rank is not None and _named_rank(exchange) is None:
        decode.worker.place_rank(decode.rank, headers, fields)
    if prefill.rank is not None and exchange.intake.named_prefill_rank is None:
        fields.append(b'"disagg_prefill_dp_rank":%d' % prefill.worker.places[prefill.rank].number)
    return _outgoing(exchange, headers, fields)


def _headers(exchange: Exchange) -> list[Header]:
    """Those of the request; an answer that is to be looked into must not come compressed."""
    headers = exchange.request.headers
    if exchange.intake.return_logprob:
        return [header for header in headers if header[0].lower() != _ACCEPT_ENCODING]
    return headers


def _outgoing(exchange: Exchange, headers: list[Header], fields: list[bytes]) -> Outgoing:
    """Goes out once: a room is entered once, another try has another one."""
    request = exchange.request
    body = splice(request.body, b",".join(fields))
    return Outgoing(request.head.method, request.head.target, headers, body, exchange.intake.is_stream, goes_once=True)
