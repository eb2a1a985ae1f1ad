"""The gateway beside smg, sglang-router and vllm-router, interleaved in one run, a core for each gateway.

    python benchmarks/gateway.py [--only small,streams] [--quick] [--out benchmarks/results]
        [--smg PYTHON] [--sglang-router BIN] [--vllm-router BIN]

PYTHON is an interpreter that has the package `smg`, BIN a router's program; peers that are not named are left out.
The gateway has one core, workers and load another (`--cores`). Everything stays on the loopback. `wrk` drives the
closed loops where it is installed, else gateway_load.py does, which is slower: look at the column "of a core".
With --out the cases that were measured replace those in FOLDER/gateway.json, and FOLDER/gateway.md is written anew;
its sections after "## Notes" are kept. A whole run takes 25 minutes and wants an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(ROOT.parent / "src")]

from gateway_cases import CASES, Case, Effort  # noqa: E402
from gateway_report import as_text, bars_table, case_table, page  # noqa: E402
from gateway_sides import DIRECT, OURS, PEERS, Bench, Cores, Programs  # noqa: E402

NOTES = "## Notes"
FULL = Effort(rounds=5, seconds=4.0, num_workers=2, max_streams=10_000)
QUICK = Effort(rounds=1, seconds=0.5, num_workers=2, max_streams=100)


def main() -> None:
    args = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    programs = Programs(args.smg, args.sglang_router, args.vllm_router)
    names = [name for name in args.sides if name == DIRECT or programs.path(name)]
    given = {name: getattr(args, name) for name in ("rounds", "seconds", "num_workers", "max_streams")}
    given = {name: value for name, value in given.items() if value is not None}
    effort = replace(QUICK if args.quick else FULL, **given, use_wrk=args.wrk)
    with tempfile.TemporaryDirectory(prefix="gateway-") as folder:
        bench = Bench(Cores(*args.cores), programs, args.keep_logs or Path(folder))
        try:
            measured = {case.name: _measure(case, bench, names, effort) for case in args.only}
        finally:
            bench.stop_all()
    rounds = {name: case["rounds"] for name, case in measured.items()}
    print(as_text(bars_table(rounds)))
    if args.out is not None:
        _write(args.out, measured, programs)


def _measure(case: Case, bench: Bench, names: list[str], effort: Effort) -> dict[str, Any]:
    load_before = os.getloadavg()[0]
    print(f"{case.name}: {case.title}", file=sys.stderr, flush=True)
    measured = case.run(bench, names, effort)
    rounds = {name: [_rounded(figures) for figures in each] for name, each in measured.items()}
    print(f"{case.name}: {case.title}\n{as_text(case_table(case.name, rounds))}\n", flush=True)
    return {"title": case.title, "date": time.strftime("%Y-%m-%d"), "load_before": load_before, "rounds": rounds}


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.5g}") if isinstance(value, float) else value for name, value in figures.items()}


def _write(folder: Path, measured: dict[str, Any], programs: Programs) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    data, text = folder / "gateway.json", folder / "gateway.md"
    before = json.loads(data.read_text(encoding="utf-8"))["cases"] if data.exists() else {}
    cases = {**before, **measured}
    report = {
        "benchmark": "benchmarks/gateway.py",
        "command": _command(programs),
        "machine": machine(),
        "versions": versions(programs),
        "cases": {case.name: cases[case.name] for case in CASES if case.name in cases},
    }
    data.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    _, _, notes = text.read_text(encoding="utf-8").partition(NOTES) if text.exists() else ("", "", "")
    text.write_text(page(report, NOTES + notes if notes else ""), encoding="utf-8")
    print(f"written to {data} and {text}", file=sys.stderr)


def _command(programs: Programs) -> str:
    """The command with the peers' paths left out: they differ from machine to machine."""
    given = {f"--{name}": programs.path(name) for name in PEERS}
    shown = {path: "VENV/bin/" + Path(path).name for path in given.values() if path}
    return "python benchmarks/gateway.py " + shlex.join(shown.get(word, word) for word in sys.argv[1:])


def machine() -> str:
    model = subprocess.run(
        ["sh", "-c", "grep -m1 'model name' /proc/cpuinfo | cut -d: -f2"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return f"{os.cpu_count()} cores, {model or platform.processor()}, {platform.system()} {platform.release()}"


def versions(programs: Programs) -> dict[str, str]:
    """Versions of our parts and, asked of their own interpreters, of the peers."""
    found = {"python": platform.python_version()}
    found |= {name: metadata.version(name) for name in ("uvloop", "httptools", "msgspec")}
    for name in PEERS:
        if path := programs.path(name):
            python = Path(path).parent / "python"
            asked = [str(python), "-c", f"import importlib.metadata as m; print(m.version({name!r}))"]
            found[name] = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    if shutil.which("wrk"):
        said = subprocess.run(["wrk", "-v"], capture_output=True, text=True, check=False).stdout.split()
        found["wrk"] = said[1] if len(said) > 1 else "unknown"
    return found


def _cases(text: str) -> tuple[Case, ...]:
    by_name = {case.name: case for case in CASES}
    with contextlib.suppress(KeyError):
        return tuple(by_name[name] for name in text.split(","))
    raise argparse.ArgumentTypeError(f"{text!r}: cases are {', '.join(by_name)}")


def _sides(text: str) -> list[str]:
    names = text.split(",")
    known = (DIRECT, OURS, *PEERS)
    if not set(names) <= set(known):
        raise argparse.ArgumentTypeError(f"{text!r}: sides are {', '.join(known)}")
    return names


def _cores(text: str) -> tuple[int, int]:
    try:
        gateway, rest = map(int, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form 0,1") from None
    return gateway, rest


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=_cases, default=CASES, metavar="CASES", help="cases, with commas between")
    parser.add_argument("--sides", type=_sides, default=[DIRECT, OURS, *PEERS], help="of those, with commas between")
    parser.add_argument("--quick", action="store_true", help="one short round, few streams: does it run at all?")
    parser.add_argument("--rounds", type=int, help=f"how often each side is measured ({FULL.rounds})")
    parser.add_argument("--seconds", type=float, help=f"of each round and side ({FULL.seconds:g})")
    parser.add_argument("--num-workers", type=int, help=f"behind each gateway ({FULL.num_workers})")
    parser.add_argument("--max-streams", type=int, help=f"most streams at once ({FULL.max_streams})")
    parser.add_argument("--no-wrk", dest="wrk", action="store_false", help="drive closed loops with gateway_load.py")
    parser.add_argument("--cores", type=_cores, default=(0, 1), help="the gateway's and that of all else (0,1)")
    parser.add_argument("--smg", metavar="PYTHON", help="interpreter that has smg")
    parser.add_argument("--sglang-router", metavar="BIN", help="the program sglang-router")
    parser.add_argument("--vllm-router", metavar="BIN", help="the program vllm-router")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where gateway.json and gateway.md go")
    parser.add_argument("--keep-logs", type=Path, metavar="FOLDER", help="an existing folder for all that gateways say")
    return parser.parse_args()


if __name__ == "__main__":
    main()
