"""One request through its tries: what passes, what is tried again, what is told when nothing helps."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from typing import TYPE_CHECKING

import pytest
from tests.gateway.plane_kit import (
    BODY,
    FAST,
    MODEL,
    OK,
    OK_BODY,
    SSE_HEAD,
    STREAM,
    Peer,
    ScriptedWorker,
    answer,
    chunk,
    post,
    staged,
)
from tests.gateway.shortage import no_descriptors

from equipoise.config.worker import WorkerSpec
from equipoise.gateway.fleet.router import Route
from equipoise.gateway.fleet.worker import Found
from equipoise.gateway.http.pool import PoolLimits
from equipoise.gateway.http.request import ClientRequest
from equipoise.gateway.relay.exchange import Exchange
from equipoise.gateway.relay.plane import PlaneLimits
from equipoise.gateway.relay.retry import RetryRules
from equipoise.gateway.transport import Outgoing

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from equipoise.gateway.relay.tries import Try

    Script = Callable[[ScriptedWorker, Peer], Awaitable[None]]


def always(data: bytes) -> Script:
    async def script(worker: ScriptedWorker, peer: Peer) -> None:
        while True:
            await worker.take(peer)
            peer.send(data)

    return script


async def silent(worker: ScriptedWorker, peer: Peer) -> None:
    await worker.take(peer)
    await peer.closed()


async def drops(worker: ScriptedWorker, peer: Peer) -> None:
    """Takes a request and closes."""
    await worker.take(peer)


async def resets_after_head(worker: ScriptedWorker, peer: Peer) -> None:
    await worker.take(peer)
    peer.send(SSE_HEAD)
    await asyncio.sleep(0.05)
    peer.reset()


def cuts_after(*events: bytes) -> Script:
    async def script(worker: ScriptedWorker, peer: Peer) -> None:
        await worker.take(peer)
        peer.send(SSE_HEAD + b"".join(map(chunk, events)))
        await asyncio.sleep(0.05)

    return script


def error_of(body: bytes) -> dict[str, str]:
    error: dict[str, str] = json.loads(body)["error"]
    return error


# What passes


def test_answers_pass_byte_for_byte() -> None:
    async def run() -> None:
        payload = bytes(range(256)) * 300
        headers = (b"Server: x", b"X-A: 1", b"x-a: 2", b"Set-Cookie: a=b; Path=/", b"ETag: \xff", b"Content-Type: a/b")
        data = answer(203, payload, *headers)
        async with staged(ScriptedWorker(always(data))) as stage:
            head, body = await stage.ask()
            assert body == payload
            lines = head.split(b"\r\n")
            assert lines[0] == b"HTTP/1.1 203 Non-Authoritative Information"
            assert lines[1].startswith(b"x-request-id: ")
            assert lines[2:] == [*headers, b"Content-Length: %d" % len(payload), b"", b""]

    asyncio.run(run())


def test_requests_pass_byte_for_byte() -> None:
    async def run() -> None:
        worker = ScriptedWorker()
        body = b' {"b" : 1.0e2 , "model":"m","messages": [ {"x":"\\u00e4\xff"} ],\t"b":2}\n'
        async with staged(worker) as stage:
            own = ("X-A: 1", "x-a: 2", "Authorization: Bearer k", "Cookie: a", "X-Request-ID: mine", "Keep-Alive: 5")
            head, _ = await stage.ask(post(body, "/v1/chat/completions?a=%20b", *own))
            assert b"x-request-id: mine\r\n" in head
            sent, got = worker.seen[0]
            assert got == body
            lines = sent.split(b"\r\n")
            assert lines[0] == b"POST /v1/chat/completions?a=%20b HTTP/1.1"
            assert lines[2:-4] == [line.encode() for line in own[:-1]]
            assert lines[-4].startswith(b"via: 1.1 equipoise-")

    asyncio.run(run())


@pytest.mark.parametrize("own", [(), ("X-Request-Id: mine",)])
def test_each_answer_names_its_request_once(own: tuple[str, ...]) -> None:
    async def run() -> None:
        worker = ScriptedWorker(always(answer(200, b"{}", b"X-Request-Id: theirs")))
        async with staged(worker) as stage:
            ids = []
            for _ in range(2):
                head, _ = await stage.ask(post(BODY, "/generate", *own))
                lines = [line for line in head.split(b"\r\n") if line.lower().startswith(b"x-request-id:")]
                assert len(lines) == 1
                ids.append(lines[0][14:])
            sent = [line for head, _ in worker.seen for line in head.split(b"\r\n") if b"equest-" in line]
            assert [line[14:] for line in sent] == ids
            assert ids == [b"mine", b"mine"] if own else len(set(ids)) == 2
            head, _ = await stage.ask(b"GET /nowhere HTTP/1.1\r\nHost: a\r\n\r\n")
            assert b"x-request-id: " in head

    asyncio.run(run())


def test_streams_pass_as_they_come() -> None:
    async def run() -> None:
        events = [b"data: %d\n\n" % number for number in range(5)]
        may_go_on = asyncio.Event()

        async def script(worker: ScriptedWorker, peer: Peer) -> None:
            await worker.take(peer)
            peer.send(SSE_HEAD)
            for event in events:
                peer.send(chunk(event))
                await may_go_on.wait()
                may_go_on.clear()
            peer.send(b"0\r\nX-Trailer: 1\r\n\r\n")

        async with staged(ScriptedWorker(script)) as stage:
            peer = await stage.connect()
            peer.send(post(STREAM))
            assert b"transfer-encoding: chunked\r\n" in await peer.head()
            for event in events:
                assert await peer.exactly(len(chunk(event))) == chunk(event)
                may_go_on.set()
            assert await peer.exactly(19) == b"0\r\nX-Trailer: 1\r\n\r\n"

    asyncio.run(run())


@pytest.mark.parametrize("status", [200, 204, 302, 400, 401, 404, 413, 422, 501])
def test_what_a_worker_decided_is_passed_on_and_not_tried_again(status: int) -> None:
    async def run() -> None:
        data = b"HTTP/1.1 204 X\r\n\r\n" if status == 204 else answer(status, b"{}", b"X-Own: 1")
        workers = [ScriptedWorker(always(data)) for _ in range(2)]
        async with staged(*workers) as stage:
            head, _ = await stage.ask()
            assert head.startswith(b"HTTP/1.1 %d " % status)
            assert sum(len(worker.seen) for worker in workers) == 1
            await stage.is_at_rest()
            assert stage.metrics.requests["/v1/chat/completions", workers[0].url, status] == 1

    asyncio.run(run())


def test_what_is_asked_for_elsewhere_passes_too() -> None:
    async def run() -> None:
        worker = ScriptedWorker()
        async with staged(worker) as stage:
            for path in ("/tokenize", "/v1/rerank", "/v1/score", "/v1/embeddings", "/v1/messages", "/generate"):
                assert (await stage.ask(post(b'{"model":"m"}', path)))[1] == OK_BODY
            odd = b"--boundary\r\nnot json\r\n"
            assert (await stage.ask(post(odd, "/v1/audio/transcriptions")))[1] == OK_BODY
            assert worker.seen[-1][1] == odd
            await stage.is_at_rest()

    asyncio.run(run())


# Trying again


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504, 529])
def test_failures_of_the_moment_are_tried_elsewhere(status: int) -> None:
    async def run() -> None:
        workers = [ScriptedWorker(always(answer(status, b"busy"))), ScriptedWorker()]
        async with staged(*workers) as stage:
            for _ in range(4):
                head, body = await stage.ask()
                assert (head[9:12], body) == (b"200", OK_BODY)
            assert len(workers[1].seen) == 4
            assert stage.metrics.retries[str(status)] == len(workers[0].seen) >= 1
            await stage.is_at_rest()

    asyncio.run(run())


@pytest.mark.parametrize("script", [drops, resets_after_head, always(b"noise\r\n"), cuts_after()])
def test_broken_answers_are_tried_elsewhere_while_nothing_reached_the_client(script: Script) -> None:
    async def run() -> None:
        workers = [ScriptedWorker(script), ScriptedWorker()]
        async with staged(*workers) as stage:
            for _ in range(2):
                head, body = await stage.ask()
                assert (head[9:12], body) == (b"200", OK_BODY)
            assert len(workers[0].seen) >= 1
            await stage.is_at_rest()

    asyncio.run(run())


def test_a_dead_worker_is_passed_over() -> None:
    async def run() -> None:
        workers = [ScriptedWorker(), ScriptedWorker(), ScriptedWorker()]
        async with staged(*workers) as stage:
            await workers[0].stop()
            await workers[1].stop()
            for _ in range(6):
                assert (await stage.ask())[1] == OK_BODY
            assert stage.metrics.failed_tries[workers[0].url, "connect"] >= 1
            await stage.is_at_rest()

    asyncio.run(run())


def test_each_try_goes_to_a_worker_that_was_not_tried() -> None:
    async def run() -> None:
        bad, good = ScriptedWorker(always(answer(500))), ScriptedWorker()
        async with staged(bad, good, retry=RetryRules(delay_s=0.2, max_delay_s=0.2)) as stage:
            # taking turns alone would send the second try of the first request to the bad worker again
            answers = await asyncio.gather(stage.ask(), stage.ask())
            assert [body for _, body in answers] == [OK_BODY, OK_BODY]
            assert len(bad.seen) == 1

    asyncio.run(run())


def test_tries_are_bounded_and_the_last_own_answer_of_a_worker_is_passed_on() -> None:
    async def run() -> None:
        worker = ScriptedWorker(always(answer(503, b"own words", b"X-Own: 1", b"Retry-After: 1")))
        async with staged(worker, retry=RetryRules(max_retries=2, delay_s=0.001, max_delay_s=1.5)) as stage:
            begin = time.monotonic()
            head, body = await stage.ask()
            assert (head[9:12], body) == (b"503", b"own words")
            assert b"X-Own: 1\r\n" in head
            assert len(worker.seen) == 3
            assert time.monotonic() - begin >= 2.0  # Retry-After was heeded, twice
            await stage.is_at_rest()

    asyncio.run(run())


def test_a_worker_that_dies_after_its_own_answer_does_not_wipe_it_out() -> None:
    async def run() -> None:
        async def script(worker: ScriptedWorker, peer: Peer) -> None:
            await worker.take(peer)
            if len(worker.seen) == 1:
                peer.send(answer(500, b"own words"))

        async with staged(ScriptedWorker(script)) as stage:
            head, body = await stage.ask()
            assert (head[9:12], body) == (b"500", b"own words")
            await stage.is_at_rest()

    asyncio.run(run())


def test_a_long_retry_after_is_left_to_the_client() -> None:
    async def run() -> None:
        worker = ScriptedWorker(always(answer(429, b"later", b"Retry-After: 30")))
        async with staged(worker) as stage:
            head, _ = await stage.ask()
            assert head.startswith(b"HTTP/1.1 429 ")
            assert b"Retry-After: 30\r\n" in head
            assert len(worker.seen) == 1

    asyncio.run(run())


@pytest.mark.parametrize(
    ("script", "status", "phase"), [(None, 503, "connect"), (drops, 502, "send"), (always(OK[:9]), 502, "worker")]
)
def test_when_nothing_helps_the_error_names_phase_and_worker(script: Script | None, status: int, phase: str) -> None:
    async def cut(worker: ScriptedWorker, peer: Peer) -> None:
        await worker.take(peer)
        peer.send(OK[:20])

    async def run() -> None:
        worker = ScriptedWorker(cut if phase == "worker" else script)
        async with staged(worker) as stage:
            if script is None:
                await worker.stop()
            head, body = await stage.ask()
            assert head.startswith(b"HTTP/1.1 %d " % status)
            message = error_of(body)["message"]
            assert worker.url in message
            assert phase in message
            assert stage.metrics.failed_tries[worker.url, phase] == 4  # type: ignore[index]
            await stage.is_at_rest()

    asyncio.run(run())


def test_errors_of_messages_have_the_shape_of_anthropic() -> None:
    async def run() -> None:
        worker = ScriptedWorker(drops)
        async with staged(worker) as stage:
            _, body = await stage.ask(post(BODY, "/v1/messages"))
            error = json.loads(body)
            assert error["type"] == "error"
            assert error["error"]["type"] == "api_error"
            _, body = await stage.ask(post(b"[]", "/v1/messages"))
            assert json.loads(body)["error"]["type"] == "invalid_request_error"

    asyncio.run(run())


# Time limits


def test_a_late_first_byte_is_a_504_that_names_the_phase() -> None:
    async def run() -> None:
        worker = ScriptedWorker(silent)
        async with staged(worker, limits=PlaneLimits(first_token_s=0.2)) as stage:
            for _ in range(2):
                head, body = await stage.ask(post(STREAM))
                assert head.startswith(b"HTTP/1.1 504 ")
                assert "first_token" in error_of(body)["message"]
            assert len(worker.seen) == 2  # a slow request is not made slower by further tries
            await stage.is_at_rest()

    asyncio.run(run())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_gap_between_tokens_is_told_in_the_stream_and_cuts_it(path: str) -> None:
    async def script(worker: ScriptedWorker, peer: Peer) -> None:
        await worker.take(peer)
        peer.send(SSE_HEAD + chunk(b"data: 1\n\n"))
        await peer.closed()

    async def run() -> None:
        async with staged(ScriptedWorker(script), limits=PlaneLimits(between_tokens_s=0.2)) as stage:
            peer = await stage.connect()
            peer.send(post(STREAM, path))
            data = await peer.rest()
            assert b"between_tokens" in data
            assert b"\n\n0\r\n" not in data
            assert not data.endswith(b"0\r\n\r\n")
            assert (b"event: error\ndata: {" in data) is (path == "/v1/messages")
            await stage.is_at_rest()

    asyncio.run(run())


def test_a_request_may_not_take_longer_than_its_total_time() -> None:
    async def drip(worker: ScriptedWorker, peer: Peer) -> None:
        await worker.take(peer)
        peer.send(SSE_HEAD)
        while True:
            peer.send(chunk(b"data: 1\n\n"))
            await asyncio.sleep(0.02)

    async def run() -> None:
        async with staged(ScriptedWorker(drip), limits=PlaneLimits(total_s=0.3)) as stage:
            peer = await stage.connect()
            peer.send(post(STREAM))
            assert b"phase total" in await peer.rest()
            await stage.is_at_rest()
        async with staged(ScriptedWorker(always(answer(500))), limits=PlaneLimits(total_s=0.2)) as stage:
            head, _ = await stage.ask()  # between two tries
            assert head[9:12] in (b"500", b"504")

    asyncio.run(run())


# Cut answers


@pytest.mark.parametrize(("tail", "lead"), [(b"data: 2\n\n", b""), (b"data: 2", b"\n\n")])
def test_a_stream_that_breaks_off_ends_in_an_error_event_and_no_end(tail: bytes, lead: bytes) -> None:
    async def run() -> None:
        worker = ScriptedWorker(cuts_after(b"data: 1\n\n", tail))
        async with staged(worker) as stage:
            peer = await stage.connect()
            peer.send(post(STREAM))
            data = (await peer.rest()).split(b"\r\n\r\n", 1)[1]
            payload = b"".join(data.split(b"\r\n")[1::2])
            start = b"data: 1\n\n" + tail + lead + b"data: "
            assert payload.startswith(start)
            error = json.loads(payload[len(start) :])["error"]
            assert worker.url in error["message"]
            assert not data.endswith(b"0\r\n\r\n")
            assert len(worker.seen) == 1
            await stage.is_at_rest()

    asyncio.run(run())


def test_an_answer_with_a_length_that_breaks_off_is_short() -> None:
    async def script(worker: ScriptedWorker, peer: Peer) -> None:
        await worker.take(peer)
        peer.send(OK[:-5])
        await asyncio.sleep(0.05)

    async def run() -> None:
        async with staged(ScriptedWorker(script)) as stage:
            peer = await stage.connect()
            peer.send(post())
            assert (await peer.rest()).endswith(OK_BODY[:-5])
            await stage.is_at_rest()

    asyncio.run(run())


def test_a_stream_for_http_10_that_breaks_off_is_reset() -> None:
    async def run() -> None:
        async with staged(ScriptedWorker(cuts_after(b"data: 1\n\n"))) as stage:
            peer = await stage.connect()
            peer.send(post(STREAM).replace(b"HTTP/1.1", b"HTTP/1.0"))
            assert await peer.closed()

    asyncio.run(run())


# Ranks, tokens, queue


def test_the_rank_goes_into_body_and_header_unless_the_request_names_one() -> None:
    async def run() -> None:
        worker = ScriptedWorker()
        async with staged(worker, num_ranks=4) as stage:
            for _ in range(4):
                await stage.ask()
            for rank, (head, body) in enumerate(worker.seen):
                assert body == BODY[:-1] + b',"routed_dp_rank":%d}' % rank
                assert b"\r\nX-Data-Parallel-Rank: %d\r\n" % rank in head
            named = b'{"model":"m","routed_dp_rank":2}'
            await stage.ask(post(named))
            await stage.ask(post(BODY, "/v1/chat/completions", "X-Data-Parallel-Rank: 3"))
            assert worker.seen[4][1] == named
            assert b"Rank" not in worker.seen[4][0]
            assert worker.seen[5][1] == BODY
            assert worker.seen[5][0].count(b"Rank") == 1
            await stage.is_at_rest()

    asyncio.run(run())


def test_what_a_request_costs_is_charged_while_it_runs() -> None:
    async def run() -> None:
        worker = ScriptedWorker(silent)
        async with staged(worker, num_ranks=2) as stage:
            ids = json.dumps({"model": "m", "input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 5}, "n": 2})
            peer = await stage.connect()
            peer.send(post(ids.encode(), "/generate"))
            await stage.until(lambda: len(worker.seen) == 1)
            assert [rank.active for rank in stage.worker().load.ranks] == [13, 0]
            peer.reset()
            await stage.is_at_rest()

    asyncio.run(run())


@pytest.mark.parametrize("is_stream", [False, True])
def test_lengths_are_learnt_from_answers(is_stream: bool) -> None:
    async def run() -> None:
        usage = b'"usage":{"prompt_tokens":1000,"completion_tokens":40,"prompt_tokens_details":{"cached_tokens":9}}}'
        if is_stream:
            events = (b'data: {"a":1}\n\n', b"data: {" + usage + b"\n\n", b"data: [DONE]\n\n")
            data = SSE_HEAD + b"".join(map(chunk, events)) + b"0\r\n\r\n"
        else:
            data = answer(200, b"{" + usage)
        async with staged(ScriptedWorker(always(data))) as stage:
            prompt = json.dumps({"model": "m", "prompt": "x" * 4000, "stream": is_stream}).encode()
            for _ in range(60):
                await stage.ask(post(prompt, "/v1/completions"))
            assert stage.plane.lengths.num_prompt("m", 4002) in range(900, 1100)
            assert stage.plane.lengths.num_output("m", None) in range(36, 120)
            model = stage.metrics.models["m"]
            assert (model.num_prompt, model.num_cached, model.num_output) == (60_000, 540, 2400)

    asyncio.run(run())


def test_tokens_are_counted_by_events_where_no_usage_is_told() -> None:
    async def run() -> None:
        events = [b"data: {}\n\n"] * 7 + [b"data: [DONE]\n\n"]
        data = SSE_HEAD + b"".join(map(chunk, events)) + b"0\r\n\r\n"
        async with staged(ScriptedWorker(always(data))) as stage:
            await stage.ask(post(STREAM))
            assert stage.metrics.models["m"].num_output == 7

    asyncio.run(run())


def test_requests_beyond_the_limit_queue_take_turns_and_are_refused_when_full() -> None:
    async def run() -> None:
        may_answer = asyncio.Event()

        async def slow(worker: ScriptedWorker, peer: Peer) -> None:
            while True:
                await worker.take(peer)
                await may_answer.wait()
                peer.send(OK)

        worker = ScriptedWorker(slow)
        async with staged(worker, max_inflight=1, max_queue=4) as stage:
            peers = [await stage.connect() for _ in range(7)]
            for number, peer in enumerate(peers[:6]):
                key = "hog" if number < 5 else "other"
                peer.send(post(json.dumps({"n": number}).encode(), "/generate", f"Authorization: {key}"))
                await stage.until(lambda number=number: stage.plane.num_busy == min(number + 1, 5))  # type: ignore[misc]
            # the hog's last request lost its place to the other key's first one
            head, body = await peers[4].message()
            assert head.startswith(b"HTTP/1.1 429 ")
            assert b"retry-after: " in head
            assert error_of(body)["code"] == "queue_full"
            peers[1].reset()  # leaves the queue
            await stage.until(lambda: stage.plane.queue.num_waiting == 3)
            may_answer.set()
            for number in (0, 2, 3, 5):
                assert (await peers[number].message())[1] == OK_BODY
            order = [json.loads(body)["n"] for _, body in worker.seen]
            assert order == [0, 2, 5, 3]
            num_waits = stage.metrics.queue_wait.cumulated()[-1]
            assert num_waits == 5, "whoever queued, those that left or lost their place among them"
            await stage.is_at_rest()

    asyncio.run(run())


def test_waiting_in_the_queue_takes_a_bounded_time() -> None:
    async def run() -> None:
        async with staged(ScriptedWorker(silent), limits=PlaneLimits(queue_s=0.2), max_inflight=1) as stage:
            first = await stage.connect()
            first.send(post())
            await stage.until(lambda: stage.plane.num_busy == 1)
            head, body = await stage.ask()
            assert head.startswith(b"HTTP/1.1 503 ")
            assert error_of(body)["code"] == "queue_timeout"
            assert stage.metrics.refused == {"queue_timeout": 1}
            assert (stage.metrics.queue_wait.cumulated()[-1], stage.metrics.queue_wait.sum > 0.2) == (1, True)
            first.reset()
            await stage.is_at_rest()

    asyncio.run(run())


# Ends


def test_closing_answers_or_cuts_what_runs() -> None:
    async def run() -> None:
        async def script(worker: ScriptedWorker, peer: Peer) -> None:
            _, body = await worker.take(peer)
            if body == STREAM:
                peer.send(SSE_HEAD + chunk(b"data: 1\n\n"))
            await peer.closed()

        worker = ScriptedWorker(script)
        async with staged(worker, max_inflight=2) as stage:
            peers = [await stage.connect() for _ in range(3)]
            for peer, body in zip(peers, (STREAM, BODY, BODY), strict=True):
                peer.send(post(body))
            await peers[0].head()
            await stage.until(lambda: len(worker.seen) == 2)
            stage.plane.drain()
            assert (await peers[2].rest()).startswith(b"HTTP/1.1 503 ")
            stage.plane.close()
            stream, whole = await peers[0].rest(), await peers[1].rest()
            assert b"shutting down" in stream
            assert not stream.endswith(b"0\r\n\r\n")
            assert whole.startswith(b"HTTP/1.1 503 ")
            await stage.is_at_rest()

    asyncio.run(run())


def test_an_unknown_model_is_a_404_that_names_the_known() -> None:
    async def run() -> None:
        worker = ScriptedWorker()
        async with staged(worker) as stage:
            head, body = await stage.ask(post(b'{"model":"other"}'))
            assert head.startswith(b"HTTP/1.1 404 ")
            assert "m" in error_of(body)["message"]
            assert worker.num_connections == 0

    asyncio.run(run())


def test_no_worker_at_all_is_a_503() -> None:
    async def run() -> None:
        async with staged(pool=PoolLimits()) as stage:
            head, _ = await stage.ask(post(b"{}"))
            assert head.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: 1\r\n" in head
            await stage.is_at_rest()

    asyncio.run(run())


def test_other_paths_and_methods_are_refused() -> None:
    async def run() -> None:
        async with staged() as stage:
            head, _ = await stage.ask(b"GET /nowhere HTTP/1.1\r\nHost: a\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 404 ")
            head, _ = await stage.ask(b"GET /v1/completions HTTP/1.1\r\nHost: a\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 405 ")
            assert b"allow: POST\r\n" in head

    asyncio.run(run())


def test_requests_leave_nothing_for_the_garbage_collector() -> None:
    async def run() -> None:
        failing = ScriptedWorker(always(answer(500)))
        async with staged(ScriptedWorker(), failing) as stage:
            await stage.ask()
            gc.collect()
            gc.disable()
            try:
                for request in (post(), post(STREAM), post(b"[]"), b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n") * 5:
                    await stage.ask(request)
                await stage.is_at_rest()
                alive = [type(thing) for thing in gc.get_objects()]
            finally:
                gc.enable()
            assert [kind.__name__ for kind in alive if kind in (Exchange, ClientRequest, Outgoing, Route)] == []

    asyncio.run(run())


# Errors that are not the request's


class BrokenWay:
    """A Way that fails as an operator's policy may."""

    wants_keys = False

    def start(self, exchange: Exchange, now: float) -> Try:
        raise ZeroDivisionError


