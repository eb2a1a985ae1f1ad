"""The test workers do what the real servers do, so that tests of the gateway mean something."""

from __future__ import annotations

import asyncio
import time
import urllib.error
from typing import TYPE_CHECKING

import pytest
from tests.gateway.client import CHAT, COMPLETIONS, GENERATE, Reply, ask, ask_now, chat, completion, gather
from tests.gateway.processes import Fleet, Worker, get, text
from tests.server.raw import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("workers")) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def sglang(fleet: Fleet) -> Worker:
    return fleet.sglang("--dp-size", "4", "--gauge-prefix", "sglang_").wait_ready()


@pytest.fixture(scope="module")
def vllm(fleet: Fleet) -> Worker:
    return fleet.vllm("--dp-mode", "hybrid", "--dp-size", "2", "--first-rank", "6").wait_ready()


@pytest.fixture(scope="module")
def pair(fleet: Fleet) -> tuple[Worker, Worker]:
    """A prefill worker of two ranks and a decode worker that give each other half a second."""
    more = ("--bootstrap-timeout-s", "0.5")
    prefill = fleet.sglang("--role", "prefill", "--dp-size", "2", *more)
    decode = fleet.sglang("--role", "decode", "--prefill-dp-size", "2", *more)
    return prefill.wait_ready(), decode.wait_ready()


def test_a_stream_says_what_the_whole_answer_says(sglang: Worker) -> None:
    whole = ask_now(sglang.port, CHAT, chat(max_tokens=5)).json()
    reply = ask_now(sglang.port, CHAT, chat(max_tokens=5, stream=True, stream_options={"include_usage": True}))
    assert reply.is_done()
    *events, usage = reply.events()
    said = "".join(event["choices"][0]["delta"]["content"] for event in events)
    assert said == whole["choices"][0]["message"]["content"]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * 4 + ["length"]
    assert usage["usage"] == whole["usage"]
    assert usage["usage"]["completion_tokens"] == 5


def test_generate_streams_all_of_the_text_so_far(sglang: Worker) -> None:
    body = {"text": "abc", "sampling_params": {"max_new_tokens": 3}, "stream": True, "return_logprob": True}
    events = ask_now(sglang.port, GENERATE, body).events()
    assert events[-1]["text"].startswith(events[0]["text"])
    assert events[-1]["meta_info"]["completion_tokens"] == 3
    assert events[0]["meta_info"]["input_token_logprobs"]


@pytest.mark.parametrize(
    ("path", "body", "headers", "rank"),
    [
        (CHAT, {"routed_dp_rank": 1, "data_parallel_rank": 2}, {"X_Data_Parallel_Rank": "3"}, 3),
        (CHAT, {"routed_dp_rank": 1, "data_parallel_rank": 2}, {}, 1),
        (CHAT, {"data_parallel_rank": 2}, {}, 2),
        (GENERATE, {"text": "a", "routed_dp_rank": 1}, {"X_Data_Parallel_Rank": "3"}, 1),
    ],
)
def test_sglang_ranks(sglang: Worker, path: str, body: dict[str, object], headers: dict[str, str], rank: int) -> None:
    before = sglang.served()
    assert ask_now(sglang.port, path, chat(**body), **headers).status == 200
    assert [now - then for now, then in zip(sglang.served(), before, strict=True)] == [int(r == rank) for r in range(4)]


def test_sglang_refuses_ranks_that_it_does_not_have(sglang: Worker) -> None:
    reply = ask_now(sglang.port, CHAT, chat(routed_dp_rank=4))
    assert reply.status == 400
    assert reply.json()["message"] == "routed_dp_rank=4 out of range [0, 4)"
    assert ask_now(sglang.port, CHAT, chat(), X_Data_Parallel_Rank="one").status == 400


def test_sglang_reports_its_load(sglang: Worker) -> None:
    async def load_while_busy() -> tuple[list[Reply], object, object, str]:
        sglang.change(ttft_s=0.5)
        running = asyncio.gather(
            *(ask(sglang.port, COMPLETIONS, completion("x" * 400, routed_dp_rank=2)) for _ in "ab")
        )
        while sum(rank["running"] for rank in (await asyncio.to_thread(sglang.debug))["ranks"]) < 2:
            await asyncio.sleep(0.01)
        urls = [f"{sglang.url}/v1/loads", f"{sglang.url}/get_load"]
        loads, old = await asyncio.gather(*(asyncio.to_thread(get, url) for url in urls))
        gauges = await asyncio.to_thread(text, f"{sglang.url}/metrics")
        return list(await running), loads, old, gauges

    replies, loads, old, gauges = asyncio.run(load_while_busy())
    sglang.change(ttft_s=0.0)
    assert [reply.status for reply in replies] == [200, 200]
    assert loads["loads"][2]["num_used_tokens"] == 200  # type: ignore[index]
    assert loads["loads"][2]["num_running_reqs"] == 2  # type: ignore[index]
    assert abs(loads["loads"][2]["timestamp"] - time.time()) < 60  # type: ignore[index]
    assert [rank["num_tokens"] for rank in old] == [0, 0, 200, 0]  # type: ignore[attr-defined]
    assert any(
        line.startswith("sglang_num_used_tokens{") and line.endswith('dp_rank="2"} 200.0')
        for line in gauges.splitlines()
    )
    assert [rank["used"] for rank in sglang.debug()["ranks"]] == [0, 0, 0, 0]


