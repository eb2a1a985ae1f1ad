"""Who owns which page: every page is free, cached or owned, exactly once.

free      no request owns it, nothing in it can be matched
cached    no request owns it, its key still finds it; evicted, oldest first, when free pages run out
owned     one or more requests own it (`num_owners` counts them)
"""

from __future__ import annotations

from itertools import filterfalse
from typing import TYPE_CHECKING

from equipoise.errors import PageError
from equipoise.kv.recent import RecentPages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class PagePool:
    """`num_pages` pages, numbered from 0. Does not know what is in them. Pages that were never given out take no
    memory here: a simulated fleet has millions of them."""

    def __init__(self, num_pages: int, on_evict: Callable[[list[int]], None]) -> None:
        """`on_evict(pages)` is called when cached pages are given to a new owner: forget their keys."""
        self.num_pages = num_pages
        self._on_evict = on_evict
        self._freed: list[int] = []
        self._cached = RecentPages()
        self._num_owners: list[int] = []  # of those that were ever given out, which are the first ones

    @property
    def num_free(self) -> int:
        """Pages that can be given out now: free or cached."""
        return self._num_free_now + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Pages that nobody owns and that can still be matched."""
        return len(self._cached)

    def is_cached(self, page: int) -> bool:
        """True when nobody owns `page` and it can still be matched."""
        return page in self._cached

    def cached(self) -> list[int]:
        """The cached pages, the next to be evicted first."""
        return list(self._cached)

    def num_owners(self, page: int) -> int:
        """Requests that own `page`."""
        return self._num_owners[page] if page < len(self._num_owners) else 0

    def take(self, n: int) -> list[int] | None:
        """Give out `n` pages, evicting the least recently used cached ones; None, and no change, when they lack."""
        num_lacking = n - self._num_free_now
        if num_lacking > 0:
            if num_lacking > len(self._cached):
                return None
            self._evict(num_lacking)
        if n <= 0:
            return []
        freed, num_owners = self._freed, self._num_owners
        pages = freed[: -n - 1 : -1]
        del freed[-n:]
        for page in pages:
            num_owners[page] = 1
        if len(pages) < n:
            first, num_new = len(num_owners), n - len(pages)
            pages += range(first, first + num_new)
            num_owners += [1] * num_new
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add an owner to each of `pages`, which are cached or owned."""
        num_owners, cached = self._num_owners, self._cached
        for page in pages:
            if num_owners[page] == 0:
                if page not in cached:
                    raise PageError(f"page {page} is free and cannot be shared")
                cached.remove(page)
            num_owners[page] += 1

    def give_back(self, page: int, *, keep: bool) -> None:
        """Remove one owner of `page`. When it was the last, the page is cached if `keep`, else free."""
        self.give_back_all((page,), lambda _page: keep)

    def give_back_all(self, pages: Iterable[int], keep: Callable[[int], object]) -> None:
        """Remove one owner of each of `pages`, in this order; those that lose their last are cached if `keep(page)`."""
        num_owners = self._num_owners
        left: list[int] = []
        for page in pages:
            owners = num_owners[page] - 1
            if owners < 0:
                raise PageError(f"page {page} has no owner and cannot be given back")
            num_owners[page] = owners
            if owners == 0:
                left.append(page)
        kept = list(filter(keep, left))
        self._cached.add(kept)
        if len(kept) < len(left):
            self._freed += filterfalse(keep, left)

    def num_cached_among(self, pages: Iterable[int]) -> int:
        """How many of `pages` are cached."""
        return self._cached.num_among(pages)

    def drop_cached(self) -> int:
        """Make every cached page free. Returns how many there were."""
        n = len(self._cached)
        self._evict(n)
        return n

    def check(self) -> None:
        """Raise PageError unless every page is free, cached or owned, exactly once."""
        owned = sum(1 for owners in self._num_owners if owners)
        cached = self.cached()
        places = {*self._freed, *cached}
        once = len(places) == len(self._freed) + len(cached) == len(self._freed) + len(self._cached)
        unowned = all(self._num_owners[page] == 0 for page in places)
        if not once or not unowned or owned + len(places) != len(self._num_owners):
            raise PageError(
                f"{self._num_free_now} free + {len(self._cached)} cached + {owned} owned of {self.num_pages} pages"
            )

    @property
    def _num_free_now(self) -> int:
        return self.num_pages - len(self._num_owners) + len(self._freed)

    def _evict(self, n: int) -> None:
        pages = self._cached.pop(n)
        self._on_evict(pages)
        self._freed += pages
