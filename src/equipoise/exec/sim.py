"""The sim executor: takes the time that a cost model says and draws seeded tokens. No weights, no torch.

The token at position p of a request is a pure function of its key and p, whatever batch, seat or
preemption: key = hash(sim seed, the request's own seed if it has one, else its prompt).
"""

from __future__ import annotations

import math
import time
from concurrent.futures import Future
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from equipoise.clock import VirtualClock
from equipoise.errors import ConfigError, InvalidValueError
from equipoise.exec.cost import load_of, step_s
from equipoise.exec.protocol import ExecutorInfo, StepOutput, TokenLogprobs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from equipoise.clock import Clock
    from equipoise.config.engine import EngineConfig
    from equipoise.exec.cost import CostModel
    from equipoise.request import Request
    from equipoise.sched.columns import Columns
    from equipoise.sched.plan import StepPlan

BYTES_PER_KEY = 8


class SimVocabulary(msgspec.Struct, frozen=True):
    """What a sim executor must know of a tokenizer. `hidden_ids` (EOS and other special ids) are never drawn."""

    size: int
    eos_ids: tuple[int, ...] = ()
    hidden_ids: tuple[int, ...] = ()


def sim_info(config: EngineConfig, vocabulary: SimVocabulary | None = None) -> ExecutorInfo:
    """What a sim executor with these settings can serve."""
    return ExecutorInfo(
        model_type="sim",
        vocab_size=config.sim.sim_vocab_size if vocabulary is None else vocabulary.size,
        max_model_len=config.model.max_model_len or config.sim.sim_max_model_len,
        page_size=config.cache.page_size,
        num_pages=config.cache.num_pages or config.sim.sim_num_pages,
        eos_ids=() if vocabulary is None else vocabulary.eos_ids,
        device="sim",
        dtype="none",
    )


class SimExecutor:
    """Runs plans in no time but the cost model's: a step ends at max(now, end of the step before) + cost(plan).

    On a WallClock `result` sleeps until then; on a VirtualClock it moves the clock there.
    """

    def __init__(
        self,
        info: ExecutorInfo,
        cost: CostModel,
        clock: Clock,
        *,
        seed: int = 0,
        hidden_ids: tuple[int, ...] = (),
    ) -> None:
        """Raises ConfigError when `hidden_ids` leave nothing to draw."""
        self._info = info
        self._cost = cost
        self._clock = clock
        self._seed = seed
        self._free_at = -math.inf
        drawable = np.setdiff1d(np.arange(info.vocab_size, dtype=np.int32), np.array(hidden_ids, np.int32))
        if len(drawable) == 0:
            raise ConfigError(f"the vocabulary of {info.vocab_size} tokens holds special tokens only: none to draw")
        self._drawable = drawable
        self._keys: NDArray[np.uint64] = np.empty(0, np.uint64)  # by seat
        self._with_logprobs: dict[int, int] = {}  # handle -> alternatives wanted

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    def bind(self, columns: Columns) -> None:
        """Takes the number of seats alone; tokens do not depend on what the columns hold."""
        self._keys = np.zeros(columns.num_seats, np.uint64)

    def prepare(self, request: Request) -> Future[None] | None:
        """Refuses grammars: random tokens satisfy none."""
        if request.params.grammar is None:
            return None
        refused: Future[None] = Future()
        refused.set_exception(
            InvalidValueError("grammar: the sim executor draws random tokens and cannot follow a grammar", "grammar")
        )
        return refused

    def submit(self, plan: StepPlan) -> SimStep:
        """Start a step that is not empty."""
        for request in plan.seated:
            self._sit(request)
        tokens = self._draw(self._keys[plan.sampled_seats], plan.sampled_at)
        output = StepOutput(tokens=tokens)
        if self._with_logprobs:
            self._add_logprobs(plan, output)
        self._free_at = max(self._clock.now(), self._free_at) + step_s(self._cost, load_of(plan))
        return SimStep(output, self._clock, self._free_at)

    def forget(self, request: Request) -> None:
        self._with_logprobs.pop(request.handle, None)

    def close(self) -> None:
        self._with_logprobs.clear()

    def _sit(self, request: Request) -> None:
        assert request.seat is not None
        self._keys[request.seat] = self._key(request)
        params = request.params
        if params.logprobs is not None or params.prompt_logprobs is not None:
            self._with_logprobs[request.handle] = params.logprobs or 0

    def _key(self, request: Request) -> int:
        """64 bits that stand for the request's random stream."""
        params = request.params
        own = request.prompt_ids.tobytes() if params.seed is None else params.seed.to_bytes(8, "little", signed=True)
        salt = self._seed.to_bytes(8, "little", signed=True)
        return int.from_bytes(blake2b(own, digest_size=BYTES_PER_KEY, key=salt).digest(), "little")

    def _draw(self, keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.int32]:
        """keys, positions: (n,). Returns (n,) int32, uniform over the ids that may be drawn."""
        index = _mix(keys ^ _mix(positions.astype(np.uint64))) % np.uint64(len(self._drawable))
        return self._drawable[index.astype(np.int64)]

    def _add_logprobs(self, plan: StepPlan, output: StepOutput) -> None:
        for row, handle in enumerate(plan.sampled_handles.tolist()):
            if handle in self._with_logprobs:
                output.logprobs[row] = self._logprobs(int(output.tokens[row]), self._with_logprobs[handle])
        for prefill in plan.prefills:
            request = prefill.request
            if request.params.prompt_logprobs is not None:
                end = min(prefill.start + prefill.n, request.num_prompt)
                output.prompt_logprobs[request.handle] = [
                    self._logprobs(token, request.params.prompt_logprobs)
                    for token in request.prompt_ids[max(1, prefill.start) : end].tolist()
                ]

    def _logprobs(self, token: int, num_top: int) -> TokenLogprobs:
        """The token is always the most likely one, with half the mass; the i-th next has half of what is left."""
        size = self._info.vocab_size
        top = [(token + i) % size for i in range(min(num_top, size))]
        return TokenLogprobs(token, -math.log(2), 1, top, [-math.log(2) * (i + 1) for i in range(len(top))])


class SimStep:
    """A step that ends at `ends_at` on the clock."""

    __slots__ = ("_clock", "_ends_at", "_output")

    def __init__(self, output: StepOutput, clock: Clock, ends_at: float) -> None:
        self._output = output
        self._clock = clock
        self._ends_at = ends_at

    def done(self) -> bool:
        return self._clock.now() >= self._ends_at

    def result(self) -> StepOutput:
        left = self._ends_at - self._clock.now()
        if left > 0:
            if isinstance(self._clock, VirtualClock):
                self._clock.advance(left)
            else:
                time.sleep(left)
        return self._output


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64 bits that scatters neighbours: the finalizer of SplitMix64 (Steele, Lea, Flood 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
