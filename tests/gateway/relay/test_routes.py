"""Which path leads where."""

from __future__ import annotations

import pytest

from equipoise.errors import NotFoundError, WrongMethodError
from equipoise.gateway.relay.routes import Answer, worker_routes

ROUTES = worker_routes()
ROUTES.own("GET", "/health", lambda request: Answer(200, b"{}"))
ROUTES.own("GET", "/workers", lambda request: Answer(200, b"[]"))
ROUTES.own("POST", "/workers", lambda request: Answer(201, b"{}"))
ROUTES.own("GET", "/workers/", lambda request: Answer(200, b"{}"))
ROUTES.own("DELETE", "/workers/", lambda request: Answer(200, b"{}"))


@pytest.mark.parametrize(
    ("method", "path", "name"),
    [
        (b"POST", b"/v1/chat/completions", "/v1/chat/completions"),
        (b"POST", b"/v1/audio/transcriptions", "/v1/audio/"),
        (b"POST", b"/generate/", "/generate"),
        (b"GET", b"/health", "/health"),
        (b"HEAD", b"/health", "/health"),
        (b"GET", b"/workers/", "/workers"),
        (b"POST", b"/workers", "/workers"),
        (b"DELETE", b"/workers/a:1", "/workers/"),
    ],
)
def test_paths_lead_to_their_endpoints(method: bytes, path: bytes, name: str) -> None:
    assert ROUTES.find(method, path).name == name


@pytest.mark.parametrize("path", [b"/", b"/v1", b"/v1/chat/completionsx", b"/v1/audio", b"/healthy", b"//health"])
def test_other_paths_lead_nowhere(path: bytes) -> None:
    with pytest.raises(NotFoundError, match="no route"):
        ROUTES.find(b"GET", path)


@pytest.mark.parametrize("dots", [b"..", b"%2e%2E", b".%2e", b".", b"x/..", b"..%2f..", b"..\\..", b"..%5c.."])
def test_no_path_leads_a_worker_to_another_route(dots: bytes) -> None:
    with pytest.raises(NotFoundError, match="no route"):
        ROUTES.find(b"POST", b"/v1/audio/" + dots + b"/flush_cache")
    assert ROUTES.find(b"POST", b"/v1/audio/a..b/.c").name == "/v1/audio/"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        (b"GET", b"/generate", b"POST"),
        (b"HEAD", b"/generate", b"POST"),
        (b"DELETE", b"/workers", b"GET, POST"),
        (b"POST", b"/workers/a", b"DELETE, GET"),
        (b"OPTIONS", b"/health", b"GET"),
    ],
)
def test_other_methods_are_refused(method: bytes, path: bytes, allowed: bytes) -> None:
    with pytest.raises(WrongMethodError, match=f"takes {allowed.decode()}"):
        ROUTES.find(method, path)
    assert ROUTES.allowed(path) == allowed


def test_generation_is_told_from_what_has_no_output() -> None:
    assert ROUTES.find(b"POST", b"/v1/messages").generates
    assert not ROUTES.find(b"POST", b"/v1/embeddings").generates
