"""What every route shares: the engine, the names, the running requests, and whether the server is closing."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from equipoise.errors import InvalidValueError, UnavailableError, UnknownModelError
from equipoise.obs.metrics import ServerMetrics, Timing
from equipoise.server.http import ClientGoneError, header
from equipoise.server.request_log import Served

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from numpy.typing import NDArray
    from starlette.types import Receive, Scope

    from equipoise.config import EngineConfig, ServerConfig
    from equipoise.engine.messages import RankLoad
    from equipoise.request import SamplingParams
    from equipoise.server.client import AsyncEngine
    from equipoise.server.generation import Generation
    from equipoise.server.rank_client import RankClient
    from equipoise.server.tools.formats import ToolFormat
    from equipoise.text.chat import ChatTemplate

    Tokens = NDArray[np.int32]

MAX_GENERATIONS = 2048
"""Prompts times choices of one HTTP request."""
LOAD_AGE_S = 0.5
"""A load older than this is asked for again, and waited for as long at most."""


RANK_HEADER = "X-Data-Parallel-Rank"
MAX_RANK_CHARS = 32


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt of an HTTP request; `params.n` choices are drawn from it."""

    prompt_ids: Tokens
    params: SamplingParams
    request_id: str
    prompt_text: str | None = None


class Service:
    """The server's state. It lives on the event loop; nothing here is locked."""

    def __init__(
        self,
        engine: AsyncEngine,
        engine_config: EngineConfig,
        config: ServerConfig,
        model_name: str,
        templates: dict[str, ChatTemplate],
        tool_format: ToolFormat,
    ) -> None:
        self.engine = engine
        self.engine_config = engine_config
        self.config = config
        self.model_name = model_name
        self.templates = templates
        self.tool_format = tool_format
        self.metrics = ServerMetrics(self.loads, lambda: {rank.dp_rank: rank.is_usable for rank in engine.ranks})
        self.started_at = int(time.time())
        self.max_body_bytes = int(config.max_body_mb * 2**20)
        self.is_closing = False
        self._running: dict[str, list[Generation]] = {}

    def template(self, has_tools: bool) -> ChatTemplate:
        """The chat template to use. Raises InvalidValueError when the model has none."""
        template = self.templates.get("tool_use") if has_tools else None
        template = template or self.templates.get("default")
        if template is None:
            raise InvalidValueError(
                f"messages: {self.model_name!r} has no chat template, use /v1/completions",
                "messages",
                "no_chat_template",
            )
        return template

    def loads(self) -> list[RankLoad]:
        """The latest load of each rank that answers, in order."""
        return [rank.load for rank in self.engine.ranks if rank.is_usable]

    async def fresh_loads(self) -> list[RankLoad]:
        """As `loads`, at most LOAD_AGE_S old: it comes with every step; ranks that run none are asked.

        Raises UnavailableError when no rank answers."""
        old = [rank for rank in self.engine.ranks if rank.is_usable and _is_old(rank.load)]
        if old:
            await asyncio.wait([asyncio.ensure_future(_ask_load(rank)) for rank in old])
        loads = self.loads()
        if not loads:
            raise UnavailableError(self.engine.death or "no rank answers")
        return loads

    def check_open(self) -> None:
        """Raise UnavailableError unless new requests are taken."""
        if self.is_closing:
            raise UnavailableError("the server is shutting down")
        if self.engine.death is not None:
            raise UnavailableError(f"every rank is gone: {self.engine.death}")

    def check_model(self, name: str | None) -> None:
        """Raise UnknownModelError unless `name` is served here (or not given)."""
        if name is not None and name != self.model_name:
            raise UnknownModelError(f"model: {name[:128]!r} is not served here, {self.model_name!r} is")

    def asked_rank(self, scope: Scope, routed_dp_rank: int | None, data_parallel_rank: int | None) -> int | None:
        """The DP rank that header or body ask for; the header wins, then `routed_dp_rank`.

        Raises InvalidValueError unless there is such a rank."""
        text = header(scope, b"x-data-parallel-rank")
        if text is not None:
            text = text.strip()[:MAX_RANK_CHARS]
            return self.engine.check_rank(int(text) if text.isdecimal() else text, RANK_HEADER)
        if routed_dp_rank is not None:
            return self.engine.check_rank(routed_dp_rank, "routed_dp_rank")
        if data_parallel_rank is not None:
            return self.engine.check_rank(data_parallel_rank, "data_parallel_rank")
        return None

    def prompt_tokens(self, token_ids: Sequence[int], field: str) -> Tokens:
        """Token ids that a client gave. Raises InvalidValueError for ids outside the vocabulary."""
        vocab_size = self.engine.info.vocab_size
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
            at = next(i for i, token in enumerate(token_ids) if not 0 <= token < vocab_size)
            raise InvalidValueError(
                f"{field}: token id {token_ids[at]} at {at} is outside the vocabulary, 0 to {vocab_size - 1}", field
            )
        return np.array(token_ids, np.int32)

    async def prompt_text(self, text: str, field: str, add_special_tokens: bool = True) -> Tokens:
        """`text` as token ids. Raises InvalidValueError when it is empty."""
        if not text:
            raise InvalidValueError(f"{field}: it is empty, at least one token is needed", field, "empty_prompt")
        return await self.engine.tokenizer.encode_async(text, add_special_tokens)

    def check_length(self, prompt_ids: Tokens, field: str) -> None:
        """Raise InvalidValueError unless a prompt has tokens and leaves room for one more."""
        most = self.engine.info.max_model_len - 1
        if not len(prompt_ids):
            raise InvalidValueError(f"{field}: it is empty, at least one token is needed", field, "empty_prompt")
        if len(prompt_ids) > most:
            raise InvalidValueError(
                f"{field}: {len(prompt_ids)} tokens, this model takes at most {most}", field, "context_length_exceeded"
            )

    @contextlib.asynccontextmanager
    async def running(
        self, receive: Receive, jobs: Sequence[Job], *, priority: int, cache_salt: str, dp_rank: int | None
    ) -> AsyncIterator[list[Generation]]:
        """Submit every choice of every job, in order; whatever is still running at the end is aborted.

        A client that leaves meanwhile aborts them at once, which raises ClientGoneError at the end.
        Raises what `AsyncEngine.submit_choices` raises."""
        generations: list[Generation] = []
        watcher: asyncio.Task[None] | None = None
        try:
            for job in jobs:
                choices = self.engine.submit_choices(
                    job.prompt_ids,
                    job.params,
                    request_id=job.request_id,
                    priority=priority,
                    cache_salt=cache_salt,
                    timeout_s=self.config.request_timeout_s,
                    dp_rank=dp_rank,
                )
                generations += choices
                self._running.setdefault(job.request_id, []).extend(choices)
            watcher = asyncio.create_task(_abort_when_gone(receive, generations))
            yield generations
            if watcher.done():
                raise ClientGoneError
        finally:
            if watcher is not None:
                watcher.cancel()
            for generation in generations:
                generation.abort()
                self._forget(generation)

    def _forget(self, generation: Generation) -> None:
        same_name = self._running[generation.request_id]
        same_name.remove(generation)
        if not same_name:
            del self._running[generation.request_id]

    def timings(self, scope: Scope, jobs: Sequence[Job], arrival_s: float) -> list[Timing]:
        """One for each choice of each job, in order; the request log finds them in the scope."""
        timings = [Timing(self.metrics, arrival_s) for job in jobs for _ in range(job.params.n)]
        scope["served"] = Served(jobs, timings)
        return timings

    def abort(self, request_id: str | None) -> int:
        """Abort the running requests of this name, or all (None); returns how many generations that were."""
        names = [*self._running] if request_id is None else self.names_of(request_id)
        found = [generation for name in names for generation in self._running[name]]
        for generation in found:
            generation.abort()
        return len(found)

    def names_of(self, request_id: str) -> list[str]:
        """The running request that a client calls `request_id`: by its name, or by the answer's id."""
        names = (request_id, request_id.partition("-")[2])
        return [name for name in names if name in self._running][:1]

    @property
    def num_running(self) -> int:
        """HTTP requests by name that are being served."""
        return len(self._running)


def _is_old(load: RankLoad) -> bool:
    return time.time() - load.timestamp >= LOAD_AGE_S


async def _ask_load(rank: RankClient) -> None:
    """Have `rank.load` renewed, which comes before the answer; a rank that takes its time keeps the old one."""
    with contextlib.suppress(TimeoutError, UnavailableError):
        async with asyncio.timeout(LOAD_AGE_S):
            await rank.call("loads")


async def _abort_when_gone(receive: Receive, generations: list[Generation]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    for generation in generations:
        generation.abort()


def new_id() -> str:
    """A name for a request that came without one."""
    return uuid.uuid4().hex
