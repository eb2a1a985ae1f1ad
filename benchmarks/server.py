"""CPU of the server process per streamed token, with the simulated executor.

    python benchmarks/server.py [--streams 256] [--windows 5] [--window-s 4] [--step-ms 40] [--out FILE]

Server (`equipoise serve --executor sim`), its rank and the load generator are three processes; only the server
process is measured: everything between the rank's message and the socket. Tokens are counted by the rank.
Each window's figure is CPU seconds over tokens; the minimum and the median are reported.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from importlib.metadata import version
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from typing import TYPE_CHECKING

from tests.serving import serve, sim_flags, write_tiny_tokenizer

if TYPE_CHECKING:
    from ctypes import c_int64

NUM_WORDS = 30_000
NUM_PROMPT = 32
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


def main() -> None:
    args = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = write_word_tokenizer(Path(folder) / "tokenizer")
        flags = sim_flags(
            tokenizer, "--max-running", str(args.streams), "--sim-num-pages", "65536", step_ms=args.step_ms
        )
        result = {
            "benchmark": "benchmarks/server.py",
            "date": time.strftime("%Y-%m-%d"),
            "machine": machine(),
            "versions": versions(),
            "streams": args.streams,
            "step_ms": args.step_ms,
            "window_s": args.window_s,
            "unit": "microseconds of server CPU per streamed token",
        }
        with serve(*flags, "--log-level", "warning") as server:
            for kind, path in PATHS.items():
                result[kind] = measure(server.pid, server.url, path, args)
                print(kind, json.dumps(result[kind]), flush=True)
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        Path(args.out).write_text(text + "\n")


def write_word_tokenizer(folder: Path) -> Path:
    """The tests' tokenizer with words in its vocabulary, so that a drawn token is text as a model's would be."""
    write_tiny_tokenizer(folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    for number in range(NUM_WORDS):
        vocabulary[f"Ġw{number:x}"] = 300 + number
    path.write_text(json.dumps(tokenizer))
    return folder


def measure(pid: int, url: str, path: str, args: argparse.Namespace) -> dict[str, object]:
    """Streams run in a process of their own while windows of the server's CPU time are taken."""
    num_tokens = int((args.windows + 3) * args.window_s / args.step_ms * 1000) + 100
    context = multiprocessing.get_context("spawn")
    num_events = context.Value("q", 0, lock=False)
    load = context.Process(target=run_load, args=(url, path, args.streams, num_tokens, num_events), daemon=True)
    load.start()
    _wait_until_running(url, args.streams)
    time.sleep(1.0)
    figures, rates, events_per_token = [], [], []
    process = psutil.Process(pid)
    for _ in range(args.windows):
        cpu, tokens, events, started = _cpu_s(process), _num_tokens(url), num_events.value, time.monotonic()
        time.sleep(args.window_s)
        streamed = _num_tokens(url) - tokens
        events_per_token.append((num_events.value - events) / streamed)
        figures.append((_cpu_s(process) - cpu) / streamed * 1e6)
        rates.append(streamed / (time.monotonic() - started))
    load.terminate()
    load.join()
    while _load(url)["num_running_reqs"]:
        time.sleep(0.05)
    return {
        "us_per_token_min": round(min(figures), 2),
        "us_per_token_median": round(statistics.median(figures), 2),
        "us_per_token": [round(figure, 2) for figure in figures],
        "events_per_token": round(statistics.median(events_per_token), 3),
        "tokens_per_s_median": round(statistics.median(rates)),
        "rss_mb": round(process.memory_info().rss / 2**20, 1),
    }


def run_load(url: str, path: str, streams: int, num_tokens: int, num_events: c_int64) -> None:
    """Open `streams` streams over raw sockets and count the events that come."""
    asyncio.run(_run_load(url, path, streams, num_tokens, num_events))


async def _run_load(url: str, path: str, streams: int, num_tokens: int, num_events: c_int64) -> None:
    host, _, port = url.removeprefix("http://").rpartition(":")
    prompt = " ".join(f"w{number}" for number in range(NUM_PROMPT))
    asked = {"messages": [{"role": "user", "content": prompt}]} if "chat" in path else {"prompt": prompt}
    body = json.dumps({**asked, "stream": True, "max_tokens": num_tokens, "ignore_eos": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n".encode()

    async def one() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head + body)
        while chunk := await reader.read(65536):
            num_events.value += chunk.count(b"data: ")

    await asyncio.gather(*(one() for _ in range(streams)))


def _wait_until_running(url: str, streams: int) -> None:
    deadline = time.monotonic() + 60
    while _load(url)["num_running_reqs"] < streams:
        if time.monotonic() > deadline:
            raise SystemExit("the streams did not start within 60 s")
        time.sleep(0.1)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _num_tokens(url: str) -> int:
    return int(_load(url)["total_output_tokens"])


def _load(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/get_load") as answer:
        loads: list[dict[str, float]] = json.load(answer)
    return loads[0]


def machine() -> str:
    model = subprocess.run(
        ["sh", "-c", "grep -m1 'model name' /proc/cpuinfo | cut -d: -f2"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return f"{psutil.cpu_count()} cores, {model or platform.processor()}, {platform.system()} {platform.release()}"


def versions() -> dict[str, str]:
    packages = ("equipoise", "uvicorn", "uvloop", "httptools", "starlette", "msgspec", "tokenizers", "pyzmq")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--window-s", type=float, default=4.0)
    parser.add_argument("--step-ms", type=float, default=40.0)
    parser.add_argument("--out", help="file for the result, as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
