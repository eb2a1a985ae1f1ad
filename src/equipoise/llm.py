"""The Python API: `LLM("DIR").generate(prompts, params)`. The engine has its own process, its client a thread."""

from __future__ import annotations

import asyncio
import threading
import weakref
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from equipoise.config import (
    CacheConfig,
    CostConfig,
    EngineConfig,
    ModelConfig,
    RanksConfig,
    SchedulerConfig,
    SimExecutorConfig,
)
from equipoise.config.cost import setting_name
from equipoise.errors import ConfigError, InvalidValueError
from equipoise.exec.protocol import TokenLogprobs
from equipoise.request import FinishReason, SamplingParams
from equipoise.server.client import AsyncEngine
from equipoise.server.submission import token_array
from equipoise.text.chat import ChatTemplate

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence
    from types import TracebackType

    from numpy.typing import NDArray

    from equipoise.server.generation import Generation

    Prompt = str | Sequence[int]
    Message = dict[str, Any]

__all__ = ["LLM", "Completion", "RequestOutput", "engine_config"]

_SECTIONS = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "sim": SimExecutorConfig,
    "ranks": RanksConfig,
}
_UNBOUNDED = 2**31 - 1
"""Waiting requests: the bound protects servers from strangers, not a program from itself."""

_Result = TypeVar("_Result")


class Completion(msgspec.Struct):
    """One of a request's `n` answers. `logprobs`: one entry per token, when they were asked for.

    `stop_reason`: the stop string or stop token id that ended it; None for EOS and length."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None


class RequestOutput(msgspec.Struct):
    """The answers to one prompt. `prompt` is None when token ids were given."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    prompt_logprobs: list[TokenLogprobs] | None = None
    num_cached: int = 0


def engine_config(model: str, **settings: Any) -> EngineConfig:
    """Settings given by field name, whatever part they belong to. Raises ConfigError on an unknown one."""
    given: dict[str, dict[str, Any]] = {section: {} for section in (*_SECTIONS, "cost")}
    homes = {field.name: (section, field.name) for section, kind in _SECTIONS.items() for field in fields(kind)}
    homes |= {setting_name(field.name): ("cost", field.name) for field in fields(CostConfig)}
    for name, value in {"model": model, **settings}.items():
        if name not in homes:
            raise ConfigError(f"{name}: no such setting; allowed are {', '.join(sorted(homes))}")
        section, field = homes[name]
        given[section][field] = value
    given["scheduler"].setdefault("max_waiting_reqs", _UNBOUNDED)
    try:
        return msgspec.convert(given, EngineConfig)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$.")
        raise ConfigError(f"{path.rstrip('`').rpartition('.')[2]}: {reason}") from None


class LLM:
    """A model in a process of its own, for programs and notebooks. Use it as a context manager, or `close` it.

    Thread-safe. `engine` may be used on its own event loop only.
    """

    def __init__(self, model: str = "demo", **settings: Any) -> None:
        """`model`: folder of a checkpoint, or "demo". `settings`: fields of equipoise.config by name, such as
        max_running=64 or executor="sim". Raises ConfigError or CheckpointError, in one line."""
        config = engine_config(str(model), **settings)
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, name="equipoise-llm", daemon=True)
        thread.start()
        try:
            self.engine = self._run(AsyncEngine.start(config))
        except BaseException:
            _end_loop(self._loop, thread)
            raise
        self._close = weakref.finalize(self, _close, self.engine, self._loop, thread)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer every prompt (a text or token ids), batched, in order. `params`: for all, or one for each.

        Raises InvalidValueError when a prompt or its params cannot be served, UnavailableError when the rank died;
        the other prompts are aborted then."""
        each = _as_prompts(prompts)
        return self._run(self._generate_all(each, _as_params(params, len(each)), add_special_tokens=True))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> list[RequestOutput]:
        """As `generate`, for one conversation or several, rendered by the model's chat template."""
        source = self.engine.tokenizer.chat_template
        if source is None:
            raise InvalidValueError("messages: the model has no chat template, use generate", "messages")
        template = ChatTemplate(source, self.engine.tokenizer.bos_token, self.engine.tokenizer.eos_token)
        prompts: list[Prompt] = [
            template.render(conversation, tools=tools, **template_kwargs)
            for conversation in _as_conversations(messages)
        ]
        return self._run(self._generate_all(prompts, _as_params(params, len(prompts)), add_special_tokens=False))

    def close(self) -> None:
        """End the rank process. Idempotent."""
        self._close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---------------------------------------------------------------- on the loop's thread

    def _run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        if self._loop.is_closed():
            work.close()
            raise ConfigError("this LLM was closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C in the caller's thread
            raise

    async def _generate_all(
        self, prompts: list[Prompt], params: list[SamplingParams], *, add_special_tokens: bool
    ) -> list[RequestOutput]:
        ids = [await self._encode(prompt, add_special_tokens) for prompt in prompts]
        running: list[list[Generation]] = []
        try:
            for prompt_ids, wanted in zip(ids, params, strict=True):
                running.append(self.engine.submit_choices(prompt_ids, wanted))
            outputs = [
                await _collect(prompt, prompt_ids.tolist(), generations)
                for prompt, prompt_ids, generations in zip(prompts, ids, running, strict=True)
            ]
        finally:
            for generations in running:
                for generation in generations:
                    generation.abort()
        return outputs

    async def _encode(self, prompt: Prompt, add_special_tokens: bool) -> NDArray[np.int32]:
        if isinstance(prompt, str):
            return await self.engine.tokenizer.encode_async(prompt, add_special_tokens)
        return token_array(prompt)


async def _collect(prompt: Prompt, prompt_ids: list[int], generations: list[Generation]) -> RequestOutput:
    output = RequestOutput(prompt if isinstance(prompt, str) else None, prompt_ids, [])
    for index, generation in enumerate(generations):
        whole = await generation.next()
        async for delta in generation:
            whole.add(delta)
        output.outputs.append(
            Completion(index, whole.text, whole.token_ids, whole.finish_reason, whole.stop_reason, whole.logprobs)
        )
        if index == 0:
            output.prompt_logprobs, output.num_cached = whole.prompt_logprobs, whole.num_cached
    return output


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several; a flat list of ints is one prompt. Raises InvalidValueError for anything else."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, np.ndarray):
        prompts = prompts.tolist()
    if not isinstance(prompts, list | tuple):
        raise InvalidValueError(
            f"prompt: {type(prompts).__name__} given, it must be a text, token ids or a list of these", "prompt"
        )
    if prompts and isinstance(prompts[0], int | np.integer):
        return [prompts]
    return list(prompts)


def _as_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """One conversation or several. Raises InvalidValueError for anything else."""
    if isinstance(messages, list | tuple):
        several = [messages] if messages and isinstance(messages[0], dict) else messages
        if all(isinstance(each, list | tuple) for each in several):
            return list(several)
    raise InvalidValueError("messages: a list of messages, or a list of such lists, is needed", "messages")


def _as_params(params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if not isinstance(params, list | tuple) or not all(isinstance(each, SamplingParams) for each in params):
        raise InvalidValueError("params: SamplingParams, or a list with one for each prompt, is needed", "params")
    if len(params) != num_prompts:
        raise InvalidValueError(f"params: {len(params)} for {num_prompts} prompts, one for each is needed", "params")
    return list(params)


def _close(engine: AsyncEngine, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    asyncio.run_coroutine_threadsafe(engine.stop(), loop).result()
    _end_loop(loop, thread)


def _end_loop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """Stop and close a loop that runs in `thread`."""
    asyncio.run_coroutine_threadsafe(loop.shutdown_default_executor(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
