"""POST /generate, SGLang's own API: text or token ids in, text and `meta_info` out. Streams send cumulative text."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from equipoise.errors import InvalidValueError
from equipoise.server import logprobs as shown
from equipoise.server.generation import Delta
from equipoise.server.http import decode, encode, read_body, reply_json
from equipoise.server.params import generate_params, naming_constraint
from equipoise.server.schemas import GenerateBody, GenerateParams, generate_decoder
from equipoise.server.service import MAX_GENERATIONS, Job, new_id
from equipoise.server.stream import DONE, collect_all, stream
from equipoise.server.wire import request_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import Receive, Scope, Send

    from equipoise.exec.protocol import TokenLogprobs
    from equipoise.server.generation import Generation
    from equipoise.server.service import Service, Tokens


async def generate(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer one request, of one prompt or several. Raises RequestError before the answer began."""
    arrival_s = time.monotonic()
    body = decode(generate_decoder, await read_body(scope, receive, service.max_body_bytes))
    service.check_open()
    service.check_model(body.model)
    dp_rank = service.asked_rank(scope, body.routed_dp_rank, body.data_parallel_rank)
    prompts, is_batch = await _prompts(service, body)
    jobs = _jobs(service, body, prompts, _names(scope, body, len(prompts)))
    owners = [job for job in jobs for _ in range(job.params.n)]
    timings = service.timings(scope, jobs, arrival_s)
    salt = body.cache_salt or body.extra_key or ""
    with naming_constraint(_constraint_field(body)):
        running = service.running(receive, jobs, priority=body.priority or 0, cache_salt=salt, dp_rank=dp_rank)
        async with running as generations:
            writer = _Writer(service, body, arrival_s)
            if body.stream:
                is_indexed = len(generations) > 1
                frames = [
                    _Frames(writer, owner, generation, index if is_indexed else None)
                    for index, (owner, generation) in enumerate(zip(owners, generations, strict=True))
                ]
                await stream(scope, send, generations, frames, timings, lambda: DONE)
                return
            answers = await collect_all(generations, timings)
            whole = [
                writer.answer(owner, answer, generation.dp_rank)
                for owner, answer, generation in zip(owners, answers, generations, strict=True)
            ]
            await reply_json(scope, send, whole if is_batch or len(whole) > 1 else whole[0])


def _constraint_field(body: GenerateBody) -> str | None:
    given = body.sampling_params if isinstance(body.sampling_params, list) else [body.sampling_params]
    for params in given:
        for name in ("json_schema", "regex", "ebnf"):
            if params is not None and getattr(params, name) is not None:
                return f"sampling_params.{name}"
    return None


async def _prompts(service: Service, body: GenerateBody) -> tuple[list[Tokens], bool]:
    """The prompts as token ids, and whether they came as a list."""
    if (body.text is None) == (body.input_ids is None):
        raise InvalidValueError("text: exactly one of text and input_ids must be given", "text")
    if body.text is not None:
        is_batch = not isinstance(body.text, str)
        texts = [body.text] if isinstance(body.text, str) else body.text
        prompts = [await service.prompt_text(text, "text") for text in texts]
    else:
        given: Sequence[Any] = body.input_ids or []
        is_batch = bool(given) and all(isinstance(item, list) for item in given)
        if not is_batch and any(isinstance(item, list) for item in given):
            raise InvalidValueError("input_ids: token ids or lists of token ids, not a mix", "input_ids")
        prompts = [service.prompt_tokens(ids, "input_ids") for ids in (given if is_batch else [given])]
    field = "text" if body.text is not None else "input_ids"
    if not prompts or len(prompts) > MAX_GENERATIONS:
        raise InvalidValueError(f"{field}: {len(prompts)} prompts, 1 to {MAX_GENERATIONS} are allowed", field)
    for prompt in prompts:
        service.check_length(prompt, field)
    return prompts, is_batch


def _names(scope: Scope, body: GenerateBody, count: int) -> list[str]:
    if isinstance(body.rid, list):
        if len(body.rid) != count or not all(body.rid):
            raise InvalidValueError(f"rid: {len(body.rid)} names for {count} prompts", "rid")
        return [request_name(scope, name) for name in body.rid]
    name = request_name(scope, body.rid)
    return [name] if count == 1 else [f"{name}-{index}" for index in range(count)]


