"""Chat templates: messages in, prompt text out, in the Jinja dialect of Hugging Face checkpoints."""

from __future__ import annotations

import datetime
import json
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from equipoise.errors import CheckpointError, InvalidValueError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jinja2.parser import Parser

    Message = dict[str, Any]


class ChatTemplate:
    """A compiled chat template. `source` is its text: tool-call formats are recognised by it."""

    def __init__(self, source: str, bos_token: str | None = None, eos_token: str | None = None) -> None:
        """Raises CheckpointError when `source` is not a template."""
        self.source = source
        self._special = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        try:
            self._template = _ENVIRONMENT.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"chat template: line {error.lineno}: {error.message}") from None
        except RecursionError:
            raise CheckpointError("chat template: it is nested too deeply") from None

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt for `messages` (OpenAI's shape; content may be a list of text parts).

        Tool-call arguments given as JSON text reach the template as objects. `kwargs` are the template's own
        switches. Raises InvalidValueError when the template refuses the messages."""
        known: dict[str, Any] = {
            **self._special,
            "documents": None,
            **kwargs,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        shaped = [_template_message(message, index, self.source) for index, message in enumerate(messages)]
        try:
            return self._template.render({**known, "messages": shaped})
        except jinja2.TemplateError as error:
            raise InvalidValueError(f"messages: the chat template refuses them: {error.message}", "messages") from None
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, OverflowError, RecursionError) as error:
            raise InvalidValueError(f"messages: the chat template cannot render them: {error}", "messages") from None


def _template_message(message: Message, index: int, source: str) -> Message:
    _check_type(message, dict, f"messages[{index}]")
    shaped = {key: value for key, value in message.items() if value is not None}
    shaped["content"] = flatten_content(message.get("content"), f"messages[{index}].content")
    if shaped.get("role") == "developer" and "developer" not in source:
        shaped["role"] = "system"
    if "tool_calls" in shaped:
        _check_type(shaped["tool_calls"], list, f"messages[{index}].tool_calls")
        shaped["tool_calls"] = [_call_with_object(call) for call in shaped["tool_calls"]]
    return shaped


def _check_type(value: object, kind: type, field: str) -> None:
    """Raise InvalidValueError unless `value` is a `kind`: programs may hand over anything."""
    if not isinstance(value, kind):
        raise InvalidValueError(f"{field}: expected {kind.__name__}, got {type(value).__name__}", field, "invalid_type")


def flatten_content(content: str | Sequence[dict[str, Any]] | None, field: str) -> str:
    """Text of a message: a string as it is, a list of text parts joined. Raises InvalidValueError for other parts."""
    if content is None or isinstance(content, str):
        return content or ""
    _check_type(content, list, field)
    texts = []
    for index, part in enumerate(content):
        _check_type(part, dict, f"{field}[{index}]")
        kind = part.get("type")
        if kind not in ("text", "input_text", "refusal"):
            raise InvalidValueError(
                f"{field}[{index}]: parts of type {kind!r} are not served, this model takes text alone",
                f"{field}[{index}]",
                "unsupported_content",
            )
        text = part.get("text") or part.get("refusal") or ""
        _check_type(text, str, f"{field}[{index}].text")
        texts.append(text)
    return "\n".join(texts)


def _call_with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(arguments, str):
        return call
    try:
        parsed = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return call
    return {**call, "function": {**call["function"], "arguments": parsed}}


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks trained spans: the text inside is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller: Any) -> str:
        return str(caller())


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which no checkpoint was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


_ENVIRONMENT = _environment()
