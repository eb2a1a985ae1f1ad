"""A client's request, and what about its head makes it unacceptable although llhttp lets it through."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equipoise.errors import HeadTooLargeError, InvalidValueError, RequestError, TooLargeError
from equipoise.gateway.http.wire import HOP_BY_HOP, MAX_HEAD_BYTES, named_in_connection

if TYPE_CHECKING:
    from collections.abc import Iterable

    from equipoise.gateway.relay.routes import Endpoint
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


class RequestHead:
    """What a request says before its body. Requests whose heads are equal share one, so nothing in it changes once it
    was accepted, and what is worked out of it is kept.

    target: of the request line, in origin form; path: without its query
    headers: those that go on to the worker, as they came
    marked: those that are looked at (`marked_names`), by lower-case name, in order
    request_id: as the client chose it, b"" for none
    via: the gateways and proxies that it came through, as its Via headers name them
    num_announced: what Content-Length says, 0 without one; another request of the same head may have another one
    endpoint, fairness_key, session, method_text, target_text: what the plane made of it; no endpoint before it did"""

    __slots__ = (
        "_lines", "endpoint", "expects_continue", "fairness_key", "headers", "is_http10", "keeps_alive", "marked",
        "method", "method_text", "named_rank", "num_announced", "path", "request_id", "session", "target",
        "target_text", "via",
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
        self.request_id = b""
        self.via = b""
        self.expects_continue = False
        self.num_announced = 0
        self.via = b""
        self.named_rank: int | None = None
        """The rank that the headers ask for; None for none, or nothing that can be one."""
        self.endpoint: Endpoint | None = None
        self.fairness_key = b""
        self.session: bytes | None = None
        self.method_text = self.target_text = ""
        self._lines: bytes | None = None

    @property
    def lines(self) -> bytes:
        """`headers` as they stand on the wire, a line break before each."""
        if self._lines is None:
            self._lines = b"".join([b"\r\n%b: %b" % header for header in self.headers])
        return self._lines

    def marked_value(self, name: bytes) -> bytes | None:
        """The first header `name` (lower case), one of `marked_names`."""
        for low, value in self.marked:
            if low == name:
                return value
        return None


class ClientRequest:
    """One request, complete.

    body: whole, without transfer framing; trailers are dropped. client: the address it came from. request_id: the
    client's own, or the gateway's once it is served"""

    __slots__ = ("body", "client", "head", "request_id")

    def __init__(self, head: RequestHead, body: bytes = b"", client: str = "") -> None:
        self.head = head
        self.body = body
        self.client = client
        self.request_id = head.request_id

    @property
    def method(self) -> bytes:
        """See RequestHead."""
        return self.head.method

    @property
    def path(self) -> bytes:
        """See RequestHead."""
        return self.head.path

    @property
    def query(self) -> bytes:
        """What follows the question mark; b"" for nothing."""
        return self.head.target[len(self.head.path) + 1 :]

    @property
    def headers(self) -> list[Header]:
        """Those that go on to the worker, an id among them. The caller's own."""
        own = [] if self.head.request_id else [(REQUEST_ID, self.request_id)]
        return [*self.head.headers, *own]

    @property
    def lines(self) -> bytes:
        """`headers` as they stand on the wire, a line break before each."""
        head = self.head
        return head.lines if head.request_id else b"%b\r\nx-request-id: %b" % (head.lines, self.request_id)

    def header(self, name: bytes) -> bytes | None:
        """The first header `name` (lower case), whether it is passed on or not."""
        value = self.head.marked_value(name)
        if value is None:
            value = next((own for other, own in self.head.headers if other.lower() == name), None)
        return value


class Refusal:
    """A request that is not served; the connection closes after the answer."""

    __slots__ = ("error", "is_http10")

    def __init__(self, error: RequestError) -> None:
        self.error = error
        self.is_http10 = False


def check_head(head: RequestHead, version: str, max_body_bytes: int) -> None:
    """Take over what `head`'s marked headers say. Raises the RequestError that it is to be answered with.

    llhttp refuses what is no token, folded lines, bare CR and LF, NUL, several or malformed lengths, a length beside a
    transfer coding. Here: versions, methods, targets, Host, and transfer codings other than exactly chunked."""
    if version not in _VERSIONS:
        raise _bad("HTTP/1.1 and HTTP/1.0 are spoken here")
    if head.method not in METHODS:
        raise _bad(f"method {_shown(head.method)} is not known")
    _check_target(head)
    num_hosts = 0
    options: list[Header] = []
    for low, value in head.marked:
        if low == b"host":
            num_hosts += 1
            _check_host(value)
        elif low == b"content-length":
            head.num_announced = int(value)
            if head.num_announced > max_body_bytes:
                raise too_large(max_body_bytes)
        elif low == b"connection":
            if value.lower() not in (b"keep-alive", b"close"):
                options.append((low, value))
        else:
            _check_marked(head, low, value)
    if num_hosts != 1 and not (head.is_http10 and num_hosts == 0):
        raise _bad(f"there must be one Host header, not {num_hosts}")
    if options:
        _drop_named(head, options)
    rank = head.marked_value(_RANK)
    if rank is not None and rank.isdigit() and len(rank) <= MAX_RANK_DIGITS:
        head.named_rank = int(rank)


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


def _check_marked(head: RequestHead, low: bytes, value: bytes) -> None:
    if low == b"transfer-encoding":
        if value.strip().lower() != b"chunked" or head.is_http10:
            raise _bad(f"Transfer-Encoding {_shown(value)}: only chunked, of HTTP/1.1, is understood")
    elif low == b"expect":
        head.expects_continue = _expects_continue(value) and not head.is_http10
    elif low == VIA:
        head.via += value + b","
    elif low == REQUEST_ID and not head.request_id:
        head.request_id = value


def _check_target(head: RequestHead) -> None:
    target = head.target
    if target.startswith(b"/"):
        if b"#" in target:
            raise _bad("the target has a fragment")
    elif target.lower().startswith(b"http://"):  # absolute form, which every server must accept
        slash = target.find(b"/", 7)
        head.target = target[slash:] if slash >= 0 else b"/"
        head.path = head.target.partition(b"?")[0]
    else:
        raise _bad(f"target {_shown(target)}: it must begin with a slash")


def _check_host(value: bytes) -> None:
    if value.translate(None, b" \t,/@\\") != value:
        raise _bad(f"Host {_shown(value)} is no host")


def _drop_named(head: RequestHead, options: list[Header]) -> None:
    """In one pass, however many Connection headers (`options`) there are: both are for the client to multiply."""
    named = named_in_connection(options)
    head.headers = [header for header in head.headers if header[0].lower() not in named]


def _expects_continue(value: bytes) -> bool:
    if value.lower() != b"100-continue":
        raise _bad(f"Expect {_shown(value)}: only 100-continue is understood")
    return True


def _bad(message: str) -> InvalidValueError:
    return InvalidValueError(message, code="invalid_http")


def _shown(value: bytes) -> str:
    return repr(value[:64].decode("latin-1"))
