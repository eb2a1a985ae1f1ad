"""What the gateway's own handlers share: answers in JSON, and names in paths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import msgspec

from equipoise.gateway.relay.routes import Answer

if TYPE_CHECKING:
    from equipoise.gateway.http.request import ClientRequest

_encode = msgspec.json.Encoder().encode


def json_answer(value: Any, status: int = 200) -> Answer:
    """`value` (anything msgspec encodes) as JSON."""
    return Answer(status, _encode(value))


def name_in_path(request: ClientRequest, prefix: str, suffix: str = "") -> str:
    """What stands between `prefix` and `suffix`, decoded; names may have slashes, a slash at the end does not count."""
    rest = request.path.decode("latin-1").removeprefix(prefix)
    return unquote(rest.rstrip("/").removesuffix(suffix))
