"""POST /v1/completions."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from equipoise.errors import InvalidValueError
from equipoise.server import logprobs as shown
from equipoise.server.http import decode, encode, read_body, reply_json
from equipoise.server.params import completion_params, constraint_field, naming_constraint
from equipoise.server.schemas import CompletionBody, completion_decoder, usage_of
from equipoise.server.service import MAX_GENERATIONS, Job
from equipoise.server.stream import DONE, collect_all, stream
from equipoise.server.wire import answer_id, chunk_edges, has_usage_chunk, request_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import Receive, Scope, Send

    from equipoise.request import SamplingParams
    from equipoise.server.generation import Delta, Generation
    from equipoise.server.service import Service


async def completions(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer one request. Raises RequestError before the answer began."""
    arrival_s = time.monotonic()
    body = decode(completion_decoder, await read_body(scope, receive, service.max_body_bytes))
    service.check_open()
    service.check_model(body.model)
    dp_rank = service.asked_rank(scope, body.routed_dp_rank, body.data_parallel_rank)
    params = completion_params(body, service.engine.info.vocab_size)
    jobs = await _jobs(service, body, params, request_name(scope, body.rid, body.request_id))
    writer = _Writer(service, body, params, jobs)
    timings = service.timings(scope, jobs, arrival_s)
    running = service.running(
        receive, jobs, priority=body.priority or 0, cache_salt=body.cache_salt or "", dp_rank=dp_rank
    )
    with naming_constraint(constraint_field(body)):
        async with running as generations:
            if body.stream:
                frames = [_Frames(writer, index) for index in range(len(generations))]
                await stream(scope, send, generations, frames, timings, lambda: writer.closing(frames, generations))
            else:
                answers = await collect_all(generations, timings)
                await reply_json(scope, send, writer.answer(answers, generations))


async def _jobs(service: Service, body: CompletionBody, params: SamplingParams, name: str) -> list[Job]:
    """One job per prompt: a text, texts, token ids, or lists of token ids."""
    prompt = body.prompt
    prompts: Sequence[Any] = [prompt] if isinstance(prompt, str) else prompt
    if prompts and all(isinstance(item, int) for item in prompts):
        prompts = [prompts]
    if not prompts:
        raise InvalidValueError("prompt: it is empty, at least one token is needed", "prompt", "empty_prompt")
    if len({type(item) for item in prompts}) > 1:
        raise InvalidValueError("prompt: a list must hold texts, token ids or lists of token ids, not a mix", "prompt")
    if len(prompts) * params.n > MAX_GENERATIONS:
        raise InvalidValueError(
            f"prompt: {len(prompts)} prompts times n {params.n} are over the limit of {MAX_GENERATIONS}", "prompt"
        )
    jobs = []
    for item in prompts:
        if isinstance(item, str):
            ids = await service.prompt_text(item, "prompt", body.add_special_tokens is not False)
        else:
            ids = service.prompt_tokens(item, "prompt")
        service.check_length(ids, "prompt")
        text = None
        if body.echo:
            text = item if isinstance(item, str) else service.engine.tokenizer.decode(item)
        jobs.append(Job(ids, params, name, text))
    return jobs


class _Writer:
    """Puts answers to one request into OpenAI's shape. Choice i belongs to job i // n."""

    def __init__(self, service: Service, body: CompletionBody, params: SamplingParams, jobs: list[Job]) -> None:
        self.tokenizer = service.engine.tokenizer
        self.body = body
        self.params = params
        self.jobs = jobs
        self.drops_output = bool(body.echo) and body.max_tokens == 0
        self.head: dict[str, Any] = {
            "id": answer_id("cmpl", jobs[0].request_id),
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.model_name,
        }

    def choice(self, index: int, delta: Delta, logprobs: shown.CompletionLogprobs, whole: bool) -> dict[str, Any]:
        """One choice, of an answer or of an event. The prompt of `echo` is shown in whole answers here."""
        job = self.jobs[index // self.params.n]
        output = [] if self.drops_output else delta.token_ids
        text = "" if self.drops_output else delta.text
        echoed = whole and job.prompt_text is not None
        choice: dict[str, Any] = {
            "index": index,
            "text": (job.prompt_text or "") + text if echoed else text,
            "logprobs": None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self.body.logprobs is not None:
            rows = [] if self.drops_output else list(delta.logprobs or [])
            prompt = list(delta.prompt_logprobs or []) if echoed else []
            first_id = int(job.prompt_ids[0]) if echoed else None
            choice["logprobs"] = logprobs.rows(prompt + rows, first_id)
        if whole and self.body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = shown.prompt_logprobs(self.tokenizer, delta.prompt_logprobs or [])
        if self.body.return_token_ids:
            choice["token_ids"] = output
            if whole:
                choice["prompt_token_ids"] = job.prompt_ids.tolist()
        return choice

    def logprobs(self) -> shown.CompletionLogprobs:
        """A fresh counter of text offsets."""
        return shown.CompletionLogprobs(self.tokenizer, bool(self.body.logprobs))

    def answer(self, answers: list[Delta], generations: Sequence[Generation]) -> dict[str, Any]:
        """The whole answer."""
        choices = [self.choice(index, delta, self.logprobs(), whole=True) for index, delta in enumerate(answers)]
        num_output = 0 if self.drops_output else sum(delta.num_output for delta in answers)
        return {**self.head, "choices": choices, "usage": self._usage(num_output, answers, generations)}

    def closing(self, frames: list[_Frames], generations: Sequence[Generation]) -> bytes:
        """The end of a stream: counts, when they were asked for, and [DONE]."""
        if not has_usage_chunk(self.body):
            return DONE
        num_output = sum(choice.last.num_output for choice in frames)
        usage = self._usage(num_output, [choice.last for choice in frames], generations)
        return b"data: " + encode({**self.head, "choices": [], "usage": usage}) + b"\n\n" + DONE

    def _usage(self, num_output: int, answers: Sequence[Delta], generations: Sequence[Generation]) -> Any:
        step = self.params.n
        num_prompt = sum(generation.num_prompt for generation in generations[::step])
        return usage_of(num_prompt, num_output, sum(delta.num_cached for delta in answers[::step]))


class _Frames:
    """Events of one choice."""

    def __init__(self, writer: _Writer, index: int) -> None:
        body = writer.body
        self.last: Delta
        self._writer = writer
        self._index = index
        self._logprobs = writer.logprobs()
        self._is_plain = not (body.logprobs is not None or body.return_token_ids)
        self._prefix, self._end = chunk_edges(writer.head, body)
        self._text_prefix = self._prefix + b'{"index":%d,"text":' % index
        self._text_suffix = b',"logprobs":null,"finish_reason":null,"stop_reason":null}' + self._end

    def opening(self) -> bytes:
        """The prompt, when it is to be echoed."""
        text = self._writer.jobs[self._index // self._writer.params.n].prompt_text
        return b"" if text is None else self._text_prefix + encode(text) + self._text_suffix

    def frame(self, delta: Delta) -> bytes:
        self.last = delta
        if self._is_plain and delta.finish_reason is None:
            text = delta.text
            return self._text_prefix + encode(text) + self._text_suffix if text else b""
        choice = self._writer.choice(self._index, delta, self._logprobs, whole=False)
        return self._prefix + encode(choice) + self._end
