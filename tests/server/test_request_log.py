"""`--log-requests`: the lines of a real server, one per request for tokens."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
from tests.server.raw import connect, load, request_bytes, wait_for
from tests.serving import Server, serve, sim_flags

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COMPLETIONS = "/v1/completions"
LINE = re.compile(r" INFO server equipoise\.server\.request_log: request (request_id=.*)")
KEYS = (
    *("request_id", "route", "status", "prompt_tokens", "cached_tokens", "output_tokens"),
    *("ttft_ms", "total_ms", "finish"),
)


@pytest.fixture(scope="module")
def logging_server(tiny_tokenizer: Path) -> Iterator[Server]:
    """A simulated server with a request log."""
    flags = ("--log-requests", "--sim-max-model-len", "200000", "--sim-num-pages", "40000", "--page-size", "4")
    with serve(*sim_flags(tiny_tokenizer, *flags)) as server:
        yield server


def lines_of(server: Server, request_id: str) -> list[dict[str, str]]:
    """The log's lines of a request, as pairs; every word of a line is a pair."""
    rows = [dict(word.split("=", 1) for word in found.split(" ")) for found in LINE.findall(server.read_log())]
    return [row for row in rows if row["request_id"] == request_id]


def line_of(server: Server, request_id: str) -> dict[str, str]:
    """The one line of a request, once it is there."""
    wait_for(lambda: bool(lines_of(server, request_id)), f"a line of {request_id}")
    [line] = lines_of(server, request_id)
    return line


def post(server: Server, path: str, request_id: str, body: dict[str, Any]) -> int:
    """The status of the answer, which is read to its end."""
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"X-Request-Id": request_id})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def body_for(path: str, num_tokens: int, **more: Any) -> dict[str, Any]:
    """A request for `num_tokens` tokens after "abcdefgh", on any of the three routes."""
    if path == "/generate":
        n = more.pop("n", 1)
        return {"text": "abcdefgh", "sampling_params": _length(num_tokens, "max_new_tokens") | {"n": n}, **more}
    if path == COMPLETIONS:
        return {"prompt": "abcdefgh", **_length(num_tokens, "max_tokens"), **more}
    return {"messages": [{"role": "user", "content": "abcdefgh"}], **_length(num_tokens, "max_tokens"), **more}


def _length(num_tokens: int, name: str) -> dict[str, Any]:
    return {name: num_tokens, "ignore_eos": True}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions", "/generate"])
def test_an_answered_request_has_a_line(logging_server: Server, path: str, stream: bool) -> None:
    name = f"answered{path}-{stream}"
    assert post(logging_server, path, name, body_for(path, 5, stream=stream, n=2)) == 200
    line = line_of(logging_server, name)
    assert tuple(line) == KEYS
    assert (line["route"], line["status"], line["output_tokens"]) == (path, "200", "10")
    assert line["finish"] == "length*2"
    assert 0 < float(line["ttft_ms"]) <= float(line["total_ms"])
    if "chat" not in path:
        assert line["prompt_tokens"] == "8", "choices share their prompt"


def test_cached_tokens_are_those_of_the_usage(logging_server: Server) -> None:
    prompt = "0123456789" * 2
    for name, cached in (("cold", "0"), ("warm", "16")):
        post(logging_server, COMPLETIONS, name, {"prompt": prompt, "max_tokens": 1, "ignore_eos": True, "n": 2})
        line = line_of(logging_server, name)
        assert (line["prompt_tokens"], line["cached_tokens"]) == ("20", cached)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_an_abort_and_a_499(logging_server: Server, stream: bool) -> None:
    name = f"left-{stream}"
    body = json.dumps(body_for(COMPLETIONS, 100_000, stream=stream)).encode()
    with connect(logging_server) as connection:
        connection.sendall(request_bytes(COMPLETIONS, body, f"X-Request-Id: {name}"))
        wait_for(lambda: load(logging_server)["num_running_reqs"] == 1, "it runs")
        if stream:
            connection.recv(100)
    line = line_of(logging_server, name)
    assert (line["status"], line["finish"], line["prompt_tokens"]) == ("499", "abort", "8")
    with urllib.request.urlopen(f"{logging_server.url}/metrics") as page:
        assert f'equipoise_http_requests_total{{route="{COMPLETIONS}",status="499"}}' in page.read().decode()


def test_a_refused_request_has_a_line_with_its_status(logging_server: Server) -> None:
    assert post(logging_server, COMPLETIONS, "refused", {"prompt": "a", "top_p": 7}) == 400
    line = line_of(logging_server, "refused")
    assert (line["status"], line["prompt_tokens"], line["ttft_ms"], line["finish"]) == ("400", "0", "-", "error")


def test_a_name_in_the_body_cannot_forge_a_line(logging_server: Server) -> None:
    rid = 'a "b" \n2026-01-01 00:00:00 INFO server x: request request_id=forged'
    post(logging_server, COMPLETIONS, "named", body_for(COMPLETIONS, 1, rid=rid))
    line = line_of(logging_server, "named")
    assert json.loads(line["rid"]) == rid
    assert not lines_of(logging_server, "forged")


def test_other_routes_have_no_line(logging_server: Server) -> None:
    assert post(logging_server, "/tokenize", "counted", {"prompt": "abc"}) == 200
    assert post(logging_server, COMPLETIONS, "after", body_for(COMPLETIONS, 1)) == 200
    line_of(logging_server, "after")
    assert not lines_of(logging_server, "counted")


def test_it_is_off_by_default(sim_server: Server) -> None:
    assert post(sim_server, COMPLETIONS, "quiet", body_for(COMPLETIONS, 1)) == 200
    assert not lines_of(sim_server, "quiet")
