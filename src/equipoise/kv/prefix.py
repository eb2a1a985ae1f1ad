"""Which page holds which prefix.

A full page's key is a chained SHA-256 of the key before it and of its own tokens; the chain starts
from the request's salt, so tenants with different salts never share, and no collision can be crafted.
"""

from __future__ import annotations

from hashlib import sha256
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from equipoise.request import Tokens

BYTES_PER_TOKEN = 4


def extend_keys(keys: list[bytes], salt: str, tokens: Tokens, page_size: int, num_pages: int) -> None:
    """Append to `keys` until it has `num_pages` entries. `tokens`: (>= num_pages * page_size,) int32."""
    if len(keys) < num_pages:
        data = tokens[len(keys) * page_size : num_pages * page_size].tobytes()
        append_keys(keys, salt, data, page_size * BYTES_PER_TOKEN)


def append_keys(keys: list[bytes], salt: str, data: bytes, page_bytes: int) -> None:
    """Append the keys of the next pages, whose tokens are `data`, `page_bytes` each."""
    parent = keys[-1] if keys else sha256(salt.encode()).digest()
    for start in range(0, len(data), page_bytes):
        parent = sha256(parent + data[start : start + page_bytes]).digest()
        keys.append(parent)


class PrefixIndex:
    """Key of a full page <-> the page. The first page published under a key keeps it."""

    def __init__(self, num_pages: int) -> None:
        self._page_of: dict[bytes, int] = {}
        self._key_of: list[bytes | None] = [None] * num_pages

    def __len__(self) -> int:
        return len(self._page_of)

    def find(self, keys: list[bytes], limit: int) -> list[int]:
        """Pages of the longest run of known keys among the first `limit`."""
        pages = []
        page_of = self._page_of
        for key in islice(keys, limit):
            page = page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def publish(self, key: bytes, page: int) -> None:
        """Make `page` findable by `key`, unless another page is already or `page` has a key."""
        if self._key_of[page] is None and self._page_of.setdefault(key, page) == page:
            self._key_of[page] = key

    def publish_all(self, keys: Iterable[bytes], pages: Iterable[int]) -> None:
        """`publish` each of `keys` and its page."""
        page_of, key_of = self._page_of, self._key_of
        for key, page in zip(keys, pages, strict=True):
            if key_of[page] is None and page_of.setdefault(key, page) == page:
                key_of[page] = key

    def knows(self, key: bytes) -> bool:
        """True when a page can be found by `key`."""
        return key in self._page_of

    @property
    def key_of(self) -> Callable[[int], bytes | None]:
        """Gives the key by which a page can be found; None when it cannot. Not to be kept: `clear` makes it void."""
        return self._key_of.__getitem__

    def has_key(self, page: int) -> bool:
        """True when `page` can be found."""
        return self._key_of[page] is not None

    def forget(self, pages: Iterable[int]) -> None:
        """`pages` are about to hold something else."""
        page_of, key_of = self._page_of, self._key_of
        for page in pages:
            key = key_of[page]
            if key is not None:
                del page_of[key]
                key_of[page] = None

    def clear(self) -> None:
        """Forget every page."""
        self._page_of.clear()
        self._key_of = [None] * len(self._key_of)
