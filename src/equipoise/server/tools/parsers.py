"""Parsers of tool calls: the answer's text, in whatever pieces it comes, into content and calls.

    hermes    <tool_call>{"name": "f", "arguments": {...}}</tool_call>
    llama3    {"name": "f", "parameters": {...}}; ...
    mistral   [TOOL_CALLS][{"name": "f", "arguments": {...}}]   or   [TOOL_CALLS]f{...}
    pythonic  [f(a=1), g(b="x")]

What comes out does not depend on how the text was cut.
"""

from __future__ import annotations

import ast
import re
from typing import Protocol

import msgspec

from equipoise.server.tools.calls import CallArguments, CallReader, CallStart, Content, Event, ValueScanner


class ToolParser(Protocol):
    """Reads one answer."""

    def feed(self, text: str) -> list[Event]:
        """Read on; what is known by now."""
        ...

    def finish(self) -> list[Event]:
        """The answer is over: what was held back."""
        ...


def held_back(text: str, marker: str) -> int:
    """Characters at the end of `text` that may be the start of `marker`."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-size:]):
            return size
    return 0


class _MarkedParser:
    """Text until a marker, then calls; text after the calls is text again."""

    marker = ""

    def __init__(self) -> None:
        self.num_calls = 0
        self._held = ""
        self._in_calls = False

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        self._held += text
        while self._step(events):
            pass
        return events

    def finish(self) -> list[Event]:
        events: list[Event] = []
        if self._in_calls:
            self._finish_calls(events)
        elif self._held.strip():
            events.append(Content(self._held))
        self._held = ""
        return events

    def _step(self, events: list[Event]) -> bool:
        """One move; False when more text is needed."""
        return self._read_calls(events) if self._in_calls else self._read_text(events)

    def _read_text(self, events: list[Event]) -> bool:
        before, marker, after = self._held.partition(self.marker)
        if marker:
            self._emit_text(before.rstrip(), events)
            self._held, self._in_calls = after, True
            return True
        keep = held_back(self._held, self.marker)
        ready = self._held[: len(self._held) - keep].rstrip()  # white space before a call is dropped with it
        self._emit_text(ready, events)
        self._held = self._held[len(ready) :]
        return False

    def _emit_text(self, text: str, events: list[Event]) -> None:
        if text and (text.strip() or not self.num_calls):
            events.append(Content(text))

    def _read_calls(self, events: list[Event]) -> bool:
        raise AssertionError

    def _finish_calls(self, events: list[Event]) -> None:
        raise AssertionError


class HermesParser(_MarkedParser):
    """<tool_call>{...}</tool_call>, any number of them."""

    marker = "<tool_call>"
    _close = "</tool_call>"

    def __init__(self) -> None:
        super().__init__()
        self._reader: CallReader | None = None

    def _read_calls(self, events: list[Event]) -> bool:
        if self._reader is None:
            self._reader = CallReader(self.num_calls)
        if not self._reader.done:
            self._held = self._reader.feed(self._held, events)
            if not self._reader.done:
                return False
            if self._reader.rejected is not None:
                events.append(Content(self.marker + self._reader.rejected))
            else:
                self.num_calls += 1
        return self._read_close()

    def _read_close(self) -> bool:
        text = self._held.lstrip()
        if not text.startswith(self._close) and self._close.startswith(text):
            return False
        rejected = self._reader is not None and self._reader.rejected is not None
        self._held = self._held if rejected else text.removeprefix(self._close)
        self._reader, self._in_calls = None, False
        return True

    def _finish_calls(self, events: list[Event]) -> None:
        if self._reader is None:
            events.append(Content(self.marker))
        elif not self._reader.done:
            self._reader.finish()
            if self._reader.rejected is not None:
                events.append(Content(self.marker + self._reader.rejected))


class _ArrayReader:
    """[{...}, {...}]: calls between square brackets."""

    def __init__(self, first_index: int) -> None:
        self.num_calls = first_index
        self.done = False
        self.rejected: str | None = None
        self._opened = False
        self._reader: CallReader | None = None

    def feed(self, text: str, events: list[Event]) -> str:
        """Read on; returns the text after the closing bracket, once `done`."""
        while not self.done:
            if self._reader is not None:
                text = self._reader.feed(text, events)
                if not self._reader.done:
                    return ""
                if self._reader.rejected is not None:
                    self.rejected, self.done = self._reader.rejected + text, True
                    return ""
                self.num_calls += 1
                self._reader = None
            text = text.lstrip()
            if not text:
                return ""
            text = self._between(text)
        return text

    def _between(self, text: str) -> str:
        if text[0] == "[" and not self._opened:
            self._opened = True
            return text[1:]
        if text[0] == "]":
            self.done = True
            return text[1:]
        if text[0] == ",":
            return text[1:]
        self._reader = CallReader(self.num_calls)
        return text

    def finish(self) -> None:
        """No more text comes."""
        if self._reader is not None and not self._reader.done:
            self._reader.finish()
            self.rejected = self._reader.rejected
        self.done = True


class MistralParser(_MarkedParser):
    """[TOOL_CALLS] and a JSON array, or a name and its arguments."""

    marker = "[TOOL_CALLS]"
    _name = re.compile(r"\s*([^\[\{\s]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?=\{)")

    def __init__(self) -> None:
        super().__init__()
        self._array: _ArrayReader | None = None
        self._value: ValueScanner | None = None

    def _read_calls(self, events: list[Event]) -> bool:
        if self._array is None and self._value is None and not self._open(events):
            return False
        if self._value is not None:
            used = self._value.take(self._held)
            if used:
                events.append(CallArguments(self.num_calls - 1, self._held[:used]))
            self._held = self._held[used:]
            done = self._value.done
        else:
            assert self._array is not None
            self._held = self._array.feed(self._held, events)
            self.num_calls = self._array.num_calls
            done = self._array.done
            if self._array.rejected is not None:
                events.append(Content(self._array.rejected))
        if done:
            self._array, self._value, self._in_calls = None, None, False
        return done

    def _open(self, events: list[Event]) -> bool:
        text = self._held.lstrip()
        if text.startswith("["):
            self._array = _ArrayReader(self.num_calls)
            return True
        match = self._name.match(self._held)
        if not match:
            return False
        events.append(CallStart(self.num_calls, match[1]))
        self.num_calls += 1
        self._held = self._held[match.end() :]
        self._value = ValueScanner()
        return True

    def _finish_calls(self, events: list[Event]) -> None:
        if self._array is not None:
            self._array.finish()
            if self._array.rejected:
                events.append(Content(self._array.rejected))
        elif self._value is None and self._held.strip():
            events.append(Content(self._held))


class JsonArrayParser:
    """The whole answer is [{"name": ..., "parameters": ...}, ...]: what a required tool choice is held to."""

    def __init__(self) -> None:
        self._array = _ArrayReader(0)

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        self._array.feed(text, events)
        if self._array.rejected:
            events.append(Content(self._array.rejected))
            self._array.rejected = None
        return events

    def finish(self) -> list[Event]:
        return []  # an answer cut short in a call's head is no text either


class LlamaParser:
    """The answer is calls, as JSON objects with semicolons between, or it is text."""

    _tag = "<|python_tag|>"

    def __init__(self) -> None:
        self._held = ""
        self._is_text = False
        self._num_calls = 0
        self._reader: CallReader | None = None

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        self._held += text
        while not self._is_text and self._held and self._step(events):
            pass
        if self._is_text and self._held:
            events.append(Content(self._held))
            self._held = ""
        return events

    def _step(self, events: list[Event]) -> bool:
        if self._reader is None and not self._open():
            return False
        if self._reader is not None:
            self._held = self._reader.feed(self._held, events)
            if not self._reader.done:
                return False
            if self._reader.rejected is not None:
                self._held, self._is_text = self._reader.rejected + self._held, True
            else:
                self._num_calls += 1
            self._reader = None
        return True

    def _open(self) -> bool:
        """Look for the next call; False when more text is needed to tell."""
        text = self._held.lstrip("; \n\t\r") if self._num_calls else self._held.lstrip()
        text = text.removeprefix(self._tag).lstrip()
        if not text or self._tag.startswith(text):
            return False
        if text[0] == "{":
            self._held, self._reader = text, CallReader(self._num_calls)
        else:
            self._is_text = True
        return True

    def finish(self) -> list[Event]:
        if self._reader is not None:
            self._reader.finish()
            text = self._reader.rejected
        else:
            text = self._held if not self._num_calls else self._held.strip("; \n\t\r")
        self._held = ""
        return [Content(text)] if text else []


class NamedParser:
    """The whole answer is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._started = False

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        if not self._started:
            self._started = True
            events.append(CallStart(0, self._name))
        if text:
            events.append(CallArguments(0, text))
        return events

    def finish(self) -> list[Event]:
        return [] if self._started else self.feed("")


