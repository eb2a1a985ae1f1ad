"""HTTP towards clients: order, framing, limits, time limits, and clients that leave or do not read."""

from __future__ import annotations

import asyncio
import json
import socket
import time
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.gateway.plane_kit import (
    BODY,
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

from equipoise.gateway.http.client import MAX_PIPELINED, ClientLimits
from equipoise.gateway.http.request import RequestHead, check_head

CHUNKED = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    + b"".join(b"%x;ext=1\r\n%b\r\n" % (len(part), part) for part in (BODY[:10], BODY[10:11], BODY[11:]))
    + b"0\r\nX-Trailer: 1\r\n\r\n"
)


def of(number: int) -> bytes:
    """A request that is known by its number."""
    return json.dumps({"model": "m", "messages": [], "number": number}).encode()


async def echo(worker: ScriptedWorker, peer: Peer) -> None:
    """Answers with the body that came."""
    while True:
        _, body = await worker.take(peer)
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))


def test_a_connection_serves_one_request_after_the_other() -> None:
    async def run() -> None:
        worker = ScriptedWorker(echo)
        async with staged(worker) as stage:
            peer = await stage.connect()
            for number in range(5):
                peer.send(post(of(number)))
                assert (await peer.message())[1] == of(number)
            await peer.close()
            assert worker.num_connections == 1
            await stage.is_at_rest()

    asyncio.run(run())


def test_pipelined_requests_are_answered_in_order_and_a_bounded_number_of_them_is_read() -> None:
    async def run() -> None:
        worker = ScriptedWorker(echo)
        async with staged(worker) as stage:
            peer = await stage.connect()
            # each in a read of its own; the last ones stay in the system's buffers until the first are answered
            num_requests = MAX_PIPELINED * 3
            for number in range(num_requests):
                peer.send(post(of(number)))
                await asyncio.sleep(0)
            for number in range(num_requests):
                assert (await peer.message())[1] == of(number)
            peer.send(b"".join(post(of(number)) for number in range(num_requests)))  # all in one read
            for number in range(num_requests):
                assert (await peer.message())[1] == of(number)

    asyncio.run(run())


def test_reading_pauses_while_too_many_pipelined_requests_wait() -> None:
    async def run() -> None:
        may_answer = asyncio.Event()

        async def slow(worker: ScriptedWorker, peer: Peer) -> None:
            while True:
                await worker.take(peer)
                await may_answer.wait()
                peer.send(OK)

        worker = ScriptedWorker(slow)
        async with staged(worker) as stage:
            peer = await stage.connect()
            peer.send(b"".join(post() for _ in range(MAX_PIPELINED + 2)))
            await stage.until(lambda: len(worker.seen) == 1)
            big = post(json.dumps({"model": "m", "x": "y" * 30_000_000}).encode())
            peer.send(big)
            for _ in range(20):
                await asyncio.sleep(0.01)
            assert peer.writer.transport.get_write_buffer_size() > 10_000_000
            may_answer.set()
            for _ in range(MAX_PIPELINED + 3):
                assert (await peer.message())[1] == OK_BODY

    asyncio.run(run())


def test_bad_requests_in_a_pipeline_do_not_recurse() -> None:
    async def run() -> None:
        async with staged() as stage:
            peer = await stage.connect()
            peer.send(b"".join(b"GET /nowhere HTTP/1.1\r\nHost: a\r\n\r\n" for _ in range(3000)))
            for _ in range(3000):
                assert (await peer.message())[0].startswith(b"HTTP/1.1 404 ")

    asyncio.run(run())


def test_chunked_bodies_reach_the_worker_with_a_length() -> None:
    async def run() -> None:
        worker = ScriptedWorker()
        async with staged(worker) as stage:
            assert (await stage.ask(CHUNKED))[1] == OK_BODY
            head, body = worker.seen[0]
            assert body == BODY
            assert b"content-length: %d\r\n" % len(BODY) in head.lower()
            assert b"transfer-encoding" not in head.lower()
            assert b"x-trailer" not in head.lower()

    asyncio.run(run())


