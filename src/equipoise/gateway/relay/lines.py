"""Requests as lines of the access log."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from equipoise.gateway.operate.access_log import AccessLine
from equipoise.gateway.relay.tries import outcome_of

if TYPE_CHECKING:
    from equipoise.gateway.fleet.router import Outcome
    from equipoise.gateway.http.request import ClientRequest
    from equipoise.gateway.relay.exchange import Exchange


def _ms(duration_s: float) -> float:
    """Milliseconds to the microsecond; round() takes six times as long."""
    return int(duration_s * 1e6 + 0.5) / 1e3


def exchange_line(exchange: Exchange, outcome: Outcome, now: float) -> AccessLine:
    """Of a request to workers that is over at `now` (the loop's clock)."""
    request, first_at = exchange.request, exchange.first_byte_at
    head = request.head
    worker, rank, prefill = exchange.worker, exchange.rank, None
    if exchange.pair is not None:
        prefill, decode = exchange.pair
        worker, rank = decode.worker, decode.rank
    has_asked = exchange.num_tries > 0
    return AccessLine(
        time.time(),
        request.request_id.decode("latin-1"),
        request.client,
        head.method_text,
        head.target_text,
        exchange.status,
        outcome,
        _ms(now - exchange.started_at),
        exchange.model,
        None if worker is None else worker.url,
        rank,
        exchange.num_tries,
        exchange.num_prompt or (exchange.ask.prompt if has_asked else None),
        exchange.num_cached if exchange.num_prompt else None,
        exchange.ask.output if has_asked else None,
        exchange.num_output,
        len(request.body),
        exchange.client.writer.num_bytes,
        None if first_at is None else _ms(first_at - exchange.started_at),
        exchange.failed_phase,
        exchange.error_code,
        None if prefill is None else prefill.worker.url,
        None if prefill is None else prefill.rank,
    )


def own_line(
    request: ClientRequest, status: int, num_sent: int, duration_s: float, error_code: str | None = None
) -> AccessLine:
    """Of a request that the gateway itself answered with `num_sent` bytes, after `duration_s` seconds."""
    return AccessLine(
        time.time(),
        request.request_id.decode("latin-1"),
        request.client,
        request.method.decode("latin-1"),
        request.head.target.decode(errors="replace"),
        status,
        outcome_of(status),
        _ms(duration_s),
        request_bytes=len(request.body),
        response_bytes=num_sent,
        error_code=error_code,
    )
