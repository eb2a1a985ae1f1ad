"""The cases of `step_cost.py`: what is queued before the measurement, and what arrives during it."""

from __future__ import annotations

import random
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from step_sides import Cfg

if TYPE_CHECKING:
    from collections.abc import Callable

    from step_sides import Side

ENDLESS = 100_000
"""More output than any case runs for; the model's length ends a request first, and is chosen longer."""
MAX_FILL_STEPS = 20_000
VOCAB_SIZE = 50_000

clock_ns = time.thread_time_ns
"""CPU time of this thread: other processes on the machine do not count."""


class Drive:
    """One side under way: the plans outstanding, the arrivals, and the CPU time of the last step."""

    def __init__(self, side: Side, depth: int, seed: int) -> None:
        self.side = side
        self.on_finish: Callable[[], None] = lambda: None
        self.rng = random.Random(seed)
        self.num_added = 0
        self.arrival_ns = 0
        self._depth = depth
        self._outstanding: deque[tuple[Any, Any]] = deque()
        self._token = 7

    def add(self, prompt: list[int], max_tokens: int, priority: int = 0, lora_id: int = 0) -> None:
        """Build and queue a request; its CPU time goes to `arrival_ns`."""
        self.num_added += 1
        start = clock_ns()
        self.side.add(self.side.new_request(f"r{self.num_added}", prompt, max_tokens, priority, lora_id))
        self.arrival_ns += clock_ns() - start

    def step(self) -> tuple[int, dict[Any, int]]:
        """One turn of the engine's loop: (CPU ns of schedule and apply, tokens planned per request)."""
        side = self.side
        start = clock_ns()
        plan = side.schedule()
        spent = clock_ns() - start
        counts = side.counts(plan)
        self._outstanding.append((plan, side.note(plan)))
        if len(self._outstanding) <= self._depth:
            return spent, counts
        plan, note = self._outstanding.popleft()
        self._token = (self._token * 48271 + 11) % VOCAB_SIZE
        output = side.fake_output(plan, note, self._token)
        start = clock_ns()
        result = side.update(plan, output)
        spent += clock_ns() - start
        for _ in side.finished(result):
            self.on_finish()
        return spent, counts

    def prompt(self, num_tokens: int, shared: list[int] | None = None) -> list[int]:
        """A random prompt of `num_tokens`, that begins with `shared`."""
        head = shared or []
        return head + [self.rng.randrange(VOCAB_SIZE) for _ in range(num_tokens - len(head))]

    def run_until_all_decode(self, num_requests: int) -> None:
        """Step until every one of `num_requests` decodes."""
        for _ in range(MAX_FILL_STEPS):
            _, counts = self.step()
            if len(counts) == num_requests and all(n == 1 for n in counts.values()):
                return
        raise SystemExit(f"{self.side.name}: {num_requests} requests never decode together")

    def run(self, num_steps: int) -> None:
        """Step without measuring."""
        for _ in range(num_steps):
            self.step()


@dataclass(frozen=True)
class Case:
    """A named workload. `bar` and `aim`: how many times cheaper than the peer it must, and should, be."""

    name: str
    cfg: Cfg
    fill: Callable[[Drive], None]
    bar: float | None = None
    aim: float | None = None
    num_steps: int = 25


def decode(n: int, depth: int, bar: float, aim: float) -> Case:
    """`n` requests of 512 prompt tokens decode; nobody comes or goes."""

    def fill(drive: Drive) -> None:
        for _ in range(n):
            drive.add(drive.prompt(512), ENDLESS)
        drive.run_until_all_decode(n)

    num_pages = n * (512 + 1024) // 16 + 4096
    cfg = Cfg(max_num_seqs=n, num_blocks=num_pages, async_sched=depth > 0)
    return Case(f"decode {n}, depth {depth}", cfg, fill, bar, aim)


