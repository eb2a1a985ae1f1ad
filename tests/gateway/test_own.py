"""Which path leads where, and what becomes of a handler's errors."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from equipoise.errors import NotFoundError, UnauthorizedError, UnavailableError
from equipoise.gateway.own import OwnRoute, OwnRoutes, json_answer
from equipoise.gateway.request import ClientRequest

if TYPE_CHECKING:
    from equipoise.gateway.own import OwnAnswer


async def echo(request: ClientRequest, name: str) -> OwnAnswer:
    """Answers with the name in the path."""
    return json_answer(name)


LABELS = ("/health", "/workers", "/workers/{name}", "/workers/{name}/drain", "/v1/models/{name}")
ROUTES = OwnRoutes([OwnRoute(label, {b"GET": echo}) for label in LABELS])


@pytest.mark.parametrize(
    ("path", "label", "name"),
    [
        (b"/health", "/health", ""),
        (b"/health/", "/health", ""),
        (b"/workers", "/workers", ""),
        (b"/workers/", "/workers", ""),
        (b"/workers/10.0.0.1:80", "/workers/{name}", "10.0.0.1:80"),
        (b"/workers/http://a:1", "/workers/{name}", "http://a:1"),
        (b"/workers/http%3A%2F%2Fa:1/drain", "/workers/{name}/drain", "http://a:1"),
        (b"/v1/models/org/model%20x", "/v1/models/{name}", "org/model x"),
        (b"/v1/models/\xc3\xbc", "/v1/models/{name}", "Ã¼"),
    ],
)
def test_a_path_leads_to_its_route(path: bytes, label: str, name: str) -> None:
    route = ROUTES.find(path)
    assert route is not None
    assert route.label == label
    answer = asyncio.run(route.answer(ClientRequest(b"GET", path, [], [])))
    assert (answer.status, json.loads(answer.body)) == (200, name)


@pytest.mark.parametrize("path", [b"/", b"", b"/healthy", b"/generate", b"/v1/models", b"/v1/models/", b"*"])
def test_other_paths_are_for_workers(path: bytes) -> None:
    assert ROUTES.find(path) is None


@pytest.mark.parametrize(
    ("error", "header"),
    [
        (NotFoundError("x", "model"), None),
        (UnauthorizedError("x"), (b"www-authenticate", b"Bearer")),
        (UnavailableError("x"), (b"retry-after", b"1")),
    ],
)
def test_errors_are_answers(error: Exception, header: tuple[bytes, bytes] | None) -> None:
    async def fail(request: ClientRequest, name: str) -> OwnAnswer:
        raise error

    answer = asyncio.run(OwnRoute("/x", {b"GET": fail}).answer(ClientRequest(b"HEAD", b"/x", [], [])))
    assert answer.status == error.status  # type: ignore[attr-defined]
    assert json.loads(answer.body)["error"]["message"] == "x"
    assert header is None or header in answer.headers


def test_a_bug_is_an_answer_too(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(request: ClientRequest, name: str) -> OwnAnswer:
        raise ZeroDivisionError

    answer = asyncio.run(OwnRoute("/x", {b"GET": fail}).answer(ClientRequest(b"GET", b"/x", [], [])))
    assert answer.status == 500
    assert "/x failed" in caplog.text


def test_other_methods_are_named() -> None:
    route = OwnRoute("/x", {b"PUT": echo, b"GET": echo})
    answer = asyncio.run(route.answer(ClientRequest(b"POST", b"/x", [], [])))
    assert answer.status == 405
    assert (b"allow", b"GET, PUT") in answer.headers
    assert "/x is not there for POST" in json.loads(answer.body)["error"]["message"]
    assert asyncio.run(route.answer(ClientRequest(b"HEAD", b"/x", [], []))).status == 200
