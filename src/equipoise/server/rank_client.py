"""One rank as the server sees it: its process, the requests that run there, its calls, its latest load.

Everything here belongs to the event loop; the rank's receiver thread shares `streams` with it. A rank is

    usable   it answers: requests may go to it
    silent   it has work, and said nothing for `rank_timeout_s`: nothing new goes to it until it speaks again
    lost     its process is gone
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from equipoise.engine.messages import Abort, Call, RankLoad
from equipoise.errors import InvalidValueError, QueueFullError, RequestError, UnavailableError
from equipoise.server.generation import Delta
from equipoise.server.receiver import Receiver

if TYPE_CHECKING:
    from equipoise.config import SchedulerConfig
    from equipoise.engine.group import GroupHost
    from equipoise.engine.messages import Add, CallMethod, Ready, Reply
    from equipoise.engine.supervisor import RankProcess
    from equipoise.server.generation import Stream
    from equipoise.server.rank_choice import RankBooks
    from equipoise.server.receiver import News

log = logging.getLogger(__name__)

TOKEN_BYTES = 4
PING = 0
"""Call id whose answer nobody waits for: it shows that the rank lives."""
QUIET_SHARE = 0.25
"""Of the time-out: after that long without a word a rank that runs requests is pinged. One that is paused, or compiles
a grammar, has nothing to say by itself."""
KILL_FACTOR = 4.0
"""Times the time-out that a silent rank has to come back before it is ended. In lockstep it is ended at once: while it
is silent all others stand still."""


class RankOwner(Protocol):
    """Whom a rank tells what became of its requests; called on the event loop."""

    def ended(self, stream: Stream) -> None:
        """A request of the rank is over."""

    def lost(self, rank: RankClient, orphans: list[Stream]) -> None:
        """The rank is gone; `orphans` are the requests that may go elsewhere, not over yet."""


class RankClient:
    """Sends requests to one rank process and hands out what comes back.

    load: the latest; `load.timestamp` is unix time
    books: what is believed of its load, None where nobody chooses between ranks
    loss: why the rank is gone, in one line; None while its process lives
    is_silent: see above
    """

    def __init__(
        self,
        process: RankProcess,
        ready: Ready,
        limits: SchedulerConfig,
        owner: RankOwner,
        books: RankBooks | None = None,
        group: GroupHost | None = None,
    ) -> None:
        """`process` serves, and nobody receives from it. `group`: that the rank is in lockstep with, if any."""
        self.dp_rank = process.dp_rank
        self.pid = process.pid
        self.load = _no_load(ready)
        self.loss: str | None = None
        self.is_silent = False
        self.streams: dict[int, Stream] = {}
        self.books = books
        self._group = group
        self._process = process
        self._max_running = ready.max_running
        self._limits = limits
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count(PING + 1)
        self._heard_at = time.monotonic()
        self._asked_at: float | None = None  # of the first message that no word of the rank came after
        self._receiver = Receiver(process, self.streams, self, self._loop)
        self._receiver.start()

    @property
    def is_usable(self) -> bool:
        """Requests may go to it."""
        return self.loss is None and not self.is_silent

    # ---------------------------------------------------------------- to the rank

    def add(self, stream: Stream, message: Add, num_output: int) -> None:
        """Run a request here, whose answer is expected to have `num_output` tokens."""
        now = time.monotonic()
        self.streams[stream.handle] = stream
        stream.dp_rank = self.dp_rank
        if self.books is not None:
            stream.charge = self.books.charge(len(message.prompt) // TOKEN_BYTES, num_output, now)
        if self._asked_at is None:
            self._asked_at = now
        self._process.send(message)

    def abort(self, stream: Stream) -> None:
        """End a request that is not over, at the rank and for its consumer."""
        self._drop(stream.handle)
        stream.put(Delta(finish_reason="abort", num_cached=stream.num_cached, num_output=stream.num_output))
        self._over(stream, time.monotonic())

    def expire(self, handle: int, error: RequestError) -> None:
        """End a request, if it runs here still, that the rank should have ended by now."""
        stream = self._drop(handle)
        if stream is not None and not stream.is_over:
            stream.fail(error)
            self._over(stream, time.monotonic())

    def _drop(self, handle: int) -> Stream | None:
        stream = self.streams.pop(handle, None)
        if self.loss is None:
            self._process.send(Abort([handle]))
        return stream

    def _over(self, stream: Stream, at: float) -> None:
        """A request is over: `at` is the time of the load that lacks it first."""
        if stream.charge is not None:
            stream.charge.end(at, stream.num_output)
        self._owner.ended(stream)

    async def call(self, method: CallMethod, **args: Any) -> Any:
        """The rank's answer. Raises UnavailableError when it is gone, InvalidValueError for bad arguments."""
        if self.loss is not None:
            raise UnavailableError(self.loss)
        call_id = next(self._call_ids)
        answer = self._calls[call_id] = self._loop.create_future()
        self.tell(method, call_id, **args)
        try:
            value = await answer
        finally:
            self._calls.pop(call_id, None)
        return msgspec.convert(value, RankLoad) if method == "loads" else value

    def tell(self, method: CallMethod, call_id: int = PING, **args: Any) -> None:
        """Ask for something without waiting for the answer."""
        if self._asked_at is None:
            self._asked_at = time.monotonic()
        self._process.send(Call(call_id, method, args))

    def refusal(self, num_prompt: int) -> QueueFullError | None:
        """Why the rank would refuse a prompt of so many tokens: by its latest load, and by what was sent since."""
        limits, load = self._limits, self.load
        num_waiting = max(load.num_waiting_reqs, len(self.streams) - self._max_running)
        if num_waiting >= limits.max_waiting_reqs:
            return QueueFullError(f"{num_waiting} requests wait, at most {limits.max_waiting_reqs} may")
        most = limits.max_waiting_tokens
        if most is not None and load.num_waiting_tokens + num_prompt > most:
            return QueueFullError(f"{load.num_waiting_tokens} tokens wait, at most {most} may")
        return None

    # ---------------------------------------------------------------- what the receiver brings

    def deliver(self, news: News) -> None:
        """For Receiver: output and ends of one step."""
        self._hear()
        self.load = news.load
        taken_at = 0.0
        if self.books is not None:
            self.books.hear(news.num_added, self._heard_at)
            taken_at = self.books.taken_at
        for stream, delta in news.deltas:
            if not stream.is_over:
                stream.put(delta)
                if stream.is_over:
                    self._over(stream, taken_at)
        for stream, error in news.failures:
            if not stream.is_over:
                stream.fail(error)
                self._over(stream, taken_at)
        if news.stopped and self.loss is None:
            self._process.send(Abort(news.stopped, "stop"))

    def answer(self, reply: Reply) -> None:
        """For Receiver: the answer to a call."""
        self._hear()
        future = self._calls.get(reply.call_id)
        if future is None or future.done():
            return
        if reply.error is None:
            future.set_result(reply.value)
        else:
            future.set_exception(InvalidValueError(reply.error))

    def lose_rank(self, error: UnavailableError) -> None:
        """For Receiver: the rank is gone."""
        if self.loss is None:
            num_requests = len(self.streams)
            orphans = self.fail_all(error.message, spare_some=True)
            log.error("%s; %d requests fail, %d go elsewhere", error.message, num_requests - len(orphans), len(orphans))
            self._owner.lost(self, orphans)

    def fail_all(self, why: str, *, spare_some: bool = False) -> list[Stream]:
        """The rank is lost: end all that runs here with UnavailableError, but for requests that may go elsewhere, which
        are returned, if `spare_some`."""
        self.loss = self.loss or why
        self._tell_books()
        now = time.monotonic()
        orphans = []
        for stream in tuple(self.streams.values()):
            self.streams.pop(stream.handle, None)  # the receiver may have taken it out meanwhile
            if stream.is_over:
                continue
            if spare_some and stream.spare is not None:
                if stream.charge is not None:
                    stream.charge.end(now)
                orphans.append(stream)
            else:
                stream.fail(UnavailableError(why))
                self._over(stream, now)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(UnavailableError(why))
        return orphans

    # ---------------------------------------------------------------- silence

    def _hear(self) -> None:
        self._heard_at = time.monotonic()
        self._asked_at = None
        if self.is_silent:
            self.is_silent = False
            self._tell_books()
            log.warning("rank %d (pid %s) answers again", self.dp_rank, self.pid)

    @property
    def is_awaited(self) -> bool:
        """It has something to do or to answer, so that its silence means something."""
        return self.loss is None and (bool(self.streams) or self._asked_at is not None)

    def watch(self, timeout_s: float, *, may_end: bool) -> None:
        """Called now and then while the rank `is_awaited`: find out whether it lives.

        `may_end`: it can be done without, so it may be ended when it stays silent."""
        if self.loss is not None or (self._group is None and not self.is_awaited):
            return  # in lockstep a rank without work holds up the others too
        now = time.monotonic()
        if self._group is not None and self._group.is_waiting(self.dp_rank):
            self._asked_at = None if self._asked_at is None else now  # it lives, another one holds it up
            return
        if self._asked_at is None:
            if now - self._heard_at >= QUIET_SHARE * timeout_s:
                self.tell("ping")
            return
        silent_s = now - self._asked_at
        if silent_s >= timeout_s and not self.is_silent:
            self.is_silent = True
            self._tell_books()
            log.error("rank %d (pid %s) does not answer for %.3g s", self.dp_rank, self.pid, silent_s)
        if silent_s >= (KILL_FACTOR if self._group is None else 1) * timeout_s and may_end:
            self._process.kill(f"did not answer for {silent_s:.3g} s and was ended")

    def _tell_books(self) -> None:
        """Policies must know who may be chosen."""
        if self.books is not None:
            self.books.account.is_dead = not self.is_usable

    # ---------------------------------------------------------------- stop

    def stop(self, timeout_s: float) -> None:
        """End receiver and process, within about `timeout_s` seconds. In a thread; idempotent."""
        self._receiver.stop()
        self._process.stop(timeout_s)


def _no_load(ready: Ready) -> RankLoad:
    """The load of a rank that has served nothing."""
    total = ready.info.num_pages * ready.info.page_size
    return RankLoad(ready.dp_rank, 0.0, 0, 0, 0, 0, 0, total, ready.max_running, 0.0, 0.0, 0.0)
