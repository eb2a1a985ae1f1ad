"""Rank processes, for real: start, refusal, death, stop, and a parent that dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from equipoise.config import CostConfig, EngineConfig, ModelConfig, RanksConfig, SchedulerConfig
from equipoise.engine.messages import Add, Call, Reply, Step
from equipoise.engine.supervisor import RankProcess
from equipoise.errors import ConfigError, UnavailableError
from equipoise.exec.sim import SimVocabulary
from equipoise.machine import num_cores
from equipoise.request import SamplingParams

CONFIG = EngineConfig(model=ModelConfig(executor="sim"), cost=CostConfig(step_ms=1))


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing may be left in it."""
    folder = Path(tempfile.mkdtemp(prefix="rank-"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def ready_rank(config: EngineConfig = CONFIG) -> RankProcess:
    rank = RankProcess(config)
    rank.start()
    rank.wait_ready(30)
    return rank


def listen(rank: RankProcess, seconds: float) -> None:
    """Receive until the rank is gone."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        rank.receive(seconds)


def wait_gone(pid: int, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid):
            return True
        time.sleep(0.02)
    return False


def test_ready_then_stop_leaves_nothing(own_temporary_folder: Path) -> None:
    rank = RankProcess(CONFIG)
    assert len(list(own_temporary_folder.iterdir())) == 1
    assert next(own_temporary_folder.iterdir()).stat().st_mode & 0o777 == 0o700
    rank.start()
    ready = rank.wait_ready(30)
    assert ready.pid == rank.pid
    assert ready.info.model_type == "sim"
    assert list(own_temporary_folder.iterdir()) == []
    rank.send(Call(5, "ping"))
    assert rank.receive(5) == Reply(5)
    start = time.monotonic()
    rank.stop(5)
    assert time.monotonic() - start < 3
    assert rank.death is not None
    assert "exit code 0" in rank.death
    assert not psutil.pid_exists(ready.pid)
    rank.stop(5)


def test_wrong_settings_are_told_in_one_line(own_temporary_folder: Path) -> None:
    wrong = replace(CONFIG, scheduler=SchedulerConfig(chunked_prefill=False, max_step_tokens=8))
    rank = RankProcess(wrong)
    rank.start()
    with pytest.raises(ConfigError, match="max-step-tokens: 8") as caught:
        rank.wait_ready(30)
    assert "\n" not in str(caught.value)
    rank.stop(5)
    assert rank.death is not None
    assert "exit code 2" in rank.death
    assert list(own_temporary_folder.iterdir()) == []


def test_settings_that_cannot_be_sent_are_told(own_temporary_folder: Path) -> None:
    rank = RankProcess(CONFIG, SimVocabulary(2**70))
    rank.start()
    start = time.monotonic()
    with pytest.raises(UnavailableError, match="could not be started"):
        rank.wait_ready(30)
    assert time.monotonic() - start < 5
    rank.stop(5)
    assert list(own_temporary_folder.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_death_is_noticed_and_named(number: signal.Signals) -> None:
    rank = ready_rank()
    assert rank.pid is not None
    os.kill(rank.pid, number)
    start = time.monotonic()
    with pytest.raises(
        UnavailableError, match=rf"rank 0 \(pid {rank.pid}\) was killed by signal \d+ \({number.name}\)"
    ):
        listen(rank, 10)
    assert time.monotonic() - start < 1
    assert not psutil.pid_exists(rank.pid)
    rank.stop(1)


def test_failure_in_the_loop_is_told() -> None:
    rank = ready_rank()
    rank.send(Add(1, "r", b"abc", SamplingParams()))  # not int32s: no server sends that
    with pytest.raises(UnavailableError, match="exit code 1: ValueError: buffer size"):
        listen(rank, 10)
    rank.stop(1)


def test_ctrl_c_is_the_servers_affair() -> None:
    rank = ready_rank()
    assert rank.pid is not None
    os.kill(rank.pid, signal.SIGINT)
    time.sleep(0.1)
    rank.send(Call(5, "ping"))
    assert rank.receive(5) == Reply(5)
    assert os.getpgid(rank.pid) != os.getpgid(0)
    rank.stop(5)


def test_a_verdict_is_told_as_the_cause_of_death() -> None:
    rank = ready_rank()
    rank.kill("did not answer")
    with pytest.raises(UnavailableError, match=rf"^rank 0 \(pid {rank.pid}\) did not answer$"):
        listen(rank, 10)
    rank.stop(1)


@pytest.mark.parametrize(("num_threads", "expected"), [(None, max(1, num_cores() // 2)), (3, 3)])
def test_ranks_share_the_cores(
    num_threads: int | None, expected: int, monkeypatch: pytest.MonkeyPatch, own_temporary_folder: Path
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    config = replace(CONFIG, ranks=RanksConfig(dp_size=2), model=replace(CONFIG.model, num_threads=num_threads))
    rank = RankProcess(config, dp_rank=1)
    assert [path.name.startswith("equipoise-rank-1-") for path in own_temporary_folder.iterdir()] == [True]
    rank.start()
    assert rank.wait_ready(30).dp_rank == 1
    environment = psutil.Process(rank.pid).environ()
    assert environment["OMP_NUM_THREADS"] == str(expected)
    assert environment["GOMP_SPINCOUNT"] == "0"
    rank.stop(5)


def test_gpus_are_dealt_out_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    config = replace(CONFIG, ranks=RanksConfig(dp_size=3))
    for dp_rank, device in enumerate(("4", "6", "4")):
        rank = RankProcess(config, dp_rank=dp_rank)
        rank.start()
        rank.wait_ready(30)
        assert psutil.Process(rank.pid).environ()["CUDA_VISIBLE_DEVICES"] == device
        rank.stop(5)


def test_hung_rank_is_killed() -> None:
    rank = ready_rank()
    assert rank.pid is not None
    os.kill(rank.pid, signal.SIGSTOP)
    start = time.monotonic()
    rank.stop(0.2)
    assert time.monotonic() - start < 5
    assert not psutil.pid_exists(rank.pid)


def test_rank_that_does_not_answer() -> None:
    rank = RankProcess(CONFIG)
    rank.start()
    assert rank.pid is not None
    os.kill(rank.pid, signal.SIGSTOP)
    with pytest.raises(UnavailableError, match="did not answer in time"):
        rank.wait_ready(0.3)
    rank.kill()
    rank.stop(0)
    assert not psutil.pid_exists(rank.pid)


def test_never_started_rank_can_be_stopped(own_temporary_folder: Path) -> None:
    RankProcess(CONFIG).stop(1)
    assert list(own_temporary_folder.iterdir()) == []


def test_outstanding_steps_are_landed_at_the_stop() -> None:
    rank = ready_rank()
    rank.send(Add(1, "r", bytes(4), SamplingParams(max_tokens=10_000)))
    assert isinstance(rank.receive(5), Step)
    start = time.monotonic()
    rank.stop(5)
    assert time.monotonic() - start < 3
    assert "exit code 0" in str(rank.death)


PARENT = """
import os, sys, threading, time
from equipoise.config import EngineConfig, ModelConfig
from equipoise.engine.supervisor import RankProcess

rank = RankProcess(EngineConfig(model=ModelConfig(executor="sim")))
threading.Thread(target=rank.start).start()  # a thread that ends must not take the rank along
rank._spawned.wait()
rank.wait_ready(30)
print(rank.pid, flush=True)
{end}
"""


@pytest.mark.parametrize(
    "end", ["os.kill(os.getpid(), 9)", "os._exit(0)", "sys.exit(0)", "raise SystemExit(3)"], ids=str
)
def test_rank_ends_with_its_parent(end: str, own_temporary_folder: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(own_temporary_folder)}
    parent = subprocess.run(
        [sys.executable, "-c", PARENT.format(end=end)], stdout=subprocess.PIPE, env=environment, timeout=60, check=False
    )
    assert wait_gone(int(parent.stdout))
    assert list(own_temporary_folder.iterdir()) == []
