"""The server's side of the ranks: `AsyncEngine` submits requests and hands out their text.

A receiver thread per rank takes one message per step, detokenizes all its rows and wakes the event loop once.
The event loop owns everything else, so nothing is locked.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import msgspec
import numpy as np

from equipoise.engine.folders import resolve_folders
from equipoise.engine.group import GroupHost
from equipoise.engine.messages import Add
from equipoise.engine.supervisor import RankProcess
from equipoise.errors import InvalidValueError, RequestError, RequestTimeoutError, UnavailableError
from equipoise.exec.sim import SimVocabulary
from equipoise.request import SamplingParams
from equipoise.server.generation import Delta, Generation, Stream
from equipoise.server.rank_choice import RankChoice
from equipoise.server.rank_client import QUIET_SHARE, TOKEN_BYTES, RankClient
from equipoise.server.rank_start import Restarts, in_thread, start_ranks
from equipoise.server.submission import How, check_request, split_choices, token_array
from equipoise.text.detokenize import PROMPT_TAIL, build_detokenizer
from equipoise.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from numpy.typing import NDArray

    from equipoise.config.engine import EngineConfig
    from equipoise.engine.messages import CallMethod, Ready
    from equipoise.exec.protocol import ExecutorInfo

log = logging.getLogger(__name__)

MAX_TIMER_S = 1e6
RANK_GRACE_S = 1.0
"""Seconds that a rank may be late to end a request that passed its timeout."""


RESTART_TIMEOUT_S = 600.0


class AsyncEngine:
    """The rank processes and everything between them and the user. Build it with `start`; end it with `stop`.

    Every method must be called on the event loop that started it.

    tokenizer: the model's tokenizer and chat templates
    info: what every rank's executor can serve (vocab_size, max_model_len, eos_ids, ...)
    ranks: by dp_rank; one that is started anew is replaced
    startup_s: seconds that the slowest rank took to serve
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        choice: RankChoice | None,
        processes: Sequence[RankProcess],
        readies: Sequence[Ready],
        group: GroupHost | None = None,
    ) -> None:
        """For `start` alone: every process serves, and nobody receives from it. `choice`: None for one rank. `group`:
        of ranks in lockstep."""
        self.config = config
        self.tokenizer = tokenizer
        self.info = _common_info([ready.info for ready in readies])
        self.startup_s = max(ready.startup_s for ready in readies)
        self._choice = choice
        self._group = group
        self._num_outstanding = 0
        self._handles = itertools.count(1)
        self._loop = asyncio.get_running_loop()
        self._idle = asyncio.Event()
        self._idle.set()
        self._end: str | None = None
        self._pause_mode: str | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._restarts = Restarts(self._restart)
        self.ranks = [self._client(process, ready) for process, ready in zip(processes, readies, strict=True)]

    # ---------------------------------------------------------------- start

    @classmethod
    async def start(cls, config: EngineConfig, *, startup_timeout_s: float = 600.0) -> AsyncEngine:
        """Load the tokenizer, start the rank processes and wait until all serve.

        Raises ConfigError or CheckpointError with one line when settings or checkpoint are at fault, and
        UnavailableError when a rank dies or does not answer within `startup_timeout_s` seconds."""
        config = replace(config, model=resolve_folders(config.model))
        num_ranks = config.ranks.dp_size
        choice = RankChoice(config.ranks.rank_policy, num_ranks) if num_ranks > 1 else None
        folder = Path(config.model.tokenizer or config.model.model)
        tokenizer = await asyncio.to_thread(Tokenizer.load, folder)
        is_group = config.ranks.lockstep and num_ranks > 1
        group = GroupHost(num_ranks, config.scheduler.depth) if is_group else None
        _warn_of_lone_gates(config)
        vocabulary = _vocabulary(tokenizer)
        processes = [RankProcess(config, vocabulary, dp_rank, group) for dp_rank in range(num_ranks)]
        readies = await start_ranks(processes, startup_timeout_s)
        return cls(config, tokenizer, choice, processes, readies, group)

    def _client(self, process: RankProcess, ready: Ready) -> RankClient:
        books = None if self._choice is None else self._choice.books(process.dp_rank, time.monotonic())
        return RankClient(process, ready, self.config.scheduler, self, books, self._group)

    # ---------------------------------------------------------------- requests

    @property
    def num_outstanding(self) -> int:
        """Requests submitted and not ended."""
        return self._num_outstanding

    @property
    def death(self) -> str | None:
        """Why nothing can be served any more, in one line; None while a rank lives and nobody called `stop`."""
        return self._end

    def submit(self, prompt_ids: NDArray[np.int32], params: SamplingParams, **how: Unpack[How]) -> Generation:
        """Send a request to a rank. `params.n` must be 1; else as `submit_choices`."""
        if params.n != 1:
            raise InvalidValueError(f"n: {params.n} choices need a request each", "n")
        [generation] = self.submit_choices(prompt_ids, params, **how)
        return generation

    def submit_choices(
        self, prompt_ids: NDArray[np.int32], params: SamplingParams, **how: Unpack[How]
    ) -> list[Generation]:
        """Send `params.n` requests to a rank, one for each choice, in order. `prompt_ids`: (n,) int32.

        All go to one rank: there the prompt is computed once and its pages are shared, while every further rank would
        compute and keep it again. A request whose rank dies before its first token goes to another rank, once, unless
        `dp_rank` named its rank. After `timeout_s` seconds it ends with RequestTimeoutError.

        Raises InvalidValueError (naming the field), QueueFullError, or UnavailableError when the rank is gone; none of
        the choices runs then."""
        self._check_alive()
        check_request(self.info, prompt_ids, params, how)
        num_output = self._expected_output(len(prompt_ids), params)
        rank = self._rank_for(len(prompt_ids), params.n * num_output, how.get("dp_rank"))
        prompt = np.ascontiguousarray(prompt_ids, "<i4").tobytes()
        tail = prompt_ids[-PROMPT_TAIL:].tolist()
        generations: list[Generation] = []
        for choice in split_choices(params):
            refusal = rank.refusal(len(prompt_ids))
            if refusal is not None:
                for generation in generations:
                    generation.abort()
                raise refusal
            stream = self._send(rank, prompt, tail, choice, num_output, how)
            generations.append(Generation(stream, self, len(prompt_ids)))
        self._keep_watch()
        return generations

    def _send(
        self, rank: RankClient, prompt: bytes, tail: list[int], params: SamplingParams, num_output: int, how: How
    ) -> Stream:
        handle = next(self._handles)
        request_id = how.get("request_id") or secrets.token_hex(12)
        stream = Stream(handle, request_id, params, build_detokenizer(self.tokenizer, params, tail))
        timeout_s = how.get("timeout_s")
        message = Add(handle, request_id, prompt, params, how.get("priority", 0), how.get("cache_salt", ""), timeout_s)
        if self._choice is not None and how.get("dp_rank") is None:
            stream.spare = message
        self._num_outstanding += 1
        self._idle.clear()
        rank.add(stream, message, num_output)
        if timeout_s is not None and timeout_s < MAX_TIMER_S:
            self._loop.call_later(timeout_s + RANK_GRACE_S, self._expire, handle, timeout_s)
        return stream

    def _rank_for(self, num_prompt: int, num_output: int, dp_rank: int | None) -> RankClient:
        """The rank named, or chosen. Raises UnavailableError, or QueueFullError when all are full."""
        if self._choice is None:
            return self.ranks[0]
        if dp_rank is None:
            return self._choice.choose(self.ranks, num_prompt, num_output)
        self.check_rank(dp_rank, "dp_rank")
        rank = self.ranks[dp_rank]
        if not rank.is_usable:
            raise UnavailableError(rank.loss or f"rank {dp_rank} does not answer")
        return rank

    def _expected_output(self, num_prompt: int, params: SamplingParams) -> int:
        """Output tokens that are charged to a rank; nobody asks where there is one rank."""
        if self._choice is None:
            return 0
        room = self.info.max_model_len - num_prompt
        return self._choice.expected_output(room if params.max_tokens is None else min(room, params.max_tokens))

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
        if not stream.is_over:
            self.ranks[stream.dp_rank].abort(stream)

    def _expire(self, handle: int, timeout_s: float) -> None:
        """The rank ends requests in time, unless it hangs: then they end here."""
        error = RequestTimeoutError(f"the rank did not end the request within its timeout of {timeout_s:g} s")
        for rank in self.ranks:
            if handle in rank.streams:
                rank.expire(handle, error)

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

    async def call(self, method: CallMethod, **args: Any) -> dict[int, Any]:
        """Ask every rank that lives; the answers by dp_rank: flush_cache() -> pages dropped; pause(mode="new"|"all"),
        resume(), ping() -> None; loads() -> RankLoad; more in `equipoise.engine.messages.Call`.

        A rank that is silent does as it was told when it comes back, before anything else, and is not waited for.
        Raises UnavailableError when no rank answers, InvalidValueError for bad arguments."""
        self._check_alive()
        waiting = {}
        for rank in self.ranks:
            if rank.is_usable:
                waiting[rank.dp_rank] = asyncio.ensure_future(rank.call(method, **args))
            elif rank.loss is None:
                rank.tell(method, **args)
        self._keep_watch()
        answers = await asyncio.gather(*waiting.values(), return_exceptions=True)
        found: dict[int, Any] = {}
        failure: BaseException = UnavailableError("no rank answers")
        for dp_rank, answer in zip(waiting, answers, strict=True):
            if isinstance(answer, UnavailableError):
                failure = answer
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found[dp_rank] = answer
        if not found:
            raise failure
        if method in ("pause", "resume"):
            self._pause_mode = args.get("mode", "new") if method == "pause" else None
        return found

    # ---------------------------------------------------------------- what the ranks bring

    def ended(self, stream: Stream) -> None:
        """For RankClient: a request is over."""
        self._num_outstanding -= 1
        if self._num_outstanding == 0:
            self._idle.set()
        if self._choice is not None and stream.error is None:
            self._choice.learn(stream.num_output)

    def lost(self, rank: RankClient, orphans: list[Stream]) -> None:
        """For RankClient: it is gone, others take over what they can."""
        if all(each.loss is not None for each in self.ranks):
            self._end = self._end or rank.loss
        for stream in orphans:
            self._move(stream, rank.loss or "")
        if self.config.ranks.restart_ranks and self._end is None:
            pause_s = self._restarts.schedule(rank.dp_rank)
            log.info("rank %d is started anew in %g s", rank.dp_rank, pause_s)

    def _move(self, stream: Stream, why: str) -> None:
        """Send a request that nothing came of to another rank."""
        message = stream.spare
        assert message is not None
        stream.spare = None  # once: a request that kills ranks must not kill them all
        stream.num_cached, stream.prompt_logprobs = 0, None
        num_prompt = len(message.prompt) // TOKEN_BYTES
        num_output = self._expected_output(num_prompt, message.params)
        try:
            target = self._rank_for(num_prompt, num_output, None)
        except RequestError:
            stream.fail(UnavailableError(why))
            self.ended(stream)
        else:
            target.add(stream, message, num_output)

    async def _restart(self, dp_rank: int) -> None:
        await in_thread(partial(self.ranks[dp_rank].stop, 0.0))
        process = RankProcess(self.config, _vocabulary(self.tokenizer), dp_rank, self._group)
        [ready] = await start_ranks([process], RESTART_TIMEOUT_S)
        rank = self.ranks[dp_rank] = self._client(process, ready)
        if self._pause_mode is not None:
            rank.tell("pause", mode=self._pause_mode)
        log.warning("rank %d (pid %s) serves again", dp_rank, process.pid)

    # ---------------------------------------------------------------- silence

    def _keep_watch(self) -> None:
        """Look after the ranks as long as one has something to do."""
        if self._watch is None:
            self._watch = self._loop.call_later(QUIET_SHARE * self.config.ranks.rank_timeout_s, self._look)

    def _look(self) -> None:
        self._watch = None
        num_usable = sum(rank.is_usable for rank in self.ranks)
        for rank in self.ranks:
            rank.watch(self.config.ranks.rank_timeout_s, may_end=num_usable > 0)
        if any(rank.is_awaited for rank in self.ranks):
            self._keep_watch()

    # ---------------------------------------------------------------- checks

    def check_rank(self, dp_rank: int | str, field: str) -> int:
        """`dp_rank`, if there is such a rank; a text is none. Raises InvalidValueError, naming `field`, otherwise."""
        if isinstance(dp_rank, int) and 0 <= dp_rank < len(self.ranks):
            return dp_rank
        allowed = "only 0 is" if len(self.ranks) == 1 else f"0 to {len(self.ranks) - 1} are"
        raise InvalidValueError(f"{field}: {dp_rank!r} is not a rank of this server, {allowed}", field)

    def _check_alive(self) -> None:
        if self._end is not None:
            raise UnavailableError(self._end)

    # ---------------------------------------------------------------- stop

    async def stop(self, timeout_s: float = 5.0) -> None:
        """End every request with UnavailableError, then the rank processes, within about `timeout_s` seconds."""
        self._end = self._end or "the server is shutting down"
        if self._watch is not None:
            self._watch.cancel()
        for rank in self.ranks:
            rank.fail_all(self._end)
        await self._restarts.stop()
        await asyncio.gather(*(in_thread(partial(rank.stop, timeout_s)) for rank in self.ranks))
        if self._group is not None:
            self._group.close()


def _warn_of_lone_gates(config: EngineConfig) -> None:
    """Say so when a gate that is to look at all ranks of a group cannot."""
    scheduler, ranks = config.scheduler, config.ranks
    gates = ("balance", scheduler.balance), ("prefill-alignment", scheduler.prefill_alignment)
    on = [name for name, is_on in (*gates, ("rent-or-buy", scheduler.rent_or_buy)) if is_on]
    if on and ranks.dp_size > 1 and not ranks.lockstep:
        log.warning("%s: each of %d ranks looks at itself alone without lockstep", ", ".join(on), ranks.dp_size)


def _vocabulary(tokenizer: Tokenizer) -> SimVocabulary:
    hidden = tuple(sorted(tokenizer.special_ids.union(tokenizer.eos_ids)))
    return SimVocabulary(tokenizer.vocab_size, tokenizer.eos_ids, hidden)


def _common_info(infos: Sequence[ExecutorInfo]) -> ExecutorInfo:
    """What every rank can serve: ranks that measured their memory differ."""
    return msgspec.structs.replace(
        infos[0],
        num_pages=min(info.num_pages for info in infos),
        max_model_len=min(info.max_model_len for info in infos),
    )
