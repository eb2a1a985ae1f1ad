"""HTTP/1.1 towards one worker: connections that are kept, legs that wait for one, answers read for their framing."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from equipoise.gateway.http.descriptors import Descriptors
from equipoise.gateway.http.upstream import UpstreamConnection

if TYPE_CHECKING:
    from equipoise.gateway.http.known import KnownHead
    from equipoise.gateway.http.wire import AnswerHeaders
    from equipoise.gateway.relay.sweep import Sweep
    from equipoise.gateway.transport import Leg, Outgoing, Phase


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Bounds of the connections to one worker.

    connect_s: seconds to connect
    send_s: seconds for the worker to take in a request, once the system's buffers are full
    max_connections: open at once; further legs wait in line
    max_idle: connections kept without a request
    max_idle_s: seconds that a connection is kept without one. Below the 5 s after which uvicorn closes its own, so
        that a request seldom meets a connection that is just being closed.
    """

    connect_s: float = 5.0
    send_s: float = 60.0
    max_connections: int = 16384
    max_idle: int = 512
    max_idle_s: float = 4.0


class Run:
    """One try: the Call that the exchange holds. `leg` is None once it is over.

    is_resent: it went out a second time, its first connection having been closed by the worker meanwhile"""

    __slots__ = ("_pool", "connection", "is_paused", "is_resent", "leg", "outgoing")

    def __init__(self, pool: Pool, outgoing: Outgoing, leg: Leg) -> None:
        self._pool = pool
        self.outgoing = outgoing
        self.leg: Leg | None = leg
        self.connection: UpstreamConnection | None = None
        self.is_resent = False
        self.is_paused = False

    def abort(self) -> None:
        """See Call."""
        if self.leg is None:
            return
        self.leg = None
        if self.connection is not None:
            self.connection.abort()
        else:
            self._pool.withdraw(self)

    def pause(self) -> None:
        """See Call."""
        self.is_paused = True
        if self.connection is not None and self.leg is not None:
            self.connection.pause()

    def resume(self) -> None:
        """See Call."""
        self.is_paused = False
        if self.connection is not None and self.leg is not None:
            self.connection.resume()

    def fail(self, phase: Phase, reason: str) -> None:
        """Tell the leg, unless it is over."""
        leg, self.leg, self.connection = self.leg, None, None
        if leg is not None:
            leg.failed(phase, reason)


class Pool:
    """The Transport to one worker: last used connections first, so that surplus ones grow old and are closed.

    Every leg that waits has a connection being made for it, unless `max_connections` are open. Both connections that
    are made and those that come free take the leg that has waited longest."""

    def __init__(
        self, host: str, port: int, limits: PoolLimits, sweep: Sweep, descriptors: Descriptors | None = None
    ) -> None:
        self.host_header = (f"[{host}]:{port}" if ":" in host else f"{host}:{port}").encode()
        self._host = host
        self._port = port
        self._limits = limits
        self._sweep = sweep
        self._descriptors = descriptors or Descriptors()
        self._loop = asyncio.get_running_loop()
        self._idle: list[UpstreamConnection] = []  # oldest first
        self._open: dict[UpstreamConnection, None] = {}
        self._waiting: OrderedDict[Run, None] = OrderedDict()
        self._connects: dict[asyncio.Task[None], None] = {}
        self._is_closed = False
        self.known: KnownHead[tuple[int, AnswerHeaders]] | None = None
        """The worker's last answer that came whole: its next one has the same status and headers, as a rule."""
        sweep.add_slow(self)

    @property
    def num_open(self) -> int:
        """Connections that are open, idle ones among them."""
        return len(self._open)

    @property
    def num_idle(self) -> int:
        """Connections without a request."""
        return len(self._idle)

    @property
    def num_waiting(self) -> int:
        """Tries that wait for a connection."""
        return len(self._waiting)

    def start(self, outgoing: Outgoing, leg: Leg) -> Run:
        """See Transport."""
        run = Run(self, outgoing, leg)
        idle = self._idle
        while idle:
            connection = idle.pop()
            if not connection.is_closing:
                connection.send(run)
                return run
        self._waiting[run] = None
        if self._is_closed:
            self._loop.call_soon(self._fail_all, "connect", "its connections are closed")
        else:
            self._fill()
        return run

    def withdraw(self, run: Run) -> None:
        """`run` does not wait any more."""
        self._waiting.pop(run, None)

    def close(self) -> None:
        """See Transport."""
        self._is_closed = True
        self._sweep.remove_slow(self)
        for task in self._connects:
            task.cancel()
        for connection in list(self._open):
            connection.fail("worker", "the gateway closed its connections")
        self._fail_all("connect", "its connections are closed")

    def check(self, now: float) -> None:
        """Close what was idle for too long, and fail what a worker does not take in."""
        oldest = now - self._limits.max_idle_s
        idle = self._idle
        while idle and idle[0].idle_since < oldest:
            idle.pop(0).close()
        for connection in list(self._open):
            if connection.is_stuck_since(now - self._limits.send_s):
                connection.fail("send", f"the worker did not take in the request within {self._limits.send_s:g} s")

    # Told by connections

    def opened(self, connection: UpstreamConnection) -> None:
        """`connection` is there."""
        if self._is_closed:
            connection.close()
            return
        self._open[connection] = None
        self.release(connection)

    def release(self, connection: UpstreamConnection) -> None:
        """`connection` is free for another request."""
        if self._waiting:
            connection.send(self._waiting.popitem(last=False)[0])
        elif len(self._idle) < self._limits.max_idle:
            connection.idle_since = self._loop.time()
            self._idle.append(connection)
        else:
            connection.close()

    def resend(self, run: Run) -> None:
        """The connection that `run` went out on was closed already: it goes out on the next new one, first in line."""
        run.is_resent = True
        run.connection = None
        if self._is_closed:
            run.fail("connect", "its connections are closed")
            return
        self._waiting[run] = None
        self._waiting.move_to_end(run, last=False)
        self._fill()

    def lost(self, connection: UpstreamConnection, *, was_idle: bool) -> None:
        """`connection` is gone."""
        self._open.pop(connection, None)
        if was_idle and connection in self._idle:
            self._idle.remove(connection)
        self._fill()

    # Connecting

    def _fill(self) -> None:
        while (
            len(self._waiting) > len(self._connects)
            and len(self._open) + len(self._connects) < self._limits.max_connections
            and not self._is_closed
        ):
            task = self._loop.create_task(self._connect())
            self._connects[task] = None
            task.add_done_callback(self._connected)

    async def _connect(self) -> None:
        limit_s = self._limits.connect_s
        try:
            async with asyncio.timeout(limit_s):
                await self._loop.create_connection(lambda: UpstreamConnection(self), self._host, self._port)
        except TimeoutError:
            self._fail_first("connect", f"no connection within {limit_s:g} s")
        except (OSError, UnicodeError) as error:
            phase: Phase = "gateway" if self._descriptors.lacked(error, self._loop.time()) else "connect"
            self._fail_first(phase, str(error) or type(error).__name__)

    def _connected(self, task: asyncio.Task[None]) -> None:
        del self._connects[task]
        if not task.cancelled():
            task.result()
        self._fill()

    def _fail_first(self, phase: Phase, reason: str) -> None:
        if self._waiting:
            self._waiting.popitem(last=False)[0].fail(phase, reason)

    def _fail_all(self, phase: Phase, reason: str) -> None:
        while self._waiting:
            self._waiting.popitem(last=False)[0].fail(phase, reason)
