"""Where every request is, and the only code that moves one.

    new ──add──> waiting ──admit──> prefilling ──last chunk──> decoding ──length certain──> draining ──> ended
     │             ▲  ▲                 │                          │                           │
     └─> parked ───┘  └──> blocked      └────────preempt───────────┤                           └ its last tokens
        (an event)        (a resource   ▲                          ▼                             are in flight
                           is used up)  └─ outputs came back ─ returning
    waiting ──a remote store holds its prefix──> loading ──it came──> waiting, with pages
    Ranks of prefill and decode workers have places of their own before and after these: `roles`.
    abort, a stop token and a deadline end a request in any place.

A request that runs with drafts goes from prefilling to verifying (a row is in flight) and drafting (at rest) in
turns, instead of decoding. Requests in prefilling, decoding, drafting, verifying and draining hold a seat and
pages; the others hold neither.
"""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING

from equipoise.errors import InvariantError
from equipoise.sched.columns import STOP_IDS_WIDTH, Columns
from equipoise.sched.ledger import Ledger
from equipoise.sched.roles import MIXED
from equipoise.sched.roster import Roster
from equipoise.sched.waiting import WaitingQueue

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from equipoise.kv.protocol import KVMemory
    from equipoise.request import FinishReason, Request
    from equipoise.sched.roles import Role
    from equipoise.sched.rules import Order, Resource


ParkKey = tuple[str, str]
"""What a parked request waits for, ("grammar", ""), or the share of a resource that blocks it, ("lora", "7")."""
BOOTSTRAP: ParkKey = ("decode rank", "")


