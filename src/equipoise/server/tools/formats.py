"""Tool calls: which format a model speaks, what a tool choice holds it to, which parser reads it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from equipoise.errors import InvalidValueError
from equipoise.request import Grammar
from equipoise.server.schemas import NamedTool
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
    from equipoise.server.schemas import ChatBody, Tool

ToolFormat = Literal["hermes", "llama3", "mistral", "pythonic", "none"]
TOOL_FORMATS: tuple[ToolFormat, ...] = ("hermes", "llama3", "mistral", "pythonic", "none")

MARKERS: dict[ToolFormat, str] = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]"}
"""Text without which a call is not recognised; a special token in some vocabularies."""


def detect_tool_format(asked: str, template: str | None) -> ToolFormat:
    """The format named by `asked`, or with "auto" the one that the chat template speaks of.
    Its answers are "none" for a template that speaks of no tools."""
    for known in TOOL_FORMATS:
        if asked == known:
            return known
    source = template or ""
    if "<tool_call>" in source:
        return "hermes"
    if "[TOOL_CALLS]" in source:
        return "mistral"
    if re.search(r"\[func_name1\(|tool_calls?\s+in\s+python", source):
        return "pythonic"
    if "<|python_tag|>" in source or re.search(r'"parameters":\s*(dictionary|\{)', source):
        return "llama3"
    return "none"


def tool_parser(body: ChatBody, tool_format: ToolFormat) -> ToolParser | None:
    """How to read the answer to `body`; None when it is plain text."""
    if not body.tools or body.tool_choice == "none":
        return None
    if isinstance(body.tool_choice, NamedTool):
        return NamedParser(body.tool_choice.function.name)
    limit = 1 if body.parallel_tool_calls is False else None
    if body.tool_choice == "required":
        return _limited(JsonArrayParser(), limit)
    by_format: dict[ToolFormat, type[HermesParser | LlamaParser | MistralParser | PythonicParser]] = {
        "hermes": HermesParser,
        "llama3": LlamaParser,
        "mistral": MistralParser,
        "pythonic": PythonicParser,
    }
    parser = by_format.get(tool_format)
    return _limited(parser(), limit) if parser else None


def _limited(parser: ToolParser, limit: int | None) -> ToolParser:
    return parser if limit is None else FirstCalls(parser, limit)


def tool_grammar(body: ChatBody) -> Grammar | None:
    """What a required or named tool choice holds the answer to. Raises InvalidValueError for a choice that cannot be.

    named: the function's arguments; required: [{"name": ..., "parameters": ...}, ...]."""
    tools, choice = body.tools or [], body.tool_choice
    if choice in (None, "none", "auto"):
        return None
    if not tools:
        raise InvalidValueError("tool_choice: tools must be given as well", "tool_choice")
    if isinstance(choice, NamedTool):
        name = choice.function.name
        for tool in tools:
            if tool.function.name == name:
                return _schema(_parameters(tool))
        known = ", ".join(tool.function.name for tool in tools)
        raise InvalidValueError(f"tool_choice: {name!r} is not among the tools ({known})", "tool_choice")
    return _schema(_required_schema(tools, one=body.parallel_tool_calls is False))


def _schema(schema: dict[str, Any]) -> Grammar:
    return Grammar("json_schema", msgspec.json.encode(schema).decode())


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object", "properties": {}}


def _required_schema(tools: list[Tool], one: bool) -> dict[str, Any]:
    definitions: dict[str, Any] = {}
    calls = []
    for tool in tools:
        parameters = dict(_parameters(tool))
        for key in ("$defs", "definitions"):  # references are from the root of the schema
            if key in parameters:
                definitions.setdefault(key, {}).update(parameters.pop(key))
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.function.name}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    items = calls[0] if len(calls) == 1 else {"anyOf": calls}
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": items, **definitions}
    if one:
        schema["maxItems"] = 1
    return schema
