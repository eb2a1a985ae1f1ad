"""Which path is what: generation, pass-through, or the gateway's own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

from equipoise.errors import NotFoundError, RequestError, WrongMethodError
from equipoise.gateway.http.request import ClientRequest
from equipoise.gateway.http.wire import anthropic_error, openai_error
from equipoise.gateway.relay.intake import Intake, read_generation, read_nothing

if TYPE_CHECKING:
    from equipoise.gateway.transport import Header


@dataclass(slots=True)
class Answer:
    """An answer of the gateway's own. `headers` are all but the body's length and the connection's."""

    status: int = 200
    body: bytes = b""
    headers: list[Header] = field(default_factory=lambda: [(b"content-type", b"application/json")])


Handler = Callable[[ClientRequest], Answer | Awaitable[Answer]]
"""Answers now, or later: what it returns is awaited by a task that ends when the client leaves. May raise
RequestError."""


class Endpoint:
    """A path that workers serve, or (`handler`) the gateway itself.

    name: as metrics show it. read: what the router must know of a body. generates: its answers have output tokens.
    error_body: the shape of errors. names_events: events of its streams have names, errors too."""

    __slots__ = ("error_body", "generates", "handler", "name", "names_events", "read")

    def __init__(
        self,
        name: str,
        read: Callable[[bytes], Intake] = read_generation,
        *,
        generates: bool = False,
        error_body: Callable[[RequestError], bytes] = openai_error,
        names_events: bool = False,
        handler: Handler | None = None,
    ) -> None:
        self.name = name
        self.read = read
        self.generates = generates
        self.error_body = error_body
        self.names_events = names_events
        self.handler = handler


GENERATION = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/generate")
"""POST; answers have output tokens. So have those of /v1/messages."""
PROMPTS = (
    "/v1/embeddings", "/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize", "/rerank", "/v1/rerank",
    "/v1/score", "/score", "/classify", "/encode",
)  # fmt: skip
"""POST; a prompt and no output tokens."""
OPAQUE = ("/v1/audio/",)
"""POST, whatever follows; bodies are not looked at."""
NO_ENDPOINT = Endpoint("(none)", read_nothing)
"""Of requests that lead nowhere."""

_Methods = dict[bytes, Endpoint]


class Routes:
    """The table: exact paths first, a slash at the end not mattering, then prefixes, the longest first."""

    def __init__(self) -> None:
        self._exact: dict[bytes, _Methods] = {}
        self._prefixes: list[tuple[bytes, _Methods]] = []

    def find(self, method: bytes, path: bytes) -> Endpoint:
        """What answers `method` on `path`, which has no query; HEAD is answered as GET.

        Raises NotFoundError, and WrongMethodError where only other methods are answered."""
        methods = self._methods(path)
        if methods is None:
            raise NotFoundError(f"there is no route {path[:256].decode('latin-1')!r} here")
        endpoint = methods.get(method) or (methods.get(b"GET") if method == b"HEAD" else None)
        if endpoint is None:
            allowed = self.allowed(path).decode()
            raise WrongMethodError(f"{path[:256].decode('latin-1')} takes {allowed}, not {method.decode()}")
        return endpoint

    def allowed(self, path: bytes) -> bytes:
        """The methods that `path` takes, as the header Allow lists them."""
        return b", ".join(sorted(self._methods(path) or ()))

    def add(self, method: str, path: str, endpoint: Endpoint) -> None:
        """Serve `method` on `path`, or on all that begins with `path` when that ends in a slash."""
        name = path.encode()
        if path == "/" or not path.endswith("/"):
            self._exact.setdefault(name, {})[method.encode()] = endpoint
            return
        for prefix, methods in self._prefixes:
            if prefix == name:
                methods[method.encode()] = endpoint
                return
        self._prefixes.append((name, {method.encode(): endpoint}))
        self._prefixes.sort(key=lambda entry: -len(entry[0]))

    def own(self, method: str, path: str, handler: Handler) -> None:
        """Answer `method` on `path` (see `add`) by `handler`."""
        self.add(method, path, Endpoint(path, read_nothing, handler=handler))

    def _methods(self, path: bytes) -> _Methods | None:
        methods = self._exact.get(path)
        if methods is not None:
            return methods
        for prefix, methods in self._prefixes:
            if path.startswith(prefix) and len(path) > len(prefix):
                # a worker that resolves dots would be led to any of its routes
                return None if _has_dots(path) else methods
        return self._exact.get(path.rstrip(b"/"))


def _has_dots(path: bytes) -> bool:
    """Whether a segment of `path` is "." or "..", spelt out or encoded, slashes too."""
    plain = unquote_to_bytes(path).replace(b"\\", b"/")
    return any(segment in (b".", b"..") for segment in plain.split(b"/"))


def worker_routes() -> Routes:
    """The routes that workers serve. The gateway's own are added by whoever answers them."""
    routes = Routes()
    for path in GENERATION:
        routes.add("POST", path, Endpoint(path, generates=True))
    messages = Endpoint("/v1/messages", generates=True, error_body=anthropic_error, names_events=True)
    routes.add("POST", messages.name, messages)
    for path in PROMPTS:
        routes.add("POST", path, Endpoint(path))
    for path in OPAQUE:
        routes.add("POST", path, Endpoint(path, read_nothing))
    return routes
