"""AsyncEngine against real rank processes with the sim executor."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
from tests.tiny_tokenizer import write_folder

from equipoise.config import CacheConfig, CostConfig, EngineConfig, ModelConfig, SchedulerConfig, SimExecutorConfig
from equipoise.errors import (
    CheckpointError,
    ConfigError,
    InvalidValueError,
    QueueFullError,
    RequestTimeoutError,
    UnavailableError,
)
from equipoise.request import Grammar, SamplingParams
from equipoise.server.client import AsyncEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine
    from pathlib import Path

    from equipoise.server.generation import Delta, Generation

    Scenario = Callable[[AsyncEngine], Coroutine[Any, Any, None]]

LONG = SamplingParams(max_tokens=5000)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model"))


@contextlib.asynccontextmanager
async def started(model: Path, step_ms: float = 1.0, **limits: Any) -> AsyncIterator[AsyncEngine]:
    engine = await AsyncEngine.start(
        EngineConfig(
            model=ModelConfig(model=str(model), executor="sim"),
            cache=CacheConfig(page_size=4),
            scheduler=SchedulerConfig(**limits),
            sim=SimExecutorConfig(sim_max_model_len=8192),
            cost=CostConfig(step_ms=step_ms, prefill_token_ms=0, decode_row_ms=0),
        ),
        startup_timeout_s=60,
    )
    try:
        yield engine
    finally:
        await engine.stop()
        assert not any(psutil.pid_exists(rank.pid or 0) for rank in engine.ranks)


def ids(*tokens: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(tokens, np.int32)


async def collect(generation: Generation) -> Delta:
    whole = await generation.next()
    async for delta in generation:
        whole.add(delta)
    return whole


async def nothing_runs(engine: AsyncEngine, seconds: float = 2.0) -> bool:
    """True when the rank says so within the time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        loads = await engine.call("loads")
        if all(load.num_running_reqs == 0 for load in loads.values()):
            return all(rank.load.num_running_reqs == 0 for rank in engine.ranks)
        await asyncio.sleep(0.01)
    return False


def test_text_tokens_and_end(model: Path) -> None:
    async def scenario() -> None:
        async with started(model) as engine:
            params = SamplingParams(max_tokens=30, logprobs=2, prompt_logprobs=1)
            generation = engine.submit(engine.tokenizer.encode("hello world"), params, request_id="mine")
            assert (generation.request_id, generation.num_prompt) == ("mine", 2)
            deltas = [delta async for delta in generation]
            with pytest.raises(StopAsyncIteration):
                await generation.next()
            token_ids = [token for delta in deltas for token in delta.token_ids]
            assert "".join(delta.text for delta in deltas) == engine.tokenizer.decode(token_ids)
            assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
            assert deltas[-1].num_output == len(token_ids) == 30
            assert [each.token_id for delta in deltas for each in delta.logprobs or []] == token_ids
            assert [each.token_id for each in deltas[0].prompt_logprobs or []] == engine.tokenizer.encode(
                "hello world"
            ).tolist()[1:]
            again = [delta async for delta in engine.generate("hello world", SamplingParams(max_tokens=30))]
            assert [token for delta in again for token in delta.token_ids] == token_ids
            assert await engine.wait_idle(5)
            assert engine.ranks[0].load.total_finished == 2

    asyncio.run(scenario())


def test_slow_consumer_gets_everything_in_one_delta(model: Path) -> None:
    async def scenario() -> None:
        async with started(model) as engine:
            generation = engine.submit(ids(5, 6), SamplingParams(max_tokens=40, logprobs=0))
            assert await engine.wait_idle(10)
            delta = await generation.next()
            assert len(delta.token_ids) == len(delta.logprobs or []) == delta.num_output == 40
            assert (delta.finish_reason, delta.text) == ("length", engine.tokenizer.decode(delta.token_ids))

    asyncio.run(scenario())


