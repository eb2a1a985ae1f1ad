"""Pairs of prefill and decode workers that really meet in rooms, and what happens when one of them fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.gateway.client import CHAT, COMPLETIONS, GENERATE, Reply, ask, ask_now, chat, completion, gather
from tests.server.raw import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.gateway.processes import Fleet, Gateway, Worker

PREFIX = "equipoise_gateway_"
CALM = ("--breaker-failures", "100000", "--outlier-interval", "0", "--policy", "round_robin")
Pair = tuple[list["Worker"], list["Worker"]]


def start(fleet: Fleet, num: int = 2, dp_size: int = 2) -> Pair:
    """So many workers of each role."""
    ranks = ("--dp-size", str(dp_size))
    prefills = [fleet.sglang("--role", "prefill", *ranks) for _ in range(num)]
    decodes = [fleet.sglang("--role", "decode", "--prefill-dp-size", str(dp_size), *ranks) for _ in range(num)]
    return [worker.wait_ready() for worker in prefills], [worker.wait_ready() for worker in decodes]


def before(fleet: Fleet, pair: Pair, *flags: str) -> Gateway:
    """A gateway before these workers, all ready."""
    urls = [part for worker in pair[0] for part in ("--prefill", worker.url)]
    urls += [part for worker in pair[1] for part in ("--decode", worker.url)]
    return fleet.gateway(*urls, *flags)


@pytest.fixture(scope="module")
def pair(shared_fleet: Fleet) -> Pair:
    return start(shared_fleet)


@pytest.fixture(scope="module")
def gateway(shared_fleet: Fleet, pair: Pair) -> Gateway:
    return before(shared_fleet, pair, *CALM, "--first-token-timeout", "2", "--between-tokens-timeout", "2")


@pytest.fixture(autouse=True)
def rest(request: pytest.FixtureRequest) -> Iterator[None]:
    """What requests took is given back, whatever the test did."""
    yield
    if "gateway" in request.fixturenames:
        assert_at_rest(request.getfixturevalue("gateway"))


def assert_at_rest(gateway: Gateway) -> None:
    for name in ("rank_charged_tokens", "worker_inflight_requests"):
        wait_for(lambda name=name: gateway.metric(PREFIX + name) == 0, f"{name} is 0")  # type: ignore[misc]


@contextlib.contextmanager
def changed(workers: list[Worker], **quirks: Any) -> Iterator[None]:
    """Workers that behave otherwise for a while."""
    for worker in workers:
        worker.change(**quirks)
    try:
        yield
    finally:
        for worker in workers:
            worker.change(faults={}, ttft_s=0.0, token_s=0.0, answer_tokens=16)


def burst(gateway: Gateway, num: int, **more: Any) -> list[Reply]:
    """So many requests at once."""

    async def run() -> list[Reply]:
        return await gather(*(ask(gateway.port, CHAT, chat(f"number {index}", **more)) for index in range(num)))

    return asyncio.run(run())


def last(worker: Worker) -> dict[str, Any]:
    """The last request's body, with what else is known of it under "seen"."""
    seen = worker.seen()[-1]
    return {**json.loads(seen["body"]), "seen": seen}


def test_legs_meet_whichever_ranks_they_are_on(gateway: Gateway, pair: Pair) -> None:
    served = [worker.served() for workers in pair for worker in workers]
    for stream in (False, True):
        replies = burst(gateway, 16, stream=stream)
        assert [(reply.status, reply.is_whole) for reply in replies] == [(200, True)] * 16
        assert all(reply.is_done() for reply in replies) is stream
    after = [worker.served() for workers in pair for worker in workers]
    counts = [[b - a for a, b in zip(*ranks, strict=True)] for ranks in zip(served, after, strict=True)]
    assert [sum(count) for count in counts] == [16] * 4
    assert min(map(min, counts)) >= 4
    ranks = set()
    for worker in pair[1]:
        for seen in worker.seen():
            body = json.loads(seen["body"])
            assert body["routed_dp_rank"] == seen["rank"] == int(dict(seen["headers"])["x-data-parallel-rank"])
            ranks.add((body["disagg_prefill_dp_rank"], seen["rank"]))
    assert len(ranks) > 1


