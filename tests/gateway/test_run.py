"""The gateway's process: how it starts, what it says, what it imports, how it stops."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tests.gateway.client import CHAT, ask_now, chat
from tests.gateway.processes import Fleet, free_port
from tests.server.raw import wait_for
from tests.serving import write_tiny_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.gateway.processes import Gateway


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Processes that are gone at the end."""
    with Fleet(tmp_path) as processes:
        yield processes


NOBODY = ("--worker", "127.0.0.1:1", "--worker", "127.0.0.1:2")


@contextlib.contextmanager
def streaming(gateway: Gateway, body: object) -> Iterator[None]:
    """A client whose stream runs meanwhile."""
    command = ["curl", "-sN", f"{gateway.url}{CHAT}", "-d", json.dumps(body)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as client:
        try:
            yield
        finally:
            client.kill()


def ready_line(gateway: Gateway) -> str:
    """What it says when it serves."""
    wait_for(lambda: "Equipoise routes on " in gateway.read_log(), "the ready line", 30.0)
    return next(line for line in gateway.read_log().splitlines() if line.startswith("Equipoise routes on "))


def test_it_serves_whether_workers_are_up_or_not(fleet: Fleet) -> None:
    gateway = fleet.gateway(*NOBODY, is_ready=False)
    line = ready_line(gateway)
    assert line.startswith(f"Equipoise routes on {gateway.url} (0 of 2 workers are up, ready in ")
    assert "worker http://127.0.0.1:1: starting: connect: " in gateway.read_log()
    assert ask_now(gateway.port, CHAT, chat()).status == 503
    assert gateway.stop() == 0


def test_the_ready_line_counts_workers(fleet: Fleet) -> None:
    gateway = fleet.before([fleet.sglang()])
    assert " workers are up" in ready_line(gateway)


def test_a_second_signal_ends_it_at_once(fleet: Fleet) -> None:
    worker = fleet.sglang().wait_ready()
    gateway = fleet.before([worker], "--shutdown-timeout", "1000")
    worker.change(token_s=1000.0)
    with streaming(gateway, chat(stream=True)):
        wait_for(lambda: worker.num_seen() == 1, "the stream runs")
        gateway.signal(signal.SIGINT)
        wait_for(lambda: "closing: 1 requests run, they have 1000 s" in gateway.read_log(), "it waits")
        gateway.signal(signal.SIGINT)
        assert gateway.process.wait(20) == 128 + signal.SIGINT
    gateway.process.returncode = 0  # it was meant to die


def test_the_access_log_follows_its_file(fleet: Fleet, tmp_path: Path) -> None:
    log, moved = tmp_path / "access.log", tmp_path / "access.log.1"
    gateway = fleet.before([fleet.sglang()], "--access-log", str(log))
    assert ask_now(gateway.port, CHAT, chat()).status == 200
    wait_for(lambda: log.read_text().count("\n") == 1, "the line is written")
    log.rename(moved)
    gateway.signal(signal.SIGHUP)
    wait_for(log.exists, "the file is there again")
    assert ask_now(gateway.port, CHAT, chat(stream=True)).status == 200
    assert gateway.stop() == 0
    first, second = json.loads(moved.read_text()), json.loads(log.read_text())
    for line in (first, second):
        expected = {"method": "POST", "path": CHAT, "status": 200, "outcome": "ok", "num_tries": 1}
        assert expected.items() <= line.items()
        assert line["worker"].startswith("http://127.0.0.1:")
        assert line["e2e_ms"] >= 0
        assert line["prompt_tokens"] > 0
        assert line["output_tokens"] > 0
        assert line["response_bytes"] > 0
    assert second["ttft_ms"] <= second["e2e_ms"]
    assert gateway.read_log().count('"request_id"') == 0


def refusal(*words: str) -> str:
    """What `equipoise gateway WORDS` says before it ends with 2."""
    done = subprocess.run(
        [sys.executable, "-m", "equipoise", "gateway", "--port", "0", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--policy", "best"), "worker policy: 'best' is not known, allowed are "),
        (("--rank-policy", "best"), "rank policy: 'best' is not known, allowed are minimum_tokens"),
        (("--decode-policy", "nowhere:made"), "'nowhere:made' cannot be loaded"),
        (("--workers-file", "/nowhere.toml"), "workers-file: /nowhere.toml: No such file or directory"),
        (("--access-log", "/nowhere/access.log"), "access-log: /nowhere/access.log: No such file or directory"),
        (("--host", "192.0.2.1"), "cannot listen on 192.0.2.1"),
    ],
)
def test_wrong_settings_end_with_2_and_one_line(words: tuple[str, ...], message: str) -> None:
    assert message in refusal(*NOBODY, *words)


WATCHED = """
import os, signal, sys, threading, time, urllib.request
from equipoise.cli import main

def stop_once_it_serves():
    while True:
        try:
            urllib.request.urlopen("http://127.0.0.1:{port}/v1/models", timeout=5).read()
            break
        except OSError:
            time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=stop_once_it_serves, daemon=True).start()
code = main(["gateway", "--worker", "127.0.0.1:1", "--port", "{port}"])
heavy = ("numpy", "torch", "starlette", "uvicorn", "prometheus_client", "tokenizers", "yaml", "zmq", "jinja2")
print(code, [name for name in heavy if name in sys.modules], [name for name in ("uvloop",) if name in sys.modules])
"""


def test_it_runs_without_heavy_imports() -> None:
    code = WATCHED.format(port=free_port())
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "0 [] ['uvloop']\n"


def test_it_may_open_as_many_files_as_the_system_allows(fleet: Fleet) -> None:
    gateway = fleet.gateway(*NOBODY, is_ready=False)
    with open(f"/proc/{gateway.pid}/limits", encoding="ascii") as file:
        soft, hard = next(line for line in file if line.startswith("Max open files")).split()[3:5]
    assert soft == hard
    assert os.path.exists(f"/proc/{gateway.pid}")


def test_a_tokenizer_counts_prompts(fleet: Fleet, tmp_path: Path) -> None:
    folder, log = write_tiny_tokenizer(tmp_path / "tokenizer"), tmp_path / "access.log"
    worker = fleet.sglang().wait_ready()
    gateway = fleet.before([worker], "--tokenizer", str(folder), "--access-log", str(log))
    worker.change(token_s=1000.0)
    with streaming(gateway, chat("x" * 5000, stream=True, max_tokens=9)):
        wait_for(lambda: gateway.metric("equipoise_gateway_rank_charged_tokens") >= 5009, "each byte is a token")
        assert gateway.metric("equipoise_gateway_rank_charged_tokens") < 5100
