"""Orders: who is next and who is preempted. Ties fall to the request that came first."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equipoise.request import Request
    from equipoise.sched.rules import Order


def fcfs(request: Request) -> tuple[float, ...]:
    """First come, first served; a preempted request keeps its turn."""
    return (request.arrival_s,)


def priority(request: Request) -> tuple[float, ...]:
    """Lower `priority` first, then first come, first served."""
    return (request.priority, request.arrival_s)


ORDERS: dict[str, Order] = {"fcfs": fcfs, "priority": priority}
"""Orders by the name that settings use."""
