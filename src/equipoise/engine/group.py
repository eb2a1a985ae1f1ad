"""The server's side of a lockstep group: the memory that its ranks share, and who of them lives."""

from __future__ import annotations

import os
import shutil
import threading
import weakref
from typing import TYPE_CHECKING

from equipoise.engine.board import Attention, Board, group_folder, make_memory
from equipoise.engine.exchange import GroupSpec, num_values, open_board
from equipoise.engine.rounds import named_by

if TYPE_CHECKING:
    from pathlib import Path

STALE_S = 1.0
"""A rank that waits says so much more often."""


class Epochs:
    """Keeps the epochs of a group's processes. Thread-safe: each process has a watcher."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._lock = threading.Lock()

    def start(self, rank: int) -> int:
        """A process of `rank` is about to start; returns its epoch."""
        with self._lock:
            epoch = self._board.epoch(rank) + 1
            assert epoch % 2, f"rank {rank} lives in epoch {epoch - 1}"
            self._board.set_epoch(rank, epoch)
            self._find_founder()
        return epoch

    def end(self, rank: int) -> None:
        """The process of `rank` is certainly gone, if there was one: it writes nothing any more."""
        with self._lock:
            epoch = self._board.epoch(rank)
            self._board.set_epoch(rank, epoch + epoch % 2)
            self._find_founder()

    def _find_founder(self) -> None:
        """When nobody who lives is a member or about to be, let one of them begin anew."""
        board = self._board
        epochs = {rank: board.epoch(rank) for rank in range(board.num_ranks)}
        living = {rank: epoch for rank, epoch in epochs.items() if epoch % 2 and not board.has_left(rank, epoch)}
        named = [named_by(board, rank) for rank in epochs]
        for rank, epoch in living.items():
            if epoch == 1 or board.is_founder(rank, epoch) or any(members.get(rank) == epoch for members in named):
                return
        if living:
            rank = min(living)
            board.set_founder(rank, living[rank])


class GroupHost:
    """A lockstep group's files, made and removed by the process that starts its ranks."""

    def __init__(self, num_ranks: int, num_ahead: int) -> None:
        """`num_ahead`: steps that a rank launches ahead, the scheduler's depth."""
        self._folder = group_folder()
        file = make_memory(self._folder, Board.num_bytes(num_ranks, num_values(num_ranks), num_ahead))
        self._remove = weakref.finalize(self, _remove, self._folder, file)
        self._num_ahead = num_ahead
        self._board = open_board(self._folder, num_ranks, num_ahead)
        self._epochs = Epochs(self._board)

    def start(self, rank: int) -> GroupSpec:
        """A process of `rank` is about to start: what to tell it."""
        epoch = self._epochs.start(rank)
        return GroupSpec(str(self._folder), self._board.num_ranks, epoch, self._num_ahead)

    def end(self, rank: int) -> None:
        """The process of `rank` is gone: the others wait for it no longer."""
        self._epochs.end(rank)

    def is_waiting(self, rank: int) -> bool:
        """Does `rank` live and wait for another one? Then its silence says nothing about it."""
        return self._board.attention(rank) == Attention.WAITING and self._board.silent_s(rank) < STALE_S

    def close(self) -> None:
        """Remove the files; every rank is gone."""
        self._remove()


def _remove(folder: Path, file: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(file)
