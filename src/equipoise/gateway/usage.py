"""How many tokens an answer says that it has, from its last bytes."""

from __future__ import annotations

MAX_TAIL_BYTES = 8192
"""What is looked at: usage comes last in every answer."""

_OUTPUT = (b'"completion_tokens"', b'"output_tokens"')
_PROMPT = (b'"prompt_tokens"', b'"input_tokens"')
_DIGITS = b"0123456789"
MAX_DIGITS = 12


def read_usage(tail: bytes) -> tuple[int, int | None]:
    """(prompt tokens, output tokens) as the last mention in `tail` has them; 0 and None where there is none.

    The spellings are those of OpenAI's completions and SGLang's meta_info, then of OpenAI's responses and Anthropic's
    messages."""
    output = _number(tail, _OUTPUT)
    return _number(tail, _PROMPT) or 0, output


def _number(tail: bytes, names: tuple[bytes, ...]) -> int | None:
    for name in names:
        at = tail.rfind(name)
        if at < 0:
            continue
        rest = tail[at + len(name) : at + len(name) + MAX_DIGITS + 8].lstrip()
        if not rest.startswith(b":"):
            continue
        digits = rest[1:].lstrip()
        end = 0
        while end < len(digits) and digits[end] in _DIGITS:
            end += 1
        if 0 < end <= MAX_DIGITS:
            return int(digits[:end])
    return None
