"""Orders: who is next and who is preempted. Ties fall to the request that came first."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equipoise.request import Request
    from equipoise.sched.rules import Order, VictimOrder


def fcfs(request: Request) -> tuple[float, ...]:
    """First come, first served; a preempted request keeps its turn."""
    return (request.arrival_s,)


def priority(request: Request) -> tuple[float, ...]:
    """Lower `priority` first, then first come, first served."""
    return (request.priority, request.arrival_s)


def shortest_first(ageing_s: float) -> Order:
    """Fewer prompt tokens first; every `ageing_s` seconds of age make up for a token, so that none starves.

    Age counts against the arrival: an order key never changes while a request waits."""

    def order(request: Request) -> tuple[float, ...]:
        return (request.num_prompt + request.arrival_s / ageing_s,)

    return order


def longest_first(request: Request) -> tuple[float, ...]:
    """More prompt tokens first: offline batches end sooner when the long ones do not come last."""
    return (-request.num_prompt, request.arrival_s)


def outranks(waiting: Request, running: Request) -> bool:
    """A waiting request may preempt one of strictly lower priority, never an equal."""
    return waiting.priority < running.priority


def last_in(order: Order) -> VictimOrder:
    """Preempt the request that is last in `order`."""
    return lambda request, _num_computed: order(request)


def cheapest(request: Request, num_computed: int) -> tuple[float, ...]:
    """Preempt, within the lowest priority, the request with the fewest tokens to compute again."""
    return (request.priority, -num_computed)
