"""A client's request, and what about its head makes it unacceptable although llhttp lets it through."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equipoise.errors import HeadTooLargeError, InvalidValueError, RequestError, TooLargeError
from equipoise.gateway.wire import HOP_BY_HOP, MAX_HEAD_BYTES, named_in_connection

if TYPE_CHECKING:
    from collections.abc import Iterable

    from equipoise.gateway.transport import Header

METHODS = frozenset((b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS"))
REQUEST_ID = b"x-request-id"
VIA = b"via"
_RANK = b"x-data-parallel-rank"
_VERSIONS = ("1.1", "1.0")
MAX_RANK_DIGITS = 9


def marked_names(others: Iterable[bytes]) -> dict[bytes, bool]:
    """The headers that are looked at, in lower case; the value says whether they go on to the worker.

    `others`: names that settings speak of; they do."""
    names = dict.fromkeys((b"host", b"content-length", b"expect", *sorted(HOP_BY_HOP)), False)
    return dict.fromkeys((REQUEST_ID, VIA, _RANK, *(name.lower() for name in others)), True) | names


class ClientRequest:
    """One request, complete.

    target: of the request line, in origin form; path: without its query
    headers: those that go on to the worker, as they came
    marked: those that are looked at (`marked_names`), by lower-case name, in order
    body: whole, without transfer framing; trailers are dropped
    via: the gateways and proxies that it came through, as its Via headers name them
    client: the address it came from"""

    __slots__ = (
        "body", "client", "expects_continue", "headers", "is_http10", "keeps_alive", "marked", "method",
        "num_announced", "path", "request_id", "target", "via",
    )  # fmt: skip

    def __init__(
        self,
        method: bytes,
        target: bytes,
        headers: list[Header],
        marked: list[Header],
        is_http10: bool = False,
    ) -> None:
        self.method = method
        self.target = target
        self.path = target if b"?" not in target else target[: target.index(b"?")]
        self.headers = headers
        self.marked = marked
        self.is_http10 = is_http10
        self.keeps_alive = not is_http10
        self.body = b""
        self.client = ""
        self.request_id = b""
        self.via = b""
        self.expects_continue = False
        self.num_announced = 0

    @property
    def query(self) -> bytes:
        """What follows the question mark; b"" for nothing."""
        return self.target[len(self.path) + 1 :]

    def header(self, name: bytes) -> bytes | None:
        """The first header `name` (lower case), whether it is passed on or not."""
        for low, value in self.marked:
            if low == name:
                return value
        for own, value in self.headers:
            if own.lower() == name:
                return value
        return None

    def marked_value(self, name: bytes) -> bytes | None:
        """The first header `name` (lower case), one of `marked_names`."""
        for low, value in self.marked:
            if low == name:
                return value
        return None

    @property
    def named_rank(self) -> int | None:
        """The rank that the request's headers ask for; None for none, or nothing that can be one."""
        value = self.marked_value(_RANK)
        return int(value) if value is not None and value.isdigit() and len(value) <= MAX_RANK_DIGITS else None


class Refusal:
    """A request that is not served; the connection closes after the answer."""

    __slots__ = ("error", "is_http10")

    def __init__(self, error: RequestError) -> None:
        self.error = error
        self.is_http10 = False


def check_head(request: ClientRequest, version: str, max_body_bytes: int) -> None:
    """Take over what `request`'s marked headers say. Raises the RequestError that it is to be answered with.

    llhttp refuses what is no token, folded lines, bare CR and LF, NUL, several or malformed lengths, a length beside a
    transfer coding. Here: versions, methods, targets, Host, and transfer codings other than exactly chunked."""
    if version not in _VERSIONS:
        raise _bad("HTTP/1.1 and HTTP/1.0 are spoken here")
    if request.method not in METHODS:
        raise _bad(f"method {_shown(request.method)} is not known")
    _check_target(request)
    num_hosts = 0
    options: list[Header] = []
    for low, value in request.marked:
        if low == b"host":
            num_hosts += 1
            _check_host(value)
        elif low == b"content-length":
            request.num_announced = int(value)
            if request.num_announced > max_body_bytes:
                raise too_large(max_body_bytes)
        elif low == b"connection":
            if value.lower() not in (b"keep-alive", b"close"):
                options.append((low, value))
        else:
            _check_marked(request, low, value)
    if num_hosts != 1 and not (request.is_http10 and num_hosts == 0):
        raise _bad(f"there must be one Host header, not {num_hosts}")
    if options:
        _drop_named(request, options)


def check_head_size(target: bytes, headers: list[Header], marked: list[Header]) -> None:
    """Raises HeadTooLargeError when target and headers have over MAX_HEAD_BYTES."""
    num_bytes = len(target) + sum(len(name) + len(value) for part in (headers, marked) for name, value in part)
    if num_bytes > MAX_HEAD_BYTES:
        raise head_too_large()


def head_too_large() -> HeadTooLargeError:
    """The error for too large a head."""
    return HeadTooLargeError(f"target and headers are over the limit of {MAX_HEAD_BYTES} bytes")


def too_large(max_body_bytes: int) -> TooLargeError:
    """The error for too large a body."""
    return TooLargeError(f"the body is over the limit of {max_body_bytes} bytes")


def _check_marked(request: ClientRequest, low: bytes, value: bytes) -> None:
    if low == b"transfer-encoding":
        if value.strip().lower() != b"chunked" or request.is_http10:
            raise _bad(f"Transfer-Encoding {_shown(value)}: only chunked, of HTTP/1.1, is understood")
    elif low == b"expect":
        request.expects_continue = _expects_continue(value) and not request.is_http10
    elif low == VIA:
        request.via += value + b","
    elif low == REQUEST_ID and not request.request_id:
        request.request_id = value


def _check_target(request: ClientRequest) -> None:
    target = request.target
    if target.startswith(b"/"):
        if b"#" in target:
            raise _bad("the target has a fragment")
    elif target.lower().startswith(b"http://"):  # absolute form, which every server must accept
        slash = target.find(b"/", 7)
        request.target = target[slash:] if slash >= 0 else b"/"
        request.path = request.target.partition(b"?")[0]
    else:
        raise _bad(f"target {_shown(target)}: it must begin with a slash")


def _check_host(value: bytes) -> None:
    if any(byte in value for byte in b" \t,/@\\"):
        raise _bad(f"Host {_shown(value)} is no host")


def _drop_named(request: ClientRequest, options: list[Header]) -> None:
    """In one pass, however many Connection headers (`options`) there are: both are for the client to multiply."""
    named = named_in_connection(options)
    request.headers = [header for header in request.headers if header[0].lower() not in named]


def _expects_continue(value: bytes) -> bool:
    if value.lower() != b"100-continue":
        raise _bad(f"Expect {_shown(value)}: only 100-continue is understood")
    return True


def _bad(message: str) -> InvalidValueError:
    return InvalidValueError(message, code="invalid_http")


def _shown(value: bytes) -> str:
    return repr(value[:64].decode("latin-1"))
