"""Single metrics out of a page: escapes, neighbours with longer names, broken lines, any bytes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.gateway.fleet.backends.metrics_text import samples


@pytest.mark.parametrize(
    ("page", "found"),
    [
        (b"", []),
        (b"m 1", [({}, 1.0)]),
        (b"m 1\n", [({}, 1.0)]),
        (b"m\t-2.5e3\n", [({}, -2500.0)]),
        (b"m{} 1\n", [({}, 1.0)]),
        (b'm{a="b"} 1\nm{a="c"} 2\n', [({b"a": b"b"}, 1.0), ({b"a": b"c"}, 2.0)]),
        (b'm{a="b",} 1\n', [({b"a": b"b"}, 1.0)]),
        (b'm{ a="b" , c="d" } 1 1700000000000\n', [({b"a": b"b", b"c": b"d"}, 1.0)]),
        (b'm{a="b"} 1 # {trace="x"} 0.5\n', [({b"a": b"b"}, 1.0)]),
        (b'm{a="}",b="{,"} 1\n', [({b"a": b"}", b"b": b"{,"}, 1.0)]),
        (rb'm{a="\"",b="x\\",c="l\n2",d="\q"} 1', [({b"a": b'"', b"b": b"x\\", b"c": b"l\n2", b"d": rb"\q"}, 1.0)]),
        (b"# HELP m of m 1\n# TYPE m gauge\nm 3\n", [({}, 3.0)]),
        (b"mm 1\nm_total 2\nxm 3\nm:x 4\nm 5\n", [({}, 5.0)]),
        (b'other{name="m 1"} 2\n', []),
        (b"m NaN\nm +Inf\nm x\nm\nm \nm 7\n", [({}, 7.0)]),
        (b'm{a="b} 1\nm{a=b} 1\nm{a} 1\nm{"a"} 1\nm{a="b" 1\nm 8\n', [({}, 8.0)]),
        (rb'm{a="b\"} 1' + b"\nm 9", [({}, 9.0)]),
    ],
)
def test_samples_of_a_page(page: bytes, found: list[tuple[dict[bytes, bytes], float]]) -> None:
    assert list(samples(page, b"m")) == found


@settings(deadline=None)
@given(st.lists(st.sampled_from([b"m", b"{", b"}", b'"', b"\\", b"=", b",", b" ", b"\n", b"1", b"a", b"\xff"])))
def test_no_page_makes_it_fail(parts: list[bytes]) -> None:
    for labels, value in samples(b"".join(parts), b"m"):
        assert value == value
        assert all(isinstance(name, bytes) for name in labels)


@settings(deadline=None)
@given(st.dictionaries(st.from_regex(rb"[a-z_]{1,8}", fullmatch=True), st.binary(max_size=20), max_size=4))
def test_label_values_survive_their_escapes(labels: dict[bytes, bytes]) -> None:
    def escaped(value: bytes) -> bytes:
        return value.replace(b"\\", b"\\\\").replace(b'"', b'\\"').replace(b"\n", b"\\n")

    written = b",".join(b'%s="%s"' % (name, escaped(value)) for name, value in labels.items())
    assert list(samples(b"m{%s} 4.5\n" % written, b"m")) == [(labels, 4.5)]
