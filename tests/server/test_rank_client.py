"""Several rank processes behind one AsyncEngine: who gets what, and what happens when one dies or hangs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
from tests.tiny_tokenizer import write_folder

from equipoise.config import CostConfig, EngineConfig, ModelConfig, RanksConfig, SchedulerConfig, SimExecutorConfig
from equipoise.errors import ConfigError, InvalidValueError, UnavailableError
from equipoise.request import SamplingParams
from equipoise.server.client import AsyncEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine
    from pathlib import Path

    from equipoise.server.generation import Delta, Generation
    from equipoise.server.rank_client import RankClient

LONG = SamplingParams(max_tokens=5000)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model"))


@contextlib.asynccontextmanager
async def started(
    model: Path, dp_size: int = 2, *, step_ms: float = 2.0, limits: dict[str, Any] | None = None, **ranks: Any
) -> AsyncIterator[AsyncEngine]:
    ranks.setdefault("restart_ranks", False)
    engine = await AsyncEngine.start(
        EngineConfig(
            model=ModelConfig(model=str(model), executor="sim"),
            scheduler=SchedulerConfig(**limits or {}),
            sim=SimExecutorConfig(sim_max_model_len=8192),
            cost=CostConfig(step_ms=step_ms, prefill_token_ms=0, decode_row_ms=0),
            ranks=RanksConfig(dp_size, **ranks),
        ),
        startup_timeout_s=60,
    )
    pids = [rank.pid for rank in engine.ranks]
    try:
        yield engine
    finally:
        await engine.stop()
        pids += [rank.pid for rank in engine.ranks]
        assert not any(psutil.pid_exists(pid or 0) for pid in pids)


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))


def ids(*tokens: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(tokens, np.int32)


async def collect(generation: Generation) -> Delta:
    whole = await generation.next()
    async for delta in generation:
        whole.add(delta)
    return whole


async def until(condition: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"did not happen within {seconds} s: {what}"
        await asyncio.sleep(0.01)


def signal_rank(rank: RankClient, number: signal.Signals) -> None:
    assert rank.pid is not None
    os.kill(rank.pid, number)


def test_requests_at_once_spread_and_their_choices_stay_together(model: Path) -> None:
    async def scenario() -> None:
        async with started(model, 3) as engine:
            running = [engine.submit(ids(1, 2, 3), SamplingParams(max_tokens=50)) for _ in range(9)]
            assert Counter(each.dp_rank for each in running) == {0: 3, 1: 3, 2: 3}
            choices = engine.submit_choices(ids(1, 2), SamplingParams(max_tokens=20, n=4, seed=1))
            assert len({each.dp_rank for each in choices}) == 1
            texts = [(await collect(each)).text for each in choices]
            assert len(set(texts)) == 4
            for each in running:
                await collect(each)
            assert await engine.wait_idle(5)
            loads = await engine.call("loads")
            assert [load.dp_rank for load in loads.values()] == [*loads] == [0, 1, 2]
            assert sum(load.total_finished for load in loads.values()) == 13

    run(scenario)


def test_long_prompts_count_for_more(model: Path) -> None:
    async def scenario() -> None:
        async with started(model) as engine:
            long = engine.submit(ids(*range(200)), LONG)
            await long.next()
            short = [engine.submit(ids(7), SamplingParams(max_tokens=30)) for _ in range(4)]
            assert {each.dp_rank for each in short} == {1 - long.dp_rank}
            long.abort()

    run(scenario)


def test_round_robin_takes_turns(model: Path) -> None:
    async def scenario() -> None:
        async with started(model, rank_policy="round_robin") as engine:
            chosen = [engine.submit(ids(*range(1 + 50 * (i % 2))), SamplingParams(max_tokens=2)) for i in range(6)]
            assert [each.dp_rank for each in chosen] == [0, 1] * 3

    run(scenario)


def test_tokens_do_not_depend_on_the_rank(model: Path) -> None:
    async def scenario() -> None:
        async with started(model) as engine:
            whole = [await collect(engine.submit(ids(5, 6), SamplingParams(max_tokens=30), dp_rank=r)) for r in (0, 1)]
            assert whole[0].token_ids == whole[1].token_ids
            with pytest.raises(InvalidValueError, match="dp_rank: 2 is not a rank of this server, 0 to 1 are"):
                engine.submit(ids(1), LONG, dp_rank=2)

    run(scenario)


def test_a_rank_that_dies_takes_along_what_it_began_and_nothing_else(model: Path) -> None:
    async def scenario() -> None:
        async with started(model, limits={"max_running": 1}, rank_policy="round_robin") as engine:
            begun = [engine.submit(ids(i), SamplingParams(max_tokens=300)) for i in range(2)]
            for each in begun:
                await each.next()
            waiting = [engine.submit(ids(7, i), SamplingParams(max_tokens=3, prompt_logprobs=0)) for i in range(4)]
            pinned = engine.submit(ids(9), SamplingParams(max_tokens=3), dp_rank=0)
            signal_rank(engine.ranks[0], signal.SIGKILL)
            for lost in (begun[0], pinned):
                with pytest.raises(UnavailableError, match=r"^rank 0 \(pid \d+\) was killed by signal 9 \(SIGKILL\)$"):
                    await collect(lost)
            assert {each.dp_rank for each in waiting} == {1}
            for number, each in enumerate(waiting):
                moved = await collect(each)
                alone = await collect(engine.submit(ids(7, number), SamplingParams(max_tokens=3, prompt_logprobs=0)))
                assert moved.token_ids == alone.token_ids
                assert len(moved.prompt_logprobs or []) == 1
            assert (await collect(begun[1])).num_output <= 300
            assert engine.death is None
            assert not engine.ranks[0].is_usable
            with pytest.raises(UnavailableError, match="SIGKILL"):
                engine.submit(ids(1), LONG, dp_rank=0)
            assert [*await engine.call("ping")] == [1]
            assert await engine.wait_idle(1)
            signal_rank(engine.ranks[1], signal.SIGKILL)
            await until(lambda: engine.death is not None, "all are gone")
            with pytest.raises(UnavailableError, match="rank 1"):
                engine.submit(ids(1), LONG)

    run(scenario)


def test_a_request_moves_once_and_its_charges_with_it(model: Path) -> None:
    async def scenario() -> None:
        async with started(model, 3) as engine:
            await engine.call("pause", mode="all")
            generation = engine.submit(ids(1, 2), LONG)
            first = generation.dp_rank
            signal_rank(engine.ranks[first], signal.SIGKILL)
            await until(lambda: generation.dp_rank != first, "it moved")
            signal_rank(engine.ranks[generation.dp_rank], signal.SIGKILL)
            with pytest.raises(UnavailableError, match="SIGKILL"):
                await generation.next()
            accounts = [rank.books.account for rank in engine.ranks if rank.books is not None]
            assert [account.num_active for account in accounts] == [0, 0, 0]
            assert sum(rank.is_usable for rank in engine.ranks) == 1
            assert engine.num_outstanding == 0

    run(scenario)


def test_what_a_lost_rank_said_of_a_prompt_is_forgotten(model: Path) -> None:
    async def scenario() -> None:
        async with started(model, step_ms=50, limits={"max_step_tokens": 4}) as engine:
            generation = engine.submit(ids(*range(40)), SamplingParams(max_tokens=1, prompt_logprobs=0))
            rank = engine.ranks[generation.dp_rank]
            [stream] = rank.streams.values()
            await until(lambda: bool(stream.prompt_logprobs), "a chunk of the prompt is computed")
            signal_rank(rank, signal.SIGKILL)
            whole = await collect(generation)
            assert generation.dp_rank != rank.dp_rank
            assert [each.token_id for each in whole.prompt_logprobs or []] == [*range(1, 40)]

    run(scenario)


def test_a_rank_that_died_comes_back(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with started(model, restart_ranks=True) as engine:
            await engine.call("pause", mode="new")
            pid = engine.ranks[1].pid
            signal_rank(engine.ranks[1], signal.SIGKILL)
            await until(lambda: not engine.ranks[1].is_usable, "it is gone")
            await until(lambda: engine.ranks[1].is_usable, "it is back")
            assert engine.ranks[1].pid != pid
            waiting = engine.submit(ids(1), SamplingParams(max_tokens=2), dp_rank=1)
            loads = await engine.call("loads")
            assert [load.paused for load in loads.values()] == ["new", "new"]  # the new one too
            await engine.call("resume")
            assert (await collect(waiting)).num_output == 2
            chosen = [engine.submit(ids(1), SamplingParams(max_tokens=9)).dp_rank for _ in range(4)]
            assert sorted(chosen) == [0, 0, 1, 1]

    with caplog.at_level(logging.INFO, "equipoise"):
        run(scenario)
    assert "rank 1 (pid" in caplog.text
    assert "serves again" in caplog.text


def test_a_stop_in_the_middle_of_a_restart_leaves_nothing(model: Path) -> None:
    async def scenario() -> None:
        before = set(psutil.Process().children())
        async with started(model, restart_ranks=True) as engine:
            running = {child.pid for child in psutil.Process().children()}
            signal_rank(engine.ranks[0], signal.SIGKILL)
            await until(
                lambda: any(child.pid not in running for child in psutil.Process().children()), "a new process starts"
            )
        assert set(psutil.Process().children()) <= before

    run(scenario)


def test_a_silent_rank_gets_nothing_until_it_answers_again(model: Path) -> None:
    async def scenario() -> None:
        async with started(model, rank_timeout_s=1.0, rank_policy="round_robin") as engine:
            stuck = engine.submit(ids(1), SamplingParams(max_tokens=2000), dp_rank=0)
            await stuck.next()  # nothing is sent after it: that it is silent must be found out
            signal_rank(engine.ranks[0], signal.SIGSTOP)
            await until(lambda: not engine.ranks[0].is_usable, "it is found out")
            assert engine.death is None
            elsewhere = [engine.submit(ids(2), SamplingParams(max_tokens=2)) for _ in range(3)]
            assert {each.dp_rank for each in elsewhere} == {1}
            for each in elsewhere:
                assert (await collect(each)).num_output == 2
            with pytest.raises(UnavailableError, match="rank 0 does not answer"):
                engine.submit(ids(1), LONG, dp_rank=0)
            assert [*await engine.call("pause", mode="new")] == [1]
            signal_rank(engine.ranks[0], signal.SIGCONT)
            assert (await stuck.next()).num_output > 0
            await until(lambda: engine.ranks[0].is_usable, "it answers again")
            assert {load.paused for load in (await engine.call("loads")).values()} == {"new"}
            await engine.call("resume")
            stuck.abort()
            await until(lambda: engine.ranks[0].load.num_running_reqs == 0, "the rank knows")
            chosen = [engine.submit(ids(1), SamplingParams(max_tokens=9)).dp_rank for _ in range(4)]
            assert sorted(chosen) == [0, 0, 1, 1]

    run(scenario)


def test_a_rank_that_stays_silent_is_ended_and_its_requests_go_elsewhere(model: Path) -> None:
    async def scenario() -> None:
        async with started(model, rank_timeout_s=0.3) as engine:
            signal_rank(engine.ranks[0], signal.SIGSTOP)
            running = [engine.submit(ids(1), SamplingParams(max_tokens=2)) for _ in range(2)]
            assert {each.dp_rank for each in running} == {0, 1}
            for each in running:
                assert (await collect(each)).num_output == 2
            assert "did not answer for" in str(engine.ranks[0].loss)

    run(scenario)


def test_the_only_rank_is_not_ended_for_its_silence(model: Path) -> None:
    async def scenario() -> None:
        async with started(model, 1, rank_timeout_s=0.1) as engine:
            signal_rank(engine.ranks[0], signal.SIGSTOP)
            stuck = engine.submit(ids(1), SamplingParams(max_tokens=2))
            await until(lambda: not engine.ranks[0].is_usable, "it is found out")
            await asyncio.sleep(1)
            assert engine.ranks[0].loss is None
            more = engine.submit(ids(1), SamplingParams(max_tokens=2))
            signal_rank(engine.ranks[0], signal.SIGCONT)
            assert [(await collect(each)).num_output for each in (stuck, more)] == [2, 2]
            assert engine.ranks[0].is_usable

    run(scenario)


def test_a_paused_rank_is_not_taken_for_a_silent_one(model: Path) -> None:
    async def scenario() -> None:
        async with started(model, rank_timeout_s=1.0) as engine:
            await engine.call("pause", mode="all")
            waiting = [engine.submit(ids(1), SamplingParams(max_tokens=2)) for _ in range(2)]
            await asyncio.sleep(2.5)
            assert all(rank.is_usable for rank in engine.ranks)
            await engine.call("resume")
            for each in waiting:
                assert (await collect(each)).num_output == 2

    run(scenario)


def test_queues_are_refused_when_all_are_full(model: Path) -> None:
    async def scenario() -> None:
        limits = {"max_running": 1, "max_waiting_reqs": 1}
        async with started(model, limits=limits, rank_policy="round_robin") as engine:
            running = [engine.submit(ids(1), LONG, dp_rank=0) for _ in range(2)]
            others = [engine.submit(ids(1), LONG) for _ in range(2)]
            assert {each.dp_rank for each in others} == {1}  # whoever's turn it is
            with pytest.raises(Exception, match="requests wait, at most 1 may"):
                engine.submit(ids(1), LONG)
            assert engine.num_outstanding == 4
            for each in running + others:
                each.abort()

    run(scenario)


def test_wrong_settings_of_ranks_are_told_in_one_line(model: Path) -> None:
    async def start(**settings: Any) -> None:
        async with started(model, **settings):
            pass

    children = psutil.Process().children
    before = set(children())
    with pytest.raises(ConfigError, match="rank policy: 'fewest' is not known"):
        asyncio.run(start(rank_policy="fewest"))
    with pytest.raises(ConfigError, match="max-step-tokens"):
        asyncio.run(start(limits={"chunked_prefill": False, "max_step_tokens": 1}))
    assert set(children()) <= before
    with pytest.raises(ConfigError, match="dp-size: 0 must be at least 1"):
        RanksConfig(0)
    with pytest.raises(ConfigError, match="rank-timeout: 0 must be more than 0"):
        RanksConfig(rank_timeout_s=0)
