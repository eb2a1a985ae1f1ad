"""What a try is to an exchange, however many legs it has; answers that are kept back; errors of tries that failed."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from equipoise.errors import (
    InternalError,
    NoDescriptorsError,
    RequestError,
    UnavailableError,
    WorkerFailedError,
    WorkerTimeoutError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from equipoise.gateway.fleet.router import Outcome
    from equipoise.gateway.fleet.worker import Worker
    from equipoise.gateway.relay.exchange import Exchange
    from equipoise.gateway.transport import Header, Phase

log = logging.getLogger(__name__)

MAX_HELD_BYTES = 64 * 1024
"""Of an error's body that is kept while the request is tried again."""
BLAMELESS: frozenset[Phase] = frozenset(("total", "gateway"))
"""A request that is long, and what the gateway lacks, are no worker's fault."""
TIME_LIMITS: frozenset[Phase] = frozenset(("first_token", "between_tokens", "total"))


class Try(Protocol):
    """One try under way."""

    @property
    def workers(self) -> Sequence[Worker]:
        """Those that it was sent to."""

    def blamed(self) -> Sequence[Worker]:
        """Which of them failed, or takes too long; more than one where that cannot be told."""

    def abort(self) -> None:
        """End it at once; the exchange hears nothing more."""

    def pause(self) -> None:
        """Bring no more of the answer for now."""

    def resume(self) -> None:
        """Go on."""

    def finish(self, outcome: Outcome, now: float, num_output: int | None, ttft_s: float | None) -> None:
        """Give back what the try was charged and tell the router how it went. Called exactly once."""


class Way(Protocol):
    """How requests are run at workers."""

    @property
    def wants_keys(self) -> bool:
        """Whether `Ask.keys` is looked at."""

    def start(self, exchange: Exchange, now: float) -> Try:
        """Choose, charge and send: the exchange is told the answer as a Leg, later. Sets `exchange.worker` and `rank`.

        Raises RequestError when no worker takes the request."""


class Held:
    """An answer that is kept back while the request is tried again."""

    __slots__ = ("delay_s", "headers", "is_whole", "num_bytes", "pieces", "status")

    def __init__(self, status: int, headers: list[Header], delay_s: float) -> None:
        self.status = status
        self.headers = headers
        self.delay_s = delay_s
        self.pieces: list[bytes] = []
        self.num_bytes = 0
        self.is_whole = True

    def add(self, data: bytes) -> None:
        """Keep a piece of the body, unless it grows too large."""
        self.num_bytes += len(data)
        if self.num_bytes <= MAX_HELD_BYTES:
            self.pieces.append(data)
        else:
            self.is_whole = False


def failure(phase: Phase, reason: str, workers: Sequence[Worker]) -> RequestError:
    """What the client is told of a try that failed: 504 for time limits, 503 where no connection came about, 502."""
    if phase == "gateway":
        return NoDescriptorsError(f"the gateway could not open a connection to a worker: {reason}")
    roles = ("" if worker.role == "mixed" else f"{worker.role} " for worker in workers)
    names = " or ".join(f"{role}worker {worker.url}" for role, worker in zip(roles, workers, strict=True))
    message = f"{names} failed in phase {phase}: {reason}"
    if phase in TIME_LIMITS:
        return WorkerTimeoutError(message)
    return UnavailableError(message) if phase == "connect" else WorkerFailedError(message)


def outcome_of(status: int) -> Outcome:
    """How a try went that was answered with `status`."""
    return "ok" if status < 400 else "failed" if status >= 500 else "refused"


def as_request_error(error: Exception) -> RequestError:
    """What the client is told of an error on the way to a worker. Whatever is none of a request is a bug, of ours or of
    an operator's policy: the log says which, and its client is answered all the same."""
    if isinstance(error, RequestError):
        return error
    log.error("a request could not be routed", exc_info=error)
    return InternalError("the gateway failed to route the request, its log says why")
