"""The rank process: `python -m equipoise.engine.process`, started by `equipoise.engine.supervisor`.

Its settings come over stdin, which stays open: when it closes, the parent is gone and the rank ends.
Exit codes: 0 told to stop, 1 a failure, 2 wrong settings or checkpoint.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from equipoise.clock import WallClock
from equipoise.config.engine import EngineConfig
from equipoise.engine.channel import Addresses, Channel, rank_end
from equipoise.engine.exchange import BoardClock, BoardExchange, GroupSpec
from equipoise.engine.loop import EngineLoop
from equipoise.engine.messages import Failed, FromRank, Ready, ToRank
from equipoise.engine.timed import TimedExecutor
from equipoise.errors import ConfigError
from equipoise.exec.costs import build_cost
from equipoise.exec.sim import SimExecutor, SimVocabulary, sim_info
from equipoise.obs.log import setup_logging
from equipoise.obs.timeline import StepRing
from equipoise.plugins import find_factory
from equipoise.sched.assemble import build_scheduler
from equipoise.sched.extend import ENTRY_POINTS

if TYPE_CHECKING:
    from equipoise.clock import Clock
    from equipoise.exec.protocol import Executor
    from equipoise.sched.scheduler import Scheduler

log = logging.getLogger("equipoise.engine.process")  # this module is __main__

EXIT_FAILED = 1
EXIT_CONFIG = 2
LENGTH_BYTES = 8
PR_SET_PDEATHSIG = 1


class RankSpec(msgspec.Struct, frozen=True):
    """What a rank process is told at its start. Folders in `config` are absolute.

    vocabulary: what the sim executor knows of the tokenizer
    ranks_per_gpu: how many ranks share this one's GPU, itself counted
    group: the lockstep group that it is in, if any"""

    config: EngineConfig
    addresses: Addresses
    parent_pid: int
    dp_rank: int = 0
    log_level: str = "warning"
    vocabulary: SimVocabulary | None = None
    ranks_per_gpu: int = 1
    group: GroupSpec | None = None


def main() -> int:
    """Run a rank until it is told to stop; returns the exit code."""
    started_at = time.monotonic()
    spec = _read_spec(sys.stdin.buffer)
    _end_with_parent(spec.parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when to stop
    setup_logging(spec.log_level, f"rank {spec.dp_rank}")
    channel = rank_end(spec.addresses)
    try:
        _serve(spec, channel, started_at)
    except ConfigError as error:
        channel.send(Failed(spec.dp_rank, str(error), is_config=True))
        return EXIT_CONFIG
    except Exception as error:
        log.critical("the rank failed\n%s", traceback.format_exc())
        channel.send(Failed(spec.dp_rank, f"{type(error).__name__}: {error}"))
        return EXIT_FAILED
    finally:
        channel.close()
    return 0


def spec_bytes(spec: RankSpec) -> bytes:
    """What the parent writes to stdin, which it leaves open. Raises OverflowError for a number of over 64 bits."""
    data = msgspec.msgpack.encode(spec)
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


def _read_spec(stdin: IO[bytes]) -> RankSpec:
    length = int.from_bytes(stdin.read(LENGTH_BYTES), "little")
    return msgspec.msgpack.decode(stdin.read(length), type=RankSpec)


def _serve(spec: RankSpec, channel: Channel[ToRank, FromRank], started_at: float) -> None:
    """Start, main loop, stop."""
    clock = WallClock()
    for rule in spec.config.scheduler.rules:
        # a misspelt rule must not cost the minutes that a large model takes to load
        find_factory("rule", rule, ENTRY_POINTS)
    exchange = None if spec.group is None else BoardExchange(spec.group, spec.dp_rank)
    executor = build_executor(spec, clock, exchange)
    if exchange is not None:
        channel.watch(exchange.bell.fileno())
    try:
        loop, scheduler = _build_loop(spec, executor, channel, clock, exchange)
        info = msgspec.structs.replace(executor.info, max_model_len=scheduler.max_model_len)
        startup_s = time.monotonic() - started_at
        channel.send(Ready(spec.dp_rank, os.getpid(), info, scheduler.max_running, startup_s))
        log.info("serves %s: %d pages of %d tokens, %s", info.model_type, info.num_pages, info.page_size, info.device)
        loop.run()
        log.info("stopped")
    finally:
        executor.close()


def _build_loop(
    spec: RankSpec,
    executor: Executor,
    channel: Channel[ToRank, FromRank],
    clock: Clock,
    exchange: BoardExchange | None,
) -> tuple[EngineLoop, Scheduler]:
    """Raises ConfigError for settings that cannot work together or that ask for more memory than there is."""
    settings = spec.config.scheduler
    try:
        scheduler = build_scheduler(settings, spec.config.cache, executor.info, clock)
        timeline = StepRing(spec.config.ranks.timeline_steps) if spec.config.ranks.timeline_steps else None
        if timeline is not None:
            executor = TimedExecutor(executor, scheduler, timeline, clock)
        return EngineLoop(scheduler, executor, channel, clock, spec.dp_rank, exchange, timeline), scheduler
    except MemoryError as error:
        raise ConfigError(
            f"max-running: no memory for {settings.max_running} seats and {executor.info.num_pages} KV pages: {error}"
        ) from error


def build_executor(spec: RankSpec, clock: Clock, exchange: BoardExchange | None = None) -> Executor:
    """The executor that the settings ask for; `exchange`: in lockstep. Raises ConfigError or CheckpointError."""
    config = spec.config
    if config.model.executor == "sim":
        hidden = () if spec.vocabulary is None else spec.vocabulary.hidden_ids
        info = sim_info(config, spec.vocabulary)
        cost = build_cost(config.cost, Path())
        group = None if exchange is None else BoardClock(exchange)
        return SimExecutor(info, cost, clock, seed=config.sim.sim_seed, hidden_ids=hidden, group=group)
    try:
        from equipoise.exec.torch.executor import build_torch_executor
    except ModuleNotFoundError as error:
        raise ConfigError(f"executor: torch needs the engine's packages ({error}); install equipoise[engine]") from None
    sharers = {"cpu": config.ranks.dp_size, "cuda": spec.ranks_per_gpu}
    return build_torch_executor(config.model, config.cache, config.scheduler, sharers)


def _end_with_parent(parent_pid: int) -> None:
    """End this process when the parent does, however it dies.

    The kernel's signal works while this process is stuck in C code; stdin works on every system."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(EXIT_FAILED)
    threading.Thread(target=_watch_stdin, name="parent-watch", daemon=True).start()


def _watch_stdin() -> None:
    os.read(sys.stdin.fileno(), 1)
    os._exit(EXIT_FAILED)


if __name__ == "__main__":
    sys.exit(main())
