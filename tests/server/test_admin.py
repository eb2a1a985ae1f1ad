"""The routes for operators and routers, on a real server."""

from __future__ import annotations

import itertools
import json
import time
import urllib.request
from typing import TYPE_CHECKING, Any

from prometheus_client.parser import text_string_to_metric_families

from equipoise import __version__

if TYPE_CHECKING:
    from tests.serving import Server


def call(server: Server, path: str, body: object = None) -> Any:
    """The JSON answer of a GET, or of a POST with `body`."""
    raw = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(server.url + path, raw), timeout=30) as answer:
        return json.load(answer)


def test_health(sim_server: Server) -> None:
    assert call(sim_server, "/health") == {"status": "ok"}
    assert call(sim_server, "/health_generate")["status"] == "ok"


def test_server_info_shows_settings_and_no_secrets(sim_server: Server) -> None:
    info = call(sim_server, "/server_info")
    assert info["version"] == __version__
    assert info["executor"]["max_model_len"] == 200_000
    assert info["engine"]["scheduler"]["max_running"] == 256
    assert info["server"]["api_key"] is None
    assert info["tool_format"] == "hermes"


def test_loads_in_both_shapes(sim_server: Server) -> None:
    call(sim_server, "/v1/completions", {"prompt": "abc", "max_tokens": 2})
    loads = call(sim_server, "/v1/loads")
    assert abs(loads["timestamp"] - time.time()) < 10
    [rank] = loads["loads"]
    [older] = call(sim_server, "/get_load")
    for load in (rank, older):
        assert load["dp_rank"] == 0
        assert load["num_tokens"] == load["num_used_tokens"] + load["num_waiting_tokens"]
        assert load["num_total_tokens"] == load["num_tokens"]
        assert load["num_reqs"] == load["num_running_reqs"] + load["num_waiting_reqs"] == 0
        assert load["max_total_num_tokens"] == 40_000 * 16
        assert load["max_running_requests"] == 256
        for quantity in ("waiting_uncached_tokens", "prefilling_tokens", "inflight_rows", "expected_output_tokens"):
            assert load[f"num_{quantity}"] == 0
        for quantity in ("reserved_tokens", "sent_reqs", "sent_tokens"):
            assert load[f"num_{quantity}"] == 0
        assert abs(load["timestamp"] - time.time()) < 10


def test_metrics(sim_server: Server) -> None:
    call(sim_server, "/v1/completions", {"prompt": "abc", "max_tokens": 5})
    with urllib.request.urlopen(f"{sim_server.url}/metrics") as answer:
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        page = answer.read().decode()
    families = {family.name: family for family in text_string_to_metric_families(page)}
    assert families["sglang:num_used_tokens"].samples[0].labels == {"dp_rank": "0"}
    assert families["equipoise_time_to_first_token_seconds"].samples
    counted = {tuple(row.labels.values()): row.value for row in families["equipoise_http_requests"].samples}
    assert counted["/v1/completions", "200"] >= 1


def test_tokenize_and_back(sim_server: Server) -> None:
    answer = call(sim_server, "/tokenize", {"prompt": "h\u00e9!", "return_token_strs": True})
    assert answer["count"] == len(answer["tokens"]) == 4
    assert answer["token_strs"][0] == "h"
    assert call(sim_server, "/detokenize", {"tokens": answer["tokens"]})["prompt"] == "h\u00e9!"
    assert call(sim_server, "/tokenize", {"prompt": ""})["count"] == 0


def test_tokenize_messages(sim_server: Server) -> None:
    messages = [{"role": "user", "content": "hi"}]
    tokens = call(sim_server, "/tokenize", {"messages": messages})["tokens"]
    assert call(sim_server, "/detokenize", {"tokens": tokens})["text"] == "<|user|>hi<|assistant|>"
    shorter = call(sim_server, "/tokenize", {"messages": messages, "add_generation_prompt": False})["tokens"]
    assert tokens[: len(shorter)] == shorter


def test_flush_cache_drops_pages_that_served_before(sim_server: Server) -> None:
    body = {"text": "flush" * 20, "sampling_params": {"max_new_tokens": 1}}
    call(sim_server, "/generate", body)
    assert call(sim_server, "/generate", body)["meta_info"]["cached_tokens"] == 96
    assert call(sim_server, "/flush_cache", {})["flushed_pages"] > 0
    assert call(sim_server, "/generate", body)["meta_info"]["cached_tokens"] == 0


def test_salts_keep_tenants_apart(sim_server: Server) -> None:
    body = {"text": "salted" * 20, "sampling_params": {"max_new_tokens": 1}, "cache_salt": "a"}
    call(sim_server, "/generate", body)
    assert call(sim_server, "/generate", body)["meta_info"]["cached_tokens"] > 0
    assert call(sim_server, "/generate", {**body, "cache_salt": "b"})["meta_info"]["cached_tokens"] == 0


def test_generate_in_sglangs_shape(sim_server: Server) -> None:
    one = call(sim_server, "/generate", {"text": "abc", "rid": "me", "sampling_params": {"max_new_tokens": 3}})
    assert len(one["output_ids"]) == 3
    meta = one["meta_info"]
    assert meta["id"] == "me"
    assert meta["finish_reason"] == {"type": "length", "length": 3}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (3, 3)
    ids = call(sim_server, "/tokenize", {"prompt": "abc"})["tokens"]
    both = call(sim_server, "/generate", {"input_ids": [ids, ids], "sampling_params": {"max_new_tokens": 3}})
    assert [answer["output_ids"] for answer in both] == [one["output_ids"]] * 2
    assert isinstance(call(sim_server, "/generate", {"text": ["a"], "sampling_params": {"max_new_tokens": 1}}), list)


def test_generate_logprobs(sim_server: Server) -> None:
    body = {
        "text": "abc",
        "sampling_params": {"max_new_tokens": 2},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
        "return_text_in_logprobs": True,
    }
    meta = call(sim_server, "/generate", body)["meta_info"]
    assert [row[2] for row in meta["input_token_logprobs"]] == ["a", "b", "c"]
    assert meta["input_token_logprobs"][0][0] is None
    assert len(meta["output_token_logprobs"]) == 2
    assert [len(row) for row in meta["output_top_logprobs"]] == [2, 2]


def test_generate_streams_cumulative_text(sim_server: Server) -> None:
    body = {"text": "abc", "sampling_params": {"max_new_tokens": 6}}
    whole = call(sim_server, "/generate", body)
    raw = json.dumps({**body, "stream": True}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{sim_server.url}/generate", raw)) as answer:
        lines = [line.removeprefix("data: ") for line in answer.read().decode().split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    assert events[-1]["text"] == whole["text"]
    assert all(later["text"].startswith(event["text"].rstrip("\ufffd")) for event, later in itertools.pairwise(events))
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "length"


def test_the_page_at_the_root(sim_server: Server) -> None:
    with urllib.request.urlopen(sim_server.url) as answer:
        assert answer.headers["content-type"].startswith("text/html")
