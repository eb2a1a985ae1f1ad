"""Heads that were parsed before on a connection, known again by their bytes.

A client sends the same head with each request, and a worker with each answer, but for the length of the body: what
was parsed and accepted once need not be parsed and checked again. Comparing costs 1 us, parsing and checking 8 us.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")

MAX_DIGITS = 10
MAX_BYTES = 8192
"""Longer heads are not kept."""
_NAME = b"\r\ncontent-length:"


class KnownHead(Generic[T]):
    """The bytes of a head before and after the digits of its Content-Length. head: what was read in it."""

    __slots__ = ("_after", "_before", "head")

    def __init__(self, before: bytes, after: bytes, head: T) -> None:
        self._before = before
        self._after = after
        self.head = head

    def body_of(self, data: bytes) -> bytes | None:
        """The body, where `data` is this head and all of the body that it announces, and nothing else; else None.

        Only for a connection whose parser stands between two messages."""
        before, after = self._before, self._after
        if not data.startswith(before):
            return None
        start = len(before)
        end = data.find(b"\r", start, start + MAX_DIGITS + 1)
        digits = data[start:end]
        if end < 0 or not digits.isdigit() or not data.startswith(after, end):
            return None
        body = data[end + len(after) :]
        return body if len(body) == int(digits) else None


def known_head(data: bytes, num_body: int, parsed: T) -> KnownHead[T] | None:
    """What is to be known again of `data`, one message that was taken: a head in which `parsed` was read and which
    announces `num_body` bytes, and these. None where it did not come so, or is long."""
    head = data[: len(data) - num_body]
    if not num_body or len(head) > MAX_BYTES or data.find(b"\r\n\r\n") + 4 != len(head):
        return None
    at = head.lower().find(_NAME)
    if at < 0:
        return None
    value = head[at + len(_NAME) : head.index(b"\r", at + 2)]
    digits = value.strip(b" ")
    if digits != b"%d" % num_body or value.endswith(b" "):
        return None
    end = at + len(_NAME) + len(value)
    return KnownHead(head[: end - len(digits)], head[end:], parsed)
