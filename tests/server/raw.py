"""HTTP by hand, for what no client library would do."""

from __future__ import annotations

import contextlib
import json
import socket
import time
import urllib.request
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.serving import Server

Request = dict[str, Any]


@contextlib.contextmanager
def connect(server: Server) -> Iterator[socket.socket]:
    """A plain TCP connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        yield connection


def request_bytes(path: str, body: bytes, *headers: str, length: int | None = None) -> bytes:
    """A POST; `length` replaces the true Content-Length."""
    lines = [f"POST {path} HTTP/1.1", "Host: test", f"Content-Length: {len(body) if length is None else length}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


def chunked_bytes(path: str, chunks: list[bytes]) -> bytes:
    """A POST whose body has no announced length."""
    head = f"POST {path} HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return head + b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"


def read_all(connection: socket.socket) -> bytes:
    """One whole answer, or everything until the other side closes."""
    data = b""
    while not _is_whole(data):
        chunk = connection.recv(65536)
        if not chunk:
            break
        data += chunk
    return data


def _is_whole(data: bytes) -> bool:
    head, blank, body = data.partition(b"\r\n\r\n")
    for line in head.lower().split(b"\r\n") if blank else []:
        if line.startswith(b"content-length:"):
            return len(body) >= int(line.partition(b":")[2])
        if line == b"transfer-encoding: chunked":
            return body == b"0\r\n\r\n" or body.endswith(b"\r\n0\r\n\r\n")
    return False


def status_of(answer: bytes) -> int:
    """The status in an answer's first line."""
    return int(answer.split(b" ", 2)[1])


def body_of(answer: bytes) -> Any:
    """The JSON body of an answer with a Content-Length."""
    return json.loads(answer.partition(b"\r\n\r\n")[2])


def load(server: Server) -> dict[str, Any]:
    """The rank's load."""
    with urllib.request.urlopen(f"{server.url}/get_load") as answer:
        return json.load(answer)[0]  # type: ignore[no-any-return]


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    """Wait until `condition` holds; AssertionError with `what` when it does not."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"did not happen within {timeout_s} s: {what}"
        time.sleep(0.01)
