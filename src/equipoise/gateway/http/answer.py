"""An answer on its way to a client: framed as the client understands it, written once per read of the worker's."""

from __future__ import annotations

import struct
from socket import SO_LINGER, SOL_SOCKET
from typing import TYPE_CHECKING

from equipoise.gateway.http.wire import NO_BODY_STATUSES, STATUS_LINES, AnswerHeaders

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable

    from equipoise.gateway.http.request import ClientRequest
    from equipoise.gateway.transport import Header

_RESET = struct.pack("ii", 1, 0)


class AnswerWriter:
    """Writes the answers of one connection, one after the other.

    The head waits for the first piece of the body or the end: until then nothing has reached the client. A body is
    framed by the Content-Length of its head; else by chunks, for HTTP/1.0 by the connection's end.

    is_begun: bytes of the answer have gone out. is_sse: it is a stream of events. keeps_alive: another answer may
    follow. num_bytes: of the body so far."""

    __slots__ = (
        "_ends_by_close", "_has_body", "_head", "_is_chunked", "_pieces", "_transport", "_write", "is_begun", "is_sse",
        "keeps_alive", "num_bytes", "send",
    )  # fmt: skip

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._write = transport.write
        self._pieces: list[bytes] = []
        self.send = self._pieces.append
        """Gathers a piece of the body; it goes out at the next flush."""
        self._head = b""
        self._is_chunked = False
        self._has_body = True
        self._ends_by_close = False
        self.is_begun = False
        self.is_sse = False
        self.keeps_alive = True
        self.num_bytes = 0

    def begin(self, request: ClientRequest, status: int, headers: Iterable[Header], may_keep_alive: bool) -> None:
        """Prepare the head. Headers go out as they are, but for x-request-id, which is the request's."""
        self.is_begun = False
        self.num_bytes = 0
        told = headers if type(headers) is AnswerHeaders else AnswerHeaders(headers)
        is_framed = told.length_at >= 0
        self.is_sse = told.is_sse
        parts = [STATUS_LINES[status], b"x-request-id: ", request.request_id, b"\r\n", told.lines]
        self._has_body = request.method != b"HEAD" and status not in NO_BODY_STATUSES
        keeps_alive = request.head.keeps_alive and may_keep_alive
        self._is_chunked = self._ends_by_close = False
        if self._has_body and not is_framed:
            if request.head.is_http10:
                self._ends_by_close = True
                keeps_alive = False
            else:
                self._is_chunked = True
                parts.append(b"transfer-encoding: chunked\r\n")
        if not keeps_alive:
            parts.append(b"connection: close\r\n")
        elif request.head.is_http10:
            parts.append(b"connection: keep-alive\r\n")
        self.keeps_alive = keeps_alive
        parts.append(b"\r\n")
        self._head = b"".join(parts)

    def flush(self) -> None:
        """Write what was gathered, as one piece."""
        data = self._gathered()
        if data:
            self.is_begun = True
            if self._head:
                data = self._head + data
                self._head = b""
            self._write(data)

    def end(self, trailers: Iterable[Header] = ()) -> None:
        """The answer is complete: write the rest of it."""
        data = self._head + self._gathered()
        self._head = b""
        if self._is_chunked:
            data += b"0\r\n\r\n" if not trailers else b"0\r\n%b\r\n" % _lines(trailers)
        self.is_begun = True
        if data:
            self._write(data)

    def drop(self) -> None:
        """Forget a head and pieces that have not gone out."""
        self._head = b""
        self._pieces.clear()

    def cut(self, event: bytes = b"") -> None:
        """The answer ends before its end, and the client must see that: no framing is completed, and the connection
        closes. `event` goes out first, as a piece of a stream of events."""
        self.keeps_alive = False
        if event and self.is_sse:
            self.send(event)
        self.flush()
        if self._ends_by_close:  # an orderly close would make the part look whole
            self._transport.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, _RESET)
            self._transport.abort()
        else:
            self._transport.close()

    def _gathered(self) -> bytes:
        pieces = self._pieces
        if not pieces:
            return b""
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        if not self._has_body:
            return b""
        self.num_bytes += len(data)
        return b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data


def _lines(headers: Iterable[Header]) -> bytes:
    return b"".join(b"%b: %b\r\n" % header for header in headers)
