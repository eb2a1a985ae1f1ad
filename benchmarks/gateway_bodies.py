"""The requests of benchmarks/gateway.py: chat requests of a given length that share as much as is asked for."""

from __future__ import annotations

import json


def prompts(num_bytes: int, num_prompts: int) -> list[str]:
    """Prompts of `num_bytes`, of which the first half is common to every fourth, the rest their own."""
    made = []
    for number in range(num_prompts):
        common, own = f"group {number % 4} of plain words ", f"and prompt {number} of its own "
        first = (common * (num_bytes // 2 // len(common) + 1))[: num_bytes // 2]
        made.append((first + own * (num_bytes // 2 // len(own) + 1))[:num_bytes])
    return made


def bodies(num_bytes: int, num_prompts: int, max_tokens: int, *, is_stream: bool) -> list[bytes]:
    """Chat requests around `prompts`; short ones have one user message, long ones a system prompt before it."""
    made = []
    for prompt in prompts(num_bytes, num_prompts):
        messages = [{"role": "user", "content": prompt}]
        if num_bytes > 1000:
            messages = [{"role": "system", "content": prompt}, {"role": "user", "content": "hello"}]
        asked: dict[str, object] = {"model": "bench-model", "max_tokens": max_tokens}
        if is_stream:
            asked["stream"] = True
        made.append(json.dumps({**asked, "messages": messages}, separators=(",", ":")).encode())
    return made
