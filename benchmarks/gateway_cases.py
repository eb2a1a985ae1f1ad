"""What benchmarks/gateway.py measures: each case runs every side in turn, round after round."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gateway_bodies import bodies
from gateway_load import HOST, PATH, Processes
from gateway_sides import DIRECT, HERE, OURS, OURS_CACHE_AWARE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gateway_sides import Bench, Gateway, Workers

SPARE_DESCRIPTORS = 200
Figures = dict[str, Any]
Rounds = dict[str, list[Figures]]


@dataclass(frozen=True)
class Effort:
    """How long and how often each side is measured."""

    rounds: int
    seconds: float
    num_workers: int
    max_streams: int
    use_wrk: bool = True


@dataclass(frozen=True)
class Case:
    """One row of the table: which sides, and how one side is measured once."""

    name: str
    title: str
    run: Callable[[Bench, list[str], Effort], Rounds]


def closed(
    bench: Bench, gateway: Gateway, effort: Effort, *, prompt_bytes: int, num_prompts: int, connections: int
) -> Figures:
    """A closed loop of whole answers, driven by wrk where it may be used and is installed, else by our own client."""
    if effort.use_wrk and shutil.which("wrk"):
        return _wrk(bench, gateway, effort.seconds, bodies(prompt_bytes, num_prompts, 16, is_stream=False), connections)
    flags = ["--prompt-bytes", prompt_bytes, "--num-prompts", num_prompts, "--num-connections", connections]
    return load(bench, gateway, "closed", "--seconds", effort.seconds, *flags)


def load(bench: Bench, gateway: Gateway, mode: str, *flags: object) -> Figures:
    """Run our client to its end; it shares the workers' core, or has the gateway's when there is no gateway."""
    command = [sys.executable, str(HERE / "gateway_load.py"), mode, "--port", str(gateway.port), *map(str, flags)]
    if gateway.pid is not None:
        command += ["--process", str(gateway.pid)]
    return _last_line(_run(bench, gateway, command))


def _last_line(output: str) -> Figures:
    figures: Figures = json.loads(output.splitlines()[-1])
    return figures


def _run(bench: Bench, gateway: Gateway, command: list[str]) -> str:
    core = bench.cores.gateway if gateway.name == DIRECT else bench.cores.rest
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, preexec_fn=lambda: os.sched_setaffinity(0, {core})
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return done.stdout


def _wrk(bench: Bench, gateway: Gateway, seconds: float, contents: list[bytes], connections: int) -> Figures:
    script = bench.folder / "requests.lua"
    script.write_text(_lua(contents), encoding="utf-8")
    url = f"http://{HOST}:{gateway.port}{PATH}"
    command = ["wrk", "-t1", f"-c{connections}", "-s", str(script), "--latency", url]
    _run(bench, gateway, [*command, "-d1s"])
    processes = Processes(gateway.pid) if gateway.pid else None
    cpu_s = processes.cpu_s() if processes else 0.0
    output = _run(bench, gateway, [*command, f"-d{seconds:g}s"])
    figures = _wrk_figures(output)
    if processes:
        cpu_s = processes.cpu_s() - cpu_s
        figures["us_per_request"] = cpu_s * 1e6 / figures["num_requests"]
        figures["busy"] = cpu_s / seconds
        figures["rss_mb"] = processes.rss_bytes() / 1e6
    return figures


def _lua(contents: list[bytes]) -> str:
    """A wrk script that sends the requests in turn; bodies here have no sequence that ends a long Lua string."""
    texts = ",\n".join(f"[==[{content.decode()}]==]" for content in contents)
    return f"""wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
local bodies = {{ {texts} }}
local made, turn = {{}}, 0
function init()
  for i, body in ipairs(bodies) do made[i] = wrk.format(nil, nil, nil, body) end
end
function request()
  turn = turn % #made + 1
  return made[turn]
