"""Requests that no gateway may pass on: each must be answered with 4xx or closed, and none may reach a worker.

What a worker would take for two requests, or for another one than the gateway, smuggles; most of these try that.
"""

from __future__ import annotations

_BODY = b'{"model":"m","messages":[]}'
_LEN = len(_BODY)
_FULL = b"%x\r\n%b\r\n0\r\n\r\n" % (_LEN, _BODY)
_START = b"POST /v1/chat/completions HTTP/1.1\r\n"
_HOST = b"Host: a\r\n"
_SMUGGLED = b"POST /v1/completions HTTP/1.1\r\nHost: b\r\nContent-Length: 2\r\n\r\n{}"


def _post(*headers: bytes, body: bytes = _BODY, host: bytes = _HOST) -> bytes:
    return _START + host + b"".join(header + b"\r\n" for header in headers) + b"\r\n" + body


def _length(value: bytes) -> bytes:
    return _post(b"Content-Length: " + value)


def _coded(value: bytes, body: bytes = _FULL) -> bytes:
    return _post(b"Transfer-Encoding: " + value, body=body)


def _chunked(body: bytes) -> bytes:
    return _coded(b"chunked", body)


def _line(line: bytes) -> bytes:
    return line + b"\r\nHost: a\r\nContent-Length: 0\r\n\r\n"


