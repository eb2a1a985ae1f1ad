"""Prompt tokens, counted by a tokenizer that has one token per byte."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.serving import write_tiny_tokenizer

from equipoise.errors import ConfigError
from equipoise.gateway.relay.count import MAX_COUNTED_CHARS, PromptCounter

if TYPE_CHECKING:
    from pathlib import Path

MESSAGES = [
    {"role": "system", "content": "ab"},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "cde"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 9000}},
        ],
    },
]


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> PromptCounter:
    """Bytes are tokens."""
    return PromptCounter(write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.mark.parametrize(
    ("prompt", "count"),
    [
        ("", 0),
        ("abc", 3),
        ("\u00fc", 2),
        ('"\n', 2),
        (["ab", "cd"], 5),
        (MESSAGES, 6),
        ([{"role": "user", "content": None}], 0),
        (7, 0),
        ("x" * MAX_COUNTED_CHARS * 3, MAX_COUNTED_CHARS * 3),
        ("x" * MAX_COUNTED_CHARS + "\u00fc" * MAX_COUNTED_CHARS, MAX_COUNTED_CHARS * 2),
    ],
)
def test_texts_are_counted(counter: PromptCounter, prompt: Any, count: int) -> None:
    assert counter.count(json.dumps(prompt).encode()) == count
    assert counter.count(memoryview(json.dumps(prompt).encode())) == count


@pytest.mark.parametrize("prompt", [b"", b"abc", b'"\xff"', b"[" * 900 + b"]" * 900, b"[" * 100_000])
def test_what_cannot_be_counted_is_left_to_bytes(counter: PromptCounter, prompt: bytes) -> None:
    assert counter.count(prompt) in (None, 0)


def test_a_folder_without_a_tokenizer_is_a_wrong_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^tokenizer: .* has no tokenizer.json"):
        PromptCounter(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"^tokenizer: .*tokenizer.json cannot be read"):
        PromptCounter(tmp_path)
