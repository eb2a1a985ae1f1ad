"""Fleets for tests of the pure parts: workers that are never spoken to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equipoise.config.worker import WorkerSpec
from equipoise.gateway.fleet.fleet import Fleet, FleetLimits
from equipoise.gateway.fleet.router import Policies, Router
from equipoise.gateway.fleet.slow_start import SlowStartLimits
from equipoise.gateway.fleet.worker import Found, rank_place
from equipoise.route.policy import Ask
from equipoise.route.ranks import MinimumTokens
from equipoise.route.workers import LeastTokens

if TYPE_CHECKING:
    from equipoise.config.worker import WorkerRole
    from equipoise.gateway.fleet.worker import Worker
    from equipoise.gateway.transport import Call, Leg, Outgoing

AT_ONCE = FleetLimits(slow_start=SlowStartLimits(duration_s=0.0))


class UnusedTransport:
    """A transport that nobody sends with; it remembers whether it was closed."""

    def __init__(self, host: str = "", port: int = 0) -> None:
        self.is_closed = False

    def start(self, outgoing: Outgoing, leg: Leg) -> Call:
        raise AssertionError("nothing is sent here")

    def close(self) -> None:
        self.is_closed = True


def empty_fleet(limits: FleetLimits = AT_ONCE) -> Fleet:
    """A fleet without workers."""
    return Fleet(UnusedTransport, limits)


def join(
    fleet: Fleet,
    name: str,
    *models: str,
    num_ranks: int = 1,
    role: WorkerRole = "mixed",
    first_number: int = 0,
    now: float = 0.0,
) -> Worker:
    """Add the worker `name`, ready to serve `models` ("m" when none is given)."""
    worker = fleet.add(WorkerSpec(f"http://{name}:1", role), now)
    labels = tuple(range(first_number, first_number + num_ranks))
    places = tuple(rank_place(label) for label in labels) if num_ranks > 1 else ()
    fleet.found(worker, Found("sglang", models or ("m",), labels, places), now)
    return worker


def policies() -> Policies:
    """Fewest tokens, for workers and for ranks."""
    return Policies("least_tokens", LeastTokens, "minimum_tokens", MinimumTokens())


def router_of(fleet: Fleet) -> Router:
    """A router over `fleet` with the same policies for every role."""
    return Router(fleet, {"mixed": policies(), "prefill": policies(), "decode": policies()})


def ask(prompt: int = 10, output: int = 0) -> Ask:
    """A request of so many tokens."""
    return Ask(prompt, output)
