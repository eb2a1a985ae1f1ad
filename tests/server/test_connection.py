"""The bounds of one connection: its head's size and time, garbage, and pipelined requests of a client that leaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from typing import TYPE_CHECKING

import uvicorn
from tests.server.raw import body_of, connect, load, read_all, request_bytes, status_of, wait_for

from equipoise.server.connection import MAX_HEAD_BYTES, Connection

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import Receive, Scope, Send
    from tests.serving import Server

LONG = {"prompt": "hello", "max_tokens": 100_000, "ignore_eos": True, "stream": True}
HEAD = b"GET /health HTTP/1.1\r\nHost: test\r\n"


def test_a_head_that_is_too_large_is_refused(sim_server: Server) -> None:
    with connect(sim_server) as connection:
        connection.sendall(HEAD + b"X-Long: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n")
        answer = read_all(connection)
    assert status_of(answer) == 431
    assert str(MAX_HEAD_BYTES) in body_of(answer)["error"]["message"]


def test_a_head_that_never_ends_is_cut_off(sim_server: Server) -> None:
    most = 16 * MAX_HEAD_BYTES + 4 * 2**20  # what is on the way
    num_sent = 0
    with connect(sim_server) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(HEAD)
        while num_sent < 10 * most:
            connection.sendall(b"X-More: " + b"a" * 1000 + b"\r\n")
            num_sent += 1010
    assert num_sent < most


def test_a_head_of_ordinary_size_is_served(sim_server: Server) -> None:
    with connect(sim_server) as connection:
        connection.sendall(HEAD + b"X-Long: " + b"a" * (MAX_HEAD_BYTES // 2))
        time.sleep(0.05)
        connection.sendall(b"\r\n\r\n")
        assert status_of(read_all(connection)) == 200


def test_what_is_not_http_is_answered_like_every_error(sim_server: Server) -> None:
    with connect(sim_server) as connection:
        connection.sendall(b"FOO /health HTTP/1.1\r\n\r\n")
        answer = read_all(connection)
    assert status_of(answer) == 400
    assert body_of(answer)["error"]["code"] == "invalid_http"


def test_many_small_requests_at_once_are_no_large_head(sim_server: Server) -> None:
    count = 2 * MAX_HEAD_BYTES // len(HEAD)
    with connect(sim_server) as connection:
        connection.sendall((HEAD + b"\r\n") * count)
        data = b""
        while data.count(b"HTTP/1.1 200") < count:
            data += connection.recv(65536)
        assert data.count(b"HTTP/1.1") == count


def test_a_client_that_leaves_ends_the_request_before_its_pipelined_ones(sim_server: Server) -> None:
    with connect(sim_server) as connection:
        connection.sendall(request_bytes("/v1/completions", json.dumps(LONG).encode()) + HEAD + b"\r\n")
        wait_for(lambda: load(sim_server)["num_running_reqs"] == 1, "one running")
    wait_for(lambda: load(sim_server)["num_running_reqs"] == 0, "none running", timeout_s=3)


class _Hasty(Connection):
    head_timeout_s = 0.2


async def _answer(scope: Scope, receive: Receive, send: Send) -> None:
    await asyncio.sleep(0.5)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@contextlib.asynccontextmanager
async def _hasty_server() -> AsyncIterator[tuple[str, int]]:
    """A uvicorn whose connections wait 0.2 s for a head, and whose answers take 0.5 s."""
    server = uvicorn.Server(uvicorn.Config(_answer, http=_Hasty, lifespan="off", log_config=None))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(server.serve([listener]))
        yield listener.getsockname()
        server.should_exit = True
        await serving


async def _talk(*pieces: bytes) -> tuple[bytes, float]:
    """Everything that comes back, and the seconds until the server closed."""
    async with _hasty_server() as (host, port):
        reader, writer = await asyncio.open_connection(host, port)
        start = time.monotonic()
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0.05)
        async with asyncio.timeout(5):
            data = await reader.read()
        writer.close()
        return data, time.monotonic() - start


def test_a_silent_connection_is_closed() -> None:
    data, seconds = asyncio.run(_talk())
    assert data == b""
    assert 0.2 <= seconds < 2


def test_a_head_that_does_not_come_in_time_is_a_408() -> None:
    data, seconds = asyncio.run(_talk(b"GET / HT", b"TP/1.1\r\nHo", b"st: x\r\n"))
    assert status_of(data) == 408
    assert seconds < 2


def test_half_a_head_behind_a_request_does_not_cut_its_answer_off() -> None:
    data, _ = asyncio.run(_talk(HEAD + b"\r\n" + b"GET /half"))
    assert status_of(data) == 200
    assert data.partition(b"\r\n\r\n")[2].startswith(b"ok")
    assert b"408" in data
