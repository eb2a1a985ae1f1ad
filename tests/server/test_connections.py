"""Clients that leave, bodies that come in pieces or not at all, keys and origins."""

from __future__ import annotations

import http.client
import json
import threading
import time
from typing import TYPE_CHECKING

import pytest
from tests.server.raw import (
    body_of,
    chunked_bytes,
    connect,
    load,
    read_all,
    request_bytes,
    status_of,
    wait_for,
)
from tests.serving import Server, serve, sim_flags

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "hello", "max_tokens": 100_000, "ignore_eos": True}
MIB = 2**20


@pytest.fixture(scope="module")
def guarded(tiny_tokenizer: Path) -> Iterator[Server]:
    """A server with a key and an allowed origin."""
    flags = ("--api-key", "secret", "--cors-origins", "https://a.example", "--request-timeout", "0.5")
    with serve(*sim_flags(tiny_tokenizer, *flags)) as server:
        yield server


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions", "/generate"])
def test_a_client_that_leaves_aborts_its_request(sim_server: Server, path: str, n: int, stream: bool) -> None:
    body: dict[str, object] = {**LONG, "n": n, "stream": stream}
    if "chat" in path:
        body = {**body, "messages": [{"role": "user", "content": "hello"}]}
        del body["prompt"]
    if path == "/generate":
        params = {"max_new_tokens": 100_000, "ignore_eos": True, "n": n}
        body = {"text": "hello", "stream": stream, "sampling_params": params}
    aborted = load(sim_server)["total_aborted"]
    with connect(sim_server) as connection:
        connection.sendall(request_bytes(path, json.dumps(body).encode()))
        if stream:
            assert connection.recv(10).startswith(b"HTTP/1.1 2")
        wait_for(lambda: load(sim_server)["num_running_reqs"] == n, f"{n} running")
    wait_for(lambda: load(sim_server)["num_running_reqs"] == 0, "none running")
    assert load(sim_server)["total_aborted"] == aborted + n


def test_a_client_that_leaves_in_the_middle_of_its_body(sim_server: Server) -> None:
    with connect(sim_server) as connection:
        connection.sendall(request_bytes(COMPLETIONS, b'{"prompt": "he', length=100))
    assert status_of(_post(sim_server, {"prompt": "a", "max_tokens": 1})) == 200
    assert "Traceback" not in sim_server.read_log()


def test_a_body_in_many_pieces(sim_server: Server) -> None:
    raw = request_bytes(COMPLETIONS, json.dumps({"prompt": "abc", "max_tokens": 3}).encode())
    with connect(sim_server) as connection:
        for at in range(0, len(raw), 7):
            connection.sendall(raw[at : at + 7])
            time.sleep(0.001)
        assert status_of(read_all(connection)) == 200


def test_a_chunked_body(sim_server: Server) -> None:
    with connect(sim_server) as connection:
        connection.sendall(chunked_bytes(COMPLETIONS, [b'{"prompt": "abc"', b', "max_tokens": 3}']))
        assert status_of(read_all(connection)) == 200


def test_an_oversized_body_is_a_413_by_its_announced_length(sim_server: Server) -> None:
    with connect(sim_server) as connection:
        connection.sendall(request_bytes(COMPLETIONS, b"{", length=5 * MIB))
        answer = read_all(connection)
    assert status_of(answer) == 413
    assert body_of(answer)["error"]["code"] == "request_too_large"


