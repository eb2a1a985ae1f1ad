"""Clients for benchmarks/gateway.py: one process on one core, one JSON line on standard output.

    python benchmarks/gateway_load.py MODE --port N [--process PID] [--seconds 4] ...

MODE   closed    each connection sends its next request when the last one is answered; answered requests per second
       rate      requests leave at fixed times whatever comes back; latency of each, from the moment it was sent
       streams   each connection streams one answer after another; tokens per second, CPU of PID per token
       hold      --num-connections streams at once, each once; what was lost, memory of PID while all are open

CPU and memory are those of PID and its children, over the measured window only (--warm-s before it does not count).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import re
import selectors
import socket
import statistics
import time
from typing import TYPE_CHECKING, Any, cast

import httptools
import psutil
import uvloop

from gateway_bodies import bodies

if TYPE_CHECKING:
    from collections.abc import Callable

HOST = "127.0.0.1"
PATH = "/v1/chat/completions"
SENT = re.compile(rb'"sent_ns":(\d+)')
SAMPLE_EVERY = 8
SLOW_S = 60.0
Figures = dict[str, Any]


def requests(port: int, contents: list[bytes]) -> list[bytes]:
    head = f"POST {PATH} HTTP/1.1\r\nHost: {HOST}:{port}\r\nContent-Type: application/json\r\nAccept: */*\r\n"
    return [head.encode() + b"Content-Length: %d\r\n\r\n%b" % (len(content), content) for content in contents]


class Processes:
    """CPU seconds and resident memory of a process and all its children."""

    def __init__(self, pid: int) -> None:
        root = psutil.Process(pid)
        self._all = [root, *root.children(recursive=True)]

    def cpu_s(self) -> float:
        times = [process.cpu_times() for process in self._all]
        return float(sum(each.user + each.system for each in times))

    def rss_bytes(self) -> int:
        return sum(process.memory_info().rss for process in self._all)


class Client(asyncio.Protocol):
    """One connection: sends what it is given and counts the answer's events; tells when the answer is whole."""

    def __init__(self, told: Callable[[Client], None], lost: Callable[[Client], None], num_asked: int) -> None:
        self.num_asked = num_asked
        self.status = 0
        self.num_tokens = 0
        self.sent_at = 0.0
        self.first_s: float | None = None
        self.delays_ms: list[float] | None = None
        self.is_waiting = False
        self._told, self._lost = told, lost
        self._parser = httptools.HttpResponseParser(self)
        self._ended_newline = False
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._lost(self)

    def send(self, request: bytes) -> None:
        self.num_tokens = 0
        self.first_s = None
        self.is_waiting = True
        self.sent_at = time.monotonic()
        assert self.transport is not None
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            if self.transport is not None:
                self.transport.abort()

    def on_body(self, data: bytes) -> None:
        """An event ends with an empty line, which two reads may share."""
        self.num_tokens += data.count(b"\n\n") + (self._ended_newline and data[:1] == b"\n")
        self._ended_newline = data[-1:] == b"\n" and data[-2:] != b"\n\n" and len(data) > 1
        if self.first_s is None:
            self.first_s = time.monotonic() - self.sent_at
        if self.delays_ms is not None:
            now = time.monotonic_ns()
            self.delays_ms += [(now - int(sent)) / 1e6 for sent in SENT.findall(data)]

    def on_message_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self.is_waiting = False
        self._parser = httptools.HttpResponseParser(self)
        self._told(self)

    @property
    def is_whole(self) -> bool:
        """Every token that was asked for, then the end of the stream as an event of its own."""
        return self.status == 200 and self.num_tokens == self.num_asked + 1


