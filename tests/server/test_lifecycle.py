"""Starting, stopping, a full queue, a dead rank: each with a server of its own."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import psutil
import pytest
from tests.server.raw import body_of, connect, load, read_all, request_bytes, status_of, wait_for
from tests.serving import Server, command, serve, sim_flags

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

COMPLETIONS = "/v1/completions"


class Asker:
    """A request in a thread; `answer` once it is over."""

    def __init__(self, server: Server, **body: object) -> None:
        self.answer = b""
        self._raw = request_bytes(COMPLETIONS, json.dumps({"prompt": "a", "ignore_eos": True, **body}).encode())
        self._thread = threading.Thread(target=self._run, args=(server,))
        self._thread.start()

    def _run(self, server: Server) -> None:
        with connect(server) as connection:
            connection.sendall(self._raw)
            self.answer = read_all(connection)

    def join(self) -> bytes:
        """The whole answer."""
        self._thread.join(20)
        assert not self._thread.is_alive()
        return self.answer

    def events(self) -> list[str]:
        """The stream's events."""
        lines = self.join().replace(b"\r\n", b"\n").split(b"\n")
        return [line.removeprefix(b"data: ").decode() for line in lines if line.startswith(b"data: ")]


def running(server: Server, count: int) -> Callable[[], bool]:
    """A condition: `count` requests run."""
    return lambda: load(server)["num_running_reqs"] == count


