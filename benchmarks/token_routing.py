"""Token routing on real processes: worker policies with and without ranks chosen by tokens (sgl-project/sglang#20435).

    python benchmarks/token_routing.py [--repeats 3] [--out benchmarks/results]

Workers are `equipoise serve --executor sim`: the engine's scheduler in real time by a cost model, several ranks each,
which choose ranks round robin when the gateway names none, as SGLang does. The gateway stands before them, a closed
loop of streaming clients before it. Lengths follow the published experiment: prompts of 1,481 to 4,120 tokens with a
mean of 2,560, outputs of 187 to 4,068 with a mean of 1,160, 1,000 requests, at most 270 at once. --scale 8 makes all
lengths an eighth and every token eight times as dear, so that a run takes a minute and 2 cores carry it.

Ranks are chosen in three ways: by a random number, as SGLang's P/D routing does when a room is drawn (the published
experiment's baseline); strictly round robin by the engine, a stronger baseline; by tokens. Each repeat runs all nine
settings in turn on the same requests; time to the first token and per output token are the
clients'. The machine must be idle: all of it shares two cores, and steps last tens of milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HOST = "127.0.0.1"
POLICIES = ("random", "round_robin", "cache_aware")
RANK_POLICIES = {
    "random room": "benchmarks.token_routing:RandomRank",
    "round robin": "none",
    "tokens": "minimum_tokens",
}
"""By what chooses the rank: rooms drawn at random, the engine's own round robin, the gateway by tokens."""
FIGURES = ("ttft_mean_ms", "tpot_mean_ms")
PUBLISHED = {"random": (-14.5, -9.9), "round_robin": (-18.2, -11.6), "cache_aware": (-14.8, -8.0)}
"""Change of TTFT and TPOT in percent, as published."""
STEP_MS, PREFILL_TOKEN_MS, DECODE_ROW_MS, KV_TOKEN_MS = 15.0, 0.06, 0.1, 0.0002
"""A 70B-class model on one accelerator group: a rank with 34 requests of 3,000 tokens steps in 38 ms."""
PAGE_SIZE = 16
START_S, RUN_S = 60.0, 600.0


Rows = dict[str, list[dict[str, float]]]


class RandomRank:
    """A rank policy: any rank, as `random room % ranks` is."""

    def __init__(self) -> None:
        self._rng = random.Random(0)

    def choose(self, ask: Any, worker: Any) -> int | None:
        return self._rng.randrange(len(worker.ranks))


@dataclass(frozen=True)
class Ask:
    """One request, in tokens (characters, as the demo model's tokenizer counts)."""

    prompt: str
    num_output: int


@dataclass
class Seen:
    """What a client saw of one request; seconds on its clock."""

    num_output: int
    sent_at: float = 0.0
    first_at: float = 0.0
    last_at: float = 0.0
    error: str = ""


def asks(num_requests: int, scale: float, seed: int) -> list[Ask]:
    """Prompts triangular, outputs lognormal: cut to the published bounds, with their means, median and p90."""
    rng = random.Random(seed)
    found = []
    for _ in range(num_requests):
        prompt_len = rng.triangular(1481, 4120, 2079) / scale
        output_len = min(max(rng.lognormvariate(6.572, 1.056), 187.0), 4068.0) / scale
        text = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=round(prompt_len)))
        found.append(Ask(text, max(2, round(output_len))))
    return found


class Client(asyncio.Protocol):
    """One streamed request on a connection of its own."""

    def __init__(self, head: bytes, seen: Seen, done: asyncio.Future[None]) -> None:
        self._head = head
        self._seen = seen
        self._done = done
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._seen.sent_at = time.monotonic()
        transport.write(self._head)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        if not self._tail and not data.startswith(b"HTTP/1.1 200"):
            self._seen.error = data[:300].decode("utf-8", "replace")
        data = self._tail + data
        if b"data: {" in data:
            self._seen.first_at = self._seen.first_at or now
            self._seen.last_at = now
        if b'data: {"error"' in data:
            self._seen.error = data[-300:].decode("utf-8", "replace")
        self._tail = data[-16:]
        if b"data: [DONE]" in data:
            self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._seen.error = self._seen.error or f"cut off: {exc}"
            self._finish()

    def _finish(self) -> None:
        if not self._done.done():
            self._done.set_result(None)


def head_of(ask: Ask, port: int) -> bytes:
    body = {"model": "demo", "prompt": ask.prompt, "max_tokens": ask.num_output, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    lines = f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}:{port}\r\nContent-Type: application/json\r\n"
    return f"{lines}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


async def run_load(port: int, load: list[Ask], concurrency: int) -> list[Seen]:
    """Send all requests, `concurrency` at a time, in order."""
    loop = asyncio.get_running_loop()
    waiting = iter(load)
    seen: list[Seen] = []

    async def client() -> None:
        for ask in waiting:
            one = Seen(ask.num_output)
            seen.append(one)
            done: asyncio.Future[None] = loop.create_future()
            head = head_of(ask, port)
            transport, _ = await loop.create_connection(lambda: Client(head, one, done), HOST, port)  # noqa: B023
            await done
            transport.close()

    await asyncio.wait_for(asyncio.gather(*[client() for _ in range(concurrency)]), RUN_S)
    return seen


