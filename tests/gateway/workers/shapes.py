"""Answers of generation routes, whole and as events. The same body always gets the same bytes."""

from __future__ import annotations

import functools
import json
import zlib
from dataclasses import dataclass
from typing import Any

CREATED = 1_750_000_000
Body = dict[str, Any]
CHAT, COMPLETION, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
ROUTES = (CHAT, COMPLETION, GENERATE)


def prompt_text(path: str, body: Body) -> str:
    """All that the model reads."""
    if path == CHAT:
        return json.dumps(body.get("messages", []), ensure_ascii=False)
    prompt = body.get("prompt") if path == COMPLETION else body.get("text", body.get("input_ids"))
    return prompt if isinstance(prompt, str) else json.dumps(prompt)


def asked_tokens(path: str, body: Body) -> int | None:
    """The longest answer that the request allows, None where it says nothing."""
    if path == GENERATE:
        return (body.get("sampling_params") or {}).get("max_new_tokens")
    return body.get("max_completion_tokens") or body.get("max_tokens")


@dataclass
class Generation:
    """One request and the words of its answer."""

    path: str
    body: Body
    num_prompt: int
    num_output: int
    finish: str  # "stop" or "length"
    padding: str = ""  # after each word

    @functools.cached_property
    def id(self) -> str:
        """The same for the same prompt."""
        return f"{zlib.crc32(prompt_text(self.path, self.body).encode()):08x}"

    def words(self) -> list[str]:
        """One per token."""
        return [self.word(index) for index in range(self.num_output)]

    def word(self, index: int) -> str:
        """The text of token `index`."""
        return f" w{(int(self.id, 16) + index * 7919) % 99991}{self.padding}"

    def usage(self) -> Body:
        """OpenAI's counts."""
        total = self.num_prompt + self.num_output
        return {"prompt_tokens": self.num_prompt, "completion_tokens": self.num_output, "total_tokens": total}

    def calls_tool(self) -> bool:
        """Whether the answer is a call of the first tool that the request names."""
        return self.path == CHAT and bool(self.body.get("tools")) and self.body.get("tool_choice") != "none"

    def tool_call(self) -> Body:
        """That call."""
        function = self.body["tools"][0]["function"]["name"]
        return {"id": f"call_{self.id}", "type": "function", "function": {"name": function, "arguments": '{"a": 1}'}}


def whole(one: Generation, input_logprobs: list[Any] | None = None) -> bytes:
    """The answer in one piece."""
    text = "".join(one.words())
    if one.path == GENERATE:
        return json.dumps({"text": text, "meta_info": _meta(one, one.num_output, input_logprobs)}).encode()
    choice: Body = {"index": 0, "logprobs": None, "finish_reason": one.finish}
    if one.path == COMPLETION:
        choice["text"] = text
    elif one.calls_tool():
        choice |= {"message": {"role": "assistant", "content": None, "tool_calls": [one.tool_call()]}}
        choice["finish_reason"] = "tool_calls"
    else:
        choice["message"] = {"role": "assistant", "content": text}
    return json.dumps({**_frame(one, streamed=False), "choices": [choice], "usage": one.usage()}).encode()


def event(one: Generation, index: int, input_logprobs: list[Any] | None = None) -> bytes:
    """The server-sent event of token `index`; /generate's text grows from event to event, as SGLang's does."""
    is_last = index == one.num_output - 1
    if one.path == GENERATE:
        meta = _meta(one, index + 1, input_logprobs if index == 0 else None)
        return _sse({"text": "".join(one.words()[: index + 1]), "meta_info": meta})
    choice: Body = {"index": 0, "logprobs": None, "finish_reason": one.finish if is_last else None}
    word = one.word(index)
    if one.path == COMPLETION:
        choice["text"] = word
    elif one.calls_tool():
        choice["delta"] = {"role": "assistant", "tool_calls": [{"index": 0, **one.tool_call()}]} if index == 0 else {}
        choice["finish_reason"] = "tool_calls" if is_last else None
    else:
        choice["delta"] = {"role": "assistant", "content": word} if index == 0 else {"content": word}
    return _sse({**_frame(one, streamed=True), "choices": [choice]})


def usage_event(one: Generation) -> bytes | None:
    """The event with the counts, where `stream_options` asks for it."""
    if one.path == GENERATE or not (one.body.get("stream_options") or {}).get("include_usage"):
        return None
    return _sse({**_frame(one, streamed=True), "choices": [], "usage": one.usage()})


DONE = b"data: [DONE]\n\n"


def _sse(payload: Body) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def _frame(one: Generation, *, streamed: bool) -> Body:
    if one.path == CHAT:
        prefix, kind = "chatcmpl", "chat.completion.chunk" if streamed else "chat.completion"
    else:
        prefix, kind = "cmpl", "text_completion"
    return {"id": f"{prefix}-{one.id}", "object": kind, "created": CREATED, "model": one.body.get("model", "")}


def _meta(one: Generation, num_output: int, input_logprobs: list[Any] | None) -> Body:
    finish = None
    if num_output == one.num_output:
        finish = {"type": one.finish, "length": num_output} if one.finish == "length" else {"type": "stop"}
    meta = {"id": one.id, "finish_reason": finish, "prompt_tokens": one.num_prompt, "completion_tokens": num_output}
    meta |= {"cached_tokens": 0, "weight_version": "default"}
    if one.body.get("return_logprob"):
        meta["input_token_logprobs"] = input_logprobs or []
        meta["output_token_logprobs"] = [[-0.5, index, None] for index in range(num_output)]
    return meta


def input_logprobs(one: Generation) -> list[Any]:
    """A log-probability for each token of the prompt; the first has none."""
    return [[None if index == 0 else -0.25, index, None] for index in range(one.num_prompt)]
