"""The admin routes: look at workers and their loads, add, drain and remove them, exchange policies, flush caches.

Who may: with an admin key whoever sends it. Without one, whoever reaches the loopback address that the gateway is bound
to, but no web page (it would send an Origin) and nobody behind a proxy of this machine. Otherwise nobody.

Who changed what, and what was before, is logged; each change, and each attempt at one, has its line in the access log.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import parse_qs

import msgspec

from equipoise.config.worker import WORKER_ROLES, WorkerKind, WorkerRole, WorkerSpec, worker_url
from equipoise.errors import (
    ConfigError,
    ForbiddenError,
    InvalidValueError,
    NotFoundError,
    RequestError,
    UnauthorizedError,
)
from equipoise.gateway.fleet.fetch import FetchError, Site
from equipoise.gateway.fleet.policies import make_policies
from equipoise.gateway.http.wire import openai_error
from equipoise.gateway.operate.own import json_answer, name_in_path
from equipoise.gateway.operate.probes import policies_view
from equipoise.gateway.operate.views import loads_page, rank_views, worker_view
from equipoise.gateway.relay.lines import own_line
from equipoise.gateway.relay.routes import Answer
from equipoise.server.http import decode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from equipoise.config.gateway import FrontConfig, GatewayConfig
    from equipoise.gateway.fleet.fleet import Fleet
    from equipoise.gateway.fleet.router import Policies, Router
    from equipoise.gateway.fleet.worker import Worker
    from equipoise.gateway.http.request import ClientRequest
    from equipoise.gateway.operate.access_log import AccessLog
    from equipoise.gateway.relay.routes import Handler, Routes

log = logging.getLogger(__name__)

FOREIGN_HEADERS = (b"origin", b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip")
"""What a browser's page or a proxy sends along, and an operator on this machine does not."""
WORKER_PATH = "/workers/"
DRAIN = "/drain"
FLUSH_PATHS = {"vllm": "/reset_prefix_cache"}
FLUSH_PATH = "/flush_cache"
DOTTED = ", or package.module:attribute"
"""What the command line allows and this does not."""
MAX_DRAIN_S = 31_536_000.0


class WorkerBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /workers: what `WorkerSpec` has."""

    url: str
    role: str = "mixed"
    kind: str = "auto"
    bootstrap_port: int | None = None
    models: tuple[str, ...] = ()


class DrainBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /workers/NAME/drain: seconds that its requests have."""

    timeout_s: float | None = None


class PoliciesBody(msgspec.Struct, forbid_unknown_fields=True):
    """PUT /policies: what is to change, for one role or for all."""

    role: str | None = None
    policy: str | None = None
    rank_policy: str | None = None


_decode_worker = msgspec.json.Decoder(WorkerBody)
_decode_drain = msgspec.json.Decoder(DrainBody)
_decode_policies = msgspec.json.Decoder(PoliciesBody)


class Guard:
    """Who may use the admin routes."""

    def __init__(self, config: FrontConfig) -> None:
        self._key = None if config.admin_key is None else config.admin_key.encode()
        self._is_on = config.admin
        self._is_loopback = is_loopback(config.host)

    def check(self, request: ClientRequest) -> None:
        """Raises ForbiddenError, which says how to turn the routes on, or UnauthorizedError."""
        if not self._is_on:
            raise ForbiddenError("the admin routes are off: start the gateway with --admin")
        if self._key is not None:
            self._check_key(request, self._key)
        elif not self._is_loopback:
            raise ForbiddenError(
                "the admin routes are off: start the gateway with --admin-key, or bind it to a loopback address"
            )
        elif _is_foreign(request):
            raise ForbiddenError(
                "the admin routes take no requests from web pages or proxies unless the gateway has an --admin-key"
            )
        elif not is_loopback(_host_of(request.header(b"host") or b"")):
            raise ForbiddenError(
                "the admin routes answer to localhost and loopback addresses only unless the gateway has an --admin-key"
            )

    def _check_key(self, request: ClientRequest, key: bytes) -> None:
        scheme, _, token = (request.header(b"authorization") or b"").partition(b" ")
        given = [token.strip()] if scheme.lower() == b"bearer" else []
        given.append((request.header(b"x-admin-key") or b"").strip())
        if not any(hmac.compare_digest(each, key) for each in given):
            raise UnauthorizedError(
                "the admin key is missing or wrong: send it as Authorization: Bearer KEY or as X-Admin-Key: KEY"
            )


def _is_foreign(request: ClientRequest) -> bool:
    """Whether a web page or a proxy sent it. An image on a page sends no Origin, but Sec-Fetch-Site."""
    if any(request.header(name) is not None for name in FOREIGN_HEADERS):
        return True
    return request.header(b"sec-fetch-site") not in (None, b"none", b"same-origin")


