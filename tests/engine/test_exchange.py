"""The exchange itself: threads that work, wait, sleep and die, on real shared memory with real bells."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.engine.board import Attention
from equipoise.engine.exchange import Alone, BoardClock, BoardExchange
from equipoise.engine.group import STALE_S, GroupHost
from equipoise.exec.sim import StepPart
from equipoise.sched.rules import RankState

PATIENCE_S = 20.0
"""Far more than a round takes: a test that needs it has found a deadlock."""


class Member(threading.Thread):
    """A rank in a thread: `work` steps of its own, then idle until `over`; it dies after `dies_at` steps."""

    def __init__(self, host: GroupHost, rank: int, work: int, dies_at: int | None, over: threading.Event) -> None:
        super().__init__(daemon=True)
        self.host, self.rank, self.work, self.dies_at, self.over = host, rank, work, dies_at, over
        self.exchange = BoardExchange(host.start(rank), rank)
        self.clock = BoardClock(self.exchange)
        self.seen: dict[int, tuple[RankState, ...]] = {}
        self.parts: dict[int, list[StepPart]] = {}
        self.is_done = threading.Event()
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            self.error = error
        self.is_done.set()

    def _serve(self) -> None:
        while self.dies_at is None or len(self.seen) < self.dies_at:
            if not self.exchange.is_due(has_work=self.work > 0):
                if self.work == 0:  # and not one that is to be let in first
                    self.is_done.set()
                if self.over.is_set():
                    self.exchange.leave()
                    return
                if self.exchange.rest() and not self.over.is_set():
                    self.exchange.bell.listen(PATIENCE_S)
                continue
            state = RankState(self.rank, self.work, self.work % 2 == 1, step_s=self.work / 8)
            states = self.exchange.meet(lambda state=state: state)
            assert self.exchange.round is not None
            number = self.exchange.round.number
            self.seen[number] = states
            self.parts[number] = list(self.clock.begin(StepPart(number, self.rank, 1.0, 0.0)).wait())
            self.work -= self.work > 0

    def wake(self) -> None:
        """As a message would."""
        self.exchange.bell.ring(self.rank)


def run_group(works: list[int], dies_at: dict[int, int], comes_back: int = 0) -> list[Member]:
    """All members, those that came in the place of a dead one last; every thread has ended."""
    host, over = GroupHost(len(works), 1), threading.Event()
    members = [Member(host, rank, work, dies_at.get(rank), over) for rank, work in enumerate(works)]
    for member in members:
        member.start()
    for rank in sorted(dies_at, key=dies_at.__getitem__):  # the later ones wait for the ends of those before
        members[rank].join(PATIENCE_S)
        assert not members[rank].is_alive()
        host.end(rank)
        if comes_back:
            members.append(Member(host, rank, comes_back, None, over))
            members[-1].start()
    for member in members:
        assert member.is_done.wait(PATIENCE_S), f"rank {member.rank} waits for ever"
    over.set()
    for member in members:
        member.wake()
        member.join(PATIENCE_S)
        assert not member.is_alive()
        assert member.error is None, member.error
        member.exchange.bell.close()
    host.close()
    return members


def check_alike(members: list[Member]) -> None:
    states: dict[int, tuple[RankState, ...]] = {}
    parts: dict[int, list[StepPart]] = {}
    for member in members:
        for number, seen in member.seen.items():
            assert states.setdefault(number, seen) == seen
        for number, found in member.parts.items():
            assert parts.setdefault(number, found) == found


@settings(max_examples=15, deadline=None)
@given(data=st.data(), works=st.lists(st.integers(0, 6), min_size=2, max_size=4))
def test_all_who_live_see_the_same_and_do_their_work(data: st.DataObject, works: list[int]) -> None:
    most = max(works)
    mortals = st.dictionaries(st.integers(0, len(works) - 1), st.integers(0, max(0, most - 1)), max_size=len(works) - 1)
    dies_at = data.draw(mortals) if most else {}
    # One rank at least lives to see all rounds, so that those who are to die after some get there.
    immortal = next(rank for rank in range(len(works)) if rank not in dies_at)
    works[immortal] = most + 2
    members = run_group(works, dies_at, comes_back=data.draw(st.integers(0, 2)))
    check_alike(members)
    for member in members:
        assert member.work == 0 or member.dies_at is not None


def test_states_arrive_as_they_were_sent() -> None:
    members = run_group([3, 0], {})
    first = members[0].seen[1]
    assert first == (RankState(0, 3, True, step_s=0.375), RankState(1, 0, False))
    assert [type(value) for value in (first[0].num_waiting, first[0].wants_prefill, first[0].step_s)] == [
        int,
        bool,
        float,
    ]
    assert members[0].exchange.totals.num == members[1].exchange.totals.num == 3
    assert members[0].parts[1] == [StepPart(1, 0, 1, 0), StepPart(1, 1, 1, 0)]


def test_a_rank_that_waits_is_told_from_one_that_hangs() -> None:
    host = GroupHost(2, 0)
    exchange = BoardExchange(host.start(0), 0)
    board = exchange.board
    assert not host.is_waiting(0)
    board.attend(0, Attention.WAITING)
    assert host.is_waiting(0)
    deadline = time.monotonic() + PATIENCE_S
    while host.is_waiting(0):  # it says nothing any more
        assert time.monotonic() < deadline
        time.sleep(STALE_S / 10)
    exchange.bell.close()
    host.close()


def test_a_rank_by_itself_pays_nothing() -> None:
    def state() -> RankState:
        raise AssertionError("nobody asks for it")

    alone = Alone()
    assert [alone.is_due(has_work=True), alone.is_due(has_work=False)] == [True, False]
    assert alone.meet(state) is None
    assert alone.rest()
    assert alone.totals.num == 0
    alone.leave()


def test_who_sleeps_is_rung_when_a_round_begins_and_who_waits_when_it_is_complete() -> None:
    host = GroupHost(3, 0)
    first, asleep, waiting = (BoardExchange(host.start(rank), rank) for rank in range(3))
    assert asleep.rest()
    waiting.board.attend(2, Attention.WAITING)
    first.vigil.call([0, 1, 2], is_complete=False)
    assert [asleep.bell.listen(0), waiting.bell.listen(0)] == [True, False]
    first.vigil.call([0, 1, 2])
    assert [first.bell.listen(0), asleep.bell.listen(0), waiting.bell.listen(0)] == [False, True, True]
    waiting.board.attend(2, Attention.AWAKE)
    first.vigil.call([2])
    assert not waiting.bell.listen(0)
    for each in (first, asleep, waiting):
        each.bell.close()
    host.close()


def test_what_a_killed_server_left_is_removed_and_what_a_living_one_has_is_not() -> None:
    living = GroupHost(2, 0)
    code = "import os; from equipoise.engine.group import GroupHost; host = GroupHost(2, 0)"
    code += "; print(host.start(0).folder, flush=True); os._exit(1)"
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert killed.returncode == 1, killed.stderr
    left = Path(killed.stdout.strip())
    kept = Path(living.start(0).folder)
    GroupHost(2, 0).close()
    assert not left.exists()
    assert (kept / "board").exists()
    living.close()
    assert not kept.exists()
