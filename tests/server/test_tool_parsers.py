from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.server.tools.calls import CallArguments, CallStart, Content, Event
from equipoise.server.tools.parsers import (
    FirstCalls,
    HermesParser,
    JsonArrayParser,
    LlamaParser,
    MistralParser,
    NamedParser,
    PythonicParser,
    ToolParser,
)

if TYPE_CHECKING:
    from collections.abc import Callable

Calls = list[tuple[str, str]]


def read(parser: ToolParser, pieces: list[str]) -> tuple[str, Calls]:
    """Content and calls after all `pieces`."""
    events: list[Event] = []
    for piece in pieces:
        events += parser.feed(piece)
    events += parser.finish()
    content = "".join(event.text for event in events if isinstance(event, Content))
    names = {event.index: event.name for event in events if isinstance(event, CallStart)}
    arguments = dict.fromkeys(names, "")
    for event in events:
        if isinstance(event, CallArguments):
            arguments[event.index] += event.text
    return content, [(names[index], arguments[index]) for index in names]


CASES: list[tuple[str, Callable[[], ToolParser], str, str, Calls]] = [
    (
        "hermes, two calls between text",
        HermesParser,
        'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": "}{\\"", "b": [1]}}\n</tool_call>\n'
        '<tool_call>{"arguments": {"x": 1}, "name": "sub"}</tool_call>',
        "Let me see.",
        [("add", '{"a": "}{\\"", "b": [1]}'), ("sub", '{"x":1}')],
    ),
    ("hermes, plain text with half a marker", HermesParser, "a < b <tool_x <tool_", "a < b <tool_x <tool_", []),
    ("hermes, no JSON", HermesParser, "<tool_call>so</tool_call> ok", "<tool_call>so</tool_call> ok", []),
    ("hermes, no call", HermesParser, '<tool_call>{"foo": 1}</tool_call>', '<tool_call>{"foo": 1}</tool_call>', []),
    ("hermes, cut short", HermesParser, '<tool_call>{"name":"a","arguments":{"b": "tr', "", [("a", '{"b": "tr')]),
    (
        "hermes, arguments as text",
        HermesParser,
        '<tool_call>{"name":"a","arguments":"{}"}</tool_call>',
        "",
        [("a", "{}")],
    ),
    ("hermes, no arguments", HermesParser, '<tool_call>{"name": "a"}</tool_call>', "", [("a", "{}")]),
    (
        "llama3, two calls",
        LlamaParser,
        '<|python_tag|>{"type": "function", "name": "f", "parameters": {"q": "a"}}; {"name": "g", "parameters": {}}',
        "",
        [("f", '{"q": "a"}'), ("g", "{}")],
    ),
    ("llama3, text", LlamaParser, 'hello {"name"', 'hello {"name"', []),
    ("llama3, JSON that is no call", LlamaParser, '{"answer": 42}', '{"answer": 42}', []),
    (
        "mistral, an array",
        MistralParser,
        'Well. [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {"b": "]"}}]',
        "Well.",
        [("f", '{"a": 1}'), ("g", '{"b": "]"}')],
    ),
    (
        "mistral, names",
        MistralParser,
        '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g[ARGS]{}',
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    ("mistral, text", MistralParser, "see [TOOL", "see [TOOL", []),
    ("pythonic", PythonicParser, "[f(a=1, b='x)'), m.g()]", "", [("f", '{"a":1,"b":"x)"}'), ("m.g", "{}")]),
    ("pythonic, a list", PythonicParser, "[1, 2]", "[1, 2]", []),
    ("pythonic, code", PythonicParser, "[f(a=open('x'))]", "[f(a=open('x'))]", []),
    ("pythonic, cut short", PythonicParser, "[f(a=1", "[f(a=1", []),
    (
        "required",
        JsonArrayParser,
        '[{"name": "f", "parameters": {"a": 1}},\n{"name": "g", "parameters": {}}]',
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    ("required, cut short", JsonArrayParser, '[{"name": "f", "para', "", []),
    ("named", lambda: NamedParser("f"), '{"a": 1}', "", [("f", '{"a": 1}')]),
]


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_formats(case: tuple[str, Callable[[], ToolParser], str, str, Calls]) -> None:
    _, build, text, content, calls = case
    assert read(build(), [text]) == (content, calls)


@given(st.sampled_from(CASES), st.lists(st.integers(1, 9), max_size=40))
def test_the_cut_of_the_text_does_not_matter(
    case: tuple[str, Callable[[], ToolParser], str, str, Calls], sizes: list[int]
) -> None:
    _, build, text, content, calls = case
    pieces, at = [], 0
    for size in sizes:
        pieces.append(text[at : at + size])
        at += size
    assert read(build(), [*pieces, text[at:]]) == (content, calls)


@given(st.recursive(st.none() | st.booleans() | st.text() | st.floats(allow_nan=False), st.lists))
def test_arguments_come_through_unchanged(value: object) -> None:
    arguments = json.dumps({"value": value, 'quote "}': "{["})
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert read(HermesParser(), list(text)) == ("", [("f", arguments)])


def test_arguments_are_sent_before_they_are_complete() -> None:
    parser = HermesParser()
    events = parser.feed('<tool_call>{"name": "f", "arguments": {"city": "Ber')
    assert events == [CallStart(0, "f"), CallArguments(0, '{"city": "Ber')]


def test_only_the_first_call_when_calls_may_not_be_parallel() -> None:
    text = '<tool_call>{"name":"a","arguments":{}}</tool_call><tool_call>{"name":"b","arguments":{}}</tool_call>'
    assert read(FirstCalls(HermesParser(), 1), list(text)) == ("", [("a", "{}")])
