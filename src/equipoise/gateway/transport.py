"""The seam between the gateway and a worker: one request goes out, an answer comes back piece by piece.

    Exchange ── Outgoing ──> Transport.start ──> Call     (the exchange's handle: abort, pause, resume)
             <── head, body*, ended | failed ──  Leg      (what the transport tells the exchange; flush closes a read)

HTTP/1.1 is one transport; whatever else carries requests to workers implements the same three protocols. Everything
runs on one event loop and nothing here blocks or raises for what happens on the network.
"""

from __future__ import annotations

from typing import Literal, Protocol

Header = tuple[bytes, bytes]
"""Name and value as they stand on the wire; names compare without case."""

Phase = Literal["connect", "send", "first_token", "between_tokens", "total", "client", "worker", "gateway"]
"""Where a try failed. connect: no connection came about; send: the worker broke it off before its answer began;
first_token, between_tokens, total: a time limit; client: the client left; worker: the answer was malformed or was cut
short; gateway: the gateway itself had no descriptor for a connection, no worker is to blame."""


class Outgoing:
    """One request as it goes to a worker.

    path: with its query, as it stands in the request line
    headers: end-to-end ones; the transport adds Host, the framing of the body, and nothing else
    lines: further ones as they stand on the wire, a line break before each
    body: whole; b"" for none
    is_stream: the client asked for an answer in pieces
    goes_once: a worker that has seen it must not see it again, even where it closed the connection without a word
    """

    __slots__ = ("body", "goes_once", "headers", "is_stream", "lines", "method", "path")

    def __init__(
        self,
        method: bytes,
        path: bytes,
        headers: list[Header],
        body: bytes,
        is_stream: bool = False,
        *,
        goes_once: bool = False,
        lines: bytes = b"",
    ) -> None:
        self.method = method
        self.path = path
        self.headers = headers
        self.body = body
        self.is_stream = is_stream
        self.goes_once = goes_once
        self.lines = lines


class Leg(Protocol):
    """One try at one worker, told by the transport what comes back.

    Order: head, body any number of times, then exactly one of ended or failed; failed may come first. A read that told
    something and ended nothing closes with flush. Nothing is told after ended, failed or Call.abort(), nor before
    Transport.start() returned."""

    def head(self, status: int, headers: list[Header]) -> None:
        """The final status and the end-to-end headers, in order, case and number as the worker sent them. 1xx answers
        are never shown. The list is not to be changed."""

    def body(self, data: bytes) -> None:
        """A piece of the payload, without transfer framing; never empty."""

    def ended(self, trailers: list[Header]) -> None:
        """The answer is complete."""

    def failed(self, phase: Phase, reason: str) -> None:
        """The try is over without a complete answer; `reason` is one clause for people."""

    def flush(self) -> None:
        """What one read brought has been told and more is to come: write out what was gathered."""


class Call(Protocol):
    """The handle of a running try. Each method may be called at any time and does nothing once the try is over."""

    def abort(self) -> None:
        """End the try at once: the worker sees its connection closed, the leg hears nothing more."""

    def pause(self) -> None:
        """Read no more of the answer for now; what was read already may still be told."""

    def resume(self) -> None:
        """Read on."""


class Transport(Protocol):
    """The way to one worker."""

    def start(self, outgoing: Outgoing, leg: Leg) -> Call:
        """Send `outgoing`. What goes wrong on the network is told to `leg`, later, never raised.

        A request that went out on a kept connection which the worker had closed, before any byte of an answer, goes
        out again on a new one, once, without the leg noticing."""

    def close(self) -> None:
        """Close all connections; running tries fail in phase "worker", later starts in phase "connect"."""