# ---------------------------------------------------------------- processes


def free_port() -> int:
    with socket.socket() as found:
        found.bind((HOST, 0))
        return int(found.getsockname()[1])


def get(port: int, path: str, data: bytes | None = None) -> bytes:
    with urllib.request.urlopen(f"http://{HOST}:{port}{path}", data, timeout=30) as answer:
        return bytes(answer.read())


@contextlib.contextmanager
def started(args: list[str], ready_path: str, port: int, log: Path) -> Any:
    """A process that answers `ready_path` with 200; ended afterwards."""
    with log.open("w") as out:
        process = subprocess.Popen([sys.executable, "-m", "equipoise", *args], stdout=out, stderr=out)
    try:
        until = time.monotonic() + START_S
        while True:
            try:
                get(port, ready_path)
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"{' '.join(args)}:\n{log.read_text()}") from None
                time.sleep(0.1)
        yield process
    finally:
        process.terminate()
        process.wait(20)


def wait_for_all(port: int, num_workers: int) -> None:
    """The gateway is ready with one worker; a burst at that moment would be that one's alone."""
    until = time.monotonic() + START_S
    while sum(worker["takes_requests"] for worker in json.loads(get(port, "/workers"))["workers"]) < num_workers:
        if time.monotonic() > until:
            raise SystemExit("not all workers became ready")
        time.sleep(0.05)


def worker_args(port: int, options: argparse.Namespace) -> list[str]:
    scale = options.scale
    num_pages = round(options.rank_tokens / scale / PAGE_SIZE)
    settings: dict[str, Any] = {
        "executor": "sim",
        "port": port,
        "dp-size": options.ranks,
        "rank-policy": "round_robin",
        "max-running": 256,
        "max-step-tokens": round(8192 / scale),
        "num-pages": num_pages,
        "step-ms": STEP_MS,
        "prefill-token-ms": PREFILL_TOKEN_MS * scale,
        "decode-row-ms": DECODE_ROW_MS,
        "kv-token-us": KV_TOKEN_MS * 1e3 * scale,
        "log-level": "warning",
    }
    return ["serve", *[word for key, value in settings.items() for word in (f"--{key}", str(value))]]


def measure(
    policy: str, rank_policy: str, workers: list[int], load: list[Ask], concurrency: int, log: Path
) -> dict[str, float]:
    """One run through a gateway of its own."""
    for port in workers:
        get(port, "/flush_cache", b"")
    port = free_port()
    args = ["gateway", "--port", str(port), "--policy", policy, "--rank-policy", rank_policy, "--log-level", "warning"]
    for worker in workers:
        args += ["--worker", f"http://{HOST}:{worker}"]
    with started(args, "/readiness", port, log):
        wait_for_all(port, len(workers))
        began = time.monotonic()
        seen = asyncio.run(run_load(port, load, concurrency))
        duration_s = time.monotonic() - began
    failed = [one.error for one in seen if one.error]
    if failed:
        raise SystemExit(f"{policy}, {rank_policy}: {len(failed)} requests failed, the first: {failed[0]}")
    ttft = [(one.first_at - one.sent_at) * 1e3 for one in seen]
    tpot = [(one.last_at - one.first_at) / (one.num_output - 1) * 1e3 for one in seen]
    return {
        "ttft_mean_ms": statistics.fmean(ttft),
        "ttft_p90_ms": statistics.quantiles(ttft, n=10)[-1],
        "tpot_mean_ms": statistics.fmean(tpot),
        "tpot_p90_ms": statistics.quantiles(tpot, n=10)[-1],
        "duration_s": duration_s,
    }