def test_a_client_that_waits_for_100_continue_gets_it_in_its_turn() -> None:
    async def run() -> None:
        worker = ScriptedWorker()
        async with staged(worker) as stage:
            head, body = post(BODY, "/v1/chat/completions", "Expect: 100-continue").split(b"\r\n\r\n", 1)
            peer = await stage.connect()
            for before in (b"", post()):
                peer.send(before + head + b"\r\n\r\n")
                if before:
                    assert (await peer.message())[1] == OK_BODY
                assert await peer.head() == b"HTTP/1.1 100 Continue\r\n\r\n"
                peer.send(body)
                assert (await peer.message())[1] == OK_BODY
            peer.send(head + b"\r\n\r\n" + body)  # one that does not wait need not be told
            assert (await peer.message())[0].startswith(b"HTTP/1.1 200 ")
            assert all(b"expect" not in head.lower() for head, _ in worker.seen)

    asyncio.run(run())


def test_what_will_be_refused_is_not_asked_for() -> None:
    async def run() -> None:
        async with staged(client=ClientLimits(max_body_bytes=100)) as stage:
            peer = await stage.connect()
            peer.send(b"POST /generate HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 101\r\n\r\n")
            assert (await peer.rest()).startswith(b"HTTP/1.1 413 ")

    asyncio.run(run())


_TO_GENERATE = b"POST /generate HTTP/1.1\r\nHost: a\r\n"


