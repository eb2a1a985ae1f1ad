"""The access log: a JSON line per request. Nothing that reads it can hold up the event loop.

    write ── a list of lines ──> flush: encoded, 3 us a line ── bytes ──> a thread that writes, and may block

A full disk, a pipe that nobody reads: bytes wait up to MAX_PENDING_BYTES, later lines are dropped and counted.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import threading
import time
from queue import SimpleQueue

import msgspec

from equipoise.errors import ConfigError

log = logging.getLogger(__name__)

STDERR = "stderr"
STDOUT = "stdout"
MAX_LINES = 256
"""Lines that are encoded at once."""
MAX_PENDING_BYTES = 8 * 2**20
"""Bytes that may wait for the thread; a line has about 500."""
CLOSE_S = 2.0
"""Seconds that the thread has to write the rest at the end."""
FILE_MODE = 0o640

_REOPEN = b"reopen"
_CLOSE = b"close"
"""Told apart from lines by identity."""


class AccessLine(msgspec.Struct, gc=False):
    """One request, when it is over. `time`: its end, in seconds since 1970 until written, then ISO 8601 in UTC.

    outcome: how it went for the client: ok, refused (4xx), failed, cancelled (the client left). error_phase: where it
    failed; error_code: of an error of the gateway's own. worker, rank: of its last try; where that was a pair, its
    decode worker's, beside prefill_worker and prefill_rank; num_tries 0: none saw it. cached_tokens: of the prompt's,
    as the answer says. expected_tokens: of output, as charged. Bytes are those of the bodies. None where not known."""

    time: float | str
    request_id: str
    client: str
    method: str
    path: str
    status: int
    outcome: str
    e2e_ms: float
    model: str | None = None
    worker: str | None = None
    rank: int | None = None
    num_tries: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    expected_tokens: int | None = None
    output_tokens: int | None = None
    request_bytes: int = 0
    response_bytes: int = 0
    ttft_ms: float | None = None
    error_phase: str | None = None
    error_code: str | None = None
    prefill_worker: str | None = None
    prefill_rank: int | None = None


class AccessLog:
    """Lines to stderr, stdout or a file. `num_dropped` counts those that could not be written.

    `write`, `flush`, `reopen` and `close` are the event loop's and never block, but for `close`, which waits CLOSE_S
    seconds at most. Someone must call `flush` every now and then: lines wait for it, or for MAX_LINES of them."""

    def __init__(self, target: str) -> None:
        """Begin to write to `target`: "stderr", "stdout" or a path. Raises ConfigError when it cannot be opened."""
        self._target = target
        self._lines: list[AccessLine] = []
        self._encoder = msgspec.json.Encoder()
        self._second = -1
        self._second_text = ""
        self._num_refused = 0
        self._queue: SimpleQueue[tuple[bytes, int]] = SimpleQueue()
        self._bytes_in = 0
        self._sink = _Sink(target, self._queue)
        self._thread = threading.Thread(target=self._sink.run, name="access-log", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        """Lines dropped because the reader is too slow, and lines that could not be written."""
        return self._num_refused + self._sink.num_failed

    def write(self, line: AccessLine) -> None:
        """Take in one line; it is written a little later."""
        self._lines.append(line)
        if len(self._lines) >= MAX_LINES:
            self.flush()

    def flush(self) -> None:
        """Hand the lines so far to the thread."""
        lines = self._lines
        if not lines:
            return
        self._lines = []
        if self._bytes_in - self._sink.bytes_out > MAX_PENDING_BYTES:
            self._num_refused += len(lines)
            return
        for line in lines:
            line.time = self._text(line.time)
        encode = self._encoder.encode
        data = b"\n".join([*map(encode, lines), b""])
        self._bytes_in += len(data)
        self._queue.put((data, len(lines)))

    def reopen(self) -> None:
        """Open the file anew, as after it was moved away; does nothing for stderr and stdout."""
        self.flush()
        self._queue.put((_REOPEN, 0))

    def close(self) -> None:
        """Write what is left, within CLOSE_S seconds."""
        self.flush()
        self._queue.put((_CLOSE, 0))
        self._thread.join(CLOSE_S)

    def _text(self, at: float | str) -> str:
        """`at` as 2026-01-31T10:00:00.123Z; what a second has in common is made once."""
        if isinstance(at, str):
            return at
        second = int(at)
        if second != self._second:
            self._second = second
            self._second_text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return f"{self._second_text}.{int((at - second) * 1000):03d}Z"


class _Sink:
    """The thread's side: it owns the descriptor. Its counters are written by the thread alone."""

    def __init__(self, target: str, queue: SimpleQueue[tuple[bytes, int]]) -> None:
        self._path = None if target in (STDERR, STDOUT) else target
        self._queue = queue
        self._fd = {STDERR: 2, STDOUT: 1}.get(target, -1)
        self._is_failing = False
        self.bytes_out = 0
        self.num_failed = 0
        if self._path is not None:
            try:
                self._fd = _open(self._path)
            except OSError as error:
                raise ConfigError(f"access-log: {self._path}: {_why(error)}") from None

    def run(self) -> None:
        while True:
            data, num_lines = self._queue.get()
            if data is _CLOSE:
                return
            if data is _REOPEN:
                self._reopen()
                continue
            if not self._write(data):
                self.num_failed += num_lines
            self.bytes_out += len(data)

    def _write(self, data: bytes) -> bool:
        view = memoryview(data)
        try:
            while view:
                view = view[_write_some(self._fd, view) :]
        except OSError as error:
            if not self._is_failing:
                log.error("access log: lines are lost: %s", error.strerror)
            self._is_failing = True
            return False
        if self._is_failing:
            log.info("access log: lines are written again")
        self._is_failing = False
        return True

    def _reopen(self) -> None:
        if self._path is None:
            return
        try:
            fd = _open(self._path)
        except OSError as error:
            log.error("access log: %s cannot be opened anew, the old file is kept: %s", self._path, _why(error))
            return
        os.close(self._fd)
        self._fd = fd


def _write_some(fd: int, data: memoryview) -> int:
    """Write some of `data`, however long that takes; the number of bytes."""
    while True:
        try:
            return os.write(fd, data)
        except BlockingIOError:  # standard streams are shared: another process may have made them non-blocking
            poll = select.poll()
            poll.register(fd, select.POLLOUT)
            poll.poll()


def _open(path: str) -> int:
    """Opened without waiting, which for a pipe would be for its reader; what is written then may wait."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK, FILE_MODE)
    os.set_blocking(fd, True)
    return fd


def _why(error: OSError) -> str | None:
    return "nobody reads this pipe, start its reader first" if error.errno == errno.ENXIO else error.strerror