def _jobs(service: Service, body: GenerateBody, prompts: list[Tokens], names: list[str]) -> list[Job]:
    given = body.sampling_params
    if isinstance(given, list):
        if len(given) != len(prompts):
            raise InvalidValueError(
                f"sampling_params: {len(given)} entries for {len(prompts)} prompts", "sampling_params"
            )
    else:
        given = [given or GenerateParams()] * len(prompts)
    vocab_size = service.engine.info.vocab_size
    jobs = []
    for prompt, params, name in zip(prompts, given, names, strict=True):
        jobs.append(Job(prompt, generate_params(body, params, vocab_size), name or new_id()))
    if sum(job.params.n for job in jobs) > MAX_GENERATIONS:
        raise InvalidValueError(f"sampling_params.n: over the limit of {MAX_GENERATIONS} in all", "sampling_params.n")
    return jobs


class _Writer:
    """Puts answers into SGLang's shape."""

    def __init__(self, service: Service, body: GenerateBody, arrival_s: float) -> None:
        self.body = body
        self._tokenizer = service.engine.tokenizer
        self._arrival_s = arrival_s

    def answer(self, job: Job, delta: Delta, dp_rank: int, index: int | None = None) -> dict[str, Any]:
        """`delta` holds everything so far."""
        meta: dict[str, Any] = {
            "id": job.request_id,
            "finish_reason": _finish_reason(delta),
            "prompt_tokens": len(job.prompt_ids),
            "completion_tokens": delta.num_output,
            "cached_tokens": delta.num_cached,
            "dp_rank": dp_rank,
            "e2e_latency": time.monotonic() - self._arrival_s,
        }
        if self.body.return_logprob:
            self._add_logprobs(meta, job, delta)
        answer: dict[str, Any] = {"text": delta.text, "output_ids": delta.token_ids, "meta_info": meta}
        return answer if index is None else {"index": index, **answer}

    def _add_logprobs(self, meta: dict[str, Any], job: Job, delta: Delta) -> None:
        tokenizer = self._tokenizer if self.body.return_text_in_logprobs else None
        output: list[TokenLogprobs] = delta.logprobs or []
        meta["output_token_logprobs"] = shown.sglang_rows(tokenizer, output)
        prompt: list[TokenLogprobs] = []
        if job.params.prompt_logprobs is not None:
            start = max(0, self.body.logprob_start_len or 0)
            prompt = (delta.prompt_logprobs or [])[max(0, start - 1) :]
            rows = shown.sglang_rows(tokenizer, prompt)
            first = int(job.prompt_ids[0])
            text = None if tokenizer is None else shown.token_text(tokenizer, first)
            meta["input_token_logprobs"] = [(None, first, text), *rows] if start == 0 else rows
        if self.body.top_logprobs_num:
            meta["output_top_logprobs"] = shown.sglang_tops(tokenizer, output)
            if job.params.prompt_logprobs is not None:
                meta["input_top_logprobs"] = shown.sglang_tops(tokenizer, prompt)


def _finish_reason(delta: Delta) -> dict[str, Any] | None:
    match delta.finish_reason:
        case None:
            return None
        case "length":
            return {"type": "length", "length": delta.num_output}
        case "stop":
            matched = delta.stop_reason
            if matched is None and delta.token_ids:
                matched = delta.token_ids[-1]
            return {"type": "stop", "matched": matched}
        case _:
            return {"type": "abort", "message": "the request was aborted"}


class _Frames:
    """Events of one prompt's answer, each with everything so far."""

    def __init__(self, writer: _Writer, job: Job, generation: Generation, index: int | None) -> None:
        self._writer = writer
        self._job = job
        self._generation = generation
        self._index = index
        self._whole = Delta("", [])

    def opening(self) -> bytes:
        return b""

    def frame(self, delta: Delta) -> bytes:
        whole = self._whole
        whole.text += delta.text
        whole.token_ids += delta.token_ids
        if delta.logprobs:
            whole.logprobs = (whole.logprobs or []) + delta.logprobs
        whole.finish_reason, whole.stop_reason = delta.finish_reason, delta.stop_reason
        whole.num_cached, whole.num_output = delta.num_cached, delta.num_output
        answer = self._writer.answer(self._job, whole, self._generation.dp_rank, self._index)
        return b"data: " + encode(answer) + b"\n\n"
