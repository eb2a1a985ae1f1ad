"""A client's connection: uvicorn's, with bounds that it lacks.

A request's head may neither grow nor take for ever, what is no HTTP gets an answer in the shape of every other
error, and a client that leaves ends the request that runs, also when others are pipelined behind it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from equipoise.errors import HeadTooLargeError, InvalidValueError, RequestError, RequestTimeoutError
from equipoise.server.http import error_body

if TYPE_CHECKING:
    import asyncio

    from uvicorn._types import ASGI3Application
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

MAX_HEAD_BYTES = 64 * 1024
"""Most bytes of a request's URL and headers. What one read brings is taken in whole before it is counted."""

_REASONS = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large"}


class Connection(HttpToolsProtocol):
    """One connection; uvicorn makes it and calls it.

    _is_in_head: the next byte belongs to a head
    _head_bytes: bytes of an unfinished head, those of the read that it began in left out
    _running: the request that is being answered; `cycle` is the last one that came
    """

    head_timeout_s = 60.0
    """Seconds that a new connection may be silent, and that a head may take from its first byte."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_in_head = True
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        if self._running is not None:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if not self._is_in_head or self.transport.is_closing():
            return
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(_head_too_large())
        elif self._head_timer is None:
            self._start_head_timer()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._stop_head_timer()
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD_BYTES:
            self._refuse(_head_too_large())
            raise _head_too_large()  # ends the parsing
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(InvalidValueError("the request is not valid HTTP", code="invalid_http"))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.head_timeout_s, self._on_head_timeout)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_head_timeout(self) -> None:
        if self._is_answering:  # reading may be paused until the answer is out
            self._start_head_timer()
        elif self.headers is None:
            self.transport.close()
        else:
            self._refuse(RequestTimeoutError(f"the request's head did not arrive within {self.head_timeout_s:g} s"))

    @property
    def _is_answering(self) -> bool:
        return self._running is not None and not self._running.response_complete

    def _refuse(self, error: RequestError) -> None:
        """Answer with `error` and close; an answer under way is cut off, for nothing may stand in its middle."""
        if self.transport.is_closing():
            return
        if not self._is_answering:
            body = error_body(error)
            head = (
                b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head % (error.status, _REASONS[error.status], len(body)) + body)
        self.transport.close()


def _head_too_large() -> HeadTooLargeError:
    return HeadTooLargeError(f"URL and headers are over the limit of {MAX_HEAD_BYTES} bytes")
