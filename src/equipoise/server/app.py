"""The ASGI application: routes, and what happens around every one of them."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from equipoise.errors import InternalError, NotFoundError, RequestError, UnauthorizedError, WrongMethodError
from equipoise.server import admin
from equipoise.server.chats import chat_completions
from equipoise.server.completions import completions
from equipoise.server.generate import generate
from equipoise.server.http import ClientGoneError, header, reply_error
from equipoise.server.request_log import CLIENT_LEFT, GENERATING, log_request
from equipoise.server.service import Service, new_id

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

    Handler = Callable[[Service, Scope, Receive, Send], Awaitable[None]]

log = logging.getLogger(__name__)

ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/v1/completions", completions),
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/generate", generate),
    ("GET", "/v1/models", admin.models),
    ("GET", "/v1/models/{name:path}", admin.model),
    ("POST", "/tokenize", admin.tokenize),
    ("POST", "/detokenize", admin.detokenize),
    ("GET", "/health", admin.health),
    ("GET", "/health_generate", admin.health_generate),
    ("GET", "/server_info", admin.server_info),
    ("GET", "/v1/loads", admin.v1_loads),
    ("GET", "/get_load", admin.get_load),
    ("GET", "/metrics", admin.metrics),
    ("GET", "/debug/requests/{name:path}", admin.explain_request),
    ("GET", "/debug/decisions", admin.decisions),
    ("GET", "/debug/timeline", admin.timeline),
    ("GET POST", "/flush_cache", admin.flush_cache),
    ("POST", "/abort_request", admin.abort_request),
    ("POST", "/pause", admin.pause),
    ("POST", "/resume", admin.resume),
    ("GET", "/", admin.dashboard),
)
OPEN_PATHS = frozenset({"/health", "/"})
"""Served without the API key: a probe has none, and the page holds nothing of its own."""

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def build_app(service: Service) -> ASGIApp:
    """The application that serves `service`."""
    routes = [
        Route(path, Endpoint(service, path, handler), methods=methods.split()) for methods, path, handler in ROUTES
    ]
    app: ASGIApp = _Front(Starlette(routes=routes, exception_handlers={HTTPException: _no_route}), service)
    if service.config.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=list(service.config.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return app


class Endpoint:
    """One route: runs its handler, counts the answer (and logs it, if asked to), turns errors into bodies."""

    def __init__(self, service: Service, path: str, handler: Handler) -> None:
        self._service = service
        self._path = path
        self._handler = handler
        self._is_logged = service.config.log_requests and path in GENERATING

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_s = time.monotonic()
        status = 200
        try:
            await self._handler(self._service, scope, receive, send)
        except (ClientGoneError, asyncio.CancelledError):
            status = CLIENT_LEFT  # cancelled: the server stops, and this client does not even read
        except RequestError as error:
            status = error.status
            await reply_error(scope, send, error)
        except Exception:
            status = 500
            log.exception("request %s: %s failed", scope["request_id"], self._path)
            await reply_error(scope, send, InternalError("the server failed to answer, its log says why"))
        self._service.metrics.requests.labels(self._path, status).inc()
        if self._is_logged:
            log_request(scope, self._path, status, time.monotonic() - started_s)


async def _no_route(request: Request, error: Exception) -> Response:
    """404 and 405 in the shape of every other error."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    path, method = request.url.path, request.method
    if status == 405:
        raised: RequestError = WrongMethodError(f"{path} is not there for {method}")
    else:
        raised = NotFoundError(f"there is no {path} here")
    return _Refusal(raised)  # type: ignore[return-value]


class _Refusal:
    """An error as something Starlette can send."""

    def __init__(self, error: RequestError) -> None:
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await reply_error(scope, send, self._error)


class _Front:
    """Gives every request its id and asks for the API key."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        key = service.config.api_key
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        given = header(scope, b"x-request-id")
        scope["request_id"] = given if given and _REQUEST_ID.fullmatch(given) else new_id()
        if self._key is None or scope["path"] in OPEN_PATHS or self._has_key(scope, self._key):
            await self._app(scope, receive, send)
        else:
            message = "the API key is missing or wrong: send it as Authorization: Bearer KEY"
            await reply_error(scope, send, UnauthorizedError(message))

    def _has_key(self, scope: Scope, key: bytes) -> bool:
        scheme, _, token = (header(scope, b"authorization") or "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode("latin-1"), key)
