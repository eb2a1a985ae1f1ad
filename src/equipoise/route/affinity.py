"""Worker policies that keep together what belongs together: prompts that begin alike, requests of one session."""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING
from zlib import crc32

from equipoise.route.prefix import MAX_KEYS, PrefixMap, matched_share
from equipoise.route.workers import Rotation, relative_loads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from equipoise.route.account import WorkerLoad
    from equipoise.route.policy import Ask

SLACK_TOKENS = 16_384
"""Per rank: a few requests are no overload, be the mean ever so low."""


class PrefixTokens:
    """Prefix affinity and tokens in one score, in tokens; the smallest wins, ties rotate. The default.

        cost(worker) = prompt - matched(worker) + load_weight * load(worker)

    matched: tokens of the prompt that the worker has probably seen. load: tokens per rank of mean capacity with this
    request, at full weight (`workers.relative_loads`).

    What is matched need not be computed, so a token matched is worth a token less of prefill. A token of load is
    mostly KV that each step of this request's output reads beside its own: worth far less than computing one, and a
    prefill saved lightens the load of all. So a prefix stays with its worker until that is `matched / load_weight`
    tokens per rank more loaded than another; then it spreads, and both have it. Without matches this is
    `least_tokens`. Of the weights from 0.02 to 2 in benchmarks/routing.py, affinity, 0.05 to 0.1 had the lowest TTFT
    and TPOT, or nearly (0.1: TTFT 0.72 to 0.97 of that with 0.5); 0.1 spreads sooner. A term for the queue made it
    worse."""

    wants_keys = True

    def __init__(self, seed: int = 0, *, load_weight: float = 0.1, max_keys: int = MAX_KEYS) -> None:
        """Raises ValueError when `load_weight` is not positive: hot prefixes would never spread."""
        if not load_weight > 0:
            raise ValueError(f"load_weight is {load_weight}, it must be above 0")
        self._load_weight = load_weight
        self._seen = PrefixMap(max_keys)
        self._rotation = Rotation(seed)

    def choose(self, ask: Ask, workers: Sequence[WorkerLoad]) -> WorkerLoad:
        costs = relative_loads(workers, ask.prompt + ask.output)
        depths = self._seen.match(ask.keys) if ask.keys else None
        if depths:
            load_weight, num_keys = self._load_weight, len(ask.keys)
            for i, worker in enumerate(workers):
                saved = ask.prompt * matched_share(depths.get(worker.name, 0), num_keys)
                costs[i] -= saved / load_weight
        return workers[self._rotation.smallest(costs)]

    def routed(self, ask: Ask, worker: WorkerLoad) -> None:
        if ask.keys:
            self._seen.add(ask.keys, worker.name)

    def left(self, worker: WorkerLoad) -> None:
        self._seen.remove(worker.name)


class CacheAware:
    """The longest match, if it is long and its worker not overloaded; else the least loaded.

    Long: more than `min_share` of the prompt. Overloaded: over `max_load` times the least load and `slack_tokens`,
    so that a hot prefix spreads over all. Among equally loaded workers the one with the fewest keys in the index."""

    wants_keys = True

    def __init__(
        self,
        seed: int = 0,
        *,
        min_share: float = 0.5,
        max_load: float = 1.5,
        slack_tokens: int = SLACK_TOKENS,
        max_keys: int = MAX_KEYS,
    ) -> None:
        """Raises ValueError when `max_load` is below 1."""
        if max_load < 1:
            raise ValueError(f"max_load is {max_load}, it must be at least 1")
        self._min_share = min_share
        self._max_load = max_load
        self._slack_tokens = slack_tokens
        self._seen = PrefixMap(max_keys)
        self._rotation = Rotation(seed)

    def choose(self, ask: Ask, workers: Sequence[WorkerLoad]) -> WorkerLoad:
        loads = relative_loads(workers, ask.prompt + ask.output)
        return self._longest_match(ask, workers, loads) or self._least_loaded(workers, loads)

    def _longest_match(self, ask: Ask, workers: Sequence[WorkerLoad], loads: list[float]) -> WorkerLoad | None:
        depths = self._seen.match(ask.keys)
        if not depths:
            return None
        bound = self._max_load * min(loads) + self._slack_tokens
        best, best_depth, best_load = None, 0, 0.0
        for worker, load in zip(workers, loads, strict=True):
            depth = depths.get(worker.name, 0)
            if load <= bound and (depth > best_depth or (depth == best_depth and depth and load < best_load)):
                best, best_depth, best_load = worker, depth, load
        return best if matched_share(best_depth, len(ask.keys)) > self._min_share else None

    def _least_loaded(self, workers: Sequence[WorkerLoad], loads: list[float]) -> WorkerLoad:
        least = min(loads)
        tied = [worker for worker, load in zip(workers, loads, strict=True) if load == least]
        if len(tied) == 1:
            return tied[0]
        return tied[self._rotation.smallest([self._seen.num_keys(worker.name) for worker in tied])]

    def routed(self, ask: Ask, worker: WorkerLoad) -> None:
        self._seen.add(ask.keys, worker.name)

    def left(self, worker: WorkerLoad) -> None:
        self._seen.remove(worker.name)


