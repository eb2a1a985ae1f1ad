"""Worker policies: which worker serves a request. Each is one small object; see `policy.WorkerPolicy`.

Workers differ in size and, while they start slowly, in weight. Loads are therefore compared as tokens per rank of
mean capacity at full weight, the request itself included: `relative_loads`.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from equipoise.route.account import WorkerLoad
    from equipoise.route.policy import Ask


def relative_loads(workers: Sequence[WorkerLoad], extra: int) -> list[float]:
    """What each worker's load would be with `extra` tokens more: per rank of mean capacity, at full weight.

    A worker that does not tell its capacity counts as one of the mean capacity per rank."""
    known, num_ranks = 0, 0
    for worker in workers:
        if worker.capacity is not None:
            known += worker.capacity
            num_ranks += worker.num_live
    mean = known / num_ranks if num_ranks else 1.0
    return [
        (worker.tokens + extra) * mean / ((worker.capacity or mean * worker.num_live) * worker.weight)
        for worker in workers
    ]


class Rotation:
    """The smallest of several; among equals the next one after the last chosen."""

    __slots__ = ("_turn",)

    def __init__(self, seed: int = 0) -> None:
        self._turn = seed

    def smallest(self, values: Sequence[float]) -> int:
        """Index of the smallest value."""
        least = min(values)
        turn = self._turn % len(values)
        try:
            index = values.index(least, turn)
        except ValueError:
            index = values.index(least)
        self._turn = index + 1
        return index


class Stateless:
    """Learns nothing from where requests went."""

    wants_keys = False

    def routed(self, ask: Ask, worker: WorkerLoad) -> None:
        """Nothing to learn."""

    def left(self, worker: WorkerLoad) -> None:
        """Nothing to forget."""


class Random(Stateless):
    """Any worker, in proportion to its live ranks and its weight."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def choose(self, ask: Ask, workers: Sequence[WorkerLoad]) -> WorkerLoad:
        shares = [worker.weight * worker.num_live for worker in workers]
        return self._random.choices(workers, shares)[0]


class RoundRobin:
    """One after the other, each as often as its live ranks and its weight ask for, evenly interleaved.

    Every worker gains its share at each choice, and the one chosen pays the sum of the shares."""

    wants_keys = False

    def __init__(self, seed: int = 0) -> None:
        self._credits: dict[str, float] = {}
        self._rotation = Rotation(seed)

    def choose(self, ask: Ask, workers: Sequence[WorkerLoad]) -> WorkerLoad:
        owed = self._credits
        total = 0.0
        for worker in workers:
            share = worker.weight * worker.num_live
            total += share
            owed[worker.name] = owed.get(worker.name, 0.0) + share
        chosen = workers[self._rotation.smallest([-owed[worker.name] for worker in workers])]
        owed[chosen.name] -= total
        return chosen

    def routed(self, ask: Ask, worker: WorkerLoad) -> None:
        """Nothing to learn."""

    def left(self, worker: WorkerLoad) -> None:
        self._credits.pop(worker.name, None)


class LeastTokens(Stateless):
    """The worker with the fewest tokens for its size. Ties rotate."""

    def __init__(self, seed: int = 0) -> None:
        self._rotation = Rotation(seed)

    def choose(self, ask: Ask, workers: Sequence[WorkerLoad]) -> WorkerLoad:
        return workers[self._rotation.smallest(relative_loads(workers, ask.prompt + ask.output))]


class PowerOfTwo(Stateless):
    """The less loaded of two drawn at random (Mitzenmacher, 2001): nearly as even, and never a herd."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def choose(self, ask: Ask, workers: Sequence[WorkerLoad]) -> WorkerLoad:
        if len(workers) == 1:
            return workers[0]
        first = int(self._random.random() * len(workers))
        second = (first + 1 + int(self._random.random() * (len(workers) - 1))) % len(workers)
        pair = (workers[first], workers[second])
        loads = relative_loads(pair, ask.prompt + ask.output)
        return pair[loads[1] < loads[0]]


class LeastLoad(Stateless):
    """The shortest wait: waiting requests over throughput. Among those where nobody waits, the fewest tokens.

    Throughput is what a worker has shown it can do, lately: that of the moment is low where there is little to do.
    A worker that has not shown any counts as having as much per rank as the others, or as any other when none has."""

    def __init__(self, seed: int = 0) -> None:
        self._rotation = Rotation(seed)

    def choose(self, ask: Ask, workers: Sequence[WorkerLoad]) -> WorkerLoad:
        queues = [worker.queue() for worker in workers]
        if min(queues):
            return workers[self._rotation.smallest(waits(workers, queues))]
        idle = [worker for worker, queue in zip(workers, queues, strict=True) if not queue]
        return idle[self._rotation.smallest(relative_loads(idle, ask.prompt + ask.output))]


def waits(workers: Sequence[WorkerLoad], queues: Sequence[int]) -> list[float]:
    """Queue over throughput, at full weight: to be compared, not to be read as seconds."""
    rates = [worker.throughput() for worker in workers]
    num_ranks = sum(worker.num_live for worker, rate in zip(workers, rates, strict=True) if rate)
    per_rank = sum(rates) / num_ranks if num_ranks else 1.0
    return [
        queue / ((rate or per_rank * worker.num_live) * worker.weight)
        for worker, rate, queue in zip(workers, rates, queues, strict=True)
    ]