MALFORMED: dict[str, bytes] = {
    # a body framed in two ways
    "length and chunked": _post(b"Content-Length: 5", b"Transfer-Encoding: chunked", body=_FULL),
    "chunked and length": _post(b"Transfer-Encoding: chunked", b"Content-Length: 5", body=_FULL),
    "two equal lengths": _post(b"Content-Length: %d" % _LEN, b"Content-Length: %d" % _LEN),
    "two lengths": _post(b"Content-Length: 0", b"Content-Length: %d" % _LEN),
    "length in a trailer": _chunked(_FULL[:-2] + b"Content-Length: 5\r\n\r\n"),
    "coding in a trailer": _chunked(_FULL[:-2] + b"Transfer-Encoding: chunked\r\n\r\n"),
    # lengths
    "listed length": _length(b"%d, %d" % (_LEN, _LEN)),
    "signed length": _length(b"+%d" % _LEN),
    "negative length": _length(b"-1"),
    "hexadecimal length": _length(b"0x1b"),
    "length with an underscore": _length(b"2_7"),
    "length with a blank": _length(b"2 7"),
    "length with a vertical tab": _length(b"\x0b27"),
    "length with a comma": _length(b"27,"),
    "length with a point": _length(b"27.0"),
    "length with an exponent": _length(b"27e0"),
    "empty length": _length(b""),
    "length in words": _length(b"twentyseven"),
    "overflowing length": _length(b"18446744073709551643"),
    "endless length": _length(b"9" * 400),
    # codings
    "gzip and chunked": _coded(b"gzip, chunked"),
    "chunked and gzip": _coded(b"chunked, gzip"),
    "chunked twice": _coded(b"chunked, chunked"),
    "two codings": _post(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked", body=_FULL),
    "two codings, one identity": _post(
        b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity", body=b"0\r\n\r\n"
    ),
    "identity": _coded(b"identity"),
    "unknown coding": _coded(b"xchunked"),
    "coding with a parameter": _coded(b"chunked;q=1"),
    "quoted coding": _coded(b'"chunked"'),
    "empty coding": _coded(b""),
    "coding after a vertical tab": _coded(b"\x0bchunked"),
    "coding before a tab": _coded(b"chunked\t"),
    "coding with a NUL": _coded(b"chunked\x00"),
    "coding in HTTP/1.0": _post(b"Transfer-Encoding: chunked", body=_FULL).replace(b"HTTP/1.1", b"HTTP/1.0"),
    "coding with a blank before its colon": _post(b"Transfer-Encoding : chunked", body=_FULL),
    "coding on a folded line": _post(b"Transfer-Encoding:\r\n chunked", body=_FULL),
    # chunks
    "no chunk size": _chunked(b"\r\nabc\r\n0\r\n\r\n"),
    "chunk size in words": _chunked(b"zz\r\n"),
    "chunk size with 0x": _chunked(b"0x3\r\nabc\r\n0\r\n\r\n"),
    "signed chunk size": _chunked(b"+3\r\nabc\r\n0\r\n\r\n"),
    "negative chunk size": _chunked(b"-3\r\nabc\r\n0\r\n\r\n"),
    "blank before a chunk size": _chunked(b" 3\r\nabc\r\n0\r\n\r\n"),
    "blank after a chunk size": _chunked(b"3 \r\nabc\r\n0\r\n\r\n"),
    "underscore in a chunk size": _chunked(b"1_0\r\n" + b"a" * 16 + b"\r\n0\r\n\r\n"),
    "overflowing chunk size": _chunked(b"fffffffffffffffff\r\nabc\r\n0\r\n\r\n"),
    "chunk longer than its size": _chunked(b"3\r\nabcd\r\n0\r\n\r\n"),
    "bare LF after a chunk size": _chunked(b"3\nabc\r\n0\r\n\r\n"),
    "bare LF after a chunk": _chunked(b"3\r\nabc\n0\r\n\r\n"),
    "bare LF at the end": _chunked(b"0\n\n"),
    "bare CR after a chunk size": _chunked(b"3\rabc\r\n0\r\n\r\n"),
    "LF in a chunk extension": _chunked(b"3;a\nb\r\nabc\r\n0\r\n\r\n"),
    "CR in a chunk extension": _chunked(b"3;a\rb\r\nabc\r\n0\r\n\r\n"),
    "NUL in a chunk extension": _chunked(b"3;a\x00b\r\nabc\r\n0\r\n\r\n"),
    "open quote in a chunk extension": _chunked(b'3;a="\r\nabc\r\n0\r\n\r\n'),
    "request in a chunk extension": _chunked(b"3;\n" + _SMUGGLED),
    # lines of a head
    "folded header": _post(b"X-A: 1\r\n 2", b"Content-Length: %d" % _LEN),
    "header folded by a tab": _post(b"X-A: 1\r\n\t2", b"Content-Length: %d" % _LEN),
    "first header indented": _START + b" Host: a\r\n\r\n",
    "bare LF after the request line": b"GET /health HTTP/1.1\nHost: a\r\n\r\n",
    "bare LF after a header": _START + b"Host: a\nContent-Length: 0\r\n\r\n",
    "bare LF at the head's end": _START + b"Host: a\r\nContent-Length: 0\r\n\n",
    "bare LFs": b"GET /health HTTP/1.1\nHost: a\n\n",
    "bare CR in a value": _post(b"X-A: 1\rContent-Length: %d" % _LEN),
    "bare CR after a value": _START + b"Host: a\rX: b\r\n\r\n",
    "two CRs": _START + b"Host: a\r\r\n\r\n",
    "NUL in a value": _post(b"X-A: a\x00b", b"Content-Length: %d" % _LEN),
    "NUL in a name": _post(b"X\x00A: b", b"Content-Length: %d" % _LEN),
    "control byte in a value": _post(b"X-A: a\x01b", b"Content-Length: %d" % _LEN),
    "delete in a value": _post(b"X-A: a\x7fb", b"Content-Length: %d" % _LEN),
    "blank before a colon": _post(b"Content-Length : %d" % _LEN),
    "tab before a colon": _post(b"Content-Length\t: %d" % _LEN),
    "no colon": _post(b"Content-Length %d" % _LEN),
    "empty name": _post(b": a"),
    "blank in a name": _post(b"Content Length: %d" % _LEN),
    "high byte in a name": _post(b"X\xff: a"),
    "bracket in a name": _post(b"X(A): a"),
    # hosts
    "no Host": _START + b"Content-Length: %d\r\n\r\n" % _LEN + _BODY,
    "two Hosts": _post(b"Host: b", b"Content-Length: %d" % _LEN),
    "two equal Hosts": _post(b"Host: a", b"Content-Length: %d" % _LEN),
    "Host with a path": _post(b"Content-Length: %d" % _LEN, host=b"Host: a/b\r\n"),
    "Host with a user": _post(b"Content-Length: %d" % _LEN, host=b"Host: a@b\r\n"),
    "listed Hosts": _post(b"Content-Length: %d" % _LEN, host=b"Host: a, b\r\n"),
    "Host with a blank": _post(b"Content-Length: %d" % _LEN, host=b"Host: a b\r\n"),
    # request lines
    "lower-case method": _line(b"post /v1/chat/completions HTTP/1.1"),
    "unknown method": _line(b"FETCH /health HTTP/1.1"),
    "method with a control byte": _line(b"GE\x01T /health HTTP/1.1"),
    "CONNECT": _line(b"CONNECT a:80 HTTP/1.1"),
    "TRACE": _line(b"TRACE /health HTTP/1.1"),
    "method of another protocol": _line(b"SOURCE / ICE/1.0"),
    "RTSP": _line(b"DESCRIBE / RTSP/1.0"),
    "blank before the method": b" " + _line(b"GET /health HTTP/1.1"),
    "tab after the method": _line(b"GET\t/health HTTP/1.1"),
    "no target": _line(b"GET HTTP/1.1"),
    "relative target": _line(b"GET health HTTP/1.1"),
    "target with a backslash": _line(b"GET \\health HTTP/1.1"),
    "target with a blank": _line(b"GET /hea lth HTTP/1.1"),
    "target with a tab": _line(b"GET /hea\tlth HTTP/1.1"),
    "target with a NUL": _line(b"GET /health\x00 HTTP/1.1"),
    "target with a control byte": _line(b"GET /health\x01 HTTP/1.1"),
    "target with a high byte": _line(b"GET /health\xff HTTP/1.1"),
    "target with a fragment": _line(b"GET /health#a HTTP/1.1"),
    "target that is a star": _line(b"OPTIONS * HTTP/1.1"),
    "target of another scheme": _line(b"GET ftp://a/health HTTP/1.1"),
    "lower-case protocol": _line(b"GET /health http/1.1"),
    "no protocol": b"GET /health\r\nHost: a\r\n\r\n",
    "HTTP/0.9": _line(b"GET /health HTTP/0.9"),
    "HTTP/1.2": _line(b"GET /health HTTP/1.2"),
    "HTTP/2.0": _line(b"GET /health HTTP/2.0"),
    "HTTP/11.1": _line(b"GET /health HTTP/11.1"),
    "HTTP/1": _line(b"GET /health HTTP/1"),
    "HTTP/1.1 and a blank": _line(b"GET /health HTTP/1.1 "),
    "signed version": _line(b"GET /health HTTP/+1.1"),
    # other protocols
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
    "TLS": bytes.fromhex("16030100050100000100") + b"\r\n\r\n",
    "SSH": b"SSH-2.0-OpenSSH_9.6\r\n",
    "SOCKS": b"\x05\x01\x00",
    "noise": bytes(range(128, 256)),
    "NULs": bytes(64),
    # expectations
    "unknown expectation": _post(b"Expect: 200-ok", b"Content-Length: %d" % _LEN),
    # too much
    "long target": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    "long name": _post(b"X-" + b"a" * 100_000 + b": b"),
    "long value": _post(b"X-A: " + b"a" * 100_000),
    "many headers": _post(*(b"X-%d: %d" % (number, number) for number in range(8_000))),
    "large head that never ends": _START + b"".join(b"X-%d: %d\r\n" % (n, n) for n in range(20_000)),
    "long trailer": _chunked(b"3\r\nabc\r\n0\r\nX: " + b"a" * 200_000),
    # a second request that the first one must not hide
    "no length, then what looks like a body": _post(),
    "garbage after a request": b"GET /health HTTP/1.1\r\nHost: a\r\n\r\nGARBAGE\r\n\r\n",
}

NOT_JSON: dict[str, bytes] = {
    "nothing": b"",
    "blanks": b"  \n ",
    "a word": b"hello",
    "a list": b"[]",
    "a string": b'"a"',
    "null": b"null",
    "cut short": b'{"model":"m","messages":[',
    "a trailing comma": b'{"model":"m",}',
    "two objects": b'{"model":"m"}{"model":"m"}',
    "single quotes": b"{'model':'m'}",
    "a comment": b'{"model":"m"/**/}',
    "NaN": b'{"model":"m","temperature":NaN}',
    "a byte order mark": b'\xef\xbb\xbf{"model":"m"}',
    "UTF-16": '{"model":"m"}'.encode("utf-16"),
    "deep nesting": b'{"model":"m","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a control byte in a string": b'{"model":"a\x01b"}',
}
