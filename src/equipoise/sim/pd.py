"""Requests served by pairs: a prefill rank computes the prompt, its KV is sent, a decode rank computes the output.

    decode rank    prealloc ──room for prompt and first token──> transfer ───────────────> waiting ─> decoding ─> ended
    prefill rank   bootstrap ──told so──> waiting ─> prefilling ─> draining ─> inflight ─KV─┘ ended

As with SGLang's pairs: both legs come at once; the prompt is computed only when the decode rank has a seat and pages
for it, and the first token, which the prefill rank draws, reaches the client from the decode rank as the request joins
its batch. KV is sent when all of a prompt is computed, less what the decode rank has cached; each rank sends, or takes,
one prompt's KV at a time, in the order in which they were computed.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from equipoise.sim.events import Priority
from equipoise.sim.results import NEVER, PS, Requests, spread_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from equipoise.config.worker import WorkerRole
    from equipoise.exec.cost import StepLoad
    from equipoise.request import Request
    from equipoise.sim.events import Events
    from equipoise.sim.fleet import RoleSize, Seat
    from equipoise.sim.scenario import FleetConfig
    from equipoise.sim.workload.request import SimRequest

FIRST_TOKEN = 0
BITS_PER_BYTE = 8


class Legs:
    """Columns of both legs by request; times in seconds, NaN for what did not happen, -1 where there was no pair.

    prefill, decode: what became of each leg on its rank
    reserved_s: the decode rank had room; sent_s: the KV began to be sent; received_s: it was there
    sent_len: tokens whose KV was sent
    busy: of all ranks"""

    def __init__(self, num_ranks: int) -> None:
        self.busy = BusyRanks(num_ranks)
        self.prefill = Requests()
        self.decode = Requests()
        self.reserved_s = array("d")
        self.sent_s = array("d")
        self.received_s = array("d")
        self.sent_len = array("q")

    def add(self, body: SimRequest) -> None:
        """The next request arrived."""
        for leg in (self.prefill, self.decode):
            leg.add(body, body.arrival_s)
        for column in (self.reserved_s, self.sent_s, self.received_s):
            column.append(NEVER)
        self.sent_len.append(0)

    def settle(self, index: int, requests: Requests) -> None:
        """Request `index` has ended: tell `requests` what its client saw."""
        prefill, decode = self.prefill, self.decode
        requests.admitted_s[index] = prefill.admitted_s[index]
        is_over_at_first = np.isnan(decode.last_s[index])
        requests.first_s[index] = self.received_s[index] if is_over_at_first else decode.first_s[index]
        requests.last_s[index] = self.received_s[index] if is_over_at_first else decode.last_s[index]
        requests.num_cached[index] = prefill.num_cached[index]
        requests.num_preemptions[index] = prefill.num_preemptions[index] + decode.num_preemptions[index]

    def columns(self) -> dict[str, NDArray[np.float64] | NDArray[np.int64]]:
        """All columns by name."""
        prefill = self.prefill
        return {
            "prefill_worker": np.array(prefill.worker),
            "prefill_rank": np.array(prefill.rank),
            "reserved_s": np.array(self.reserved_s),
            "computed_s": np.array(prefill.last_s),
            "sent_s": np.array(self.sent_s),
            "received_s": np.array(self.received_s),
            "sent_len": np.array(self.sent_len),
        }

    def summary(self, requests: Requests) -> dict[str, float]:
        """Milliseconds of each stage until the first token, which add up to TTFT, of the requests that ended."""
        columns, legs = requests.columns(), self.columns()
        done = (legs["prefill_worker"] >= 0) & ~np.isnan(columns["last_s"])
        ends = (
            columns["arrival_s"], legs["reserved_s"], columns["admitted_s"], legs["computed_s"], legs["sent_s"],
            legs["received_s"], columns["first_s"],
        )  # fmt: skip
        found: dict[str, float] = {}
        for stage, since_s, until_s in zip(STAGES, ends, ends[1:], strict=False):
            found |= spread_of(stage, (until_s - since_s)[done] * 1e3)
        return found


STAGES = ("reserve", "prefill_queue", "prefill", "send_queue", "transfer", "join")
"""Of a pair's TTFT: until the decode rank has room, until the prefill rank begins, the prompt, the wait for the link,
the KV's way, until the request joins the decode batch."""


class Handover(NamedTuple):
    """A request between its two ranks."""

    prefill: Seat
    decode: Seat


