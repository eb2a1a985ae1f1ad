"""The plain way of running a request: one leg at one worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equipoise.gateway.relay.intake import splice
from equipoise.gateway.transport import Outgoing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from equipoise.config.worker import WorkerRole
    from equipoise.gateway.fleet.router import Outcome, Route, Router
    from equipoise.gateway.fleet.worker import Worker
    from equipoise.gateway.relay.exchange import Exchange
    from equipoise.gateway.transport import Call, Header


class OneLeg:
    """A Way: router, rank, leg."""

    def __init__(self, router: Router) -> None:
        self._router = router

    @property
    def wants_keys(self) -> bool:
        """See Way."""
        return self._router.wants_keys["mixed"]

    def start(self, exchange: Exchange, now: float, role: WorkerRole = "mixed") -> OneLegTry:
        """See Way. The worker is one of `role`."""
        request, intake = exchange.request, exchange.intake
        named_rank = request.head.named_rank
        if named_rank is None:
            named_rank = intake.named_rank
        route = self._router.route(exchange.ask, intake.model, role, exchange.tried, now, named_rank)
        worker = exchange.worker = route.worker
        rank = exchange.rank = route.rank
        headers: list[Header] = []
        body = request.body
        if rank is not None and named_rank is None:
            fields: list[bytes] = []
            worker.place_rank(rank, headers, fields)
            if fields and intake.has_fields:
                body = splice(body, b",".join(fields))
        head = request.head
        outgoing = Outgoing(head.method, head.target, headers, body, intake.is_stream, lines=request.lines)
        return OneLegTry(self._router, route, worker.transport.start(outgoing, exchange))


class OneLegTry:
    """A Try with one route and one call."""

    __slots__ = ("_call", "_route", "_router")

    def __init__(self, router: Router, route: Route, call: Call) -> None:
        self._router = router
        self._route = route
        self._call = call

    @property
    def workers(self) -> Sequence[Worker]:
        """See Try."""
        return (self._route.worker,)

    def blamed(self) -> Sequence[Worker]:
        """See Try."""
        return self.workers

    def abort(self) -> None:
        """See Try."""
        self._call.abort()

    def pause(self) -> None:
        """See Try."""
        self._call.pause()

    def resume(self) -> None:
        """See Try."""
        self._call.resume()

    def finish(self, outcome: Outcome, now: float, num_output: int | None, ttft_s: float | None) -> None:
        """See Try."""
        self._router.finished(self._route, outcome, now, num_output, ttft_s)