def test_the_answer_is_what_one_worker_would_say(gateway: Gateway, shared_fleet: Fleet) -> None:
    alone = shared_fleet.sglang().wait_ready()
    for path, body in (
        (CHAT, chat(stream=True)),
        (COMPLETIONS, completion()),
        (GENERATE, {"text": "a", "stream": True}),
    ):
        assert ask_now(gateway.port, path, body).body == ask_now(alone.port, path, body).body


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_those_of_one_worker(gateway: Gateway, shared_fleet: Fleet, stream: bool) -> None:
    alone = shared_fleet.sglang().wait_ready()
    body = {"text": "one two three", "return_logprob": True, "stream": stream, "sampling_params": {"max_new_tokens": 2}}

    def lists(port: int) -> list[Any]:
        reply = ask_now(port, GENERATE, body)
        answers = reply.events() if stream else [reply.json()]
        return [answer["meta_info"]["input_token_logprobs"] for answer in answers]

    assert lists(gateway.port)[0] == lists(alone.port)[0] != []


@pytest.mark.parametrize("role", [0, 1])
@pytest.mark.parametrize("fault", ["500", "reset_before_head", "close_before_head", "garbage"])
def test_another_pair_is_tried_when_one_leg_fails(gateway: Gateway, pair: Pair, role: int, fault: str) -> None:
    with changed([pair[role][0]], faults={fault: 1.0}, retry_after_s=0.0):
        replies = burst(gateway, 6, stream=True)
    assert [(reply.status, reply.is_done()) for reply in replies] == [(200, True)] * 6
    # the other legs were not left to wait for the time-out of their room
    wait_for(lambda: all(rank["running"] == 0 for rank in ranks(pair)), "nobody waits in a room", 10)


def ranks(pair: Pair) -> list[dict[str, Any]]:
    return [rank for workers in pair for worker in workers for rank in worker.debug()["ranks"]]


@pytest.mark.parametrize("role", [0, 1])
def test_what_one_leg_refuses_is_the_clients_answer(gateway: Gateway, pair: Pair, role: int) -> None:
    with changed(pair[role], faults={"400": 1.0}):
        reply = ask_now(gateway.port, CHAT, chat())
    assert (reply.status, reply.json()["message"]) == (400, "told to answer 400")
    other = pair[1 - role]
    wait_for(lambda: all(seen["outcome"] != "running" for one in other for seen in one.seen()), "the other leg ended")


@pytest.mark.parametrize("role", [0, 1])
def test_silent_legs_are_named(gateway: Gateway, pair: Pair, role: int) -> None:
    with changed(pair[role], faults={"hang_before_head": 1.0}):
        reply = ask_now(gateway.port, CHAT, chat())
    assert reply.status == 504
    message = reply.error()["message"]  # each leg waits for the other one: from outside they look alike
    assert "prefill worker http://" in message
    assert "decode worker http://" in message
    assert "first_token" in message


@pytest.mark.parametrize("fault", ["close_mid_stream", "reset_mid_stream", "hang_mid_stream"])
def test_a_stream_under_way_ends_with_an_error(gateway: Gateway, pair: Pair, fault: str) -> None:
    with changed(pair[1], faults={fault: 1.0}):
        reply = ask_now(gateway.port, CHAT, chat(stream=True))
    assert reply.status == 200
    assert not reply.is_done()
    assert reply.body.count(b"data: ") > 1
    assert reply.error()["message"].startswith("decode worker http://")