class Handovers:
    """Moves every pair's KV, on virtual time; what decode ranks reserve room by (`RemoteKV`).

    `on_handed(handle, now)`: the prefill leg of a request is over. `on_end(request, now)`: so is the decode leg,
    because the first token was the last."""

    def __init__(
        self,
        fleet: FleetConfig,
        events: Events,
        legs: Legs,
        now: Callable[[], float],
        on_handed: Callable[[int, float], None],
        on_end: Callable[[Request, float], None],
    ) -> None:
        self._token_s = fleet.kv_bytes_per_token * BITS_PER_BYTE / (fleet.transfer_gbps * 1e9)
        self._latency_s = fleet.transfer_ms / 1e3
        self._events = events
        self._legs = legs
        self._now = now
        self._on_handed = on_handed
        self._on_end = on_end
        self._handovers: dict[int, Handover] = {}
        self._free_at: dict[int, float] = {}  # links, by number of rank

    def begin(self, prefill: Seat, prompt: Request, decode: Seat, request: Request, now: float) -> None:
        """Both legs of a request come to their ranks. Raises RequestError when one of them cannot be served."""
        prefill.group.tell(prefill.place, lambda rank: rank.add(prompt), now)
        self._handovers[request.handle] = Handover(prefill, decode)
        try:
            decode.group.add(decode.place, request, now)
        except Exception:
            del self._handovers[request.handle]
            prefill.group.tell(prefill.place, lambda rank: rank.abort(prompt.handle), now)
            raise

    # What decode ranks ask: RemoteKV

    def num_tokens(self, request: Request) -> int:
        """All of the prompt."""
        return request.num_prompt

    def start(self, request: Request, first: int, upto: int) -> None:
        """A decode rank has room for `request`, of which tokens [first, upto) must come: the prompt may be computed."""
        handle, now = request.handle, self._now()
        self._legs.reserved_s[handle] = now
        self._legs.sent_len[handle] = upto - first
        self._events.at(now, Priority.ARRIVE, lambda: self._bootstrapped(handle))

    def _bootstrapped(self, handle: int) -> None:
        seat = self._handovers[handle].prefill
        seat.group.tell(seat.place, lambda rank: rank.wake(handle), self._now())

    # What prefill ranks tell

    def computed(self, request: Request, now: float) -> None:
        """The prompt of `request` is computed: its KV is sent when both ranks' links are free."""
        handle, free_at = request.handle, self._free_at
        prefill, decode = (seat.number for seat in self._handovers[handle])
        sent_s = max(now, free_at.get(prefill, 0.0), free_at.get(decode, 0.0))
        free_at[prefill] = free_at[decode] = sent_s + self._legs.sent_len[handle] * self._token_s
        self._legs.sent_s[handle] = sent_s
        received_s = free_at[prefill] + self._latency_s
        self._events.at(received_s, Priority.ARRIVE, lambda: self._received(handle, received_s))

    def _received(self, handle: int, now: float) -> None:
        prefill, decode = self._handovers.pop(handle)
        self._legs.received_s[handle] = now
        prefill.group.tell(prefill.place, lambda rank: rank.kv_sent(handle), now)
        self._on_handed(handle, now)
        ended = decode.group.tell(decode.place, lambda rank: rank.kv_received(handle, FIRST_TOKEN), now)
        if ended is not None:
            self._on_end(ended, now)


class BusyRanks:
    """A step sink: how long each rank was in steps in which it computed something."""

    def __init__(self, num_ranks: int) -> None:
        self._busy_ps = [0] * num_ranks

    def add(self, rank: int, ends_s: float, step_s: float, wait_s: float, load: StepLoad) -> None:
        """See StepSink."""
        self._busy_ps[rank] += round(step_s * PS)

    def add_decodes(
        self,
        rank: int,
        ends_s: NDArray[np.float64],
        step_s: NDArray[np.float64],
        wait_s: NDArray[np.float64],
        decode_rows: int,
        kv_tokens: NDArray[np.int64],
    ) -> None:
        """See StepSink."""
        self._busy_ps[rank] += int(np.rint(step_s * PS).astype(np.int64).sum())

    def shares(self, sizes: Mapping[WorkerRole, RoleSize], duration_s: float) -> dict[str, float]:
        """Of the time of each role's ranks."""
        found, first = {}, 0
        for role, size in sizes.items():
            busy_s = sum(self._busy_ps[first : first + size.num_ranks]) / PS
            found[f"{role}_busy_share"] = busy_s / (duration_s * size.num_ranks) if duration_s else NEVER
            first += size.num_ranks
        return found