def get(server: Server, path: str) -> int:
    """The status of a GET."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


def test_running_requests_finish_when_the_server_is_told_to_stop(tiny_tokenizer: Path) -> None:
    with serve(*sim_flags(tiny_tokenizer, step_ms=5)) as server:
        whole = Asker(server, max_tokens=200)
        streamed = Asker(server, max_tokens=200, stream=True)
        wait_for(running(server, 2), "two running")
        server.signal(signal.SIGTERM)
        wait_for(lambda: get(server, "/health") == 503, "health says that the server closes")
        refused = Asker(server, max_tokens=1).join()
        assert status_of(refused) == 503
        assert b"retry-after" in refused
        assert body_of(whole.join())["usage"]["completion_tokens"] == 200
        assert streamed.events()[-1] == "[DONE]"
        assert json.loads(streamed.events()[-2])["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0


def test_what_does_not_finish_in_time_is_aborted(tiny_tokenizer: Path) -> None:
    with serve(*sim_flags(tiny_tokenizer, "--shutdown-timeout", "0.3")) as server:
        whole = Asker(server, max_tokens=30_000)
        streamed = Asker(server, max_tokens=30_000, stream=True)
        wait_for(running(server, 2), "two running")
        started = time.monotonic()
        server.signal(signal.SIGINT)
        assert body_of(whole.join())["choices"][0]["finish_reason"] == "abort"
        assert json.loads(streamed.events()[-2])["choices"][0]["finish_reason"] == "abort"
        assert server.wait() == 0
        assert time.monotonic() - started < 10


def test_a_client_that_never_reads_does_not_keep_the_server_up(tiny_tokenizer: Path) -> None:
    with serve(*sim_flags(tiny_tokenizer, "--shutdown-timeout", "0.2")) as server, connect(server) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = {"prompt": ["a"] * 64, "max_tokens": 30_000, "ignore_eos": True, "stream": True}
        connection.sendall(request_bytes(COMPLETIONS, json.dumps(body).encode()))
        wait_for(running(server, 64), "64 running")
        time.sleep(1.0)  # the socket's buffers fill
        server.signal(signal.SIGTERM)
        assert server.wait(10) == 0


def test_a_second_signal_ends_the_server_at_once(tiny_tokenizer: Path) -> None:
    with serve(*sim_flags(tiny_tokenizer, "--shutdown-timeout", "60"), exit_code=None) as server:
        rank = psutil.Process(server.pid).children()[0]
        Asker(server, max_tokens=30_000, stream=True)
        wait_for(running(server, 1), "one running")
        server.signal(signal.SIGTERM)
        wait_for(lambda: get(server, "/health") == 503, "closing")
        server.signal(signal.SIGTERM)
        assert server.wait(2) == 128 + signal.SIGTERM
        wait_for(lambda: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE, "the rank is gone too")


def test_a_signal_while_the_engine_starts(tiny_tokenizer: Path) -> None:
    process = subprocess.Popen(command(*sim_flags(tiny_tokenizer)), stderr=subprocess.PIPE)
    children: list[psutil.Process] = []
    wait_for(lambda: bool(children.extend(psutil.Process(process.pid).children()) or children), "a rank process")
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 0
    assert b"Traceback" not in errors
    assert not children[0].is_running()


def test_requests_of_a_dead_rank_fail_and_the_server_ends(tiny_tokenizer: Path) -> None:
    with serve(*sim_flags(tiny_tokenizer), exit_code=1) as server:
        whole = Asker(server, max_tokens=30_000)
        streamed = Asker(server, max_tokens=30_000, stream=True)
        wait_for(running(server, 2), "two running")
        os.kill(psutil.Process(server.pid).children()[0].pid, signal.SIGKILL)
        assert status_of(whole.join()) == 503
        assert body_of(whole.answer)["error"]["type"] == "service_unavailable_error"
        assert json.loads(streamed.events()[-2])["error"]["code"] == "unavailable"
        assert server.wait(10) == 1


def test_a_full_queue_is_a_429_that_says_when_to_come_back(tiny_tokenizer: Path) -> None:
    flags = ("--max-running", "1", "--max-waiting-reqs", "2", "--shutdown-timeout", "0")
    with serve(*sim_flags(tiny_tokenizer, *flags)) as server:
        first = Asker(server, max_tokens=30_000)
        wait_for(running(server, 1), "one running")
        waiting = [Asker(server, max_tokens=30_000) for _ in range(2)]
        wait_for(lambda: load(server)["num_waiting_reqs"] == 2, "two waiting")
        refused = [Asker(server, max_tokens=1, stream=stream).join() for stream in (False, True)]
        for answer in refused:
            assert status_of(answer) == 429
            assert b"retry-after: 1\r\n" in answer
            assert body_of(answer)["error"]["type"] == "rate_limit_error"
        server.signal()
        for asker in (first, *waiting):
            assert body_of(asker.join())["choices"][0]["finish_reason"] == "abort"


def test_pause_and_resume(tiny_tokenizer: Path) -> None:
    with serve(*sim_flags(tiny_tokenizer)) as server:
        assert _control(server, "/pause") == {"paused": "new"}
        asker = Asker(server, max_tokens=3)
        wait_for(lambda: load(server)["num_waiting_reqs"] == 1, "one waiting")
        time.sleep(0.1)
        assert not asker.answer
        assert _control(server, "/resume") == {"paused": None}
        assert status_of(asker.join()) == 200


def test_abort_by_name_and_all(tiny_tokenizer: Path) -> None:
    with serve(*sim_flags(tiny_tokenizer)) as server:
        askers = [Asker(server, max_tokens=30_000, rid=f"r{number}") for number in range(3)]
        wait_for(running(server, 3), "three running")
        assert _control(server, "/abort_request", {"rid": "nobody"}) == {"aborted": 0}
        assert _control(server, "/abort_request", {"rid": "cmpl-r1"}) == {"aborted": 1}
        assert body_of(askers[1].join())["choices"][0]["finish_reason"] == "abort"
        assert _control(server, "/abort_request", {"abort_all": True}) == {"aborted": 2}
        for asker in askers:
            assert status_of(asker.join()) == 200


def test_a_port_in_use_is_told_before_anything_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "equipoise", "serve", "--model", "/nowhere", "--port", str(port)],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr == f"equipoise: port: cannot listen on 127.0.0.1:{port}: Address already in use\n"


def test_a_port_that_is_lost_while_the_engine_starts(tiny_tokenizer: Path) -> None:
    with socket.socket() as rival:
        rival.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        rival.bind(("127.0.0.1", 0))
        port = str(rival.getsockname()[1])
        words = [sys.executable, "-m", "equipoise", "serve", *sim_flags(tiny_tokenizer), "--port", port]
        process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        wait_for(lambda: bool(psutil.Process(process.pid).children()), "a rank process")
        rival.listen()
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 2
    assert errors.splitlines()[-1] == f"equipoise: port: cannot listen on 127.0.0.1:{port}: Address already in use"
    assert "Traceback" not in errors


def test_an_ipv6_address(tiny_tokenizer: Path) -> None:
    with serve(*sim_flags(tiny_tokenizer), "--host", "::1") as server:
        assert server.url.startswith("http://[::1]:")
        with socket.create_connection(("::1", server.port), timeout=10) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert status_of(read_all(connection)) == 200


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--model", "/nowhere"), "/nowhere"),
        (("--host", "no.such.host.invalid"), "host: 'no.such.host.invalid'"),
        (("--executor", "sim", "--tokenizer", "/nowhere"), "/nowhere"),
    ],
)
def test_what_cannot_start_ends_with_one_line(flags: tuple[str, ...], words: str) -> None:
    done = subprocess.run(command(*flags), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def _control(server: Server, path: str, body: object = None) -> object:
    raw = b"" if body is None else json.dumps(body).encode()
    with connect(server) as connection:
        connection.sendall(request_bytes(path, raw))
        return body_of(read_all(connection))
