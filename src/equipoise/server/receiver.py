"""The thread between a rank and the event loop: one message in, one call of the event loop out.

Everything that costs time per token (detokenizing, stop strings) happens here, for all rows of a step at
once. Measured by benchmarks/server.py.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

import numpy as np

from equipoise.engine.messages import Reply, Step
from equipoise.errors import (
    InvalidValueError,
    QueueFullError,
    RequestError,
    RequestTimeoutError,
    UnavailableError,
)
from equipoise.server.generation import Delta

if TYPE_CHECKING:
    import asyncio
    from typing import Protocol

    from equipoise.engine.messages import Finished, RankLoad
    from equipoise.engine.supervisor import RankProcess
    from equipoise.server.generation import Stream

    class Inbox(Protocol):
        """Who gets what was received; called on the event loop."""

        def deliver(self, news: News) -> None:
            """Output and ends of one step."""

        def answer(self, reply: Reply) -> None:
            """The answer to a call."""

        def lose_rank(self, error: UnavailableError) -> None:
            """The rank is gone; nothing else comes."""


log = logging.getLogger(__name__)


class News:
    """What one step means for the streams.

    num_added: requests that the rank had received by then
    stopped: handles of requests that a stop string ended and the rank still runs
    """

    __slots__ = ("deltas", "failures", "load", "num_added", "stopped")

    def __init__(self, load: RankLoad, num_added: int) -> None:
        self.load = load
        self.num_added = num_added
        self.deltas: list[tuple[Stream, Delta]] = []
        self.failures: list[tuple[Stream, RequestError]] = []
        self.stopped: list[int] = []


class Receiver:
    """Owns the receiver thread. `streams` is filled by the event loop; streams that end are taken out here."""

    def __init__(
        self, rank: RankProcess, streams: dict[int, Stream], inbox: Inbox, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._rank = rank
        self._streams = streams
        self._inbox = inbox
        self._loop = loop
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name=f"rank-{rank.dp_rank}-receiver", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it: at most the work of one message."""
        self._is_stopping = True
        self._rank.poke()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                message = self._rank.receive()
                if isinstance(message, Step):
                    self._loop.call_soon_threadsafe(self._inbox.deliver, read_step(message, self._streams))
                elif isinstance(message, Reply):
                    self._loop.call_soon_threadsafe(self._inbox.answer, message)
        except UnavailableError as error:
            self._report_loss(error)
        except Exception as error:  # no stream may wait for ever because of a bug here
            if self._loop.is_closed():
                return
            log.exception("the receiver of rank messages failed")
            self._report_loss(UnavailableError(f"the receiver of rank messages failed: {error!r}"))

    def _report_loss(self, error: UnavailableError) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._inbox.lose_rank, error)


def read_step(step: Step, streams: dict[int, Stream]) -> News:
    """Detokenize a step; requests that end leave `streams`. Handles that are not there are ignored."""
    news = News(step.load, step.num_added)
    handles: list[int] = np.frombuffer(step.handles, "<i8").tolist()
    ended = {finished.handle: finished for finished in step.finished}
    _keep_facts(step, streams)
    deltas = _read_tokens(step, handles, streams, ended, news)
    for row in step.logprobs:
        delta = deltas[row.index]
        if delta is not None:
            delta.logprobs = [row.logprobs]
    last_delta = dict(zip(handles, deltas, strict=True)) if ended else {}
    for finished in step.finished:
        stream = streams.pop(finished.handle, None)
        if stream is not None:
            _read_end(finished, stream, last_delta.get(finished.handle), news)
    return news


def _keep_facts(step: Step, streams: dict[int, Stream]) -> None:
    """What comes before the first token: kept until it comes."""
    for handle, num_cached in step.cached.items():
        if handle in streams:
            streams[handle].num_cached = num_cached
    for part in step.prompt_logprobs:
        if part.handle in streams:
            stream = streams[part.handle]
            stream.prompt_logprobs = (stream.prompt_logprobs or []) + part.logprobs


def _read_tokens(
    step: Step, handles: list[int], streams: dict[int, Stream], ended: dict[int, Finished], news: News
) -> list[Delta | None]:
    """A Delta for each row whose stream is there. With drafts a request may have several rows, in order."""
    deltas: list[Delta | None] = []
    for handle, token in zip(handles, np.frombuffer(step.tokens, "<i4").tolist(), strict=True):
        stream = streams.get(handle)
        if stream is None:
            deltas.append(None)
            continue
        stream.num_output = num_output = stream.num_output + 1
        delta = Delta(token_ids=[token], num_cached=stream.num_cached, num_output=num_output)
        if stream.prompt_logprobs is not None:
            delta.prompt_logprobs, stream.prompt_logprobs = stream.prompt_logprobs, None
        deltas.append(delta)
        news.deltas.append((stream, delta))
        # The token that ends a request is its last, and no token before it is equal to it.
        if handle in ended and token == ended[handle].stop_id and not stream.params.include_stop_str_in_output:
            continue
        detokenizer = stream.detokenizer
        delta.text = detokenizer.push(token)
        if detokenizer.stopped_by is not None:
            delta.finish_reason, delta.stop_reason = "stop", detokenizer.stopped_by
            del streams[handle]
            if handle not in ended:
                news.stopped.append(handle)
    return deltas


def _read_end(finished: Finished, stream: Stream, delta: Delta | None, news: News) -> None:
    if finished.error is not None:
        news.failures.append((stream, _error(finished, finished.error)))
        return
    if delta is None:
        delta = Delta(num_output=stream.num_output, prompt_logprobs=stream.prompt_logprobs)
        news.deltas.append((stream, delta))
    delta.text += stream.detokenizer.finish()
    delta.num_cached = finished.num_cached
    delta.finish_reason = finished.reason
    if stream.detokenizer.stopped_by is not None:
        delta.finish_reason, delta.stop_reason = "stop", stream.detokenizer.stopped_by
    elif finished.stop_id in stream.params.stop_token_ids:
        delta.stop_reason = finished.stop_id


def _error(finished: Finished, message: str) -> RequestError:
    if finished.status == InvalidValueError.status:
        return InvalidValueError(message, finished.field)
    if finished.status == RequestTimeoutError.status:
        return RequestTimeoutError(message)
    if finished.status == QueueFullError.status:
        return QueueFullError(message)
    return UnavailableError(message)
