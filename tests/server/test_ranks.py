"""Several ranks behind one HTTP server: who is asked for, what operators see, what clients get when one dies."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.server.raw import body_of, connect, read_all, request_bytes, status_of, wait_for
from tests.server.test_lifecycle import Asker
from tests.serving import serve, sim_flags

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.serving import Server

HEADER = "X-Data-Parallel-Rank"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 2},
    "/generate": {"text": "abc", "sampling_params": {"max_new_tokens": 2}},
}


@pytest.fixture(scope="module")
def three(tiny_tokenizer: Path) -> Iterator[Server]:
    """Three ranks that nobody ends."""
    with serve(*sim_flags(tiny_tokenizer, "--dp-size", "3", "--trace-steps", "4")) as server:
        yield server


def call(server: Server, path: str, body: object = None, **headers: str) -> Any:
    """The JSON answer of a GET, or of a POST with `body`."""
    raw = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, raw, {key.replace("_", "-"): headers[key] for key in headers})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def refusal(server: Server, path: str, body: object, **headers: str) -> tuple[int, dict[str, Any]]:
    """Status and error of a request that is refused."""
    with pytest.raises(urllib.error.HTTPError) as raised:
        call(server, path, body, **headers)
    return raised.value.code, json.load(raised.value)["error"]


def samples(server: Server, name: str) -> dict[str, float]:
    """The values of a metric by rank."""
    with urllib.request.urlopen(f"{server.url}/metrics") as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {row.labels["dp_rank"]: row.value for family in families for row in family.samples if row.name == name}


def rank_pids(server: Server) -> dict[int, int]:
    """Process ids by rank, told apart by the names in their settings: the order they were started in."""
    children = sorted(psutil.Process(server.pid).children(), key=lambda child: (child.create_time(), child.pid))
    return {dp_rank: child.pid for dp_rank, child in enumerate(children)}


def served_by(server: Server, **headers: str) -> Callable[..., int]:
    """The rank that a /generate with these headers, and fields of the body, ran on."""
    return lambda **fields: call(server, "/generate", {**BODIES["/generate"], **fields}, **headers)["meta_info"][
        "dp_rank"
    ]


def test_who_asks_for_a_rank_gets_it_and_the_header_wins(three: Server) -> None:
    for rank in range(3):
        assert served_by(three)(routed_dp_rank=rank) == rank
        assert served_by(three)(data_parallel_rank=rank) == rank
    assert served_by(three)(routed_dp_rank=1, data_parallel_rank=2) == 1
    assert served_by(three, X_Data_Parallel_Rank=" 2 ")(routed_dp_rank=1, data_parallel_rank=0) == 2


@pytest.mark.parametrize("path", BODIES)
def test_a_rank_that_is_not_there_is_refused_by_name_and_value(three: Server, path: str) -> None:
    for field in ("routed_dp_rank", "data_parallel_rank"):
        for value in (3, -1):
            status, error = refusal(three, path, {**BODIES[path], field: value})
            assert (status, error["param"]) == (400, field)
            assert error["message"] == f"{field}: {value} is not a rank of this server, 0 to 2 are"
    for text in ("3", "-1", "one", "9" * 30, "\u00b2"):
        status, error = refusal(three, path, BODIES[path], X_Data_Parallel_Rank=text)
        assert (status, error["param"]) == (400, HEADER)
        assert "0 to 2 are" in error["message"]


def test_choices_of_a_prompt_share_a_rank_and_prompts_spread(three: Server) -> None:
    body = {"text": ["a" * 40, "b" * 40, "c" * 40], "sampling_params": {"max_new_tokens": 30, "n": 2}}
    ranks = [answer["meta_info"]["dp_rank"] for answer in call(three, "/generate", body)]
    assert ranks[::2] == ranks[1::2]
    assert sorted(ranks[::2]) == [0, 1, 2]


def test_a_stream_says_its_rank(three: Server) -> None:
    raw = json.dumps({**BODIES["/generate"], "stream": True, "routed_dp_rank": 2}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{three.url}/generate", raw)) as answer:
        events = [line[6:] for line in answer.read().decode().split("\n\n") if line]
    assert {json.loads(event)["meta_info"]["dp_rank"] for event in events[:-1]} == {2}


def test_loads_and_metrics_have_every_rank(three: Server) -> None:
    for rank in (0, 1, 1):
        served_by(three)(routed_dp_rank=rank)
    loads = call(three, "/v1/loads")
    assert loads["dp_rank_count"] == 3
    assert loads["missing_ranks"] == []
    assert [load["dp_rank"] for load in loads["loads"]] == [load["dp_rank"] for load in call(three, "/get_load")]
    assert [load["dp_rank"] for load in loads["loads"]] == [0, 1, 2]
    assert all(abs(load["timestamp"] - time.time()) < 10 for load in loads["loads"])
    finished = samples(three, "equipoise_requests_finished_total")
    assert [finished[str(load["dp_rank"])] for load in loads["loads"]] == [
        load["total_finished"] for load in loads["loads"]
    ]
    assert samples(three, "equipoise_rank_up") == {"0": 1, "1": 1, "2": 1}
    assert set(samples(three, "sglang:num_used_tokens")) == {"0", "1", "2"}
    assert call(three, "/server_info")["dp_size"] == 3
    assert call(three, "/health") == {"status": "ok"}


def test_pause_flush_and_explanations_reach_every_rank(three: Server) -> None:
    for rank in range(3):
        served_by(three)(routed_dp_rank=rank, text="flush" * 20)
    assert call(three, "/flush_cache", {})["flushed_pages"] >= 3 * 6
    call(three, "/pause", {"mode": "new"})
    assert {load["paused"] for load in call(three, "/get_load")} == {"new"}
    askers = [Asker(three, max_tokens=2, rid=f"r{rank}", routed_dp_rank=rank) for rank in range(3)]
    wait_for(lambda: [load["num_waiting_reqs"] for load in call(three, "/get_load")] == [1, 1, 1], "one waits on each")
    for rank in range(3):
        [found] = call(three, f"/debug/requests/r{rank}")["requests"]
        assert (found["dp_rank"], found["place"]) == (rank, "waiting")
    assert call(three, "/abort_request", {"rid": "r1"}) == {"aborted": 1}
    assert call(three, "/abort_request", {"abort_all": True}) == {"aborted": 2}
    assert {body_of(asker.join())["choices"][0]["finish_reason"] for asker in askers} == {"abort"}
    call(three, "/resume", {})
    assert {row["dp_rank"] for row in call(three, "/debug/decisions")["decisions"]} == {0, 1, 2}


def test_every_rank_logs_under_its_name(tiny_tokenizer: Path) -> None:
    with serve(*sim_flags(tiny_tokenizer, "--dp-size", "2")) as server:
        for rank in range(2):
            line = f"INFO rank {rank} equipoise.engine.process: serves sim"
            wait_for(lambda line=line: line in server.read_log(), line)


def test_one_dead_rank_is_outlived_by_the_server(tiny_tokenizer: Path) -> None:
    flags = ("--dp-size", "2", "--no-restart-ranks")
    with serve(*sim_flags(tiny_tokenizer, *flags, step_ms=5.0), exit_code=1) as server:
        dying = Asker(server, max_tokens=30_000, stream=True, routed_dp_rank=0)
        whole = Asker(server, max_tokens=30_000, routed_dp_rank=0)
        living = Asker(server, max_tokens=300, stream=True, routed_dp_rank=1)
        wait_for(lambda: [load["num_running_reqs"] for load in call(server, "/get_load")] == [2, 1], "three run")
        # Some steps on, the streams have begun: until then a dying rank's requests are refused, not cut.
        wait_for(lambda: call(server, "/get_load")[0]["total_output_tokens"] > 50, "tokens flow")
        os.kill(rank_pids(server)[0], signal.SIGKILL)
        assert json.loads(dying.events()[-2])["error"]["code"] == "unavailable"
        assert status_of(whole.join()) == 503
        assert "rank 0" in body_of(whole.answer)["error"]["message"]
        assert json.loads(living.events()[-2])["choices"][0]["finish_reason"] == "length"

        health = call(server, "/health")
        assert health["status"] == "degraded"
        [missing] = health["ranks"]
        assert (missing["dp_rank"], missing["status"]) == (0, "dead")
        assert "SIGKILL" in missing["reason"]
        loads = call(server, "/v1/loads")
        assert [load["dp_rank"] for load in loads["loads"]] == [1]
        assert loads["missing_ranks"] == health["ranks"]
        assert samples(server, "equipoise_rank_up") == {"0": 0, "1": 1}
        assert set(samples(server, "sglang:num_used_tokens")) == {"1"}
        assert [served_by(server)() for _ in range(3)] == [1, 1, 1]
        assert refusal(server, "/generate", BODIES["/generate"], X_Data_Parallel_Rank="0")[0] == 503

        os.kill(rank_pids(server)[0], signal.SIGKILL)  # the only one that is left
        assert server.wait(10) == 1


def test_a_rank_comes_back_and_serves(tiny_tokenizer: Path) -> None:
    with serve(*sim_flags(tiny_tokenizer, "--dp-size", "2")) as server:
        os.kill(rank_pids(server)[1], signal.SIGTERM)
        wait_for(lambda: call(server, "/health")["status"] == "degraded", "it is missed")
        wait_for(lambda: call(server, "/health")["status"] == "ok", "it is back", 30)
        assert served_by(server)(routed_dp_rank=1) == 1
        assert samples(server, "equipoise_rank_up") == {"0": 1, "1": 1}


def test_a_server_whose_rank_hangs_says_so(tiny_tokenizer: Path) -> None:
    with serve(*sim_flags(tiny_tokenizer, "--rank-timeout", "0.3")) as server:
        [pid] = rank_pids(server).values()
        os.kill(pid, signal.SIGSTOP)
        asker = Asker(server, max_tokens=2)

        def health() -> int:
            with connect(server) as connection:
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                return status_of(read_all(connection))

        wait_for(lambda: health() == 503, "no rank answers")
        with connect(server) as connection:
            connection.sendall(request_bytes("/flush_cache", b""))
            assert status_of(read_all(connection)) == 503
        os.kill(pid, signal.SIGCONT)
        assert status_of(asker.join()) == 200
        wait_for(lambda: health() == 200, "it answers again")
