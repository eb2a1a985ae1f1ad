"""Small ASGI pieces every route uses: read a body within limits, answer with JSON, say what went wrong.

An error's body is OpenAI's: {"error": {"message", "type", "param", "code"}}.
"""

from __future__ import annotations

import asyncio
import difflib
import re
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from equipoise.errors import InvalidValueError, QueueFullError, RequestError, RequestTimeoutError, TooLargeError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.types import Receive, Scope, Send

    Header = tuple[bytes, bytes]

T = TypeVar("T")

BODY_TIMEOUT_S = 60.0
"""Seconds a client has to send a body."""
DRAIN_S = 2.0
"""Seconds that an oversized body is read and dropped, so that its sender lives to read the answer."""

encode = msgspec.json.Encoder().encode


class ClientGoneError(Exception):
    """The client left before its request was read or answered: there is nobody to answer."""


class ErrorDetail(msgspec.Struct):
    """What went wrong: `param` names the request's field, `code` is for machines."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct):
    """The body of every answer with status 400 and above."""

    error: ErrorDetail


def error_body(error: RequestError) -> bytes:
    """`error` as the JSON that clients see."""
    return encode(ErrorBody(ErrorDetail(error.message, error.kind, error.field, error.code)))


def header(scope: Scope, name: bytes) -> str | None:
    """The first header `name` (lower case), or None."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value, "latin-1")
    return None


async def reply(
    scope: Scope,
    send: Send,
    body: bytes,
    *,
    status: int = 200,
    content_type: bytes = b"application/json",
    headers: Iterable[Header] = (),
) -> None:
    """Send a whole answer."""
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [
                (b"content-type", content_type),
                (b"content-length", b"%d" % len(body)),
                *request_id_header(scope),
                *headers,
            ],
        }
    )
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})


async def reply_json(scope: Scope, send: Send, value: Any, *, status: int = 200) -> None:
    """Send `value` (anything msgspec encodes) as JSON."""
    await reply(scope, send, encode(value), status=status)


async def reply_error(scope: Scope, send: Send, error: RequestError) -> None:
    """Send `error` with its status; 429 and 503 say when to come back."""
    headers: list[Header] = []
    if isinstance(error, QueueFullError):
        headers.append((b"retry-after", b"%d" % max(1, error.retry_after_s)))
    elif error.status == 503:
        headers.append((b"retry-after", b"1"))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.status in (408, 413):
        headers.append((b"connection", b"close"))
    await reply(scope, send, error_body(error), status=error.status, headers=headers)


def request_id_header(scope: Scope) -> list[Header]:
    """The answer's X-Request-Id, once the request has one."""
    request_id = scope.get("request_id")
    return [(b"x-request-id", request_id.encode())] if request_id else []


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole body, of at most `limit` bytes.

    Raises TooLargeError (by Content-Length or while reading), RequestTimeoutError, ClientGoneError."""
    announced = header(scope, b"content-length")
    too_large = TooLargeError(f"the body is over the limit of {limit} bytes")
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            if announced is not None and announced.isdigit() and int(announced) > limit:
                await _drop_body(receive)
                raise too_large
            chunks: list[bytes] = []
            size = 0
            while True:
                chunk, more = await _next_chunk(receive)
                size += len(chunk)
                if size > limit:
                    if more:
                        await _drop_body(receive)
                    raise too_large
                chunks.append(chunk)
                if not more:
                    return b"".join(chunks) if len(chunks) > 1 else chunk
    except TimeoutError:
        raise RequestTimeoutError(f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None


async def _next_chunk(receive: Receive) -> tuple[bytes, bool]:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGoneError
    return message.get("body", b""), message.get("more_body", False)


async def _drop_body(receive: Receive) -> None:
    try:
        async with asyncio.timeout(DRAIN_S):
            while (await _next_chunk(receive))[1]:
                pass
    except TimeoutError:
        return


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """The body as `decoder`'s type. Raises InvalidValueError that names the field, or the byte where JSON breaks."""
    if not body.strip():
        raise InvalidValueError("the body is empty, a JSON object was expected", code="invalid_json")
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _field_error(str(error), _fields_of(decoder.type)) from None
    except msgspec.DecodeError as error:
        raise InvalidValueError(
            f"the body is not valid JSON: {_where(str(error), body)}", code="invalid_json"
        ) from None
    except UnicodeDecodeError:
        raise InvalidValueError(f"the body is not valid UTF-8: byte {_bad_utf8(body)}", code="invalid_json") from None
    except RecursionError:
        raise InvalidValueError("the body is nested too deeply", code="invalid_json") from None


def _where(message: str, body: bytes) -> str:
    return message if "(byte " in message else f"{message} (byte {len(body)})"


def _bad_utf8(body: bytes) -> int:
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return error.start
    return len(body)


_AT = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_NAMED = re.compile(r"Object (?:contains unknown|missing required) field `([^`]*)`")


MAX_LISTED_FIELDS = 12
"""Of a body with more, an unknown field is told the one that may have been meant."""


def _fields_of(body_type: object) -> tuple[str, ...]:
    """The fields of a body of that type, none when they are not fixed."""
    if isinstance(body_type, type) and issubclass(body_type, msgspec.Struct):
        return body_type.__struct_encode_fields__
    return ()


def _instead_of(field: str, known: tuple[str, ...]) -> str:
    """What is allowed where `field` is not: all of `known` when they are few, else the nearest, if there is one."""
    if 0 < len(known) <= MAX_LISTED_FIELDS:
        return f", allowed are {', '.join(known)}"
    near = difflib.get_close_matches(field, known, 1)
    return f", did you mean {near[0]}?" if near else ""


def _field_error(message: str, known: tuple[str, ...]) -> InvalidValueError:
    """msgspec's "Expected `int`, got `str` - at `$.a[0]`" as an error of field "a[0]"; `known` are those of the top."""
    match = _AT.match(message)
    what, path = (match["what"], match["path"] or "") if match else (message, "")
    named = _NAMED.match(what)
    if named:
        unknown = "unknown" in what
        instead = _instead_of(named[1], known) if unknown and not path else ""
        path = f"{path}.{named[1]}".lstrip(".")
        what = f"this field is not known{instead}" if unknown else "this field is required"
        return InvalidValueError(f"{path}: {what}", path, "unknown_parameter" if unknown else "missing_parameter")
    what = what[:1].lower() + what[1:].replace("`", "").replace(" | ", " or ")
    return InvalidValueError(f"{path}: {what}" if path else what, path or None, "invalid_type")
