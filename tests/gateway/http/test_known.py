"""Heads that are known again by their bytes."""

from __future__ import annotations

import asyncio

import pytest
from tests.gateway.plane_kit import BODY, MODEL, Peer, ScriptedWorker, answer, post, staged

from equipoise.gateway.http.known import MAX_BYTES, known_head

HEAD = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\nX: y\r\n\r\n"


@pytest.mark.parametrize(
    ("data", "body"),
    [
        (HEAD % 4 + b"abcd", b"abcd"),
        (HEAD % 12 + b"abcd\r\n\r\nefgh", b"abcd\r\n\r\nefgh"),
        (HEAD % 1 + b"a", b"a"),
        (HEAD % 4 + b"abc", None),  # more is to come
        (HEAD % 4 + b"abcde", None),  # the next request
        (HEAD % 4, None),
        (HEAD[:-2] % 4 + b"abcd", None),
        (HEAD.replace(b"X: y", b"X: z") % 4 + b"abcd", None),
        (HEAD.replace(b"Host: a", b"Host: b") % 4 + b"abcd", None),
        (HEAD.replace(b"%d", b"+4") + b"abcd", None),
        (HEAD.replace(b"%d", b"4 ") + b"abcd", None),
        (HEAD.replace(b"%d", b"") + b"abcd", None),
        (HEAD.replace(b"%d", b"00000000004") + b"abcd", None),
        (HEAD.replace(b"%d", b"4")[:50], None),
        (b"", None),
    ],
)
def test_a_head_is_known_but_for_its_length(data: bytes, body: bytes | None) -> None:
    known = known_head(HEAD % 2 + b"{}", 2, "parsed")
    assert known is not None
    assert known.head == "parsed"
    assert known.body_of(data) == body


@pytest.mark.parametrize(
    ("data", "num_body"),
    [
        (b"POST / HTTP/1.1\r\nHost: a\r\n\r\n", 0),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", 2),
        (HEAD % 2 + b"{", 2),
        (HEAD % 3 + b"{}", 2),
        (b"\r\n\r\n" + HEAD % 2 + b"{}", 2),
        (HEAD.replace(b"%d", b"2 ") + b"{}", 2),
        (HEAD.replace(b"y", b"y" * MAX_BYTES) % 2 + b"{}", 2),
    ],
)
def test_what_is_framed_otherwise_is_not_kept(data: bytes, num_body: int) -> None:
    assert known_head(data, num_body, None) is None


def test_requests_like_the_last_one_differ_in_body_and_id_alone() -> None:
    async def run() -> None:
        worker = ScriptedWorker()
        async with staged(worker) as stage:
            peer = await stage.connect()
            ids = []
            for number in range(4):
                peer.send(post(BODY[:-1] + b" " * 7**number + b"}"))
                head, _ = await peer.message()
                ids.append(next(line for line in head.split(b"\r\n") if line.startswith(b"x-request-id")))
            assert len(set(ids)) == 4
            assert [len(body) for _, body in worker.seen] == [len(BODY) + 7**number for number in range(4)]
            for answer_id, (head, _) in zip(ids, worker.seen, strict=True):
                assert head.count(answer_id) == head.lower().count(b"x-request-id") == 1
                assert head.count(b"via: ") == head.lower().count(b"content-length") == 1
            peer.send(post(BODY, "/v1/completions"))
            peer.send(post(b'{"model":"%b"' % MODEL.encode()))
            assert (await peer.message())[0].startswith(b"HTTP/1.1 200 ")
            assert (await peer.message())[0].startswith(b"HTTP/1.1 400 ")
            await stage.is_at_rest()

    asyncio.run(run())


