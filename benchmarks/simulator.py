"""CPU seconds and memory of whole simulations, from the command line to the table.

    python benchmarks/simulator.py TRACES [--only mooncake_4,million] [--rounds 3] [--out benchmarks/results]

Each round is a process of its own; the least of all rounds counts, since other work on the machine only adds. Bars:
12,031 Mooncake requests on 4, 64 and 512 workers took the Rust AISimulate (ai-dynamo 1.3.1) 9.4, 28.8 and 340 CPU
seconds on 2 cores; Vidur goes through about 50 requests a second; a million requests on 64 ranks in lockstep are to
take less than ten minutes and 4 GB. `--out` writes simulator.json, which keeps the cases of earlier runs, and its table
simulator.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

EXAMPLES = Path(__file__).parent.parent / "examples"
MOONCAKE = "mooncake_fast25_conversation.jsonl.gz"
ARXIV = "arxiv_summarization_lengths_llama2.csv.gz"
MB = 1024
STEPPED = """
import sys
from pathlib import Path
from equipoise.sim.run import simulate
from equipoise.sim.scenario import read_scenario
simulate(read_scenario(Path(sys.argv[1]), sys.argv[2:]), leaps=False)
"""
NOTES = """Seconds are CPU seconds of one process with its start (that of `nothing`), the least of the rounds: work
beside it, told by the load, adds to them. `balance_*` are 512 requests of 1,500 output tokens on 4 and 16 ranks in
lockstep, without a gate, with balance scheduling, and with rent or buy; `*_stepped` takes the same steps one by one."""


class Case(NamedTuple):
    """What to simulate, and what is the most that it may take."""

    words: tuple[str, ...]
    max_cpu_s: float | None = None
    max_mb: float = 4096
    is_stepped: bool = False

    @property
    def command(self) -> list[str]:
        """What to run."""
        if not self.is_stepped:
            return [sys.executable, "-m", "equipoise", "simulate", *self.words, "--json"]
        return [sys.executable, "-c", STEPPED, *(word for word in self.words if word != "--set")]


def cases(traces: Path) -> dict[str, Case]:
    """All by name."""
    mooncake = ("--trace", str(traces / MOONCAKE))
    arxiv = ("--trace", str(traces / ARXIV), "--num-requests", "1000", "--rate", "2", "--set", "workload.kind=file")
    vllm_like = ("--set", "scheduler.max-step-tokens=512", "--max-running", "128")
    lockstep = ("--ranks", "64", "--lockstep", "--concurrency", "4096", "--num-requests", "1000000")
    lengths = ("prompt.mean=500", "prompt.spread=0.5", "output.mean=200", "output.spread=0.5")
    million = (*lockstep, *(word for each in lengths for word in ("--set", f"workload.{each}")))
    found = {
        "nothing": Case((str(EXAMPLES / "balance_deepseek.yaml"), "--num-requests", "1")),
        "mooncake_4": Case((str(EXAMPLES / "mooncake_4.yaml"), *mooncake), 9.4),
        "mooncake_64": Case((str(EXAMPLES / "mooncake_64.yaml"), *mooncake), 28.8),
        "mooncake_512": Case((str(EXAMPLES / "mooncake_512.yaml"), *mooncake), 60),
        "arxiv_1000": Case((*arxiv, *vllm_like), 20),
        "million": Case((*million, "--set", "cache.page-size=64"), 600),
    }
    for ranks, seats in ((4, 32), (16, 8)):
        for name, gate in (("", "balance=false"), ("_gate", "balance=true"), ("_rent", "rent-or-buy=true")):
            changes = (f"fleet.ranks={ranks}", f"scheduler.max-running={seats}", f"scheduler.{gate}")
            words = tuple(word for change in changes for word in ("--set", change))
            case = Case((str(EXAMPLES / "balance_deepseek.yaml"), *words))
            found[f"balance_{ranks}{name}"] = case
            found[f"balance_{ranks}{name}_stepped"] = case._replace(is_stepped=True)
    return found


def main() -> int:
    """Print a row for each case; 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, help="folder of the traces")
    parser.add_argument("--only", help="cases, separated by commas; all but million when not given")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="folder for simulator.json and simulator.md")
    options = parser.parse_args()
    known = cases(options.traces.absolute())
    names = options.only.split(",") if options.only else [name for name in known if name != "million"]
    rows = {name: _row(name, known[name], options.rounds) for name in names}
    if options.out is not None:
        save(options.out, rows, list(known))
    return int(any(is_missed(row) for row in rows.values()))


def is_missed(row: dict[str, Any]) -> bool:
    """Is a bar missed?"""
    return row["peak_mb"] > row["max_mb"] or (row["max_cpu_s"] is not None and row["cpu_s"] > row["max_cpu_s"])


def save(folder: Path, rows: dict[str, dict[str, Any]], order: list[str]) -> None:
    """Write simulator.json, with cases of earlier runs that were not run again, and its table."""
    path = folder / "simulator.json"
    before = json.loads(path.read_text(encoding="utf-8"))["cases"] if path.exists() else {}
    merged = before | rows
    report = {
        "command": "python benchmarks/simulator.py TRACES --out benchmarks/results",
        "machine": machine(),
        "versions": {"python": platform.python_version(), "numpy": version("numpy")},
        "cases": {name: merged[name] for name in order if name in merged},
    }
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (folder / "simulator.md").write_text(page(report), encoding="utf-8")


def machine() -> str:
    """Cores, processor and system."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{os.cpu_count()} cores, {model}, {platform.system()} {platform.release()}"


def page(report: dict[str, Any]) -> str:
    """The results file."""
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    lines = ["| case | CPU s | at most | MB | rounds | load before | date |", "|---|---|---|---|---|---|---|"]
    for name, row in report["cases"].items():
        most = "" if row["max_cpu_s"] is None else f"{row['max_cpu_s']:g}"
        rounds = ", ".join(f"{cpu_s:.1f}" for cpu_s in row["rounds"])
        cells = (name, f"{row['cpu_s']:.2f}", most, f"{row['peak_mb']:,}", rounds, row["load_before"], row["date"])
        lines.append(f"| {' | '.join(map(str, cells))} |")
    head = f"# The simulator's own speed\n\nMachine: {report['machine']}. {versions}.\n\nCommand: `{report['command']}`"
    return f"{head}\n\n{NOTES}\n\n" + "\n".join(lines) + "\n"


def _row(name: str, case: Case, rounds: int) -> dict[str, Any]:
    load = os.getloadavg()[0]
    found = [_run(case) for _ in range(rounds)]
    cpu_s, peak_mb = min(cpu_s for cpu_s, _ in found), min(peak_mb for _, peak_mb in found)
    most = "" if case.max_cpu_s is None else f"at most {case.max_cpu_s:g}; "
    every = ", ".join(f"{cpu_s:.1f}" for cpu_s, _ in found)
    print(f"{name:<24}{cpu_s:8.2f} CPU s ({most}{every}){peak_mb:8,.0f} MB", flush=True)
    return {
        "cpu_s": round(cpu_s, 2),
        "max_cpu_s": case.max_cpu_s,
        "peak_mb": round(peak_mb),
        "max_mb": case.max_mb,
        "rounds": [round(cpu_s, 2) for cpu_s, _ in found],
        "load_before": round(load, 1),
        "date": date.today().isoformat(),
    }


def _run(case: Case) -> tuple[float, float]:
    """CPU seconds and the most MB of one process."""
    with subprocess.Popen(case.command, stdout=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(case.command)} ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / MB


if __name__ == "__main__":
    sys.exit(main())
