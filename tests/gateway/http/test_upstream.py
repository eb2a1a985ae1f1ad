"""HTTP towards a worker: how answers are framed, what becomes of connections, and what goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.gateway.plane_kit import OK, OK_BODY, WAIT_S, Peer, ScriptedWorker, answer, chunk

from equipoise.gateway.http.pool import Pool, PoolLimits
from equipoise.gateway.relay.sweep import Sweep
from equipoise.gateway.transport import Outgoing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from equipoise.gateway.transport import Call, Header, Phase


class Told:
    """A leg that remembers what it is told, and checks that it is told in order."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[Header] = []
        self.data = b""
        self.trailers: list[Header] | None = None
        self.failure: tuple[Phase, str] | None = None
        self.num_flushes = 0
        self.is_wrong = False  # an exception here would be the transport's to handle
        self.call: Call | None = None
        self.over = asyncio.Event()
        self.on_head: Callable[[], None] = lambda: None

    def head(self, status: int, headers: list[Header]) -> None:
        self.is_wrong |= bool(self.status) or self.over.is_set()
        self.status, self.headers = status, headers
        self.on_head()

    def body(self, data: bytes) -> None:
        self.is_wrong |= not self.status or not data or self.over.is_set()
        self.data += data

    def ended(self, trailers: list[Header]) -> None:
        self.is_wrong |= not self.status or self.over.is_set()
        self.trailers = trailers
        self.over.set()

    def failed(self, phase: Phase, reason: str) -> None:
        self.is_wrong |= not reason or self.over.is_set()
        self.failure = (phase, reason)
        self.over.set()

    def flush(self) -> None:
        self.is_wrong |= self.over.is_set()
        self.num_flushes += 1

    async def wait(self) -> Told:
        """Until the try is over."""
        async with asyncio.timeout(WAIT_S):
            await self.over.wait()
        assert not self.is_wrong
        return self


class Bench:
    """A pool before one scripted worker."""

    def __init__(self, pool: Pool, worker: ScriptedWorker) -> None:
        self.pool = pool
        self.worker = worker

    def start(self, body: bytes = b"{}", method: bytes = b"POST", headers: tuple[Header, ...] = ()) -> Told:
        told = Told()
        told.call = self.pool.start(Outgoing(method, b"/x?y", list(headers), body), told)
        return told

    async def ask(self, body: bytes = b"{}", method: bytes = b"POST") -> Told:
        return await self.start(body, method).wait()


@contextlib.asynccontextmanager
async def bench(worker: ScriptedWorker, limits: PoolLimits | None = None) -> AsyncIterator[Bench]:
    await worker.start()
    sweep = Sweep(0.02, 0.05)
    pool = Pool("127.0.0.1", worker.port, limits or PoolLimits(), sweep)
    try:
        yield Bench(pool, worker)
    finally:
        pool.close()
        sweep.close()
        await worker.stop()
        await until(lambda: pool.num_open == 0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.005)


def says(*pieces: bytes, closes: bool = False) -> ScriptedWorker:
    """A worker that answers each request with `pieces`, each a write of its own."""

    async def script(worker: ScriptedWorker, peer: Peer) -> None:
        while True:
            await worker.take(peer)
            for piece in pieces:
                peer.send(piece)
                await asyncio.sleep(0.002)
            if closes:
                return

    return ScriptedWorker(script)


def test_a_request_goes_out_as_it_is_with_host_and_length() -> None:
    async def run() -> None:
        async with bench(says(OK)) as it:
            headers = ((b"X-A", b"1"), (b"x-a", b" 2"), (b"CoNtEnT-TyPe", b"a/b"))
            told = await it.start(b"body", headers=headers).wait()
            assert (told.status, told.data, told.trailers) == (200, OK_BODY, [])
            head, body = it.worker.seen[0]
            host = f"host: 127.0.0.1:{it.worker.port}\r\n".encode()
            start = b"POST /x?y HTTP/1.1\r\n" + host + b"X-A: 1\r\nx-a:  2\r\nCoNtEnT-TyPe: a/b\r\n"
            assert head == start + b"content-length: 4\r\n\r\n"
            assert body == b"body"
            await it.ask(b"", b"GET")
            assert b"content-length" not in it.worker.seen[1][0]
            assert it.worker.num_connections == 1

    asyncio.run(run())