def test_stop_string_and_stop_token(model: Path) -> None:
    async def scenario() -> None:
        async with started(model) as engine:
            free = await collect(engine.submit(ids(5, 6), SamplingParams(max_tokens=60)))
            at = next(i for i in range(20, 60) if engine.tokenizer.decode(free.token_ids[i : i + 1]).isalnum())
            stop = engine.tokenizer.decode(free.token_ids[at : at + 1])
            before = free.text[: free.text.index(stop)]

            stopped = await collect(engine.submit(ids(5, 6), SamplingParams(max_tokens=5000, stop=(stop,))))
            assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == (before, "stop", stop)
            assert stopped.num_output == len(stopped.token_ids) <= at + 1
            params = SamplingParams(max_tokens=5000, stop=(stop,), include_stop_str_in_output=True)
            assert (await collect(engine.submit(ids(5, 6), params))).text == before + stop
            assert await nothing_runs(engine)

            token = free.token_ids[at]
            num = free.token_ids.index(token) + 1
            by_id = await collect(engine.submit(ids(5, 6), SamplingParams(max_tokens=60, stop_token_ids=(token,))))
            assert (by_id.finish_reason, by_id.stop_reason) == ("stop", token)
            assert by_id.token_ids == free.token_ids[:num]
            assert by_id.text == engine.tokenizer.decode(free.token_ids[: num - 1])
            params = SamplingParams(max_tokens=60, stop_token_ids=(token,), include_stop_str_in_output=True)
            assert (await collect(engine.submit(ids(5, 6), params))).text == engine.tokenizer.decode(
                free.token_ids[:num]
            )

    asyncio.run(scenario())


def test_abort_drop_and_leave(model: Path) -> None:
    async def scenario() -> None:
        async with started(model) as engine:
            generation = engine.submit(ids(1), LONG)
            await generation.next()
            waiting = asyncio.ensure_future(collect(generation))
            await asyncio.sleep(0.02)
            generation.abort()
            generation.abort()
            assert (await asyncio.wait_for(waiting, 1)).finish_reason == "abort"

            dropped = engine.submit(ids(1), LONG)
            await dropped.next()
            assert engine.num_outstanding == 1
            del dropped
            gc.collect()
            assert await engine.wait_idle(1)

            async for delta in engine.generate([1], LONG):
                if delta.num_output >= 3:
                    break
            gc.collect()
            assert await engine.wait_idle(1)
            assert await nothing_runs(engine)
            assert engine.ranks[0].load.total_aborted == 3

    asyncio.run(scenario())


def test_rank_killed_mid_stream(model: Path) -> None:
    async def scenario() -> None:
        async with started(model) as engine:
            running = [engine.submit(ids(i), LONG) for i in range(20)]
            for generation in running:
                await generation.next()
            call = asyncio.ensure_future(engine.call("ping"))
            pid = engine.ranks[0].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            start = time.monotonic()
            results = await asyncio.gather(*map(collect, running), return_exceptions=True)
            assert time.monotonic() - start < 2
            assert {type(result) for result in results} == {UnavailableError}
            assert str(results[0]) == f"rank 0 (pid {pid}) was killed by signal 9 (SIGKILL)"
            assert engine.death == str(results[0])
            with contextlib.suppress(UnavailableError):
                await call
            with pytest.raises(UnavailableError, match="SIGKILL"):
                engine.submit(ids(1), LONG)
            with pytest.raises(UnavailableError, match="SIGKILL"):
                await engine.call("ping")
            assert await engine.wait_idle(0.1)
            assert not psutil.pid_exists(pid)

    asyncio.run(scenario())


