"""What the ranks of a group on one host show each other: numbers in shared memory.

Every word has one writer: a rank writes its own line, the server the epochs. A post is a round's number and some
values; the number is written last, so who finds it finds the values too. A post stays until `num_slots` rounds later.

    epoch of a rank     even: no process; odd: the process that was started as the (epoch + 1) / 2-th lives
    attention           awake | asleep (ring when a round begins) | waiting (ring when a round is complete)

A file that is mapped, not multiprocessing's shared memory: the tracker of a process that attaches to that on Python
3.11 removes it for all when the process ends.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import struct
import tempfile
import threading
import time
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

WORD = 8
"""Bytes; all numbers are int64 or float64."""
CACHE_LINE = 8
"""Words that no two ranks share, so that one's writing does not slow down the other's reading."""
STATUS_WORDS = CACHE_LINE
ATTENTION, SEEN_MS, LEFT_EPOCH, ASKS_EPOCH, LAST_ROUND = range(5)
MEMORY = Path("/dev/shm")
FOLDER = "equipoise-group-"
MEMORY_FILE = "board"


class Attention(IntEnum):
    """What a rank is doing, for those who may have to ring."""

    AWAKE = 0
    ASLEEP = 1
    WAITING = 2


class Panel:
    """Posts of one kind: each rank has `num_slots` of them at a time, each of `num_values` numbers."""

    def __init__(self, words: memoryview, first: int, num_slots: int, num_values: int) -> None:
        """`words` of the whole board; the panel begins at word `first`."""
        self._words = words
        self._first = first
        self._num_slots = num_slots
        self._slot_words = 1 + num_values
        self._line_words = _padded(num_slots * self._slot_words)
        self._values = struct.Struct(f"{num_values}d")

    @staticmethod
    def num_words(num_ranks: int, num_slots: int, num_values: int) -> int:
        """Words that a panel takes."""
        return num_ranks * _padded(num_slots * (1 + num_values))

    def post(self, rank: int, round_: int, values: Sequence[float]) -> None:
        """Show `values` as those of `rank` in `round_`; for that rank alone."""
        at = self._at(rank, round_)
        self._words[at] = 0  # nobody must take the values for those of the round before
        _fence()
        self._values.pack_into(self._words, (at + 1) * WORD, *values)
        _fence()
        self._words[at] = round_

    def read(self, rank: int, round_: int) -> tuple[float, ...] | None:
        """What `rank` showed in `round_`; None when it has not, or no longer does."""
        at = self._at(rank, round_)
        if self._words[at] != round_:
            return None
        values = self._values.unpack_from(self._words, (at + 1) * WORD)
        return values if self._words[at] == round_ else None

    def has(self, rank: int, round_: int) -> bool:
        """Has `rank` shown something in `round_`?"""
        return bool(self._words[self._at(rank, round_)] == round_)

    def _at(self, rank: int, round_: int) -> int:
        return self._first + rank * self._line_words + round_ % self._num_slots * self._slot_words


class Board:
    """The memory of a group. `rounds` and `steps` are its panels: states exchanged, and parts of a step."""

    def __init__(self, memory: memoryview, num_ranks: int, num_values: tuple[int, int], num_ahead: int) -> None:
        """`memory`: zeros at first. `num_values`: of a post of each panel. `num_ahead`: steps launched and not landed
        at any time, of one rank."""
        self.num_ranks = num_ranks
        self._words = words = memory.cast("q")
        self._status = _padded(1 + num_ranks)
        rounds = self._status + num_ranks * STATUS_WORDS
        # Who posts round k has all posts of k - 1, so all have read those of k - 2: two slots are enough.
        self.rounds = Panel(words, rounds, 2, num_values[0])
        steps = rounds + Panel.num_words(num_ranks, 2, num_values[0])
        # Who posts step k took part in round k, so all have landed what was launched before step k - 1 - num_ahead.
        self.steps = Panel(words, steps, num_ahead + 1, num_values[1])

    @staticmethod
    def num_bytes(num_ranks: int, num_values: tuple[int, int], num_ahead: int) -> int:
        """Bytes of memory that a board takes."""
        panels = ((2, num_values[0]), (num_ahead + 1, num_values[1]))
        words = _padded(1 + num_ranks) + num_ranks * STATUS_WORDS
        return WORD * (words + sum(Panel.num_words(num_ranks, *panel) for panel in panels))

    # ---------------------------------------------------------------- epochs: the server writes them

    def epoch(self, rank: int) -> int:
        """Of the rank's process, see above."""
        return int(self._words[rank])

    def set_epoch(self, rank: int, epoch: int) -> None:
        """For the server alone, when a process is about to start, and when it is certainly gone."""
        self._words[rank] = epoch
        _fence()

    def is_founder(self, rank: int, epoch: int) -> bool:
        """Is that process to begin the group anew, because no member lives?"""
        return bool(self._words[self.num_ranks] == epoch * self.num_ranks + rank)

    def set_founder(self, rank: int, epoch: int) -> None:
        """For the server alone."""
        self._words[self.num_ranks] = epoch * self.num_ranks + rank
        _fence()

    # ---------------------------------------------------------------- status: each rank writes its own

    def attention(self, rank: int) -> int:
        """An Attention."""
        return int(self._words[self._status + rank * STATUS_WORDS + ATTENTION])

    def attend(self, rank: int, attention: Attention) -> None:
        """Say what `rank` is doing; what is read after this call is newer than that."""
        at = self._status + rank * STATUS_WORDS
        self._words[at + SEEN_MS] = int(time.monotonic() * 1e3)
        self._words[at + ATTENTION] = attention
        _fence()

    def silent_s(self, rank: int) -> float:
        """Seconds since `rank` last said what it is doing; the clock is the machine's."""
        return time.monotonic() - self._words[self._status + rank * STATUS_WORDS + SEEN_MS] / 1e3

    def last_round(self, rank: int) -> int:
        """The last round that `rank` began."""
        return int(self._words[self._status + rank * STATUS_WORDS + LAST_ROUND])

    def begin(self, rank: int, round_: int) -> None:
        """`rank` has posted its state for `round_`; what is read after this call is newer than that."""
        self._words[self._status + rank * STATUS_WORDS + LAST_ROUND] = round_
        _fence()

    def has_left(self, rank: int, epoch: int) -> bool:
        """Has the process of that epoch posted all that it ever will?"""
        return bool(self._words[self._status + rank * STATUS_WORDS + LEFT_EPOCH] == epoch)

    def leave(self, rank: int, epoch: int) -> None:
        """`rank` posts nothing any more."""
        _fence()
        self._words[self._status + rank * STATUS_WORDS + LEFT_EPOCH] = epoch
        _fence()

    def asking(self, rank: int) -> int:
        """The epoch of a living process of `rank` that asks to be let in, or did once; 0 when there is none."""
        epoch = self.epoch(rank)
        asked = self._words[self._status + rank * STATUS_WORDS + ASKS_EPOCH]
        return epoch if epoch % 2 and asked == epoch and not self.has_left(rank, epoch) else 0

    def ask(self, rank: int, epoch: int) -> None:
        """`rank` wants to be let in."""
        self._words[self._status + rank * STATUS_WORDS + ASKS_EPOCH] = epoch
        _fence()