class Load:
    """Connections and what has become of their requests."""

    def __init__(self, args: argparse.Namespace, *, is_stream: bool) -> None:
        self.args = args
        self.is_stream = is_stream
        self.requests = requests(
            args.port, bodies(args.prompt_bytes, args.num_prompts, args.num_tokens, is_stream=is_stream)
        )
        self.clients: list[Client] = []
        self.num_sent = self.num_whole = self.num_bad = self.num_short = self.num_lost = 0
        self.is_repeating = True
        self.tokens_before = 0
        self.first_s: list[float] = []
        self.whole_s: list[float] = []

    async def connect(self) -> Client:
        loop = asyncio.get_running_loop()
        _, client = await loop.create_connection(
            lambda: Client(self._answered, self._lost, self.args.num_tokens), HOST, self.args.port
        )
        if self.is_stream and len(self.clients) % SAMPLE_EVERY == 0:
            client.delays_ms = []
        self.clients.append(client)
        return client

    def send(self, client: Client) -> None:
        client.send(self.requests[self.num_sent % len(self.requests)])
        self.num_sent += 1

    def num_tokens(self) -> int:
        return self.tokens_before + sum(client.num_tokens for client in self.clients if client.is_waiting)

    def start_window(self) -> None:
        self.first_s.clear()
        self.whole_s.clear()
        for client in self.clients:
            if client.delays_ms:
                client.delays_ms.clear()

    def lost(self) -> Figures:
        return {"num_bad": self.num_bad, "num_short": self.num_short, "num_lost": self.num_lost}

    def _answered(self, client: Client) -> None:
        self.tokens_before += client.num_tokens
        self.whole_s.append(time.monotonic() - client.sent_at)
        if client.first_s is not None:
            self.first_s.append(client.first_s)
        if client.status != 200:
            self.num_bad += 1
        elif self.is_stream and not client.is_whole:
            self.num_short += 1
        else:
            self.num_whole += 1
        if self.is_repeating and client.transport is not None:
            self.send(client)

    def _lost(self, client: Client) -> None:
        self.num_lost += client.is_waiting
        client.is_waiting = False


async def measure_closed(args: argparse.Namespace) -> Figures:
    load = Load(args, is_stream=False)
    await _start_all(load)
    await asyncio.sleep(args.warm_s)
    load.start_window()
    num_before, window = load.num_whole, Window(args.process)
    await asyncio.sleep(args.seconds)
    figures = window.close(load.num_whole - num_before, "request")
    return {**figures, **_milliseconds("latency", load.whole_s), **load.lost()}


async def measure_streams(args: argparse.Namespace) -> Figures:
    load = Load(args, is_stream=True)
    await _start_all(load)
    await asyncio.sleep(args.warm_s)
    load.start_window()
    tokens_before, window = load.num_tokens(), Window(args.process)
    await asyncio.sleep(args.seconds)
    figures = window.close(load.num_tokens() - tokens_before, "token")
    delays_s = [delay / 1e3 for client in load.clients for delay in client.delays_ms or ()]
    times = {**_milliseconds("first", load.first_s), **_milliseconds("relay", delays_s)}
    return {**figures, **times, **load.lost()}


async def measure_hold(args: argparse.Namespace) -> Figures:
    """Memory is read before the first connection and at its highest until the last answer has come."""
    load = Load(args, is_stream=True)
    load.is_repeating = False
    peak = Peak(load, args.process)
    watch = asyncio.ensure_future(peak.watch())
    refused, started = 0, time.monotonic()
    for number in range(args.num_connections):
        try:
            load.send(await load.connect())
        except OSError:
            refused += 1
        await asyncio.sleep(max(0.0, started + number / args.per_s - time.monotonic()))
    deadline = time.monotonic() + SLOW_S + args.hold_s
    while any(client.is_waiting for client in load.clients) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    watch.cancel()
    num_hanging = sum(client.is_waiting for client in load.clients)
    lost = {**load.lost(), "num_refused": refused, "num_hanging": num_hanging}
    return {"num_whole": load.num_whole, **peak.figures(), **_milliseconds("first", load.first_s), **lost}


class Peak:
    """The most streams seen open at once, each with a token received, and the most memory."""

    def __init__(self, load: Load, pid: int | None) -> None:
        self._load = load
        self._processes = Processes(pid) if pid else None
        self._idle_bytes = self._most_bytes = self._rss_bytes()
        self._num_open = 0

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            num_open = sum(client.is_waiting and client.num_tokens > 0 for client in self._load.clients)
            self._num_open = max(self._num_open, num_open)
            self._most_bytes = max(self._most_bytes, self._rss_bytes())

    def figures(self) -> Figures:
        per_stream = (self._most_bytes - self._idle_bytes) / 1e3 / max(self._num_open, 1)
        figures: Figures = {"num_open": self._num_open}
        if self._processes:
            memory = {"idle_mb": self._idle_bytes / 1e6, "held_mb": self._most_bytes / 1e6}
            figures |= {"kb_per_stream": per_stream, **memory}
        return figures

    def _rss_bytes(self) -> int:
        return self._processes.rss_bytes() if self._processes else 0


async def _start_all(load: Load) -> None:
    """Connections start a few at a time, so that their tokens do not all fall into one moment."""
    for number in range(load.args.num_connections):
        load.send(await load.connect())
        if number % 8 == 7:
            await asyncio.sleep(0.003)


