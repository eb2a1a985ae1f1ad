"""Who owns which page: every page is free, cached or owned, exactly once.

free      no request owns it, nothing in it can be matched
cached    no request owns it, its key still finds it; evicted, oldest first, when free pages run out
owned     one or more requests own it (`num_owners` counts them)
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from equipoise.errors import PageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class PagePool:
    """`num_pages` pages, numbered from 0. Does not know what is in them."""

    def __init__(self, num_pages: int, on_evict: Callable[[int], None]) -> None:
        """`on_evict(page)` is called when a cached page is given to a new owner: forget its key."""
        self.num_pages = num_pages
        self._on_evict = on_evict
        self._free = list(range(num_pages - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._num_owners = [0] * num_pages

    @property
    def num_free(self) -> int:
        """Pages that can be given out now: free or cached."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Pages that nobody owns and that can still be matched."""
        return len(self._cached)

    def is_cached(self, page: int) -> bool:
        """True when nobody owns `page` and it can still be matched."""
        return page in self._cached

    def num_owners(self, page: int) -> int:
        """Requests that own `page`."""
        return self._num_owners[page]

    def take(self, n: int) -> list[int] | None:
        """Give out `n` pages, evicting the least recently used cached ones; None, and no change, when they lack."""
        free = self._free
        if n > len(free):
            if n > self.num_free:
                return None
            self._evict(n - len(free))
        if n == 0:
            return []
        pages = free[: -n - 1 : -1]
        del free[-n:]
        num_owners = self._num_owners
        for page in pages:
            num_owners[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add an owner to each of `pages`, which are cached or owned."""
        for page in pages:
            if self._num_owners[page] == 0:
                if page not in self._cached:
                    raise PageError(f"page {page} is free and cannot be shared")
                del self._cached[page]
            self._num_owners[page] += 1

    def give_back(self, page: int, *, keep: bool) -> None:
        """Remove one owner of `page`. When it was the last, the page is cached if `keep`, else free."""
        self.give_back_all((page,), lambda _page: keep)

    def give_back_all(self, pages: Iterable[int], keep: Callable[[int], bool]) -> None:
        """Remove one owner of each of `pages`, in this order; those that lose their last are cached if `keep(page)`."""
        num_owners, cached, free = self._num_owners, self._cached, self._free
        for page in pages:
            owners = num_owners[page] - 1
            if owners < 0:
                raise PageError(f"page {page} has no owner and cannot be given back")
            num_owners[page] = owners
            if owners == 0:
                if keep(page):
                    cached[page] = None
                else:
                    free.append(page)

    def num_cached_among(self, pages: Iterable[int]) -> int:
        """How many of `pages` are cached."""
        return sum(map(self._cached.__contains__, pages))

    def drop_cached(self) -> int:
        """Make every cached page free. Returns how many there were."""
        n = len(self._cached)
        self._evict(n)
        return n

    def check(self) -> None:
        """Raise PageError unless every page is free, cached or owned, exactly once."""
        owned = sum(1 for owners in self._num_owners if owners)
        places = set(self._free) | self._cached.keys()
        once = len(places) == len(self._free) + len(self._cached)
        unowned = all(self._num_owners[page] == 0 for page in places)
        if not once or not unowned or owned + len(places) != self.num_pages:
            raise PageError(
                f"{len(self._free)} free + {len(self._cached)} cached + {owned} owned of {self.num_pages} pages"
            )

    def _evict(self, n: int) -> None:
        for _ in range(n):
            page, _none = self._cached.popitem(last=False)
            self._on_evict(page)
            self._free.append(page)
