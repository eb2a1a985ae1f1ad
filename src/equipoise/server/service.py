"""What every route shares: the engine, the names, the running requests, and whether the server is closing."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from equipoise.errors import InvalidValueError, NotFoundError, UnavailableError
from equipoise.obs.metrics import ServerMetrics, Timing
from equipoise.server.client import split_choices
from equipoise.server.http import ClientGoneError, header
from equipoise.server.request_log import Served

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from numpy.typing import NDArray
    from starlette.types import Receive, Scope

    from equipoise.config import EngineConfig, ServerConfig
    from equipoise.engine.messages import RankLoad
    from equipoise.request import SamplingParams
    from equipoise.server.client import AsyncEngine, Generation
    from equipoise.server.tools.formats import ToolFormat
    from equipoise.text.chat import ChatTemplate

    Tokens = NDArray[np.int32]

MAX_GENERATIONS = 2048
"""Prompts times choices of one HTTP request."""
LOAD_AGE_S = 0.5
"""A load older than this is asked for again, and waited for as long at most."""


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
        self.load = engine.load
        self.metrics = ServerMetrics(lambda: [self.load])
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

    async def fresh_load(self) -> RankLoad:
        """The rank's latest load. It comes with every step; a rank that runs none is asked.

        Raises UnavailableError when the rank is gone."""
        self.load = self.engine.load
        if time.time() - self.load.timestamp >= LOAD_AGE_S:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOAD_AGE_S):
                    self.load = await self.engine.call("loads")
        return self.load

    def check_open(self) -> None:
        """Raise UnavailableError unless new requests are taken."""
        if self.is_closing:
            raise UnavailableError("the server is shutting down")
        if self.engine.death is not None:
            raise UnavailableError(f"the rank is gone: {self.engine.death}")

    def check_model(self, name: str | None) -> None:
        """Raise NotFoundError unless `name` is served here (or not given)."""
        if name is not None and name != self.model_name:
            error = NotFoundError(f"model: {name[:128]!r} is not served here, {self.model_name!r} is", "model")
            error.code = "model_not_found"
            raise error

    def check_rank(self, scope: Scope, *in_body: int | None) -> None:
        """Raise InvalidValueError unless the DP rank that header or body ask for exists. The header wins."""
        text = header(scope, b"x-data-parallel-rank")
        if text is not None:
            if text.strip() != "0":
                raise InvalidValueError(
                    f"X-Data-Parallel-Rank: {text[:32]!r} is not a rank of this server, only 0 is",
                    "X-Data-Parallel-Rank",
                )
            return
        for rank in in_body:
            if rank not in (None, 0):
                raise InvalidValueError(
                    f"routed_dp_rank: {rank} is not a rank of this server, only 0 is", "routed_dp_rank"
                )

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
        self, receive: Receive, jobs: Sequence[Job], *, priority: int = 0, cache_salt: str = ""
    ) -> AsyncIterator[list[Generation]]:
        """Submit every choice of every job, in order; whatever is still running at the end is aborted.

        A client that leaves meanwhile aborts them at once, which raises ClientGoneError at the end.
        Raises what `AsyncEngine.submit` raises."""
        generations: list[Generation] = []
        names: list[str] = []
        watcher: asyncio.Task[None] | None = None
        try:
            for job in jobs:
                for params in split_choices(job.params):
                    generation = self.engine.submit(
                        job.prompt_ids,
                        params,
                        request_id=job.request_id,
                        priority=priority,
                        cache_salt=cache_salt,
                        timeout_s=self.config.request_timeout_s,
                    )
                    generations.append(generation)
                    names.append(job.request_id)
                    self._running.setdefault(job.request_id, []).append(generation)
            watcher = asyncio.create_task(_abort_when_gone(receive, generations))
            yield generations
            if watcher.done():
                raise ClientGoneError
        finally:
            if watcher is not None:
                watcher.cancel()
            for name, generation in zip(names, generations, strict=True):
                generation.abort()
                self._forget(name, generation)

    def _forget(self, name: str, generation: Generation) -> None:
        same_name = self._running[name]
        same_name.remove(generation)
        if not same_name:
            del self._running[name]

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


async def _abort_when_gone(receive: Receive, generations: list[Generation]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    for generation in generations:
        generation.abort()


def new_id() -> str:
    """A name for a request that came without one."""
    return uuid.uuid4().hex
