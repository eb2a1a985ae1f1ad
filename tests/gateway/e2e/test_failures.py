"""Workers that fail: what is tried again, what is not, and what the client is told."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Any

import pytest
from tests.gateway.client import CHAT, Reply, ask, ask_now, chat, gather
from tests.gateway.processes import Fleet, Gateway, Worker, free_port, get
from tests.server.raw import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

TURNS = ("--policy", "round_robin")
NO_BREAKER = ("--breaker-failures", "100000", "--outlier-interval", "0")


@pytest.fixture(scope="module")
def workers(shared_fleet: Fleet) -> list[Worker]:
    """The first one fails as the test says, the second does not."""
    return [shared_fleet.sglang().wait_ready(), shared_fleet.vllm().wait_ready()]


@pytest.fixture(scope="module")
def gateway(shared_fleet: Fleet, workers: list[Worker]) -> Gateway:
    limits = ("--first-token-timeout", "1", "--between-tokens-timeout", "1")
    return shared_fleet.before(workers, *TURNS, *NO_BREAKER, *limits)


@contextlib.contextmanager
def failing(worker: Worker, fault: str, **more: Any) -> Iterator[None]:
    """The worker fails each request."""
    worker.change(faults={fault: 1.0}, **more)
    try:
        yield
    finally:
        worker.change(faults={}, token_s=0.0, retry_after_s=1.0)


def ask_many(gateway: Gateway, num: int, **more: Any) -> list[Reply]:
    """One after the other, so that turns alternate."""
    return [ask_now(gateway.port, CHAT, chat(f"{index}", **more)) for index in range(num)]


@pytest.mark.parametrize("fault", ["500", "502", "503", "408", "reset_before_head", "close_before_head", "garbage"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_the_first_byte_is_tried_elsewhere(
    gateway: Gateway, workers: list[Worker], fault: str, stream: bool
) -> None:
    before = workers[0].num_seen()
    with failing(workers[0], fault, retry_after_s=0.0):
        replies = ask_many(gateway, 4, stream=stream)
    assert [(reply.status, reply.is_whole) for reply in replies] == [(200, True)] * 4
    assert workers[0].num_seen() >= before + 2


def test_a_worker_that_is_silent_is_left_for_another(gateway: Gateway, workers: list[Worker]) -> None:
    with failing(workers[0], "hang_before_head"):
        replies = ask_many(gateway, 2)
        assert {reply.status for reply in replies} <= {200, 504}
        for reply in replies:
            if reply.status == 504:
                assert "first token" in reply.error()["message"].replace("_", " ")
        wait_for(lambda: workers[0].seen()[-1]["outcome"] == "left", "the silent try is given up")


@pytest.mark.parametrize("fault", ["close_mid_stream", "reset_mid_stream", "hang_mid_stream"])
def test_a_failure_after_the_first_byte_is_told_and_never_tried_again(
    gateway: Gateway, workers: list[Worker], fault: str
) -> None:
    before = [worker.num_seen() for worker in workers]
    with failing(workers[0], fault):
        replies = ask_many(gateway, 4, stream=True)
    after = [worker.num_seen() for worker in workers]
    assert sum(after) == sum(before) + 4
    assert [now - then for now, then in zip(after, before, strict=True)] == [2, 2]
    broken = [reply for reply in replies if not reply.is_done()]
    assert len(broken) == 2
    for reply in broken:
        assert reply.status == 200
        assert reply.body.count(b"data: ") > 1
        assert "message" in reply.error()
        if fault == "hang_mid_stream":
            assert "between tokens" in reply.error()["message"].replace("_", " ")


def test_what_a_worker_refuses_is_not_tried_again(gateway: Gateway, workers: list[Worker]) -> None:
    before = sum(worker.num_seen() for worker in workers)
    with failing(workers[0], "400"):
        replies = ask_many(gateway, 4)
    assert sorted(reply.status for reply in replies) == [200, 200, 400, 400]
    assert sum(worker.num_seen() for worker in workers) == before + 4


@pytest.fixture(scope="module")
def alone(shared_fleet: Fleet) -> Worker:
    return shared_fleet.sglang().wait_ready()


@pytest.fixture(scope="module")
def strict(shared_fleet: Fleet, alone: Worker) -> Gateway:
    """Before one worker: short limits, a short patience with Retry-After, two retries."""
    limits = ("--first-token-timeout", "0.4", "--between-tokens-timeout", "0.4", "--request-timeout", "3")
    return shared_fleet.before([alone], "--retry-max-delay", "2", "--max-retries", "2", *limits, *NO_BREAKER)


def test_a_short_retry_after_is_waited_for(strict: Gateway, alone: Worker) -> None:
    num_before = alone.num_seen()
    alone.change(faults={"429": 1.0}, retry_after_s=1)

    async def run() -> Reply:
        asking = asyncio.create_task(ask(strict.port, CHAT, chat()))
        while await asyncio.to_thread(alone.num_seen) == num_before:
            await asyncio.sleep(0.01)
        alone.change(faults={})
        return await asking

    assert asyncio.run(run()).status == 200
    first, second = alone.seen()[num_before:]
    assert second["received_at"] - first["received_at"] >= 0.9


def test_a_long_retry_after_is_passed_on(strict: Gateway, alone: Worker) -> None:
    num_before = alone.num_seen()
    with failing(alone, "429", retry_after_s=30):
        reply = ask_now(strict.port, CHAT, chat())
    assert (reply.status, reply.headers["retry-after"]) == (429, "30")
    assert alone.num_seen() == num_before + 1


def test_tries_are_bounded(strict: Gateway, alone: Worker) -> None:
    num_before = alone.num_seen()
    with failing(alone, "500"):
        assert ask_now(strict.port, CHAT, chat()).status == 500
    assert alone.num_seen() == num_before + 3


def test_time_limits_name_their_phase(strict: Gateway, alone: Worker) -> None:
    with failing(alone, "hang_before_head"):
        reply = ask_now(strict.port, CHAT, chat())
        assert reply.status == 504
        assert "first_token" in reply.error()["message"]
    with failing(alone, "hang_mid_stream"):
        assert "between_tokens" in ask_now(strict.port, CHAT, chat(stream=True)).error()["message"]
    alone.change(token_s=0.3)
    reply = ask_now(strict.port, CHAT, chat(stream=True))
    alone.change(token_s=0.0)
    assert "total" in reply.error()["message"]
    assert reply.ended_at - reply.began_at > 2.5


def test_the_breaker_ignores_refusals_and_opens_at_failures(fleet: Fleet) -> None:
    bad, _ = workers = [fleet.sglang(), fleet.sglang()]
    limits = ("--breaker-failures", "3", "--breaker-open", "0.5", "--outlier-interval", "0")
    gateway = fleet.before(workers, *TURNS, *limits)
    assert [ask_now(gateway.port, CHAT, chat(max_tokens=-1)).status for _ in range(20)] == [400] * 20
    assert gateway.metric("equipoise_gateway_worker_breaker_opened_total") == 0
    num_before = bad.num_seen()
    bad.change(faults={"500": 1.0})
    assert [reply.status for reply in ask_many(gateway, 20)] == [200] * 20
    assert num_before + 3 <= bad.num_seen() < num_before + 10
    assert gateway.metric("equipoise_gateway_worker_breaker_opened_total", worker=bad.url) == 1
    bad.change(faults={})

    def is_back() -> bool:
        seen = bad.num_seen()
        return [reply.status for reply in ask_many(gateway, 4)] == [200] * 4 and bad.num_seen() == seen + 2

    wait_for(is_back, "the worker has its share again")


@contextlib.contextmanager
def nobody_accepts(port: int) -> Iterator[None]:
    """No connection to `port` comes about, and none is refused: its backlog is full."""
    with socket.socket() as listening, contextlib.ExitStack() as stack:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        listening.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        yield


def test_a_worker_that_does_not_accept_is_given_up_in_time(fleet: Fleet) -> None:
    worker = fleet.sglang().wait_ready()
    flags = ("--connect-timeout", "0.3", "--max-retries", "0", "--health-check-interval", "60", *NO_BREAKER)
    gateway = fleet.before([worker], *flags)
    worker.kill()
    with nobody_accepts(worker.port):
        reply = ask_now(gateway.port, CHAT, chat(), timeout_s=20)
    assert reply.status in (502, 503, 504)
    assert "connect" in reply.error()["message"]


def test_a_rude_keep_alive_goes_unnoticed(fleet: Fleet) -> None:
    worker = fleet.sglang("--max-per-connection", "3").wait_ready()
    gateway = fleet.before([worker], "--max-retries", "0", *NO_BREAKER)
    assert [reply.status for reply in ask_many(gateway, 20)] == [200] * 20


def test_start_up_with_all_workers_down(fleet: Fleet) -> None:
    port = free_port()
    gateway = fleet.gateway("--worker", f"http://127.0.0.1:{port}", is_ready=False)
    reply = ask_now(gateway.port, CHAT, chat())
    assert reply.status == 503
    assert reply.headers["retry-after"]
    assert "starting" in reply.error()["message"]
    assert ask_now(gateway.port, "/readiness", method="GET").status == 503
    fleet.sglang("--port", str(port)).wait_ready()
    gateway.wait_ready()
    assert ask_now(gateway.port, CHAT, chat()).status == 200
    assert ask_now(gateway.port, "/readiness", method="GET").status == 200


def test_start_up_with_a_worker_that_is_slow_and_one_that_is_down(fleet: Fleet) -> None:
    slow = fleet.sglang("--ready-after-s", "1.5").wait_ready()
    urls = ("--worker", slow.url, "--worker", f"http://127.0.0.1:{free_port()}")
    gateway = fleet.gateway(*urls, is_ready=False)
    assert ask_now(gateway.port, CHAT, chat()).status == 503
    gateway.wait_ready(1)
    assert ask_now(gateway.port, CHAT, chat()).status == 200
    assert [model["id"] for model in get(f"{gateway.url}/v1/models")["data"]] == ["test-model"]


def test_a_worker_that_dies_and_comes_back(fleet: Fleet) -> None:
    workers = [fleet.sglang().wait_ready(), fleet.sglang().wait_ready()]
    gateway = fleet.before(workers, *TURNS)
    workers[0].kill()
    assert [reply.status for reply in ask_many(gateway, 6)] == [200] * 6
    wait_for(lambda: gateway.worker(workers[0].url)["state"] == "unhealthy", "it is found out")
    workers[0].restart()
    gateway.wait_ready(2)

    def is_served() -> bool:
        return [reply.status for reply in ask_many(gateway, 2)] == [200, 200] and workers[0].num_seen() > 0

    wait_for(is_served, "it is used again")


def test_a_frozen_worker_is_found_out(fleet: Fleet) -> None:
    workers = [fleet.sglang().wait_ready(), fleet.sglang().wait_ready()]
    quick = ("--health-check-timeout", "0.5", "--first-token-timeout", "1", "--unhealthy-after", "2")
    gateway = fleet.before(workers, *TURNS, *quick)
    workers[0].freeze()

    async def run() -> list[Reply]:
        return await gather(*(ask(gateway.port, CHAT, chat(f"{index}"), timeout_s=30) for index in range(10)))

    replies = asyncio.run(run())
    assert all(reply.status in (200, 504) for reply in replies)
    wait_for(lambda: gateway.worker(workers[0].url)["state"] == "unhealthy", "it is found out")
    assert [reply.status for reply in ask_many(gateway, 4)] == [200] * 4
    workers[0].thaw()
    gateway.wait_ready(2)
