"""A request as its user sees it: `Generation`, and what it yields, `Delta`.

A `Stream` is the engine client's side of the same request. Two threads share it, each with its own half, so
that no lock is needed.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

import msgspec

from equipoise.exec.protocol import TokenLogprobs
from equipoise.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from equipoise.engine.messages import Add
    from equipoise.errors import RequestError
    from equipoise.request import SamplingParams
    from equipoise.route.account import Charge
    from equipoise.text.detokenize import Detokenizer


class Delta(msgspec.Struct):
    """Everything a request produced since the last Delta. `token_ids` without `text` is possible: text is
    held back while it may be part of a character or of a stop string.

    logprobs: one entry per token of `token_ids`, when the request asked for them
    prompt_logprobs: prompt positions 1, 2, ... in order, when the request asked for them
    finish_reason: None until the last Delta
    stop_reason: the stop string, or the stop token id, that ended the request; None for EOS and length
    num_cached: prompt tokens that the prefix cache served
    num_output: tokens of the request so far, this Delta included
    """

    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_cached: int = 0
    num_output: int = 0

    def add(self, later: Delta) -> None:
        """Append what came after this."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs = _join(self.logprobs, later.logprobs)
        self.prompt_logprobs = _join(self.prompt_logprobs, later.prompt_logprobs)
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason
        self.num_cached = later.num_cached
        self.num_output = later.num_output


def _join(first: list[TokenLogprobs] | None, later: list[TokenLogprobs] | None) -> list[TokenLogprobs] | None:
    return later if first is None else first + (later or [])


class Stream:
    """State of one request, in two halves, each used by one thread.

    receiver thread: detokenizer, num_output, num_cached, prompt_logprobs
    event loop: delta (not taken yet), error, is_over (its end was put), waiter, and where it runs:
        dp_rank; charge (what it adds to its rank's load, None with one rank); spare (what was sent, as long as
        another rank may have it: nothing came yet, its rank was not asked for, and it did not move before)
    """

    __slots__ = (
        "charge",
        "delta",
        "detokenizer",
        "dp_rank",
        "error",
        "handle",
        "is_over",
        "num_cached",
        "num_output",
        "params",
        "prompt_logprobs",
        "request_id",
        "spare",
        "waiter",
    )

    def __init__(
        self, handle: int, request_id: str, params: SamplingParams, detokenizer: Detokenizer, dp_rank: int = 0
    ) -> None:
        self.handle = handle
        self.request_id = request_id
        self.params = params
        self.detokenizer = detokenizer
        self.num_output = 0
        self.num_cached = 0
        self.prompt_logprobs: list[TokenLogprobs] | None = None
        self.delta: Delta | None = None
        self.error: RequestError | None = None
        self.is_over = False
        self.waiter: asyncio.Future[None] | None = None
        self.dp_rank = dp_rank
        self.charge: Charge | None = None
        self.spare: Add | None = None

    def put(self, delta: Delta) -> None:
        """Hand output to the consumer. Not after the end was put."""
        if self.delta is None:
            self.delta = delta
        else:
            self.delta.add(delta)
        self.spare = None
        self.is_over = delta.finish_reason is not None
        self._wake()

    def fail(self, error: RequestError) -> None:
        """End the stream with `error`, which the consumer gets after the output that is there."""
        self.error = error
        self.is_over = True
        self._wake()

    def _wake(self) -> None:
        waiter = self.waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class StreamOwner(Protocol):
    """Whom a Generation tells that it is no longer wanted."""

    def abort(self, stream: Stream) -> None:
        """End the request now. Only on the event loop; a stream that is over is left alone."""
        ...

    def abort_soon(self, stream: Stream) -> None:
        """The same from any thread."""
        ...


class Generation:
    """A running request. Consume it with `next` or `async for`, from one task of the engine's event loop.

    Dropping it unfinished aborts the request; `abort` does so at once.
    """

    __slots__ = ("_owner", "_stream", "num_prompt", "request_id")

    def __init__(self, stream: Stream, owner: StreamOwner, num_prompt: int) -> None:
        self._stream = stream
        self._owner = owner
        self.request_id = stream.request_id
        self.num_prompt = num_prompt

    @property
    def dp_rank(self) -> int:
        """The rank that it runs on."""
        return self._stream.dp_rank

    async def next(self) -> Delta:
        """Wait for output; everything since the last call in one Delta. The last one has `finish_reason` set.

        Raises what ended the request: UnavailableError when the rank died or the engine stopped,
        RequestTimeoutError, QueueFullError or InvalidValueError. Raises StopAsyncIteration after the last Delta."""
        stream = self._stream
        if stream.delta is None and not stream.is_over:
            if stream.waiter is not None:
                raise RuntimeError(f"request {self.request_id} is consumed by two tasks")
            stream.waiter = asyncio.get_running_loop().create_future()
            try:
                await stream.waiter
            finally:
                stream.waiter = None
        delta, stream.delta = stream.delta, None
        if delta is not None:
            return delta
        raise StopAsyncIteration if stream.error is None else stream.error

    def abort(self) -> None:
        """End the request now; a consumer that waits gets a last Delta with finish_reason "abort". Idempotent."""
        self._owner.abort(self._stream)

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        return await self.next()

    def __del__(self) -> None:
        if not self._stream.is_over:
            self._owner.abort_soon(self._stream)
