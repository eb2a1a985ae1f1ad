"""The seam between the engine loop and whatever computes a step: `sim` (a cost model) or `torch`.

The loop thread calls everything here. Steps complete in the order they were submitted, and a step
sees every effect of the steps before it: that order is what makes page reuse safe without a fence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from concurrent.futures import Future

    from equipoise.request import Request
    from equipoise.sched.columns import Columns
    from equipoise.sched.plan import StepPlan


class ExecutorInfo(msgspec.Struct, frozen=True):
    """What an executor can serve; fixed once it is built.

    `num_pages` pages of `page_size` tokens are usable for KV. `eos_ids` end a request unless it ignores them.
    """

    model_type: str
    vocab_size: int
    max_model_len: int
    page_size: int
    num_pages: int
    eos_ids: tuple[int, ...]
    device: str
    dtype: str


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities at one position: the token there, its rank (1 = most likely), and the most likely ones."""

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class StepOutput(msgspec.Struct):
    """What a step computed. Keys of `logprobs` are sampled rows; of the other two, request handles.

    tokens: (num_sampled,) int32, in the plan's numbering of sampled rows
    prompt_logprobs: of the tokens that this chunk predicts, positions [start + 1, start + n + 1) of the prompt
    failed: requests that cannot go on (a grammar that no token satisfies), with the reason
    wait_s: seconds of the step in which this rank had done its part and waited for its lockstep group
    """

    tokens: NDArray[np.int32]
    logprobs: dict[int, TokenLogprobs] = {}
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    failed: dict[int, str] = {}
    wait_s: float = 0.0


class StepHandle(Protocol):
    """A step under way."""

    def done(self) -> bool:
        """True when `result` would not wait."""
        ...

    def result(self) -> StepOutput:
        """Wait for the step. Raises what the step raised."""
        ...


class NothingToDo:
    """The handle of a step without rows, for an executor whose steps do not meet those of other ranks."""

    def done(self) -> bool:
        return True

    def result(self) -> StepOutput:
        return StepOutput(tokens=np.empty(0, np.int32))


class Executor(Protocol):
    """Runs plans in order."""

    @property
    def info(self) -> ExecutorInfo: ...

    def bind(self, columns: Columns) -> None:
        """Called once, before the first plan: the columns that every plan's seats index."""
        ...

    def prepare(self, request: Request) -> Future[None] | None:
        """Start what must be ready before `request` may run (a grammar to compile); None when nothing must.

        The future fails with InvalidValueError when the request can never run."""
        ...

    def submit(self, plan: StepPlan) -> StepHandle:
        """Start a step that is not empty. Everything it needs of the columns is copied before this returns,
        except the input tokens of decodes: each is the last token drawn for its seat, by whichever step."""
        ...

    def submit_idle(self) -> StepHandle:
        """Take part in a step of the lockstep group without rows of its own: what its collectives need."""
        ...

    def forget(self, request: Request) -> None:
        """`request` ended: drop whatever is kept for it beyond its seat."""
        ...

    def close(self) -> None:
        """Release device memory and threads; idempotent."""
        ...
