"""The same scenario on virtual time and in real time: `equipoise simulate` and `equipoise serve --executor sim`.

    python benchmarks/sim_served.py [--rounds 3] [--only CASE] [--json FILE]

Four ranks in lockstep behind real HTTP, the scenario's own `scheduler`, `cache` and `cost`, and a client that sends
the requests that the simulator drew, at their times or as others end. What differs is what virtual time leaves out:
HTTP, the way between processes, the exchange, and a machine with other work.
On a machine with other work it is to run at a higher priority (nice -n -10): its share of two cores is small.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from equipoise.sim.run import simulate
from equipoise.sim.scenario import make_scenario

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

HOST = "127.0.0.1"
START_S = 60.0
RUN_S = 120.0
SEED = 7
NUM_REQUESTS = 64
BASE: dict[str, Any] = {
    "fleet": {"ranks": 4, "lockstep": True},
    "scheduler": {"max_running": 6, "max_step_tokens": 2048},
    "cache": {"num_pages": 4096, "prefix_cache": False},
    "cost": {
        "step_ms": 15,
        "eager_step_ms": 25,
        "prefill_token_ms": 0.03,
        "decode_row_ms": 0.5,
        "kv_token_us": 0.5,
        "source": "made up: steps of 20 to 80 ms",
    },
    "routing": {"rank_policy": "round_robin"},
}
CASES: dict[str, dict[str, Any]] = {
    "open loop": {},
    "open loop, balance": {"scheduler": {"balance": True, "balance_margin": 0}},
    "open loop, rent or buy": {"scheduler": {"rent_or_buy": True}},
    "closed loop": {"workload": {"concurrency": 20}},
}


@dataclass
class Ask:
    """One request: seconds after the start, tokens of prompt and output."""

    arrival_s: float
    prompt_len: int
    output_len: int


@dataclass
class Times:
    """When a request was sent, and its first and last token came; seconds."""

    sent_s: float
    first_s: float
    last_s: float
    num_output: int


def draw(num: int) -> list[Ask]:
    """Prompts of 100 to 1,500 tokens, outputs of 20 to 120, 10 a second."""
    rng = np.random.default_rng(SEED)
    arrivals = np.cumsum(rng.exponential(1 / 10, num))
    return [
        Ask(float(at), int(prompt), int(output))
        for at, prompt, output in zip(arrivals, rng.integers(100, 1500, num), rng.integers(20, 120, num), strict=True)
    ]


def figures(times: list[Times]) -> dict[str, float]:
    """What both sides are compared by; milliseconds but for the duration."""
    ttft: NDArray[np.float64] = np.array([each.first_s - each.sent_s for each in times]) * 1e3
    tpot = np.array([(each.last_s - each.first_s) / (each.num_output - 1) for each in times]) * 1e3
    found = {"duration_s": max(each.last_s for each in times) - min(each.sent_s for each in times)}
    for name, values in (("ttft", ttft), ("tpot", tpot)):
        found |= {f"{name}_mean_ms": float(values.mean()), f"{name}_p90_ms": float(np.percentile(values, 90))}
    return found


def scenario_of(case: str, trace: Path) -> dict[str, Any]:
    """The scenario as a file would hold it."""
    more = CASES[case]
    return {
        **BASE,
        "scheduler": {**BASE["scheduler"], **more.get("scheduler", {})},
        "workload": {"kind": "file", "path": str(trace), **more.get("workload", {})},
    }


def simulated(scenario: dict[str, Any]) -> dict[str, float]:
    """On virtual time."""
    columns = simulate(make_scenario(scenario)).requests.columns()
    names = ("arrival_s", "first_s", "last_s", "output_len")
    return figures([Times(*row) for row in zip(*(columns[name].tolist() for name in names), strict=True)])


# ---------------------------------------------------------------- in real time


def served(scenario: dict[str, Any], asks: list[Ask], folder: Path) -> dict[str, float]:
    """In real time: a server of its own, and this process as its client."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = int(probe.getsockname()[1])
    settings = {
        "executor": "sim",
        "port": port,
        "dp_size": scenario["fleet"]["ranks"],
        "lockstep": scenario["fleet"]["lockstep"],
        "rank_policy": scenario["routing"]["rank_policy"],
        "log_level": "warning",
        **scenario["scheduler"],
        **scenario["cache"],
        "cost": scenario["cost"],  # as it stands in the scenario
    }
    config = folder / "settings.json"
    config.write_text(json.dumps(settings))
    with _server(config, port):
        times = asyncio.run(asyncio.wait_for(_load(port, asks, scenario["workload"].get("concurrency")), RUN_S))
        with urllib.request.urlopen(f"http://{HOST}:{port}/metrics") as answer:
            page = answer.read().decode()
    return figures(times) | {"exchange_mean_ms": 1e3 * _sum(page, "exchange_seconds") / _sum(page, "exchanges")}


