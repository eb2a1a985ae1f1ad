"""The two sides of `step_cost.py`: our scheduler behind the contract of a peer's adapter, and the loader of that peer.

The contract (`Side`) is that of the adapters which scheduler micro-benchmarks of other engines use, so that
either side can be driven by either benchmark: `Cfg` and the methods keep the peer's names for that reason.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from equipoise.clock import WallClock
from equipoise.config import CacheConfig, SchedulerConfig
from equipoise.exec.protocol import ExecutorInfo, StepOutput
from equipoise.request import Request, SamplingParams
from equipoise.sched.assemble import build_scheduler
from equipoise.sched.extend import Extension
from equipoise.sched.resources import LoraSlots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from equipoise.sched.plan import StepPlan, StepResult
    from equipoise.sched.scheduler import Scheduler

MAX_WAITING_REQS = 100_000


@dataclass(frozen=True)
class Cfg:
    """What a case asks of a scheduler, in the names of the contract. Blocks are pages."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    num_blocks: int = 100_000
    block_size: int = 16
    max_model_len: int = 4096
    prefix_caching: bool = True
    async_sched: bool = False
    policy: str = "fcfs"
    max_loras: int = 0


class Side(Protocol):
    """A scheduler under measurement. Only `schedule` and `update` are timed, and where a case says so the arrivals."""

    name: str

    def new_request(self, rid: str, prompt: list[int], max_tokens: int, priority: int = 0, lora_id: int = 0) -> Any: ...
    def add(self, request: Any) -> None: ...
    def schedule(self) -> Any: ...
    def note(self, plan: Any) -> Any:
        """What `fake_output` must remember of a plan."""

    def counts(self, plan: Any) -> dict[Any, int]:
        """Tokens planned per request."""

    def fake_output(self, plan: Any, note: Any, token: int) -> Any:
        """The model's answer to a plan: `token` for every row that draws one."""

    def update(self, plan: Any, output: Any) -> Any: ...
    def finished(self, result: Any) -> Sequence[Any]: ...
    def num_waiting(self) -> int: ...


class Adapter:
    """Our scheduler."""

    name = "equipoise"

    def __init__(self, cfg: Any) -> None:
        """`cfg`: a `Cfg`, or the like of it from a peer's benchmark."""
        info = ExecutorInfo("bench", 50_000, cfg.max_model_len, cfg.block_size, cfg.num_blocks, (), "cpu", "float32")
        self.scheduler = build_scheduler(
            SchedulerConfig(
                max_running=cfg.max_num_seqs,
                max_step_tokens=cfg.max_num_batched_tokens,
                order=cfg.policy,
                depth=int(cfg.async_sched),
                max_waiting_reqs=MAX_WAITING_REQS,
            ),
            CacheConfig(page_size=cfg.block_size, prefix_cache=cfg.prefix_caching),
            info,
            WallClock(),
            Extension(resources=[LoraSlots(cfg.max_loras)] if cfg.max_loras else []),
        )
        self._max_model_len = self.scheduler.max_model_len
        self._num_requests = 0

    def new_request(self, rid: str, prompt: list[int], max_tokens: int, priority: int = 0, lora_id: int = 0) -> Request:
        self._num_requests += 1
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        return Request(
            self._num_requests,
            rid,
            np.array(prompt, np.int32),
            params,
            max_model_len=self._max_model_len,
            arrival_s=float(self._num_requests),
            priority=priority,
            lora=f"l{lora_id}" if lora_id else None,
        )

    def add(self, request: Request) -> None:
        self.scheduler.add(request)

    def schedule(self) -> StepPlan:
        return self.scheduler.schedule()

    def note(self, plan: StepPlan) -> None:
        return None

    def counts(self, plan: StepPlan) -> dict[int, int]:
        rows = {int(handle): 1 for handle in self.scheduler.columns.handle[plan.decode_seats]}
        return rows | {row.request.handle: row.n for row in plan.prefills}

    def fake_output(self, plan: StepPlan, note: None, token: int) -> StepOutput:
        return StepOutput(np.full(len(plan.sampled_seats), token, np.int32))

    def update(self, plan: StepPlan, output: StepOutput) -> StepResult | None:
        # An empty plan is not submitted, and nothing comes back of it.
        return None if plan.is_empty else self.scheduler.apply(plan, output)

    def finished(self, result: StepResult | None) -> list[str]:
        return [] if result is None else [request.request_id for request in result.finished]

    def num_running(self) -> int:
        return self.scheduler.load().num_running

    def num_waiting(self) -> int:
        return self.scheduler.load().num_waiting

    def payload(self, plan: StepPlan) -> int:
        """Bytes serialised for a worker process: none, the executor reads the same columns."""
        return 0


@contextlib.contextmanager
def count_lookups(scheduler: Scheduler) -> Iterator[list[bytes]]:
    """The list gets every page key that is looked up in the prefix index meanwhile."""
    looked_up: list[bytes] = []

    class Watched(dict[bytes, int]):
        def get(self, key: bytes, default: Any = None) -> Any:
            looked_up.append(key)
            return super().get(key, default)

    index = scheduler.kv._index
    index._page_of = Watched(index._page_of)
    yield looked_up
    index._page_of = dict(index._page_of)


def load_peer(path: Path, adapter: str) -> Callable[[Cfg], Side]:
    """The peer's adapter class from its benchmark file, made to take our `Cfg`."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"--peer-bench: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return lambda cfg: getattr(module, adapter)(module.Cfg(**asdict(cfg)))
