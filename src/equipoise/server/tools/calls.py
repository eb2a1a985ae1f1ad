"""Reads tool calls out of JSON text that arrives in pieces: arguments go on as soon as they are there.

{"name": "add", "arguments": {"a": 1}}
[---- head: held back ------][ value ][ tail: dropped ]
"""

from __future__ import annotations

import re
from typing import Any

import msgspec


class Content(msgspec.Struct, frozen=True):
    """Text of the answer that is no tool call."""

    text: str


class CallStart(msgspec.Struct, frozen=True):
    """Call number `index` begins; its arguments follow."""

    index: int
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """The next piece of the JSON text of call number `index`'s arguments."""

    index: int
    text: str


Event = Content | CallStart | CallArguments


class ValueScanner:
    """Finds the end of one JSON value in text that arrives in pieces."""

    __slots__ = ("_depth", "_escaped", "_in_string", "done", "started")

    def __init__(self, depth: int = 0) -> None:
        """`depth` 1 starts inside an object, to find its end."""
        self._depth = depth
        self._in_string = False
        self._escaped = False
        self.started = depth > 0
        self.done = False

    def take(self, text: str) -> int:
        """Characters of `text` that belong to the value. `done` once the value is complete."""
        for at, char in enumerate(text):
            if self._in_string:
                self._inside_string(char)
            elif char == '"':
                self._in_string = self.started = True
                continue
            elif char in "{[":
                self._depth += 1
                self.started = True
                continue
            elif char in "}]":
                if self._depth == 0:
                    self.done = True  # a bare value ended with the object around it
                    return at
                self._depth -= 1
            elif self._depth == 0 and char in ", \n\t\r":
                if self.started:
                    self.done = True
                    return at
                continue
            else:
                self.started = True
                continue
            if self._depth == 0 and not self._in_string:
                self.done = True
                return at + 1
        return len(text)

    def _inside_string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False


_HEAD = re.compile(
    r'\s*\{\s*(?:"(?:type|id)"\s*:\s*"[^"]*"\s*,\s*)*'
    r'"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


class CallReader:
    """One call as a JSON object. Feed it until `done`; what it did not use comes back.

    A text that turns out to be no call ends up in `rejected`, unchanged."""

    def __init__(self, index: int) -> None:
        self.done = False
        self.rejected: str | None = None
        self._index = index
        self._head = ""
        self._whole = ValueScanner()
        self._value: ValueScanner | None = None
        self._tail: ValueScanner | None = None

    def feed(self, text: str, events: list[Event]) -> str:
        """Read on; append what is known to `events`. Returns the text after the call."""
        if self._value is None:
            text = self._read_head(text, events)
        if self._value is not None and self._tail is None:
            text = self._read_value(self._value, text, events)
        if self._tail is not None and not self.done:
            used = self._tail.take(text)
            self.done = self._tail.done
            text = text[used:]
        return text

    def finish(self) -> None:
        """No more text comes: a call whose head is not complete was none."""
        if self._value is None and not self.done:
            self.rejected, self.done = self._head, True

    def _read_head(self, text: str, events: list[Event]) -> str:
        used = self._whole.take(text)
        before = len(self._head)
        self._head += text[:used]
        match = _HEAD.match(self._head + text[used : used + 1])
        name = _json(match["name"]) if match else None
        if match and isinstance(name, str):
            events.append(CallStart(self._index, name))
            self._value = ValueScanner()
            rest = self._head[match.end() :] + text[used:]
            self._head = self._head[: match.end()]
            return rest
        start = self._head.lstrip()
        if start and start[0] != "{":
            self.rejected, self.done = self._head, True
            return text[used:] if used else ""
        if self._whole.done:
            self._whole_object(events)
            return text[len(self._head) - before :]
        return ""

    def _whole_object(self, events: list[Event]) -> None:
        """The object is complete without a head that could be streamed: read it as a whole."""
        self.done = True
        call = call_of(_json(self._head))
        if call is None:
            self.rejected = self._head
            return
        events.append(CallStart(self._index, call[0]))
        events.append(CallArguments(self._index, call[1]))

    def _read_value(self, value: ValueScanner, text: str, events: list[Event]) -> str:
        used = value.take(text)
        if used:
            events.append(CallArguments(self._index, text[:used]))
        if value.done:
            self._tail = ValueScanner(depth=1)
        return text[used:]


def call_of(value: Any) -> tuple[str, str] | None:
    """(name, arguments as JSON text) of a decoded call object; None when it is none."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        return value["name"], arguments
    if arguments is None:
        arguments = {}
    return value["name"], msgspec.json.encode(arguments).decode()


def _json(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
