"""Bytes of HTTP/1.1: status lines, heads, which headers stay on their hop, error answers."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec

from equipoise.errors import NoWorkerError, QueueFullError
from equipoise.server.http import error_body

if TYPE_CHECKING:
    from collections.abc import Iterable

    from equipoise.errors import RequestError
    from equipoise.gateway.transport import Header

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
