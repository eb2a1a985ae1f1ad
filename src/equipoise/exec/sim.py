"""The sim executor: takes the time that a cost model says and draws seeded tokens. No weights, no torch.

The token at position p of a request is a pure function of its key and p, whatever batch, seat or
preemption: key = hash(sim seed, the request's own seed if it has one, else its prompt).
"""

from __future__ import annotations

import math
import time
from concurrent.futures import Future
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec
import numpy as np

from equipoise.clock import VirtualClock
from equipoise.errors import ConfigError, InvalidValueError
from equipoise.exec.cost import StepLoad, load_of, step_s
from equipoise.exec.protocol import ExecutorInfo, StepOutput, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from equipoise.clock import Clock
    from equipoise.config.engine import EngineConfig
    from equipoise.exec.cost import CostModel
    from equipoise.request import Request
    from equipoise.sched.columns import Columns
    from equipoise.sched.plan import StepPlan

BYTES_PER_KEY = 8
NO_TOKENS = np.empty(0, np.int32)


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


class StepPart(NamedTuple):
    """One rank's part of a step of its group. begins_s: when it could begin; own_s: what it pays by itself."""

    begins_s: float
    own_s: float
    has_rows: float
    has_prefill: float


class Parts(Protocol):
    """The parts of a step under way."""

    def done(self) -> bool:
        """Would `wait` return at once?"""
        ...

    def wait(self) -> Sequence[StepPart]:
        """One for each rank that takes part, the same on all of them."""
        ...


class GroupClock(Protocol):
    """How simulated ranks in lockstep agree when a step ends; real ones meet inside it, in their collectives."""

    def begin(self, part: StepPart) -> Parts:
        """This rank's part of the group's next step. All ranks of the group call it equally often."""
        ...


class SimExecutor:
    """Runs plans in no time but the cost model's: a step ends at max(now, end of the step before) + cost(plan).

    On a WallClock `result` sleeps until then; on a VirtualClock it moves the clock there. With a `group` a step costs
    what all its ranks pay together and the most that one of them pays by itself.
    """

    def __init__(
        self,
        info: ExecutorInfo,
        cost: CostModel,
        clock: Clock,
        *,
        seed: int = 0,
        hidden_ids: tuple[int, ...] = (),
        group: GroupClock | None = None,
    ) -> None:
        """Raises ConfigError when `hidden_ids` leave nothing to draw."""
        self._info = info
        self._cost = cost
        self._clock = clock
        self._seed = seed
        self._group = group
        self._last: SimStep | GroupStep = SimStep(StepOutput(tokens=NO_TOKENS), clock, -math.inf)
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

    def submit(self, plan: StepPlan) -> SimStep | GroupStep:
        """Start a step that is not empty."""
        for request in plan.seated:
            self._sit(request)
        tokens = self._draw(self._keys[plan.sampled_seats], plan.sampled_at)
        output = StepOutput(tokens=tokens)
        if self._with_logprobs:
            self._add_logprobs(plan, output)
        return self._start(output, load_of(plan))

    def submit_idle(self) -> SimStep | GroupStep:
        """Take part in the group's step; by itself, a step without rows takes no time."""
        return self._start(StepOutput(tokens=NO_TOKENS), StepLoad())

    def _start(self, output: StepOutput, load: StepLoad) -> SimStep | GroupStep:
        now = self._clock.now()
        if self._group is not None:
            has_rows = load.prefill_tokens + load.decode_rows > 0
            part = StepPart(now, self._cost.rank_s(load), has_rows, load.prefill_tokens > 0)
            self._last = GroupStep(output, self._clock, self._cost, part, self._group.begin(part), self._last)
        else:
            self._last = SimStep(output, self._clock, max(now, self._last.ends_at()) + step_s(self._cost, load))
        return self._last

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

    def ends_at(self) -> float:
        """When, on the clock."""
        return self._ends_at

    def done(self) -> bool:
        return self._clock.now() >= self._ends_at

    def result(self) -> StepOutput:
        _sleep_until(self._ends_at, self._clock)
        return self._output


class GroupStep:
    """A rank's part in a step that ends when the group's slowest rank has done its own."""

    def __init__(
        self,
        output: StepOutput,
        clock: Clock,
        cost: CostModel,
        part: StepPart,
        parts: Parts,
        before: SimStep | GroupStep,
    ) -> None:
        self._output = output
        self._clock = clock
        self._cost = cost
        self._part = part
        self._parts = parts
        self._before: SimStep | GroupStep | None = before
        self._ends_at = -math.inf

    def ends_at(self) -> float:
        """When, on the clock; waits until every rank has said what it pays. All ranks find the same."""
        if self._before is not None:
            parts, free_at = self._parts.wait(), self._before.ends_at()
            self._before = None
            self._ends_at = max(free_at, max(part.begins_s for part in parts))
            if any(part.has_rows for part in parts):
                slowest_s = max(part.own_s for part in parts)
                shared_s = self._cost.shared_s(any_prefill=any(part.has_prefill for part in parts))
                self._ends_at += shared_s + slowest_s
                if self._part.has_rows:
                    self._output.wait_s = slowest_s - self._part.own_s
        return self._ends_at

    def done(self) -> bool:
        return (self._before is None or self._parts.done()) and self._clock.now() >= self.ends_at()

    def result(self) -> StepOutput:
        _sleep_until(self.ends_at(), self._clock)
        return self._output


def _sleep_until(ends_at: float, clock: Clock) -> None:
    left = ends_at - clock.now()
    if left > 0:
        if isinstance(clock, VirtualClock):
            clock.advance(left)
        else:
            time.sleep(left)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64 bits that scatters neighbours: the finalizer of SplitMix64 (Steele, Lea, Flood 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
