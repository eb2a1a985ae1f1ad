"""From generations to the wire: one answer at the end, or server-sent events as the text comes.

A stream costs one `send` for all that is ready of a request. `Frames` make the bytes; in the common case
they join a prefix, the text as JSON and a suffix, all else having been encoded once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Protocol

from equipoise.errors import InternalError, RequestError
from equipoise.server.generation import Delta
from equipoise.server.http import error_body, request_id_header

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from starlette.types import Scope, Send

    from equipoise.obs.metrics import Timing
    from equipoise.server.generation import Generation

log = logging.getLogger(__name__)

HEADERS_AFTER_S = 2.0
"""A stream's status waits this long for the first token, so that a refusal by the rank still has its own status."""
DONE = b"data: [DONE]\n\n"

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Frames(Protocol):
    """Makes the events of one choice."""

    def opening(self) -> bytes:
        """Events before the first token; b"" for none."""
        ...

    def frame(self, delta: Delta) -> bytes:
        """Events of `delta`; b"" when it shows nothing yet."""
        ...


async def collect(generation: Generation, timing: Timing) -> Delta:
    """Everything that `generation` produces, in one Delta. Raises what ended it badly."""
    texts: list[str] = []
    token_ids: list[int] = []
    last = Delta()
    logprobs = prompt_logprobs = None
    while last.finish_reason is None:
        last = await generation.next()
        if last.token_ids:
            timing.on_tokens(time.monotonic(), len(last.token_ids))
            token_ids += last.token_ids
        texts.append(last.text)
        if last.logprobs:
            logprobs = (logprobs or []) + last.logprobs
        if last.prompt_logprobs:
            prompt_logprobs = (prompt_logprobs or []) + last.prompt_logprobs
    timing.finish(time.monotonic(), generation.num_prompt, last.finish_reason, last.num_cached)
    return Delta(
        "".join(texts),
        token_ids,
        logprobs,
        prompt_logprobs,
        last.finish_reason,
        last.stop_reason,
        last.num_cached,
        len(token_ids),
    )


async def collect_all(generations: Sequence[Generation], timings: Sequence[Timing]) -> list[Delta]:
    """`collect` for each, in order: they run side by side in the rank, and wait here at no cost."""
    return [await collect(generation, timing) for generation, timing in zip(generations, timings, strict=True)]


async def stream(
    scope: Scope,
    send: Send,
    generations: Sequence[Generation],
    frames: Sequence[Frames],
    timings: Sequence[Timing],
    closing: Callable[[], bytes],
) -> None:
    """Send the events of all choices, interleaved as they come, then `closing()`.

    Raises RequestError before anything was sent; afterwards an error is the last event before [DONE]."""
    first = asyncio.ensure_future(generations[0].next())
    try:
        ready, _ = await asyncio.wait((first,), timeout=HEADERS_AFTER_S)
        if ready:
            first.result()
        await send({"type": "http.response.start", "status": 200, "headers": [*_HEADERS, *request_id_header(scope)]})
        opening = b"".join(choice.opening() for choice in frames)
        if opening:
            await send({"type": "http.response.body", "body": opening, "more_body": True})
        error = await _pump_all(send, generations, frames, timings, first)
        ending = closing() if error is None else b"data: " + error_body(error) + b"\n\n" + DONE
    finally:
        first.cancel()
    await send({"type": "http.response.body", "body": ending, "more_body": False})


async def _pump_all(
    send: Send,
    generations: Sequence[Generation],
    frames: Sequence[Frames],
    timings: Sequence[Timing],
    first: asyncio.Future[Delta],
) -> RequestError | None:
    if len(generations) == 1:
        return await _pump(send, generations[0], frames[0], timings[0], first)

    async def pump(index: int) -> RequestError | None:
        error = await _pump(send, generations[index], frames[index], timings[index], None if index else first)
        if error is not None:  # the answer is lost: no choice of it needs more tokens
            for generation in generations:
                generation.abort()
        return error

    errors = await asyncio.gather(*map(pump, range(len(generations))))
    return next((error for error in errors if error is not None), None)


async def _pump(
    send: Send, generation: Generation, frames: Frames, timing: Timing, first: asyncio.Future[Delta] | None
) -> RequestError | None:
    try:
        delta = await (first or generation.next())
        while True:
            if delta.token_ids:
                timing.on_tokens(time.monotonic(), len(delta.token_ids))
            body = frames.frame(delta)
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})
            if delta.finish_reason is not None:
                timing.finish(time.monotonic(), generation.num_prompt, delta.finish_reason, delta.num_cached)
                return None
            delta = await generation.next()
    except RequestError as error:
        return error
    except Exception:
        log.exception("request %s: the stream broke", generation.request_id)
        return InternalError("the server failed while it streamed the answer")
