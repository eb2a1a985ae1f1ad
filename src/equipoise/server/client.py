"""The server's side of a rank: `AsyncEngine` submits requests and hands out their text.

A receiver thread takes one message per step from the rank, detokenizes all its rows and wakes the event
loop once. The event loop owns everything else, so nothing is locked.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from equipoise.engine.folders import resolve_folders
from equipoise.engine.messages import Abort, Add, Call, RankLoad
from equipoise.engine.supervisor import RankProcess
from equipoise.errors import InvalidValueError, QueueFullError, RequestTimeoutError, UnavailableError
from equipoise.exec.sim import SimVocabulary
from equipoise.request import SamplingParams
from equipoise.server.generation import Delta, Generation, Stream
from equipoise.server.receiver import Receiver
from equipoise.text.detokenize import PROMPT_TAIL, build_detokenizer
from equipoise.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from numpy.typing import NDArray

    from equipoise.config.engine import EngineConfig
    from equipoise.engine.messages import CallMethod, Ready, Reply
    from equipoise.server.receiver import News

__all__ = ["AsyncEngine", "Delta", "Generation", "split_choices", "token_array"]

log = logging.getLogger(__name__)

MAX_SEED = 2**63 - 1
MAX_TOKEN_ID = 2**31 - 1
MAX_PRIORITY = 2**31 - 1
MAX_TIMER_S = 1e6
RANK_GRACE_S = 1.0
"""Seconds that a rank may be late to end a request that passed its timeout."""


def split_choices(params: SamplingParams) -> list[SamplingParams]:
    """One request for each of `params.n` choices: n 1 each, and seed + i when a seed is set."""
    if params.n == 1:
        return [params]
    seeds = [None if params.seed is None else _wrap_seed(params.seed + i) for i in range(params.n)]
    return [msgspec.structs.replace(params, n=1, seed=seed) for seed in seeds]


def token_array(prompt: Sequence[int]) -> NDArray[np.int32]:
    """Token ids as they are submitted, (n,) int32. Raises InvalidValueError for anything but a list of integers."""
    try:
        ids = np.asarray(prompt)
    except ValueError:  # ragged
        ids = np.empty((0, 0))
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        raise InvalidValueError("prompt: it must be a text or a list of token ids", "prompt")
    # An id beyond int32 is outside every vocabulary: -1 stands for it.
    return np.where((ids >= 0) & (ids <= MAX_TOKEN_ID), ids, -1).astype(np.int32)


def _wrap_seed(seed: int) -> int:
    return seed if seed <= MAX_SEED else seed - 2**64


class AsyncEngine:
    """A rank process and everything between it and the user. Build it with `start`; end it with `stop`.

    Every method must be called on the event loop that started it.

    tokenizer: the model's tokenizer and chat templates
    info: what the executor can serve (vocab_size, max_model_len, eos_ids, ...)
    load: the rank's latest RankLoad
    startup_s: seconds that the rank took to serve
    """

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer, rank: RankProcess, ready: Ready) -> None:
        """For `start` alone: `rank` serves, and nobody receives from it."""
        self.config = config
        self.tokenizer = tokenizer
        self.info = ready.info
        self.startup_s = ready.startup_s
        self.load = _no_load(ready)
        self._rank = rank
        self._max_running = ready.max_running
        self._streams: dict[int, Stream] = {}
        self._num_outstanding = 0
        self._handles = itertools.count(1)
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count(1)
        self._loop = asyncio.get_running_loop()
        self._idle = asyncio.Event()
        self._idle.set()
        self._loss: str | None = None
        self._receiver = Receiver(rank, self._streams, self, self._loop)
        self._receiver.start()

    # ---------------------------------------------------------------- start

    @classmethod
    async def start(cls, config: EngineConfig, *, startup_timeout_s: float = 600.0) -> AsyncEngine:
        """Load the tokenizer, start the rank process and wait until it serves.

        Raises ConfigError or CheckpointError with one line when settings or checkpoint are at fault, and
        UnavailableError when the rank dies or does not answer within `startup_timeout_s` seconds."""
        config = replace(config, model=resolve_folders(config.model))
        folder = Path(config.model.tokenizer or config.model.model)
        tokenizer = await asyncio.to_thread(Tokenizer.load, folder)
        hidden = tuple(sorted(tokenizer.special_ids.union(tokenizer.eos_ids)))
        rank = RankProcess(config, SimVocabulary(tokenizer.vocab_size, tokenizer.eos_ids, hidden))
        rank.start()
        return cls(config, tokenizer, rank, await _wait_ready(rank, startup_timeout_s))

    # ---------------------------------------------------------------- requests

    @property
    def num_outstanding(self) -> int:
        """Requests submitted and not ended."""
        return self._num_outstanding

    @property
    def death(self) -> str | None:
        """Why the rank is gone, in one line; None while it lives."""
        return self._loss

    @property
    def rank_pid(self) -> int | None:
        """The rank's process id."""
        return self._rank.pid

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
        self._check_alive()
        self._check(prompt_ids, params, priority, timeout_s)
        self._check_queue(len(prompt_ids))
        handle = next(self._handles)
        request_id = request_id or secrets.token_hex(12)
        prompt = np.ascontiguousarray(prompt_ids, "<i4").tobytes()
        detokenizer = build_detokenizer(self.tokenizer, params, prompt_ids[-PROMPT_TAIL:].tolist())
        stream = self._streams[handle] = Stream(handle, request_id, params, detokenizer)
        self._num_outstanding += 1
        self._idle.clear()
        self._rank.send(Add(handle, request_id, prompt, params, priority, cache_salt, timeout_s))
        if timeout_s is not None and timeout_s < MAX_TIMER_S:
            self._loop.call_later(timeout_s + RANK_GRACE_S, self._expire, handle, timeout_s)
        return Generation(stream, self, len(prompt_ids))

    async def generate(
        self, prompt: str | list[int], params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> AsyncIterator[Delta]:
        """Stream the answer to `prompt` (text or token ids); leaving the loop early aborts the request."""
        if isinstance(prompt, str):
            prompt_ids = await self.tokenizer.encode_async(prompt)
        else:
            prompt_ids = token_array(prompt)
        generation = self.submit(prompt_ids, params or SamplingParams(), request_id=request_id)
        try:
            async for delta in generation:
                yield delta
        finally:
            generation.abort()

    def abort(self, stream: Stream) -> None:
        """For Generation: end the request, at the rank and for its consumer."""
        if stream.is_over:
            return
        self._streams.pop(stream.handle, None)
        stream.put(Delta(finish_reason="abort", num_cached=stream.num_cached, num_output=stream.num_output))
        self._count_end()
        self._rank.send(Abort([stream.handle]))

    def _expire(self, handle: int, timeout_s: float) -> None:
        """The rank ends requests in time, unless it hangs: then they end here."""
        stream = self._streams.pop(handle, None)
        if stream is not None and not stream.is_over:
            stream.fail(RequestTimeoutError(f"the rank did not end the request within its timeout of {timeout_s:g} s"))
            self._count_end()
            self._rank.send(Abort([handle]))

    def abort_soon(self, stream: Stream) -> None:
        """For a Generation that was dropped, in whatever thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.abort, stream)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request is outstanding; False when `timeout_s` seconds passed first."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    # ---------------------------------------------------------------- calls

    async def call(self, method: CallMethod, **args: Any) -> Any:
        """Ask the rank: flush_cache() -> pages dropped; pause(mode="new"|"all"), resume(), ping() -> None;
        loads() -> RankLoad. Raises UnavailableError when the rank is gone, InvalidValueError for bad arguments."""
        self._check_alive()
        call_id = next(self._call_ids)
        answer = self._calls[call_id] = self._loop.create_future()
        self._rank.send(Call(call_id, method, args))
        try:
            value = await answer
        finally:
            self._calls.pop(call_id, None)
        return msgspec.convert(value, RankLoad) if method == "loads" else value

    # ---------------------------------------------------------------- what the receiver brings

    def deliver(self, news: News) -> None:
        """For Receiver: output and ends of one step."""
        self.load = news.load
        for stream, delta in news.deltas:
            if not stream.is_over:
                stream.put(delta)
                if stream.is_over:
                    self._count_end()
        for stream, error in news.failures:
            if not stream.is_over:
                stream.fail(error)
                self._count_end()
        if news.stopped and self._loss is None:
            self._rank.send(Abort(news.stopped, "stop"))

    def answer(self, reply: Reply) -> None:
        """For Receiver: the answer to a call."""
        future = self._calls.get(reply.call_id)
        if future is None or future.done():
            return
        if reply.error is None:
            future.set_result(reply.value)
        else:
            future.set_exception(InvalidValueError(reply.error))

    def lose_rank(self, error: UnavailableError) -> None:
        """For Receiver: the rank is gone."""
        log.error("%s; %d requests fail", error.message, self._num_outstanding)
        self._lose(error.message)

    def _lose(self, why: str) -> None:
        """End everything that is outstanding with UnavailableError."""
        self._loss = self._loss or why
        for stream in tuple(self._streams.values()):
            self._streams.pop(stream.handle, None)  # the receiver may have taken it out meanwhile
            if not stream.is_over:
                stream.fail(UnavailableError(why))
                self._count_end()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(UnavailableError(why))

    def _count_end(self) -> None:
        self._num_outstanding -= 1
        if self._num_outstanding == 0:
            self._idle.set()

    # ---------------------------------------------------------------- checks

    def _check_alive(self) -> None:
        if self._loss is not None:
            raise UnavailableError(self._loss)

    def _check(
        self, prompt_ids: NDArray[np.int32], params: SamplingParams, priority: int, timeout_s: float | None
    ) -> None:
        vocab_size, longest = self.info.vocab_size, self.info.max_model_len
        params.check(vocab_size)
        if params.n != 1:
            raise InvalidValueError(f"n: {params.n} choices need a request each", "n")
        num_prompt = len(prompt_ids)
        if num_prompt == 0:
            raise InvalidValueError("prompt: it is empty, it must have at least 1 token", "prompt")
        if num_prompt >= longest:
            raise InvalidValueError(
                f"prompt: {num_prompt} tokens, at most {longest - 1} are allowed: "
                f"the model's length is {longest} tokens, prompt and output together",
                "prompt",
                code="context_length_exceeded",
            )
        low, high = int(prompt_ids.min()), int(prompt_ids.max())
        if low < 0 or high >= vocab_size:
            wrong = f"token id {high}" if high >= vocab_size else "a token id"
            raise InvalidValueError(
                f"prompt: {wrong} is outside the vocabulary, it must be at least 0 and at most {vocab_size - 1}",
                "prompt",
            )
        if abs(priority) > MAX_PRIORITY:
            raise InvalidValueError(
                f"priority: {priority} is out of range, it must be at least {-MAX_PRIORITY} and at most {MAX_PRIORITY}",
                "priority",
            )
        if timeout_s is not None and not timeout_s > 0:
            raise InvalidValueError(f"timeout_s: {timeout_s} must be more than 0", "timeout_s")

    def _check_queue(self, num_prompt: int) -> None:
        """Refuse what the rank would refuse: by its latest load, and by what was sent since."""
        limits = self.config.scheduler
        num_waiting = max(self.load.num_waiting_reqs, self._num_outstanding - self._max_running)
        if num_waiting >= limits.max_waiting_reqs:
            raise QueueFullError(f"{num_waiting} requests wait, at most {limits.max_waiting_reqs} may")
        most = limits.max_waiting_tokens
        if most is not None and self.load.num_waiting_tokens + num_prompt > most:
            raise QueueFullError(f"{self.load.num_waiting_tokens} tokens wait, at most {most} may")

    # ---------------------------------------------------------------- stop

    async def stop(self, timeout_s: float = 5.0) -> None:
        """End every request with UnavailableError, then the rank process, within about `timeout_s` seconds."""
        self._lose("the server is shutting down")
        await _in_thread(lambda: self._stop_rank(timeout_s))

    def _stop_rank(self, timeout_s: float) -> None:
        self._receiver.stop()
        self._rank.stop(timeout_s)


async def _wait_ready(rank: RankProcess, timeout_s: float) -> Ready:
    """`rank.wait_ready` in a thread; a rank that does not come up is gone when this raises."""
    waiting = asyncio.get_running_loop().run_in_executor(None, rank.wait_ready, timeout_s)
    try:
        return await asyncio.shield(waiting)
    except BaseException:
        rank.kill()
        await asyncio.wait([waiting])
        waiting.exception()  # known by now: the rank is gone because it was killed, or what is raised below
        await _in_thread(lambda: rank.stop(0.0))
        raise


async def _in_thread(work: Callable[[], None]) -> None:
    """Run `work` in a thread of its own: those of asyncio are gone when a program that ends stops its engine."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            loop.call_soon_threadsafe(done.set_exception, error)
        else:
            loop.call_soon_threadsafe(done.set_result, None)

    thread = threading.Thread(target=run, name="stop-rank")
    thread.start()
    await asyncio.shield(done)
    thread.join()


def _no_load(ready: Ready) -> RankLoad:
    """The load of a rank that has served nothing."""
    total = ready.info.num_pages * ready.info.page_size
    return RankLoad(ready.dp_rank, 0.0, 0, 0, 0, 0, 0, total, ready.max_running, 0.0, 0.0, 0.0)
