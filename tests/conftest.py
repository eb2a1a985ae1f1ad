"""Servers that live as long as the test session: tests that do not stop or overload theirs share them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.checkpoints import checkpoint
from tests.serving import Server, serve, sim_flags, write_tiny_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a byte-level tokenizer with a chat template that speaks of tools."""
    return write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def sim_server(tiny_tokenizer: Path) -> Iterator[Server]:
    """A simulated server: a token per millisecond, prompts of up to 200,000 tokens, bodies of up to 4 MiB."""
    flags = ("--sim-max-model-len", "200000", "--sim-num-pages", "40000", "--max-body-mb", "4")
    with serve(*sim_flags(tiny_tokenizer, *flags)) as server:
        yield server


@pytest.fixture(scope="session")
def torch_server() -> Iterator[Server]:
    """A tiny random llama, served as "tiny", whose tool calls are read in hermes format."""
    flags = ("--model", str(checkpoint("llama")), "--num-pages", "512", "--served-model-name", "tiny")
    with serve(*flags, "--tool-parser", "hermes") as server:
        yield server