def mixed(depth: int, shared_len: int, bar: float | None = None, aim: float | None = None) -> Case:
    """256 requests of 1,024 tokens in a closed loop, 64 to 192 outputs each; `shared_len` tokens are a prefix hit."""
    n, prompt_len, output_len, budget = 256, 1024, 128, 8192

    def fill(drive: Drive) -> None:
        shared = drive.prompt(shared_len)

        def arrive() -> None:
            num_outputs = int(output_len * (0.5 + drive.rng.random()))
            drive.add(drive.prompt(prompt_len, shared), num_outputs, drive.num_added % 3)

        for _ in range(n):
            arrive()
        drive.on_finish = arrive
        drive.run(n * prompt_len // budget + 2 * output_len)

    num_pages = n * (prompt_len + output_len + 64) // 16 + 8192
    cfg = Cfg(max_num_seqs=n, num_blocks=num_pages, max_num_batched_tokens=budget, async_sched=depth > 0)
    return Case(f"mixed 256, budget 8192, {shared_len} of 1024 hit, depth {depth}", cfg, fill, bar, aim)


def queued(policy: str, *, by_lora: bool, bar: float | None = None, num_waiting: int = 2000) -> Case:
    """64 decode while `num_waiting` wait: for a seat, or, with seats enough, for the LoRA cap."""
    num_running = 64
    seats = num_running + (num_waiting if by_lora else 0)

    def fill(drive: Drive) -> None:
        for _ in range(num_running):
            drive.add(drive.prompt(256), ENDLESS, lora_id=int(by_lora))
        drive.run_until_all_decode(num_running)
        for i in range(num_waiting):
            drive.add(drive.prompt(64), 16, i % 5, 2 * by_lora)

    cfg = Cfg(seats, max(8192, seats), 60_000, policy=policy, max_loras=int(by_lora))
    what = "blocked by LoRA" if by_lora else "queued"
    return Case(f"64 running + {num_waiting} {what}, {policy}", cfg, fill, bar)


def blocked_head() -> Case:
    """64 decode; the head of the queue hits a cached prefix of 32k tokens, but its other 7,000 do not fit."""
    prefix_len, num_running = 32_768, 64

    def fill(drive: Drive) -> None:
        shared = drive.prompt(prefix_len)
        drive.add([*shared, 1], ENDLESS)
        for _ in range(num_running):
            drive.add(drive.prompt(256), ENDLESS)
        drive.run_until_all_decode(num_running + 1)
        drive.add(drive.prompt(prefix_len + 7000, shared), 16)
        for _ in range(20):
            drive.add(drive.prompt(32), 16)

    num_pages = prefix_len // 16 + num_running * 17 + 425
    return Case(
        "blocked head, 32k cached", Cfg(num_blocks=num_pages, max_model_len=prefix_len + 8192), fill, num_steps=7
    )


def pressure(depth: int, policy: str = "fcfs") -> Case:
    """256 requests want 1,024 tokens each, and the pages hold 60% of that: preemption and re-admission go on."""
    n, prompt_len, output_len = 256, 512, 512

    def fill(drive: Drive) -> None:
        def arrive() -> None:
            drive.add(drive.prompt(prompt_len), output_len, drive.num_added % 4)

        for _ in range(n):
            arrive()
        drive.on_finish = arrive
        drive.run(500)

    num_pages = int(n * (prompt_len + output_len) / 16 * 0.6)
    cfg = Cfg(n, 2048, num_pages, async_sched=depth > 0, policy=policy)
    return Case(f"KV pressure 256, {policy}, depth {depth}", cfg, fill)


CASES = [
    *(decode(n, depth, bar, aim) for n, bar, aim in ((16, 10, 15), (64, 15, 40), (256, 25, 100), (1024, 40, 200))
      for depth in (0, 1)),
    mixed(0, 0, 8, 15),
    mixed(0, 768, 8, 15),
    mixed(1, 768, 8, 15),
    queued("fcfs", by_lora=False, bar=10),
    queued("priority", by_lora=False, bar=10),
    queued("fcfs", by_lora=True, bar=100),
    queued("priority", by_lora=True, bar=100),
    blocked_head(),
    pressure(0),
    pressure(1),
    pressure(0, "priority"),
]  # fmt: skip
"""Every case that compares schedule and apply; each is run in windows that alternate between the sides."""
