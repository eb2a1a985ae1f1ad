"""The server's side of a rank: `AsyncEngine` submits requests and hands out their text.

A receiver thread takes one message per step from the rank, detokenizes all its rows and wakes the event
loop once. The event loop owns everything else, so nothing is locked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from equipoise.server.generation import Delta, Generation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import numpy as np
    from numpy.typing import NDArray

    from equipoise.config.engine import EngineConfig
    from equipoise.engine.messages import CallMethod, RankLoad
    from equipoise.exec.protocol import ExecutorInfo
    from equipoise.request import SamplingParams
    from equipoise.server.tokenizer import Tokenizer

__all__ = ["AsyncEngine", "Delta", "Generation", "split_choices"]


def split_choices(params: SamplingParams) -> list[SamplingParams]:
    """One request for each of `params.n` choices: n 1 each, and seed + i when a seed is set."""
    raise NotImplementedError


class AsyncEngine:
    """A rank process and everything between it and the user. Build it with `start`; end it with `stop`.

    Every method must be called on the event loop that started it.

    tokenizer: the model's tokenizer and chat templates
    info: what the executor can serve (vocab_size, max_model_len, eos_ids, ...)
    load: the rank's latest RankLoad
    num_outstanding: requests submitted and not ended
    death: why the rank is gone, in one line; None while it lives
    """

    tokenizer: Tokenizer
    info: ExecutorInfo
    load: RankLoad

    @classmethod
    async def start(cls, config: EngineConfig, *, startup_timeout_s: float = 600.0) -> AsyncEngine:
        """Load the tokenizer, start the rank process and wait until it serves.

        Raises ConfigError or CheckpointError with one line when settings or checkpoint are at fault, and
        UnavailableError when the rank dies or does not answer within `startup_timeout_s` seconds."""
        raise NotImplementedError

    @property
    def num_outstanding(self) -> int:
        raise NotImplementedError

    @property
    def death(self) -> str | None:
        raise NotImplementedError

    def submit(
        self,
        prompt_ids: NDArray[np.int32],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        timeout_s: float | None = None,
    ) -> Generation:
        """Send a request to the rank. `prompt_ids`: (n,) int32; `params.n` must be 1 (see `split_choices`).

        Raises InvalidValueError (naming the field), QueueFullError, or UnavailableError when the rank is gone.
        After `timeout_s` seconds the request ends with RequestTimeoutError."""
        raise NotImplementedError

    async def generate(
        self, prompt: str | list[int], params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> AsyncIterator[Delta]:
        """Stream the answer to `prompt` (text or token ids); leaving the loop early aborts the request."""
        raise NotImplementedError
        yield Delta()

    async def call(self, method: CallMethod, **args: Any) -> Any:
        """Ask the rank: flush_cache() -> pages dropped; pause(mode="new"|"all"), resume(), ping() -> None;
        loads() -> RankLoad. Raises UnavailableError when the rank is gone, InvalidValueError for bad arguments."""
        raise NotImplementedError

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request is outstanding; False when `timeout_s` seconds passed first."""
        raise NotImplementedError

    async def stop(self, timeout_s: float = 5.0) -> None:
        """End every request with UnavailableError, then the rank process, within about `timeout_s` seconds."""
        raise NotImplementedError