def test_an_oversized_body_is_a_413_for_a_client_that_sends_it_all(sim_server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", sim_server.port, timeout=20)
    connection.request("POST", COMPLETIONS, b" " * (20 * MIB))
    assert connection.getresponse().status == 413
    connection.close()


def test_an_oversized_chunked_body_is_a_413(sim_server: Server) -> None:
    with connect(sim_server) as connection:
        connection.sendall(chunked_bytes(COMPLETIONS, [b" " * MIB] * 6))
        assert status_of(read_all(connection)) == 413


@pytest.mark.parametrize(
    "raw", [b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03", b"POST / HTTP/9.9\r\n\r\n"]
)
def test_what_is_not_http_harms_nobody(sim_server: Server, raw: bytes) -> None:
    with connect(sim_server) as connection:
        connection.sendall(raw)
        connection.settimeout(2)
        assert not connection.recv(1000).startswith(b"HTTP/1.1 2")
    assert status_of(_post(sim_server, {"prompt": "a", "max_tokens": 1})) == 200
    assert "Traceback" not in sim_server.read_log()


def test_requests_on_one_connection_are_answered_in_order(sim_server: Server) -> None:
    first = request_bytes(COMPLETIONS, json.dumps({"prompt": "a", "max_tokens": 2}).encode())
    with connect(sim_server) as connection:
        connection.sendall(first + request_bytes("/tokenize", b'{"prompt": "abc"}', "Connection: close"))
        data = b""
        while chunk := connection.recv(65536):
            data += chunk
    assert data.count(b"HTTP/1.1 200") == 2
    assert data.index(b"text_completion") < data.index(b"max_model_len")


def test_a_long_prompt_does_not_stall_other_streams(sim_server: Server) -> None:
    """Tokenizing 2 MiB takes a while; the stream beside it goes on meanwhile."""
    arrivals: list[float] = []

    def read_stream() -> None:
        with connect(sim_server) as connection:
            connection.sendall(request_bytes(COMPLETIONS, json.dumps({**LONG, "stream": True}).encode()))
            while not stop.is_set():
                connection.recv(65536)
                arrivals.append(time.monotonic())

    stop = threading.Event()
    reader = threading.Thread(target=read_stream)
    reader.start()
    try:
        wait_for(lambda: len(arrivals) > 20, "the stream runs")
        started = time.monotonic()
        with connect(sim_server) as connection:
            connection.sendall(request_bytes(COMPLETIONS, json.dumps({"prompt": "word " * 400_000}).encode()))
            answer = read_all(connection)
        ended = time.monotonic()
        wait_for(lambda: arrivals[-1] > ended, "the stream goes on")
    finally:
        stop.set()
        reader.join()
    assert status_of(answer) == 400  # 2,000,000 tokens are too many, which is known once they are counted
    assert "2000000" in body_of(answer)["error"]["message"]
    during = [at for at in arrivals if started < at < ended]
    longest_gap = max(b - a for a, b in zip([started, *during], [*during, ended], strict=True))
    assert longest_gap < (ended - started) / 2, f"{longest_gap:.3f} s of {ended - started:.3f} s without a token"


def test_a_100k_token_prompt_is_served(sim_server: Server) -> None:
    answer = body_of(_post(sim_server, {"prompt": "x" * 100_000, "max_tokens": 2}))
    assert answer["usage"]["prompt_tokens"] == 100_000


def test_the_key_is_asked_for_everywhere_but_at_health(guarded: Server) -> None:
    assert _get(guarded, "/health")[0] == 200
    for path in ("/v1/models", "/metrics", "/get_load", "/nothing"):
        status, headers = _get(guarded, path)
        assert status == 401
        assert headers["www-authenticate"] == "Bearer"
        assert _get(guarded, path, authorization="Bearer wrong")[0] == 401
        assert _get(guarded, path, authorization="Basic secret")[0] == 401
        assert _get(guarded, path, authorization="Bearer s\xe9cret")[0] == 401
        assert _get(guarded, path, authorization="bearer secret")[0] in (200, 404)


def test_origins(guarded: Server) -> None:
    allowed = _get(guarded, "/health", origin="https://a.example")[1]
    assert allowed["access-control-allow-origin"] == "https://a.example"
    assert "access-control-allow-origin" not in _get(guarded, "/health", origin="https://b.example")[1]
    connection = http.client.HTTPConnection("127.0.0.1", guarded.port, timeout=20)
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    connection.request("OPTIONS", COMPLETIONS, headers=asked)
    assert connection.getresponse().status == 200
    connection.close()


def test_a_request_past_its_time_is_a_408(guarded: Server) -> None:
    answer = _post(guarded, LONG, "Authorization: Bearer secret")
    assert status_of(answer) == 408
    assert body_of(answer)["error"]["type"] == "timeout_error"


def test_a_stream_past_its_time_ends_with_an_error_event(guarded: Server) -> None:
    with connect(guarded) as connection:
        raw = json.dumps({**LONG, "stream": True}).encode()
        connection.sendall(request_bytes(COMPLETIONS, raw, "Authorization: Bearer secret"))
        answer = read_all(connection)
    assert status_of(answer) == 200
    events = [line for line in answer.split(b"\r\n") if line.startswith(b"data: ")]
    assert json.loads(events[-1].split(b"\n")[0].removeprefix(b"data: "))["error"]["code"] == "timeout"
    assert events[-1].endswith(b"data: [DONE]\n\n")


def test_request_ids_are_made_unless_they_are_good(sim_server: Server) -> None:
    assert _get(sim_server, "/health", x_request_id="abc")[1]["x-request-id"] == "abc"
    for bad in ("", "a b", "x" * 129, "caf\xe9"):
        assert _get(sim_server, "/health", x_request_id=bad)[1]["x-request-id"] not in ("", bad)


def _get(server: Server, path: str, **headers: str) -> tuple[int, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        answer.read()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}
    finally:
        connection.close()


def _post(server: Server, body: object, *headers: str) -> bytes:
    with connect(server) as connection:
        connection.sendall(request_bytes(COMPLETIONS, json.dumps(body).encode(), *headers))
        return read_all(connection)
