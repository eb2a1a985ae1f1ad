"""How many tokens an answer says that it has, from its last bytes."""

from __future__ import annotations

import re

MAX_TAIL_BYTES = 8192
"""What is looked at: usage comes last in every answer."""
MAX_TOKENS = 100_000_000
"""Ten times the longest context that there is: whoever says more is mistaken, and is not counted."""
MAX_LEAD_BYTES = 256
"""Within so many bytes before its prompt tokens, or anywhere behind, an answer says how many of them were cached."""

_OUTPUT = (b'"completion_tokens"', b'"output_tokens"')
_PROMPT = (b'"prompt_tokens"', b'"input_tokens"')
_CACHED = (b'"cached_tokens"',)
_VALUE = re.compile(rb"\s*:\s*([0-9]{1,9})(?![0-9])")


def tail_of(before_last: bytes, last: bytes) -> bytes:
    """The last bytes of an answer whose last two pieces these are."""
    tail = last[-MAX_TAIL_BYTES:]
    return tail if len(tail) == MAX_TAIL_BYTES else before_last[-MAX_TAIL_BYTES:] + tail


def read_usage(tail: bytes) -> tuple[int, int | None, int]:
    """(prompt tokens, output tokens, cached prompt tokens) as the last mention in `tail` has them; 0, None and 0 where
    there is none that can be true.

    The spellings are those of OpenAI's completions and SGLang's meta_info, then of OpenAI's responses and Anthropic's
    messages."""
    output, _ = _number(tail, _OUTPUT)
    prompt, at = _number(tail, _PROMPT)
    if not prompt:
        return 0, output, 0
    cached, _ = _number(tail, _CACHED, max(0, at - MAX_LEAD_BYTES))
    return prompt, output, cached if cached is not None and cached <= prompt else 0


def _number(tail: bytes, names: tuple[bytes, ...], start: int = 0) -> tuple[int | None, int]:
    """The number behind the first of `names` that has one, and where that name stands."""
    for name in names:
        at = tail.rfind(name, start)
        if at >= 0:
            found = _VALUE.match(tail, at + len(name))
            if found is not None and (number := int(found[1])) <= MAX_TOKENS:
                return number, at
    return None, -1