class Places:
    """Every request of one rank that has not ended, by place.

    joining: the KV of their prompts has come, a seat is promised to them; sent: their KV goes to another rank"""

    def __init__(
        self,
        kv: KVMemory,
        order: Order,
        resources: Sequence[Resource],
        max_running: int,
        max_model_len: int,
        role: Role = MIXED,
    ) -> None:
        self.role = role
        self.columns = Columns(max_running, max_model_len, kv.page_size)
        self.ledger = Ledger(role)
        self.requests: dict[int, Request] = {}
        self.waiting = WaitingQueue(order)
        self.joining = WaitingQueue(order)
        self.sent: dict[int, Request] = {}
        self.parked: dict[ParkKey, WaitingQueue] = {}
        self.prefilling: list[Request] = []
        self.decoding = Roster(max_running)
        self.drafting: dict[int, Request] = {}
        self.verifying: dict[int, Request] = {}
        self.draining: dict[int, Request] = {}
        self.loading: dict[int, Request] = {}
        self.loaded: dict[int, Request] = {}
        self.quarantine: dict[int, Request] = {}
        self.many_stops: dict[int, frozenset[int]] = {}
        self._kv = kv
        self._order = order
        self._resources = resources
        self._by_seat: list[Request | None] = [None] * max_running
        self._free_seats = list(range(max_running - 1, -1, -1))

    # ---------------------------------------------------------------- facts

    @property
    def num_free_seats(self) -> int:
        """Seats that nobody holds."""
        return len(self._free_seats)

    @property
    def num_open_seats(self) -> int:
        """Seats that nobody holds, and that are promised to nobody whose KV comes or has come."""
        num_promised = len(self.loading) + len(self.joining) if self.role.joins else 0
        return len(self._free_seats) - num_promised

    @property
    def num_running(self) -> int:
        """Seats that somebody holds."""
        return len(self._by_seat) - len(self._free_seats)

    def at(self, seat: int) -> Request:
        """Who holds `seat`. Raises InvariantError when nobody does."""
        request = self._by_seat[seat]
        if request is None:
            raise InvariantError(f"seat {seat} is in a place but holds no request")
        return request

    def at_if_any(self, seat: int) -> Request | None:
        """Who holds `seat`, None when nobody does."""
        return self._by_seat[seat]

    def preemptible(self) -> Iterator[Request]:
        """Decoding, drafting and prefilling requests. Draining ones are about to leave by themselves."""
        yield from map(self.at, self.decoding.seats().tolist())
        yield from self.drafting.values()
        yield from self.prefilling

    def check_ledger(self) -> None:
        """Raise InvariantError unless the ledger equals a rescan: of what was charged, and where a quantity lives in
        the columns, of what they say now."""
        columns, requests = self.columns, self.requests.values()

        def num_left(request: Request) -> int:
            return int(columns.stop_len[request.seat] - columns.known[request.seat])

        sums, counted = self.ledger.sums(), self.ledger.rescan(requests, num_left)
        if sums != counted:
            raise InvariantError(f"the ledger says {sums}, a rescan says {counted}")
        num_uncomputed = sum(request.num_known - request.num_computed for request in self.prefilling)
        if num_uncomputed != self.ledger.num_prefilling_tokens:
            raise InvariantError(
                f"the ledger says {self.ledger.num_prefilling_tokens} tokens are to be prefilled, "
                f"the requests say {num_uncomputed}"
            )

    # ---------------------------------------------------------------- moves

    def enter(self, request: Request) -> None:
        """New or parked -> where the role has requests wait first."""
        if self.role.enters == "bootstrap":
            self._park(request, "bootstrap", BOOTSTRAP)
        else:
            self._queue(request, self.role.enters)

    def come_back(self, request: Request) -> None:
        """Preempted, with all its outputs known -> waiting, or retracted."""
        self._queue(request, self.role.returns)

    def park(self, request: Request, event: str, now_s: float) -> None:
        """New -> parked until `event` has happened."""
        request.held_since_s = now_s
        self._park(request, "parked", (event, ""))

    def block(self, request: Request, resource: str, share: str, now_s: float) -> None:
        """Waiting -> blocked until there may be room in `resource` for `share`."""
        self.waiting.remove(request)
        if request.held_since_s is None:  # else it was asked again and still has no room
            request.held_since_s = now_s
        self._park(request, "blocked", (resource, share))

    def unpark(self, request: Request) -> None:
        """Parked, blocked or bootstrap -> waiting. A resource may hold one again that it held: that is one wait."""
        self._leave_park(request)
        if request.place == "parked":
            request.held_since_s = None
            self.enter(request)
        else:
            self._queue(request, "waiting")

    def blocked_by(self, resource: str) -> list[tuple[str, WaitingQueue]]:
        """Blocked requests by the share of `resource` that they want, the group with the first head first."""
        groups = [(key[1], queue) for key, queue in self.parked.items() if key[0] == resource]
        return sorted(groups, key=lambda group: group[1].head_key())

    def load(self, request: Request) -> None:
        """Waiting -> loading, with pages that a remote store is about to fill; the rest of its prompt is promised
        to it, so that those who wait with pages cannot lock each other out."""
        self.waiting.remove(request)
        self.loading[request.handle] = request
        self.ledger.move(request, self.role.loads)
        self.ledger.reserve(request, max(-(-request.num_known // self._kv.page_size) - len(request.pages), 0))

    def arrive(self, request: Request, num_loaded: int) -> None:
        """Loading -> waiting, with `num_loaded` tokens in its pages."""
        del self.loading[request.handle]
        request.num_loaded = num_loaded
        if num_loaded:
            self.loaded[request.handle] = request
        else:
            self.unload(request)
        self._queue(request, "waiting")
        self.ledger.recognise(request, num_loaded)

    def receive(self, request: Request, first_token: int) -> None:
        """Transfer -> waiting to join the decode batch: all KV of its prompt is in its pages."""
        del self.loading[request.handle]
        request.num_loaded = request.num_computed = request.num_prompt
        request.may_load = False
        request.output_ids.append(first_token)
        self.ledger.move(request, "waiting")
        self.joining.push(request)

    def unload(self, request: Request) -> None:
        """Take the pages of a request without a seat: what was loaded, or was to be, is computed now."""
        request.may_load = False
        self.loaded.pop(request.handle, None)
        self.ledger.reserve(request, 0)
        self.ledger.recognise(request, 0)
        self._kv.release(request)

    def seat(self, request: Request) -> int:
        """Waiting -> prefilling, with pages; returns the seat."""
        self.waiting.remove(request)
        request.held_since_s = None
        self.loaded.pop(request.handle, None)
        seat = self._take_seat(request)
        insort(self.prefilling, request, key=lambda r: (self._order(r), r.handle))
        self.ledger.move(request, "prefilling")
        return seat

    def join(self, request: Request) -> int:
        """Waiting to join -> decoding; returns the seat."""
        self.joining.remove(request)
        seat = self._take_seat(request)
        self.decoding.append(seat)
        self.ledger.move(request, "decoding")
        return seat

    def decode(self, request: Request, seat: int) -> None:
        """Prefilling -> decoding."""
        self.prefilling.remove(request)
        self.decoding.append(seat)
        self.ledger.move(request, "decoding")

    def verify(self, request: Request) -> None:
        """Prefilling or drafting -> verifying: its next step depends on what the row in flight draws."""
        if request.place == "prefilling":
            self.prefilling.remove(request)
        else:
            del self.drafting[request.handle]
        self.verifying[request.handle] = request
        self.ledger.move(request, "verifying")

    def draft(self, request: Request) -> None:
        """Verifying -> drafting."""
        del self.verifying[request.handle]
        self.drafting[request.handle] = request
        self.ledger.move(request, "drafting")

    def drain(self, seats: NDArray[np.int64]) -> None:
        """Decoding -> draining: the lengths are certain, no step is planned for them any more."""
        self.decoding.remove_all(seats)
        for request in map(self.at, seats.tolist()):
            self.draining[request.handle] = request
            self.ledger.move(request, "draining")

    def preempt(self, request: Request) -> None:
        """Prefilling or decoding -> waiting, or returning while outputs are in flight."""
        request.num_preemptions += 1
        self._vacate(request)
        request.num_computed = 0
        if request.num_inflight:
            self.ledger.move(request, "returning")
        else:
            self.come_back(request)

    def send(self, request: Request) -> None:
        """Draining -> inflight: its KV goes to another rank, and its pages stay until that is done."""
        self._leave_seat(request)
        self.sent[request.handle] = request
        self.ledger.move(request, "inflight")

    def end(self, request: Request, reason: FinishReason) -> None:
        """Any place -> ended. The one way out, exactly once for every request."""
        if request.seat is not None:
            self._vacate(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        elif request in self.joining:
            self.joining.remove(request)
        elif request.parked_for is not None:
            self._leave_park(request)
        if self.loading.pop(request.handle, None):
            # The store may still write into its pages: nobody gets them until it says that it is done.
            self.quarantine[request.handle] = request
        elif self.sent.pop(request.handle, None):
            self._kv.release(request)
        elif request.pages:
            self.unload(request)
        self.ledger.move(request, "ended")
        request.finish_reason = reason
        del self.requests[request.handle]

    def _queue(self, request: Request, place: str) -> None:
        self.ledger.move(request, place)
        self.waiting.push(request)

    def _take_seat(self, request: Request) -> int:
        seat = self._free_seats.pop()
        self.columns.seat(request, seat)
        self._by_seat[seat] = request
        if len(request.stop_ids) > STOP_IDS_WIDTH:
            self.many_stops[seat] = frozenset(request.stop_ids)
        return seat

    def _park(self, request: Request, place: str, key: ParkKey) -> None:
        self.ledger.move(request, place)
        request.parked_for = key
        self.parked.setdefault(key, WaitingQueue(self._order)).push(request)

    def _leave_park(self, request: Request) -> None:
        key = request.parked_for
        if key is None:
            raise InvariantError(f"{request} is not parked")
        request.parked_for = None
        self.parked[key].remove(request)
        if not self.parked[key]:
            del self.parked[key]

    def _vacate(self, request: Request) -> None:
        """Take seat and pages from a running request."""
        self._leave_seat(request)
        self._kv.release(request)

    def _leave_seat(self, request: Request) -> None:
        seat = request.seat
        if seat is None:
            raise InvariantError(f"{request} has no seat to leave")
        match request.place:
            case "prefilling":
                self.prefilling.remove(request)
            case "decoding":
                self.decoding.remove(seat)
            case "drafting":
                del self.drafting[request.handle]
            case "verifying":
                del self.verifying[request.handle]
            case _:
                del self.draining[request.handle]
        known = int(self.columns.known[seat])
        request.num_inflight = int(self.columns.length[seat]) - known
        self.ledger.settle(request, int(self.columns.stop_len[seat]) - known)
        self.columns.unseat(request, seat)
        self._by_seat[seat] = None
        self._free_seats.append(seat)
        self.many_stops.pop(seat, None)
        for resource in self._resources:
            resource.give_back(request)