def is_loopback(host: str) -> bool:
    """Whether `host` means this machine and can be reached from it alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _host_of(value: bytes) -> str:
    """The host of a Host header: no port, no brackets."""
    text = value.decode("latin-1").strip()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0]


class Admin:
    """The handlers. `clock` is the event loop's."""

    def __init__(
        self,
        config: GatewayConfig,
        fleet: Fleet,
        router: Router,
        clock: Callable[[], float],
        access_log: AccessLog | None = None,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._router = router
        self._clock = clock
        self._access_log = access_log
        self._guard = Guard(config.front)

    def register(self, routes: Routes) -> None:
        """Add the handlers to `routes`, each behind the guard."""
        looks: tuple[tuple[str, str, Handler], ...] = (
            ("GET", "/workers", self.workers),
            ("GET", WORKER_PATH, self.worker),
            ("GET", "/get_loads", self.get_loads),
            ("GET", "/v1/loads", self.loads),
            ("GET", "/policies", self.policies),
        )
        changes: tuple[tuple[str, str, Handler], ...] = (
            ("POST", "/workers", self.add),
            ("DELETE", WORKER_PATH, self.remove),
            ("POST", WORKER_PATH, self.drain),
            ("PUT", "/policies", self.set_policies),
            ("GET", "/flush_cache", self.flush_cache),
            ("POST", "/flush_cache", self.flush_cache),
        )
        for method, path, handler in looks:
            routes.own(method, path, self._guarded(handler))
        for method, path, handler in changes:
            routes.own(method, path, self._written(self._guarded(handler)))

    def _guarded(self, handler: Handler) -> Handler:
        def answer(request: ClientRequest) -> Answer | Awaitable[Answer]:
            self._guard.check(request)
            return handler(request)

        return answer

    def _written(self, handler: Handler) -> Handler:
        """`handler`, whose requests have their lines in the access log."""

        def answer(request: ClientRequest) -> Answer | Awaitable[Answer]:
            started_at = self._clock()
            try:
                found = handler(request)
            except RequestError as error:
                code = error.code or str(error.status)
                self._write(request, error.status, len(openai_error(error)), started_at, code)
                raise
            if not isinstance(found, Answer):
                return self._write_later(request, found, started_at)
            self._write(request, found.status, len(found.body), started_at)
            return found

        return answer

    async def _write_later(self, request: ClientRequest, answer: Awaitable[Answer], started_at: float) -> Answer:
        found = await answer
        self._write(request, found.status, len(found.body), started_at)
        return found

    def _write(
        self, request: ClientRequest, status: int, num_sent: int, started_at: float, code: str | None = None
    ) -> None:
        if self._access_log is not None:
            self._access_log.write(own_line(request, status, num_sent, self._clock() - started_at, code))

    # Workers

    def workers(self, request: ClientRequest) -> Answer:
        """All workers with their loads."""
        now = self._clock()
        return json_answer({"workers": [worker_view(worker, self._fleet, now) for worker in self._fleet.workers]})

    def worker(self, request: ClientRequest) -> Answer:
        """One worker, by URL or by host:port."""
        return self._shown(self._named(name_in_path(request, WORKER_PATH)))

    def add(self, request: ClientRequest) -> Answer:
        """Take in a worker; it gets requests once it was found to be up."""
        body = decode(_decode_worker, request.body)
        if not all(body.models):
            raise InvalidValueError("models: a name is empty", "models")
        try:
            # WorkerSpec checks both words, and says what is allowed
            role, kind = cast(WorkerRole, body.role), cast(WorkerKind, body.kind)
            spec = WorkerSpec(body.url, role, kind, body.bootstrap_port, body.models)
        except ConfigError as error:
            raise _invalid(error) from None
        before = next((_state(worker) for worker in self._fleet.workers if worker.url == spec.url), "none")
        worker = self._fleet.add(spec, self._clock())
        _tell(request, f"worker {worker.url}", before, _state(worker))
        return self._shown(worker, 201)

    def drain(self, request: ClientRequest) -> Answer:
        """Give a worker no more requests; it is removed when its last one ended or the time is over."""
        if not request.path.rstrip(b"/").endswith(DRAIN.encode()):
            raise NotFoundError("POST /workers adds a worker, POST /workers/NAME/drain drains one")
        body = decode(_decode_drain, request.body) if request.body.strip() else DrainBody()
        if body.timeout_s is not None and not 0 <= body.timeout_s <= MAX_DRAIN_S:
            raise InvalidValueError(
                f"timeout_s: {body.timeout_s} must be at least 0 and at most {MAX_DRAIN_S:g}", "timeout_s"
            )
        worker = self._named(name_in_path(request, WORKER_PATH, DRAIN))
        before = _state(worker)
        self._fleet.drain(worker, self._clock(), body.timeout_s)
        _tell(request, f"worker {worker.url}", before, _state(worker))
        return self._shown(worker, 202)

    def remove(self, request: ClientRequest) -> Answer:
        """Remove a worker at once; its requests go on, unless the query says cancel=true."""
        given = parse_qs(request.query.decode("latin-1")).get("cancel", ["false"])[-1].lower()
        if given not in ("true", "false"):
            raise InvalidValueError(f"cancel: {given!r} must be true or false", "cancel")
        worker = self._named(name_in_path(request, WORKER_PATH))
        before = _state(worker)
        self._fleet.remove(worker, cancel=given == "true")
        _tell(request, f"worker {worker.url}", before, _state(worker))
        return self._shown(worker)

    def _named(self, name: str) -> Worker:
        """The worker of the path. Raises NotFoundError, or InvalidValueError for what is no URL."""
        try:
            url = worker_url(name)
        except ConfigError as error:
            raise _invalid(error) from None
        return self._fleet.get(url)

    def _shown(self, worker: Worker, status: int = 200) -> Answer:
        return json_answer(worker_view(worker, self._fleet, self._clock()), status)

    # Loads

    def loads(self, request: ClientRequest) -> Answer:
        """Every rank of every worker, as reported and as believed."""
        return json_answer(loads_page(self._fleet, self._clock()))

    def get_loads(self, request: ClientRequest) -> Answer:
        """One entry per worker: the tokens it is believed to have, and its ranks."""
        now = self._clock()
        rows = [
            {"worker": worker.url, "worker_type": worker.role, "load": worker.load.load(), "ranks": ranks}
            for worker, ranks in ((each, rank_views(each, now)) for each in self._fleet.workers)
        ]
        return json_answer({"workers": rows})

    # Policies

    def policies(self, request: ClientRequest) -> Answer:
        """The policies in force, by role."""
        return json_answer(policies_view(self._router))

    def set_policies(self, request: ClientRequest) -> Answer:
        """Exchange policies from the next request on. Built-in and installed ones only: no code comes in this way."""
        body = decode(_decode_policies, request.body)
        if body.policy is None and body.rank_policy is None:
            raise InvalidValueError("policy: name a policy, a rank_policy or both", "policy", "missing_parameter")
        for field, given in (("policy", body.policy), ("rank_policy", body.rank_policy)):
            if given is not None and ":" in given.partition(",")[0]:
                raise InvalidValueError(f"{field}: {given!r}: a dotted path is for --{field.replace('_', '-')}", field)
        if body.role is not None and body.role not in WORKER_ROLES:
            raise InvalidValueError(f"role: {body.role!r} must be one of {', '.join(WORKER_ROLES)}", "role")
        made = {}
        for role in (each for each in WORKER_ROLES if body.role in (None, each)):
            now = self._router.policies(role)
            worker_name = now.worker_name if body.policy is None else body.policy
            names = (worker_name, now.rank_name if body.rank_policy is None else body.rank_policy)
            try:
                made[role] = make_policies(*names, self._config.routing.routing_seed)
            except ConfigError as error:
                field = "policy" if body.rank_policy is None or str(error).startswith("worker") else "rank_policy"
                raise InvalidValueError(str(error).removesuffix(DOTTED), field) from None
        for role, policies in made.items():
            before = _names(self._router.policies(role))
            self._router.set_policies(role, policies)
            _tell(request, f"policies for {role}", before, _names(policies))
        return json_answer(policies_view(self._router))

    # To all workers

    async def flush_cache(self, request: ClientRequest) -> Answer:
        """Have every worker drop its cached prefixes, and forget what routing knows of them."""
        workers = [worker for worker in self._fleet.workers if worker.state != "starting"]
        rows = await asyncio.gather(*(self._flush(worker) for worker in workers))
        num_flushed = sum(row["ok"] for row in rows)
        log.info("admin at %s: caches flushed at %d of %d workers", request.client, num_flushed, len(rows))
        return json_answer({"workers": rows}, 200 if all(row["ok"] for row in rows) else 502)

    async def _flush(self, worker: Worker) -> dict[str, Any]:
        timeout_s = self._config.health.health_check_timeout_s
        site = Site(worker.url, worker.transport, timeout_s, self._config.workers.worker_api_key)
        try:
            answer = await site.post(FLUSH_PATHS.get(worker.kind or "", FLUSH_PATH), b"", [])
        except FetchError as error:
            return {"worker": worker.url, "ok": False, "error": str(error)}
        if answer.is_ok:
            for listener in self._fleet.listeners:
                listener.left(worker)
        return {"worker": worker.url, "ok": answer.is_ok, "status": answer.status}


def _tell(request: ClientRequest, what: str, before: str, after: str) -> None:
    log.info("admin at %s: %s: %s -> %s", request.client, what, before, after)


def _state(worker: Worker) -> str:
    return f"{worker.state} as {worker.role}"


def _names(policies: Policies) -> str:
    return f"{policies.worker_name!r}, {policies.rank_name!r}"


def _invalid(error: ConfigError) -> InvalidValueError:
    """A wrong worker as clients are told of it: "worker: ..." is about their field `url`."""
    field, _, rest = str(error).partition(": ")
    field = "url" if field == "worker" else field.replace("-", "_")
    return InvalidValueError(f"{field}: {rest}", field)
