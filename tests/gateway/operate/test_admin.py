"""Admin and probes over a fleet: who may, what is shown, what changes."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
from tests.gateway.pure_fleet import empty_fleet, join, router_of

from equipoise.config.gateway import FrontConfig, GatewayConfig
from equipoise.errors import RequestError
from equipoise.gateway.fleet.worker import Found
from equipoise.gateway.http.request import ClientRequest, RequestHead
from equipoise.gateway.http.wire import openai_error
from equipoise.gateway.operate.access_log import AccessLog
from equipoise.gateway.operate.admin import Admin, is_loopback
from equipoise.gateway.operate.metrics import GatewayMetrics
from equipoise.gateway.operate.probes import Probes
from equipoise.gateway.relay.routes import Answer, Routes
from equipoise.route.account import RankReport
from equipoise.route.policy import Ask

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from pathlib import Path

    from equipoise.gateway.transport import Header

HERE: list[Header] = [(b"Host", b"127.0.0.1:8080")]
NOW = 100.0
CLIENT = "127.0.0.9"


class Gateway:
    """The own routes of a gateway whose clock stands still."""

    def __init__(self, front: FrontConfig | None = None, access_log: AccessLog | None = None) -> None:
        self.fleet = empty_fleet()
        self.router = router_of(self.fleet)
        config = GatewayConfig(front=front or FrontConfig())
        self.probes = Probes(self.fleet, self.router, GatewayMetrics(), lambda: NOW)
        admin = Admin(config, self.fleet, self.router, lambda: NOW, access_log)
        self.routes = Routes()
        self.probes.register(self.routes, has_metrics=True)
        admin.register(self.routes)

    def ask(
        self, method: str, path: str, body: object = None, headers: list[Header] = HERE, query: bytes = b""
    ) -> tuple[int, Any]:
        """Status and JSON of an answer."""
        raw = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        target = path.encode() + (b"?" + query if query else b"")
        request = ClientRequest(RequestHead(method.encode(), target, headers, []), raw, CLIENT)
        try:
            answer = self._answer(request)
        except RequestError as error:
            return error.status, json.loads(openai_error(error))
        return answer.status, json.loads(answer.body)

    def _answer(self, request: ClientRequest) -> Answer:
        handler = self.routes.find(request.method, request.path).handler
        assert handler is not None
        answer = handler(request)
        return answer if isinstance(answer, Answer) else asyncio.run(_awaited(answer))

    def refusal(self, method: str, path: str, body: object = None, query: bytes = b"") -> tuple[int, str, str | None]:
        """Status, message and field of an error."""
        status, answer = self.ask(method, path, body, query=query)
        return status, answer["error"]["message"], answer["error"]["param"]


async def _awaited(answer: Awaitable[Answer]) -> Answer:
    return await answer


# Who may


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.8.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("", False)],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) == loopback


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("::", False), ("10.0.0.1", False), ("example.com", False), ("127.0.0.1.evil.com", False)],
)
def test_other_names(host: str, loopback: bool) -> None:
    assert is_loopback(host) == loopback


def test_on_loopback_everybody_there_may() -> None:
    gateway = Gateway()
    for host in (b"127.0.0.1:8080", b"localhost:8080", b"[::1]:8080", b"LOCALHOST"):
        assert gateway.ask("GET", "/workers", headers=[(b"host", host)]) == (200, {"workers": []})


@pytest.mark.parametrize(
    "header",
    [
        (b"Origin", b"http://evil.example"),
        (b"X-Forwarded-For", b"1.2.3.4"),
        (b"Forwarded", b"for=1.2.3.4"),
        (b"X-Real-IP", b"1.2.3.4"),
        (b"Sec-Fetch-Site", b"cross-site"),
        (b"Sec-Fetch-Site", b"same-site"),
    ],
)
def test_web_pages_and_proxies_may_not(header: Header) -> None:
    status, answer = Gateway().ask("POST", "/workers", {"url": "http://a:1"}, [*HERE, header])
    assert status == 403
    assert "web pages or proxies unless the gateway has an --admin-key" in answer["error"]["message"]


@pytest.mark.parametrize("site", [b"none", b"same-origin"])
def test_who_types_an_address_into_a_browser_may(site: bytes) -> None:
    assert Gateway().ask("GET", "/workers", headers=[*HERE, (b"Sec-Fetch-Site", site)])[0] == 200


@pytest.mark.parametrize("host", [b"evil.example", b"127.0.0.1.evil.example", b"", b"10.0.0.1:8080"])
def test_a_name_that_is_not_of_this_machine_may_not(host: bytes) -> None:
    status, answer = Gateway().ask("GET", "/workers", headers=[(b"host", host)])
    assert status == 403
    assert "--admin-key" in answer["error"]["message"]


ADMIN_ROUTES = [
    ("GET", "/workers"),
    ("POST", "/workers"),
    ("GET", "/workers/a:1"),
    ("DELETE", "/workers/a:1"),
    ("POST", "/workers/a:1/drain"),
    ("GET", "/get_loads"),
    ("GET", "/v1/loads"),
    ("GET", "/policies"),
    ("PUT", "/policies"),
    ("POST", "/flush_cache"),
]


@pytest.mark.parametrize(("method", "path"), ADMIN_ROUTES)
def test_elsewhere_nobody_may_without_a_key(method: str, path: str) -> None:
    status, answer = Gateway(FrontConfig(host="0.0.0.0")).ask(method, path)
    assert (status, answer["error"]["code"]) == (403, "forbidden")
    assert "start the gateway with --admin-key" in answer["error"]["message"]
    status, answer = Gateway(FrontConfig(admin=False, admin_key="k")).ask(method, path)
    assert status == 403
    assert "--admin" in answer["error"]["message"]


@pytest.mark.parametrize(("method", "path"), ADMIN_ROUTES)
def test_with_a_key_only_who_sends_it_may(method: str, path: str) -> None:
    gateway = Gateway(FrontConfig(host="0.0.0.0", admin_key="s3cret"))
    for wrong in (
        [],
        [(b"Authorization", b"Bearer s3cre")],
        [(b"Authorization", b"Basic s3cret")],
        [(b"X-Admin-Key", b"")],
        [(b"X-Admin-Key", b"\xff")],
    ):
        status, answer = gateway.ask(method, path, headers=[*HERE, *wrong])
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    for right in ((b"authorization", b"bearer s3cret"), (b"x-admin-key", b"s3cret")):
        assert gateway.ask(method, path, headers=[(b"Origin", b"x"), right])[0] not in (401, 403)


def test_probes_are_for_all() -> None:
    gateway = Gateway(FrontConfig(host="0.0.0.0", admin_key="k"))
    for path in ("/health", "/liveness", "/v1/models", "/get_server_info", "/server_info"):
        assert gateway.ask("GET", path, headers=[])[0] == 200


# Probes


def test_ready_once_a_worker_is() -> None:
    gateway = Gateway()
    for path in ("/readiness", "/health_generate"):
        assert gateway.refusal("GET", path)[:2] == (503, "no worker takes requests: there is none")
    worker = join(gateway.fleet, "a")
    assert gateway.ask("GET", "/readiness") == (200, {"status": "ready", "workers": {"ready": 1}})
    gateway.fleet.became_unhealthy(worker, "down")
    assert gateway.refusal("GET", "/readiness")[:2] == (503, "no worker takes requests: 1 unhealthy")
    join(gateway.fleet, "p", role="prefill")
    assert gateway.ask("GET", "/readiness")[0] == 503
    join(gateway.fleet, "d", role="decode")
    assert gateway.ask("GET", "/readiness")[0] == 200
    gateway.probes.is_closing = True
    assert gateway.refusal("GET", "/readiness")[:2] == (503, "the gateway is shutting down")
    assert gateway.ask("GET", "/health") == (200, {"status": "ok"})


def test_models_are_those_of_workers_that_are_up() -> None:
    gateway = Gateway()
    a, b, c = join(gateway.fleet, "a"), join(gateway.fleet, "b"), join(gateway.fleet, "c", "only-c")
    cards = [b'{"id":"m","object":"model","owned_by":"sglang","max_model_len":10}', b'{"id":"n","owned_by":"x"}']
    gateway.fleet.found(a, Found("sglang", ("m",), cards=(cards[0],)), NOW)
    gateway.fleet.found(b, Found("vllm", ("m", "n"), cards=(b'{"id":"m","owned_by":"other"}', cards[1])), NOW)
    status, answer = gateway.ask("GET", "/v1/models")
    assert (status, answer["object"]) == (200, "list")
    assert answer["data"][:2] == [json.loads(card) for card in cards], "the first worker's word stays as it is"
    named = answer["data"][2]
    assert (named["id"], named["owned_by"], named["object"]) == ("only-c", "sglang", "model")
    assert gateway.ask("GET", "/v1/models/m") == (200, answer["data"][0])
    gateway.fleet.became_unhealthy(c, "down")
    message = "model: there is no model 'only-c' here; models: m, n"
    assert gateway.refusal("GET", "/v1/models/only-c") == (404, message, "model")


def test_info_has_no_addresses() -> None:
    gateway = Gateway(FrontConfig(admin_key="s3cret"))
    join(gateway.fleet, "secret-host")
    status, answer = gateway.ask("GET", "/get_server_info")
    assert status == 200
    assert (answer["workers"], answer["models"]) == ({"ready": 1}, ["m"])
    assert answer["policies"]["mixed"] == {"policy": "least_tokens", "rank_policy": "minimum_tokens"}
    assert "secret" not in json.dumps(answer)
    assert "s3cret" not in json.dumps(answer)


# Workers


def test_a_worker_is_added_shown_drained_and_removed() -> None:
    gateway = Gateway()
    body = {"url": "b:2/", "role": "prefill", "kind": "sglang", "bootstrap_port": 8998, "models": ["x"]}
    status, added = gateway.ask("POST", "/workers", body)
    assert status == 201
    expected = {"id": "b:2", "url": "http://b:2", "state": "starting", "role": "prefill", "kind": "sglang"}
    assert expected.items() <= added.items()
    assert (added["bootstrap_port"], added["models"], added["takes_requests"]) == (8998, ["x"], False)
    assert gateway.ask("GET", "/workers") == (200, {"workers": [added]})
    for name in ("b:2", "http://b:2", "http%3A%2F%2Fb%3A2", "http://b:2/"):
        assert gateway.ask("GET", f"/workers/{name}") == (200, added)
    again = gateway.refusal("POST", "/workers", {"url": "http://b:2"})
    assert again == (400, "url: http://b:2 is a worker already", "url")
    status, drained = gateway.ask("POST", "/workers/b:2/drain", {"timeout_s": 5})
    assert (status, drained["state"]) == (202, "removed"), "nothing ran there"
    assert gateway.refusal("DELETE", "/workers/b:2") == (404, "no worker at 'http://b:2'; workers: none", None)
    gateway.ask("POST", "/workers", {"url": "c:1"})
    assert gateway.ask("DELETE", "/workers/c:1")[1]["state"] == "removed"
    assert gateway.ask("GET", "/workers") == (200, {"workers": []})


@pytest.mark.parametrize(("body", "drain_s"), [(None, 600.0), ({}, 600.0), ({"timeout_s": 7}, 7.0)])
def test_a_drained_worker_finishes_what_it_has(body: object, drain_s: float) -> None:
    gateway = Gateway()
    worker = join(gateway.fleet, "a")
    route = gateway.router.route(Ask(10), "m", "mixed", (), NOW)
    assert gateway.ask("POST", "/workers/a:1/drain", body)[1]["state"] == "draining"
    assert worker.drain_until == NOW + drain_s
    gateway.router.finished(route, "ok", NOW)
    assert gateway.fleet.workers == []


@pytest.mark.parametrize(("query", "is_closed"), [(b"", False), (b"cancel=false", False), (b"cancel=true", True)])
def test_a_removed_worker_finishes_what_it_has_unless_told_otherwise(query: bytes, is_closed: bool) -> None:
    gateway = Gateway()
    worker = join(gateway.fleet, "a")
    gateway.router.route(Ask(10), "m", "mixed", (), NOW)
    assert gateway.ask("DELETE", "/workers/a:1", query=query)[1]["num_inflight"] == 1
    assert worker.transport.is_closed == is_closed  # type: ignore[attr-defined]
    assert gateway.fleet.workers == []


@pytest.mark.parametrize(
    ("body", "message", "field"),
    [
        (None, "the body is empty, a JSON object was expected", None),
        (b"{", "the body is not valid JSON: input data was truncated (byte 1)", None),
        ({}, "url: this field is required", "url"),
        ({"url": 1}, "url: expected str, got int", "url"),
        ({"url": "ftp://a"}, "url: 'ftp://a': only http:// is spoken to workers, not ftp://", "url"),
        ({"url": "a:1", "color": 1}, "color: this field is not known, allowed are url, role, kind, ", "color"),
        ({"url": "a:1", "bootstrap_port": 1}, "bootstrap_port: only a prefill worker has one", "bootstrap_port"),
        ({"url": "a:1", "role": "prefill", "bootstrap_port": 0}, "bootstrap_port: 0 must be", "bootstrap_port"),
        ({"url": "a:1", "models": [""]}, "models: a name is empty", "models"),
    ],
)
def test_a_wrong_worker_is_refused_by_field(body: object, message: str, field: str | None) -> None:
    status, found, param = Gateway().refusal("POST", "/workers", body)
    assert (status, param) == (400, field)
    assert found.lower().startswith(message.lower())


def test_a_wrong_role_or_kind_names_the_allowed() -> None:
    for field in ("role", "kind"):
        status, message, param = Gateway().refusal("POST", "/workers", {"url": "a:1", field: "both"})
        assert (status, param) == (400, field)
        assert message.endswith(
            {"role": "mixed, prefill, decode", "kind": "auto, equipoise, sglang, vllm, openai"}[field]
        )


def test_wrong_numbers_are_refused() -> None:
    gateway = Gateway()
    join(gateway.fleet, "a")
    for timeout_s in (-1, 1e300):
        status, message, param = gateway.refusal("POST", "/workers/a:1/drain", {"timeout_s": timeout_s})
        assert (status, param) == (400, "timeout_s")
        assert "must be at least 0" in message
    assert gateway.refusal("DELETE", "/workers/a:1", query=b"cancel=maybe")[0] == 400
    assert gateway.refusal("GET", "/workers/a%20b") == (400, "url: 'a b' is not a URL like http://host:port", "url")


# Loads


def test_loads_are_shown_as_reported_and_as_believed() -> None:
    gateway = Gateway()
    worker = join(gateway.fleet, "a", num_ranks=2)
    worker.load.report([RankReport(rank, 100 * rank, 3, 2, 1000, 5.0, taken_at=NOW - 2) for rank in (0, 1)])
    gateway.router.route(Ask(10, 5), "m", "mixed", (), NOW)
    status, answer = gateway.ask("GET", "/v1/loads")
    assert (status, answer["dp_rank_count"]) == (200, 2)
    first, second = answer["loads"]
    assert (first["worker"], first["dp_rank"], second["dp_rank"]) == (worker.url, 0, 1)
    assert (first["reported_tokens"], first["believed_tokens"], first["num_used_tokens"]) == (0, 15, 15)
    assert (second["reported_tokens"], second["believed_tokens"], second["report_age_s"]) == (100, 100, 2)
    assert answer["aggregate"] == {
        "num_running_reqs": 6,
        "num_waiting_reqs": 4,
        "num_used_tokens": 115,
        "num_inflight": 1,
    }
    status, answer = gateway.ask("GET", "/get_loads")
    (row,) = answer["workers"]
    assert (row["worker"], row["worker_type"], row["load"], len(row["ranks"])) == (worker.url, "mixed", 115, 2)
    shown = gateway.ask("GET", "/workers/a:1")[1]
    assert (shown["load"], shown["num_inflight"], shown["ranks"]) == (115, 1, row["ranks"])


# Policies


def test_options_of_a_policy_are_kept_when_another_policy_changes() -> None:
    gateway = Gateway()
    text = "prefix_tokens,load_weight=0.2"
    assert gateway.ask("PUT", "/policies", {"policy": text})[0] == 200
    answer = gateway.ask("PUT", "/policies", {"rank_policy": "none"})[1]
    assert answer["mixed"] == {"policy": text, "rank_policy": "none"}


def test_policies_are_exchanged_by_role() -> None:
    gateway = Gateway()
    join(gateway.fleet, "a")
    changed = {"policy": "round_robin", "rank_policy": "minimum_tokens"}
    status, answer = gateway.ask("PUT", "/policies", {"role": "decode", "policy": "round_robin"})
    assert (status, answer["decode"]) == (200, changed)
    assert answer["mixed"]["policy"] == "least_tokens"
    status, answer = gateway.ask("PUT", "/policies", {"rank_policy": "none"})
    assert {row["rank_policy"] for row in answer.values()} == {"none"}
    assert answer["decode"]["policy"] == "round_robin"
    assert gateway.ask("GET", "/policies") == (200, answer)
    assert gateway.router.route(Ask(1), "m", "mixed", (), NOW).rank is None


@pytest.mark.parametrize(
    ("body", "message", "field"),
    [
        ({}, "policy: name a policy, a rank_policy or both", "policy"),
        ({"policy": "best"}, "worker policy: 'best' is not known, allowed are prefix_tokens, ", "policy"),
        ({"policy": ""}, "worker policy: '' is not known, allowed are prefix_tokens, ", "policy"),
        ({"policy": "random", "rank_policy": "best"}, "rank policy: 'best' is not known, allowed are", "rank_policy"),
        ({"policy": "os:system"}, "policy: 'os:system': a dotted path is for --policy", "policy"),
        ({"rank_policy": "os:system"}, "rank_policy: 'os:system': a dotted path is for --rank-policy", "rank_policy"),
        ({"policy": "random", "role": "x"}, "role: ", "role"),
        ({"policy": "prefix_tokens,load_weight=0"}, "worker policy prefix_tokens: load_weight is 0", "policy"),
        ({"policy": "os:system,a=1"}, "policy: 'os:system,a=1': a dotted path is for --policy", "policy"),
    ],
)
def test_wrong_policies_are_refused_and_change_nothing(body: object, message: str, field: str) -> None:
    gateway = Gateway()
    before = gateway.ask("GET", "/policies")
    status, found, param = gateway.refusal("PUT", "/policies", body)
    assert (status, param) == (400, field)
    assert found.startswith(message)
    assert gateway.ask("GET", "/policies") == before


# What is told of it


def test_actions_are_logged_with_who_did_them_and_what_was_before(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "equipoise.gateway.operate.admin")
    gateway = Gateway()
    join(gateway.fleet, "a")
    gateway.router.route(Ask(10), "m", "mixed", (), NOW)
    gateway.ask("PUT", "/policies", {"role": "decode", "policy": "round_robin"})
    gateway.ask("PUT", "/policies", {"policy": "no such"})
    gateway.ask("POST", "/workers", {"url": "b:2", "role": "prefill"})
    gateway.ask("POST", "/workers/a:1/drain")
    gateway.ask("POST", "/workers", {"url": "a:1"})
    gateway.ask("DELETE", "/workers/b:2", query=b"cancel=true")
    gateway.ask("GET", "/workers")
    told = [record.getMessage() for record in caplog.records if record.name == "equipoise.gateway.operate.admin"]
    assert told == [
        "admin at 127.0.0.9: policies for decode: 'least_tokens', 'minimum_tokens' -> 'round_robin', 'minimum_tokens'",
        "admin at 127.0.0.9: worker http://b:2: none -> starting as prefill",
        "admin at 127.0.0.9: worker http://a:1: ready as mixed -> draining as mixed",
        "admin at 127.0.0.9: worker http://a:1: draining as mixed -> starting as mixed",
        "admin at 127.0.0.9: worker http://b:2: starting as prefill -> removed as prefill",
    ]


def test_actions_are_in_the_access_log_and_looks_are_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "equipoise.gateway.operate.admin")
    log = AccessLog(str(tmp_path / "access.log"))
    gateway = Gateway(access_log=log)
    gateway.ask("POST", "/workers", {"url": "a:1"})
    gateway.ask("GET", "/workers")
    gateway.ask("DELETE", "/workers/c:1", query=b"cancel=true")
    gateway.ask("POST", "/flush_cache")
    gateway.ask("PUT", "/policies", {"policy": "random"}, headers=[(b"host", b"evil.example")])
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "access.log").read_text().splitlines()]
    assert {line["client"] for line in lines} == {CLIENT}
    assert [(line["method"], line["path"], line["status"], line["outcome"], line["error_code"]) for line in lines] == [
        ("POST", "/workers", 201, "ok", None),
        ("DELETE", "/workers/c:1?cancel=true", 404, "refused", "not_found"),
        ("POST", "/flush_cache", 200, "ok", None),
        ("PUT", "/policies", 403, "refused", "forbidden"),
    ]
    assert all(line["response_bytes"] > 0 for line in lines)
    assert caplog.records[-1].getMessage() == "admin at 127.0.0.9: caches flushed at 0 of 0 workers"
