"""Bits of OpenAI's wire format that completions and chat completions share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from equipoise.errors import InvalidValueError
from equipoise.server.http import encode
from equipoise.server.service import new_id

if TYPE_CHECKING:
    from starlette.types import Scope

    from equipoise.server.schemas import SamplingFields


def request_name(scope: Scope, *given: str | None) -> str:
    """The name that /abort_request knows the request by: the body's own, else its X-Request-Id."""
    for name in given:
        if name:
            if len(name) > 256:
                raise InvalidValueError(f"rid: {len(name)} characters, at most 256 are allowed", "rid")
            return name
    name = scope.get("request_id")
    return str(name) if name else new_id()


def answer_id(kind: str, name: str) -> str:
    """The answer's id: the request's name behind "cmpl-" or "chatcmpl-"."""
    return name if name.startswith(f"{kind}-") else f"{kind}-{name}"


def has_usage_chunk(body: SamplingFields) -> bool:
    """True when a stream ends with the token counts."""
    options = body.stream_options
    return options is not None and bool(options.include_usage)


def chunk_edges(head: dict[str, Any], body: SamplingFields) -> tuple[bytes, bytes]:
    """What stands before and after the choice in every event of a stream."""
    prefix = b"data: " + encode(head)[:-1] + b',"choices":['
    return prefix, b'],"usage":null}\n\n' if has_usage_chunk(body) else b"]}\n\n"