def test_a_client_that_leaves_ends_both_legs(gateway: Gateway, pair: Pair) -> None:
    def outcomes() -> list[str]:
        return [seen["outcome"] for workers in pair for worker in workers for seen in worker.seen()]

    async def run() -> None:
        asking = asyncio.create_task(ask(gateway.port, CHAT, chat(stream=True)))
        async with asyncio.timeout(20):
            while (await asyncio.to_thread(outcomes)).count("running") < 2:
                await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    num_left = outcomes().count("left")
    with changed([*pair[0], *pair[1]], ttft_s=60.0):
        asyncio.run(run())
        wait_for(lambda: outcomes().count("left") == num_left + 2, "both have noticed", 10)


def test_rooms_are_shown_and_refused(gateway: Gateway, pair: Pair) -> None:
    ports = [worker["bootstrap_port"] for worker in gateway.workers() if worker["role"] == "prefill"]
    assert all(isinstance(port, int) for port in ports)
    assert ask_now(gateway.port, CHAT, chat()).status == 200
    assert any(last(worker)["bootstrap_port"] in ports for worker in pair[1])
    reply = ask_now(gateway.port, CHAT, chat(bootstrap_room=1))
    assert reply.status == 400
    assert "bootstrap_room" in reply.error()["message"]


def test_batches_and_what_needs_no_pair(gateway: Gateway, pair: Pair) -> None:
    assert ask_now(gateway.port, COMPLETIONS, completion(["a", "b"])).status == 200  # type: ignore[arg-type]
    assert any(isinstance(last(worker).get("bootstrap_room"), list) for worker in pair[1])
    assert ask_now(gateway.port, "/tokenize", {"prompt": "a"}).json()["count"]


def test_metrics_count_both_legs(gateway: Gateway) -> None:
    def counted(role: str) -> float:
        return gateway.metric(f"{PREFIX}pair_legs_total", role=role, outcome="ok")

    before = [counted("prefill"), counted("decode")]
    burst(gateway, 3)
    wait_for(lambda: [counted("prefill"), counted("decode")] == [number + 3 for number in before], "all are counted")


def test_workers_that_die_harm_nobody_else(fleet: Fleet) -> None:
    pair = start(fleet)
    gateway = before(fleet, pair, "--policy", "round_robin", "--access-log", "stderr")
    for worker in pair[1]:
        worker.change(token_s=0.05, answer_tokens=20)
    for worker in pair[0]:
        worker.change(ttft_s=0.3)

    async def run() -> list[Reply]:
        asked = []
        for index in range(60):
            asked.append(asyncio.create_task(ask(gateway.port, CHAT, chat(f"{index}", stream=True))))
            if index == 20:
                pair[0][0].kill()
            if index == 40:
                pair[1][0].kill()
            await asyncio.sleep(0.03)
        return list(await asyncio.gather(*asked))

    replies = asyncio.run(run())
    broken = [reply for reply in replies if not reply.is_done()]
    assert all("worker http://" in reply.error()["message"] for reply in broken), broken
    assert len(broken) < 40
    assert_at_rest(gateway)
    assert [reply.is_done() for reply in burst(gateway, 4, stream=True)] == [True] * 4
    lines = [json.loads(line) for line in gateway.read_log().splitlines() if line.startswith("{")]
    whole = [line for line in lines if line["status"] == 200 and line["outcome"] == "ok"]
    assert {line["worker"] for line in whole} == {worker.url for worker in pair[1]}
    assert {line["prefill_worker"] for line in whole} == {worker.url for worker in pair[0]}
    assert {line["prefill_rank"] for line in whole} == {line["rank"] for line in whole} == {0, 1}


def test_a_model_served_by_pairs_and_by_single_workers(fleet: Fleet) -> None:
    pair = start(fleet, 1, 1)
    single = fleet.sglang().wait_ready()
    gateway = before(fleet, pair, "--worker", single.url)
    for worker in (*pair[0], *pair[1], single):
        worker.change(ttft_s=0.5)
    assert all(reply.status == 200 for reply in burst(gateway, 12))
    assert single.num_seen() > 2
    assert pair[1][0].num_seen() > 2
    assert single.num_seen() + pair[1][0].num_seen() == 12
