"""Discovery against servers on sockets: each kind, several versions, vLLM's data-parallel modes, nonsense."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.gateway.scripted import Headers, Reply, Script, Server, in_loop, models, serving, site_of

from equipoise.gateway.fleet.backends.discovery import discover
from equipoise.gateway.fleet.fetch import FetchError

if TYPE_CHECKING:
    from equipoise.gateway.fleet.worker import Found

INFO = {
    "model_path": "/models/m",
    "served_model_name": "m",
    "dp_size": 1,
    "version": "0.5.23",
    "disaggregation_mode": "null",
    "disaggregation_bootstrap_port": 8998,
    "internal_states": [{}],
}
OURS = {"version": "0.2.0", "model": "m", "dp_size": 1, "role": "mixed", "executor": {}, "engine": {}, "server": {}}


def vllm(*engines: int, model: str = "m", owner: str = "vllm") -> Script:
    """A vLLM server whose /metrics tells of these engines."""
    lines = [f'vllm:num_requests_running{{engine="{engine}",model_name="{model}"}} 0.0' for engine in engines]
    return {
        "/version": Reply({"version": "0.33.0"}),
        "/metrics": Reply("\n".join(lines).encode()),
        "/v1/models": models(model, owner=owner),
        "/v1/completions": Reply({"choices": []}),
    }


def sglang(**info: object) -> Script:
    return {"/server_info": Reply(INFO | info), "/v1/models": models("m")}


async def found_at(script: Script, kind: str = "auto") -> Found:
    async with serving(script) as server:
        return await discover(site_of(server), kind)  # type: ignore[arg-type]


def numbers(found: Found) -> list[int]:
    return [place.number for place in found.places]


@in_loop
async def test_sglang_with_one_rank() -> None:
    found = await found_at(sglang())
    assert (found.kind, found.models, found.version) == ("sglang", ("m",), "0.5.23")
    assert (found.rank_labels, found.places, found.role) == ((0,), (), "mixed")


@in_loop
async def test_sglang_with_ranks_takes_them_in_body_and_header() -> None:
    found = await found_at(sglang(dp_size=4))
    assert (found.rank_labels, numbers(found)) == ((0, 1, 2, 3), [0, 1, 2, 3])
    assert found.places[3].header == (b"X-Data-Parallel-Rank", b"3")
    assert found.places[3].field == b'"routed_dp_rank":3'


@pytest.mark.parametrize("role", ["prefill", "decode"])
@in_loop
async def test_sglang_tells_its_role(role: str) -> None:
    found = await found_at(sglang(disaggregation_mode=role, disaggregation_bootstrap_port=9001))
    assert (found.role, found.bootstrap_port) == (role, 9001)


@in_loop
async def test_older_sglang_has_other_routes() -> None:
    script = {"/get_server_info": Reply({"model_path": "/models/m", "dp_size": 2, "internal_states": []})}
    found = await found_at(script)
    assert (found.kind, found.models, len(found.places), found.role) == ("sglang", ("/models/m",), 2, "mixed")


@in_loop
async def test_adapters_come_after_the_base_model() -> None:
    listed = json.loads(models("m", poet="m").body)
    listed["data"].reverse()
    found = await found_at(sglang() | {"/v1/models": Reply(listed)})
    assert found.models == ("m", "poet")
    assert [b'"poet"' in card for card in found.cards] == [False, True]


@in_loop
async def test_our_own_server() -> None:
    found = await found_at({"/server_info": Reply(OURS), "/v1/models": models("m", owner="equipoise")})
    assert (found.kind, found.places, found.role, found.version) == ("equipoise", (), "mixed", "0.2.0")
    found = await found_at({"/server_info": Reply(OURS | {"dp_size": 2, "role": "decode"}), "/v1/models": models("m")})
    assert (found.kind, numbers(found), found.role) == ("equipoise", [0, 1], "decode")
    assert found.places[1].field == b""


@pytest.mark.parametrize("engine", [0, 5])
@in_loop
async def test_vllm_with_one_engine_is_never_pinned_and_reports_under_its_number(engine: int) -> None:
    found = await found_at(vllm(engine))
    assert (found.kind, found.rank_labels, found.places, found.version) == ("vllm", (engine,), (), "0.33.0")


@in_loop
async def test_vllm_with_internal_balancing_is_pinned_by_engine() -> None:
    async with serving(vllm(0, 1, 2)) as server:
        found = await discover(site_of(server), "auto")
        assert (found.rank_labels, numbers(found)) == ((0, 1, 2), [0, 1, 2])
        assert found.places[2].field == b""
        assert "/v1/completions" not in server.served, "nothing need be found out"
        assert "/server_info" not in server.served, "the kind that it names is asked first"


def front_end(server: Server, low: int, high: int) -> None:
    """Let `server` refuse ranks that are not in [low, high)."""

    def judge(path: str, headers: Headers) -> Reply | None:
        rank = headers.get("x-data-parallel-rank")
        is_wrong = path == "/v1/completions" and rank is not None and not low <= int(rank) < high
        return Reply({"error": {"message": "engine-core error"}}, 400) if is_wrong else None

    server.judge = judge


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 4, [0, 1, 2, 3]),  # the Python front end counts its own engines
        (4, 8, [4, 5, 6, 7]),  # the Rust one those of the deployment
        (99, 99, []),  # neither: the server chooses
    ],
)
@in_loop
async def test_vllm_with_hybrid_balancing_is_asked_how_it_counts(low: int, high: int, expected: list[int]) -> None:
    async with serving(vllm(4, 5, 6, 7)) as server:
        front_end(server, low, high)
        found = await discover(site_of(server), "auto")
    assert found.rank_labels == (4, 5, 6, 7)
    assert numbers(found) == expected


@in_loop
async def test_vllm_with_gaps_among_its_engines_is_not_pinned() -> None:
    found = await found_at(vllm(0, 2))
    assert (found.rank_labels, found.places) == ((0, 2), ())


@in_loop
async def test_vllm_with_more_engines_than_can_be_is_refused() -> None:
    with pytest.raises(FetchError, match="too many to be true"):
        await found_at(vllm(*range(5000)))


@in_loop
async def test_vllm_under_another_owner_is_known_by_its_metrics() -> None:
    assert (await found_at(vllm(0, owner="acme"))).kind == "vllm"


@in_loop
async def test_any_other_server_has_models_only() -> None:
    found = await found_at({"/v1/models": models("x", "y", owner="acme")})
    assert (found.kind, found.models, found.rank_labels, found.places) == ("openai", ("x", "y"), (0,), ())
    found = await found_at({})
    assert (found.kind, found.models) == ("openai", ())


@in_loop
async def test_the_operators_word_is_taken() -> None:
    assert (await found_at(sglang(dp_size=2), "openai")).places == ()
    assert (await found_at(vllm(0, 1, owner="acme"), "vllm")).kind == "vllm"
    with pytest.raises(FetchError, match="it does not answer like a sglang server"):
        await found_at({"/v1/models": models("m")}, "sglang")


@pytest.mark.parametrize(
    ("path", "reply", "complaint"),
    [
        ("/v1/models", Reply(b"", 500), "/v1/models answered 500"),
        ("/v1/models", Reply(b"", 401), "/v1/models answered 401"),
        ("/v1/models", Reply(b"<html>"), "/v1/models: "),
        ("/v1/models", Reply({"data": [{"name": "m"}]}), "/v1/models: "),
        ("/server_info", Reply(b"", 503), "/server_info answered 503"),
        ("/server_info", Reply(b"<html>"), "not JSON"),
        ("/server_info", Reply(INFO | {"dp_size": 10**9}), "too many to be true"),
        ("/server_info", Reply(OURS | {"dp_size": 10**15}), "too many to be true"),
    ],
)
@in_loop
async def test_nonsense_is_refused_in_one_clause(path: str, reply: Reply, complaint: str) -> None:
    with pytest.raises(FetchError, match=complaint):
        await found_at(sglang() | {path: reply})


@pytest.mark.parametrize("value", ["many", None, -3, True, [4], 0])
@in_loop
async def test_a_nonsensical_number_of_ranks_counts_as_one(value: object) -> None:
    assert (await found_at(sglang(dp_size=value))).rank_labels == (0,)
