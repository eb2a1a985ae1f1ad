"""The timeline of a real server: the last steps of every rank as a trace."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

import pytest
from tests.obs.trace_rules import read, steps_of, total
from tests.serving import serve, write_tiny_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.serving import Server

PROMPT = "abcdefghij"
NUM_REQUESTS, MAX_TOKENS = 4, 6


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """In lockstep; a prompt takes as long as some decodes, so that the other rank waits."""
    folder = write_tiny_tokenizer(tmp_path_factory.mktemp("timeline"))
    model = ("--executor", "sim", "--tokenizer", str(folder), "--model", "sim-model", "--prefill-token-ms", "1")
    ranks = ("--dp-size", "2", "--lockstep", "--rank-policy", "round_robin", "--timeline-steps", "1000")
    with serve(*model, *ranks, "--step-ms", "1") as server:
        yield server


def post(server: Server, text: str) -> None:
    body = json.dumps({"prompt": text, "max_tokens": MAX_TOKENS, "ignore_eos": True}).encode()
    urllib.request.urlopen(urllib.request.Request(server.url + "/v1/completions", body), timeout=30).read()


def timeline(server: Server) -> str:
    with urllib.request.urlopen(server.url + "/debug/timeline", timeout=30) as answer:
        assert answer.headers["content-type"] == "application/json"
        return str(answer.read().decode())


def test_the_steps_of_all_ranks_are_a_trace(two_ranks: Server) -> None:
    assert steps_of(read(timeline(two_ranks))) == []
    prompts = [f"{i}{PROMPT}" for i in range(NUM_REQUESTS)]  # no two of them share a page
    threads = [threading.Thread(target=post, args=(two_ranks, prompt)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = read(timeline(two_ranks))
    steps = steps_of(events)
    assert {step["tid"] for step in steps} == {0, 1}
    assert total(events, "prefill_tokens") == sum(map(len, prompts))
    # The first token of each comes from its prompt.
    assert total(events, "decode_rows") == NUM_REQUESTS * (MAX_TOKENS - 1)
    assert all(step["dur"] > 0 for step in steps)
    names = {event["args"]["name"] for event in events if event["ph"] == "M" and "name" in event["args"]}
    assert names == {"sim-model", "rank 0", "rank 1"}
    assert any(event["name"] == "wait for the slowest" for event in events)


def test_steps_are_kept_only_on_request(sim_server: Server) -> None:
    with pytest.raises(urllib.error.HTTPError) as raised:
        timeline(sim_server)
    assert raised.value.code == 404
    assert "--timeline-steps" in json.load(raised.value)["error"]["message"]
