"""Bytes of HTTP/1.1: status lines, heads, which headers stay on their hop, error answers."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec

from equipoise.errors import NoWorkerError, QueueFullError
from equipoise.gateway.transport import Header
from equipoise.server.http import error_body

if TYPE_CHECKING:
    from collections.abc import Iterable

    from equipoise.errors import RequestError

MAX_HEAD_BYTES = 64 * 1024
"""Most bytes of a request's target and headers, of an answer's headers, and of trailers."""

HOP_BY_HOP = frozenset(
    (
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
        b"trailer", b"transfer-encoding", b"upgrade",
    )
)  # fmt: skip
"""Names, in lower case, of headers that concern one connection only (RFC 9110, 7.6.1)."""

NO_BODY_STATUSES = frozenset((204, 304))
"""Answers that never have a body, whatever their headers say; 1xx neither, but those are not passed on."""

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

_encode = msgspec.json.Encoder().encode


def _status_line(status: int) -> bytes:
    try:
        reason = HTTPStatus(status).phrase
    except ValueError:
        reason = ""
    return b"HTTP/1.1 %d %b\r\n" % (status, reason.encode())


STATUS_LINES = [_status_line(status) for status in range(1000)]
"""The first line of an answer, by its status."""


def named_in_connection(headers: Iterable[Header]) -> frozenset[bytes]:
    """The names, in lower case, that Connection headers among `headers` take for their hop."""
    return frozenset(
        option.strip().lower()
        for name, value in headers
        if name.lower() == b"connection"
        for option in value.split(b",")
    )


class AnswerHeaders(list[Header]):
    """The end-to-end headers of an answer, not to be changed, and what a client's connection reads in them.

    lines: as they stand on the wire, but for x-request-id. length_at: where Content-Length is, -1 for nowhere;
    num_body: what it says. is_sse: a stream of events follows."""

    __slots__ = ("is_sse", "length_at", "lines", "num_body")

    def __init__(self, headers: Iterable[Header]) -> None:
        super().__init__(headers)
        self.length_at = -1
        self.num_body = 0
        self.is_sse = False
        parts: list[bytes] = []
        for i, (name, value) in enumerate(self):
            low = name.lower()
            if low == b"x-request-id":
                continue
            if low == b"content-length":
                self.length_at = i
                self.num_body = int(value)
            elif low == b"content-type":
                self.is_sse = value[:17].lower() == b"text/event-stream"
            parts += (name, b": ", value, b"\r\n")
        self.lines = b"".join(parts)

    def with_length(self, num_body: int) -> AnswerHeaders:
        """The same for a body of `num_body` bytes. There must be a Content-Length."""
        if num_body == self.num_body:
            return self
        headers = [*self]
        headers[self.length_at] = (headers[self.length_at][0], b"%d" % num_body)
        return AnswerHeaders(headers)


def error_headers(error: RequestError) -> list[Header]:
    """What an error's answer says beside its body: how it is encoded and, for 429 and 503, when to come back."""
    headers = [(b"content-type", b"application/json")]
    if isinstance(error, QueueFullError | NoWorkerError):
        headers.append((b"retry-after", b"%d" % max(1, error.retry_after_s)))
    elif error.status == 503:
        headers.append((b"retry-after", b"1"))
    return headers


def openai_error(error: RequestError) -> bytes:
    """{"error": {"message", "type", "param", "code"}}"""
    return error_body(error)


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(error: RequestError) -> bytes:
    """{"type": "error", "error": {"type", "message"}}, as clients of /v1/messages read it."""
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return _encode({"type": "error", "error": {"type": kind, "message": error.message}})
