"""CPU seconds and memory of whole simulations, from the command line to the table.

    python benchmarks/simulator.py TRACES [--only mooncake_4,million] [--rounds 3] [--json FILE]

Each round is a process of its own; the least of all rounds counts, since other work on the machine only adds. Bars:
12,031 Mooncake requests on 4, 64 and 512 workers took the Rust AISimulate (ai-dynamo 1.3.1) 9.4, 28.8 and 340 CPU
seconds on 2 cores; a million requests on 64 ranks in lockstep are to take less than ten minutes and 4 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import NamedTuple

EXAMPLES = Path(__file__).parent.parent / "examples"
MOONCAKE = "mooncake_fast25_conversation.jsonl.gz"
ARXIV = "arxiv_summarization_lengths_llama2.csv.gz"
MB = 1024


class Case(NamedTuple):
    """What to simulate, and what is the most that it may take."""

    words: tuple[str, ...]
    max_cpu_s: float
    max_mb: float = 4096


def cases(traces: Path) -> dict[str, Case]:
    """All by name."""
    mooncake = ("--trace", str(traces / MOONCAKE))
    arxiv = ("--trace", str(traces / ARXIV), "--num-requests", "1000", "--rate", "2", "--set", "workload.kind=file")
    vllm_like = ("--set", "scheduler.max-step-tokens=512", "--max-running", "128")
    lockstep = ("--ranks", "64", "--lockstep", "--concurrency", "4096", "--num-requests", "1000000")
    lengths = ("prompt.mean=500", "prompt.spread=0.5", "output.mean=200", "output.spread=0.5")
    million = (*lockstep, *(word for each in lengths for word in ("--set", f"workload.{each}")))
    return {
        "mooncake_4": Case((str(EXAMPLES / "mooncake_4.yaml"), *mooncake), 9.4),
        "mooncake_64": Case((str(EXAMPLES / "mooncake_64.yaml"), *mooncake), 28.8),
        "mooncake_512": Case((str(EXAMPLES / "mooncake_512.yaml"), *mooncake), 60),
        "arxiv_1000": Case((*arxiv, *vllm_like), 20),
        "million": Case((*million, "--set", "cache.page-size=64"), 600),
    }


def main() -> int:
    """Print a row for each case; 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, help="folder of the traces")
    parser.add_argument("--only", help="cases, separated by commas; all but million when not given")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the rows there too")
    options = parser.parse_args()
    known = cases(options.traces.absolute())
    names = options.only.split(",") if options.only else [name for name in known if name != "million"]
    rows = [_row(name, known[name], options.rounds) for name in names]
    if options.json:
        machine = {"cores": os.cpu_count(), "python": sys.version.split()[0], "date": date.today().isoformat()}
        text = json.dumps({"machine": machine, "load_average": os.getloadavg()[0], "rows": rows}, indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")
    return int(any(row["cpu_s"] > row["max_cpu_s"] or row["peak_mb"] > row["max_mb"] for row in rows))


def _row(name: str, case: Case, rounds: int) -> dict[str, float]:
    found = [_run(case) for _ in range(rounds)]
    cpu_s, peak_mb = min(cpu_s for cpu_s, _ in found), min(peak_mb for _, peak_mb in found)
    every = ", ".join(f"{cpu_s:.1f}" for cpu_s, _ in found)
    print(f"{name:<14}{cpu_s:8.1f} CPU s (at most {case.max_cpu_s:g}; {every}){peak_mb:8,.0f} MB", flush=True)
    row = {"cpu_s": round(cpu_s, 2), "max_cpu_s": case.max_cpu_s, "peak_mb": round(peak_mb), "max_mb": case.max_mb}
    return {"case": name, **row}  # type: ignore[dict-item]


def _run(case: Case) -> tuple[float, float]:
    """CPU seconds and the most MB of one process."""
    command = [sys.executable, "-m", "equipoise", "simulate", *case.words, "--json"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / MB


if __name__ == "__main__":
    sys.exit(main())
