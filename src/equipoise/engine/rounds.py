"""The rounds of a lockstep group: in each, every rank shows its state and sees that of all others. Nothing here waits.

    apart ──ask──> apart ──a member's post names its epoch──> due
    resting ──it has work, or another rank began, or a newcomer is to be let in──> due
    due ──begin: post──> under way ──finish: all others posted or are gone──> resting

Who has work begins a round, the others join in; so a group without work has no rounds, nobody has to say that a wave
is over, and one rank's work begins the next round for all. Rounds are numbered, and every member counts alike:

    takes part in k     every member for k that posted k; one that is gone and did not is left out. Its last post
                        stands, and it is gone only when it writes no more, so all others decide alike.
    member for k + 1    who took part in k, and the candidate, if any, that the first of them named in k
    newcomer            waits for a post that names it as a member: that round is its first, and waits for it

When no member lives, the server names a newcomer as founder, who begins again as the only one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from equipoise.engine.board import Board

NUM_HEAD = 2
"""Numbers of a post before the epochs of the members: candidate + 1 (0: none) and its epoch."""


class Round(NamedTuple):
    """A round that is complete: who took part, by rank, and what they showed."""

    number: int
    epochs: dict[int, int]
    values: tuple[tuple[float, ...], ...]


class Rounds:
    """One rank's part in the rounds of its group.

    number: of the round that is next, or under way
    members: epoch by rank of who may take part in it, lowest rank first; empty while apart
    """

    def __init__(self, board: Board, rank: int, epoch: int) -> None:
        """The first processes of a group are members from the start, later ones ask to be let in by `ask`."""
        self._board = board
        self._rank = rank
        self._epoch = epoch
        self._has_newcomer = False
        self.number = 1
        self.members = dict.fromkeys(range(board.num_ranks), 1) if epoch == 1 else {}

    def ask(self) -> None:
        """Ask to be let in, when not a member."""
        if not self.members:
            self._board.ask(self._rank, self._epoch)

    def leave(self) -> None:
        """Take part in nothing any more: the others do not wait for this rank."""
        self._board.leave(self._rank, self._epoch)

    # ---------------------------------------------------------------- a round

    def is_due(self, *, has_work: bool) -> bool:
        """Is there a round to take part in, by own work or for the others' sake?"""
        if not self.members and not self._is_let_in():
            return False
        return has_work or self._has_newcomer or self._is_called()

    def _is_called(self) -> bool:
        """Another rank began the next round, or a newcomer asks for one."""
        board, members = self._board, self.members
        for rank in range(board.num_ranks):
            if rank in members and not self.is_gone(rank, members[rank]):
                if board.last_round(rank) >= self.number:
                    return True
            elif board.asking(rank):
                return True
        return False

    def _is_let_in(self) -> bool:
        board = self._board
        for rank in range(board.num_ranks):
            members = named_by(board, rank)
            if members.get(self._rank) == self._epoch:
                self.number, self.members = board.last_round(rank), members
                return True
        if board.is_founder(self._rank, self._epoch):
            self.number = 1 + max(board.last_round(rank) for rank in range(board.num_ranks))
            self.members = {self._rank: self._epoch}
        return bool(self.members)

    def begin(self, values: Sequence[float]) -> None:
        """Post for the round that is due. Once for each round, before `finish`."""
        board = self._board
        epochs = [self.members.get(rank, 0) for rank in range(board.num_ranks)]
        board.rounds.post(self._rank, self.number, (*self._candidate(), *epochs, *values))
        board.begin(self._rank, self.number)

    def _candidate(self) -> tuple[int, int]:
        """The first that asks, one more than its rank, and its epoch."""
        for rank in range(self._board.num_ranks):
            epoch = 0 if rank in self.members else self._board.asking(rank)
            if epoch:
                return rank + 1, epoch
        return 0, 0

    def finish(self) -> Round | None:
        """The round, when it is complete; None when somebody is awaited."""
        posts: dict[int, tuple[float, ...]] = {}
        for rank, epoch in self.members.items():
            is_gone = self.is_gone(rank, epoch)  # first: what it posted before is seen then
            post = self._board.rounds.read(rank, self.number)
            if post is not None:
                posts[rank] = post
            elif not is_gone:
                return None
        epochs = {rank: self.members[rank] for rank in posts}
        first = NUM_HEAD + self._board.num_ranks
        complete = Round(self.number, epochs, tuple([post[first:] for post in posts.values()]))
        self._next_members(epochs, next(iter(posts.values())))
        return complete

    def _next_members(self, epochs: dict[int, int], first: tuple[float, ...]) -> None:
        rank, epoch = int(first[0]) - 1, int(first[1])
        self._has_newcomer = rank >= 0 and rank not in epochs
        members = {**epochs, rank: epoch} if self._has_newcomer else epochs
        self.members = {rank: members[rank] for rank in sorted(members)}
        self.number += 1

    # ---------------------------------------------------------------- who is there

    @property
    def is_complete(self) -> bool:
        """Has every member posted for the round under way, as far as can be seen?"""
        return all(self._board.rounds.has(rank, self.number) for rank in self.members)

    def awaited(self) -> list[int]:
        """Members that have not posted for the round under way."""
        return [rank for rank in self.members if not self._board.rounds.has(rank, self.number)]

    def is_gone(self, rank: int, epoch: int) -> bool:
        """Will that process of `rank` post nothing any more?"""
        return self._board.epoch(rank) != epoch or self._board.has_left(rank, epoch)


def named_by(board: Board, rank: int) -> dict[int, int]:
    """The members, with their epochs, that `rank` named in its last post; none when it never posted."""
    number = board.last_round(rank)
    post = board.rounds.read(rank, number) if number else None
    epochs = () if post is None else post[NUM_HEAD : NUM_HEAD + board.num_ranks]
    return {other: int(epoch) for other, epoch in enumerate(epochs) if epoch}