def test_a_way_that_fails_answers_its_clients_and_keeps_no_place(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        worker = ScriptedWorker()
        async with staged(worker, max_inflight=1) as stage:
            way, stage.plane.way = stage.plane.way, BrokenWay()
            for head, body in await asyncio.gather(*(stage.ask() for _ in range(5))):
                assert head.startswith(b"HTTP/1.1 500 ")
                assert error_of(body)["code"] == "internal_error"
            stage.plane.way = way
            assert (await stage.ask())[1] == OK_BODY
            await stage.is_at_rest()

    asyncio.run(run())
    assert "ZeroDivisionError" in caplog.text


def test_a_rank_without_end_is_left_to_the_worker() -> None:
    async def run() -> None:
        worker = ScriptedWorker()
        async with staged(worker, num_ranks=2) as stage:
            assert (await stage.ask(post(BODY, "/generate", "X-Data-Parallel-Rank: " + "9" * 5000)))[1] == OK_BODY
            assert b"9" * 5000 in worker.seen[0][0]
            await stage.is_at_rest()

    asyncio.run(run())


def test_a_gateway_that_is_its_own_worker_says_so_once() -> None:
    async def run() -> None:
        worker = ScriptedWorker()
        async with staged(worker, retry=RetryRules(max_retries=0)) as stage:
            loop = asyncio.get_running_loop()
            stage.fleet.remove(stage.worker())
            own = stage.fleet.add(WorkerSpec(f"127.0.0.1:{stage.port}"), loop.time())
            stage.fleet.found(own, Found("openai", (MODEL,)), loop.time())
            head, body = await stage.ask(post(BODY, "/generate", "Via: 1.0 proxy"))
            assert head.startswith(b"HTTP/1.1 508 ")
            assert error_of(body)["code"] == "loop"
            assert stage.metrics.num_accepted == 2
            await stage.is_at_rest()

    asyncio.run(run())


def test_proxies_on_the_way_are_named_to_the_worker() -> None:
    async def run() -> None:
        worker = ScriptedWorker()
        async with staged(worker) as stage:
            assert (await stage.ask(post(BODY, "/generate", "Via: 1.0 proxy")))[1] == OK_BODY
            head = worker.seen[0][0].lower()
            assert head.index(b"via: 1.0 proxy\r\n") < head.index(b"via: 1.1 equipoise-")

    asyncio.run(run())


def test_a_gateway_without_descriptors_says_so_and_blames_no_worker(caplog: pytest.LogCaptureFixture) -> None:
    num_requests = 6

    async def run() -> None:
        workers = [ScriptedWorker(), ScriptedWorker()]
        async with staged(*workers) as stage:
            peer = await stage.connect()
            await stage.until(lambda: stage.metrics.num_connections == 1)
            with no_descriptors():
                for _ in range(num_requests):
                    peer.send(post())
                    head, body = await peer.message()
                    assert head.startswith(b"HTTP/1.1 503 ")
                    assert b"retry-after: " in head
                    assert error_of(body)["code"] == "no_descriptors"
                    assert "the gateway" in error_of(body)["message"]
                    assert not any(worker.url in error_of(body)["message"] for worker in workers)
            await stage.is_at_rest()
            assert stage.metrics.failed_tries == {}
            assert stage.metrics.requests == {("/v1/chat/completions", "", 503): num_requests}
            assert [worker.breaker.state for worker in stage.fleet.workers] == ["closed", "closed"]
            tried = num_requests * (FAST.max_retries + 1)
            assert b"\nequipoise_gateway_out_of_descriptors_total %d\n" % tried in stage.metrics.page(stage.fleet, 0.0)
            peer.send(post())
            assert (await peer.message())[1] == OK_BODY

    asyncio.run(run())
    assert [record.name for record in caplog.records] == ["equipoise.gateway.http.descriptors"]
