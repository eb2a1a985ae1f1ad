"""CPU cost of one scheduler step (schedule + apply), alone or beside another scheduler in one interleaved run.

    python benchmarks/step_cost.py [--only TEXT] [--json FILE]
    python benchmarks/step_cost.py --peer-python VENV/bin/python --peer-bench sched_bench.py [--peer-adapter CLASS]

With a peer the benchmark starts itself under the peer's interpreter (which needs numpy and msgspec) and drives
both schedulers with the same requests, in windows that alternate: A B A B. Source the peer's environment first.
CPU microseconds of this thread per step; the two clock readings of a step (0.4 us each) are counted in. The first
steps of a window fill the caches after the other side's and do not count. Minimum and median of the windows.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(ROOT.parent / "src")]

from step_cases import CASES, Drive, blocked_head, decode  # noqa: E402
from step_pages import OurPages, PageBench, PeerPages  # noqa: E402
from step_sides import Adapter, Cfg, count_lookups, load_peer  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from step_cases import Case
    from step_sides import Side

    MakeSide = Callable[[Cfg], Side]
    Result = dict[str, Any]

SEED = 1
WARM_STEPS = 5
PAGES = "pages"
LOOKUPS = "look-ups"
PAGE_CALLS = 25
PAGE_SIDES = {"equipoise": OurPages, "peer": PeerPages}
PAGE_BARS = {"new request and its keys": 3, "allocate 64": 4, "look up 63 hits": 4, "free 64": 4}
SCALE = ((256, 65_536), (1024, 262_144), (4096, 1_048_576))


def main() -> None:
    args = _parse()
    if args.peer_python is not None:
        raise SystemExit(_run_under(args.peer_python))
    sides: dict[str, MakeSide] = {"equipoise": Adapter}
    if args.peer_bench is not None:
        sides["peer"] = load_peer(args.peer_bench, args.peer_adapter)
    print(json.dumps(_machine(args)))
    results = []
    for result in _all(sides, args):
        results.append(result)
        print(_line(result), flush=True)
    if args.json is not None:
        report = {"machine": _machine(args), "unit": "CPU us", "results": results}
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=12, help="windows per case and side (default 12)")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains TEXT")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--peer-python", metavar="FILE", help="interpreter that can import the peer")
    parser.add_argument("--peer-bench", type=Path, metavar="FILE", help="Python file with the peer's adapter")
    parser.add_argument("--peer-adapter", default="VLLMAdapter", metavar="CLASS", help="its name (VLLMAdapter)")
    return parser.parse_args()


def _run_under(python: str) -> int:
    """This same command under another interpreter."""
    rest = [arg for arg in sys.argv[1:] if not arg.startswith("--peer-python=")]
    if "--peer-python" in rest:
        at = rest.index("--peer-python")
        del rest[at : at + 2]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([python, __file__, *rest], env=env, check=False).returncode


def _all(sides: dict[str, MakeSide], args: argparse.Namespace) -> Iterator[Result]:
    for case in CASES:
        if args.only in case.name:
            yield _measure(case, sides, args.windows)
    if args.only in PAGES:
        yield from _measure_pages(sides, args.windows)
    if args.only in LOOKUPS:
        yield _count_lookups()
    for num_seats, num_pages in SCALE:
        if args.only in f"scale {num_seats}":
            yield _measure_scale(num_seats, num_pages, args.windows)


def _measure(case: Case, sides: dict[str, MakeSide], num_windows: int) -> Result:
    """Fill every side with the same requests, then run windows of each in turn."""
    drives = {}
    for name, make in sides.items():
        drives[name] = Drive(make(case.cfg), int(case.cfg.async_sched), SEED)
        case.fill(drives[name])
    windows: dict[str, list[float]] = {name: [] for name in sides}
    rows: dict[str, list[float]] = {name: [] for name in sides}
    arrivals: dict[str, int] = {}
    for name, drive in drives.items():
        drive.arrival_ns, arrivals[name] = 0, drive.num_added
    with _no_gc():
        for _ in range(num_windows):
            for name, drive in drives.items():
                drive.run(WARM_STEPS)
                steps = [drive.step() for _ in range(case.num_steps)]
                windows[name].append(sum(ns for ns, _ in steps) / len(steps) / 1000)
                rows[name].append(sum(len(counts) for _, counts in steps) / len(steps))
    result: Result = {"case": case.name, "windows": num_windows, "steps": case.num_steps}
    for name, drive in drives.items():
        result[name] = _summary(windows[name]) | {
            "rows": round(statistics.fmean(rows[name]), 1),
            "waiting": drive.side.num_waiting(),
        }
        if num_arrived := drive.num_added - arrivals[name]:
            result[name]["arrivals"] = num_arrived
            result[name]["arrival_us"] = round(drive.arrival_ns / num_arrived / 1000, 1)
    return _with_ratio(result, case.bar, case.aim)


def _measure_pages(sides: dict[str, MakeSide], num_windows: int) -> Iterator[Result]:
    """Page operations of every side, in windows that alternate; one result per operation."""
    made = {name: make(Cfg()) for name, make in sides.items()}
    benches = {name: PageBench(PAGE_SIDES[name](side), SEED) for name, side in made.items()}
    windows: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    with _no_gc():
        for _ in range(num_windows):
            for name, bench in benches.items():
                windows[name].append(bench.window(PAGE_CALLS))
    for operation, bar in PAGE_BARS.items():
        result: Result = {"case": f"{PAGES}: {operation}", "windows": num_windows, "calls": PAGE_CALLS}
        result |= {name: _summary([window[operation] for window in windows[name]]) for name in sides}
        yield _with_ratio(result, bar)


@contextlib.contextmanager
def _no_gc() -> Iterator[None]:
    """What exists now is out of the collector's sight, and it does not run."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def _count_lookups() -> Result:
    """Page keys that our scheduler looks up per step while the head of the queue does not fit."""
    case = blocked_head()
    drive = Drive(Adapter(case.cfg), 0, SEED)
    case.fill(drive)
    drive.run(WARM_STEPS)
    with count_lookups(drive.side.scheduler) as lookups:
        drive.run(case.num_steps)
    return {"case": f"{LOOKUPS} a step, {case.name}", "steps": case.num_steps, "lookups": len(lookups) / case.num_steps}


