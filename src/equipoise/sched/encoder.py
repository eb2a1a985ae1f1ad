"""Inputs that an encoder turns into embeddings (images, audio): a budget per step, and a cache of what it made.

An item fills positions [start, start + n) of the prompt. It is encoded whole, in the step whose chunk first
reaches it, and kept until every request that holds it has computed past it; then it is evicted, oldest first,
when others need the room. Requests with equal keys share one copy.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise
from typing import TYPE_CHECKING

from equipoise.errors import InvalidValueError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from equipoise.request import EncoderItem, Request
    from equipoise.sched.rules import Limit, StepView


class EncoderCache:
    """A resource and a limit in one: name it under both in an Extension.

    As a limit (`limit_rule`) it ends a chunk before the first item for which the step's budget or the cache
    lacks room. As a resource it is told of chunks and of requests that leave."""

    name = "encoder"

    def __init__(self, max_step_tokens: int, num_cache_tokens: int, *, whole_prompts: bool = False) -> None:
        """Embeddings that one step may make, and that are kept. `whole_prompts`: chunked prefill is off, so all
        items of a prompt are encoded in one step."""
        self._max_step_tokens = max_step_tokens
        self._num_cache_tokens = num_cache_tokens
        self._whole_prompts = whole_prompts
        self._left = max_step_tokens
        self._made_now: dict[str, int] = {}
        self._holding: dict[int, Request] = {}
        self._size: dict[str, int] = {}
        self._holders: dict[str, set[int]] = {}
        self._unheld: OrderedDict[str, None] = OrderedDict()
        self._num_held_tokens = 0

    def check(self, request: Request) -> None:
        """Raise InvalidValueError for items that no step, or no cache, could ever hold, and for items that overlap:
        the first would be held until it is computed past, and the second could wait for its room for ever."""
        items = sorted(request.encoder_items)
        for item, after in pairwise(items):
            if after.start < item.start + item.n:
                message = f"prompt: inputs at positions {item.start} to {item.start + item.n} and {after.start} overlap"
                raise InvalidValueError(message, "prompt")
        most = min(self._max_step_tokens, self._num_cache_tokens)
        sizes = {item.key: item.n for item in request.encoder_items}
        if self._whole_prompts and sum(sizes.values()) > most:
            message = f"prompt: inputs of {sum(sizes.values())} embeddings in all, at most {most} fit a step"
            raise InvalidValueError(message, "prompt")
        for n in sizes.values():
            if n > most:
                raise InvalidValueError(f"prompt: an input of {n} embeddings, at most {most} are allowed", "prompt")

    def limit_rule(self, _view: StepView) -> Limit:
        """Bound once a step, after `begin_step`."""
        return self._limit

    def _limit(self, request: Request, n: int) -> int:
        left, room = self._left, self._num_cache_tokens - self._num_held_tokens
        fresh: set[str] = set()
        for item in _reached(request, n):
            if item.key in self._holders or item.key in fresh:
                continue
            if item.key not in self._size:
                left -= item.n
            room -= item.n
            if left < 0 or room < 0:
                return max(0, item.start - request.num_computed)
            fresh.add(item.key)
        return n

    def begin_step(self) -> bool:
        """A new budget; requests let go of what they have computed past. It blocks nobody: a chunk that does not
        fit is cut, and its request waits in line."""
        self._left = self._max_step_tokens
        self._made_now.clear()
        for request in tuple(self._holding.values()):
            needed = {item.key for item in request.encoder_items if item.start + item.n > request.num_computed}
            self._let_go_but(request, needed)
        return False

    def share(self, _request: Request) -> str:
        return ""

    def fit(self, _request: Request, _n: int) -> bool:
        return True

    def take(self, request: Request, n: int) -> None:
        """A chunk of `n` tokens is planned: hold what it reaches."""
        for item in _reached(request, n):
            self._hold(item, request.handle)
            self._holding[request.handle] = request

    def give_back(self, request: Request) -> None:
        """`request` left its seat: it holds nothing any more. When it was preempted while a step is planned, what
        it alone reached in that step is not encoded after all."""
        self._let_go_but(request, set())
        for item in request.encoder_items:
            is_dropped = item.start >= request.num_computed and item.key in self._made_now
            if is_dropped and item.key not in self._holders:
                self._left += self._made_now.pop(item.key)
                del self._size[item.key], self._unheld[item.key]

    def is_cached(self, key: str) -> bool:
        """Are the embeddings of `key` there?"""
        return key in self._size

    def _hold(self, item: EncoderItem, handle: int) -> None:
        holders = self._holders.setdefault(item.key, set())
        if not holders:
            self._num_held_tokens += item.n
            self._unheld.pop(item.key, None)
        holders.add(handle)
        if item.key not in self._size:
            self._left -= item.n
            self._size[item.key] = self._made_now[item.key] = item.n
            self._evict()

    def _let_go_but(self, request: Request, needed: set[str]) -> None:
        """`request` holds nothing but `needed` any more."""
        for item in request.encoder_items:
            if item.key not in needed:
                self._let_go(item.key, request.handle)
        if not needed:
            self._holding.pop(request.handle, None)

    def _let_go(self, key: str, handle: int) -> None:
        holders = self._holders.get(key)
        if holders is None or handle not in holders:
            return
        holders.remove(handle)
        if not holders:
            del self._holders[key]
            self._num_held_tokens -= self._size[key]
            self._unheld[key] = None

    def _evict(self) -> None:
        """Drop what nobody holds, oldest first, until all that is kept fits."""
        num_kept = sum(self._size.values())
        while num_kept > self._num_cache_tokens and self._unheld:
            key, _none = self._unheld.popitem(last=False)
            num_kept -= self._size.pop(key)


def _reached(request: Request, n: int) -> Iterator[EncoderItem]:
    """Items with a position in the next `n` tokens, in order of position."""
    start, end = request.num_computed, request.num_computed + n
    return (item for item in request.encoder_items if item.start < end and item.start + item.n > start)
