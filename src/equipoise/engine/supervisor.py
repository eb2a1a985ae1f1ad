"""The parent's side of a rank process: start it, notice its death, stop it."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from equipoise.engine.channel import Addresses, server_end
from equipoise.engine.messages import Call, Failed, FromRank, Ready, Reply, Stop, ToRank
from equipoise.engine.process import RankSpec, spec_bytes
from equipoise.errors import ConfigError, UnavailableError
from equipoise.machine import gpus, num_cores
from equipoise.obs.log import current_level

if TYPE_CHECKING:
    from equipoise.config.engine import EngineConfig
    from equipoise.engine.group import GroupHost
    from equipoise.exec.sim import SimVocabulary

log = logging.getLogger(__name__)

DRAIN_S = 0.2
"""Seconds that messages of a dead rank are waited for."""

TERMINATE_S = 2.0
MAX_IPC_PATH = 90
"""Unix socket paths end at 107 bytes; sockets of a longer temporary folder go to /tmp."""


class RankProcess:
    """One rank process. `start` once, then `wait_ready`, `send` and `receive`, then `stop`.

    One thread may receive while another sends; `stop` is called when nobody receives any more.

    pid: of the process, None before it runs
    death: how it ended, in one line; None while it lives
    """

    def __init__(
        self,
        config: EngineConfig,
        vocabulary: SimVocabulary | None = None,
        dp_rank: int = 0,
        group: GroupHost | None = None,
    ) -> None:
        """Folders in `config` are absolute. `group`: that the rank is in lockstep with, if any."""
        self.dp_rank = dp_rank
        self.pid: int | None = None
        self.death: str | None = None
        self._folder = _private_folder(dp_rank)
        self._remove_folder = weakref.finalize(self, shutil.rmtree, self._folder, True)
        self._environment, ranks_per_gpu = _environment(config, dp_rank)
        self._spec = RankSpec(
            config=replace(config, model=replace(config.model, num_threads=threads_per_rank(config))),
            addresses=Addresses.within(self._folder),
            parent_pid=os.getpid(),
            dp_rank=dp_rank,
            ranks_per_gpu=ranks_per_gpu,
            log_level=current_level(),
            vocabulary=vocabulary,
        )
        self._group = group
        self._channel = server_end(self._spec.addresses)
        self._failure: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._spawned = threading.Event()
        self._gone = threading.Event()
        self._is_stopping = False
        self._verdict: str | None = None
        self._watcher = threading.Thread(target=self._run, name=f"rank-{dp_rank}-watch", daemon=True)

    # ---------------------------------------------------------------- start

    def start(self) -> None:
        """Start the process; returns when it runs, or cannot (`wait_ready` tells then)."""
        self._watcher.start()
        self._spawned.wait()

    def wait_ready(self, timeout_s: float) -> Ready:
        """Wait until the rank serves. Raises ConfigError when its settings or checkpoint are at fault, else
        UnavailableError: it died, or did not answer in time. The process is to be stopped by the caller then."""
        deadline = time.monotonic() + timeout_s
        ready = self._expect(Ready, deadline)
        # The answer to a call proves that both directions are connected: the sockets' names can go.
        self.send(Call(0, "ping"))
        self._expect(Reply, deadline)
        self._remove_folder()
        return ready

    def _expect(self, kind: type[Ready] | type[Reply], deadline: float) -> Ready:
        while (left := deadline - time.monotonic()) > 0:
            message = self.receive(left)
            if isinstance(message, Failed) and message.is_config:
                raise ConfigError(message.error)
            if isinstance(message, kind):
                return message  # type: ignore[return-value]
        raise UnavailableError(f"rank {self.dp_rank} (pid {self.pid}) did not answer in time")

    def _run(self) -> None:
        """The watcher thread: it starts the process, and lives until the process ends.

        The kernel ends a rank with the thread that started it, so that must be a thread that stays."""
        try:
            process = self._spawn()
        except Exception as error:  # whoever waits for the rank must hear of it
            self._report_death(f"rank {self.dp_rank} could not be started: {error}")
            return
        finally:
            self._spawned.set()
        code = process.wait()
        if process.stdin is not None:
            process.stdin.close()
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        self._report_death(f"rank {self.dp_rank} (pid {process.pid}) {self._verdict or how}")

    def _spawn(self) -> subprocess.Popen[bytes]:
        spec = self._spec
        if self._group is not None:
            spec = msgspec.structs.replace(spec, group=self._group.start(self.dp_rank))
        data = spec_bytes(spec)
        process = subprocess.Popen(
            [sys.executable, "-m", "equipoise.engine.process"],
            stdin=subprocess.PIPE,
            stdout=2,  # the parent's stdout belongs to the parent
            env=self._environment,
            process_group=0,  # Ctrl-C reaches the parent alone
        )
        self._process, self.pid = process, process.pid
        assert process.stdin is not None
        try:
            process.stdin.write(data)
            process.stdin.flush()
        except BrokenPipeError:
            log.warning("rank %d ended before it read its settings", self.dp_rank)
        return process

    def _report_death(self, how: str) -> None:
        if not self._is_stopping:
            log.error("%s", how)
        self.death = how
        if self._group is not None:
            self._group.end(self.dp_rank)
        self._gone.set()
        self._channel.poke()

    # ---------------------------------------------------------------- talk

    def send(self, message: ToRank) -> None:
        """Queue a message; never waits."""
        self._channel.send(message)

    def receive(self, timeout_s: float | None = None) -> FromRank | None:
        """The rank's next message; None when `timeout_s` seconds passed without one, or `poke` was called.

        Raises UnavailableError, naming rank, pid and cause, when the process is gone and all it said was read."""
        gone = self._gone.is_set()
        message = self._channel.receive(DRAIN_S if gone else timeout_s)
        if isinstance(message, Failed):
            self._failure = message.error
        elif message is None and gone:
            raise UnavailableError(f"{self.death}" + (f": {self._failure}" if self._failure else ""))
        return message

    def poke(self) -> None:
        """Let a waiting `receive` return, from any thread."""
        self._channel.poke()

    # ---------------------------------------------------------------- stop

    def kill(self, verdict: str | None = None) -> None:
        """End the process at once; a `receive` under way raises UnavailableError soon, which says `verdict` if any."""
        self._verdict = verdict
        self._is_stopping = verdict is None
        if self._process is not None:
            self._process.kill()

    def stop(self, timeout_s: float) -> None:
        """End the process: ask it, after `timeout_s` seconds terminate it, at last kill it. Idempotent."""
        self._is_stopping = True
        if self._watcher.is_alive() and not self._gone.is_set():
            self.send(Stop())
            self._end_process(timeout_s)
        if self._watcher.ident is not None:
            self._watcher.join()
        self._channel.close()
        self._remove_folder()

    def _end_process(self, timeout_s: float) -> None:
        if self._gone.wait(timeout_s) or self._process is None:
            return
        if timeout_s > 0:
            log.warning("rank %d (pid %d) did not stop in %g s: terminating it", self.dp_rank, self.pid, timeout_s)
        self._process.terminate()
        if not self._gone.wait(TERMINATE_S):
            self._process.kill()
            self._gone.wait()


def _private_folder(dp_rank: int) -> Path:
    folder = Path(tempfile.mkdtemp(prefix=f"equipoise-rank-{dp_rank}-"))
    if len(os.fsencode(folder)) <= MAX_IPC_PATH:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix=f"equipoise-rank-{dp_rank}-", dir="/tmp"))


def threads_per_rank(config: EngineConfig) -> int:
    """CPU threads of one rank's model. Ranks with a thread per core each slow each other to a third."""
    return config.model.num_threads or max(1, num_cores() // config.ranks.dp_size)


def _environment(config: EngineConfig, dp_rank: int) -> tuple[dict[str, str], int]:
    """The rank's environment, and how many ranks share its GPU.

    Threads are set before the rank imports torch, which reads them once; so are GPUs, dealt out in turn."""
    env, num_ranks = dict(os.environ), config.ranks.dp_size
    threads = str(threads_per_rank(config))
    if config.model.num_threads is not None:
        env["OMP_NUM_THREADS"] = threads
    else:
        env.setdefault("OMP_NUM_THREADS", threads)
    if num_ranks == 1:
        return env, 1
    env.setdefault("GOMP_SPINCOUNT", "0")  # a thread that waits spinning takes a core from the other ranks
    devices = gpus(env.get("CUDA_VISIBLE_DEVICES"))
    if not devices:
        return env, num_ranks
    env["CUDA_VISIBLE_DEVICES"] = devices[dp_rank % len(devices)]
    return env, -(-num_ranks // len(devices))


def _signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"
