"""Decode and prefill speed of the torch executor on a CPU, beside transformers' `generate` and `generate_batch`.

    python benchmarks/engine_cpu.py [--models tiny,100m] [--batches 1,8,32,128] [--threads 1] [--rounds 3]

Random Llamas in float32, greedy, prompts of one length. Ours runs through the real scheduler at depth 1.
Decode: tokens per second after every prompt was prefilled. Prefill: prompt tokens per second up to
the first token of all. The sides take turns within a round; the median of the rounds counts, and
the ratio is the median of each round's ratio. `generate_batch` runs once: where its dense mask makes it
collapse, one run is long enough.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections import deque
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equipoise.exec.torch.executor import TorchStep
    from equipoise.sched.plan import StepPlan

RESULTS = Path(__file__).parent / "results"
SEED = 7
BATCH_PAGE, BATCH_TOKENS = 32, 2048
"""Page size and tokens a step of `generate_batch`."""


@dataclass(frozen=True)
class Shape:
    """A Llama, and the lengths it is measured with."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    prompt_len: int
    num_tokens: int


SHAPES = {
    "tiny": Shape(256, 768, 6, 4, 2, 8192, prompt_len=256, num_tokens=65),
    "100m": Shape(768, 2048, 12, 12, 4, 32000, prompt_len=64, num_tokens=33),
}


@dataclass(frozen=True)
class Stamp:
    """A moment: wall seconds, and CPU seconds of all threads of this process."""

    wall_s: float
    cpu_s: float

    @staticmethod
    def now() -> Stamp:
        return Stamp(time.perf_counter(), time.process_time())


@dataclass(frozen=True)
class Speed:
    """Tokens per second, and per CPU second: what a busy machine disturbs less."""

    decode: float
    prefill: float
    decode_per_cpu_s: float
    prefill_per_cpu_s: float


def speed_of(started: Stamp, prefilled: Stamp, ended: Stamp, num_prompt: int, num_decoded: int) -> Speed:
    return Speed(
        decode=num_decoded / max(ended.wall_s - prefilled.wall_s, 1e-9),
        prefill=num_prompt / (prefilled.wall_s - started.wall_s),
        decode_per_cpu_s=num_decoded / max(ended.cpu_s - prefilled.cpu_s, 1e-9),
        prefill_per_cpu_s=num_prompt / (prefilled.cpu_s - started.cpu_s),
    )


