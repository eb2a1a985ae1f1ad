"""Paged KV memory with a prefix cache: `KVMemory` over a page pool and a prefix index."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from equipoise.errors import PageError
from equipoise.kv.pages import PagePool
from equipoise.kv.prefix import BYTES_PER_TOKEN, PrefixIndex, append_keys, extend_keys
from equipoise.kv.protocol import PrefixMatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from equipoise.request import Request, Tokens

NO_MATCH = PrefixMatch([], 0)


class Memo(NamedTuple):
    """The last match, which a request that does not fit asks for again in every step: it costs no look-up until
    one of its pages is evicted, or the page after them is published under `next_key`."""

    request: Request
    num_known: int
    match: PrefixMatch
    pages: frozenset[int]
    next_key: bytes | None


class PagedKV:
    """KV pages of one rank. Keeps len(request.pages) == ceil(highest `upto` granted / page_size)."""

    def __init__(self, num_pages: int, page_size: int, *, prefix_cache: bool) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self._index = PrefixIndex(num_pages)
        self._pool = PagePool(num_pages, on_evict=self._evict)
        self._shares = prefix_cache
        self._memo: Memo | None = None
        self._private: set[int] = set()

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_cached(self) -> int:
        """Pages that nobody owns and that can still be matched."""
        return self._pool.num_cached

    def prepare(self, request: Request) -> None:
        limit = self._most_matched(request)
        if self._shares and request.uses_prefix_cache and len(request.page_keys) < limit:
            extend_keys(request.page_keys, request.prefix_salt, known_tokens(request), self.page_size, limit)

    def match(self, request: Request) -> PrefixMatch:
        if request.pages:
            return PrefixMatch([], request.num_loaded)
        if not self._shares or not request.uses_prefix_cache:
            return NO_MATCH
        memo = self._memo
        if memo is not None and memo.request is request and memo.num_known == request.num_known:
            return memo.match
        self.prepare(request)
        limit = self._most_matched(request)
        pages = self._index.find(request.page_keys, limit)
        match = PrefixMatch(pages, len(pages) * self.page_size)
        next_key = request.page_keys[len(pages)] if len(pages) < limit else None
        self._memo = Memo(request, request.num_known, match, frozenset(pages), next_key)
        return match

    def admit(self, request: Request, match: PrefixMatch, upto: int, reserve: int) -> bool:
        if request.pages and match.pages:
            raise PageError(f"{request} has {len(request.pages)} pages and cannot take a match")
        pool = self._pool
        if pool.num_free < reserve:
            return False
        if pool.num_free - pool.num_cached_among(match.pages) < reserve:
            return False
        pool.share(match.pages)
        request.pages += match.pages
        request.num_published += len(match.pages)
        if not self.grow(request, upto):
            raise PageError(f"{request} reserved {reserve} pages, too few for {upto} tokens")
        return True

    def grow(self, request: Request, upto: int) -> bool:
        if upto < 0:
            raise PageError(f"{request} asks for pages up to {upto}")
        missing = -(-upto // self.page_size) - len(request.pages)
        if missing <= 0:
            return True
        pages = self._pool.take(missing)
        if pages is None:
            return False
        request.pages += pages
        return True

    def extend(self, requests: Sequence[Request]) -> list[int] | None:
        pages = self._pool.take(len(requests))
        if pages is not None:
            for request, page in zip(requests, pages, strict=True):
                request.pages.append(page)
        return pages

    def publish(self, request: Request, tokens: Tokens, upto: int) -> None:
        num_full = upto // self.page_size
        if self._shares and num_full > request.num_published:
            if len(request.page_keys) < num_full:
                extend_keys(request.page_keys, request.prefix_salt, tokens, self.page_size, num_full)
            self._publish(request, num_full)

    def publish_next(self, requests: Sequence[Request], tokens: Tokens) -> None:
        if not self._shares:
            return
        data, page_bytes = tokens.tobytes(), self.page_size * BYTES_PER_TOKEN
        for request, start in zip(requests, range(0, len(data), page_bytes), strict=True):
            if len(request.page_keys) == request.num_published:
                append_keys(request.page_keys, request.prefix_salt, data[start : start + page_bytes], page_bytes)
        for request in requests:
            self._publish(request, request.num_published + 1)

    def _publish(self, request: Request, num_full: int) -> None:
        """Let others find its pages up to `num_full`, whose keys are known."""
        keys, pages, first = request.page_keys, request.pages, request.num_published
        if num_full == first + 1 and not self._private:
            self._index.publish(keys[first], pages[first])
        elif not self._private:
            self._index.publish_all(keys[first:num_full], pages[first:num_full])
        else:
            public = [i for i in range(first, num_full) if pages[i] not in self._private]
            self._index.publish_all([keys[i] for i in public], [pages[i] for i in public])
        request.num_published = num_full
        next_key = None if self._memo is None else self._memo.next_key
        if next_key is not None and self._index.knows(next_key):
            self._memo = None

    def release(self, request: Request) -> None:
        self._pool.give_back_all(reversed(request.pages), self._index.key_of)
        # One that others share was published before the flush, and nobody publishes it again.
        self._private.difference_update(request.pages)
        request.pages = []
        request.num_published = request.num_loaded = 0

    def flush(self) -> int:
        dropped = self._pool.drop_cached()
        self._index.clear()
        self._private = {page for page in range(self.num_pages) if self._pool.num_owners(page)}
        self._memo = None
        return dropped

    def check(self) -> None:
        self._pool.check()
        for page in range(self.num_pages):
            if not self._pool.num_owners(page) and self._index.has_key(page) != self._pool.is_cached(page):
                raise PageError(f"page {page} has no owner; it has a key and is not cached, or the other way round")

    def _most_matched(self, request: Request) -> int:
        """Pages. The step must compute at least one token, or there would be no logits to draw from."""
        return (request.num_known - 1) // self.page_size

    def _evict(self, pages: list[int]) -> None:
        """Cached pages go to new owners: nobody matches them any more."""
        self._index.forget(pages)
        if self._memo is not None and not self._memo.pages.isdisjoint(pages):
            self._memo = None


def known_tokens(request: Request) -> Tokens:
    """Prompt and known outputs of a request without a seat: (num_known,) int32."""
    if not request.output_ids:
        return request.prompt_ids
    return np.concatenate([request.prompt_ids, np.asarray(request.output_ids, np.int32)])
