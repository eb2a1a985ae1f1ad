"""Reads single metrics out of a page in Prometheus' text format, without parsing the rest of it.

A server with many ranks shows megabytes, of which a load report needs some lines, once a second: so the page is
searched for the wanted names, and only the lines that carry them are read.
"""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

Labels = dict[bytes, bytes]

_ESCAPES = {b"n"[0]: b"\n", b'"'[0]: b'"', b"\\"[0]: b"\\"}
_QUOTE, _BACKSLASH, _NEWLINE = b'"\\\n'
_BLANK = b" \t"


def samples(page: bytes, name: bytes) -> Iterator[tuple[Labels, float]]:
    """Labels and value of each line of metric `name`, in order. Lines that are malformed, or whose value is no finite
    number, are left out."""
    at = page.find(name)
    while at >= 0:
        end = at + len(name)
        if (at == 0 or page[at - 1] == _NEWLINE) and page[end : end + 1] in (b"{", b" ", b"\t"):
            line_end = page.find(b"\n", end)
            sample = _sample(page[end : line_end if line_end >= 0 else len(page)])
            if sample is not None:
                yield sample
        at = page.find(name, end)


def _sample(rest: bytes) -> tuple[Labels, float] | None:
    """Of the part of a line after the name: `{labels} value [timestamp]`."""
    labels: Labels = {}
    if rest[:1] == b"{":
        end = _read_labels(rest, labels)
        if end is None:
            return None
        rest = rest[end:]
    words = rest.split(None, 1)
    try:
        value = float(words[0])
    except (IndexError, ValueError):
        return None
    return (labels, value) if isfinite(value) else None


def _read_labels(text: bytes, labels: Labels) -> int | None:
    """Read `{name="value",...}` at the start of `text`. Answers where it ends, None where it is malformed."""
    at = 1
    while True:
        while text[at : at + 1] and text[at] in b", \t":
            at += 1
        if text[at : at + 1] == b"}":
            return at + 1
        equals = text.find(b"=", at)
        if equals < 0 or text[equals + 1 : equals + 2] != b'"':
            return None
        read = _read_quoted(text, equals + 1)
        if read is None:
            return None
        labels[text[at:equals].strip()], at = read


def _read_quoted(text: bytes, at: int) -> tuple[bytes, int] | None:
    """The string whose opening quote is at `at`, its escapes undone, and where it ends."""
    close = text.find(b'"', at + 1)
    if close < 0:
        return None
    plain = text[at + 1 : close]
    if _BACKSLASH not in plain:
        return plain, close + 1
    value = bytearray()
    at += 1
    while at < len(text):
        byte = text[at]
        if byte == _QUOTE:
            return bytes(value), at + 1
        if byte == _BACKSLASH and at + 1 < len(text):
            at += 1
            value += _ESCAPES.get(text[at], text[at - 1 : at + 1])
        else:
            value.append(byte)
        at += 1
    return None
