"""How many tokens an answer says that it has, from its last bytes."""

from __future__ import annotations

import re

MAX_TAIL_BYTES = 8192
"""What is looked at: usage comes last in every answer."""

_OUTPUT = (b'"completion_tokens"', b'"output_tokens"')
_PROMPT = (b'"prompt_tokens"', b'"input_tokens"')
_VALUE = re.compile(rb"\s*:\s*([0-9]{1,12})(?![0-9])")


def read_usage(tail: bytes) -> tuple[int, int | None]:
    """(prompt tokens, output tokens) as the last mention in `tail` has them; 0 and None where there is none.

    The spellings are those of OpenAI's completions and SGLang's meta_info, then of OpenAI's responses and Anthropic's
    messages."""
    output = _number(tail, _OUTPUT)
    return _number(tail, _PROMPT) or 0, output


def _number(tail: bytes, names: tuple[bytes, ...]) -> int | None:
    for name in names:
        at = tail.rfind(name)
        if at >= 0:
            found = _VALUE.match(tail, at + len(name))
            if found is not None:
                return int(found[1])
    return None
