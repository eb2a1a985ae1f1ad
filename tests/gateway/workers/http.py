"""A small HTTP/1.1 server with exact control of what is sent and when: whole, in pieces, cut off, or never."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
import traceback
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

import httptools

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 429: "Too Many Requests"}
REASONS |= {500: "Internal Server Error", 501: "Not Implemented", 503: "Service Unavailable"}
JSON = "application/json"
HIGH_WATER_BYTES = 65536


@dataclass
class Request:
    """One request as it came in; header names in lower case, values as sent."""

    method: str
    target: str
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""
    received_at: float = 0.0  # monotonic, when it was whole

    @property
    def path(self) -> str:
        """The target without its query."""
        return self.target.partition("?")[0]

    @property
    def query(self) -> dict[str, str]:
        """The query's fields, the last one of each name."""
        return dict(parse_qsl(self.target.partition("?")[2]))

    def header(self, name: str) -> str | None:
        """The first value of a header."""
        return next((value for key, value in self.headers if key == name), None)


class Answer:
    """What a handler sends; every method may be called at any time, also after the peer left."""

    def __init__(self, connection: Connection, request: Request) -> None:
        self._connection = connection
        self._request = request
        self.has_head = False
        self.is_over = False

    async def whole(self, status: int, payload: bytes, content_type: str = JSON, *headers: str) -> None:
        """A head and a body of known length."""
        self._write(self._head(status, f"content-length: {len(payload)}", f"content-type: {content_type}", *headers))
        if self._request.method != "HEAD":
            self._write(payload)
        self.is_over = True
        await self._connection.drained()

    def start(self, status: int, content_type: str, *headers: str) -> None:
        """The head of a chunked body."""
        self._write(self._head(status, f"content-type: {content_type}", "transfer-encoding: chunked", *headers))

    async def chunk(self, payload: bytes) -> None:
        """A piece of a chunked body; waits while the peer does not read."""
        self._write(b"%x\r\n%b\r\n" % (len(payload), payload))
        await self._connection.drained()

    async def end(self) -> None:
        """The last chunk."""
        self._write(b"0\r\n\r\n")
        self.is_over = True
        await self._connection.drained()

    def raw(self, payload: bytes) -> None:
        """Bytes as they are, whatever they mean."""
        self._write(payload)

    def close(self) -> None:
        """Close the connection in good order, wherever the answer stands."""
        self.is_over = True
        self._connection.close()

    def reset(self) -> None:
        """Close the connection with a TCP reset."""
        self.is_over = True
        self._connection.reset()

    def _head(self, status: int, *headers: str) -> bytes:
        self.has_head = True
        lines = [f"HTTP/1.1 {status} {REASONS.get(status, 'Status')}", "server: uvicorn", *headers]
        return "\r\n".join([*lines, "", ""]).encode()

    def _write(self, payload: bytes) -> None:
        self._connection.write(payload)


class Connection(asyncio.Protocol):
    """One client's connection; requests are answered one after the other."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._request = Request("", "")
        self._waiting: deque[Request] = deque()
        self._task: asyncio.Task[None] | None = None
        self._can_write = asyncio.Event()
        self._transport: asyncio.Transport | None = None
        self._num_answered = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        self._can_write.set()
        self._server.connections[id(self)] = self

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._can_write.set()
        self._server.connections.pop(id(self), None)
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass
        except httptools.HttpParserError:
            self.write(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
            self.close()

    def on_message_begin(self) -> None:
        self._request = Request("", "")

    def on_url(self, url: bytes) -> None:
        self._request.target += url.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._request.headers.append((name.decode("latin-1").lower(), value.decode("latin-1")))
        if name.lower() == b"expect":
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._request.body += body

    def on_message_complete(self) -> None:
        self._request.method = self._parser.get_method().decode()
        self._request.received_at = time.monotonic()
        self._waiting.append(self._request)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._answer_all())

    async def _answer_all(self) -> None:
        try:
            while self._waiting and self._transport is not None:
                request = self._waiting.popleft()
                await self._server.handler(request, Answer(self, request))
                self._num_answered += 1
                if self._num_answered == self._server.max_per_connection:
                    self.close()  # without a word about it: the next request may be under way already
        except Exception:  # a worker with a bug must not look like one that hangs
            traceback.print_exc()
            self.reset()
        finally:
            self._task = None

    def write(self, payload: bytes) -> None:
        if self._transport is not None:
            self._transport.write(payload)

    async def drained(self) -> None:
        await self._can_write.wait()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def reset(self) -> None:
        if self._transport is not None:
            connection = self._transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()


class Server:
    """Listens and hands each request to `handler`, which is cancelled when the client leaves."""

    def __init__(
        self, handler: Callable[[Request, Answer], Awaitable[None]], max_per_connection: int | None = None
    ) -> None:
        self.handler = handler
        self.max_per_connection = max_per_connection
        self.connections: dict[int, Connection] = {}
        self._server: asyncio.Server | None = None

    async def listen(self, host: str, port: int) -> int:
        """The port: `port`, or a free one when that is 0."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Connection(self), host, port, backlog=4096)
        return int(self._server.sockets[0].getsockname()[1])
