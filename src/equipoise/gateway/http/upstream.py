"""One connection to a worker: a request goes out, httptools reads the answer for its framing, the leg is told."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, cast

from httptools import HttpParserCallbackError, HttpParserError, HttpParserUpgrade, HttpResponseParser

from equipoise.gateway.http.known import known_head
from equipoise.gateway.http.wire import HOP_BY_HOP, MAX_HEAD_BYTES, NO_BODY_STATUSES, AnswerHeaders, named_in_connection

if TYPE_CHECKING:
    from equipoise.gateway.http.pool import Pool, Run
    from equipoise.gateway.transport import Header, Leg, Outgoing, Phase

log = logging.getLogger(__name__)

_BODILESS = frozenset((b"GET", b"HEAD", b"DELETE", b"OPTIONS"))
_CUT = "the worker closed the connection in the middle of its answer"


class _StopParsingError(Exception):
    """Raised inside the parser: what it would read on does not belong to the answer."""


class UpstreamConnection(asyncio.Protocol):
    """One connection; serves one request at a time.

    run: whose answer is awaited or read; None while idle
    idle_since: when it became idle, on the loop's clock

    Of the answer: _leg is told its pieces (None before the request, after the last piece and once aborted);
    _headers gathers its headers, then its trailers; _is_begun: a byte of it came; _has_head: its final head came;
    _num_head_bytes: of reads that brought none of its body, since the last one that did;
    _is_informational: the head that came last is a 1xx; _ends_by_close: so it is framed; _is_done: it is complete.
    """

    __slots__ = (
        "_answer", "_ends_by_close", "_has_head", "_has_served", "_headers", "_is_begun", "_is_done",
        "_is_informational", "_keeps", "_leg", "_num_head_bytes", "_parser", "_pool", "_stuck_since", "_transport",
        "idle_since", "is_closing", "run",
    )  # fmt: skip

    _transport: asyncio.Transport

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._parser = HttpResponseParser(self)
        self.run: Run | None = None
        self.is_closing = False
        self.idle_since = 0.0
        self._has_served = self._ends_by_close = self._is_done = False
        self._stuck_since: float | None = None
        self._leg: Leg | None = None
        self._headers: list[Header] = []
        self._answer: tuple[int, AnswerHeaders]

    # What the pool asks for

    def send(self, run: Run) -> None:
        """Send `run`'s request; its leg is told the answer."""
        self.run = run
        self._leg = run.leg
        self._is_begun = self._has_head = self._is_informational = self._ends_by_close = self._is_done = False
        self._keeps = False
        self._num_head_bytes = 0
        run.connection = self
        self._transport.write(request_bytes(run.outgoing, self._pool.host_header))
        if run.is_paused:
            self.pause()

    def abort(self) -> None:
        """Close at once; the leg hears nothing more."""
        self._leg = None
        self.is_closing = True
        self._transport.abort()

    def close(self) -> None:
        """Close, with nobody to be told."""
        self.is_closing = True
        self._transport.close()

    def fail(self, phase: Phase, reason: str) -> None:
        """Close at once and tell the leg, if there is one."""
        run = self.run
        self.run = None
        self.abort()
        if run is not None:
            run.fail(phase, reason)

    def pause(self) -> None:
        """Read nothing for now."""
        if not self.is_closing:
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if not self.is_closing:
            self._transport.resume_reading()

    def is_stuck_since(self, when: float) -> bool:
        """Whether the worker has taken in nothing of a request since before `when`, its answer not having begun."""
        return self._stuck_since is not None and self._stuck_since < when and self.run is not None

    # What the loop tells

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Offer the connection to the pool."""
        self._transport = cast("asyncio.Transport", transport)
        self._pool.opened(self)

    def pause_writing(self) -> None:
        """The system's buffers are full."""
        self._stuck_since = asyncio.get_running_loop().time()

    def resume_writing(self) -> None:
        """They are not any more."""
        self._stuck_since = None

    def data_received(self, data: bytes) -> None:
        """Parse what came and tell the leg."""
        run = self.run
        if run is None or run.leg is None:  # nobody asked, or nobody listens any more
            self.abort()
            return
        is_first, self._is_begun = not self._is_begun, True
        if is_first and self._is_known(run, data):
            return
        self._num_head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self._keeps = False
            if not self._is_done:
                self._malformed(error)
                return
        if self._is_done:
            if is_first and self._keeps:
                self._know(data)
            self._finish(run)
        elif run.leg is not None:
            if self._num_head_bytes > MAX_HEAD_BYTES:
                part = "trailers" if self._has_head else "head"
                self.fail("worker", f"the {part} of the answer are over {MAX_HEAD_BYTES} bytes")
            elif self._has_head:
                run.leg.flush()

    def eof_received(self) -> None:
        """The worker will send no more: that ends an answer which ends by the connection's end."""
        self.is_closing = True
        if self._ends_by_close and not self._is_done:
            self._is_done = True
            if self.run is not None:
                self._finish(self.run)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever waits for an answer, or send the request anew where that is safe."""
        self.is_closing = True
        run, self.run = self.run, None
        self._pool.lost(self, was_idle=run is None)
        if run is None or run.leg is None:
            return
        if self._is_begun:
            run.fail("worker", _CUT)
        elif self._has_served and not run.is_resent and not run.outgoing.goes_once:
            self._pool.resend(run)
        else:
            run.fail("send", f"the worker closed the connection before it answered{f' ({exc})' if exc else ''}")

    # What the parser tells

    def on_message_begin(self) -> None:
        """Of the answer, of the next one after a 1xx, or of bytes that nobody asked for."""
        if self._is_done:
            raise _StopParsingError

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header or a trailer."""
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Tell the leg the head, unless it is a 1xx."""
        headers, self._headers = self._headers, []
        status = self._parser.get_status_code()
        if 100 <= status < 200:
            self._is_informational = True
            return
        if status < 100:
            raise _StopParsingError
        self._has_head = True
        kept = AnswerHeaders(self._end_to_end(status, headers))
        self._answer = (status, kept)
        leg = self._leg
        if leg is not None:
            leg.head(status, kept)
        if self.run is not None and self.run.outgoing.method == b"HEAD":
            # llhttp would wait for the body that Content-Length speaks of
            self._is_done = True
            raise _StopParsingError

    def on_body(self, data: bytes) -> None:
        """A piece of the payload."""
        self._num_head_bytes = 0
        leg = self._leg
        if leg is not None:
            leg.body(data)

    def on_message_complete(self) -> None:
        """The answer is complete; who waits is told when the parser has returned."""
        if self._is_informational:
            self._is_informational = False
            return
        self._is_done = True
        self._keeps = self._parser.should_keep_alive()

    def _end_to_end(self, status: int, headers: list[Header]) -> list[Header]:
        """`headers` without those of this hop. Sees to it how the body is framed; raises for what cannot be framed."""
        is_framed = status in NO_BODY_STATUSES
        hop = HOP_BY_HOP
        kept = []
        for header in headers:
            low = header[0].lower()
            if low in hop:
                if low == b"connection":
                    hop = hop | named_in_connection((header,))
                elif low == b"transfer-encoding":
                    if header[1].strip().lower() != b"chunked":
                        raise _StopParsingError
                    is_framed = True
                continue
            if low == b"content-length":
                is_framed = True
                if status == 204:
                    continue
            kept.append(header)
        if hop is not HOP_BY_HOP:  # a header may come before the Connection header that names it
            kept = [header for header in kept if header[0].lower() not in hop or header[0].lower() == b"content-length"]
        self._ends_by_close = not is_framed
        return kept

    def _is_known(self, run: Run, data: bytes) -> bool:
        """Whether `data` is an answer like the worker's last one, and whole: its leg was told."""
        known = self._pool.known
        body = None if known is None else known.body_of(data)
        if known is None or body is None:
            return False
        status, headers = known.head
        self._keeps = self._is_done = True
        try:
            if run.leg is not None:
                run.leg.head(status, headers.with_length(len(body)))
            if run.leg is not None:
                run.leg.body(body)
        except Exception:
            log.exception("a leg failed while its answer was read")
            self.fail("worker", "the answer could not be passed on")
            return True
        self._finish(run)
        return True

    def _know(self, data: bytes) -> None:
        """Keep the head of `data`, one read that brought an answer, if that is framed by its Content-Length."""
        status, headers = self._answer
        if headers.num_body and status not in NO_BODY_STATUSES:
            self._pool.known = known_head(data, headers.num_body, self._answer)

    def _finish(self, run: Run) -> None:
        """The answer is complete: free the connection, then tell the leg, which may need one again."""
        trailers, self._headers = self._headers, []
        leg, run.leg, run.connection = run.leg, None, None
        self.run = self._leg = None
        self._has_served = True
        # a request that is not sent to its end yet would be taken for the beginning of the next one
        if self._keeps and not self.is_closing and not self._transport.get_write_buffer_size():
            if run.is_paused:
                self._transport.resume_reading()
            self._pool.release(self)
        elif not self.is_closing:
            self.is_closing = True
            self._transport.abort()
        if leg is not None:
            leg.ended([header for header in trailers if header[0].lower() not in HOP_BY_HOP])

    def _malformed(self, error: Exception) -> None:
        cause = error.__context__
        if isinstance(error, HttpParserCallbackError) and not isinstance(cause, _StopParsingError):
            log.error("a leg failed while its answer was read", exc_info=cause)
        what = "is not valid HTTP" if isinstance(cause, _StopParsingError) else f"is not valid HTTP: {error}"
        self.fail("worker", f"the answer {what}")


def request_bytes(outgoing: Outgoing, host: bytes) -> bytes:
    """A whole request as it goes over the wire."""
    parts = [outgoing.method, b" ", outgoing.path, b" HTTP/1.1\r\nhost: ", host, outgoing.lines]
    for name, value in outgoing.headers:
        parts += (b"\r\n", name, b": ", value)
    body = outgoing.body
    if body or outgoing.method not in _BODILESS:
        parts.append(b"\r\ncontent-length: %d\r\n\r\n" % len(body))
        parts.append(body)
    else:
        parts.append(b"\r\n\r\n")
    return b"".join(parts)
