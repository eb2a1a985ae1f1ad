"""How long a step takes: the models of time behind the sim executor and the simulator.

A model splits a step's time in two: what every rank of a lockstep group pays together, and what each pays by itself.
Alone, a step takes the sum of both; in a group it takes the shared part and the largest of the ranks' own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from equipoise.sched.plan import StepPlan


class StepLoad(NamedTuple):
    """What one rank computes in a step.

    prefill_tokens: tokens of all chunks, those to verify among them
    prefill_pairs: (query, key) pairs that they attend to: a chunk [start, start + n) has n * start + n (n + 1) / 2
    kv_tokens: KV tokens that the decode rows read, their own included
    """

    prefill_tokens: int = 0
    prefill_pairs: int = 0
    num_chunks: int = 0
    decode_rows: int = 0
    kv_tokens: int = 0


def load_of(plan: StepPlan) -> StepLoad:
    """What `plan` computes. A decode at position p reads p + 1 KV tokens."""
    rows = len(plan.decode_seats)
    kv_tokens = int(plan.decode_starts.sum()) + rows if rows else 0
    if not plan.prefills:
        return StepLoad(decode_rows=rows, kv_tokens=kv_tokens)
    pairs = sum([row.n * row.start + row.n * (row.n + 1) // 2 for row in plan.prefills])
    return StepLoad(plan.num_prefill_tokens, pairs, len(plan.prefills), rows, kv_tokens)


class CostModel(Protocol):
    """Seconds of steps."""

    @property
    def source(self) -> str:
        """Where the numbers come from: a file, a paper, a measurement."""
        ...

    def shared_s(self, *, any_prefill: bool) -> float:
        """What all ranks of a group pay together; `any_prefill`: one of them computes a chunk in this step."""
        ...

    def rank_s(self, load: StepLoad) -> float:
        """What a rank pays by itself."""
        ...

    def decode_s(self, rows: int, kv_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """`rank_s` of steps that only decode `rows`, one for each of `kv_tokens`, to the last bit."""
        ...


def step_s(cost: CostModel, load: StepLoad) -> float:
    """Seconds of a step of a rank that is alone."""
    return cost.shared_s(any_prefill=load.prefill_tokens > 0) + cost.rank_s(load)


@dataclass(frozen=True)
class LinearCost:
    """Seconds of a step = step_s + prefill_token_s * prefill tokens + prefill_pair_s * pairs attended to
    + decode_row_s * decode rows + kv_token_s * KV tokens read; `eager_step_s` stands in for `step_s` in steps
    with a chunk, since CUDA graphs serve pure decodes alone."""

    step_s: float
    prefill_token_s: float = 0.0
    decode_row_s: float = 0.0
    kv_token_s: float = 0.0
    eager_step_s: float | None = None
    prefill_pair_s: float = 0.0
    source: str = "linear, prices as configured"

    def shared_s(self, *, any_prefill: bool) -> float:
        return self.step_s if self.eager_step_s is None or not any_prefill else self.eager_step_s

    def rank_s(self, load: StepLoad) -> float:
        seconds = self.decode_row_s * load.decode_rows + self.kv_token_s * load.kv_tokens
        if load.prefill_tokens:
            seconds += self.prefill_token_s * load.prefill_tokens + self.prefill_pair_s * load.prefill_pairs
        return seconds

    def decode_s(self, rows: int, kv_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        seconds: NDArray[np.float64] = self.decode_row_s * rows + self.kv_token_s * kv_tokens.astype(np.float64)
        return seconds
