"""Rank processes that come up together, or not at all."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from dataclasses import replace

import psutil
import pytest

from equipoise.config import EngineConfig, ModelConfig, SchedulerConfig
from equipoise.engine.supervisor import RankProcess
from equipoise.errors import ConfigError, UnavailableError
from equipoise.server.rank_start import Restarts, in_thread, start_ranks

CONFIG = EngineConfig(model=ModelConfig(executor="sim"))
WRONG = replace(CONFIG, scheduler=SchedulerConfig(chunked_prefill=False, max_step_tokens=8))


def test_all_serve_in_order() -> None:
    processes = [RankProcess(CONFIG, dp_rank=dp_rank) for dp_rank in range(3)]
    readies = asyncio.run(start_ranks(processes, 60))
    assert [ready.dp_rank for ready in readies] == [0, 1, 2]
    assert [ready.pid for ready in readies] == [process.pid for process in processes]
    for process in processes:
        process.stop(5)


def test_one_that_fails_ends_the_others() -> None:
    processes = [RankProcess(WRONG if dp_rank == 1 else CONFIG, dp_rank=dp_rank) for dp_rank in range(3)]

    async def scenario() -> None:
        starting = asyncio.create_task(start_ranks(processes, 600))
        await asyncio.sleep(0)
        assert processes[2].pid is not None
        os.kill(processes[2].pid, signal.SIGSTOP)  # it will not end by itself
        await asyncio.wait_for(starting, 60)

    with pytest.raises(ConfigError, match="max-step-tokens: 8"):
        asyncio.run(scenario())
    assert not any(psutil.pid_exists(process.pid or 0) for process in processes)


def test_one_that_dies_is_named() -> None:
    processes = [RankProcess(CONFIG, dp_rank=dp_rank) for dp_rank in range(2)]

    async def scenario() -> None:
        starting = asyncio.create_task(start_ranks(processes, 60))
        await asyncio.sleep(0)
        assert processes[1].pid is not None
        os.kill(processes[1].pid, signal.SIGKILL)
        with pytest.raises(UnavailableError, match=r"rank 1 \(pid \d+\) was killed by signal 9"):
            await starting

    asyncio.run(scenario())
    assert not any(psutil.pid_exists(process.pid or 0) for process in processes)


def test_work_in_a_thread_gives_and_raises() -> None:
    async def scenario() -> None:
        assert await in_thread(threading.get_ident) != threading.get_ident()
        with pytest.raises(ZeroDivisionError):
            await in_thread(lambda: 1 / 0)

    asyncio.run(scenario())


def test_pauses_double_and_wrong_settings_end_the_attempts() -> None:
    started: list[int] = []

    async def start(dp_rank: int) -> None:
        started.append(dp_rank)
        raise ConfigError("the checkpoint is gone") if dp_rank == 0 else UnavailableError("it died")

    async def scenario() -> None:
        restarts = Restarts(start)
        assert [restarts.schedule(dp_rank) for dp_rank in (0, 1)] == [1.0, 1.0]
        while started.count(1) < 2:  # after 1 and 2 s more
            await asyncio.sleep(0.01)
        assert restarts.schedule(0) == 2.0
        await restarts.stop()
        assert started == [0, 1, 1]

    asyncio.run(asyncio.wait_for(scenario(), 20))
