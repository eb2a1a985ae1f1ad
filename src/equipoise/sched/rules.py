"""The shapes a scheduling feature can have. A feature is one of these, and one line in `assemble`.

Limit     how many tokens of a request run now        bound once a step, asked per chunk
Gate      may this step prefill, how many may enter   asked once a step
Resource  has a countable thing room                  asked at admission
Order     who is next, who is preempted               asked when a request is queued
Place     can it run at all                           a name; moved at events (see `scheduler`)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from equipoise.request import Request

OPEN = 1 << 30
"""What a gate answers when it sets no bound."""


@dataclass(frozen=True, slots=True)
class RankState:
    """What ranks tell each other every step."""

    num_running: int
    num_waiting: int
    wants_prefill: bool = False


@dataclass(frozen=True, slots=True)
class StepView:
    """What rules may look at when a step is planned.

    `num_running` holds a seat (decoding, prefilling or draining). `has_backlog`: the last step that could
    admit left requests waiting. `ranks` has one entry per rank of the group, this one included."""

    step: int
    now_s: float
    num_running: int
    num_decoding: int
    num_prefilling: int
    num_waiting: int
    num_free_seats: int
    has_backlog: bool
    ranks: tuple[RankState, ...]


Limit = Callable[["Request", int], int]
"""`limit(request, n) -> m`, pure, 0 <= m <= n: of the `n` tokens after `request.num_computed`, `m` may run."""

LimitRule = Callable[[StepView], Limit | None]
"""Bind a limit for one step; None when it is void in this step."""

Gate = Callable[[StepView], int]
"""0 closed, `OPEN` no bound, else how many requests may enter."""

Order = Callable[["Request"], tuple[float, ...]]
"""Sort key: the smallest goes first, the largest is preempted. The scheduler appends the handle."""


class Resource(Protocol):
    """A countable thing that admitted requests hold."""

    def begin_step(self) -> None:
        """A new step is planned."""
        ...

    def fit(self, request: Request, n: int) -> bool:
        """Is there room for `request`, entering with a chunk of `n` tokens?"""
        ...

    def take(self, request: Request, n: int) -> None:
        """`request` was admitted."""
        ...

    def give_back(self, request: Request) -> None:
        """`request` was preempted or ended; called once for each `take`."""
        ...