NUM_FIRST_KEYS = 4
"""Without a session, requests whose prompts share their first KB are one."""

MAX_32_BITS = (1 << 32) - 1


class ConsistentHashing:
    """Requests of one session to one worker, as long as it is not overloaded; without a session, of one beginning.

    Each worker draws a number from the session and its own name, and the highest goes first (rendezvous hashing,
    which spreads evenly without a ring of virtual nodes): when a worker comes or goes, only the sessions that it
    takes or leaves move. A worker over `max_load` times the mean load and `slack_tokens` is passed over for the
    session's next one (bounded loads, Mirrokni and others, 2016). Draws are stretched by live ranks and weight.
    Every process and every gateway draws the same. A request with neither session nor keys goes to the least
    loaded."""

    wants_keys = True

    def __init__(self, seed: int = 0, *, max_load: float = 1.25, slack_tokens: int = SLACK_TOKENS) -> None:
        """`seed`: gateways that shall agree need the same. Raises ValueError when `max_load` is below 1."""
        if max_load < 1:
            raise ValueError(f"max_load is {max_load}, it must be at least 1")
        self._seed = seed
        self._max_load = max_load
        self._slack_tokens = slack_tokens
        self._rotation = Rotation(seed)
        self._salts: dict[str, int] = {}

    def choose(self, ask: Ask, workers: Sequence[WorkerLoad]) -> WorkerLoad:
        num_tokens = ask.prompt + ask.output
        loads = relative_loads(workers, num_tokens)
        if ask.session is not None:
            key = crc32(ask.session)
        elif ask.keys:
            key = ask.keys[min(len(ask.keys), NUM_FIRST_KEYS) - 1]
        else:
            return workers[self._rotation.smallest(loads)]
        bound = self._max_load * sum(loads) / len(loads) + self._slack_tokens
        best, highest = 0, -1.0
        for i, worker in enumerate(workers):
            if loads[i] <= bound:
                draw = worker.num_live * worker.weight / self._exponential(key, worker.name)
                if draw > highest:
                    best, highest = i, draw
        return workers[best]

    def _exponential(self, key: int, name: str) -> float:
        """A number that is exponentially distributed over keys and workers: shares over it draw in proportion."""
        salt = self._salts.get(name)
        if salt is None:
            salt = self._salts[name] = crc32(name.encode(), self._seed & MAX_32_BITS)
        mixed = (key ^ salt) * 0x9E3779B1 & MAX_32_BITS  # CRCs differ by an XOR: without mixing they sort alike
        mixed = (mixed ^ mixed >> 15) * 0x85EBCA77 & MAX_32_BITS
        return -log((mixed + 0.5) / (1 << 32))

    def routed(self, ask: Ask, worker: WorkerLoad) -> None:
        """Nothing to learn."""

    def left(self, worker: WorkerLoad) -> None:
        self._salts.pop(worker.name, None)
