"""Routes for operators, routers and tools: health, load, metrics, tokens, control."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from equipoise import __version__
from equipoise.dashboard import dashboard_path
from equipoise.errors import InvalidValueError, NotFoundError, UnavailableError
from equipoise.obs.page import CONTENT_TYPE
from equipoise.obs.timeline import StepSpan, trace_of
from equipoise.request import SamplingParams
from equipoise.server.chats import INLINE_CHARS, chat_prompt
from equipoise.server.http import decode, read_body, reply, reply_json
from equipoise.server.logprobs import token_text
from equipoise.server.schemas import (
    AbortBody,
    PauseBody,
    abort_decoder,
    detokenize_decoder,
    pause_decoder,
    tokenize_decoder,
)

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from equipoise.engine.messages import RankLoad
    from equipoise.server.rank_client import RankClient
    from equipoise.server.service import Service

PROBE_TIMEOUT_S = 20.0
"""Seconds that /health_generate waits for its token."""
CALL_TIMEOUT_S = 30.0
"""Seconds that a rank has to answer a call."""


async def health(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """200 while the process is up, some rank answers and the server is not closing; it says which ranks do not."""
    service.check_open()
    missing = [_missing(rank) for rank in service.engine.ranks if not rank.is_usable]
    if len(missing) == len(service.engine.ranks):
        raise UnavailableError("no rank answers")
    await reply_json(scope, send, {"status": "degraded", "ranks": missing} if missing else {"status": "ok"})


def _missing(rank: RankClient) -> dict[str, Any]:
    """Why nothing goes to a rank."""
    if rank.loss is None:
        return {"dp_rank": rank.dp_rank, "status": "silent", "reason": f"rank {rank.dp_rank} does not answer"}
    return {"dp_rank": rank.dp_rank, "status": "dead", "reason": rank.loss}


async def health_generate(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """200 once a token came through the whole engine."""
    service.check_open()
    started = time.monotonic()
    generation = service.engine.submit(
        np.zeros(1, np.int32), SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    )
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            while (await generation.next()).finish_reason is None:
                pass
    except TimeoutError:
        raise UnavailableError(f"no token came within {PROBE_TIMEOUT_S:g} s") from None
    finally:
        generation.abort()
    await reply_json(scope, send, {"status": "ok", "latency_s": time.monotonic() - started})


async def models(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """The one model that is served."""
    await reply_json(scope, send, {"object": "list", "data": [_card(service)]})


async def model(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """The model by its name."""
    service.check_model(scope["path_params"]["name"])
    await reply_json(scope, send, _card(service))


def _card(service: Service) -> dict[str, Any]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.started_at,
        "owned_by": "equipoise",
        "root": service.engine_config.model.model,
        "parent": None,
        "max_model_len": service.engine.info.max_model_len,
    }


async def server_info(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """Version, model, what the executor can serve, and every setting; the API key is not shown."""
    config = dataclasses.asdict(service.config)
    config["api_key"] = None if service.config.api_key is None else "(set)"
    info = {
        "version": __version__,
        "model": service.model_name,
        "started_at": service.started_at,
        "tool_format": service.tool_format,
        "has_chat_template": bool(service.templates),
        "dp_size": len(service.engine.ranks),
        "role": "mixed",
        "executor": msgspec.to_builtins(service.engine.info),
        "engine": dataclasses.asdict(service.engine_config),
        "server": config,
        "loads": service.loads(),
    }
    await reply_json(scope, send, info)


async def v1_loads(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """Load of every rank, in the shape of SGLang's /v1/loads. Ranks that do not answer are listed apart."""
    loads = [_load(load) for load in await service.fresh_loads()]
    await reply_json(
        scope,
        send,
        {
            "timestamp": time.time(),
            "version": __version__,
            "dp_rank_count": len(loads),
            "loads": loads,
            "missing_ranks": [_missing(rank) for rank in service.engine.ranks if not rank.is_usable],
            "aggregate": {
                name: sum(load[name] for load in loads)
                for name in ("num_running_reqs", "num_waiting_reqs", "num_used_tokens", "num_tokens")
            },
        },
    )


def _load(load: RankLoad) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(load)
    del fields["group"]  # of /metrics
    return {
        **fields,
        "num_reqs": load.num_running_reqs + load.num_waiting_reqs,
        "num_total_reqs": load.num_running_reqs + load.num_waiting_reqs,
        "num_total_tokens": load.num_tokens,
        "num_active_tokens": load.num_used_tokens,
    }


