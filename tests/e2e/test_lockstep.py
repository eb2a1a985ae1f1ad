"""Ranks in lockstep behind one HTTP server: their tokens, gates that look at all of them, what a death costs."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

import pytest
from tests.e2e.test_many_streams import stream_text
from tests.server.raw import body_of, load, wait_for
from tests.server.test_lifecycle import Asker
from tests.server.test_ranks import call, rank_pids, samples
from tests.serving import serve, sim_flags

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.serving import Server

PROMPTS = [f"p{number % 10} " * (1 + number % 7) for number in range(200)]


def flags(folder: Path, num_ranks: int, *more: str, max_running: int = 64) -> Sequence[str]:
    lockstep = ("--dp-size", str(num_ranks), "--lockstep", "--max-running", str(max_running))
    return sim_flags(folder, *lockstep, *more, step_ms=5.0)


async def streams(server: Server, prompts: list[str]) -> list[str]:
    """The text of a stream for each prompt, all at once."""
    return list(await asyncio.gather(*(stream_text(server.port, prompt) for prompt in prompts)))


@pytest.fixture(scope="module")
def expected(sim_server: Server) -> list[str]:
    """What one rank by itself makes of PROMPTS."""
    return asyncio.run(streams(sim_server, PROMPTS))


@pytest.fixture(scope="module")
def two(tiny_tokenizer: Path) -> Iterator[Server]:
    """Two ranks of two seats; the gate is closed while one of them is full."""
    with serve(*flags(tiny_tokenizer, 2, "--balance", "--balance-margin", "0", max_running=2)) as server:
        yield server


def test_four_ranks_draw_the_tokens_of_one_and_go_on_without_one(tiny_tokenizer: Path, expected: list[str]) -> None:
    with serve(*flags(tiny_tokenizer, 4)) as server:
        assert asyncio.run(streams(server, PROMPTS)) == expected
        wait_for(lambda: len(set(exchanges(server).values())) == 1, "all ranks took part in all rounds")

        pids = rank_pids(server)
        askers = [Asker(server, prompt="abc", max_tokens=300, ignore_eos=True, routed_dp_rank=n) for n in range(4)]
        wait_for(lambda: [rank["num_running_reqs"] for rank in call(server, "/get_load")] == [1] * 4, "each runs one")
        os.kill(pids[2], signal.SIGKILL)
        answers = [asker.join() for asker in askers]
        endings = [body_of(answer).get("choices", [{}])[0].get("finish_reason") for answer in answers]
        assert endings == ["length", "length", None, "length"]
        assert "was killed by signal 9" in str(body_of(answers[2]))

        wait_for(lambda: call(server, "/health") == {"status": "ok"}, "the dead one is back")
        assert asyncio.run(streams(server, PROMPTS[:20])) == expected[:20]
        assert call(server, "/get_load")[2]["total_finished"] > 0


def exchanges(server: Server) -> dict[str, float]:
    """Meetings of each rank so far."""
    return samples(server, "equipoise_exchanges_total")


def test_idle_ranks_do_not_meet(two: Server) -> None:
    asyncio.run(streams(two, ["one"]))
    wait_for(lambda: len(set(exchanges(two).values())) == 1, "both took part in all rounds")
    before = exchanges(two)
    for _ in range(5):
        call(two, "/get_load")  # wakes each rank, and gives none any work
    assert exchanges(two) == before


def test_a_full_rank_closes_the_gate_of_all(two: Server) -> None:
    long = [Asker(two, prompt="abc", max_tokens=400, ignore_eos=True, routed_dp_rank=0) for _ in range(2)]
    wait_for(lambda: call(two, "/get_load")[0]["num_running_reqs"] == 2, "rank 0 is full")
    late = Asker(two, prompt="abc", max_tokens=2, rid="late", routed_dp_rank=1)
    wait_for(lambda: call(two, "/get_load")[1]["num_waiting_reqs"] == 1, "rank 1, which is empty, waits")
    wait_for(lambda: held_by(two, "late") == "balance", "for rank 0")
    assert call(two, "/get_load")[1]["num_running_reqs"] == 0
    assert {body_of(asker.join())["choices"][0]["finish_reason"] for asker in long} == {"length"}
    assert body_of(late.join())["choices"][0]["finish_reason"] == "length"


def held_by(server: Server, name: str) -> str:
    return str(call(server, f"/debug/requests/{name}")["requests"][0]["held_by"])


def test_two_ranks_with_a_gate_draw_the_tokens_of_one(two: Server, sim_server: Server) -> None:
    prompts = [f"q{number % 10}" for number in range(24)]
    assert asyncio.run(streams(two, prompts)) == asyncio.run(streams(sim_server, prompts))
    assert load(two)["num_reqs"] == 0


def test_a_rank_that_hangs_is_ended_and_the_other_goes_on(tiny_tokenizer: Path, expected: list[str]) -> None:
    with serve(*flags(tiny_tokenizer, 2, "--rank-timeout", "1.5", "--no-restart-ranks")) as server:
        assert asyncio.run(streams(server, PROMPTS)) == expected
        pids = rank_pids(server)
        askers = [Asker(server, prompt="abc", max_tokens=200, ignore_eos=True, routed_dp_rank=n) for n in range(2)]
        wait_for(lambda: [rank["num_running_reqs"] for rank in call(server, "/get_load")] == [1, 1], "both run one")
        os.kill(pids[1], signal.SIGSTOP)
        answers = [body_of(asker.join()) for asker in askers]
        assert answers[0]["choices"][0]["finish_reason"] == "length"
        assert "did not answer for" in str(answers[1])
        assert asyncio.run(streams(server, PROMPTS[:20])) == expected[:20]
