"""benchmarks/accuracy.py on a run and tables of its own, as it will be given others."""

from __future__ import annotations

import csv
import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "accuracy.py"
LAYERS = 10


def write_table(folder: Path, name: str, columns: list[str], rows: list[tuple[Any, ...]]) -> None:
    with (folder / f"tables_{name}.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([columns, *rows])


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """A step takes 10 layers of 1,000 us and the overhead of one request: 0.126 + 0.321 + 0.00442 ms."""
    write_table(tmp_path, "dense", ["layer", "tokens", "time_us"], [("mlp", 1, 1000), ("mlp", 4096, 1000)])
    write_table(tmp_path, "per_sequence", ["layer", "sequences", "time_us"], [("head", 1, 0), ("head", 64, 0)])
    axes = ["prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"]
    write_table(tmp_path, "attention", axes, [(0, 0, 1, 1, 0), (0, 0, 64, 4096, 0), (4096, 0, 0, 0, 0)])
    meta = {"engine_kwargs": {"max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": None}}
    with gzip.open(tmp_path / "run.meta.json.gz", "wt") as file:
        json.dump(meta, file)
    return tmp_path


def replay(traces: Path, step_s: float, *words: str) -> subprocess.CompletedProcess[str]:
    """A run whose requests, each alone, took `step_s` for each of their five tokens."""
    with gzip.open(traces / "run.requests.jsonl.gz", "wt") as file:
        for number in reversed(range(4)):
            queued = 1000.0 + number
            times = {"queued_ts": queued, "first_token_ts": queued + step_s, "last_token_ts": queued + 5 * step_s}
            file.write(json.dumps({"request_id": f"r{number}", "input_toks": 100, "output_toks": 5, **times}) + "\n")
    command = [sys.executable, str(SCRIPT), str(traces), "--run", "run", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_run_that_took_what_the_tables_say_has_no_error(traces: Path) -> None:
    done = replay(traces, 0.010 + 0.00045142, "--tables", "tables", "--layers", str(LAYERS))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[2].startswith("| run | TTFT mean | 10.5 | 10.5 | ")
    assert len(lines) == 2 + 2 * 3
    assert all(line.endswith(("+0.0% |", "-0.0% |")) for line in lines[2:])


def test_an_error_of_a_tenth_is_told_by_the_exit_code(traces: Path) -> None:
    done = replay(traces, 0.0118, "--tables", "tables", "--layers", str(LAYERS), "--markdown", str(traces / "a.md"))
    assert done.returncode == 1
    assert "| run | TPOT p90 | 11.8 | 10.5 | -11.4% |" in done.stdout
    assert (traces / "a.md").read_text(encoding="utf-8").endswith(done.stdout)


def test_a_run_needs_tables(traces: Path) -> None:
    done = replay(traces, 0.01)
    assert done.returncode == 2
    assert "--run needs --tables and --layers" in done.stderr