def make_model(shape: Shape, folder: Path) -> int:
    """Write a random Llama with tied embeddings; returns its number of parameters."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocab,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    torch.manual_seed(SEED)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return int(model.num_parameters())


def make_prompts(shape: Shape, batch: int) -> list[list[int]]:
    import numpy as np

    rng = np.random.default_rng(SEED)
    return rng.integers(3, shape.vocab, (batch, shape.prompt_len)).tolist()  # type: ignore[no-any-return]


class Ours:
    """The torch executor under the scheduler, as the engine loop drives it."""

    def __init__(self, folder: Path, shape: Shape, threads: int, page_size: int, max_running: int) -> None:
        from equipoise.clock import WallClock
        from equipoise.config import CacheConfig, ModelConfig, SchedulerConfig
        from equipoise.exec.torch.executor import build_torch_executor
        from equipoise.sched.assemble import build_scheduler

        settings = SchedulerConfig(max_running=max_running, depth=1)
        pages = max_running * (-(-(shape.prompt_len + shape.num_tokens) // page_size) + 1)
        cache = CacheConfig(page_size=page_size, num_pages=pages, prefix_cache=False)
        model = ModelConfig(model=str(folder), device="cpu", num_threads=threads)
        self._executor = build_torch_executor(model, cache, settings)
        self._scheduler = build_scheduler(settings, cache, self._executor.info, WallClock())
        self._executor.bind(self._scheduler.columns)
        self._num_tokens = shape.num_tokens
        self._next_handle = 0

    def run(self, prompts: list[list[int]]) -> Speed:
        self._add(prompts)
        scheduler, outstanding = self._scheduler, deque[tuple["StepPlan", "TorchStep"]]()
        started = Stamp.now()
        prefilled, num_decoded = started, 0
        while scheduler.has_work or outstanding:
            plan = scheduler.schedule()
            if not plan.is_empty:
                outstanding.append((plan, self._executor.submit(plan)))
            if outstanding and (len(outstanding) > 1 or plan.is_empty):
                done, step = outstanding.popleft()
                scheduler.apply(done, step.result())
                if done.prefills:
                    prefilled, num_decoded = Stamp.now(), 0
                else:
                    num_decoded += len(done.sampled_seats)
        return speed_of(started, prefilled, Stamp.now(), sum(map(len, prompts)), num_decoded)

    def _add(self, prompts: list[list[int]]) -> None:
        import numpy as np

        from equipoise.request import Request, SamplingParams

        params = SamplingParams(max_tokens=self._num_tokens, temperature=0.0, ignore_eos=True)
        for prompt in prompts:
            ids = np.array(prompt, np.int32)
            name = f"r{self._next_handle}"
            self._scheduler.add(Request(self._next_handle, name, ids, params, max_model_len=1024))
            self._next_handle += 1

    def close(self) -> None:
        self._executor.close()


class Theirs:
    """transformers: `generate` on the whole batch, or continuous batching."""

    def __init__(self, folder: Path, num_tokens: int) -> None:
        import torch
        import transformers

        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._model.generation_config.eos_token_id = None
        self._num_tokens = num_tokens

    def generate(self, prompts: list[list[int]]) -> Speed:
        import torch

        ids = torch.tensor(prompts)
        stamps: list[Stamp] = [Stamp.now()]

        def note(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            stamps.append(Stamp.now())
            return torch.zeros(len(tokens), dtype=torch.bool)

        made = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=self._num_tokens,
            do_sample=False,
            stopping_criteria=[note],
        )
        assert made.shape[1] == ids.shape[1] + self._num_tokens
        num_decoded = (self._num_tokens - 1) * len(prompts)
        return speed_of(stamps[0], stamps[1], stamps[-1], ids.numel(), num_decoded)

    def generate_batch(self, prompts: list[list[int]]) -> float:
        """Decode tokens per second, once every prompt has its first token. Its cache holds just these prompts."""
        from transformers import ContinuousBatchingConfig, GenerationConfig

        pages = len(prompts) * (-(-(len(prompts[0]) + self._num_tokens) // BATCH_PAGE) + 1)
        made = self._model.generate_batch(
            prompts,
            generation_config=GenerationConfig(
                max_new_tokens=self._num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=BATCH_PAGE, num_blocks=pages, max_batch_tokens=BATCH_TOKENS, use_cuda_graph=False
            ),
            record_timestamps=True,
        )
        stamps = [out.timestamps for out in made.values()]
        assert [len(times) for times in stamps] == [self._num_tokens] * len(prompts)
        prefilled = max(times[0] for times in stamps)
        ended = max(times[-1] for times in stamps)
        return sum(time > prefilled for times in stamps for time in times) / (ended - prefilled)


def measure(name: str, batches: list[int], options: argparse.Namespace) -> list[dict[str, object]]:
    shape, rows = SHAPES[name], []
    with tempfile.TemporaryDirectory() as folder:
        num_parameters = make_model(shape, Path(folder))
        ours = Ours(Path(folder), shape, options.threads, options.page_size, max(batches))
        theirs = Theirs(Path(folder), shape.num_tokens)
        ours.run(make_prompts(shape, 1))
        theirs.generate(make_prompts(shape, 1))
        for batch in batches:
            row = _measure_batch(ours, theirs, make_prompts(shape, batch), options)
            rows.append({"model": name, "num_parameters": num_parameters, **asdict(shape), "batch": batch, **row})
            print(_line(rows[-1]), flush=True)
        ours.close()
    return rows


def _measure_batch(
    ours: Ours, theirs: Theirs, prompts: list[list[int]], options: argparse.Namespace
) -> dict[str, object]:
    sides: dict[str, list[Speed]] = {"ours": [], "generate": []}
    for _ in range(options.rounds):
        sides["ours"].append(ours.run(prompts))
        sides["generate"].append(theirs.generate(prompts))
        gc.collect()
    row: dict[str, object] = {"rounds": options.rounds}
    for kind in (field.name for field in fields(Speed)):
        speeds = {side: [getattr(speed, kind) for speed in found] for side, found in sides.items()}
        row[kind] = {side: round(statistics.median(values), 1) for side, values in speeds.items()}
        ratios = [a / b for a, b in zip(speeds["ours"], speeds["generate"], strict=True)]
        row[f"{kind}_ratio"] = round(statistics.median(ratios), 2)
    if not options.skip_generate_batch:
        decode = theirs.generate_batch(prompts)
        row["decode_generate_batch"] = round(decode, 1)
        row["decode_generate_batch_ratio"] = round(
            statistics.median(speed.decode for speed in sides["ours"]) / decode, 2
        )
    return row


def _line(row: dict[str, object]) -> str:
    kinds = [field.name for field in fields(Speed)]
    parts = [f"{kind} {row[kind]} x{row[f'{kind}_ratio']}" for kind in kinds]
    batch = f"generate_batch {row.get('decode_generate_batch', '-')} x{row.get('decode_generate_batch_ratio', '-')}"
    return "  ".join((f"{row['model']:>5} batch {row['batch']:>3}", *parts, batch))


def machine(threads: int) -> dict[str, object]:
    import torch
    import transformers

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": threads,
        "load_average": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(SHAPES), help="of " + ", ".join(SHAPES))
    parser.add_argument("--batches", default="1,8,32,128", help="requests at once")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of either side")
    parser.add_argument("--rounds", type=int, default=3, help="the median of so many counts")
    parser.add_argument("--page-size", type=int, default=16, help="tokens of a KV page")
    parser.add_argument("--skip-generate-batch", action="store_true")
    parser.add_argument("--out", type=Path, help="JSON file of the results; results/engine_cpu.json when all is run")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse(sys.argv[1:])
    import torch
    import transformers

    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    found = machine(options.threads)
    print(json.dumps(found), "tokens/s", flush=True)
    batches = [int(batch) for batch in options.batches.split(",")]
    rows = [row for name in options.models.split(",") for row in measure(name, batches, options)]
    if options.out is not None:
        report = {"machine": found, "unit": "tokens/s", "page_size": options.page_size, "rows": rows}
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