def _measure_scale(num_seats: int, num_pages: int, num_windows: int) -> Result:
    """A full rank decodes: our cost and memory as seats and pages grow together."""
    case = decode(num_seats, 0, 0, 0)
    case = replace(case, cfg=replace(case.cfg, num_blocks=num_pages))
    tracemalloc.start()
    Adapter(case.cfg)
    peak_mib = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    result = _measure(case, {"equipoise": Adapter}, num_windows)
    result["equipoise"]["built_mib"] = round(peak_mib, 1)
    return result | {"case": f"scale {num_seats} seats, {num_pages} pages, all decode"}


def _summary(windows: list[float]) -> Result:
    return {"min": round(min(windows), 1), "median": round(statistics.median(windows), 1)}


def _with_ratio(result: Result, bar: float | None = None, aim: float | None = None) -> Result:
    if "peer" in result:
        result |= {
            f"ratio_{key}": round(result["peer"][key] / result["equipoise"][key], 1) for key in ("min", "median")
        }
        result |= {"bar": bar, "aim": aim}
    return result


def _line(result: Result) -> str:
    parts = [f"{result['case']:55s}"]
    if "lookups" in result:
        return f"{parts[0]} {result['lookups']:g}"
    for name in ("equipoise", "peer"):
        if name in result:
            side = result[name]
            parts.append(f"{name} {side['min']:9.1f} min {side['median']:9.1f} median us")
    if "ratio_min" in result:
        bar = "" if result["bar"] is None else f" (bar {result['bar']}, aim {result['aim']})"
        parts.append(f"{result['ratio_min']:6.1f}x {result['ratio_median']:6.1f}x{bar}")
    ours = result["equipoise"]
    parts += [f"{key} {ours[key]}" for key in ("rows", "waiting", "arrival_us", "built_mib") if key in ours]
    return "  ".join(parts)


def _machine(args: argparse.Namespace) -> Result:
    cpu = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), "unknown")
    versions = {"python": platform.python_version()}
    for name in ("numpy", "vllm") if args.peer_bench else ("numpy",):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "?"
    return {"cpu": cpu, "cores": os.cpu_count(), "system": platform.platform(), "versions": versions}


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


if __name__ == "__main__":
    main()
