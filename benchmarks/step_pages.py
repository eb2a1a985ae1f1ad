"""Page operations of `step_cost.py`, per call: hash, allocate, look up and free 1,024 tokens in pages of 16."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Protocol

from step_cases import VOCAB_SIZE, clock_ns

if TYPE_CHECKING:
    from collections.abc import Callable

    from equipoise.request import Request
    from step_sides import Adapter

NUM_TOKENS = 1024
MAX_OUTPUTS = 16


class Pages(Protocol):
    """Page operations of one side, each with everything it needs to leave the cache correct."""

    def hash(self, name: str, prompt: list[int]) -> Any:
        """A new request with the keys of its full pages."""

    def allocate(self, request: Any) -> None:
        """Look `request` up, give it 64 pages and make them findable."""

    def look_up(self, request: Any) -> None:
        """Find the pages of `request`; its last is left out."""

    def free(self, request: Any) -> None:
        """Take all pages back; they stay findable."""


class OurPages:
    """Ours: `KVMemory`. Keys are computed at a request's first match."""

    def __init__(self, side: Adapter) -> None:
        self._side = side
        self._kv = side.scheduler.kv

    def hash(self, name: str, prompt: list[int]) -> Request:
        request = self._side.new_request(name, prompt, MAX_OUTPUTS)
        self._kv.match(request)
        return request

    def allocate(self, request: Request) -> None:
        kv = self._kv
        if not kv.admit(request, kv.match(request), NUM_TOKENS, 0):
            raise SystemExit("equipoise: the pages do not suffice for the benchmark")
        kv.publish(request, request.prompt_ids, NUM_TOKENS)

    def look_up(self, request: Request) -> None:
        self._kv.match(request)

    def free(self, request: Request) -> None:
        self._kv.release(request)


class PeerPages:
    """vLLM's `KVCacheManager`. Keys are computed when a request is built."""

    def __init__(self, side: Any) -> None:
        self._side = side
        self._kv = side.s.kv_cache_manager

    def hash(self, name: str, prompt: list[int]) -> Any:
        return self._side.new_request(name, prompt, MAX_OUTPUTS)

    def allocate(self, request: Any) -> None:
        pages, num_hit, *_ = self._kv.get_computed_blocks(request)
        if self._kv.allocate_slots(request, request.num_tokens - num_hit, num_hit, pages) is None:
            raise SystemExit("peer: the pages do not suffice for the benchmark")

    def look_up(self, request: Any) -> None:
        self._kv.get_computed_blocks(request)

    def free(self, request: Any) -> None:
        self._kv.free(request)


class PageBench:
    """Runs windows of each operation on one side and keeps their CPU us per call."""

    def __init__(self, pages: Pages, seed: int) -> None:
        self._pages = pages
        self._rng = random.Random(seed)
        self._num_requests = 0

    def window(self, num_calls: int) -> dict[str, float]:
        """Mean CPU us per call of each operation, over `num_calls` prompts."""
        prompts = [[self._rng.randrange(VOCAB_SIZE) for _ in range(NUM_TOKENS)] for _ in range(num_calls)]
        pages = self._pages
        hash_us, requests = _timed(self._hash, prompts)
        allocate_us, _ = _timed(pages.allocate, requests)
        again = [self._hash(prompt) for prompt in prompts]
        look_up_us, _ = _timed(pages.look_up, again)
        free_us, _ = _timed(pages.free, requests)
        return {
            "new request and its keys": hash_us,
            "allocate 64": allocate_us,
            "look up 63 hits": look_up_us,
            "free 64": free_us,
        }

    def _hash(self, prompt: list[int]) -> Any:
        self._num_requests += 1
        return self._pages.hash(f"p{self._num_requests}", prompt)


def _timed(call: Callable[[Any], Any], arguments: list[Any]) -> tuple[float, list[Any]]:
    """(mean CPU us per call, the answers)."""
    start = clock_ns()
    answers = [call(argument) for argument in arguments]
    return (clock_ns() - start) / len(arguments) / 1000, answers