def test_end_to_end_headers_keep_case_order_and_number() -> None:
    async def run() -> None:
        headers = (
            b"X-Hop: gone\r\nSet-Cookie: a\r\nset-cookie: b\r\nX-Empty:\r\nX-High: \xff\r\n"
            b"Connection: X-Hop, keep-alive\r\nKeep-Alive: timeout=5\r\nTE: x\r\nUpgrade: y\r\nTrailer: z\r\n"
            b"Proxy-Authenticate: w\r\nContent-Length: 2\r\n"
        )
        async with bench(says(b"HTTP/1.1 200 OK\r\n" + headers + b"\r\nok")) as it:
            told = await it.ask()
            assert told.headers == [
                (b"Set-Cookie", b"a"),
                (b"set-cookie", b"b"),
                (b"X-Empty", b""),
                (b"X-High", b"\xff"),
                (b"Content-Length", b"2"),
            ]

    asyncio.run(run())


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
ANSWERS: dict[str, tuple[bytes, bytes, bool]] = {
    # bytes, payload, whether the connection is kept
    "length": (OK, OK_BODY, True),
    "no body": (answer(200), b"", True),
    "204": (b"HTTP/1.1 204 No Content\r\nContent-Length: 3\r\n\r\n", b"", True),
    "304": (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 3\r\n\r\n", b"", True),
    "chunks": (CHUNKED + chunk(b"abc") + chunk(b"d") + b"0\r\n\r\n", b"abcd", True),
    "extension": (CHUNKED + b"3;a=b\r\nabc\r\n0\r\n\r\n", b"abc", True),
    "100": (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, OK_BODY, True),
    "103 twice": (b"HTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n" * 2 + OK, OK_BODY, True),
    "no reason": (b"HTTP/1.1 200\r\nContent-Length: 1\r\n\r\na", b"a", True),
    "close": (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 1\r\n\r\na", b"a", False),
    "HTTP/1.0": (b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\na", b"a", False),
    "HTTP/1.0 kept": (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 1\r\n\r\na", b"a", True),
    "extra bytes": (OK + b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nb", OK_BODY, False),
    "extra noise": (OK + b"noise", OK_BODY, False),
    "error": (answer(500, b"oops"), b"oops", True),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_are_framed(name: str) -> None:
    data, payload, is_kept = ANSWERS[name]

    async def run() -> None:
        async with bench(says(data)) as it:
            for number in range(2):
                told = await it.ask()
                assert (told.data, told.failure) == (payload, None)
                assert it.worker.num_connections == (1 if is_kept else number + 1)
                await until(lambda: it.pool.num_open == int(is_kept))

    asyncio.run(run())


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_may_be_cut_at_each_byte(name: str) -> None:
    data, payload, _ = ANSWERS[name]

    async def script(worker: ScriptedWorker, peer: Peer) -> None:
        cut = int((await worker.take(peer))[1])
        peer.send(data[:cut])
        await asyncio.sleep(0.01)
        peer.send(data[cut:])
        await peer.closed()

    async def run() -> None:
        worker = ScriptedWorker(script)
        await worker.start()
        sweep = Sweep()
        pools = [Pool("127.0.0.1", worker.port, PoolLimits(), sweep) for _ in range(len(data))]
        tries = [Told() for _ in pools]
        for cut, (pool, told) in enumerate(zip(pools, tries, strict=True)):
            pool.start(Outgoing(b"POST", b"/", [], b"%d" % cut), told)
        for told in tries:
            await told.wait()
            assert (told.data, told.failure) == (payload, None)
        for pool in pools:
            pool.close()
        sweep.close()
        await worker.stop()

    asyncio.run(run())


def test_an_answer_may_end_with_its_connection() -> None:
    async def run() -> None:
        for head in (b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.0 200 OK\r\nX: y\r\n\r\n"):
            async with bench(says(head, b"one ", b"two", closes=True)) as it:
                told = await it.ask()
                assert (told.data, told.failure) == (b"one two", None)

    asyncio.run(run())


def test_an_answer_without_content_has_no_length() -> None:
    async def run() -> None:
        async with bench(says(ANSWERS["204"][0])) as it:
            assert (await it.ask()).headers == []
        async with bench(says(ANSWERS["304"][0])) as it:
            assert (await it.ask()).headers == [(b"Content-Length", b"3")]

    asyncio.run(run())


def test_trailers_are_told() -> None:
    async def run() -> None:
        async with bench(says(CHUNKED + chunk(b"a") + b"0\r\nX-T: 1\r\nConnection: close\r\n\r\n")) as it:
            assert (await it.ask()).trailers == [(b"X-T", b"1")]

    asyncio.run(run())


def test_head_has_no_body() -> None:
    async def run() -> None:
        async with bench(says(b"HTTP/1.1 200 OK\r\nContent-Length: 30\r\n\r\n")) as it:
            for _ in range(2):
                told = await it.ask(b"", b"HEAD")
                assert (told.status, told.data, told.trailers) == (200, b"", [])
                assert told.headers == [(b"Content-Length", b"30")]

    asyncio.run(run())


BAD: dict[str, bytes] = {
    "noise": b"SSH-2.0-x\r\n",
    "a request": b"GET / HTTP/1.1\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "length and chunks": CHUNKED[:-2] + b"Content-Length: 3\r\n\r\n" + chunk(b"abc"),
    "bad chunk size": CHUNKED + b"x\r\n",
    "bare LF": b"HTTP/1.1 200 OK\nContent-Length: 0\n\n",
    "folded": b"HTTP/1.1 200 OK\r\nX: a\r\n b\r\nContent-Length: 0\r\n\r\n",
    "gzip coding": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "only gzip": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nabc",
    "other protocol": b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
    "status 20": b"HTTP/1.1 20 OK\r\n\r\n",
    "status 099": b"HTTP/1.1 099 OK\r\nContent-Length: 0\r\n\r\n",
    "status 2000": b"HTTP/1.1 2000 OK\r\n\r\n",
    "endless head": b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 40_000,
    "endless trailers": CHUNKED + b"0\r\n" + b"X: y\r\n" * 200_000,
    "endless trailer": CHUNKED + b"0\r\nX: " + b"y" * 1_000_000,
    "NUL": b"HTTP/1.1 200 OK\r\nX: \x00\r\nContent-Length: 0\r\n\r\n",
}


@pytest.mark.parametrize("name", BAD)
def test_malformed_answers_fail_and_close(name: str) -> None:
    async def run() -> None:
        async with bench(says(BAD[name])) as it:
            told = await it.ask()
            assert told.failure is not None
            assert told.failure[0] == "worker"
            await until(lambda: it.pool.num_open == 0)

    asyncio.run(run())


@pytest.mark.parametrize("is_reset", [False, True])
@pytest.mark.parametrize(
    ("sent", "phase"),
    [
        (b"", "send"),
        (b"HTTP/1.", "worker"),
        (OK[:-3], "worker"),
        (CHUNKED, "worker"),
        (CHUNKED + b"3\r\nab", "worker"),
        (CHUNKED + chunk(b"abc"), "worker"),
        (CHUNKED + chunk(b"abc") + b"0\r\n", "worker"),
    ],
)
def test_answers_that_are_cut_short_fail(sent: bytes, phase: str, is_reset: bool) -> None:
    async def script(worker: ScriptedWorker, peer: Peer) -> None:
        await worker.take(peer)
        peer.send(sent)
        await asyncio.sleep(0.02)
        if is_reset:
            peer.reset()

    async def run() -> None:
        async with bench(ScriptedWorker(script)) as it:
            told = await it.ask()
            assert told.failure is not None
            assert told.failure[0] == phase
            assert len(it.worker.seen) == 1

    asyncio.run(run())


def test_an_answer_that_ends_by_its_connection_may_not_end_by_a_reset() -> None:
    async def script(worker: ScriptedWorker, peer: Peer) -> None:
        await worker.take(peer)
        peer.send(b"HTTP/1.1 200 OK\r\n\r\nabc")
        await asyncio.sleep(0.05)
        linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
        peer.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        peer.reset()

    async def run() -> None:
        async with bench(ScriptedWorker(script)) as it:
            told = await it.ask()
            assert told.failure is not None
            assert told.failure[0] == "worker"

    asyncio.run(run())


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_kept_connection_that_the_worker_closed_is_replaced_once(is_reset: bool) -> None:
    async def script(worker: ScriptedWorker, peer: Peer) -> None:
        """Answers the first request of a connection, drops it at the second one."""
        await worker.take(peer)
        peer.send(OK)
        await worker.take(peer)
        if is_reset:
            peer.reset()

    async def run() -> None:
        async with bench(ScriptedWorker(script)) as it:
            for _ in range(4):
                told = await it.ask()
                assert (told.data, told.failure) == (OK_BODY, None)
            assert it.worker.num_connections == 4
            assert len(it.worker.seen) == 7

    asyncio.run(run())


def test_a_request_that_goes_once_is_not_sent_again() -> None:
    async def script(worker: ScriptedWorker, peer: Peer) -> None:
        await worker.take(peer)
        peer.send(OK)
        await worker.take(peer)

    async def run() -> None:
        async with bench(ScriptedWorker(script)) as it:
            await it.ask()
            told = Told()
            it.pool.start(Outgoing(b"POST", b"/x", [], b"{}", goes_once=True), told)
            await told.wait()
            assert told.failure is not None
            assert told.failure[0] == "send"
            assert len(it.worker.seen) == 2

    asyncio.run(run())


def test_a_request_is_not_sent_a_third_time() -> None:
    async def script(worker: ScriptedWorker, peer: Peer) -> None:
        await worker.take(peer)
        if worker.num_connections == 1:
            peer.send(OK)
            await worker.take(peer)

    async def run() -> None:
        async with bench(ScriptedWorker(script)) as it:
            assert (await it.ask()).failure is None
            told = await it.ask()
            assert told.failure is not None
            assert told.failure[0] == "send"
            assert len(it.worker.seen) == 3

    asyncio.run(run())


def test_a_request_whose_answer_began_is_not_sent_again() -> None:
    async def script(worker: ScriptedWorker, peer: Peer) -> None:
        await worker.take(peer)
        peer.send(OK)
        await worker.take(peer)
        peer.send(b"H")
        await asyncio.sleep(0.02)

    async def run() -> None:
        async with bench(ScriptedWorker(script)) as it:
            assert (await it.ask()).failure is None
            assert (await it.ask()).failure is not None
            assert len(it.worker.seen) == 2

    asyncio.run(run())


def test_bytes_on_an_idle_connection_close_it() -> None:
    async def script(worker: ScriptedWorker, peer: Peer) -> None:
        await worker.take(peer)
        peer.send(OK)
        await asyncio.sleep(0.05)
        peer.send(OK)
        await peer.closed()

    async def run() -> None:
        async with bench(ScriptedWorker(script)) as it:
            await it.ask()
            await until(lambda: it.pool.num_open == 0)
            assert (await it.ask()).data == OK_BODY

    asyncio.run(run())


def test_a_connection_that_is_closed_before_its_first_request_is_let_go() -> None:
    async def hang_up(worker: ScriptedWorker, peer: Peer) -> None:
        """Leave at once."""

    async def run() -> None:
        failures: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
        async with bench(ScriptedWorker(hang_up)) as it:
            told = it.start()
            told.call.abort()  # type: ignore[union-attr]
            await until(lambda: it.worker.num_connections == 1)
            await until(lambda: it.pool.num_open == 0)
        assert not failures

    asyncio.run(run())


def test_idle_connections_are_bounded_in_number_and_age() -> None:
    async def run() -> None:
        async with bench(says(OK), PoolLimits(max_idle=2, max_idle_s=0.2)) as it:
            for told in [it.start() for _ in range(5)]:
                await told.wait()
            assert it.pool.num_idle == 2
            await until(lambda: it.pool.num_open == 0)
            assert it.pool.num_idle == 0

    asyncio.run(run())


def test_connections_are_bounded_and_tries_wait_in_line() -> None:
    async def run() -> None:
        async with bench(says(OK), PoolLimits(max_connections=2)) as it:
            tries = [it.start() for _ in range(7)]
            assert it.pool.num_waiting == 7
            tries[3].call.abort()  # type: ignore[union-attr]
            assert it.pool.num_waiting == 6
            for told in (*tries[:3], *tries[4:]):
                assert (await told.wait()).data == OK_BODY
            assert it.worker.num_connections == 2
            assert not tries[3].over.is_set()

    asyncio.run(run())


def test_no_connection_fails_in_phase_connect() -> None:
    async def run() -> None:
        worker = says(OK)
        async with bench(worker) as it:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                pool = Pool("127.0.0.1", free.getsockname()[1], PoolLimits(), Sweep())
            failures = []
            for _ in range(3):
                told = Told()
                pool.start(Outgoing(b"GET", b"/", [], b""), told)
                failures.append((await told.wait()).failure)
            assert [failure and failure[0] for failure in failures] == ["connect"] * 3
            pool.close()
            told = Told()
            pool.start(Outgoing(b"GET", b"/", [], b""), told)
            assert (await told.wait()).failure == ("connect", "its connections are closed")
            assert it.pool.num_open == 0

    asyncio.run(run())


def test_connecting_takes_a_bounded_time() -> None:
    async def run() -> None:
        # a full accept queue answers no further connection
        with socket.socket() as deaf:
            deaf.bind(("127.0.0.1", 0))
            deaf.listen(0)
            fillers = []
            for _ in range(8):
                filler = socket.socket()
                filler.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    filler.connect(deaf.getsockname())
                fillers.append(filler)
            sweep = Sweep()
            pool = Pool("127.0.0.1", deaf.getsockname()[1], PoolLimits(connect_s=0.2), sweep)
            told = Told()
            pool.start(Outgoing(b"GET", b"/", [], b""), told)
            assert (await told.wait()).failure == ("connect", "no connection within 0.2 s")
            pool.close()
            sweep.close()
            for filler in fillers:
                filler.close()

    asyncio.run(run())


def test_an_answer_may_come_before_the_request_is_out() -> None:
    async def early(worker: ScriptedWorker, peer: Peer) -> None:
        await peer.head()
        peer.send(answer(413, b"too large"))
        await peer.closed()

    async def run() -> None:
        async with bench(ScriptedWorker(early), PoolLimits(max_idle_s=100)) as it:
            told = await it.ask(b"x" * 30_000_000)
            assert (told.status, told.data) == (413, b"too large")
            await until(lambda: it.pool.num_open == 0)  # what is left of the request must not meet the next one

    asyncio.run(run())


def test_a_worker_that_takes_nothing_in_fails_in_phase_send() -> None:
    async def deaf(worker: ScriptedWorker, peer: Peer) -> None:
        peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.Event().wait()

    async def run() -> None:
        async with bench(ScriptedWorker(deaf), PoolLimits(send_s=0.2)) as it:
            told = await it.ask(b"x" * 30_000_000)
            assert told.failure is not None
            assert told.failure[0] == "send"

    asyncio.run(run())


def test_aborted_tries_hear_nothing_and_the_worker_sees_it() -> None:
    async def run() -> None:
        gone = asyncio.Event()

        async def script(worker: ScriptedWorker, peer: Peer) -> None:
            await worker.take(peer)
            peer.send(CHUNKED + chunk(b"a"))
            await peer.closed()
            gone.set()

        async with bench(ScriptedWorker(script)) as it:
            told = it.start()
            await until(lambda: told.num_flushes > 0)
            assert told.call is not None
            told.call.abort()
            told.call.abort()
            async with asyncio.timeout(WAIT_S):
                await gone.wait()
            told.call.pause()
            told.call.resume()
            assert (told.data, told.failure, told.trailers) == (b"a", None, None)
            assert it.pool.num_idle == 0

    asyncio.run(run())


def test_a_try_may_be_aborted_while_it_is_told() -> None:
    async def run() -> None:
        async with bench(says(OK)) as it:
            told = it.start()
            assert told.call is not None
            told.on_head = told.call.abort
            await until(lambda: bool(told.status) and it.pool.num_open == 0)
            assert (told.data, told.over.is_set()) == (b"", False)
            assert (await it.ask()).data == OK_BODY

    asyncio.run(run())


def test_paused_tries_are_not_read_and_go_on_later() -> None:
    async def run() -> None:
        payload = b"x" * 30_000_000

        async def script(worker: ScriptedWorker, peer: Peer) -> None:
            while True:
                await worker.take(peer)
                peer.send(answer(200, payload))

        async with bench(ScriptedWorker(script)) as it:
            for _ in range(2):
                told = it.start()
                assert told.call is not None
                told.on_head = told.call.pause
                await until(lambda told=told: told.status)  # type: ignore[misc]
                await asyncio.sleep(0.05)
                assert len(told.data) < len(payload) / 2
                told.call.resume()
                assert (await told.wait()).data == payload
            assert it.worker.num_connections == 1

    asyncio.run(run())


def test_a_try_that_ends_while_it_is_paused_leaves_its_connection_readable() -> None:
    async def run() -> None:
        async with bench(says(OK)) as it:
            for _ in range(3):
                told = it.start()
                assert told.call is not None
                told.on_head = told.call.pause
                assert (await told.wait()).data == OK_BODY
            assert it.worker.num_connections == 1

    asyncio.run(run())


def test_closing_fails_what_runs() -> None:
    async def silent(worker: ScriptedWorker, peer: Peer) -> None:
        await worker.take(peer)
        await peer.closed()

    async def run() -> None:
        async with bench(ScriptedWorker(silent), PoolLimits(max_connections=1)) as it:
            running, waiting = it.start(), it.start()
            await until(lambda: len(it.worker.seen) == 1)
            it.pool.close()
            assert [told.failure and told.failure[0] for told in (running, waiting)] == ["worker", "connect"]

    asyncio.run(run())


PIECES = st.lists(st.binary(min_size=1, max_size=40), max_size=8)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(PIECES, st.lists(st.integers(0, 600), max_size=12), st.booleans())
def test_any_chunks_may_come_in_any_reads(pieces: list[bytes], cuts: list[int], is_slow: bool) -> None:
    data = b"HTTP/1.1 103 Early Hints\r\n\r\n" + CHUNKED + b"".join(map(chunk, pieces)) + b"0\r\n\r\n"
    places = sorted({cut % (len(data) + 1) for cut in cuts})

    async def script(worker: ScriptedWorker, peer: Peer) -> None:
        while True:
            await worker.take(peer)
            for start, end in zip([0, *places], [*places, len(data)], strict=True):
                peer.send(data[start:end])
                await asyncio.sleep(0.001 if is_slow else 0)

    async def run() -> None:
        async with bench(ScriptedWorker(script)) as it:
            for _ in range(2):
                told = await it.ask()
                assert (told.data, told.failure) == (b"".join(pieces), None)
            assert it.worker.num_connections == 1

    asyncio.run(run())
