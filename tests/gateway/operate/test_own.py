"""Names in paths."""

from __future__ import annotations

import pytest

from equipoise.gateway.http.request import ClientRequest, RequestHead
from equipoise.gateway.operate.own import name_in_path


@pytest.mark.parametrize(
    ("target", "suffix", "name"),
    [
        (b"/workers/10.0.0.1:80", "", "10.0.0.1:80"),
        (b"/workers/http://a:1/?x=/y", "", "http://a:1"),
        (b"/workers/http%3A%2F%2Fa:1/drain", "/drain", "http://a:1"),
        (b"/workers/http://a:1/drain/", "/drain", "http://a:1"),
        (b"/workers/org/model%20x", "", "org/model x"),
        (b"/workers/", "", ""),
    ],
)
def test_a_name_is_what_is_left(target: bytes, suffix: str, name: str) -> None:
    assert name_in_path(ClientRequest(RequestHead(b"GET", target, [], [])), "/workers/", suffix) == name