def test_five_hundred_at_once_none_lost(model: Path) -> None:
    async def scenario() -> None:
        async with started(model, max_running=128) as engine:
            wholes = await asyncio.gather(
                *(
                    collect(engine.submit(ids(i % 300, i // 300), SamplingParams(max_tokens=5 + i % 20)))
                    for i in range(500)
                )
            )
            assert [len(whole.token_ids) for whole in wholes] == [5 + i % 20 for i in range(500)]
            assert all(whole.text == engine.tokenizer.decode(whole.token_ids) for whole in wholes)
            assert engine.num_outstanding == 0
            assert engine.ranks[0].streams == {}

    asyncio.run(scenario())


def test_pause_resume_flush(model: Path) -> None:
    async def scenario() -> None:
        async with started(model) as engine:
            await collect(engine.submit(ids(*range(9)), SamplingParams(max_tokens=2)))
            cached = await collect(engine.submit(ids(*range(9)), SamplingParams(max_tokens=2)))
            assert cached.num_cached == 8
            running = engine.submit(ids(1), LONG)
            await running.next()
            await engine.call("pause", mode="new")
            new = asyncio.ensure_future(collect(engine.submit(ids(2), SamplingParams(max_tokens=3))))
            assert engine.ranks[0].load.paused == "new"
            await running.next()
            assert not new.done()
            await engine.call("pause", mode="all")
            await asyncio.sleep(0.05)
            before = await running.next()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(running.next(), 0.1)
            await engine.call("resume")
            assert (await running.next()).num_output > before.num_output
            assert (await new).num_output == 3
            running.abort()
            await asyncio.sleep(0.05)
            assert (await engine.call("flush_cache"))[0] > 0
            assert await engine.call("flush_cache") == {0: 0}
            with pytest.raises(InvalidValueError, match="'soon' must be"):
                await engine.call("pause", mode="soon")

    asyncio.run(scenario())


def test_timeout(model: Path) -> None:
    async def scenario() -> None:
        async with started(model) as engine:
            generation = engine.submit(ids(1), LONG, timeout_s=0.15)
            with pytest.raises(RequestTimeoutError, match=r"0\.15 s"):
                await collect(generation)
            await engine.call("pause", mode="all")
            start = time.monotonic()
            with pytest.raises(RequestTimeoutError):
                await collect(engine.submit(ids(1), LONG, timeout_s=0.1))
            assert time.monotonic() - start < 1

    asyncio.run(scenario())


def test_timeout_of_a_rank_that_hangs(model: Path) -> None:
    async def scenario() -> None:
        async with started(model) as engine:
            assert engine.ranks[0].pid is not None
            os.kill(engine.ranks[0].pid, signal.SIGSTOP)
            try:
                start = time.monotonic()
                with pytest.raises(RequestTimeoutError, match=r"0\.1 s"):
                    await engine.submit(ids(1), SamplingParams(max_tokens=2), timeout_s=0.1).next()
                assert time.monotonic() - start < 5
                assert engine.num_outstanding == 0
            finally:
                os.kill(engine.ranks[0].pid, signal.SIGCONT)
            assert (await collect(engine.submit(ids(1), SamplingParams(max_tokens=2)))).num_output == 2

    asyncio.run(scenario())


def test_queue_limits(model: Path) -> None:
    async def scenario() -> None:
        async with started(model, max_running=2, max_waiting_reqs=3) as engine:
            running = []
            for _ in range(5):
                running.append(engine.submit(ids(1), LONG))
                await asyncio.sleep(0.02)
            with pytest.raises(QueueFullError, match="at most 3 may"):
                engine.submit(ids(1), LONG)
            running.pop().abort()
            await asyncio.sleep(0.05)
            running.append(engine.submit(ids(1), LONG))
        async with started(model, max_running=1, max_waiting_tokens=10) as engine:
            first = engine.submit(ids(1), LONG)
            await first.next()
            second = engine.submit(ids(*range(8)), LONG)
            third = engine.submit(ids(1, 2, 3), LONG)
            with pytest.raises(QueueFullError):  # the rank knows better than the load that was published
                await collect(third)
            second.abort()

    asyncio.run(scenario())


def test_grammar_is_refused_by_sim(model: Path) -> None:
    async def scenario() -> None:
        async with started(model) as engine:
            params = SamplingParams(grammar=Grammar("json_object"))
            with pytest.raises(InvalidValueError, match="random tokens") as caught:
                await collect(engine.submit(ids(1), params))
            assert caught.value.field == "grammar"
            assert (await collect(engine.submit(ids(1), SamplingParams(max_tokens=2)))).num_output == 2

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("prompt", "settings", "field", "words"),
    [
        ([], {}, "prompt", ["empty"]),
        ([1] * 8192, {}, "prompt", ["8192", "8191"]),
        ([1, -1], {}, "prompt", ["token id", "vocabulary"]),
        ([1, 5000], {}, "prompt", ["5000", "vocabulary"]),
        ([1], {"temperature": -1.0}, "temperature", ["-1.0"]),
        ([1], {"n": 2}, "n", ["2"]),
        ([1], {"timeout_s": 0.0}, "timeout_s", ["0.0"]),
    ],
)
def test_bad_requests_are_refused_at_once(
    shared: tuple[asyncio.Runner, AsyncEngine],
    prompt: list[int],
    settings: dict[str, Any],
    field: str,
    words: list[str],
) -> None:
    runner, engine = shared
    timeout_s = settings.pop("timeout_s", None)

    async def submit() -> None:
        engine.submit(ids(*prompt), SamplingParams(**settings), timeout_s=timeout_s)

    with pytest.raises(InvalidValueError) as caught:
        runner.run(submit())
    assert caught.value.field == field
    assert all(word in str(caught.value) for word in words)
    assert engine.num_outstanding == 0


@pytest.fixture(scope="module")
def shared(model: Path) -> Any:
    with asyncio.Runner() as runner:
        context = started(model)
        engine = runner.run(context.__aenter__())
        yield runner, engine
        runner.run(context.__aexit__(None, None, None))


def test_two_consumers_are_a_mistake(shared: tuple[asyncio.Runner, AsyncEngine]) -> None:
    runner, engine = shared

    async def scenario() -> None:
        await engine.call("pause", mode="all")
        generation = engine.submit(ids(1), SamplingParams(max_tokens=2))
        first = asyncio.ensure_future(generation.next())
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="two tasks"):
            await generation.next()
        await engine.call("resume")
        assert (await first).num_output >= 1
        generation.abort()

    runner.run(scenario())


def test_stop_fails_what_runs(model: Path) -> None:
    async def scenario() -> None:
        async with started(model) as engine:
            running = [asyncio.ensure_future(collect(engine.submit(ids(1), LONG))) for _ in range(5)]
            await asyncio.sleep(0.05)
            start = time.monotonic()
            await engine.stop()
            assert time.monotonic() - start < 3
            results = await asyncio.gather(*running, return_exceptions=True)
            assert {str(result) for result in results} == {"the server is shutting down"}
            with pytest.raises(UnavailableError):
                engine.submit(ids(1), LONG)

    asyncio.run(scenario())


def test_start_refusals(model: Path, tmp_path: Path) -> None:
    async def start(**settings: Any) -> None:
        await AsyncEngine.start(EngineConfig(**settings))

    with pytest.raises(CheckpointError, match="nowhere is not a folder"):
        asyncio.run(start(model=ModelConfig(model=str(tmp_path / "nowhere"))))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        asyncio.run(start(model=ModelConfig(model=str(tmp_path))))
    with pytest.raises(ConfigError, match="max-step-tokens"):
        asyncio.run(
            start(
                model=ModelConfig(model=str(model), executor="sim"),
                scheduler=SchedulerConfig(chunked_prefill=False, max_step_tokens=1),
            )
        )


def test_start_can_be_cancelled(model: Path) -> None:
    async def scenario() -> None:
        starting = asyncio.ensure_future(
            AsyncEngine.start(EngineConfig(model=ModelConfig(model=str(model), executor="sim")))
        )
        await asyncio.sleep(0.05)  # the process runs, and imports
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    children = psutil.Process().children
    before = set(children())
    asyncio.run(scenario())
    assert set(children()) <= before