def test_pieces_and_pipelines_are_served_between_requests_that_are_known() -> None:
    async def run() -> None:
        worker = ScriptedWorker()
        async with staged(worker) as stage:
            peer = await stage.connect()
            data = post()
            for pieces in ([data], [data], [data + data], [data[:40], data[40:]], [data[:-3], data[-3:] + data[:9]]):
                for piece in pieces:
                    peer.send(piece)
                    await asyncio.sleep(0.01)
            peer.send(data[9:])
            for _ in range(7):
                assert (await peer.message())[0].startswith(b"HTTP/1.1 200 ")
            assert [body for _, body in worker.seen] == [BODY] * 7
            await stage.is_at_rest()

    asyncio.run(run())


def test_answers_like_the_last_one_of_a_worker_differ_in_body_and_id_alone() -> None:
    sizes = (2, 2, 300, 300, 1)

    async def script(worker: ScriptedWorker, peer: Peer) -> None:
        for number, size in enumerate(sizes):
            await worker.take(peer)
            peer.send(answer(200 if number < 4 else 404, b"x" * size, b"Content-Type: text/x", b"X-Request-Id: theirs"))
        await worker.take(peer)
        data = answer(404, b"abc", b"Content-Type: text/x", b"X-Request-Id: theirs")
        peer.send(data[:-2])
        await asyncio.sleep(0.02)
        peer.send(data[-2:])
        await worker.take(peer)
        peer.send(answer(404, b"abc", b"Content-Type: text/x", b"X-Request-Id: theirs", b"Connection: close"))

    async def run() -> None:
        worker = ScriptedWorker(script)
        async with staged(worker) as stage:
            peer = await stage.connect()
            for number, size in enumerate((*sizes, 3, 3)):
                peer.send(post(BODY, "/generate", f"x-request-id: {number}"))
                head, body = await peer.message()
                lines = head.lower().split(b"\r\n")
                assert lines[0].split()[1] == (b"200" if number < 4 else b"404")
                assert [line for line in lines if line.startswith(b"x-request-id")] == [b"x-request-id: %d" % number]
                assert len(body) == size
                assert b"content-type: text/x" in lines
                assert not any(line.startswith(b"connection") for line in lines)
            await stage.is_at_rest()

    asyncio.run(run())


def test_a_known_request_waits_for_the_answer_of_the_one_before() -> None:
    async def run() -> None:
        may_answer = asyncio.Event()

        async def script(worker: ScriptedWorker, peer: Peer) -> None:
            while True:
                _, body = await worker.take(peer)
                await may_answer.wait()
                peer.send(answer(200, body))

        worker = ScriptedWorker(script)
        async with staged(worker) as stage:
            may_answer.set()
            peer = await stage.connect()
            peer.send(post())
            await peer.message()
            may_answer.clear()
            bodies = [BODY[:-1] + b" " * number + b"}" for number in range(3)]
            for body in bodies:
                peer.send(post(body))
                await stage.until(lambda: len(worker.seen) == 2)
                await asyncio.sleep(0.02)
            assert len(worker.seen) == 2
            may_answer.set()
            assert [(await peer.message())[1] for _ in bodies] == bodies
            await stage.is_at_rest()

    asyncio.run(run())


def test_a_body_that_looks_like_a_known_request_is_a_body() -> None:
    async def run() -> None:
        worker = ScriptedWorker()
        async with staged(worker) as stage:
            peer = await stage.connect()
            peer.send(post())
            await peer.message()
            inner = post()
            outer = post(inner, "/v1/audio/transcriptions")
            peer.send(outer[: -len(inner)])
            await asyncio.sleep(0.05)
            peer.send(inner)
            await peer.message()
            assert [body for _, body in worker.seen] == [BODY, inner]
            await stage.is_at_rest()

    asyncio.run(run())


def test_an_answer_that_ends_its_connection_does_so_each_time() -> None:
    async def script(worker: ScriptedWorker, peer: Peer) -> None:
        while True:
            await worker.take(peer)
            peer.send(answer(200, b"abc", b"Connection: close"))

    async def run() -> None:
        worker = ScriptedWorker(script)
        async with staged(worker) as stage:
            for _ in range(3):
                assert (await stage.ask())[1] == b"abc"
            assert worker.num_connections == 3

    asyncio.run(run())