class Window:
    """Time and CPU from here to `close`."""

    def __init__(self, pid: int | None) -> None:
        self._processes = Processes(pid) if pid else None
        self._own = Processes(psutil.Process().pid)
        self._started = time.monotonic()
        self._own_s = self._own.cpu_s()
        self._cpu_s = self._processes.cpu_s() if self._processes else 0.0

    def close(self, num_done: int, unit: str) -> Figures:
        elapsed = time.monotonic() - self._started
        figures: Figures = {
            f"{unit}s_per_s": num_done / elapsed,
            "load_busy": (self._own.cpu_s() - self._own_s) / elapsed,
        }
        if self._processes:
            cpu_s = self._processes.cpu_s() - self._cpu_s
            figures |= {f"us_per_{unit}": cpu_s * 1e6 / max(num_done, 1), "busy": cpu_s / elapsed}
            figures["rss_mb"] = self._processes.rss_bytes() / 1e6
        return figures


class TimedSocket:
    """A connection without an event loop: one request at a time, its latency when the answer is whole."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection((HOST, port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sent_at = 0.0
        self.status: int | None = None

    def send(self, request: bytes) -> None:
        self.status = None
        self._parser = httptools.HttpResponseParser(self)
        self.sent_at = time.monotonic()
        self.socket.sendall(request)

    def receive(self) -> bool:
        """Whether the answer is whole; raises ConnectionError when the other side closed."""
        data = self.socket.recv(65536)
        if not data:
            raise ConnectionError("closed by the other side")
        self._parser.feed_data(data)
        return self.status is not None

    def on_message_complete(self) -> None:
        self.status = self._parser.get_status_code()


def measure_rate(args: argparse.Namespace) -> Figures:
    """Plain sockets under select(), whose time-out is finer than a millisecond, unlike an event loop's timers."""
    request = requests(args.port, bodies(args.prompt_bytes, 1, args.num_tokens, is_stream=False))[0]
    free = [TimedSocket(args.port) for _ in range(args.num_connections)]
    selector = selectors.SelectSelector()
    for each in free:
        selector.register(each.socket, selectors.EVENT_READ, each)
    latencies: list[float] = []
    num_bad = num_skipped = number = 0
    started = time.monotonic()
    measured_from = started + args.warm_s
    window: Window | None = None
    while (now := time.monotonic()) < measured_from + args.seconds:
        if window is None and now >= measured_from:
            window = Window(args.process)
        due = started + number / args.per_s
        if now >= due:
            number += 1
            if free:
                free.pop().send(request)
            else:
                num_skipped += 1
            continue
        for key, _ in selector.select(due - now):
            one: TimedSocket = key.data
            if one.receive():
                if one.sent_at >= measured_from:
                    latencies.append(time.monotonic() - one.sent_at)
                num_bad += one.status != 200
                free.append(one)
    assert window is not None
    figures = window.close(len(latencies), "request")
    return {**figures, **_milliseconds("latency", latencies), "num_bad": num_bad, "num_skipped": num_skipped}


def _milliseconds(name: str, times_s: list[float]) -> Figures:
    if len(times_s) < 2:
        return {}
    cuts = statistics.quantiles(times_s, n=100)
    return {f"{name}_p50_ms": cuts[49] * 1e3, f"{name}_p90_ms": cuts[89] * 1e3, f"{name}_p99_ms": cuts[98] * 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("closed", "rate", "streams", "hold"))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--process", type=int, metavar="PID", help="whose CPU and memory are measured")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--warm-s", type=float, default=1.0)
    parser.add_argument("--hold-s", type=float, default=0.0, help="how long a held stream takes by itself")
    parser.add_argument("--num-connections", type=int, default=64)
    parser.add_argument("--num-tokens", type=int, default=16, help="max_tokens of each request")
    parser.add_argument("--num-prompts", type=int, default=1, help="different prompts, sent in turn")
    parser.add_argument("--prompt-bytes", type=int, default=24)
    parser.add_argument("--per-s", type=float, default=400.0, help="requests per second (rate), new streams (hold)")
    args = parser.parse_args()
    gc.disable()
    if args.mode == "rate":
        figures = measure_rate(args)
    else:
        run = {"closed": measure_closed, "streams": measure_streams, "hold": measure_hold}[args.mode]
        with contextlib.suppress(KeyboardInterrupt):
            figures = uvloop.run(run(args))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
