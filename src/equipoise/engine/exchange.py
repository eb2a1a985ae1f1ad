"""How the ranks of a lockstep group tell each other their states, once for each step that any of them runs.

`Alone` is a rank by itself: nothing to tell, nothing to pay. `BoardExchange` is for the ranks of one host: rounds
(`rounds`) in shared memory (`board`), and bells to wake who sleeps (`bell`). Ranks of several hosts need one more.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import fields
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar, get_type_hints

import msgspec

from equipoise.engine.bell import Bell
from equipoise.engine.board import Attention, Board, map_memory
from equipoise.engine.rounds import NUM_HEAD, Rounds
from equipoise.exec.sim import StepPart
from equipoise.sched.rules import RankState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from equipoise.engine.rounds import Round

SPINS = 20
"""Looks, with the processor offered to others in between, before a rank that waits goes to sleep."""
SLICE_S = 0.01
"""A rank that waits looks by itself so often: after the death of another nobody rings."""

_Found = TypeVar("_Found")


class Exchange(Protocol):
    """What the engine loop needs of the other ranks. All ranks of a group call `meet` equally often."""

    def is_due(self, *, has_work: bool) -> bool:
        """Is there a step to take part in, by own work or for the others' sake?"""
        ...

    def meet(self, state: Callable[[], RankState]) -> tuple[RankState, ...] | None:
        """Tell the others this rank's state, and wait for theirs: by rank, this one's included, the same on all ranks.
        None where there are no others. To be called when, and only when, `is_due` says so."""
        ...

    def rest(self) -> bool:
        """This rank is about to wait for messages; is it woken when the others need it? False: they do already."""
        ...

    def leave(self) -> None:
        """Take part in nothing any more; the others do not wait for this rank."""
        ...

    @property
    def totals(self) -> ExchangeTotals:
        """What it took so far."""
        ...


class ExchangeTotals(NamedTuple):
    """Meetings, and the seconds that they took, waiting for the others included."""

    num: int = 0
    seconds: float = 0.0


class Alone:
    """A rank without others."""

    totals = ExchangeTotals()

    def is_due(self, *, has_work: bool) -> bool:
        return has_work

    def meet(self, state: Callable[[], RankState]) -> tuple[RankState, ...] | None:
        return None

    def rest(self) -> bool:
        return True

    def leave(self) -> None:
        """Nobody waits."""


# ---------------------------------------------------------------- ranks of one host


class GroupSpec(msgspec.Struct, frozen=True):
    """What a rank is told of its group: where its files are, how many ranks it has, which of its processes this is,
    and how many steps a rank launches ahead."""

    folder: str
    num_ranks: int
    epoch: int
    num_ahead: int


def open_board(folder: Path, num_ranks: int, num_ahead: int) -> Board:
    """The memory of a group, which is in `folder`."""
    return Board(map_memory(folder), num_ranks, num_values(num_ranks), num_ahead)


def num_values(num_ranks: int) -> tuple[int, int]:
    """Of the two kinds of posts on a board: states, and parts of steps."""
    return NUM_HEAD + num_ranks + len(_NAMES), len(StepPart._fields)


class Vigil:
    """How a rank waits for others: a few looks, then asleep until it is rung."""

    def __init__(self, board: Board, bell: Bell, rank: int) -> None:
        self._board = board
        self._bell = bell
        self._rank = rank

    def until(self, look: Callable[[], _Found | None], awaited: Callable[[], Iterable[int]]) -> _Found:
        """What `look` finds at last. `awaited`: who might have slept through its ring."""
        for _ in range(SPINS):
            found = look()
            if found is not None:
                return found
            _let_others_run()
        while True:
            self._board.attend(self._rank, Attention.WAITING)
            found = look()
            if found is not None:
                self._board.attend(self._rank, Attention.AWAKE)
                return found
            if not self._bell.listen(SLICE_S):
                self.call(awaited())

    def call(self, ranks: Iterable[int], *, is_complete: bool = True) -> None:
        """Ring for those of `ranks` that sleep and, if the round `is_complete`, for those that wait for it."""
        for rank in ranks:
            attention = self._board.attention(rank) if rank != self._rank else Attention.AWAKE
            if attention == Attention.ASLEEP or (is_complete and attention == Attention.WAITING):
                self._bell.ring(rank)


