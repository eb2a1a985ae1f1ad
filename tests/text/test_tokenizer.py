"""Tokenizer: round trips, what the folder's files say, and one-line errors."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests import tiny_tokenizer
from tests.tiny_tokenizer import write_folder

from equipoise.errors import CheckpointError
from equipoise.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path


def test_round_trip_and_types(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path))
    ids = tokenizer.encode("hello 漢字")
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == "hello 漢字"
    assert b"".join(tokenizer.token_bytes(token) for token in ids.tolist()).decode() == "hello 漢字"


def test_facts_of_the_folder(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 1]}')
    (folder / "config.json").write_text('{"eos_token_id": 0}')
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.eos_ids == (2, 1)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.vocab_size == 1 + max(json.loads(tiny_tokenizer.byte_level())["model"]["vocab"].values()) + 1
    assert tokenizer.chat_template is None


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ('{"eos_token_id": 2}', (2, 1)),
        ('{"text_config": {"eos_token_id": [2, 0]}}', (2, 0, 1)),
        ('{"eos_token_id": -1}', (1,)),
        ("{}", (1,)),
    ],
)
def test_eos_from_config(tmp_path: Path, config: str, expected: tuple[int, ...]) -> None:
    folder = write_folder(tmp_path)
    (folder / "config.json").write_text(config)
    assert Tokenizer.load(folder).eos_ids == expected


def test_special_tokens_map_fills_gaps(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, bos_token=None, eos_token=None)
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<tool>"}')
    tokenizer = Tokenizer.load(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.eos_ids) == (None, "<tool>", (2,))


def test_chat_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    folder = write_folder(tmp_path, chat_template=named)
    assert Tokenizer.load(folder).chat_templates == {"default": "D", "tool_use": "T"}
    (folder / "chat_template.json").write_text('{"chat_template": "J"}')
    assert Tokenizer.load(folder).chat_template == "J"
    (folder / "chat_template.jinja").write_text("F")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("R")
    assert Tokenizer.load(folder).chat_templates == {"default": "F", "tool_use": "T", "rag": "R"}


def test_plain_template_is_the_default(tmp_path: Path) -> None:
    assert Tokenizer.load(write_folder(tmp_path, chat_template="{{ messages }}")).chat_template == "{{ messages }}"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "[]"),
        ("tokenizer_config.json", '{"chat_template": 3}'),
        ("generation_config.json", '{"eos_token_id": "x"}'),
        ("generation_config.json", f'{{"eos_token_id": {10**30}}}'),
        ("config.json", '{"eos_token_id":'),
        ("config.json", '{"text_config": {"eos_token_id": "x"}}'),
        ("chat_template.jinja", b"\xff\xfe"),
    ],
)
def test_broken_file_is_named_in_one_line(tmp_path: Path, name: str, content: str | bytes) -> None:
    folder = write_folder(tmp_path)
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.load(folder)
    assert str(caught.value).startswith(f"{folder / name}: ")
    assert "\n" not in str(caught.value)


def test_missing_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot be read"):
        Tokenizer.load(tmp_path)


def test_ids_outside_the_vocabulary_have_no_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path))
    (known,) = tokenizer.encode("h").tolist()
    assert tokenizer.decode([-1, known, 10**6]) == "h"
    assert tokenizer.token_bytes(10**6) == tokenizer.token_bytes(-1) == b""


def test_token_bytes_of_every_family(tmp_path: Path) -> None:
    byte_level = Tokenizer.load(write_folder(tmp_path / "a"))
    keep = byte_level.backend.token_to_id("<|keep é|>")
    assert byte_level.token_bytes(keep) == "<|keep é|>".encode()
    assert byte_level.token_bytes(byte_level.backend.token_to_id("Ġ")) == b" "
    pieces = Tokenizer.load(write_folder(tmp_path / "b", tiny_tokenizer.sentencepiece()))
    assert pieces.token_bytes(pieces.backend.token_to_id("<0xE9>")) == b"\xe9"
    assert pieces.token_bytes(pieces.backend.token_to_id("▁a▁b")) == b" a b"
    words = Tokenizer.load(write_folder(tmp_path / "c", tiny_tokenizer.wordpiece()))
    assert words.token_bytes(words.backend.token_to_id("hel")) == b"hel"


def test_long_text_leaves_the_event_loop_free(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path))
    text = "hello world, this is " * 20_000

    async def scenario() -> tuple[int, int]:
        threads = []
        tokenizer.backend.encode_batch_fast(["warm"])
        encoding = asyncio.ensure_future(tokenizer.encode_async(text))
        num_turns = 0
        while not encoding.done():
            await asyncio.sleep(0)
            num_turns += 1
            threads.append(threading.active_count())
            time.sleep(0.0005)
        return len(await encoding), num_turns

    num_tokens, num_turns = asyncio.run(scenario())
    assert num_tokens == len(tokenizer.encode(text))
    assert num_turns > 3


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    data = json.loads(tiny_tokenizer.byte_level())
    data["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    tokenizer = Tokenizer.load(write_folder(tmp_path, json.dumps(data)))
    assert tokenizer.decode(tokenizer.encode("hello world, this")) == "hello world, this"