_lock = threading.Lock()


def _fence() -> None:
    """Order the memory accesses before and after: taking a lock does that on every processor that Python runs on."""
    with _lock:
        pass


def _padded(num_words: int) -> int:
    return -(-num_words // CACHE_LINE) * CACHE_LINE


def group_folder() -> Path:
    """A new folder for a group's files, private to this user and in memory where there is such a place. Those that
    killed servers left behind are removed."""
    parent = MEMORY if os.access(MEMORY, os.W_OK | os.X_OK) else Path("/tmp")
    for folder in parent.glob(f"{FOLDER}*"):
        if _is_abandoned(folder):
            shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=FOLDER, dir=parent))


def _is_abandoned(folder: Path) -> bool:
    """The server that made a folder holds a lock on its memory as long as it lives, and nobody else does."""
    try:
        file = os.open(folder / MEMORY_FILE, os.O_RDWR)
    except OSError:  # another user's, or just being made
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(file)
    return True


def make_memory(folder: Path, num_bytes: int) -> int:
    """Make the memory of a group in `folder`, all zeros; returns the file's descriptor, locked while it is open."""
    made = folder / f"{MEMORY_FILE}.new"
    file = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.truncate(file, num_bytes)
    fcntl.flock(file, fcntl.LOCK_EX)
    made.rename(folder / MEMORY_FILE)
    return file


def map_memory(folder: Path) -> memoryview:
    """The memory of the group in `folder`, shared by all who map it."""
    file = os.open(folder / MEMORY_FILE, os.O_RDWR)
    try:
        return memoryview(mmap.mmap(file, 0))
    finally:
        os.close(file)
