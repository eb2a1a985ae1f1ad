"""What a rank is for, as data: the places that its requests pass through, and what counts as load in which place.

    mixed    new -> waiting -> prefilling -> decoding -> draining -> ended
    prefill  new -> bootstrap -> waiting -> prefilling -> decoding -> draining -> inflight -> ended
    decode   new -> prealloc -> transfer -> waiting -> decoding -> draining -> ended

bootstrap: not yet in touch with the decode rank; inflight: its KV is sent, but not acknowledged; prealloc: needs room
for the KV that will come; transfer: the KV is coming; retracted: preempted, its KV is gone or put aside. The other
places: `places`. A request can end in every place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

RUNNING = frozenset({"prefilling", "decoding", "drafting", "verifying", "draining"})
"""Places whose requests hold a seat."""

QUEUED = frozenset({"waiting", "blocked", "returning"})
"""Wants to run: "blocked" waits for a resource, "returning" was preempted with outputs still in flight. A parked
request does not count: it would not run if it could."""


@dataclass(frozen=True)
class Role:
    """Legal moves, and the places that each quantity of the ledger counts.

    moves: place -> the places that may come next; "ended" may follow every place but "new" and needs no entry
    waiting_reqs, waiting_tokens: where a request counts as waiting, and where its tokens do; a request that holds
        its KV already brings no tokens
    reserving: where pages may be promised to a request
    inflight: where a request is sent, but not acknowledged
    absent: where a request counts as waiting, but for something elsewhere: no step can start it
    enters: where new requests wait; loads: where KV comes to them; returns: where the preempted wait
    """

    name: str
    moves: Mapping[str, tuple[str, ...]]
    waiting_reqs: frozenset[str]
    waiting_tokens: frozenset[str]
    reserving: frozenset[str]
    inflight: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()
    enters: str = "waiting"
    loads: str = "loading"
    returns: str = "waiting"

    @property
    def joins(self) -> bool:
        """Prompts are computed elsewhere: requests join the decode batch when their KV has come."""
        return "transfer" in self.moves

    @property
    def transitions(self) -> list[tuple[str, str]]:
        """Every legal (from, to)."""
        ends = [(place, "ended") for place in self.moves if place != "new"]
        return ends + [(place, to) for place, targets in self.moves.items() for to in targets]


_MIXED_MOVES: dict[str, tuple[str, ...]] = {
    "new": ("waiting", "parked"),
    "parked": ("waiting",),
    "waiting": ("blocked", "loading", "prefilling"),
    "blocked": ("waiting",),
    "loading": ("waiting",),
    "prefilling": ("decoding", "verifying", "waiting", "returning"),
    "decoding": ("draining", "waiting", "returning"),
    "verifying": ("drafting",),
    "drafting": ("verifying", "waiting", "returning"),
    "draining": (),
    "returning": ("waiting",),
}

MIXED = Role(
    name="mixed",
    moves=_MIXED_MOVES,
    waiting_reqs=QUEUED,
    waiting_tokens=QUEUED,
    reserving=frozenset({"loading", "waiting", "blocked"}),
)

PREFILL = Role(
    name="prefill",
    moves=_MIXED_MOVES
    | {
        "new": ("bootstrap", "parked"),
        "parked": ("bootstrap",),
        "bootstrap": ("waiting",),
        "draining": ("inflight",),
        "inflight": (),
    },
    waiting_reqs=QUEUED | {"bootstrap"},
    waiting_tokens=QUEUED | {"bootstrap"},
    reserving=MIXED.reserving,
    inflight=frozenset({"inflight"}),
    absent=frozenset({"bootstrap"}),
    enters="bootstrap",
)

DECODE = Role(
    name="decode",
    moves={
        "new": ("prealloc", "parked"),
        "parked": ("prealloc",),
        "prealloc": ("transfer",),
        "transfer": ("waiting",),
        "waiting": ("blocked", "decoding", "drafting"),
        "blocked": ("waiting",),
        "prefilling": ("decoding", "verifying", "retracted", "returning"),
        "decoding": ("draining", "retracted", "returning"),
        "verifying": ("drafting",),
        "drafting": ("verifying", "retracted", "returning"),
        "draining": (),
        "returning": ("retracted",),
        "retracted": ("waiting", "prefilling"),
    },
    waiting_reqs=frozenset({"prealloc", "transfer", "waiting", "blocked", "returning", "retracted"}),
    waiting_tokens=frozenset({"prealloc", "returning", "retracted"}),
    reserving=frozenset({"transfer", "waiting", "blocked"}),
    absent=frozenset({"transfer"}),
    enters="prealloc",
    loads="transfer",
    returns="retracted",
)

ROLES = {role.name: role for role in (MIXED, PREFILL, DECODE)}
