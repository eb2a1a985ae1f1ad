"""The gateway's own small requests to workers: health, loads, models. One per call, bounded in bytes and time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from equipoise.gateway.transport import Outgoing

if TYPE_CHECKING:
    from equipoise.gateway.transport import Call, Header, Phase, Transport

MAX_ANSWER_BYTES = 16 << 20
"""A page of metrics of a server with 64 ranks has some megabytes."""


class FetchError(Exception):
    """No complete answer came; the message says why, in one clause."""


class NotAskedError(FetchError):
    """The gateway itself could not ask: that says nothing about the worker."""


class Answer:
    """What a worker answered. `body` is whole."""

    __slots__ = ("body", "status")

    def __init__(self, status: int, body: bytes) -> None:
        self.status = status
        self.body = body

    @property
    def is_ok(self) -> bool:
        return 200 <= self.status < 300

    def json(self) -> Any:
        """The body as JSON. Raises FetchError where it is none."""
        try:
            return msgspec.json.decode(self.body)
        except msgspec.DecodeError as error:
            raise FetchError(f"not JSON: {error}") from None


class Site:
    """A worker as the gateway itself asks it: its transport, the key it wants, and how long it may take."""

    __slots__ = ("_headers", "_timeout_s", "_transport", "url")

    def __init__(self, url: str, transport: Transport, timeout_s: float, api_key: str | None = None) -> None:
        self.url = url
        self._transport = transport
        self._timeout_s = timeout_s
        self._headers: list[Header] = [(b"Accept", b"*/*")]
        if api_key is not None:
            self._headers.append((b"Authorization", b"Bearer " + api_key.encode()))

    async def get(self, path: str) -> Answer:
        """GET `path`. Raises FetchError when no complete answer came in time; an error status is an answer."""
        return await self._ask(Outgoing(b"GET", path.encode(), list(self._headers), b""))

    async def post(self, path: str, body: bytes, headers: list[Header]) -> Answer:
        """POST a JSON body, with further `headers`. Raises FetchError as `get` does."""
        return await self._ask(
            Outgoing(b"POST", path.encode(), [*self._headers, (b"Content-Type", b"application/json"), *headers], body)
        )

    async def _ask(self, outgoing: Outgoing) -> Answer:
        gathered = _Gathered(asyncio.get_running_loop())
        call = self._transport.start(outgoing, gathered)
        gathered.call = call
        try:
            async with asyncio.timeout(self._timeout_s):
                return await gathered.answer
        except TimeoutError:
            raise FetchError(f"no answer to {outgoing.path.decode()} within {self._timeout_s:g} s") from None
        finally:
            call.abort()


class _Gathered:
    """The leg of one request: gathers the answer into a future."""

    __slots__ = ("_chunks", "_num_bytes", "_status", "answer", "call")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.answer: asyncio.Future[Answer] = loop.create_future()
        self.call: Call | None = None
        self._status = 0
        self._chunks: list[bytes] = []
        self._num_bytes = 0

    def head(self, status: int, headers: list[Header]) -> None:
        self._status = status

    def body(self, data: bytes) -> None:
        self._num_bytes += len(data)
        if self._num_bytes <= MAX_ANSWER_BYTES:
            self._chunks.append(data)
            return
        self._chunks.clear()
        if self.call is not None:
            self.call.abort()
        self._fail(f"the answer is over {MAX_ANSWER_BYTES} bytes")

    def ended(self, trailers: list[Header]) -> None:
        if not self.answer.done():
            self.answer.set_result(Answer(self._status, b"".join(self._chunks)))

    def failed(self, phase: Phase, reason: str) -> None:
        self._fail(f"{phase}: {reason}", NotAskedError if phase == "gateway" else FetchError)

    def flush(self) -> None:
        """Nothing waits to be written."""

    def _fail(self, reason: str, kind: type[FetchError] = FetchError) -> None:
        if not self.answer.done():
            self.answer.set_exception(kind(reason))
