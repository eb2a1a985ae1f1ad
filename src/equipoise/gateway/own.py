"""Requests that the gateway answers itself: which path leads to which handler, and the shape of answers.

The data plane reads them as any other request, asks `OwnRoutes.find`, and writes what `OwnRoute.answer` gives.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import msgspec

from equipoise.errors import InternalError, RequestError, WrongMethodError
from equipoise.gateway.wire import error_headers, openai_error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from equipoise.gateway.request import ClientRequest
    from equipoise.gateway.transport import Header

    Handler = Callable[[ClientRequest, str], Awaitable["OwnAnswer"]]
    """Answers a request; the text is what its path names, decoded, "" for a path that names nothing."""

log = logging.getLogger(__name__)

encode = msgspec.json.Encoder().encode


class OwnAnswer:
    """An answer: `headers` are all but the body's length and the connection's own."""

    __slots__ = ("body", "headers", "status")

    def __init__(self, status: int, body: bytes, headers: list[Header]) -> None:
        self.status = status
        self.body = body
        self.headers = headers


def json_answer(value: Any, status: int = 200) -> OwnAnswer:
    """`value` (anything msgspec encodes) as JSON."""
    return OwnAnswer(status, encode(value), [(b"content-type", b"application/json")])


def error_answer(error: RequestError) -> OwnAnswer:
    """`error` with its status, in OpenAI's shape."""
    headers = error_headers(error)
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return OwnAnswer(error.status, openai_error(error), headers)


class OwnRoute:
    """One path, or one prefix of paths that end in a name, and its handlers by method.

    label: how metrics call it. `methods` has the handlers; HEAD is answered as GET."""

    __slots__ = ("label", "methods", "name_end", "name_start")

    def __init__(self, label: str, methods: dict[bytes, Handler]) -> None:
        prefix, brace, suffix = label.partition("{name}")
        self.label = label
        self.methods = methods
        self.name_start = len(prefix) if brace else None
        self.name_end = len(suffix)

    async def answer(self, request: ClientRequest) -> OwnAnswer:
        """What the handler says. Raises nothing: what goes wrong is an answer too."""
        try:
            return await self._handler(request)(request, self._name(request.path))
        except RequestError as error:
            answer = error_answer(error)
            if error.status == 405:
                answer.headers.append((b"allow", b", ".join(sorted(self.methods))))
            return answer
        except Exception:
            log.exception("%s failed", self.label)
            return error_answer(InternalError("the gateway failed to answer, its log says why"))

    def _name(self, path: bytes) -> str:
        if self.name_start is None:
            return ""
        return unquote(path[self.name_start : len(path) - self.name_end].decode("latin-1"))

    def _handler(self, request: ClientRequest) -> Handler:
        handler = self.methods.get(b"GET" if request.method == b"HEAD" else request.method)
        if handler is None:
            raise WrongMethodError(f"{self.label} is not there for {request.method.decode('latin-1')}")
        return handler


class OwnRoutes:
    """All of them. Paths are compared as they stand on the wire; a slash at the end does not matter."""

    def __init__(self, routes: Sequence[OwnRoute]) -> None:
        self._exact: dict[bytes, OwnRoute] = {}
        self._named: list[tuple[bytes, bytes, OwnRoute]] = []
        for route in routes:
            prefix, brace, suffix = route.label.partition("{name}")
            if brace:
                self._named.append((prefix.encode(), suffix.encode(), route))
            else:
                self._exact[prefix.encode()] = route
        self._named.sort(key=lambda row: -len(row[0]) - len(row[1]))

    def find(self, path: bytes) -> OwnRoute | None:
        """The route of a path without its query; None when workers are to answer it."""
        route = self._exact.get(path) or self._exact.get(path.rstrip(b"/"))
        if route is not None:
            return route
        for prefix, suffix, named in self._named:
            if path.startswith(prefix) and path.endswith(suffix) and len(path) > len(prefix) + len(suffix):
                return named
        return None