class PythonicParser:
    """[f(a=1), g(b="x")]: Python calls in a list, read once the list is complete."""

    _start = re.compile(r"\s*\[\s*[A-Za-z_][\w.]*\(")
    _may_start = re.compile(r"\s*(\[\s*([A-Za-z_][\w.]*)?)?$")

    def __init__(self) -> None:
        self._held = ""
        self._is_text = False

    def feed(self, text: str) -> list[Event]:
        self._held += text
        if not self._is_text and (self._start.match(self._held) or self._may_start.match(self._held)):
            return []
        self._is_text = True
        events: list[Event] = [Content(self._held)]
        self._held = ""
        return events

    def finish(self) -> list[Event]:
        held, self._held = self._held, ""
        if not held:
            return []
        calls = _python_calls(held.strip())
        if calls is None:
            return [Content(held)]
        events: list[Event] = []
        for index, (name, arguments) in enumerate(calls):
            events += [CallStart(index, name), CallArguments(index, arguments)]
        return events


def _python_calls(text: str) -> list[tuple[str, str]] | None:
    """Calls of a list of Python calls with literal keyword arguments; None when it is something else."""
    try:
        tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            return None
        return [_python_call(node) for node in tree.elts]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError, msgspec.MsgspecError):
        return None


def _python_call(node: ast.expr) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with keyword arguments")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("not a plain keyword argument")
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    return ast.unparse(node.func), msgspec.json.encode(arguments).decode()


class FirstCalls:
    """Another parser's events, without the calls after the first `limit`."""

    def __init__(self, parser: ToolParser, limit: int) -> None:
        self._parser = parser
        self._limit = limit

    def feed(self, text: str) -> list[Event]:
        return self._keep(self._parser.feed(text))

    def finish(self) -> list[Event]:
        return self._keep(self._parser.finish())

    def _keep(self, events: list[Event]) -> list[Event]:
        return [event for event in events if isinstance(event, Content) or event.index < self._limit]
