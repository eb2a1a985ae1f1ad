"""Prompt tokens counted by a real tokenizer, for operators who pay its price to route by exact numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from equipoise.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAX_COUNTED_CHARS = 16_384
"""Of a prompt, what is counted; the rest is taken to have as many tokens per character. It bounds the time for which
everybody else waits: some milliseconds."""
TEXT_KEYS = frozenset(("content", "text", "arguments", "input", "thinking"))
"""What of a message is text for the model; images and sounds stand under other keys."""


class PromptCounter:
    """Counts by the tokenizer.json of a folder. The chat template's own tokens are left out."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError when there is no tokenizer that can be read."""
        import tokenizers  # 0.1 s and some 10 MB that a gateway without --tokenizer does not pay

        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"tokenizer: {folder} has no tokenizer.json")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exceptions
            raise ConfigError(f"tokenizer: {path} cannot be read: {' '.join(str(error).split())}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def count(self, prompt: bytes | memoryview) -> int | None:
        """Tokens of a prompt as it stands in a body (a text, texts, messages); None where it is no JSON."""
        try:
            text = "\n".join(_texts(msgspec.json.decode(prompt)))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        counted = text[:MAX_COUNTED_CHARS]
        if not counted:
            return 0
        num_tokens = len(self._tokenizer.encode(counted, add_special_tokens=False).ids)
        return num_tokens * len(text) // len(counted)


def _texts(value: Any, is_text: bool = True) -> Iterator[str]:
    """The texts in a decoded prompt, in order."""
    if isinstance(value, str):
        if is_text:
            yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, is_text)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(item, key in TEXT_KEYS)
