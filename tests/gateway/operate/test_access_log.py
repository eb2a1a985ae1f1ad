"""The access log on real files and pipes."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from equipoise.errors import ConfigError
from equipoise.gateway.operate import access_log
from equipoise.gateway.operate.access_log import AccessLine, AccessLog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

WAIT_S = 20.0


def line(number: int, **fields: Any) -> AccessLine:
    """A line that can be told from others by its id."""
    return AccessLine(
        1_700_000_000.25 + number, f"r{number}", "10.0.0.1", "POST", "/generate", 200, "ok", 1.5, **fields
    )


def until(is_so: Callable[[], bool]) -> None:
    """Wait until `is_so`, within generous bounds."""
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)


def ids(path: Path) -> list[str]:
    """The request ids in a log, in order."""
    return [json.loads(each)["request_id"] for each in path.read_text().splitlines()]


def holds(path: Path, num_lines: int) -> bool:
    """Whether the file has so many lines."""
    return path.exists() and path.read_text().count("\n") == num_lines


@contextlib.contextmanager
def opened(target: str | Path) -> Iterator[AccessLog]:
    """A log that is closed at the end."""
    found = AccessLog(str(target))
    try:
        yield found
    finally:
        found.close()


def test_a_line_has_every_field(tmp_path: Path) -> None:
    target = tmp_path / "access.log"
    with opened(target) as found:
        found.write(line(0, model='m"\n', worker="http://a:1", rank=3, num_tries=2, prompt_tokens=10, ttft_ms=0.5))
        found.write(line(1))
    first, second = map(json.loads, target.read_text().splitlines())
    assert tuple(first) == AccessLine.__struct_fields__
    assert first["time"] == "2023-11-14T22:13:20.250Z"
    assert second["time"] == "2023-11-14T22:13:21.250Z"
    assert (first["model"], first["rank"], first["num_tries"], first["error_phase"]) == ('m"\n', 3, 2, None)
    assert target.stat().st_mode & 0o007 == 0, "others may not read who asked"


def test_lines_are_added_to_a_file_and_come_by_themselves_when_many(tmp_path: Path) -> None:
    target = tmp_path / "access.log"
    full = access_log.MAX_LINES
    for start in (0, 1000):
        with opened(target) as found:
            for number in range(full):
                found.write(line(start + number))
            until(functools.partial(holds, target, full * (1 + start // 1000)))
    assert ids(target) == [f"r{start + number}" for start in (0, 1000) for number in range(full)]


def test_a_file_that_was_moved_away_is_opened_anew(tmp_path: Path) -> None:
    target, moved = tmp_path / "access.log", tmp_path / "access.log.1"
    with opened(target) as found:
        found.write(line(0))
        found.flush()
        until(lambda: ids(target) == ["r0"])
        target.rename(moved)
        found.write(line(1))
        found.reopen()
        found.write(line(2))
        found.flush()
    assert (ids(moved), ids(target)) == (["r0", "r1"], ["r2"])


def test_a_file_that_cannot_be_opened_anew_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    with opened(folder / "access.log") as found:
        folder.rename(tmp_path / "moved")
        found.reopen()
        found.write(line(0))
    assert ids(tmp_path / "moved" / "access.log") == ["r0"]


def test_what_cannot_be_opened_is_a_wrong_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^access-log: .*: No such file or directory"):
        AccessLog(str(tmp_path / "nowhere" / "access.log"))
    with pytest.raises(ConfigError, match=r"^access-log: .*: Is a directory"):
        AccessLog(str(tmp_path))


def test_a_pipe_without_a_reader_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    pipe, target = tmp_path / "pipe", tmp_path / "access.log"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match=r"^access-log: .*pipe: nobody reads this pipe, start its reader first"):
        AccessLog(str(pipe))
    with opened(target) as found:
        target.unlink()
        os.mkfifo(target)
        found.reopen()
        found.write(line(0))
    assert found.num_dropped == 0, "the old file is kept"


def test_a_pipe_that_nobody_reads_holds_nobody_up(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    num_lines = 60_000
    with opened(pipe) as found:
        started = time.monotonic()
        for number in range(num_lines):
            found.write(line(number, model="m" * 200))
        found.flush()
        assert time.monotonic() - started < WAIT_S
        assert found.num_dropped > num_lines / 4, "only so much is kept"
        assert found.num_dropped < num_lines - 10_000
        os.set_blocking(reader, True)
        num_read = 0
        while num_read < num_lines - found.num_dropped:
            num_read += os.read(reader, 2**16).count(b"\n")
        found.write(line(-1))
    assert b'"r-1"' in os.read(reader, 2**16), "it goes on once someone reads"
    os.close(reader)


def test_a_reader_that_left_costs_lines_and_nothing_else(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with opened(pipe) as found:
        os.close(reader)
        for _ in range(2):
            found.write(line(0))
            found.flush()
        until(lambda: found.num_dropped == 2)
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        found.write(line(7))
    assert b'"r7"' in os.read(reader, 2**16)
    os.close(reader)


def test_a_stream_that_another_process_made_non_blocking_loses_nothing() -> None:
    num_lines = 2000
    code = (
        "import os; os.set_blocking(1, False)\n"
        "from equipoise.gateway.operate.access_log import *\n"
        "log = AccessLog('stdout')\n"
        f"for number in range({num_lines}): log.write(AccessLine(0.0, 'r', '', 'GET', '/' * 200, 200, 'ok', 1.0))\n"
        "log.flush(); open(0).read(1); log.close(); raise SystemExit(log.num_dropped)"
    )
    done = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert done.stdin is not None
    assert done.stdout is not None
    time.sleep(0.5)  # the pipe fills meanwhile; without that the test would only check less
    done.stdin.close()
    assert done.stdout.read().count(b"\n") == num_lines
    assert done.wait(WAIT_S) == 0
    done.stdout.close()


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_standard_streams(stream: str) -> None:
    code = (
        "from equipoise.gateway.operate.access_log import *\n"
        f"log = AccessLog({stream!r}); log.write(AccessLine(0.0, 'r', '', 'GET', '/', 200, 'ok', 1.0))\n"
        "log.reopen(); log.close()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    found = {"stdout": done.stdout, "stderr": done.stderr}
    assert re.match(r'\{"time":"1970-01-01T00:00:00.000Z","request_id":"r"', found.pop(stream))
    assert [*found.values()] == [""]