@pytest.mark.parametrize(
    ("start", "more"),
    [
        (b"POST /", b"a" * 100),
        (_TO_GENERATE, b"X: y\r\n"),
        (_TO_GENERATE + b"X: ", b"a" * 100),
        (_TO_GENERATE + b"Transfer-Encoding: chunked\r\n\r\n3;a=", b"a" * 100),
        (_TO_GENERATE + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n3;a=", b"a" * 100),
        (_TO_GENERATE + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"X: y\r\n"),
        (_TO_GENERATE + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: ", b"a" * 100),
    ],
)
def test_what_is_no_body_is_bounded(start: bytes, more: bytes) -> None:
    async def run() -> None:
        async with staged() as stage:
            peer = await stage.connect()
            peer.send(start)
            await peer.writer.drain()
            for _ in range(1500):
                peer.send(more * 10)
                await asyncio.sleep(0)
            assert (await peer.rest()).startswith(b"HTTP/1.1 431 ")

    asyncio.run(run())


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_over_the_limit_is_refused_at_once_and_the_answer_arrives(is_chunked: bool) -> None:
    async def run() -> None:
        worker = ScriptedWorker()
        async with staged(worker, client=ClientLimits(max_body_bytes=1000)) as stage:
            assert (await stage.ask(post(BODY.ljust(1000))))[0].startswith(b"HTTP/1.1 200 ")
            peer = await stage.connect()
            num_pieces, piece = 300, b"x" * 65536
            size = num_pieces * len(piece)
            framing = b"Transfer-Encoding: chunked\r\n\r\n" if is_chunked else b"Content-Length: %d\r\n\r\n" % size
            peer.send(b"POST /generate HTTP/1.1\r\nHost: a\r\n" + framing)
            for _ in range(num_pieces):  # a client that reads only when it has sent everything
                peer.send(chunk(piece) if is_chunked else piece)
                await peer.writer.drain()
            head, body = await peer.message()
            assert head.startswith(b"HTTP/1.1 413 ")
            assert b"connection: close" in head
            assert json.loads(body)["error"]["code"] == "request_too_large"
            assert not await peer.closed()
            assert len(worker.seen) == 1

    asyncio.run(run())


def test_head_has_the_length_and_no_body() -> None:
    async def run() -> None:
        async with staged() as stage:
            peer = await stage.connect()
            peer.send(b"HEAD /health HTTP/1.1\r\nHost: a\r\n\r\nGET /health HTTP/1.1\r\nHost: a\r\n\r\n")
            assert b"content-length: 2\r\n" in await peer.head()
            assert (await peer.message())[1] == b"{}"

    asyncio.run(run())


def test_http_10_closes_unless_asked_to_stay() -> None:
    async def run() -> None:
        async with staged(ScriptedWorker()) as stage:
            old = post().replace(b"HTTP/1.1", b"HTTP/1.0")
            peer = await stage.connect()
            peer.send(old.replace(b"Host", b"Connection: keep-alive\r\nHost"))
            head, body = await peer.message()
            assert b"connection: keep-alive\r\n" in head
            assert body == OK_BODY
            peer.send(old)
            assert (await peer.rest()).endswith(OK_BODY)
            bare = await stage.connect()
            bare.send(b"GET /health HTTP/1.0\r\n\r\n")
            assert b"connection: close\r\n" in await bare.rest()

    asyncio.run(run())


def test_a_stream_for_http_10_ends_with_its_connection() -> None:
    async def stream(worker: ScriptedWorker, peer: Peer) -> None:
        await worker.take(peer)
        peer.send(SSE_HEAD + chunk(b"data: 1\n\n") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async def run() -> None:
        async with staged(ScriptedWorker(stream)) as stage:
            peer = await stage.connect()
            peer.send(
                post(STREAM).replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"Host", b"Connection: keep-alive\r\nHost")
            )
            head, body = (await peer.rest()).split(b"\r\n\r\n", 1)
            assert b"transfer-encoding" not in head.lower()
            assert b"connection: close" in head
            assert body == b"data: 1\n\ndata: [DONE]\n\n"

    asyncio.run(run())


def test_connection_close_is_heard() -> None:
    async def run() -> None:
        worker = ScriptedWorker()
        async with staged(worker) as stage:
            peer = await stage.connect()
            peer.send(post(BODY, "/v1/chat/completions", "Connection: close, X-Hop", "X-Hop: 1") + post())
            data = await peer.rest()
            assert data.count(b"HTTP/1.1 ") == 1
            assert b"connection: close\r\n" in data
            assert len(worker.seen) == 1
            assert b"x-hop" not in worker.seen[0][0].lower()

    asyncio.run(run())


def test_a_body_in_tiny_chunks_takes_no_more_memory_than_others() -> None:
    async def run() -> None:
        worker = ScriptedWorker()
        body = json.dumps({"model": "m", "prompt": "ab" * 500_000}).encode()
        body += b" " * (len(body) % 2)
        chunks = b"".join(b"2\r\n%b\r\n" % body[at : at + 2] for at in range(0, len(body), 2))
        async with staged(worker) as stage:
            peer = await stage.connect()
            peer.send(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
            tracemalloc.start()
            try:
                for at in range(0, len(chunks), 1 << 16):
                    peer.send(chunks[at : at + (1 << 16)])
                    await peer.writer.drain()
                peer.send(b"0\r\n\r\n")
                assert (await peer.message())[1] == OK_BODY
                assert tracemalloc.get_traced_memory()[1] < 12 * len(body)  # kept apart: over 24
            finally:
                tracemalloc.stop()
            assert worker.seen[0][1] == body

    asyncio.run(run())


def test_many_connection_headers_hold_nobody_up() -> None:
    headers = [(b"B%d" % number, b"") for number in range(20_000)]
    options = [(b"connection", b"b%d, close" % number) for number in range(0, 20_000, 2)]
    request = RequestHead(b"GET", b"/", headers, [(b"host", b"a"), *options])
    started = time.process_time()
    check_head(request, "1.1", 0)
    assert time.process_time() - started < 5.0  # each against each took over 10 s
    assert [name for name, _ in request.headers] == [b"B%d" % number for number in range(1, 20_000, 2)]


@pytest.mark.parametrize("request_bytes", [post(BODY, "/generate"), CHUNKED])
def test_a_wish_for_another_protocol_is_ignored(request_bytes: bytes) -> None:
    async def run() -> None:
        worker = ScriptedWorker()
        wish = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\nHost:"
        async with staged(worker) as stage:
            peer = await stage.connect()
            for _ in range(2):
                peer.send(request_bytes.replace(b"Host:", wish))
                assert (await peer.message())[1] == OK_BODY
            assert [body for _, body in worker.seen] == [BODY, BODY]
            assert all(b"pgrade" not in head and b"ettings" not in head for head, _ in worker.seen)

    asyncio.run(run())


def test_absolute_targets_lose_scheme_and_host() -> None:
    async def run() -> None:
        worker = ScriptedWorker()
        async with staged(worker) as stage:
            await stage.ask(post(BODY, "http://elsewhere:1/v1/completions?a=b"))
            assert worker.seen[0][0].startswith(b"POST /v1/completions?a=b HTTP/1.1\r\n")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("part", "status"),
    [(b"POST /v1/chat", 408), (b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{", 408), (b"", 0)],
)
def test_slow_clients_are_timed_out(part: bytes, status: int) -> None:
    async def run() -> None:
        async with staged(client=ClientLimits(receive_s=0.2, idle_s=0.2)) as stage:
            peer = await stage.connect()
            peer.send(part)
            data = await peer.rest()
            assert data.startswith(b"HTTP/1.1 %d " % status) if status else data == b""

    asyncio.run(run())


def test_a_client_that_drips_is_timed_out_too() -> None:
    async def run() -> None:
        async with staged(client=ClientLimits(receive_s=0.3)) as stage:
            peer = await stage.connect()
            dripping = asyncio.create_task(drip(peer))
            assert (await peer.rest()).startswith(b"HTTP/1.1 408 ")
            dripping.cancel()

    async def drip(peer: Peer) -> None:
        for byte in b"GET /health HTTP/1.1\r\nX-A: " + b"a" * 10_000:
            peer.send(bytes((byte,)))
            await asyncio.sleep(0.01)

    asyncio.run(run())


def test_an_idle_connection_is_closed_but_not_one_that_waits_for_its_answer() -> None:
    async def late(worker: ScriptedWorker, peer: Peer) -> None:
        await worker.take(peer)
        await asyncio.sleep(0.8)
        peer.send(OK)

    async def run() -> None:
        async with staged(ScriptedWorker(late), client=ClientLimits(receive_s=0.2, idle_s=0.2)) as stage:
            peer = await stage.connect()
            peer.send(post())
            assert (await peer.rest()).endswith(OK_BODY)

    asyncio.run(run())


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_client_that_leaves_takes_its_request_along(is_reset: bool) -> None:
    async def run() -> None:
        gone = asyncio.Event()

        async def endless(worker: ScriptedWorker, peer: Peer) -> None:
            await worker.take(peer)
            peer.send(SSE_HEAD + chunk(b"data: 1\n\n"))
            await peer.closed()
            gone.set()

        async with staged(ScriptedWorker(endless)) as stage:
            peer = await stage.connect()
            peer.send(post(STREAM) + post())
            await peer.head()
            if is_reset:
                peer.reset()
            else:
                peer.writer.write_eof()
            async with asyncio.timeout(10):
                await gone.wait()
            await stage.is_at_rest()
            assert stage.metrics.num_clients_gone == 1

    asyncio.run(run())


def test_a_client_that_does_not_read_pauses_its_worker_and_is_cut_off_at_last() -> None:
    async def run() -> None:
        num_sent = 0

        async def firehose(worker: ScriptedWorker, peer: Peer) -> None:
            nonlocal num_sent
            await worker.take(peer)
            peer.send(SSE_HEAD)
            piece = chunk(b"data: " + b"x" * 60_000 + b"\n\n")
            while True:
                peer.send(piece)
                await peer.writer.drain()
                num_sent += len(piece)

        async with staged(ScriptedWorker(firehose), client=ClientLimits(receive_s=0.5)) as stage:
            peer = await stage.connect()
            peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
            peer.send(post(STREAM))
            await stage.until(lambda: num_sent > 0)
            await stage.is_at_rest()  # after the client was given up
            assert num_sent < 32_000_000  # what the system's buffers hold, both ways
            assert stage.metrics.num_clients_gone == 1

    asyncio.run(run())


def test_a_slow_client_gets_all_of_a_long_answer() -> None:
    async def run() -> None:
        events = [b"data: %d %b\n\n" % (number, b"x" * 50_000) for number in range(300)]

        async def long(worker: ScriptedWorker, peer: Peer) -> None:
            await worker.take(peer)
            peer.send(SSE_HEAD)
            for event in events:
                peer.send(chunk(event))
                await peer.writer.drain()
            peer.send(b"0\r\n\r\n")

        async with staged(ScriptedWorker(long)) as stage:
            peer = await stage.connect()
            peer.send(post(STREAM))
            transport = peer.writer.transport
            for _ in range(10):
                transport.pause_reading()  # type: ignore[attr-defined]
                await asyncio.sleep(0.02)
                transport.resume_reading()  # type: ignore[attr-defined]
                await asyncio.sleep(0.01)
            assert (await peer.message())[1] == b"".join(events)
            await stage.is_at_rest()

    asyncio.run(run())


def test_a_client_that_takes_little_at_a_time_is_not_cut_off() -> None:
    async def run() -> None:
        payload = b"x" * 24_000_000

        async def large(worker: ScriptedWorker, peer: Peer) -> None:
            await worker.take(peer)
            peer.send(answer(200, payload))
            await peer.writer.drain()

        async with staged(ScriptedWorker(large), client=ClientLimits(receive_s=1.0)) as stage:
            with socket.socket() as small:
                small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
                small.connect(("127.0.0.1", stage.port))
                small.setblocking(False)
                loop = asyncio.get_running_loop()
                await loop.sock_sendall(small, post())
                num_bytes = 0
                until = loop.time() + 2.5
                while num_bytes < len(payload):
                    data = await loop.sock_recv(small, 65536)
                    assert data
                    num_bytes += len(data)
                    await asyncio.sleep(0.01 if loop.time() < until else 0)
            await stage.is_at_rest()
            assert stage.metrics.num_clients_gone == 0

    asyncio.run(run())


def test_draining_closes_idle_connections_and_says_so_on_others() -> None:
    async def run() -> None:
        may_answer = asyncio.Event()

        async def slow(worker: ScriptedWorker, peer: Peer) -> None:
            await worker.take(peer)
            await may_answer.wait()
            peer.send(OK)

        worker = ScriptedWorker(slow)
        async with staged(worker) as stage:
            idle, busy = await stage.connect(), await stage.connect()
            busy.send(post())
            await stage.until(lambda: len(worker.seen) == 1)
            stage.plane.drain()
            assert await idle.rest() == b""
            may_answer.set()
            data = await busy.rest()
            assert b"connection: close\r\n" in data
            assert data.endswith(OK_BODY)

    asyncio.run(run())


REQUESTS = post(of(0)) + CHUNKED + b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n" + post(of(1), "/v1/completions?x=y")


async def answers_when_cut(cuts: list[int]) -> None:
    worker = ScriptedWorker(echo)
    async with staged(worker) as stage:
        peer = await stage.connect()
        for start, end in zip([0, *cuts], [*cuts, len(REQUESTS)], strict=True):
            peer.send(REQUESTS[start:end])
            await asyncio.sleep(0.001)
        bodies = [(await peer.message())[1] for _ in range(4)]
        assert bodies == [of(0), BODY, b"{}", of(1)]
        await peer.close()
        await stage.is_at_rest()


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.integers(0, len(REQUESTS)), max_size=30).map(sorted))
def test_requests_may_come_in_any_pieces(cuts: list[int]) -> None:
    asyncio.run(answers_when_cut(cuts))


def test_requests_may_be_cut_at_each_byte() -> None:
    async def run() -> None:
        worker = ScriptedWorker(echo)
        request = CHUNKED
        async with staged(worker) as stage:
            peers = [await stage.connect() for _ in range(len(request))]
            for cut, peer in enumerate(peers):
                peer.send(request[:cut])
            await asyncio.sleep(0.05)
            for cut, peer in enumerate(peers):
                peer.send(request[cut:])
            for peer in peers:
                assert (await peer.message())[1] == BODY
                peer.reset()

    asyncio.run(run())
