"""A real checkpoint on two ranks: who computes a request makes no difference to its tokens."""

from __future__ import annotations

import concurrent.futures
import json
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
from tests.checkpoints import checkpoint
from tests.serving import serve

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.serving import Server

BODIES: list[dict[str, Any]] = [
    {"prompt": [3, 4, 5, 6, 7], "max_tokens": 24, "temperature": 0, "ignore_eos": True},
    {"prompt": [*range(40, 90)], "max_tokens": 24, "temperature": 0, "ignore_eos": True},
    {"prompt": [9, 8, 7], "max_tokens": 24, "seed": 11, "ignore_eos": True},
    {"prompt": [9, 8, 7], "max_tokens": 12, "seed": 11, "n": 3, "ignore_eos": True},
]


@pytest.fixture(scope="module", params=[(), ("--lockstep",)], ids=["independent", "lockstep"])
def two(request: pytest.FixtureRequest) -> Iterator[Server]:
    flags = ("--model", str(checkpoint("llama")), "--num-pages", "512", "--served-model-name", "tiny")
    with serve(*flags, "--dp-size", "2", *request.param) as server:
        yield server


def tokens(server: Server, body: dict[str, Any], **headers: str) -> list[list[int]]:
    """The token ids of each choice."""
    raw = json.dumps({**body, "return_token_ids": True}).encode()
    request = urllib.request.Request(
        f"{server.url}/v1/completions", raw, {key.replace("_", "-"): value for key, value in headers.items()}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return [choice["token_ids"] for choice in json.load(answer)["choices"]]


def test_tokens_are_those_of_a_single_rank(torch_server: Server, two: Server) -> None:
    for body in BODIES:
        expected = tokens(torch_server, body)
        for rank in ("0", "1"):
            assert tokens(two, body, X_Data_Parallel_Rank=rank) == expected
    with concurrent.futures.ThreadPoolExecutor(8) as pool:  # both at work, in whatever company
        answers = list(pool.map(lambda body: tokens(two, body), BODIES * 4))
    assert answers == [tokens(torch_server, body) for body in BODIES] * 4
