"""A request as its user sees it: `Generation`, and what it yields, `Delta`.

A `Stream` is the engine client's side of the same request. Two threads share it, each with its own half:
the receiver thread owns the detokenizer, the event loop everything else. No lock is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from equipoise.exec.protocol import TokenLogprobs
from equipoise.request import FinishReason

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator

    from equipoise.errors import RequestError
    from equipoise.server.detokenize import Detokenizer


class Delta(msgspec.Struct):
    """Everything a request produced since the last Delta. `token_ids` without `text` is possible: text is
    held back while it may be part of a character or of a stop string.

    logprobs: one entry per token of `token_ids`, when the request asked for them
    prompt_logprobs: prompt positions 1, 2, ... in order, when the request asked for them
    finish_reason: None until the last Delta
    stop_reason: the stop string, or the stop token id, that ended the request; None for EOS and length
    num_cached: prompt tokens that the prefix cache served; known in the last Delta
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


class StreamOwner(Protocol):
    """Who a Generation tells that it is no longer wanted."""

    def abort(self, stream: Stream) -> None:
        """End the request now. Only on the event loop."""
        ...

    def abort_soon(self, stream: Stream) -> None:
        """The same from any thread."""
        ...


class Stream:
    """State of one request between the receiver thread and the event loop."""

    __slots__ = ("delta", "detokenizer", "error", "handle", "is_over", "num_output", "request_id", "waiter")

    def __init__(self, handle: int, request_id: str, detokenizer: Detokenizer) -> None:
        self.handle = handle
        self.request_id = request_id
        self.detokenizer = detokenizer
        self.delta: Delta | None = None
        self.error: RequestError | None = None
        self.is_over = False
        self.num_output = 0
        self.waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Let the consumer go on, if it waits."""
        waiter = self.waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


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

    async def next(self) -> Delta:
        """Wait for output; everything since the last call in one Delta. The last one has `finish_reason` set.

        Raises what ended the request: UnavailableError when the rank died or the engine stopped,
        RequestTimeoutError, QueueFullError or InvalidValueError. Raises StopAsyncIteration after the last Delta."""
        raise StopAsyncIteration

    def abort(self) -> None:
        """End the request now; a consumer that waits gets a last Delta with finish_reason "abort". Idempotent."""

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        return await self.next()
