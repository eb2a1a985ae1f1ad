"""The shapes of routing: what is asked, who chooses the worker, who chooses its rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from equipoise.route.account import WorkerLoad


@dataclass(slots=True)
class Ask:
    """What a policy may know of a request. Not frozen, as that would triple its price.

    prompt: tokens. output: expected tokens. keys: of growing prefixes of the prompt (`prefix.prefix_keys`), only
    when the policy wants them. session: who asks, so that one's requests may stay together. room: of a P/D pair."""

    prompt: int
    output: int = 0
    keys: Sequence[int] = ()
    session: bytes | None = None
    room: int | None = None


@runtime_checkable
class WorkerPolicy(Protocol):
    """Chooses a worker. Single-threaded; deterministic by its seed."""

    wants_keys: bool

    def choose(self, ask: Ask, workers: Sequence[WorkerLoad]) -> WorkerLoad:
        """One of `workers`: those that may serve the request, never empty, in a stable order."""
        ...

    def routed(self, ask: Ask, worker: WorkerLoad) -> None:
        """`ask` goes to `worker`: what the policy learns from that, it learns now."""
        ...

    def left(self, worker: WorkerLoad) -> None:
        """`worker` was removed or started anew: forget what it is known for."""
        ...


@runtime_checkable
class RankPolicy(Protocol):
    """Chooses a rank of a worker. A worker with one rank is never pinned."""

    def choose(self, ask: Ask, worker: WorkerLoad) -> int | None:
        """A live rank; None: the engine chooses."""
        ...
