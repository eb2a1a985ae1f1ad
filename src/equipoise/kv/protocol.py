"""What the scheduler asks of KV memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from equipoise.request import Request, Tokens


class PrefixMatch(NamedTuple):
    """Pages that already hold the first `num_tokens` tokens of a request, in order."""

    pages: list[int]
    num_tokens: int


class KVMemory(Protocol):
    """Pages of one rank. `request.pages` holds a request's pages in order of position."""

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        ...

    @property
    def num_pages(self) -> int:
        """All pages."""
        ...

    @property
    def num_free(self) -> int:
        """Pages that can be given out now, cached ones included."""
        ...

    def prepare(self, request: Request) -> None:
        """Do now, when `request` arrives, what its first `match` would do: hash its prompt. The match comes between
        two steps, the arrival while one runs."""
        ...

    def match(self, request: Request) -> PrefixMatch:
        """The longest cached prefix of a request; at least its last token is left out. Of one that has pages
        already, since a remote store filled them: no more pages, and the tokens that are in them."""
        ...

    def admit(self, request: Request, match: PrefixMatch, upto: int, reserve: int) -> bool:
        """Give `request` the match and pages for [0, upto). All or nothing.

        False when `reserve` pages beyond the match would not be left: the caller's margin, counted
        with the pages for `upto`."""
        ...

    def grow(self, request: Request, upto: int) -> bool:
        """Give `request` pages for tokens [0, upto). All or nothing; False when they do not fit."""
        ...

    def extend(self, requests: Sequence[Request]) -> list[int] | None:
        """Give each of `requests`, whose pages are full, one more; returns those pages in that order.

        All or nothing; None when they do not fit."""
        ...

    def publish(self, request: Request, tokens: Tokens, upto: int) -> None:
        """Let others match the full pages of `tokens[:upto]`: all known, written before any later step reads them."""
        ...

    def publish_next(self, requests: Sequence[Request], tokens: Tokens) -> None:
        """The same for the one page after those that each of `requests` has published, which has filled.

        tokens: (num_requests, page_size), what is in that page. A third cheaper than one by one."""
        ...

    def release(self, request: Request) -> None:
        """Take every page from `request`; what was published stays cached, its last page evicted first."""
        ...

    def flush(self) -> int:
        """Forget every prefix; pages in use stay with their owners. Returns the cached pages dropped."""
        ...

    def check(self) -> None:
        """Raise PageError when pages are counted wrongly."""
        ...
