"""Rounds of a lockstep group: whatever the order in which ranks work, die and come back, all who live see the same.

Every rank is a small process of its own here, stepped by Hypothesis one move at a time: look, begin, finish, land.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from equipoise.engine.board import Board
from equipoise.engine.group import Epochs
from equipoise.engine.rounds import NUM_HEAD, Round, Rounds

MOST_RANKS = 4
MOST_MOVES = 4000
NUM_STATE = 2


def new_board(num_ranks: int, depth: int) -> Board:
    num_values = (NUM_HEAD + num_ranks + NUM_STATE, 1)
    return Board(memoryview(bytearray(Board.num_bytes(num_ranks, num_values, depth))), num_ranks, num_values, depth)


class Rank:
    """The engine loop in small: rounds while there is work, `depth` steps ahead, each a part of the group's step."""

    def __init__(self, board: Board, number: int, epoch: int, depth: int) -> None:
        self.board, self.number, self.epoch, self.depth = board, number, epoch, depth
        self.rounds = Rounds(board, number, epoch)
        self.rounds.ask()
        self.work = 0
        self.num_done = 0
        self.seen: list[Round] = []
        self.landed: list[tuple[int, tuple[float, ...]]] = []
        self.outstanding: list[Round] = []
        self.num_real = 0
        self.doing = self.look

    def look(self) -> bool:
        """Returns whether anything happened."""
        if not self.rounds.is_due(has_work=self.work > 0 or self.num_real > 0):
            return False
        self.rounds.begin((self.work, self.epoch))
        self.doing = self.finish
        return True

    def finish(self) -> bool:
        complete = self.rounds.finish()
        if complete is None:
            return False
        self.seen.append(complete)
        self.board.steps.post(self.number, complete.number, (10 * complete.number + self.number,))
        self.outstanding.append(complete)
        if self.work:
            self.work -= 1
            self.num_real = self.depth + 1
        self.num_real = max(0, self.num_real - 1) if not self.work else self.num_real
        self.num_done += 1
        self.doing = self.land if len(self.outstanding) > self.depth else self.look
        return True

    def land(self) -> bool:
        oldest = self.outstanding[0]
        parts = {}
        for rank, epoch in oldest.epochs.items():
            is_gone = self.rounds.is_gone(rank, epoch)
            part = self.board.steps.read(rank, oldest.number)
            if part is not None:
                parts[rank] = part[0]
            elif not is_gone:
                return False
        for rank, part in parts.items():
            assert part == 10 * oldest.number + rank, "a slot was taken before it was read"
        self.landed.append((oldest.number, tuple(parts.values())))
        self.outstanding.pop(0)
        self.doing = self.look
        return True


class Group(RuleBasedStateMachine):
    """Ranks that work, die at any moment between two moves, and come back."""

    @initialize(num_ranks=st.integers(2, MOST_RANKS), depth=st.integers(0, 2))
    def start(self, num_ranks: int, depth: int) -> None:
        self.board, self.depth = new_board(num_ranks, depth), depth
        self.epochs = Epochs(self.board)
        self.ranks: dict[int, Rank] = {}
        self.all: list[Rank] = []
        # the server waits for all processes before anyone has work
        started = [(rank, self.epochs.start(rank)) for rank in range(num_ranks)]
        for rank, epoch in started:
            self.add(rank, epoch)

    def add(self, rank: int, epoch: int) -> None:
        self.ranks[rank] = Rank(self.board, rank, epoch, self.depth)
        self.all.append(self.ranks[rank])

    @precondition(lambda self: self.ranks)
    @rule(data=st.data(), work=st.integers(1, 4))
    def arrive(self, data: Any, work: int) -> None:
        self.ranks[data.draw(st.sampled_from(sorted(self.ranks)))].work += work

    @precondition(lambda self: self.ranks)
    @rule(data=st.data(), moves=st.integers(1, 6))
    def move(self, data: Any, moves: int) -> None:
        rank = self.ranks[data.draw(st.sampled_from(sorted(self.ranks)))]
        for _ in range(moves):
            rank.doing()

    @precondition(lambda self: self.ranks)
    @rule(rounds=st.integers(1, 5))
    def move_all(self, rounds: int) -> None:
        for _ in range(rounds):
            for rank in list(self.ranks.values()):
                rank.doing()

    @precondition(lambda self: self.ranks)
    @rule(data=st.data())
    def die(self, data: Any) -> None:
        number = data.draw(st.sampled_from(sorted(self.ranks)))
        del self.ranks[number]
        self.epochs.end(number)

    @precondition(lambda self: self.ranks)
    @rule(data=st.data())
    def stop(self, data: Any) -> None:
        """It leaves in good order; its process ends some time later."""
        number = data.draw(st.sampled_from(sorted(self.ranks)))
        if self.ranks[number].doing == self.ranks[number].look:
            self.ranks.pop(number).rounds.leave()

    @precondition(lambda self: len(self.ranks) < self.board.num_ranks)
    @rule(data=st.data())
    def come_back(self, data: Any) -> None:
        number = data.draw(st.sampled_from([n for n in range(self.board.num_ranks) if n not in self.ranks]))
        if self.board.epoch(number) % 2:
            self.epochs.end(number)
        self.add(number, self.epochs.start(number))

    def teardown(self) -> None:
        if not hasattr(self, "board"):
            return
        for number in range(self.board.num_ranks):
            if number not in self.ranks and self.board.epoch(number) % 2:
                self.epochs.end(number)
        for _ in range(MOST_MOVES):
            if not sum(rank.doing() for rank in self.ranks.values()):
                break
        else:
            pytest.fail("the group does not come to rest")
        for rank in self.ranks.values():
            assert rank.work == 0, f"rank {rank.number} could not do its work"
            assert rank.doing == rank.look, f"rank {rank.number} waits for ever"
            assert rank.rounds.members, f"rank {rank.number} was not let in"
        self.check_all_saw_the_same()

    def check_all_saw_the_same(self) -> None:
        rounds: dict[int, Round] = {}
        for rank in self.all:
            numbers = [each.number for each in rank.seen]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
            for each in rank.seen:
                assert rounds.setdefault(each.number, each) == each
        steps: dict[int, tuple[float, ...]] = {}
        for rank in self.all:
            for number, parts in rank.landed:
                assert steps.setdefault(number, parts) == parts


Group.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
test_ranks_that_work_die_and_come_back = Group.TestCase


def test_a_group_without_work_has_no_rounds() -> None:
    board = new_board(3, 1)
    epochs = Epochs(board)
    ranks = [Rank(board, number, epochs.start(number), 1) for number in range(3)]
    ranks[1].work = 2
    while sum(rank.doing() for rank in ranks):
        pass
    numbers = [rank.rounds.number for rank in ranks]
    assert numbers == [numbers[0]] * 3
    assert 3 <= numbers[0] <= 5
    assert not any(rank.doing() for rank in ranks)


def test_nobody_waits_for_a_rank_that_left_or_for_its_process_to_end() -> None:
    board = new_board(2, 1)
    epochs = Epochs(board)
    stays, leaves = (Rank(board, number, epochs.start(number), 1) for number in range(2))
    stays.work = leaves.work = 1
    assert stays.doing()
    assert leaves.doing()  # both began the first round
    leaves.rounds.leave()
    while stays.doing():
        pass
    assert stays.work == 0
    assert [sorted(each.epochs) for each in stays.seen] == [[0, 1], [0]]
    # The step of the first round is landed without the part of the one that left.
    assert stays.landed == [(1, (10.0,))]