async def get_load(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """The older form: a list with one object per rank that answers."""
    await reply_json(scope, send, [_load(load) for load in await service.fresh_loads()])


async def metrics(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """Prometheus' text format."""
    with contextlib.suppress(UnavailableError):  # latencies are there without ranks
        await service.fresh_loads()
    await reply(scope, send, service.metrics.text(), content_type=CONTENT_TYPE)


async def tokenize(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """Text or messages as token ids."""
    raw = await read_body(scope, receive, service.max_body_bytes)
    body = decode(tokenize_decoder, raw)
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidValueError("prompt: exactly one of prompt and messages must be given", "prompt")
    tokenizer = service.engine.tokenizer
    if body.messages is not None:
        ids = await chat_prompt(
            service,
            body.messages,
            body.tools,
            add_generation_prompt=body.add_generation_prompt is not False,
            kwargs=body.chat_template_kwargs or {},
            is_long=len(raw) > INLINE_CHARS,
        )
    else:
        ids = await tokenizer.encode_async(body.prompt or "", body.add_special_tokens is not False)
    tokens = ids.tolist()
    answer: dict[str, Any] = {
        "tokens": tokens,
        "count": len(tokens),
        "max_model_len": service.engine.info.max_model_len,
    }
    if body.return_token_strs:
        answer["token_strs"] = [token_text(tokenizer, token) for token in tokens]
    await reply_json(scope, send, answer)


async def detokenize(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """Token ids as text."""
    body = decode(detokenize_decoder, await read_body(scope, receive, service.max_body_bytes))
    service.check_model(body.model)
    service.prompt_tokens(body.tokens, "tokens")
    decode_tokens = service.engine.tokenizer.decode
    if len(body.tokens) > INLINE_CHARS:
        text = await asyncio.to_thread(decode_tokens, body.tokens, body.skip_special_tokens is True)
    else:
        text = decode_tokens(body.tokens, body.skip_special_tokens is True)
    await reply_json(scope, send, {"prompt": text, "text": text})


async def abort_request(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """Abort one request by `rid`, or all. A `rid` that is not running is no error: it may just have ended."""
    body = decode(abort_decoder, await read_body(scope, receive, service.max_body_bytes))
    await reply_json(scope, send, {"aborted": service.abort(_abort_target(body))})


def _abort_target(body: AbortBody) -> str | None:
    if body.abort_all:
        return None
    if not body.rid:
        raise InvalidValueError("rid: name a request, or set abort_all", "rid", "missing_parameter")
    return body.rid


async def explain_request(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """Where a running request is and which rule holds it back, one entry per choice. 404 once it has ended."""
    name = scope["path_params"]["name"]
    found = []
    for candidate in service.names_of(name):
        for dp_rank, explanations in (await _call(service, "explain", request_id=candidate)).items():
            found += [{"dp_rank": dp_rank, **explanation} for explanation in explanations]
    if not found:
        raise NotFoundError(f"no request {name!r} runs or waits here")
    await reply_json(scope, send, {"requests": found})


async def decisions(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """The last steps' decisions, rank by rank, oldest first. 404 unless they are kept."""
    kept = await _call(service, "decisions")
    if None in kept.values():
        raise NotFoundError("decisions are not kept: start the server with --trace-steps N")
    rows = [{"dp_rank": dp_rank, **decision} for dp_rank, decisions in kept.items() for decision in decisions]
    await reply_json(scope, send, {"decisions": rows})


async def timeline(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """The last steps of every rank as a trace for ui.perfetto.dev. 404 unless they are kept."""
    kept = await _call(service, "timeline")
    if None in kept.values():
        raise NotFoundError("steps are not kept: start the server with --timeline-steps N")
    ranks = {dp_rank: [StepSpan(*step) for step in steps] for dp_rank, steps in kept.items()}
    trace = await asyncio.to_thread(trace_of, service.model_name, ranks)
    await reply(scope, send, trace.encode(), content_type=b"application/json")


async def flush_cache(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """Drop every prefix page that no request uses, on all ranks."""
    flushed = await _call(service, "flush_cache")
    await reply_json(scope, send, {"flushed_pages": sum(flushed.values())})


async def pause(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """Stop taking requests into steps; those that come meanwhile wait."""
    raw = await read_body(scope, receive, service.max_body_bytes)
    body = decode(pause_decoder, raw) if raw.strip() else PauseBody()
    await _call(service, "pause", mode=body.mode)
    await reply_json(scope, send, {"paused": body.mode})


async def resume(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """Go on after /pause."""
    await _call(service, "resume")
    await reply_json(scope, send, {"paused": None})


async def _call(service: Service, method: Any, **args: Any) -> dict[int, Any]:
    """Every rank's answer."""
    try:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            return await service.engine.call(method, **args)
    except TimeoutError:
        raise UnavailableError(f"{method}: not every rank answered within {CALL_TIMEOUT_S:g} s") from None


async def dashboard(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """The live page."""
    page = dashboard_path()
    if not page.is_file():
        raise NotFoundError("there is no page here, see /v1/models")
    await reply(scope, send, page.read_bytes(), content_type=b"text/html; charset=utf-8")
