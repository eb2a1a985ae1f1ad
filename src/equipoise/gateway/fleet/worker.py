"""A worker as the gateway knows it: what it is, in which state, how loaded, and how a rank is named to it."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from equipoise.route.account import WorkerLoad

if TYPE_CHECKING:
    from equipoise.config.worker import WorkerRole, WorkerSpec
    from equipoise.gateway.fleet.breaker import Breaker
    from equipoise.gateway.fleet.health import Health
    from equipoise.gateway.fleet.outliers import Record
    from equipoise.gateway.fleet.slow_start import SlowStart
    from equipoise.gateway.transport import Header, Transport

Kind = Literal["equipoise", "sglang", "vllm", "openai"]
"""Which server a worker is, once that is known."""

PAIRED_KINDS: tuple[Kind | None, ...] = ("equipoise", "sglang")
"""Those whose prefill and decode workers meet in a room that the request names."""

State = Literal["starting", "ready", "unhealthy", "draining", "removed"]
"""starting: not yet known what it serves; ready: takes requests; unhealthy: was ready and fails its health checks;
draining: takes no new requests, is removed when the last one ends; removed: gone from the fleet."""

RANK_HEADER = b"X-Data-Parallel-Rank"


@dataclass(frozen=True, slots=True)
class RankPlace:
    """How one rank is named to a worker.

    number: the worker's own number for it
    header: goes among the request's headers
    field: goes into the request's JSON body, as `"name":value`; b"" for nothing
    """

    number: int
    header: Header
    field: bytes = b""


def rank_place(number: int, field: str | None = None) -> RankPlace:
    """The header that SGLang, vLLM and Equipoise read, and the body's field where one is given."""
    body = b'"%s":%d' % (field.encode(), number) if field is not None else b""
    return RankPlace(number, (RANK_HEADER, b"%d" % number), body)


@dataclass(frozen=True, slots=True)
class Found:
    """What a worker said of itself.

    models: names that it answers to, the base model first; none: it does not tell and is taken to serve any
    rank_labels: the number of each rank in its load reports; their order is the order of the worker's accounts
    places: how each rank is named in requests; none: requests name no rank and the worker chooses itself
    role, bootstrap_port: as it runs, None where it does not tell
    cards: the entries of /v1/models, as JSON, in the order of `models`
    """

    kind: Kind
    models: tuple[str, ...] = ()
    rank_labels: tuple[int, ...] = (0,)
    places: tuple[RankPlace, ...] = ()
    role: WorkerRole | None = None
    bootstrap_port: int | None = None
    version: str = ""
    cards: tuple[bytes, ...] = ()


class Worker:
    """One model server. Its identity is its URL; everything else may change while it is in the fleet.

    `num_inflight` counts requests under way, `load` is what policies see. `feed` names where its load reports come
    from (None: it has none yet), `feed_error` says why there are none at present, `num_feed_failures` counts polls
    that brought none."""

    __slots__ = (
        "added_at", "bootstrap_host", "bootstrap_port", "breaker", "cards", "drain_until", "error", "feed",
        "feed_error", "health", "host", "is_known", "kind", "load", "models", "num_feed_failures", "num_inflight",
        "places", "port", "rank_labels", "ready_at", "record", "role", "slow_start", "spec", "state", "transport",
        "url", "version",
    )  # fmt: skip

    def __init__(
        self,
        spec: WorkerSpec,
        transport: Transport,
        breaker: Breaker,
        health: Health,
        slow_start: SlowStart,
        record: Record,
        now: float,
    ) -> None:
        self.url = spec.url
        self.host, self.port = host_and_port(spec.url)
        self.transport = transport
        self.breaker = breaker
        self.health = health
        self.slow_start = slow_start
        self.record = record
        self.added_at = now
        self.ready_at = inf
        """When it last became ready."""
        self.num_inflight = 0
        self.num_feed_failures = 0
        self.load = WorkerLoad(self.url)
        self.rank_labels: tuple[int, ...] = (0,)
        self.restart(spec)

    def restart(self, spec: WorkerSpec) -> None:
        """Begin anew as `spec` says: nothing is known of the worker until it was asked. Running requests go on."""
        self.spec = spec
        self.state: State = "starting"
        self.kind: Kind | None = None if spec.kind == "auto" else spec.kind
        self.role = spec.role
        self.models = spec.models
        self.cards: tuple[bytes, ...] = ()
        self.bootstrap_host = self.host
        self.bootstrap_port = spec.bootstrap_port
        self.version = ""
        self.is_known = False
        self.error: str | None = None
        self.feed: str | None = None
        self.feed_error: str | None = None
        self.drain_until = inf
        self.places: tuple[RankPlace, ...] = ()

    def learn(self, found: Found) -> bool:
        """Take over what the worker said of itself; what its operator fixed stays. True when its ranks changed."""
        self.kind = found.kind
        self.models = self.spec.models or found.models
        self.cards = found.cards
        self.version = found.version
        self.bootstrap_port = self.spec.bootstrap_port or found.bootstrap_port
        self.is_known = True
        self.error = None
        self.places = found.places
        if found.rank_labels == self.rank_labels:
            return False
        self.rank_labels = found.rank_labels
        self.load = WorkerLoad(self.url, len(found.rank_labels))  # running requests end on the one they were charged to
        return True

    @property
    def fits_role(self) -> bool:
        """Whether it can do its half of a pair: servers that meet in rooms can."""
        return self.role == "mixed" or self.kind in PAIRED_KINDS

    def serves(self, model: str) -> bool:
        """Whether requests for `model` may go here."""
        return model in self.models or not self.models

    def place_rank(self, rank: int, headers: list[Header], fields: list[bytes]) -> None:
        """Say `rank` to the worker: append what goes among the headers and what goes into the JSON body."""
        place = self.places[rank]
        headers.append(place.header)
        if place.field:
            fields.append(place.field)

    def rank_of(self, number: int) -> int | None:
        """The rank that a request means which names rank `number` itself; None where there is no such rank."""
        for rank, place in enumerate(self.places):
            if place.number == number:
                return rank
        return None


def host_and_port(url: str) -> tuple[str, int]:
    """Of "http://host:port"; an IPv6 address comes without its brackets."""
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or 80
