"""Processes that simulate, one job each at a time.

Not a `concurrent.futures` pool: there one process that is killed breaks all, and nobody knows on which job; and its
processes outlive a parent that is killed.
"""

from __future__ import annotations

import logging
import os
import signal
import traceback
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from threading import Thread
from typing import TYPE_CHECKING

from equipoise.errors import ConfigError, EquipoiseError
from equipoise.sim.run import simulate

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator
    from pathlib import Path

    from equipoise.sim.scenario import Scenario


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """One simulation: `key` names it (unique), `scenario` is a whole one, relative paths under `folder`."""

    key: str
    scenario: Scenario
    folder: Path


@dataclass(frozen=True)
class Failure:
    """Why a job has no summary."""

    message: str


Outcome = dict[str, float] | Failure
"""A summary, or why there is none."""


def outcomes(jobs: Iterable[Job], num_processes: int) -> Generator[tuple[Job, Outcome]]:
    """Run `jobs`, `num_processes` at a time, and tell each as it ends; with 1, they run in this process.

    An error in a job, and a process that dies of one, are that job's Failure: the others go on. All processes are
    ended when the iterator is closed or interrupted. Raises EquipoiseError when processes cannot start at all."""
    if num_processes == 1:
        return ((job, run(job)) for job in jobs)
    return _in_processes(iter(jobs), num_processes)


def run(job: Job) -> Outcome:
    """Run it here."""
    try:
        found = simulate(job.scenario, folder=job.folder).summary()
    except ConfigError as error:
        return Failure(" ".join(str(error).split()))
    except Exception as error:  # a bug, one of a user's own policy perhaps, must not end a sweep of hours
        return Failure(_bug(error))
    return {name: value if isinstance(value, int) else float(value) for name, value in found.items()}


def _bug(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {' '.join(str(error).split())} ({frame.filename}:{frame.lineno})"


def _in_processes(jobs: Iterator[Job], num_processes: int) -> Generator[tuple[Job, Outcome]]:
    workers: list[_Worker] = []
    warned: set[str] = set()
    try:
        for job in jobs:
            if len(workers) < num_processes:
                workers.append(_Worker(job))
                continue
            for worker in _ended(workers):
                yield worker.job, worker.outcome(warned)
                worker.give(job)
                break
        while workers:
            worker = _ended(workers)[0]
            yield worker.job, worker.outcome(warned)
            workers.remove(worker)
            worker.end()
    finally:
        for worker in workers:
            worker.end()


def _ended(workers: list[_Worker]) -> list[_Worker]:
    """Those whose jobs have ended; waits for the first."""
    ready = wait([worker.pipe for worker in workers])
    return [worker for worker in workers if worker.pipe in ready]


class _Worker:
    """A process and the job that it has."""

    def __init__(self, job: Job) -> None:
        self._start()
        self.give(job)

    def _start(self) -> None:
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        # Ctrl-C reaches every process of the terminal: those that simulate inherit that it is blocked, and are ended.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self._has_begun = False

    def give(self, job: Job) -> None:
        """Have it run `job`; in a new process when the last one died."""
        if not self._process.is_alive():
            self.end()
            self._start()
        self.job = job
        with suppress(OSError):  # it died just now: reading from it says so
            self.pipe.send(job)

    def outcome(self, warned: set[str]) -> Outcome:
        """What came of the job; what it warned of is logged, unless it is in `warned` already.

        Raises EquipoiseError when the process ended before it could begin any."""
        try:
            if not self._has_begun:
                self._has_begun = self.pipe.recv()
            found: Outcome
            warnings: list[str]
            found, warnings = self.pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            code = self._process.exitcode
            if not self._has_begun:
                raise EquipoiseError(
                    f"processes: one ended with exit code {code} as it started. {MAIN_GUARD}"
                ) from None
            return Failure(_died(code))
        for warning in warnings:
            if warning not in warned:
                warned.add(warning)
                log.warning("%s", warning)
        return found

    def end(self) -> None:
        """Kill it, whatever it does."""
        self._process.kill()
        self._process.join()
        self.pipe.close()


MAIN_GUARD = "A script that runs several needs its calls under `if __name__ == '__main__':`, or 1 process."


def _died(code: int | None) -> str:
    if code == -signal.SIGKILL:
        return "its process was killed, perhaps for want of memory"
    return f"its process ended with exit code {code}"


def _serve(pipe: Connection) -> None:
    """The life of a process: jobs in, outcomes and warnings out, until it is ended or its parent is gone."""
    Thread(target=_end_with_parent, daemon=True).start()
    heard = _Heard(logging.WARNING)
    logging.getLogger().addHandler(heard)
    with suppress(EOFError, OSError):  # the parent was interrupted as it started this process, and left
        pipe.send(True)
        while True:
            found = run(pipe.recv())
            pipe.send((found, heard.messages))
            heard.messages = []


class _Heard(logging.Handler):
    """Keeps messages for the process that can tell whether the user has read them already."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
