"""A worker in the test's own process: an HTTP server that answers what a script says."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from typing import TYPE_CHECKING, ParamSpec

from equipoise.gateway.fleet.fetch import Site
from equipoise.gateway.http.pool import Pool, PoolLimits
from equipoise.gateway.relay.sweep import Sweep

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

Headers = dict[str, str]
P = ParamSpec("P")


class Reply:
    """What a path is answered with: a status and JSON or bytes, after `delay_s`; forever is no answer at all."""

    def __init__(self, body: object = b"", status: int = 200, delay_s: float = 0.0) -> None:
        self.body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.status = status
        self.delay_s = delay_s


Script = dict[str, Reply]


class Server:
    """Answers GET and POST by path; what is not in the script is a 404. `script` may change while it runs.

    `served` lists the paths that were asked for, `headers` those of the last request of each path (lower case). What
    `judge` says of a request is answered instead of the script, unless it is None."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.served: list[str] = []
        self.headers: dict[str, Headers] = {}
        self.num_left = 0
        """Requests whose client left before they were answered."""
        self.max_running: dict[str, int] = {}
        self.judge: Callable[[str, Headers], Reply | None] = lambda path, headers: None
        self._running: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen, on the same port as before if it listened before."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Close all connections and listen no more."""
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while True:
                await self._answer(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        path = lines[0].split(" ")[1]
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])
        }
        await reader.readexactly(int(headers.get("content-length", 0)))
        self.served.append(path)
        self.headers[path] = headers
        reply = self.judge(path, headers) or self.script.get(path) or Reply({"detail": "Not Found"}, 404)
        self._running[path] = self._running.get(path, 0) + 1
        self.max_running[path] = max(self._running[path], self.max_running.get(path, 0))
        try:
            await self._delay(reader, reply.delay_s)
        finally:
            self._running[path] -= 1
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (reply.status, len(reply.body)) + reply.body)
        await writer.drain()

    async def _delay(self, reader: asyncio.StreamReader, seconds: float) -> None:
        """Let time pass. Raises ConnectionError as soon as the client leaves."""
        if not seconds:
            return
        try:
            async with asyncio.timeout(seconds):
                await reader.read(1)
        except TimeoutError:
            return
        self.num_left += 1
        raise ConnectionError


@contextlib.asynccontextmanager
async def serving(script: Script) -> AsyncIterator[Server]:
    """A server that runs while the context is open."""
    server = Server(script)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def pool_to(host: str, port: int) -> Pool:
    """The gateway's own way to a worker."""
    return Pool(host, port, PoolLimits(), Sweep())


def site_of(server: Server, timeout_s: float = 20.0, api_key: str | None = None) -> Site:
    """`server` as the gateway asks it."""
    return Site(server.url, pool_to("127.0.0.1", server.port), timeout_s, api_key)


async def until(fact: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Return once `fact` holds; raises TimeoutError where it does not come to hold."""
    async with asyncio.timeout(timeout_s):
        while not fact():
            await asyncio.sleep(0.005)


def models(*names: str, owner: str = "sglang", **parents: str) -> Reply:
    """/v1/models; `parents` are adapters and what they adapt."""
    cards = [{"id": name, "object": "model", "owned_by": owner, "parent": None} for name in names]
    cards += [{"id": name, "object": "model", "owned_by": owner, "parent": base} for name, base in parents.items()]
    return Reply({"object": "list", "data": cards})


def in_loop(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """A test that is a coroutine, as one that pytest can call."""

    @functools.wraps(test)
    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        async def main() -> None:
            await test(*args, **kwargs)

        asyncio.run(main())

    return call
