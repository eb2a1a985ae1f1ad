"""Simulated against measured: the per-request times of real vLLM runs, replayed by the simulator.

    python benchmarks/accuracy.py TRACES [--markdown FILE]
    python benchmarks/accuracy.py TRACES --run measured_vllm_X --tables steptime_X --layers 64 [--num-pages N]

A run is RUN.requests.jsonl.gz (queued_ts, first_token_ts, last_token_ts in seconds, input_toks, output_toks) and
RUN.meta.json.gz (engine_kwargs, and the KV pages if known), tables are the CSV files that `cost.tables` takes. Settings
come from the run; nothing is fitted to it. Both kinds of file: github.com/casys-kaist/LLMServingSim, MIT licence.

What a step costs beside its kernels: 126 us, 32.1 us for each layer and 4.42 us for each request in it, as BLIS, a
simulator under Apache-2.0, publishes for vLLM.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from equipoise.sim.run import Results, simulate
from equipoise.sim.scenario import make_scenario

STEP_OVERHEAD_MS, LAYER_OVERHEAD_MS, ROW_OVERHEAD_US = 0.126, 0.0321, 4.42
AMPLE_PAGES = 100_000
"""Where a run does not tell, KV had room for every seat: 96 GB hold 16 GB of weights and 128 requests easily."""
HEADER = """# Simulated against measured

Real vLLM 0.19 runs of 300 requests (10 a second, ShareGPT lengths), replayed from tables of measured layer times.
Written by `python benchmarks/accuracy.py TRACES --markdown FILE`, which tells where settings and overheads come from.
Nothing is fitted to the runs.

"""
STATISTICS = ("mean", "p50", "p90")


class Case(NamedTuple):
    """A measured run and the tables to replay it with."""

    run: str
    tables: str
    num_layers: int
    num_pages: int | None = None
    experts: tuple[int, int] = (0, 0)


SHIPPED = (
    Case("measured_vllm_RTX4090_Llama-3.1-8B", "steptime_RTX4090_Llama-3.1-8B_tp1", 32),
    Case("measured_vllm_RTXPRO6000_Llama-3.1-8B", "steptime_RTXPRO6000_Llama-3.1-8B_tp1", 32),
)


class Row(NamedTuple):
    """One statistic of one case."""

    run: str
    name: str
    measured: float
    simulated: float

    @property
    def error(self) -> float:
        """Relative, signed."""
        return self.simulated / self.measured - 1


def main() -> int:
    """Print a table; 1 when an error is 10% or more."""
    options = _options()
    traces: Path = options.traces
    cases = SHIPPED
    if options.run:
        experts = (options.num_experts, options.experts_per_token)
        cases = (Case(options.run, options.tables, options.layers, options.num_pages, experts),)
    rows = [row for case in cases for row in compare(case, traces)]
    text = markdown(rows)
    print(text)
    if options.markdown:
        options.markdown.write_text(HEADER + text + "\n", encoding="utf-8")
    return int(max(abs(row.error) for row in rows) >= 0.1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, help="folder of the runs and tables")
    parser.add_argument("--run", help="beginning of a run's file names")
    parser.add_argument("--tables", help="beginning of the tables' file names")
    parser.add_argument("--layers", type=int, help="transformer layers of the model")
    parser.add_argument("--num-pages", type=int, help="KV pages, when the run does not tell")
    parser.add_argument("--num-experts", type=int, default=0, help="experts of a layer")
    parser.add_argument("--experts-per-token", type=int, default=0, help="experts that a token visits")
    parser.add_argument("--markdown", type=Path, help="write the table there too")
    options = parser.parse_args()
    if options.run and not (options.tables and options.layers):
        parser.error("--run needs --tables and --layers")
    return options


def compare(case: Case, traces: Path) -> list[Row]:
    """Replay a run; what was measured beside what was simulated."""
    with gzip.open(traces / f"{case.run}.requests.jsonl.gz", "rt") as file:
        requests = sorted((json.loads(line) for line in file), key=lambda request: request["queued_ts"])
    with gzip.open(traces / f"{case.run}.meta.json.gz", "rt") as file:
        meta = json.load(file)
    measured = _measured(requests)
    simulated = _times(_replay(case, requests, meta, traces))
    return [
        Row(case.run, f"{name} {part}", _statistic(measured[name], part), _statistic(simulated[name], part))
        for name in measured
        for part in STATISTICS
    ]


def _replay(case: Case, requests: list[dict[str, Any]], meta: dict[str, Any], traces: Path) -> Results:
    engine, kv = meta["engine_kwargs"], meta.get("kv_cache") or {}
    table = {
        "workload": {"kind": "file", "path": "requests.csv"},
        "fleet": {"max_model_len": engine["max_model_len"] or 131072},
        "scheduler": {
            "max_running": engine["max_num_seqs"],
            "max_step_tokens": engine["max_num_batched_tokens"],
            "depth": 1,  # vLLM's asynchronous scheduling is on by default
        },
        "cache": {
            "page_size": kv.get("block_size", 16),
            "num_pages": case.num_pages or kv.get("num_gpu_blocks") or AMPLE_PAGES,
            "prefix_cache": True,  # what prompts share is not told, but who was preempted finds pages of its own
        },
        "cost": {
            "model": "table",
            "tables": str((traces / case.tables).absolute()),
            "num_layers": case.num_layers,
            "overhead_ms": STEP_OVERHEAD_MS + LAYER_OVERHEAD_MS * case.num_layers,
            "row_overhead_us": ROW_OVERHEAD_US,
            "num_experts": case.experts[0],
            "experts_per_token": case.experts[1],
        },
    }
    with tempfile.TemporaryDirectory() as folder:
        with (Path(folder) / "requests.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(("arrival_s", "input_tokens", "output_tokens"))
            for request in requests:
                writer.writerow((repr(request["queued_ts"]), request["input_toks"], request["output_toks"]))
        return simulate(make_scenario(table), folder=Path(folder))


def _measured(requests: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    columns = {name: np.array([request[name] for request in requests]) for name in requests[0] if name != "request_id"}
    return _spans(columns["queued_ts"], columns["first_token_ts"], columns["last_token_ts"], columns["output_toks"])


def _times(results: Results) -> dict[str, np.ndarray]:
    columns = results.requests.columns()
    return _spans(columns["arrival_s"], columns["first_s"], columns["last_s"], columns["output_len"])


def _spans(queued: np.ndarray, first: np.ndarray, last: np.ndarray, num_output: np.ndarray) -> dict[str, np.ndarray]:
    """Milliseconds of those that were served."""
    long = num_output > 1
    tpot = (last - first)[long] / (num_output[long] - 1)
    return {"TTFT": (first - queued)[~np.isnan(first)] * 1e3, "TPOT": tpot[~np.isnan(tpot)] * 1e3}


def _statistic(values: np.ndarray, part: str) -> float:
    return float(values.mean() if part == "mean" else np.percentile(values, int(part[1:])))


def markdown(rows: list[Row]) -> str:
    """The rows as a table."""
    lines = ["| run | | measured, ms | simulated, ms | error |", "|---|---|---|---|---|"]
    for row in rows:
        run = row.run.removeprefix("measured_")
        lines.append(f"| {run} | {row.name} | {row.measured:,.1f} | {row.simulated:,.1f} | {row.error:+.1%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