end
"""


def _wrk_figures(output: str) -> Figures:
    def number(pattern: str) -> float:
        found = re.search(pattern, output)
        return float(found[1]) if found else 0.0

    def milliseconds(percent: str) -> float:
        found = re.search(rf"{percent}%\s+([\d.]+)(us|ms|s)\b", output)
        return float(found[1]) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[found[2]] if found else 0.0

    socket_errors = re.search(r"Socket errors: connect (\d+), read (\d+), write (\d+), timeout (\d+)", output)
    return {
        "requests_per_s": number(r"Requests/sec:\s+([\d.]+)"),
        "num_requests": max(number(r"(\d+) requests in"), 1),
        "latency_p50_ms": milliseconds("50"),
        "latency_p99_ms": milliseconds("99"),
        "num_bad": int(number(r"Non-2xx or 3xx responses: (\d+)")),
        "num_lost": sum(map(int, socket_errors.groups())) if socket_errors else 0,
    }


@contextlib.contextmanager
def _all(bench: Bench, names: list[str], workers: Workers, policies: dict[str, str]) -> Iterator[list[Gateway]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(bench.gateway(name, workers, policies.get(name))) for name in names]


def _interleaved(
    bench: Bench,
    names: list[str],
    effort: Effort,
    measure: Callable[[Gateway], Figures],
    policies: dict[str, str] | None = None,
    *,
    is_split: bool = False,
) -> Rounds:
    """All sides run at once, one at a time is loaded: A B C A B C."""
    rounds: Rounds = {name: [] for name in names}
    with (
        bench.workers(effort.num_workers, is_split=is_split) as workers,
        _all(bench, names, workers, policies or {}) as gateways,
    ):
        for _ in range(effort.rounds):
            for gateway in gateways:
                rounds[gateway.name].append(measure(gateway))
                tell(gateway.name, rounds[gateway.name][-1])
    return rounds


def tell(name: str, figures: Figures) -> None:
    shown = ", ".join(f"{key} {value:,.6g}" for key, value in figures.items() if value)
    print(f"    {name}: {shown}", file=sys.stderr, flush=True)


def small(bench: Bench, names: list[str], effort: Effort) -> Rounds:
    return _interleaved(
        bench, names, effort, lambda side: closed(bench, side, effort, prompt_bytes=24, num_prompts=1, connections=64)
    )


def _long(num_prompts: int) -> Callable[[Bench, list[str], Effort], Rounds]:
    def run(bench: Bench, names: list[str], effort: Effort) -> Rounds:
        policies = {name: "prefix_tokens" if name == OURS else "cache_aware" for name in names}
        if OURS in names:
            names = [*names[: names.index(OURS) + 1], OURS_CACHE_AWARE, *names[names.index(OURS) + 1 :]]
            policies[OURS_CACHE_AWARE] = "cache_aware"

        def measure(side: Gateway) -> Figures:
            return closed(bench, side, effort, prompt_bytes=65_536, num_prompts=num_prompts, connections=32)

        return _interleaved(bench, names, effort, measure, policies)

    return run


def streams(bench: Bench, names: list[str], effort: Effort) -> Rounds:
    return _interleaved(bench, names, effort, lambda side: _streams(bench, side, effort))


def _streams(bench: Bench, side: Gateway, effort: Effort) -> Figures:
    return load(bench, side, "streams", "--seconds", effort.seconds, "--num-connections", 256, "--num-tokens", 64)


def latency(bench: Bench, names: list[str], effort: Effort) -> Rounds:
    """What a side adds: its median less the median of direct requests in the same round."""

    def measure(side: Gateway) -> Figures:
        return load(bench, side, "rate", "--seconds", effort.seconds, "--num-connections", 32, "--per-s", 400)

    rounds = _interleaved(bench, names, effort, measure)
    for name in names:
        for mine, direct in zip(rounds[name], rounds.get(DIRECT, []), strict=False):
            mine["added_p50_ms"] = mine["latency_p50_ms"] - direct["latency_p50_ms"]
    return rounds


def _concurrent(num_asked: int) -> Callable[[Bench, list[str], Effort], Rounds]:
    """Streams that are all open at once: a token at the start, then one each `interval_ms`, as big models give them."""

    def run(bench: Bench, names: list[str], effort: Effort) -> Rounds:
        num_streams = min(num_asked, effort.max_streams, _most_streams())
        interval_ms = max(200.0, num_streams / 5)
        per_s = min(2000, max(500, num_streams / 4))
        num_tokens = int(num_streams / per_s / interval_ms * 1e3) + 10
        flags = ["--num-connections", num_streams, "--num-tokens", num_tokens, "--per-s", per_s]
        flags += ["--hold-s", num_tokens * interval_ms / 1e3]
        rounds: Rounds = {name: [] for name in names}
        for _ in range(max(1, effort.rounds // 2)):
            for name in names:
                with (
                    bench.workers(effort.num_workers, interval_ms) as workers,
                    bench.gateway(name, workers) as side,
                ):
                    if side.pid is not None:
                        load(bench, side, "closed", "--seconds", 0.5, "--warm-s", 0.2)
                    rounds[name].append(load(bench, side, "hold", *flags))
                    rounds[name][-1]["num_asked"] = num_streams
                    tell(name, rounds[name][-1])
        return rounds

    return run


def _most_streams() -> int:
    """A gateway needs two descriptors for each stream."""
    return (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_DESCRIPTORS) // 2


def start(bench: Bench, names: list[str], effort: Effort) -> Rounds:
    """From exec to the first connection taken and to the first request answered; memory then, and after a load."""
    names = [name for name in names if name != DIRECT]
    rounds: Rounds = {name: [] for name in names}
    with bench.workers(effort.num_workers) as workers:
        for _ in range(effort.rounds):
            for name in names:
                with bench.gateway(name, workers) as side:
                    assert side.pid is not None
                    idle_mb = Processes(side.pid).rss_bytes() / 1e6
                    loaded = closed(bench, side, effort, prompt_bytes=24, num_prompts=1, connections=64)
                figures = {"listening_s": side.listening_s, "answering_s": side.answering_s}
                rounds[name].append({**figures, "idle_mb": idle_mb, "rss_mb": loaded["rss_mb"]})
                tell(name, rounds[name][-1])
    return rounds


def split(bench: Bench, names: list[str], effort: Effort) -> Rounds:
    """Prefill and decode workers with four ranks each, tokens per rank on where a side has them."""
    names = [name for name in names if name not in (DIRECT, "vllm-router")]

    def measure(side: Gateway) -> Figures:
        whole = closed(bench, side, effort, prompt_bytes=24, num_prompts=1, connections=64)
        streamed = _streams(bench, side, effort)
        kept = ("tokens_per_s", "us_per_token", "first_p50_ms", "relay_p50_ms", "num_short")
        lost = {key: whole.get(key, 0) + streamed.get(key, 0) for key in ("num_bad", "num_lost")}
        return {**whole, **{key: streamed[key] for key in kept if key in streamed}, **lost}

    return _interleaved(bench, names, effort, measure, is_split=True)


CASES = (
    Case("small", "small requests, 64 connections", small),
    Case("long", "64 KB prompts, one prompt, 32 connections", _long(1)),
    Case("long_mixed", "64 KB prompts, 32 of them in 4 groups with a common half, 32 connections", _long(32)),
    Case("streams", "256 streams of 64 tokens, one each 10 ms", streams),
    Case("latency", "400 requests/s, open loop", latency),
    Case("streams_1k", "1,000 streams at once", _concurrent(1000)),
    Case("streams_10k", "10,000 streams at once", _concurrent(10_000)),
    Case("start", "start-up and resident memory", start),
    Case("split", "prefill and decode apart: small requests, then streams", split),
)
