"""Bad input against a real server: the status, the field that is named, and a server that goes on."""

from __future__ import annotations

import http.client
import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.serving import Server

TEXT = {"prompt": "hello", "max_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
COMPLETIONS, CHATS, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"


def post(server: Server, path: str, body: bytes | dict[str, Any], **headers: str) -> tuple[int, dict[str, Any]]:
    """Status and body of the answer."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        connection.request("POST", path, raw, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


WRONG_FIELDS: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", 1]}, "prompt"),
    (COMPLETIONS, {"prompt": 5}, "prompt"),
    (COMPLETIONS, {"prompt": [1, 100000]}, "prompt"),
    (COMPLETIONS, {"prompt": [1, -1]}, "prompt"),
    (COMPLETIONS, {"prompt": [2**70]}, "prompt"),
    (COMPLETIONS, {}, "prompt"),
    (COMPLETIONS, {**TEXT, "no_such_field": 1}, "no_such_field"),
    (COMPLETIONS, {**TEXT, "max_tokens": "many"}, "max_tokens"),
    (COMPLETIONS, {**TEXT, "max_tokens": 0}, "max_tokens"),
    (COMPLETIONS, {**TEXT, "max_tokens": 1.5}, "max_tokens"),
    (COMPLETIONS, {**TEXT, "max_tokens": 2**70}, "max_tokens"),
    (COMPLETIONS, {**TEXT, "min_tokens": 3}, "min_tokens"),
    (CHATS, {**CHAT, "max_tokens": None, "min_tokens": 2**63 - 1}, "min_tokens"),
    (COMPLETIONS, {**TEXT, "temperature": -1}, "temperature"),
    (COMPLETIONS, {**TEXT, "top_p": 0}, "top_p"),
    (COMPLETIONS, {**TEXT, "top_p": 1.1}, "top_p"),
    (COMPLETIONS, {**TEXT, "top_k": -2}, "top_k"),
    (COMPLETIONS, {**TEXT, "top_k": 2**70}, "top_k"),
    (COMPLETIONS, {**TEXT, "min_p": 2}, "min_p"),
    (COMPLETIONS, {**TEXT, "n": 0}, "n"),
    (COMPLETIONS, {**TEXT, "n": 129}, "n"),
    (COMPLETIONS, {**TEXT, "prompt": ["a"] * 20, "n": 128}, "prompt"),
    (COMPLETIONS, {**TEXT, "seed": 2**63}, "seed"),
    (COMPLETIONS, {**TEXT, "stop": [""]}, "stop"),
    (COMPLETIONS, {**TEXT, "stop": ["a"] * 17}, "stop"),
    (COMPLETIONS, {**TEXT, "stop": [1]}, "stop[0]"),
    (COMPLETIONS, {**TEXT, "stop_token_ids": [999999]}, "stop_token_ids"),
    (COMPLETIONS, {**TEXT, "logit_bias": {"a": 1}}, "logit_bias"),
    (COMPLETIONS, {**TEXT, "logit_bias": {"99999": 1}}, "logit_bias"),
    (COMPLETIONS, {**TEXT, "logit_bias": {"1": 101}}, "logit_bias"),
    (COMPLETIONS, {**TEXT, "logprobs": 21}, "logprobs"),
    (COMPLETIONS, {**TEXT, "stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    (COMPLETIONS, {**TEXT, "suffix": "end"}, "suffix"),
    (COMPLETIONS, {**TEXT, "best_of": 2}, "best_of"),
    (COMPLETIONS, {**TEXT, "priority": "high"}, "priority"),
    (COMPLETIONS, {**TEXT, "priority": 2**70}, "priority"),
    (COMPLETIONS, {**TEXT, "priority": -(2**70)}, "priority"),
    (COMPLETIONS, {**TEXT, "stream_options": {"foo": 1}}, "stream_options.foo"),
    (COMPLETIONS, {**TEXT, "routed_dp_rank": 1}, "routed_dp_rank"),
    (COMPLETIONS, {**TEXT, "data_parallel_rank": -1}, "data_parallel_rank"),
    (COMPLETIONS, {**TEXT, "guided_json": "{"}, "guided_json"),
    (COMPLETIONS, {**TEXT, "guided_json": "[]"}, "guided_json"),
    (COMPLETIONS, {**TEXT, "guided_regex": "a", "regex": "b"}, "regex"),
    (COMPLETIONS, {**TEXT, "guided_choice": []}, "guided_choice"),
    (COMPLETIONS, {**TEXT, "ebnf": " "}, "ebnf"),
    (COMPLETIONS, {**TEXT, "guided_regex": "a+"}, "guided_regex"),  # the sim executor follows none
    (COMPLETIONS, {**TEXT, "stream": True, "guided_regex": "a+"}, "guided_regex"),
    (COMPLETIONS, {**TEXT, "response_format": {"type": "xml"}}, "response_format.type"),
    (COMPLETIONS, {**TEXT, "response_format": {"type": "regex"}}, "response_format.pattern"),
    (CHATS, {**CHAT, "messages": []}, "messages"),
    (CHATS, {"max_tokens": 1}, "messages"),
    (CHATS, {**CHAT, "messages": [{"content": "x"}]}, "messages[0].role"),
    (CHATS, {**CHAT, "messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    (CHATS, {**CHAT, "messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood"),
    (
        CHATS,
        {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0]",
    ),
    (
        CHATS,
        {**CHAT, "messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
        "messages[0].content[0].text",
    ),
    (CHATS, {**CHAT, "top_logprobs": 1}, "top_logprobs"),
    (CHATS, {**CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHATS, {**CHAT, "max_completion_tokens": 0}, "max_completion_tokens"),
    (CHATS, {**CHAT, "modalities": ["audio"]}, "modalities"),
    (CHATS, {**CHAT, "tool_choice": "required"}, "tool_choice"),
    (CHATS, {**CHAT, "tool_choice": "sometimes"}, "tool_choice"),
    (CHATS, {**CHAT, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    (CHATS, {**CHAT, "tools": [TOOL], "tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
    (CHATS, {**CHAT, "tools": [TOOL, TOOL]}, "tools[1].function.name"),
    (CHATS, {**CHAT, "tools": [{"type": "function"}]}, "tools[0].function"),
    (CHATS, {**CHAT, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    (CHATS, {**CHAT, "chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
    (CHATS, {**CHAT, "functions": []}, "functions"),
    (GENERATE, {}, "text"),
    (GENERATE, {"text": "a", "input_ids": [1]}, "text"),
    (GENERATE, {"text": ""}, "text"),
    (GENERATE, {"input_ids": [1, [2]]}, "input_ids"),
    (GENERATE, {"input_ids": [300]}, "input_ids"),
    (GENERATE, {"text": "a", "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
    (GENERATE, {"text": "a", "sampling_params": {"max_tokens": 1}}, "sampling_params.max_tokens"),
    (GENERATE, {"text": "a", "sampling_params": {"top_p": 7}}, "sampling_params.top_p"),
    (GENERATE, {"text": "a", "sampling_params": {"regex": "a"}}, "sampling_params.regex"),
    (GENERATE, {"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
    (GENERATE, {"text": ["a", "b"], "rid": ["x"]}, "rid"),
    (GENERATE, {"text": ["a", "b"], "rid": ["x", "y" * 257]}, "rid"),
    ("/tokenize", {}, "prompt"),
    ("/detokenize", {"tokens": [99999]}, "tokens"),
    ("/detokenize", {"tokens": "abc"}, "tokens"),
    ("/abort_request", {}, "rid"),
    ("/pause", {"mode": "some"}, "mode"),
]


@pytest.mark.parametrize(("path", "body", "field"), WRONG_FIELDS, ids=lambda value: str(value)[:60])
def test_a_wrong_field_is_named(sim_server: Server, path: str, body: dict[str, Any], field: str) -> None:
    status, answer = post(sim_server, path, body)
    error = answer["error"]
    assert status == 400, answer
    assert error["param"] == field or error["param"].startswith(f"{field}[")
    assert field.partition("[")[0] in error["message"]
    assert error["type"] == "invalid_request_error"
    assert "Traceback" not in sim_server.read_log()


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "empty"),
        (b"   ", "empty"),
        (b'{"prompt": "a",}', "byte 15"),
        (b'{"prompt": "a"', "byte 14"),
        (b'{"prompt": "a"} extra', "trailing"),
        (b"\xef\xbb\xbf{}", "byte 0"),
        (b'{"prompt": "a\xff"}', "UTF-8: byte 13"),
        (b'{"prompt": "\\ud800"}', "not valid JSON"),
        (b"[1, 2]", "object"),
        (b'"hello"', "object"),
        (b'{"prompt": ' + b"[" * 100_000, "prompt"),
        (b'{"metadata": {"a": ' + b"[" * 100_000, "deep"),
        (b'{"prompt": "a", "temperature": NaN}', "byte"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_broken_json_says_where(sim_server: Server, raw: bytes, words: str) -> None:
    status, answer = post(sim_server, COMPLETIONS, raw)
    assert status == 400
    assert words in answer["error"]["message"]
    assert "Traceback" not in sim_server.read_log()


@pytest.mark.parametrize(("field", "instead"), [("max_token", ", did you mean max_tokens?"), ("zzz", "")])
def test_an_unknown_field_is_told_the_nearest_one(sim_server: Server, field: str, instead: str) -> None:
    message = post(sim_server, COMPLETIONS, {**TEXT, field: 1})[1]["error"]["message"]
    assert message == f"{field}: this field is not known{instead}"


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_an_unknown_model_is_a_404_that_names_what_is_served(sim_server: Server, path: str) -> None:
    status, answer = post(sim_server, path, {**(CHAT if path == CHATS else TEXT), "model": "other"})
    assert status == 404
    assert answer["error"]["code"] == "model_not_found"
    assert "sim-model" in answer["error"]["message"]


def test_a_prompt_that_is_too_long_names_both_numbers(sim_server: Server) -> None:
    status, answer = post(sim_server, COMPLETIONS, {"prompt": "x" * 200_000})
    assert status == 400
    assert "200000" in answer["error"]["message"]
    assert "199999" in answer["error"]["message"]
    assert answer["error"]["code"] == "context_length_exceeded"


def test_routes_and_methods_that_are_not_there(sim_server: Server) -> None:
    assert post(sim_server, "/v1/nothing", TEXT)[0] == 404
    status, answer = post(sim_server, "/v1/models", TEXT)
    assert status == 405
    assert answer["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize("rank", ["1", "-1", "x", "", "0x0", "9" * 400])
def test_a_rank_that_is_not_there(sim_server: Server, rank: str) -> None:
    status, answer = post(sim_server, COMPLETIONS, TEXT, X_Data_Parallel_Rank=rank)
    assert status == 400
    assert answer["error"]["param"] == "X-Data-Parallel-Rank"


def test_the_rank_that_is_there(sim_server: Server) -> None:
    assert post(sim_server, COMPLETIONS, {**TEXT, "routed_dp_rank": 0}, X_Data_Parallel_Rank="0")[0] == 200


def test_what_openai_clients_send_is_accepted(sim_server: Server) -> None:
    ignored = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "reasoning_effort": "low",
        "verbosity": "low",
        "parallel_tool_calls": True,
        "stream_options": None,
        "stop": None,
        "temperature": None,
        "response_format": {"type": "text"},
    }
    assert post(sim_server, CHATS, {**CHAT, **ignored})[0] == 200


@pytest.mark.parametrize("arguments", ["[" * 100_000, "[" * 600 + "]" * 600, '{"a": "\\ud800"}', "NaN"])
def test_arguments_of_earlier_calls_may_be_any_text(sim_server: Server, arguments: str) -> None:
    """They are what some model wrote: shown to the template as they are, or refused, but never a 500."""
    call = {"function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    status, answer = post(sim_server, CHATS, {**CHAT, "messages": messages})
    assert status in (200, 400), answer
