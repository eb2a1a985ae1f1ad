"""A client's connection: requests come in, answers go out, in order.

httptools (llhttp) parses; what it lets through and a gateway must not is refused in `request.check_head`. Requests
may be pipelined: one is served at a time, MAX_PIPELINED wait, reading pauses beyond. A request that is refused is
answered in its turn; after it nothing more is read and the connection closes, lingering so that the answer arrives.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from httptools import HttpParserCallbackError, HttpParserError, HttpParserUpgrade, HttpRequestParser

from equipoise.errors import InvalidValueError, RequestError, RequestTimeoutError
from equipoise.gateway.http.answer import AnswerWriter
from equipoise.gateway.http.known import KnownHead, known_head
from equipoise.gateway.http.request import (
    ClientRequest,
    Refusal,
    RequestHead,
    check_head,
    check_head_size,
    head_too_large,
    too_large,
)
from equipoise.gateway.http.wire import CONTINUE, MAX_HEAD_BYTES, named_in_connection

if TYPE_CHECKING:
    from collections.abc import Callable

    from equipoise.gateway.http.front import Front, Served
    from equipoise.gateway.transport import Header

log = logging.getLogger(__name__)

MAX_PIPELINED = 16
MAX_PIECES = 1024
"""Pieces of a body that are kept apart: chunks of two bytes would take 24 times as much memory as the body."""
LINGER_S = 2.0
"""Seconds that a refused client may go on sending: a connection closed on unread bytes is reset, and the reset wipes
out the answer."""


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """max_body_bytes: of a request. receive_s: seconds for its head, and again for its body; and for taking any of an
    answer while some waits. idle_s: seconds that a connection may be idle."""

    max_body_bytes: int = 32 << 20
    receive_s: float = 60.0
    idle_s: float = 75.0


class _StopParsingError(Exception):
    """Raised inside the parser: the request is refused."""


def _ignore(data: bytes) -> None:
    """Takes what a refused client still sends."""


class ClientConnection(asyncio.Protocol):
    """One connection of a client.

    writer: writes its answers. address: where it comes from. served: the request that is being answered.

    Of the request that comes in: _url, _headers, _marked, _pieces, _num_body_bytes gather it (the first _num_joined
    pieces are joined ones), _incoming is it once its
    head is complete, _is_receiving says that a byte of it came, _num_head_bytes counts reads that brought no body
    (_num_counted_bytes of it came before). _waits_since, _waits_for: since when, as the sweep saw it, the connection
    waits for what. _known is the last head that came whole with its body."""

    __slots__ = (
        "_feed", "_front", "_headers", "_incoming", "_is_looping", "_is_paused", "_is_receiving", "_is_refused",
        "_is_upgrade", "_kinds", "_known", "_marked", "_num_body_bytes", "_num_counted_bytes", "_num_head_bytes",
        "_num_joined", "_num_unsent", "_parser", "_pending", "_pieces", "_read_len", "_transport", "_url",
        "_waits_for", "_waits_since", "address", "served", "writer",
    )  # fmt: skip

    _transport: asyncio.Transport
    writer: AnswerWriter

    def __init__(self, front: Front) -> None:
        self._front = front
        self._kinds = front.marked
        self._parser = HttpRequestParser(self)
        self._feed: Callable[[bytes], object] = self._parser.feed_data
        self._url = b""
        self._headers: list[Header] = []
        self._marked: list[Header] = []
        self._pieces: list[bytes] = []
        self._num_body_bytes = self._num_counted_bytes = 0
        self._num_head_bytes = self._num_joined = 0
        self._read_len = 0
        self._incoming: RequestHead | None = None
        self._known: KnownHead[RequestHead] | None = None
        self._pending: deque[ClientRequest | Refusal] = deque()
        self.served: Served | None = None
        self._is_receiving = self._is_refused = self._is_upgrade = False
        self._is_looping = self._is_paused = False
        self._num_unsent = 0
        self._waits_for = ""
        self._waits_since = 0.0
        self.address = ""

    # What the loop tells

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to serve."""
        self._transport = cast("asyncio.Transport", transport)
        self.writer = AnswerWriter(self._transport)
        peer = transport.get_extra_info("peername")
        self.address = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else ""
        self._front.sweep.add_slow(self)
        self._front.opened(self)

    def data_received(self, data: bytes) -> None:
        """Parse what came; serve what is complete."""
        is_between = not self._is_receiving
        known = self._known
        if known is not None and is_between:
            body = known.body_of(data)
            if body is not None and self._is_idle(len(body)):
                self._front.serve(self, ClientRequest(known.head, body, self.address))
                return
        self._read_len = len(data)
        try:
            self._feed(data)
        except HttpParserUpgrade as upgrade:
            self._go_on_without_upgrade(data[upgrade.args[0] :])
            return
        except HttpParserError as error:
            self._on_parser_error(error)
        if self._is_receiving:
            self._receive_part()
        if self._pending:
            if is_between:
                self._know(data)
            if self.served is None:
                self._next()
            if len(self._pending) > MAX_PIPELINED and not self._is_refused:
                self._transport.pause_reading()

    def eof_received(self) -> None:
        """The client sends no more, and so has left."""
        self._leave()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client left."""
        self._leave()
        self._front.sweep.remove_slow(self)
        self._front.closed(self)

    def pause_writing(self) -> None:
        """The client takes its answers slower than they come."""
        self._is_paused = True
        if self.served is not None:
            self.served.pause()

    def resume_writing(self) -> None:
        """It caught up."""
        self._is_paused = False
        if self.served is not None:
            self.served.resume()
        elif self._pending:
            self._next()

    # What the parser tells

    def on_message_begin(self) -> None:
        """The first byte of a request came."""
        self._is_receiving = True

    def on_url(self, url: bytes) -> None:
        """A piece of the target."""
        self._url = self._url + url if self._url else url

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; trailers go into lists that nobody reads."""
        low = name.lower()
        goes_on = self._kinds.get(low)
        if goes_on is None:
            self._headers.append((name, value))
        else:
            self._marked.append((low, value))
            if goes_on:
                self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Refuse the request or make room for its body."""
        parser = self._parser
        version = parser.get_http_version()
        url, headers, marked = self._url, self._headers, self._marked
        self._url, self._headers, self._marked = b"", [], []
        self._num_body_bytes = self._num_counted_bytes = 0
        head = self._incoming = RequestHead(parser.get_method(), url, headers, marked, version == "1.0")
        try:
            if self._num_head_bytes + self._read_len > MAX_HEAD_BYTES:
                check_head_size(url, headers, marked)
            check_head(head, version, self._front.client_limits.max_body_bytes)
        except RequestError as error:
            self._refuse(error)
            raise _StopParsingError from None
        self._num_head_bytes = 0
        self._waits_for = ""
        self._is_upgrade = parser.should_upgrade()

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        pieces = self._pieces
        pieces.append(data)
        if len(pieces) - self._num_joined > MAX_PIECES:
            pieces[self._num_joined :] = [b"".join(pieces[self._num_joined :])]
            self._num_joined += 1
        self._num_body_bytes += len(data)
        limit = self._front.client_limits.max_body_bytes
        if self._num_body_bytes > limit:
            self._refuse(too_large(limit))
            raise _StopParsingError

    def on_message_complete(self) -> None:
        """The request is complete: it is served when the parser has returned."""
        head = self._incoming
        if self._is_upgrade or head is None:
            return
        body = b""
        pieces = self._pieces
        if pieces:
            body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            self._pieces = []
            self._num_joined = 0
        head.keeps_alive = self._parser.should_keep_alive()
        self._incoming = None
        self._is_receiving = False
        self._waits_for = ""
        if self._marked or self._headers:  # trailers
            self._headers, self._marked = [], []
        self._pending.append(ClientRequest(head, body, self.address))

    # Serving

    def _is_idle(self, num_body: int) -> bool:
        """Whether a request with `num_body` bytes, nothing before it, would be served at once."""
        return (
            self.served is None
            and not self._pending
            and not self._is_paused
            and self.writer.keeps_alive
            and num_body <= self._front.client_limits.max_body_bytes
        )

    def _know(self, data: bytes) -> None:
        """Keep the head of `data`, if that is one request and the next one may be its like."""
        request = self._pending[0]
        if len(self._pending) == 1 and isinstance(request, ClientRequest) and not self._is_receiving:
            head = request.head
            if head.keeps_alive and len(request.body) == head.num_announced:
                self._known = known_head(data, head.num_announced, head)

    def answered(self) -> None:
        """The answer is complete, or cut off: serve the next request, or close."""
        self.served = None
        self._waits_for = ""
        if not self.writer.keeps_alive:
            self._close()
        elif self._pending:
            if not self._is_looping:
                self._next()
        elif self._is_receiving:
            self._continue()

    def drain(self) -> None:
        """Close the connection as soon as nothing is served on it; answers say so."""
        if self.served is None and not self._pending and not self._is_receiving:
            self._transport.close()

    def close(self) -> None:
        """Close when what was written is out."""
        self._transport.close()

    def check(self, now: float) -> None:
        """Close a connection that is idle, slow, or does not take what is sent to it."""
        limits = self._front.client_limits
        if self._is_paused:
            num_unsent = self._transport.get_write_buffer_size()
            if self._waited("unsent", now) > limits.receive_s:
                self._transport.abort()
            elif num_unsent != self._num_unsent:
                self._num_unsent = num_unsent
                self._waits_since = now
        elif self.served is not None:
            return
        elif self._is_refused:
            if self._waited("linger", now) > LINGER_S:
                self._transport.abort()
        elif self._is_receiving:
            part = "head" if self._incoming is None else "body"
            if self._waited(part, now) > limits.receive_s:
                message = f"the request's {part} did not arrive within {limits.receive_s:g} s"
                self._refuse(RequestTimeoutError(message))
                self._next()
        elif self._waited("request", now) > limits.idle_s:
            self._transport.close()

    def _waited(self, what: str, now: float) -> float:
        if self._waits_for != what:
            self._waits_for = what
            self._waits_since = now
        return now - self._waits_since

    def _next(self) -> None:
        """Serve what is complete, one after the other; those that are answered at once do not recurse."""
        self._is_looping = True
        pending = self._pending
        while pending and self.served is None and not self._is_paused and self.writer.keeps_alive:
            request = pending.popleft()
            if isinstance(request, Refusal):
                self._front.refuse(self, request)
            else:
                self._front.serve(self, request)
            if len(pending) == MAX_PIPELINED and not self._is_refused:
                self._transport.resume_reading()
        self._is_looping = False
        if self._is_receiving and not pending:
            self._continue()

    def _continue(self) -> None:
        """Tell a client that waits for it to send its body, unless an answer must go first."""
        head = self._incoming
        if head is not None and head.expects_continue and self.served is None and not self._pending:
            head.expects_continue = False
            if not self._num_body_bytes:
                self._transport.write(CONTINUE)

    def _close(self) -> None:
        if self._is_refused and not self._transport.is_closing():
            self._transport.write_eof()  # and linger: see check
        else:
            self._transport.close()

    def _leave(self) -> None:
        self._pending.clear()
        self._is_receiving = False
        served, self.served = self.served, None
        if served is not None:
            served.client_gone()

    # Refusing

    def _receive_part(self) -> None:
        """A read ended inside a request. Bounds what is no body: a head, chunk extensions, trailers."""
        if self._num_body_bytes != self._num_counted_bytes:
            self._num_counted_bytes = self._num_body_bytes
        else:
            self._num_head_bytes += self._read_len
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._refuse(head_too_large())
                return
        self._continue()

    def _refuse(self, error: RequestError) -> None:
        """Answer with `error` in its turn, and read nothing more."""
        self._feed = _ignore
        self._is_refused = True
        self._is_receiving = False
        self._incoming = None
        self._waits_for = ""
        self._pieces.clear()
        self._num_joined = 0
        self._pending.append(Refusal(error))

    def _on_parser_error(self, error: HttpParserError) -> None:
        if self._is_refused:
            return
        if isinstance(error, HttpParserCallbackError):
            log.error("a request could not be taken in", exc_info=error.__context__)
        self._refuse(InvalidValueError(f"the request is not valid HTTP: {error}", code="invalid_http"))

    def _go_on_without_upgrade(self, rest: bytes) -> None:
        """No other protocol is spoken here: the request is one of HTTP/1.1, whose parser stopped after its head."""
        head = self._incoming
        if head is None:
            return
        self._is_upgrade = False
        dropped = named_in_connection(head.marked) | {b"connection", b"upgrade"}
        marked = [header for header in head.marked if header[0] not in dropped and not self._kinds[header[0]]]
        lines = [b"%b: %b\r\n" % header for header in (*marked, *head.headers) if header[0].lower() not in dropped]
        self._parser = HttpRequestParser(self)
        self._feed = self._parser.feed_data
        self._incoming = None
        self.data_received(b"%b %b HTTP/1.1\r\n%b\r\n%b" % (head.method, head.target, b"".join(lines), rest))