def simulated(policy: str, rank_policy: str, seed: int, options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """The same run on virtual time: the same lengths, schedulers and policies, steps that cost what the model says."""
    from equipoise.sim.run import simulate
    from equipoise.sim.scenario import make_scenario

    load = asks(options.num_requests, options.scale, seed)
    rows = [json.dumps({"input_tokens": len(ask.prompt), "output_tokens": ask.num_output}) for ask in load]
    (folder / "load.jsonl").write_text("\n".join(rows))
    table = {
        "seed": seed,
        "fleet": {"workers": options.workers, "ranks": options.ranks},
        "scheduler": {"max_running": 256, "max_step_tokens": round(8192 / options.scale), "depth": 1},
        "cache": {"num_pages": round(options.rank_tokens / options.scale / PAGE_SIZE), "page_size": PAGE_SIZE},
        "cost": {
            "step_ms": STEP_MS,
            "prefill_token_ms": PREFILL_TOKEN_MS * options.scale,
            "decode_row_ms": DECODE_ROW_MS,
            "kv_token_us": KV_TOKEN_MS * 1e3 * options.scale,
        },
        "workload": {"kind": "file", "path": "load.jsonl", "concurrency": options.concurrency},
        "routing": {"worker_policy": policy, "rank_policy": rank_policy},
    }
    found = simulate(make_scenario(table), folder=folder).summary()
    return {name: found[name] for name in (*FIGURES, "duration_s")}


def change(off: list[dict[str, float]], on: list[dict[str, float]], name: str) -> tuple[float, float, float]:
    """Mean change in percent over paired repeats, and the smallest and largest."""
    changes = [(after[name] / before[name] - 1) * 100 for before, after in zip(off, on, strict=True)]
    return statistics.fmean(changes), min(changes), max(changes)


def page(options: argparse.Namespace, rows: Rows, virtual: Rows) -> str:
    lines = [
        "# Ranks chosen by tokens, on real processes",
        "",
        f"Machine: {options.machine}; {options.workers} workers of {options.ranks} ranks each, {options.num_requests} "
        f"requests, {options.concurrency} at once, lengths / {options.scale:g}, {options.repeats} repeats. "
        f"Python {platform.python_version()}, {time.strftime('%B %Y')}.",
        "",
        f"Command: `{options.command}`",
        "",
        "Cost of a step: "
        f"{STEP_MS:g} ms + {PREFILL_TOKEN_MS:g} ms per prefill token + {DECODE_ROW_MS:g} ms per decode row + "
        f"{KV_TOKEN_MS * 1e3:g} us per KV token read (before scaling). Means over all requests of a run, then over "
        "repeats; changes are of paired repeats: mean (least to most).",
        "",
    ]
    if options.repeats:
        lines += table(rows)
    if options.simulate:
        lines += ["", f"The same on virtual time, {options.simulate} seeds (`equipoise.sim`, the same objects):", ""]
        lines += table(virtual)
    published = [f"{name} TTFT {ttft:+.1f}%, TPOT {tpot:+.1f}%" for name, (ttft, tpot) in PUBLISHED.items()]
    lines += ["", f"Published (SGLang, P/D, rooms at random): {', '.join(published)}."]
    return "\n".join(lines) + "\n"


def table(rows: Rows) -> list[str]:
    lines = [
        "| worker policy | ranks | TTFT ms | TPOT ms | TTFT by tokens instead | TPOT by tokens instead |",
        "|---|---|---|---|---|---|",
    ]
    for policy in POLICIES:
        sides = {name: rows[f"{policy}/{name}"] for name in RANK_POLICIES}
        for name, side in sides.items():
            cells = [policy, name, *[f"{statistics.fmean(row[figure] for row in side):,.1f}" for figure in FIGURES]]
            for figure in FIGURES if name != "tokens" else ():
                mean, least, most = change(side, sides["tokens"], figure)
                cells.append(f"{mean:+.1f}% ({least:+.1f} to {most:+.1f})")
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--num-requests", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=270)
    parser.add_argument("--scale", type=float, default=8.0)
    parser.add_argument("--rank-tokens", type=float, default=144_000, help="KV tokens of a rank, before scaling")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--simulate", type=int, default=0, metavar="SEEDS", help="also run it on virtual time")
    parser.add_argument("--out", type=Path, default=None, help="folder for token_routing.json and .md")
    options = parser.parse_args()
    options.command = "python " + " ".join(["benchmarks/token_routing.py", *sys.argv[1:]])
    options.machine = f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()} {platform.release()}"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    rows: dict[str, list[dict[str, float]]] = {f"{p}/{r}": [] for p in POLICIES for r in RANK_POLICIES}
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
    virtual: dict[str, list[dict[str, float]]] = {name: [] for name in rows}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.simulate):
            for policy in POLICIES:
                for name, rank_policy in RANK_POLICIES.items():
                    row = simulated(policy, rank_policy, seed, options, Path(folder))
                    virtual[f"{policy}/{name}"].append(row)
    if options.simulate:
        print("\n".join(table(virtual)), flush=True)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        workers = [free_port() for _ in range(options.workers if options.repeats else 0)]
        for port in workers:
            stack.enter_context(started(worker_args(port, options), "/health", port, Path(folder) / f"{port}.log"))
        for repeat in range(options.repeats):
            load = asks(options.num_requests, options.scale, repeat)
            for policy in POLICIES:
                for name, rank_policy in RANK_POLICIES.items():
                    log = Path(folder) / "gateway.log"
                    row = measure(policy, rank_policy, workers, load, options.concurrency, log)
                    rows[f"{policy}/{name}"].append(row)
                    print(repeat, policy, name, {key: round(value, 1) for key, value in row.items()}, flush=True)
    text = page(options, rows, virtual)
    print(text)
    if options.out is not None:
        result = {
            "options": {k: str(v) for k, v in vars(options).items()},
            "cost": cost(),
            "runs": rows,
            "simulated": virtual,
        }
        (options.out / "token_routing.json").write_text(json.dumps(result, indent=1) + "\n")
        (options.out / "token_routing.md").write_text(text)


def cost() -> dict[str, float]:
    return {"step_ms": STEP_MS, "prefill_token_ms": PREFILL_TOKEN_MS, "row_ms": DECODE_ROW_MS, "kv_ms": KV_TOKEN_MS}


if __name__ == "__main__":
    main()
