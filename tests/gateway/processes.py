"""Workers and a gateway as real processes, started for a test and gone after it."""

from __future__ import annotations

import contextlib
import json
import random
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tests.server.raw import wait_for

if TYPE_CHECKING:
    from types import TracebackType

ROOT = Path(__file__).parent.parent.parent
STARTUP_S = 30.0
STOP_S = 20.0
PORTS = (20000, 32000)
LISTENING = re.compile(r"listening on (\d+)")
QUICK = {
    "--load-check-interval": "0.1",
    "--load-stale": "5",
    "--health-check-interval": "0.2",
    "--health-check-timeout": "2",
    "--slow-start": "0",
    "--retry-delay": "0.01",
}
"""Flags of a gateway in tests: all that is periodic happens soon."""


def get(url: str, timeout_s: float = 10.0, **headers: str) -> Any:
    """The JSON at `url`. Raises urllib.error.HTTPError for an error status."""
    request = urllib.request.Request(url, headers={key.replace("_", "-"): value for key, value in headers.items()})
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        return json.load(answer)


def text(url: str, timeout_s: float = 10.0) -> str:
    """The text at `url`."""
    with urllib.request.urlopen(url, timeout=timeout_s) as answer:
        return str(answer.read().decode())


def post(url: str, body: object, method: str = "POST", timeout_s: float = 10.0) -> Any:
    """The JSON that `url` answers to a JSON body, None for an empty answer."""
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        payload = answer.read()
    return json.loads(payload) if payload else None


