"""The openai client against a tiny real model: what needs logits. Schemas, tools, logprobs."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import openai
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.serving import Server

MODEL = "tiny"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "A tool", "parameters": PARAMETERS}}
    for name in ("weather", "traffic")
]
USER = [{"role": "user", "content": "Weather?"}]


@pytest.fixture(scope="module")
def client(torch_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{torch_server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def ask(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=USER, max_tokens=300, **more)  # type: ignore[call-overload]


def streamed(events: Any) -> tuple[str, list[dict[str, str]], str | None]:
    """Content, calls and finish reason of a stream, put together as a client does."""
    content, calls, reason = "", [], None
    for event in events:
        for choice in event.choices:
            content += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or []:
                if call.id:
                    calls.append({"id": call.id, "name": call.function.name, "arguments": ""})
                calls[call.index]["arguments"] += call.function.arguments or ""
    return content, calls, reason


def test_json_schema(client: openai.OpenAI) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "trip", "schema": PARAMETERS, "strict": True}}
    answer = ask(client, response_format=wanted)
    trip = json.loads(answer.choices[0].message.content)
    assert trip["city"] in ("Paris", "Rome")
    assert answer.choices[0].finish_reason == "stop"
    content, _, reason = streamed(ask(client, response_format=wanted, stream=True))
    assert json.loads(content)["days"] in (1, 2)
    assert reason == "stop"


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"response_format": {"type": "regex", "pattern": "(ab|cd){3}"}}, "(ab|cd){3}"),
        ({"response_format": {"type": "grammar", "grammar": 'root ::= "x" [0-9] "y"'}}, "x[0-9]y"),
        ({"guided_regex": "[a-c]{5}"}, "[a-c]{5}"),
        ({"guided_choice": ["yes", 'n"o']}, 'yes|n"o'),
        ({"guided_grammar": 'root ::= "q" | "r"'}, "q|r"),
        ({"guided_json": {"enum": ["k"]}}, '\\s*"k"\\s*'),
        ({"structured_outputs": {"regex": "z{4}"}}, "z{4}"),
        ({"structured_outputs": {"json": '{"const": 5}'}}, "\\s*5\\s*"),
        ({"regex": "m+n"}, "m+n"),
        ({"ebnf": 'root ::= "t" "u"'}, "tu"),
        ({"json_schema": '{"enum": [true]}'}, "\\s*true\\s*"),
    ],
)
def test_constraints_in_every_spelling(client: openai.OpenAI, extra: dict[str, Any], pattern: str) -> None:
    choice = ask(client, extra_body=extra).choices[0]
    if choice.finish_reason == "stop":
        assert re.fullmatch(pattern, choice.message.content)
    else:  # "m+" may go on for ever
        assert pattern == "m+n"


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}}}, "response_format"),
        ({"guided_json": {"$ref": "#/nowhere"}}, "guided_json"),
        ({"guided_regex": "(ab"}, "guided_regex"),
        ({"ebnf": "root ::= nothing"}, "ebnf"),
        ({"structured_outputs": {"regex": "[z"}}, "structured_outputs.regex"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_does_not_compile_names_its_field(
    client: openai.OpenAI, extra: dict[str, Any], field: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        list(ask(client, extra_body={**extra, "stream": stream}))
    assert caught.value.param == field
    assert str(caught.value.body["message"]).startswith(f"{field}: ")  # type: ignore[index]
    assert caught.value.code == "invalid_schema"


def test_a_required_tool_call(client: openai.OpenAI) -> None:
    choice = ask(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=1).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    [call] = choice.message.tool_calls
    assert call.function.name in ("weather", "traffic")
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    events = ask(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=1, stream=True)
    content, calls, reason = streamed(events)
    assert (content, reason) == ("", "tool_calls")
    assert [(one["name"], one["arguments"]) for one in calls] == [(call.function.name, call.function.arguments)]


def test_a_named_tool_call(client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "traffic"}}
    choice = ask(client, tools=TOOLS, tool_choice=named).choices[0]
    assert choice.message.tool_calls[0].function.name == "traffic"
    assert set(json.loads(choice.message.tool_calls[0].function.arguments)) == {"city", "days"}
    assert choice.finish_reason == "stop"
    _, calls, _ = streamed(ask(client, tools=TOOLS, tool_choice=named, stream=True))
    assert calls[0]["name"] == "traffic"
    assert set(json.loads(calls[0]["arguments"])) == {"city", "days"}


def test_tool_calls_found_in_the_text(client: openai.OpenAI) -> None:
    """A regular expression puts into the model's mouth what a trained model would say of itself."""
    said = r'I look\. <tool_call>\{"name": "weather", "arguments": \{"city": "(Paris|Rome)"\}\}</tool_call>'
    extra = {"guided_regex": said}
    choice = ask(client, tools=TOOLS, extra_body=extra).choices[0]
    assert choice.message.content == "I look."
    [call] = choice.message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    assert choice.finish_reason == "tool_calls"
    content, calls, reason = streamed(ask(client, tools=TOOLS, extra_body=extra, stream=True))
    assert (content, reason, calls[0]["name"]) == ("I look.", "tool_calls", "weather")
    assert json.loads(calls[0]["arguments"])["city"] in ("Paris", "Rome")
    plain = ask(client, tools=TOOLS, tool_choice="none", extra_body=extra).choices[0].message
    assert plain.tool_calls is None
    assert "<tool_call>" in plain.content


def test_a_conversation_with_tool_results(client: openai.OpenAI) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages: Any = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "sunny"}]},
    ]
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, max_tokens=3)  # type: ignore[arg-type]
    assert answer.choices[0].finish_reason == "length"


def test_logprobs_rank_the_greedy_token_first(client: openai.OpenAI) -> None:
    choice = ask(client, temperature=0, logprobs=True, top_logprobs=4).choices[0]
    for row in choice.logprobs.content:
        assert row.logprob == max(top.logprob for top in row.top_logprobs)
        assert row.token == row.top_logprobs[0].token


def test_logit_bias_decides(client: openai.OpenAI) -> None:
    token = client.completions.create(
        model=MODEL, prompt="x", max_tokens=1, temperature=0, extra_body={"return_token_ids": True}
    ).choices[0]
    banned = token.model_extra["token_ids"][0]  # type: ignore[index]
    other = client.completions.create(
        model=MODEL, prompt="x", max_tokens=1, temperature=0, logit_bias={str(banned): -100},
        extra_body={"return_token_ids": True},
    ).choices[0]  # fmt: skip
    assert other.model_extra["token_ids"] != [banned]  # type: ignore[index]


def test_one_bad_request_harms_no_other(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="steady", max_tokens=60, temperature=0).choices[0].text
    stream = client.completions.create(model=MODEL, prompt="steady", max_tokens=60, temperature=0, stream=True)
    text = ""
    for number, event in enumerate(stream):
        text += event.choices[0].text
        if number % 10 == 0:
            with pytest.raises(openai.BadRequestError):
                ask(client, extra_body={"guided_regex": "(" + "a" * number})
    assert text == whole
