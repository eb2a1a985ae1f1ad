"""Load in O(1): counters changed by one transition function, never by measuring again (sgl-project/sglang#13203).

What a request was charged when it came into a place is kept, and exactly that is given back when it leaves: its
prompt or its outputs may have changed since. Which places count for what: `roles`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from equipoise.errors import InvariantError
from equipoise.sched.roles import MIXED, RUNNING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from equipoise.request import Request
    from equipoise.sched.roles import Role


class Account:
    """One quantity: its sum over the requests in `places`, and what each of them was charged.

    measure: the charge on entering; None when there is none, and only `set` charges"""

    __slots__ = ("charged", "measure", "places", "total")

    def __init__(self, places: frozenset[str], measure: Callable[[Request], int] | None = None) -> None:
        self.places = places
        self.measure = measure
        self.charged: dict[int, int] = {}
        self.total = 0

    def set(self, request: Request, amount: int) -> None:
        """Charge `request` with `amount`, instead of what it was charged with."""
        self.total += amount - self.charged.get(request.handle, 0)
        self.charged[request.handle] = amount

    def give_back(self, request: Request) -> None:
        """`request` leaves with exactly what it was charged."""
        self.total -= self.charged.pop(request.handle, 0)

    def rescan(self, requests: Iterable[Request]) -> int:
        """The sum, counted anew. Raises InvariantError when somebody else is charged, or one of them is not."""
        here = {request.handle for request in requests if request.place in self.places}
        is_whole = self.measure is None or len(here) == len(self.charged)
        if not (self.charged.keys() <= here and is_whole):
            raise InvariantError(f"{sorted(self.charged)} are charged, {sorted(here)} are in {sorted(self.places)}")
        return sum(self.charged.values())


Change = tuple[tuple[Account, ...], tuple[tuple[Account, "Callable[[Request], int]"], ...], int]
"""What a move does: who gets back, who charges and how much, and by how many more requests wait."""


class Ledger:
    """Where every request is, and the load that follows from it.

    num_waiting_reqs: requests that wait
    num_inflight_rows: rows of the steps that are outstanding
    """

    def __init__(self, role: Role = MIXED) -> None:
        self.num_moves = 0
        self.num_waiting_reqs = 0
        self.num_inflight_rows = 0
        self._role = role
        self._waiting = Account(role.waiting_tokens, lambda request: request.num_known)
        self._cached = Account(role.waiting_tokens)
        self._reserved = Account(role.reserving)
        self._prefilling = Account(frozenset({"prefilling"}), lambda request: request.num_known - request.num_computed)
        self._running = Account(RUNNING, lambda request: request.stop_len - request.num_known)
        self._sent = Account(role.inflight, lambda request: request.num_computed)
        self._absent = Account(role.absent, lambda request: 1)
        self._changes = {(old, new): self._change(old, new) for old, new in role.transitions}

    # ---------------------------------------------------------------- transitions

    def move(self, request: Request, to: str) -> None:
        """`request` goes from `request.place` to the place `to`; the only writer of both.

        Raises InvariantError for a move that the role does not know."""
        change = self._changes.get((request.place, to))
        if change is None:
            raise InvariantError(f"{request} cannot go to {to!r} in the role {self._role.name}")
        left, entered, num_reqs = change
        request.place = to
        self.num_moves += 1
        self.num_waiting_reqs += num_reqs
        for account in left:
            account.give_back(request)
        for account, measure in entered:
            account.set(request, measure(request))

    def _change(self, old: str, new: str) -> Change:
        accounts = (
            self._waiting, self._cached, self._reserved, self._prefilling, self._running, self._sent, self._absent,
        )  # fmt: skip
        left = tuple(account for account in accounts if old in account.places and new not in account.places)
        entered = tuple(
            (account, account.measure)
            for account in accounts
            if account.measure is not None and old not in account.places and new in account.places
        )
        return left, entered, (new in self._role.waiting_reqs) - (old in self._role.waiting_reqs)

    def recognise(self, request: Request, num_cached: int) -> None:
        """The first `num_cached` tokens that `request` waits with are in the cache, by the last match."""
        num_cached = min(num_cached, self._waiting.charged.get(request.handle, 0))
        if num_cached != self._cached.charged.get(request.handle, 0):
            self._cached.set(request, num_cached)

    def reserve(self, request: Request, num_pages: int) -> None:
        """Promise `num_pages` pages in all to `request`, beyond those it holds; leaving the places where it may be
        promised any gives them back."""
        self._reserved.set(request, num_pages)

    def reserved(self, request: Request) -> int:
        """Pages promised to `request`."""
        return self._reserved.charged.get(request.handle, 0)

    def compute(self, request: Request, n: int) -> None:
        """A chunk of `n` tokens of a prefilling request was launched."""
        self._prefilling.total -= n
        self._prefilling.charged[request.handle] -= n

    def launch(self, num_rows: int) -> None:
        """A step was launched."""
        self.num_inflight_rows += num_rows

    def land(self, num_rows: int) -> None:
        """A step came back."""
        self.num_inflight_rows -= num_rows

    def deliver(self, num_tokens: int) -> None:
        """So many tokens reached requests that run. Whose they were, `settle` says when one stops running."""
        self._running.total -= num_tokens

    def settle(self, request: Request, num_left: int) -> None:
        """`request` is about to leave its seat, `num_left` tokens before its stop length: all that is left of its
        charge."""
        self._running.charged[request.handle] = num_left

    # ---------------------------------------------------------------- sums

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens that waiting requests bring."""
        return self._waiting.total

    @property
    def num_waiting_uncached_tokens(self) -> int:
        """Prefill that is owed: of waiting tokens those that are not known to be cached, by a remembered match or
        because a remote store brought them, and the rest of the prompts that run."""
        return self._waiting.total - self._cached.total + self._prefilling.total

    def num_uncached(self, request: Request) -> int:
        """Tokens that `request`, which waits, would compute, as far as is known."""
        handle = request.handle
        return self._waiting.charged.get(handle, 0) - self._cached.charged.get(handle, 0)

    @property
    def num_reserved_pages(self) -> int:
        """Pages promised to requests that hold KV and no seat."""
        return self._reserved.total

    @property
    def num_prefilling_tokens(self) -> int:
        """Tokens of running prefills that no step computes yet."""
        return self._prefilling.total

    @property
    def num_expected_output_tokens(self) -> int:
        """Tokens still to come of those that run, if each goes on to its stop length."""
        return self._running.total

    @property
    def num_startable_reqs(self) -> int:
        """Of those that wait, the requests that wait for nothing elsewhere."""
        return self.num_waiting_reqs - self._absent.total

    @property
    def num_sent_reqs(self) -> int:
        """Requests whose KV is sent, but not acknowledged."""
        return len(self._sent.charged)

    @property
    def num_sent_tokens(self) -> int:
        """Their tokens."""
        return self._sent.total

    def sums(self) -> dict[str, int]:
        """Every counter that follows from the places of requests, by name."""
        return {
            "num_waiting_reqs": self.num_waiting_reqs,
            "num_startable_reqs": self.num_startable_reqs,
            "num_waiting_tokens": self.num_waiting_tokens,
            "num_waiting_cached_tokens": self._cached.total,
            "num_reserved_pages": self.num_reserved_pages,
            "num_prefilling_tokens": self.num_prefilling_tokens,
            "num_expected_output_tokens": self.num_expected_output_tokens,
            "num_sent_reqs": self.num_sent_reqs,
            "num_sent_tokens": self.num_sent_tokens,
        }

    def rescan(self, requests: Iterable[Request], num_left: Callable[[Request], int]) -> dict[str, int]:
        """The same counted anew over all `requests` that have not ended: equal to `sums`, or there is a bug.

        `num_left(request)`: tokens before the stop length of one that runs."""
        requests = tuple(requests)
        self._running.rescan(requests)
        running = [request for request in requests if request.place in RUNNING]
        num_waiting = sum(request.place in self._role.waiting_reqs for request in requests)
        return {
            "num_waiting_reqs": num_waiting,
            "num_startable_reqs": num_waiting - self._absent.rescan(requests),
            "num_waiting_tokens": self._waiting.rescan(requests),
            "num_waiting_cached_tokens": self._cached.rescan(requests),
            "num_reserved_pages": self._reserved.rescan(requests),
            "num_prefilling_tokens": self._prefilling.rescan(requests),
            "num_expected_output_tokens": sum(num_left(request) for request in running),
            "num_sent_reqs": sum(request.place in self._role.inflight for request in requests),
            "num_sent_tokens": self._sent.rescan(requests),
        }


class LoadCounters(msgspec.Struct, frozen=True):
    """Load of a rank at one moment, in requests, rows and tokens; a struct, since one is made in every step.

    num_waiting_uncached_tokens: prefill that is owed: waiting tokens less those known to be cached, and
        num_prefilling_tokens; what SGLang calls so"""

    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_waiting_uncached_tokens: int
    num_prefilling_tokens: int
    num_inflight_rows: int
    num_expected_output_tokens: int
    num_reserved_tokens: int
    num_sent_reqs: int
    num_sent_tokens: int
    num_used_tokens: int
    num_total_tokens: int
    max_running: int


@dataclass(slots=True)
class Totals:
    """Counts since the scheduler was built."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    aborted: int = 0