def test_a_frozen_report_is_served_again(sglang: Worker) -> None:
    sglang.change(frozen_loads_s=60.0)
    first = get(f"{sglang.url}/v1/loads")
    second = get(f"{sglang.url}/v1/loads")
    sglang.change(frozen_loads_s=0.0)
    assert second["loads"][0]["timestamp"] == first["loads"][0]["timestamp"]
    assert second["timestamp"] > first["timestamp"]
    assert get(f"{sglang.url}/v1/loads")["loads"][0]["timestamp"] > first["loads"][0]["timestamp"]


def test_vllm_numbers_ranks_of_a_node_from_zero_and_gauges_from_the_nodes_first(vllm: Worker) -> None:
    assert ask_now(vllm.port, CHAT, chat(), X_Data_Parallel_Rank="1").status == 200
    assert vllm.served() == [0, 1]
    reply = ask_now(vllm.port, CHAT, chat(), X_Data_Parallel_Rank="6")
    assert reply.status == 400
    assert reply.error()["message"] == "data_parallel_rank 6 is out of range [0, 2)."
    gauges = text(f"{vllm.url}/metrics")
    assert 'vllm:num_requests_running{engine="7",model_name="test-model"} 0.0' in gauges
    assert get(f"{vllm.url}/v1/models")["data"][0]["owned_by"] == "vllm"


@pytest.mark.parametrize(
    ("fault", "status", "trouble"),
    [
        ("429", 429, ""),
        ("500", 500, ""),
        ("reset_before_head", 0, "connection"),
        ("close_before_head", 0, "no answer"),
        ("garbage", 0, "not HTTP"),
        ("hang_before_head", 0, "timeout"),
        ("hang_after_head", 200, "timeout"),
        ("hang_mid_stream", 200, "timeout"),
        ("close_mid_stream", 200, "cut"),
        ("reset_after_head", 200, "connection"),
        ("reset_mid_stream", 200, "connection"),
    ],
)
def test_faults(vllm: Worker, fault: str, status: int, trouble: str) -> None:
    vllm.change(faults={fault: 1.0})
    reply = ask_now(vllm.port, CHAT, chat(stream=True), timeout_s=0.5)
    vllm.change(faults={})
    assert (reply.status, reply.trouble.partition(":")[0]) == (status, trouble)
    assert bool(reply.body) == (fault.endswith("mid_stream") or bool(status and status != 200))
    wait_for(lambda: all(rank["running"] == 0 for rank in vllm.debug()["ranks"]), "no seat is left over")


@pytest.mark.parametrize("feed", ["500", "garbage", "missing"])
def test_broken_load_feeds(sglang: Worker, feed: str) -> None:
    sglang.change(load_feed=feed)
    with pytest.raises((urllib.error.HTTPError, ValueError)):
        get(f"{sglang.url}/v1/loads")
    sglang.change(load_feed="ok")


def test_a_client_that_leaves_is_noted(vllm: Worker) -> None:
    vllm.change(token_s=0.05)
    assert ask_now(vllm.port, CHAT, chat(stream=True), timeout_s=0.3).trouble == "timeout"
    vllm.change(token_s=0.0)
    wait_for(lambda: bool(vllm.debug()["disconnects"]), "the worker notes it")
    assert vllm.seen()[-1]["outcome"] == "left"


def test_a_worker_that_starts_slowly(fleet: Fleet) -> None:
    worker = fleet.sglang("--listen-after-s", "0.2", "--ready-after-s", "1").wait_ready()
    with pytest.raises(urllib.error.HTTPError, match="503"):
        text(f"{worker.url}/health")
    assert ask_now(worker.port, CHAT, chat()).status == 503
    wait_for(lambda: ask_now(worker.port, CHAT, chat()).status == 200, "it is ready")


def legs(pair: tuple[Worker, Worker], room: int, rank: int, told: int | None) -> list[Reply]:
    """Both legs of one request, prefilled on `rank`, the decode leg told `told`."""
    prefill, decode = pair
    info = get(f"{prefill.url}/server_info")
    assert info["disaggregation_mode"] == "prefill"
    where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": info["disaggregation_bootstrap_port"]}
    body = chat(bootstrap_room=room, **where)
    at_decode = body if told is None else {**body, "disagg_prefill_dp_rank": told}

    async def both() -> list[Reply]:
        return await gather(
            ask(decode.port, CHAT, at_decode), ask(prefill.port, CHAT, {**body, "routed_dp_rank": rank})
        )

    return asyncio.run(both())


def test_prefill_and_decode_meet_in_a_room(pair: tuple[Worker, Worker]) -> None:
    assert [reply.status for reply in legs(pair, 10, 1, 1)] == [200, 200]
    assert [reply.status for reply in legs(pair, 11, 1, None)] == [200, 200]  # by the room: 11 % 2


def test_legs_that_do_not_meet_give_up(pair: tuple[Worker, Worker]) -> None:
    assert [reply.status for reply in legs(pair, 20, 1, 0)] == [500, 500]
    assert [reply.status for reply in legs(pair, 22, 1, None)] == [500, 500]


def test_a_room_is_used_once(pair: tuple[Worker, Worker]) -> None:
    assert [reply.status for reply in legs(pair, 30, 0, 0)] == [200, 200]
    decode, prefill = legs(pair, 30, 0, 0)
    assert prefill.status == 400
    assert decode.status == 500
    assert "without bootstrap room" in ask_now(pair[0].port, CHAT, chat()).json()["message"]
