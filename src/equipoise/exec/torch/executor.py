"""The torch executor: one worker thread computes steps in order while the loop plans the next one."""

from __future__ import annotations

import logging
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from equipoise.errors import InvariantError
from equipoise.exec.protocol import ExecutorInfo, NothingToDo
from equipoise.exec.torch.batch import gather_batch, prompt_spans
from equipoise.exec.torch.grammar import Grammars
from equipoise.exec.torch.models.load import load_model
from equipoise.exec.torch.native import choose_ops
from equipoise.exec.torch.pages import count_pages, make_pages
from equipoise.exec.torch.runner import Runner
from equipoise.exec.torch.sampler import Sampler
from equipoise.machine import num_cores

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Future

    import numpy as np
    from numpy.typing import NDArray

    from equipoise.config import CacheConfig, ModelConfig, SchedulerConfig
    from equipoise.exec.protocol import StepOutput
    from equipoise.exec.torch.models.load import LoadedModel
    from equipoise.exec.torch.runner import Launched
    from equipoise.request import Request
    from equipoise.sched.columns import Columns
    from equipoise.sched.plan import StepPlan

logger = logging.getLogger(__name__)

ALONE = {"cpu": 1, "cuda": 1}


class TorchStep:
    """A step under way. `handles`: (num_sampled,), whose token each row is."""

    __slots__ = ("_handles", "_launch")

    def __init__(self, launch: Future[Launched], handles: NDArray[np.int64]) -> None:
        self._launch = launch
        self._handles = handles

    def done(self) -> bool:
        """True when `result` would not wait."""
        return self._launch.done() and (self._launch.exception() is not None or self._launch.result().done())

    def result(self) -> StepOutput:
        """Wait for the step. Raises what the step raised."""
        output = self._launch.result().wait()
        if output.failed:
            output.failed = {int(self._handles[row]): reason for row, reason in output.failed.items()}
        return output


class TorchExecutor:
    """An Executor that computes a model with torch.

    The worker thread owns everything on the device; the loop's thread copies a plan's inputs out of the
    columns and hands them over. On a GPU the worker only launches, so it runs ahead of the device."""

    def __init__(self, loaded: LoadedModel, info: ExecutorInfo, grammars: Grammars, num_threads: int) -> None:
        self._info = info
        self._loaded = loaded
        self._grammars = grammars
        self._columns: Columns | None = None
        self._runner: Runner | None = None
        self._sampler: Sampler | None = None
        self._reported: dict[int, int] = {}
        self._forgetting: deque[Future[None]] = deque()
        self._worker = ThreadPoolExecutor(1, "equipoise-torch", _use_threads, (num_threads,))

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    def bind(self, columns: Columns) -> None:
        """Make the seats' device state. Raises InvariantError when called twice."""
        if self._columns is not None:
            raise InvariantError("the executor is bound already")
        self._columns = columns
        device = self._loaded.device
        self._sampler = Sampler(columns.num_seats, self._info.vocab_size, device, self._grammars)
        self._runner = Runner(self._loaded.model, self._sampler, columns.num_seats, device)

    def prepare(self, request: Request) -> Future[None] | None:
        """Start compiling its grammar, if it has one that is not compiled yet."""
        return self._grammars.prepare(request)

    def submit(self, plan: StepPlan) -> TorchStep:
        """Start a step that is not empty; what it needs of the columns is copied before this returns."""
        if self._columns is None or self._runner is None:
            raise InvariantError("a plan was submitted before the columns were bound")
        while self._forgetting and self._forgetting[0].done():
            self._forgetting.popleft().result()
        spans = prompt_spans(self._columns, plan, self._reported)
        batch = gather_batch(self._columns, plan, self._loaded.device, spans)
        return TorchStep(self._worker.submit(self._runner.run, batch), plan.sampled_handles)

    def submit_idle(self) -> NothingToDo:
        """Its steps have no collectives: the others can do without it."""
        return NothingToDo()

    def forget(self, request: Request) -> None:
        """In step order: steps under way may still draw for the request's seat."""
        self._reported.pop(request.handle, None)
        if self._sampler is not None:
            self._forgetting.append(self._worker.submit(self._sampler.forget, request))

    def close(self) -> None:
        """Wait for the step under way, drop those behind it, and free the device; idempotent."""
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._runner = self._sampler = None
        self._grammars.close()


def build_torch_executor(
    model: ModelConfig, cache: CacheConfig, scheduler: SchedulerConfig, sharers: Mapping[str, int] = ALONE
) -> TorchExecutor:
    """Load the model and make its pages. Raises CheckpointError and ConfigError, each one line.

    `sharers`: by type of device, how many processes share its memory, this one counted."""
    num_threads = model.num_threads or num_cores()
    torch.set_num_threads(num_threads)
    loaded = load_model(model)
    shapes = loaded.model.kv_shapes
    # a request may end in the middle of a page
    most_tokens = scheduler.max_running * (loaded.max_model_len + cache.page_size)
    num_sharers = sharers[loaded.device.type]
    num_pages, page_bytes = count_pages(shapes, cache, most_tokens, loaded.dtype, loaded.device, num_sharers)
    pages = make_pages(shapes, num_pages, cache.page_size, loaded.dtype, loaded.device)
    ops = choose_ops(loaded.device, loaded.dtype, shapes, num_threads)
    loaded.model.bind(pages, ops)
    info = ExecutorInfo(
        model_type=loaded.model_type,
        vocab_size=loaded.vocab_size,
        max_model_len=loaded.max_model_len,
        page_size=cache.page_size,
        num_pages=num_pages,
        eos_ids=loaded.eos_ids,
        device=str(loaded.device),
        dtype=str(loaded.dtype).removeprefix("torch."),
    )
    logger.info(
        "%s in %s on %s with %s and %d threads; %d KV pages of %d tokens, %.2f GiB; at most %d tokens a request",
        *(info.model_type, info.dtype, info.device, type(ops).__name__, num_threads),
        *(num_pages, info.page_size, num_pages * page_bytes / 2**30, info.max_model_len),
    )
    grammars = Grammars(Path(model.tokenizer or model.model), info.vocab_size, info.eos_ids)
    return TorchExecutor(loaded, info, grammars, num_threads)


def _use_threads(num_threads: int) -> None:
    """OpenMP keeps the number per thread."""
    torch.set_num_threads(num_threads)