def _sum(page: str, name: str) -> float:
    return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if f"equipoise_{name}_total{{" in line)


@contextlib.contextmanager
def _server(config: Path, port: int) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-m", "equipoise", "serve", "demo", "--config", str(config)])
    try:
        until = time.monotonic() + START_S
        while True:
            try:
                urllib.request.urlopen(f"http://{HOST}:{port}/health").close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit("the server did not start") from None
                time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait(20)


async def _load(port: int, asks: list[Ask], concurrency: int | None) -> list[Times]:
    """Every request at its time, or `concurrency` of them at any time."""
    start_s = time.monotonic() + 0.2
    if concurrency is None:
        return list(await asyncio.gather(*(_ask(port, ask, start_s + ask.arrival_s) for ask in asks)))
    waiting = iter(asks)

    async def client() -> list[Times]:
        return [await _ask(port, ask, 0.0) for ask in waiting]

    return [times for one in await asyncio.gather(*(client() for _ in range(concurrency))) for times in one]


async def _ask(port: int, ask: Ask, at_s: float) -> Times:
    prompt = [1 + i % 90 for i in range(ask.prompt_len)]
    body = {"prompt": prompt, "max_tokens": ask.output_len, "ignore_eos": True, "stream": True}
    data = json.dumps({"model": "demo", **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    await asyncio.sleep(max(0.0, at_s - time.monotonic()))
    sent_s = time.monotonic()
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(head.encode() + data)
    first_s, last_s, tail = 0.0, 0.0, b""
    while chunk := await reader.read(65536):
        now = time.monotonic()
        if b"data: {" in tail + chunk:
            first_s, last_s = first_s or now, now
        tail = (tail + chunk)[-16:]
    writer.close()
    if not first_s or b"[DONE]" not in tail:
        raise SystemExit(f"a request failed: {tail!r}")
    return Times(sent_s, first_s, last_s, ask.output_len)


# ---------------------------------------------------------------- both


def main() -> int:
    """A table: each figure on virtual time, in real time (median of the rounds), and the difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=CASES, help="one case; all when not given")
    parser.add_argument("--json", type=Path, help="write the rows there too")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder, asks = Path(name), draw(NUM_REQUESTS)
        trace = folder / "trace.jsonl"
        lines = [{"arrival_s": a.arrival_s, "prompt_len": a.prompt_len, "output_len": a.output_len} for a in asks]
        trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
        for case in [options.only] if options.only else CASES:
            scenario = scenario_of(case, trace)
            virtual = simulated(scenario)
            rounds = [served(scenario, asks, folder) for _ in range(options.rounds)]
            rows += [_row(case, figure, virtual.get(figure), rounds) for figure in rounds[0]]
    if options.json:
        machine = {"cores": os.cpu_count(), "python": sys.version.split()[0], "date": date.today().isoformat()}
        report = {"machine": machine, "load_average": os.getloadavg()[0], "base": BASE, "cases": CASES, "rows": rows}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def _row(case: str, figure: str, virtual: float | None, rounds: list[dict[str, float]]) -> dict[str, Any]:
    real = [each[figure] for each in rounds]
    middle = float(np.median(real))
    change = None if virtual is None else middle / virtual - 1
    shown = "" if virtual is None else f"{virtual:12.2f}"
    print(
        f"{case:<24}{figure:<18}{shown:>12}{middle:12.2f}" + ("" if change is None else f"{change:+9.1%}"), flush=True
    )
    row = {"case": case, "figure": figure, "simulated": virtual, "served": middle, "change": change}
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()} | {
        "rounds": [round(value, 4) for value in real]
    }


if __name__ == "__main__":
    sys.exit(main())
