"""Rank processes come up: all at once at the start, one by one again when they died."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from equipoise.errors import ConfigError, EquipoiseError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from equipoise.engine.messages import Ready
    from equipoise.engine.supervisor import RankProcess

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
CALM_S = 600.0
"""A rank that lived this long starts anew after the first pause again."""

_Result = TypeVar("_Result")


async def start_ranks(processes: Sequence[RankProcess], timeout_s: float) -> list[Ready]:
    """Start them and wait until all serve, in order. When one does not come up, none is left.

    Raises what the first to fail raised: ConfigError, or UnavailableError after `timeout_s` seconds at the latest."""
    for process in processes:
        process.start()
    waiting = [asyncio.ensure_future(in_thread(partial(process.wait_ready, timeout_s))) for process in processes]
    try:
        return await asyncio.gather(*map(asyncio.shield, waiting))
    except BaseException:
        for process in processes:
            process.kill()
        await asyncio.gather(*waiting, return_exceptions=True)
        await asyncio.gather(*(in_thread(partial(process.stop, 0.0)) for process in processes))
        raise


async def in_thread(work: Callable[[], _Result]) -> _Result:
    """Run `work` in a thread of its own: those of asyncio are few, and gone when a program that ends stops ranks."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_Result] = loop.create_future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            loop.call_soon_threadsafe(done.set_exception, error)
        else:
            loop.call_soon_threadsafe(done.set_result, result)

    thread = threading.Thread(target=run, name="rank-start-stop")
    thread.start()
    try:
        return await asyncio.shield(done)
    finally:
        if done.done():
            thread.join()


class Restarts:
    """Starts ranks anew that died. Each death in a row doubles the pause before, so that a rank that cannot live costs
    little; wrong settings end the attempts."""

    def __init__(self, start: Callable[[int], Awaitable[None]]) -> None:
        """`start(dp_rank)` brings a rank back, or raises EquipoiseError."""
        self._start = start
        self._pauses: dict[int, tuple[float, float]] = {}  # rank -> the last pause, when it was
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def schedule(self, dp_rank: int) -> float:
        """Bring a rank back after a pause, whose seconds are returned."""
        now = time.monotonic()
        pause_s, at = self._pauses.get(dp_rank, (0.0, -CALM_S))
        pause_s = FIRST_PAUSE_S if now - at >= CALM_S else min(2 * pause_s, LONGEST_PAUSE_S)
        self._pauses[dp_rank] = pause_s, now
        self._tasks[dp_rank] = asyncio.create_task(self._restart(dp_rank, pause_s))
        return pause_s

    async def _restart(self, dp_rank: int, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        try:
            await self._start(dp_rank)
        except EquipoiseError as error:
            log.error("rank %d could not be started anew: %s", dp_rank, error)
            if not isinstance(error, ConfigError):
                self.schedule(dp_rank)
        except Exception:
            log.exception("rank %d: starting it anew failed", dp_rank)

    async def stop(self) -> None:
        """End all attempts; a process that is coming up is gone when this returns."""
        tasks = [task for task in self._tasks.values() if not task.done()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
