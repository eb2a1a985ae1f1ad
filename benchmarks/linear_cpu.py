"""Linear layers on a CPU: the C kernel beside torch, in microseconds of CPU time (one thread, float32).

    python benchmarks/linear_cpu.py [--out FILE]

Weights are cycled through more memory than the caches hold, as a model's layers are. The sides take turns;
the minimum of 3 rounds counts."""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path

import torch

from equipoise.exec.torch.native import NativeOps
from equipoise.exec.torch.torch_ops import torch_linear

SHAPES = ((1376, 256), (4096, 768), (768, 2048), (32000, 768))
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WEIGHT_FLOATS = 6 * 10**7
ROUNDS = 3


def measure(num_rows: int, size: int, num_tokens: int, ops: NativeOps) -> dict[str, float]:
    weights = [torch.randn(num_rows, size) for _ in range(max(1, WEIGHT_FLOATS // (num_rows * size)))]
    x = torch.randn(num_tokens, size)
    best = {"native_us": float("inf"), "torch_us": float("inf")}
    for _ in range(ROUNDS):
        for side, linear in (("native_us", ops.linear), ("torch_us", torch_linear)):
            started = time.thread_time()
            for weight in weights:
                linear(x, weight)
            best[side] = min(best[side], (time.thread_time() - started) / len(weights) * 1e6)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ops, rows = NativeOps(1), []
    for num_rows, size in SHAPES:
        for num_tokens in TOKENS:
            best = measure(num_rows, size, num_tokens, ops)
            ratio = best["torch_us"] / best["native_us"]
            print(f"({num_tokens}, {size}) x ({size}, {num_rows}): {best} x{ratio:.2f}", flush=True)
            rows.append({"tokens": num_tokens, "in": size, "out": num_rows, **best, "ratio": round(ratio, 2)})
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":", 1)[1].strip() for line in cpuinfo if line.startswith("model name")), "unknown")
    machine = {"cpu": cpu, "torch": torch.__version__, "python": platform.python_version(), "rounds": ROUNDS}
    if options.out is not None:
        options.out.write_text(
            json.dumps({"machine": machine, "unit": "CPU us, minimum", "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
