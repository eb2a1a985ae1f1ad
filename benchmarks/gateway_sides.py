"""The gateways that are measured beside one another, how each is started, and the workers behind them."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).resolve().parent
HOST = "127.0.0.1"
READY_S = 60.0
STOP_S = 10.0
BOOTSTRAP_PORT = 8998
PROBE = b'{"model":"bench-model","max_tokens":1,"messages":[{"role":"user","content":"ready?"}]}'
OURS = "equipoise"
OURS_CACHE_AWARE = "equipoise cache_aware"
DIRECT = "direct"
PEERS = ("smg", "sglang-router", "vllm-router")
MAX_INFLIGHT = 20_000
_PORTS = iter(range(18_000 + os.getpid() % 10_000, 32_768))


@dataclass(frozen=True)
class Cores:
    """Which core the gateway runs on, and which the workers and the load share."""

    gateway: int
    rest: int


@dataclass(frozen=True)
class Workers:
    """URLs of what a gateway fronts: mixed workers, or prefill and decode workers."""

    mixed: tuple[str, ...] = ()
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()


@dataclass(frozen=True)
class Programs:
    """What was given on the command line; a peer that was not given is left out."""

    smg: str | None
    sglang_router: str | None
    vllm_router: str | None

    def path(self, side: str) -> str | None:
        own = {OURS: sys.executable, OURS_CACHE_AWARE: sys.executable}
        return {**own, "smg": self.smg, "sglang-router": self.sglang_router, "vllm-router": self.vllm_router}[side]


@dataclass
class Gateway:
    """A running side. `pid` is None for requests that go to a worker directly."""

    name: str
    port: int
    pid: int | None = None
    listening_s: float = 0.0
    answering_s: float = 0.0


@dataclass
class Bench:
    """Where everything runs, and what must be stopped when it is over."""

    cores: Cores
    programs: Programs
    folder: Path
    num_ranks: int = 4
    _running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def launch(self, name: str, command: list[str], core: int) -> subprocess.Popen[bytes]:
        """Start `command` on one core as the head of a process group, its output in a file of the folder."""
        with (self.folder / f"{name.replace(' ', '-')}.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: os.sched_setaffinity(0, {core}),
            )
        self._running.append(process)
        return process

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        _signal_group(process, signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            _signal_group(process, signal.SIGKILL)
            process.wait(STOP_S)
        self._running.remove(process)

    def stop_all(self) -> None:
        for process in reversed(self._running.copy()):
            self.stop(process)

    @contextlib.contextmanager
    def workers(self, num_mixed: int, interval_ms: float = 10.0, *, is_split: bool = False) -> Iterator[Workers]:
        """`num_mixed` workers, or a prefill and a decode worker."""
        roles = ["prefill", "decode"] if is_split else ["null"] * num_mixed
        ports = [free_port() for _ in roles]
        started = []
        for role, port in zip(roles, ports, strict=True):
            flags = ["--port", str(port), "--num-ranks", str(self.num_ranks), "--interval-ms", str(interval_ms)]
            command = [sys.executable, str(HERE / "gateway_worker.py"), *flags, "--role", role]
            started.append(self.launch("worker", command, self.cores.rest))
        try:
            for port, process in zip(ports, started, strict=True):
                wait_until_answering("worker", port, process, time.monotonic())
            urls = tuple(f"http://{HOST}:{port}" for port in ports)
            yield Workers(prefill=urls[:1], decode=urls[1:]) if is_split else Workers(mixed=urls)
        finally:
            for process in started:
                self.stop(process)

    @contextlib.contextmanager
    def gateway(self, name: str, workers: Workers, policy: str | None = None) -> Iterator[Gateway]:
        """A side that answers requests; SystemExit with its last words when it does not within 60 s."""
        if name == DIRECT:
            yield Gateway(name, int(workers.mixed[0].rpartition(":")[2]))
            return
        port, metrics_port = free_port(), free_port()
        program = self.programs.path(name)
        assert program is not None
        command = command_of(name, program, workers, policy, port, metrics_port, self.folder)
        began = time.monotonic()
        process = self.launch(name, command, self.cores.gateway)
        try:
            listening_s = wait_until_listening(name, port, process, began)
            answering_s = wait_until_answering(name, port, process, began)
            yield Gateway(name, port, process.pid, listening_s, answering_s)
        finally:
            self.stop(process)


def command_of(
    name: str, program: str, workers: Workers, policy: str | None, port: int, metrics_port: int, folder: Path
) -> list[str]:
    """How `name` is started. Ours with all that it has: tokens per rank, queue, breaker, metrics, access log."""
    listen = ["--host", HOST, "--port", str(port)]
    if name in (OURS, OURS_CACHE_AWARE):
        flags = ["--policy", policy or "prefix_tokens", "--rank-policy", "minimum_tokens"]
        flags += ["--max-inflight", str(MAX_INFLIGHT), "--access-log", str(folder / f"{name}-{port}.access.jsonl")]
        return [program, "-m", "equipoise", "gateway", *listen, *_ours(workers), *flags, "--log-level", "warning"]
    flags = ["--policy", policy or "round_robin", "--prometheus-host", HOST, "--prometheus-port", str(metrics_port)]
    flags += ["--log-level", "error"]
    command = {
        "smg": [program, "-m", "smg", "launch"],
        "sglang-router": [program, "launch"],
        "vllm-router": [program],
    }[name]
    if name == "smg":
        flags += ["--disable-tokenizer-autoload", "--max-concurrent-requests", str(MAX_INFLIGHT)]
        if workers.prefill:
            flags += ["--dp-minimum-tokens-scheduler", "--load-monitor-interval", "1"]
    return [*command, *listen, *_theirs(workers), *flags]


def _ours(workers: Workers) -> list[str]:
    flags = [flag for url in workers.mixed for flag in ("--worker", url)]
    flags += [flag for url in workers.prefill for flag in ("--prefill", f"{url},{BOOTSTRAP_PORT}")]
    return flags + [flag for url in workers.decode for flag in ("--decode", url)]


def _theirs(workers: Workers) -> list[str]:
    if workers.mixed:
        return ["--worker-urls", *workers.mixed]
    flags = [flag for url in workers.prefill for flag in ("--prefill", url, str(BOOTSTRAP_PORT))]
    return ["--pd-disaggregation", *flags, *(flag for url in workers.decode for flag in ("--decode", url))]


def free_port() -> int:
    """Another port each time, below those that outgoing connections take."""
    for port in _PORTS:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port
    raise SystemExit("no port is free below 32,768")


def wait_until_listening(name: str, port: int, process: subprocess.Popen[bytes], began: float) -> float:
    """Seconds from `began` until the port takes connections."""
    while True:
        with socket.socket() as probe:
            if probe.connect_ex((HOST, port)) == 0:
                return time.monotonic() - began
        _give_up_if_late(name, process, began)
        time.sleep(0.005)


def wait_until_answering(name: str, port: int, process: subprocess.Popen[bytes], began: float) -> float:
    """Seconds from `began` until a chat request is answered with 200."""
    while True:
        connection = http.client.HTTPConnection(HOST, port, timeout=5)
        with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
            connection.request("POST", "/v1/chat/completions", PROBE, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            if answer.status == 200:
                return time.monotonic() - began
        _give_up_if_late(name, process, began)
        time.sleep(0.01)


def _give_up_if_late(name: str, process: subprocess.Popen[bytes], began: float) -> None:
    if process.poll() is not None:
        raise SystemExit(f"{name} ended with {process.returncode} before it answered; --keep-logs shows what it said")
    if time.monotonic() - began > READY_S:
        raise SystemExit(f"{name} does not answer after {READY_S:g} s; --keep-logs shows what it said")


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
