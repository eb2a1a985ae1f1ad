from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from equipoise.errors import InvalidValueError
from equipoise.server.schemas import ChatBody, chat_decoder
from equipoise.server.tools.formats import detect_tool_format, tool_grammar, tool_parser
from equipoise.server.tools.parsers import FirstCalls, HermesParser, JsonArrayParser, NamedParser

PARAMETERS = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"type": "integer"}}}


def body(**more: Any) -> ChatBody:
    tools = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("f", "g")]
    fields = {"messages": [{"role": "user", "content": "x"}], "tools": tools, **more}
    return chat_decoder.decode(msgspec.json.encode(fields))


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("... return a json object within <tool_call></tool_call> XML tags ...", "hermes"),
        ('{{ "[TOOL_CALLS] [" }}', "mistral"),
        (
            'Respond in the format {"name": function name, "parameters": dictionary of argument name and value}',
            "llama3",
        ),
        ("You MUST put it in the format of [func_name1(params_name1=params_value1), func_name2()]", "pythonic"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "none"),
        (None, "none"),
    ],
)
def test_the_format_is_read_off_the_template(template: str | None, expected: str) -> None:
    assert detect_tool_format("auto", template) == expected
    assert detect_tool_format("mistral", template) == "mistral"


def test_required_calls_are_held_to_the_schemas_of_the_functions() -> None:
    grammar = tool_grammar(body(tool_choice="required", parallel_tool_calls=False))
    assert grammar is not None
    schema = json.loads(grammar.text)
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)
    assert [one["properties"]["name"]["const"] for one in schema["items"]["anyOf"]] == ["f", "g"]
    assert schema["$defs"] == {"A": {"type": "integer"}}  # at the root, where "#/$defs/A" points


def test_a_named_call_is_held_to_its_parameters() -> None:
    named = {"type": "function", "function": {"name": "g"}}
    grammar = tool_grammar(body(tool_choice=named))
    assert grammar is not None
    assert json.loads(grammar.text) == PARAMETERS
    with pytest.raises(InvalidValueError, match="f, g"):
        tool_grammar(body(tool_choice={"type": "function", "function": {"name": "h"}}))


def test_a_function_without_parameters_takes_an_empty_object() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    grammar = tool_grammar(body(tools=tools, tool_choice={"type": "function", "function": {"name": "f"}}))
    assert grammar is not None
    assert json.loads(grammar.text) == {"type": "object", "properties": {}}


def test_which_parser_reads_the_answer() -> None:
    named = {"type": "function", "function": {"name": "g"}}
    assert isinstance(tool_parser(body(), "hermes"), HermesParser)
    assert isinstance(tool_parser(body(parallel_tool_calls=False), "hermes"), FirstCalls)
    assert isinstance(tool_parser(body(tool_choice="required"), "none"), JsonArrayParser)
    assert isinstance(tool_parser(body(tool_choice=named), "none"), NamedParser)
    assert tool_parser(body(), "none") is None
    assert tool_parser(body(tool_choice="none"), "hermes") is None
    assert tool_parser(body(tools=None), "hermes") is None