class BoardExchange:
    """An Exchange between processes of one host."""

    def __init__(self, spec: GroupSpec, rank: int) -> None:
        folder = Path(spec.folder)
        self.board = open_board(folder, spec.num_ranks, spec.num_ahead)
        self.bell = Bell(folder, rank)
        self.vigil = Vigil(self.board, self.bell, rank)
        self.rank = rank
        self.round: Round | None = None
        self._rounds = Rounds(self.board, rank, spec.epoch)
        self._has_asked = spec.epoch == 1
        self._num = 0
        self._seconds = 0.0

    @property
    def totals(self) -> ExchangeTotals:
        return ExchangeTotals(self._num, self._seconds)

    def is_due(self, *, has_work: bool) -> bool:
        if not self._has_asked:
            self._has_asked = True
            self._rounds.ask()
            self.vigil.call(range(self.board.num_ranks))
        return self._rounds.is_due(has_work=has_work)

    def meet(self, state: Callable[[], RankState]) -> tuple[RankState, ...]:
        began_s = time.monotonic()
        rounds = self._rounds
        self.board.attend(self.rank, Attention.AWAKE)
        rounds.begin(_pack(state()))
        self.vigil.call(rounds.members, is_complete=not rounds.awaited())
        self.round = self.vigil.until(rounds.finish, rounds.awaited)
        self._num += 1
        self._seconds += time.monotonic() - began_s
        return tuple([_unpack(values) for values in self.round.values])

    def rest(self) -> bool:
        self.bell.listen(0)
        self.board.attend(self.rank, Attention.ASLEEP)
        return not self.is_due(has_work=False)

    def leave(self) -> None:
        self._rounds.leave()
        self.vigil.call(range(self.board.num_ranks))

    def is_gone(self, rank: int, epoch: int) -> bool:
        """Will that process of `rank` show nothing any more?"""
        return self._rounds.is_gone(rank, epoch)


class BoardClock:
    """A GroupClock for simulated steps: what a collective inside the step does on real hardware."""

    def __init__(self, exchange: BoardExchange) -> None:
        self._exchange = exchange

    def begin(self, part: StepPart) -> BoardParts:
        """This rank's part of the step that the last round was for."""
        exchange = self._exchange
        assert exchange.round is not None, "a step comes after a round"
        exchange.board.steps.post(exchange.rank, exchange.round.number, part)
        parts = BoardParts(exchange, exchange.round)
        exchange.vigil.call(exchange.round.epochs, is_complete=parts.done())
        return parts


class BoardParts:
    """Parts of a step, of all who took part in its round."""

    def __init__(self, exchange: BoardExchange, round_: Round) -> None:
        self._exchange = exchange
        self._round = round_

    def done(self) -> bool:
        """Would `wait` return at once?"""
        return not self._awaited()

    def wait(self) -> Sequence[StepPart]:
        """The parts, by rank; those of ranks that died meanwhile are left out."""
        return self._exchange.vigil.until(self._look, self._awaited)

    def _awaited(self) -> list[int]:
        steps, number = self._exchange.board.steps, self._round.number
        return [rank for rank in self._round.epochs if not steps.has(rank, number)]

    def _look(self) -> Sequence[StepPart] | None:
        parts = []
        for rank, epoch in self._round.epochs.items():
            is_gone = self._exchange.is_gone(rank, epoch)  # first: what it showed before is seen then
            values = self._exchange.board.steps.read(rank, self._round.number)
            if values is not None:
                parts.append(StepPart(*values))
            elif not is_gone:
                return None
        return parts


_let_others_run: Callable[[], object] = os.sched_yield if sys.platform == "linux" else partial(time.sleep, 0)
_KINDS: tuple[Callable[[float], int | float], ...] = tuple(
    get_type_hints(RankState)[field.name] for field in fields(RankState)
)
_NAMES = tuple(field.name for field in fields(RankState))
_pack: Callable[[RankState], tuple[float, ...]] = attrgetter(*_NAMES)


def _unpack(values: Sequence[float]) -> RankState:
    return RankState(*[kind(value) for kind, value in zip(_KINDS, values, strict=True)])  # type: ignore[arg-type]