def free_port() -> int:
    """A port on which nobody listens now, below those that the system gives to outgoing connections: one of them
    could take the port of a worker that is down, or even connect it to itself."""
    draw = random.SystemRandom()
    for _ in range(1000):
        port = draw.randrange(*PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError(f"no free port in {PORTS}")


class Process:
    """A child process; stdout and stderr go into the file `log`."""

    def __init__(self, command: list[str], log: Path) -> None:
        self.log = log
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Run the command; its output is appended to the log."""
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *self._command], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    def read_log(self) -> str:
        """All that it wrote so far."""
        return self.log.read_text(errors="replace")

    def signal(self, number: int) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """End it at once; also when it is frozen or over."""
        self.process.kill()
        self.process.wait(STOP_S)

    def is_over(self) -> bool:
        return self.process.poll() is not None


class Worker(Process):
    """A test worker. `url` is known once `wait_ready` returned."""

    port: int = 0
    role: str = "mixed"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_ready(self) -> Worker:
        """Wait until it listens. Raises AssertionError with its log when it does not."""
        wait_for(lambda: bool(LISTENING.search(self.read_log())) or self.is_over(), "the worker listens", STARTUP_S)
        found = LISTENING.search(self.read_log())
        assert found, self.read_log()
        self.port = int(found[1])
        return self

    def debug(self) -> dict[str, Any]:
        """What it saw, see workers/record.py, and its ranks."""
        return get(f"{self.url}/debug")  # type: ignore[no-any-return]

    def change(self, **quirks: object) -> None:
        """Change settings of workers/quirks.py."""
        post(f"{self.url}/debug", quirks)

    def seen(self) -> list[dict[str, Any]]:
        """The generation requests it saw."""
        return self.debug()["requests"]  # type: ignore[no-any-return]

    def num_seen(self) -> int:
        return len(self.seen())

    def served(self) -> list[int]:
        """Requests that each rank served."""
        return [rank["served"] for rank in self.debug()["ranks"]]

    def freeze(self) -> None:
        self.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)

    def restart(self) -> Worker:
        """Again on the same port, which is known."""
        self.log.write_text("")
        self.start()
        return self.wait_ready()


class Gateway(Process):
    """`equipoise gateway`."""

    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_listening(self) -> Gateway:
        """Wait until it answers /health. Raises AssertionError with its log when it does not."""
        wait_for(lambda: self.answers() or self.is_over(), "the gateway listens", STARTUP_S)
        assert not self.is_over(), self.read_log()
        return self

    def answers(self) -> bool:
        """Whether it answers anything at /health."""
        try:
            text(f"{self.url}/health", 2.0)
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False
        return True

    def wait_ready(self, num_workers: int = 1) -> Gateway:
        """Wait until so many workers are ready."""
        try:
            wait_for(lambda: self.num_ready() >= num_workers, f"{num_workers} workers are ready", STARTUP_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.workers()}\n{self.read_log()}") from None
        return self

    def num_ready(self) -> int:
        return sum(worker["state"] == "ready" for worker in self.workers())

    def workers(self) -> list[dict[str, Any]]:
        """The admin's list of workers."""
        return get(f"{self.url}/workers")["workers"]  # type: ignore[no-any-return]

    def worker(self, url: str) -> dict[str, Any]:
        """One of them."""
        return next(worker for worker in self.workers() if worker["url"] == url)

    def add(self, worker: Worker) -> None:
        """Take in a worker."""
        post(f"{self.url}/workers", {"url": worker.url, "role": worker.role})

    def drain(self, worker: Worker) -> None:
        """Give a worker no more requests; it is removed when it is idle."""
        post(f"{self.url}/workers/127.0.0.1:{worker.port}/drain", {})

    def remove(self, worker: Worker) -> None:
        """Remove a worker at once."""
        post(f"{self.url}/workers/127.0.0.1:{worker.port}", None, method="DELETE")

    def metrics(self) -> str:
        """The text at /metrics."""
        return text(f"{self.url}/metrics")

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry `labels`; 0.0 when there is none."""
        total = 0.0
        for line in self.metrics().splitlines():
            series, _, value = line.rpartition(" ")
            head, _, rest = series.partition("{")
            if head == name and all(f'{key}="{wanted}"' in rest for key, wanted in labels.items()):
                total += float(value)
        return total

    def stop(self, timeout_s: float = STOP_S) -> int:
        """Tell it to stop; its exit code."""
        self.signal(signal.SIGTERM)
        return self.process.wait(timeout_s)


class Fleet:
    """All processes of one test. Leaves none behind, and complains about a gateway that died or wrote a traceback."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: list[Process] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gateways = [one for one in self._processes if isinstance(one, Gateway)]
        died = [one for one in gateways if one.is_over() and one.process.returncode not in (0, -signal.SIGKILL)]
        for process in self._processes:
            process.process.kill()
        for process in self._processes:
            process.process.wait(STOP_S)
        if error is None:
            for gateway in gateways:
                log = gateway.read_log()
                assert gateway not in died, f"the gateway died:\n{log}"
                assert "Traceback" not in log, log
        elif isinstance(error, Exception):
            for gateway in gateways:
                error.add_note(f"log of the gateway:\n{gateway.read_log()[-4000:]}")

    def sglang(self, *flags: str) -> Worker:
        """An SGLang-like worker, not waited for."""
        return self._worker("sglang_like", flags)

    def prefill(self, *flags: str) -> Worker:
        """An SGLang-like prefill worker whose bootstrap port stays, not waited for."""
        worker = self.sglang("--role", "prefill", "--bootstrap-port", str(free_port()), *flags)
        worker.role = "prefill"
        return worker

    def decode(self, *flags: str) -> Worker:
        """An SGLang-like decode worker, not waited for."""
        worker = self.sglang("--role", "decode", *flags)
        worker.role = "decode"
        return worker

    def vllm(self, *flags: str) -> Worker:
        """A vLLM-like worker, not waited for."""
        return self._worker("vllm_like", flags)

    def _worker(self, kind: str, flags: tuple[str, ...]) -> Worker:
        log = self.folder / f"{len(self._processes)}-{kind}.log"
        worker = Worker([f"tests.gateway.workers.{kind}", "--port", str(free_port()), *flags], log)
        self._processes.append(worker)
        return worker

    def gateway(self, *flags: str, port: int | None = None, is_ready: bool = True) -> Gateway:
        """A gateway that listens, QUICK unless `flags` say otherwise; its workers are ready unless not `is_ready`."""
        port = port or free_port()
        quick = [part for name, value in QUICK.items() if name not in flags for part in (name, value)]
        command = ["equipoise", "gateway", "--port", str(port), *quick, *flags]
        gateway = Gateway(command, self.folder / f"{len(self._processes)}-gateway.log")
        gateway.port = port
        self._processes.append(gateway)
        gateway.wait_listening()
        if is_ready:
            gateway.wait_ready(sum(flag in ("--worker", "--prefill", "--decode") for flag in flags))
        return gateway

    def before(self, workers: list[Worker], *flags: str) -> Gateway:
        """A gateway before these workers, all ready."""
        names = {"mixed": "--worker", "prefill": "--prefill", "decode": "--decode"}
        urls = [part for worker in workers for part in (names[worker.role], worker.wait_ready().url)]
        return self.gateway(*urls, *flags)
