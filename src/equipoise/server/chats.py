"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import secrets
import string
import time
from typing import TYPE_CHECKING, Any

import msgspec

from equipoise.errors import InvalidValueError
from equipoise.server import logprobs as shown
from equipoise.server.http import decode, encode, read_body, reply_json
from equipoise.server.params import chat_params, constraint_field, naming_constraint
from equipoise.server.schemas import (
    ChatBody,
    ChatMessage,
    FunctionOut,
    NamedTool,
    Tool,
    ToolCallOut,
    chat_decoder,
    usage_of,
)
from equipoise.server.service import Job
from equipoise.server.stream import DONE, collect_all, stream
from equipoise.server.tools.calls import CallArguments, CallStart, Content, Event
from equipoise.server.tools.formats import MARKERS, tool_grammar, tool_parser
from equipoise.server.wire import answer_id, chunk_edges, has_usage_chunk, request_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import Receive, Scope, Send

    from equipoise.server.generation import Delta, Generation
    from equipoise.server.service import Service, Tokens

INLINE_CHARS = 20_000
"""Messages with more text than this are rendered in a thread."""


async def chat_completions(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer one request. Raises RequestError before the answer began."""
    arrival_s = time.monotonic()
    raw = await read_body(scope, receive, service.max_body_bytes)
    body = decode(chat_decoder, raw)
    service.check_open()
    service.check_model(body.model)
    dp_rank = service.asked_rank(scope, body.routed_dp_rank, body.data_parallel_rank)
    _check_tools(body)
    params = chat_params(body, service.engine.info.vocab_size, tool_grammar(body))
    if body.tools and _marker_is_special(service):
        params = msgspec.structs.replace(params, skip_special_tokens=False)
    prompt_ids = await chat_prompt(
        service,
        body.messages,
        None if body.tool_choice == "none" else body.tools,
        add_generation_prompt=_adds_prompt(body),
        kwargs=_template_kwargs(body),
        is_long=len(raw) > INLINE_CHARS,
    )
    jobs = [Job(prompt_ids, params, request_name(scope, body.rid, body.request_id))]
    writer = _Writer(service, body, jobs[0])
    timings = service.timings(scope, jobs, arrival_s)
    running = service.running(
        receive, jobs, priority=body.priority or 0, cache_salt=body.cache_salt or "", dp_rank=dp_rank
    )
    with naming_constraint(constraint_field(body) or ("tools" if body.tools else None)):
        async with running as generations:
            if body.stream:
                frames = [_Frames(writer, index) for index in range(len(generations))]
                await stream(scope, send, generations, frames, timings, lambda: writer.closing(frames, generations))
            else:
                answers = await collect_all(generations, timings)
                await reply_json(scope, send, writer.answer(answers, generations))


async def chat_prompt(
    service: Service,
    messages: list[ChatMessage],
    tools: list[Tool] | None,
    *,
    add_generation_prompt: bool,
    kwargs: dict[str, Any],
    is_long: bool,
) -> Tokens:
    """Token ids of `messages` in the model's template. Raises InvalidValueError naming the field."""
    if not messages:
        raise InvalidValueError("messages: at least one message is needed", "messages", "empty_prompt")
    template = service.template(bool(tools))
    plain = [msgspec.to_builtins(message) for message in messages]
    plain_tools = [msgspec.to_builtins(tool) for tool in tools] if tools else None
    for name in ("self", "messages", "tools", "add_generation_prompt"):
        if name in kwargs:
            raise InvalidValueError(f"chat_template_kwargs: {name!r} cannot be set here", "chat_template_kwargs")
    if is_long:
        text = await asyncio.to_thread(template.render, plain, plain_tools, add_generation_prompt, **kwargs)
    else:
        text = template.render(plain, plain_tools, add_generation_prompt, **kwargs)
    ids = await service.prompt_text(text, "messages", add_special_tokens=False)
    service.check_length(ids, "messages")
    return ids


def _check_tools(body: ChatBody) -> None:
    names = [tool.function.name for tool in body.tools or ()]
    for index, name in enumerate(names):
        if not name or name in names[:index]:
            raise InvalidValueError(
                f"tools[{index}].function.name: {name!r} is empty or given twice", f"tools[{index}].function.name"
            )


def _adds_prompt(body: ChatBody) -> bool:
    if body.continue_final_message:
        if body.add_generation_prompt:
            raise InvalidValueError("continue_final_message: excludes add_generation_prompt", "continue_final_message")
        return False
    return body.add_generation_prompt is not False


def _template_kwargs(body: ChatBody) -> dict[str, Any]:
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    return kwargs


def _marker_is_special(service: Service) -> bool:
    """True when calls start with a token that would be left out of the text."""
    marker = MARKERS.get(service.tool_format)
    if marker is None:
        return False
    tokenizer = service.engine.tokenizer
    ids = tokenizer.encode(marker, add_special_tokens=False).tolist()
    return len(ids) == 1 and ids[0] in tokenizer.special_ids


def _call_id(tool_format: str) -> str:
    if tool_format != "mistral":
        return f"call_{secrets.token_hex(12)}"
    letters = string.ascii_letters + string.digits  # Mistral's templates insist on nine of these
    return "".join(secrets.choice(letters) for _ in range(9))


class _Writer:
    """Puts answers to one request into OpenAI's shape."""

    def __init__(self, service: Service, body: ChatBody, job: Job) -> None:
        self.service = service
        self.tokenizer = service.engine.tokenizer
        self.body = body
        self.job = job
        self.head: dict[str, Any] = {
            "id": answer_id("chatcmpl", job.request_id),
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": service.model_name,
        }

    def finish_reason(self, reason: str | None, has_calls: bool) -> str | None:
        """A choice that ends well with calls ends for them, unless the caller named the function."""
        if reason == "stop" and has_calls and not isinstance(self.body.tool_choice, NamedTool):
            return "tool_calls"
        return reason

    def logprobs(self, delta: Delta) -> dict[str, Any] | None:
        """`logprobs` of a choice, None unless asked for."""
        return shown.chat_logprobs(self.tokenizer, delta.logprobs or []) if self.body.logprobs else None

    def answer(self, answers: list[Delta], generations: Sequence[Generation]) -> dict[str, Any]:
        """The whole answer."""
        answer = {
            **self.head,
            "choices": [self._choice(index, delta) for index, delta in enumerate(answers)],
            "usage": self._usage(answers, generations),
        }
        if self.body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = shown.prompt_logprobs(self.tokenizer, answers[0].prompt_logprobs or [])
        if self.body.return_token_ids:
            answer["prompt_token_ids"] = self.job.prompt_ids.tolist()
        return answer

    def _choice(self, index: int, delta: Delta) -> dict[str, Any]:
        parser = tool_parser(self.body, self.service.tool_format)
        events = [Content(delta.text)] if parser is None else [*parser.feed(delta.text), *parser.finish()]
        content, calls = _joined(events, self.service.tool_format)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["tool_calls"] = calls
            message["content"] = content or None
        choice = {
            "index": index,
            "message": message,
            "logprobs": self.logprobs(delta),
            "finish_reason": self.finish_reason(delta.finish_reason, bool(calls)),
            "stop_reason": delta.stop_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def closing(self, frames: list[_Frames], generations: Sequence[Generation]) -> bytes:
        """The end of a stream: counts, when they were asked for, and [DONE]."""
        if not has_usage_chunk(self.body):
            return DONE
        usage = self._usage([choice.last for choice in frames], generations)
        return b"data: " + encode({**self.head, "choices": [], "usage": usage}) + b"\n\n" + DONE

    def _usage(self, answers: Sequence[Delta], generations: Sequence[Generation]) -> Any:
        num_output = sum(delta.num_output for delta in answers)
        return usage_of(generations[0].num_prompt, num_output, answers[0].num_cached)


def _joined(events: Sequence[Event], tool_format: str) -> tuple[str, list[ToolCallOut]]:
    """Content and calls of a whole answer."""
    texts: list[str] = []
    names: dict[int, str] = {}
    arguments: dict[int, list[str]] = {}
    for event in events:
        if isinstance(event, Content):
            texts.append(event.text)
        elif isinstance(event, CallStart):
            names[event.index], arguments[event.index] = event.name, []
        else:
            arguments[event.index].append(event.text)
    calls = [
        ToolCallOut(FunctionOut(name, "".join(arguments[index])), id=_call_id(tool_format), type="function")
        for index, name in names.items()
    ]
    return "".join(texts), calls


class _Frames:
    """Events of one choice."""

    def __init__(self, writer: _Writer, index: int) -> None:
        body = writer.body
        self.last: Delta
        self._writer = writer
        self._index = index
        self._parser = tool_parser(body, writer.service.tool_format)
        self._has_calls = False
        self._is_plain = self._parser is None and not body.logprobs and not body.return_token_ids
        self._prefix, self._end = chunk_edges(writer.head, body)
        self._text_prefix = self._prefix + b'{"index":%d,"delta":{"content":' % index
        self._text_suffix = b'},"logprobs":null,"finish_reason":null}' + self._end

    def opening(self) -> bytes:
        """Who speaks."""
        delta = b'{"index":%d,"delta":{"role":"assistant","content":""' % self._index
        return self._prefix + delta + self._text_suffix

    def frame(self, delta: Delta) -> bytes:
        self.last = delta
        if self._is_plain and delta.finish_reason is None:
            text = delta.text
            return self._text_prefix + encode(text) + self._text_suffix if text else b""
        events: list[Event] = [Content(delta.text)] if delta.text else []
        if self._parser is not None:
            events = self._parser.feed(delta.text)
            if delta.finish_reason is not None:
                events += self._parser.finish()
        parts = [self._part(event) for event in events]
        if parts or delta.finish_reason is not None or delta.logprobs or self._writer.body.return_token_ids:
            return b"".join(self._chunks(parts, delta))
        return b""

    def _part(self, event: Event) -> dict[str, Any]:
        """An event as a choice's `delta`."""
        if isinstance(event, Content):
            return {"content": event.text}
        if isinstance(event, CallArguments):
            return {"tool_calls": [ToolCallOut(FunctionOut(arguments=event.text), index=event.index)]}
        self._has_calls = True
        call_id = _call_id(self._writer.service.tool_format)
        function = FunctionOut(event.name, "")
        return {"tool_calls": [ToolCallOut(function, id=call_id, type="function", index=event.index)]}

    def _chunks(self, parts: list[dict[str, Any]], delta: Delta) -> list[bytes]:
        """One chunk per part; logprobs, token ids and the reason come with the last."""
        parts = parts or [{}]
        chunks = []
        for number, part in enumerate(parts, 1):
            is_last = number == len(parts)
            reason = self._writer.finish_reason(delta.finish_reason, self._has_calls) if is_last else None
            choice: dict[str, Any] = {
                "index": self._index,
                "delta": part,
                "logprobs": self._writer.logprobs(delta) if is_last else None,
                "finish_reason": reason,
            }
            if is_last and delta.finish_reason is not None:
                choice["stop_reason"] = delta.stop_reason
            if is_last and self._writer.body.return_token_ids:
                choice["token_ids"] = delta.token_ids
            chunks.append(self._prefix + encode(choice) + self._end)
        return chunks
