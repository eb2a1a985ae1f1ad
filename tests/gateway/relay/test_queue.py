"""The queue: bounded, fair between keys, and nothing in it is lost."""

from __future__ import annotations

from collections import Counter, defaultdict, deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from equipoise.errors import QueueFullError
from equipoise.gateway.relay.queue import FairQueue


def queue(max_inflight: int | None = 1, max_waiting: int = 8) -> FairQueue[str]:
    return FairQueue(max_inflight, max_waiting, lambda item, error: None)


def order(waiting: FairQueue[str], num_items: int) -> list[str]:
    """Items in the order in which they go ahead."""
    gone = []
    for _ in range(num_items):
        waiting.leave(0.0)
        item = waiting.next()
        assert item is not None
        gone.append(item)
    return gone


def test_without_a_limit_nothing_waits() -> None:
    free = queue(None)
    assert all(free.enter(b"k", str(number), 0.0) for number in range(1000))
    assert (free.num_inflight, free.num_waiting) == (1000, 0)


def test_keys_take_turns() -> None:
    waiting = queue()
    assert waiting.enter(b"", "first", 0.0)
    for item in ("a1", "a2", "a3", "b1", "b2", "c1"):
        assert not waiting.enter(item[:1].encode(), item, 0.0)
    assert waiting.next() is None
    assert order(waiting, 6) == ["a1", "b1", "c1", "a2", "b2", "a3"]
    assert waiting.num_inflight == 1


def test_a_full_queue_refuses_a_key_that_has_its_share() -> None:
    waiting = queue(1, 2)
    for item in ("a1", "a2", "a3"):
        waiting.enter(b"a", item, 0.0)
    with pytest.raises(QueueFullError):
        waiting.enter(b"a", "a4", 0.0)
    assert waiting.num_waiting == 2


def test_a_full_queue_takes_in_another_key_in_place_of_the_last_of_the_longest_line() -> None:
    gone: list[str] = []
    waiting: FairQueue[str] = FairQueue(1, 4, lambda item, error: gone.append(item))
    for item in ("a0", "a1", "a2", "a3", "a4"):
        waiting.enter(b"a", item, 0.0)
    assert not waiting.enter(b"b", "b1", 0.0)
    assert not waiting.enter(b"b", "b2", 0.0)
    with pytest.raises(QueueFullError):
        waiting.enter(b"b", "b3", 0.0)
    assert gone == ["a4", "a3"]
    assert order(waiting, 4) == ["a1", "b1", "a2", "b2"]


def test_a_queue_of_no_places_refuses_at_once() -> None:
    waiting = queue(1, 0)
    waiting.enter(b"a", "a1", 0.0)
    with pytest.raises(QueueFullError):
        waiting.enter(b"b", "b1", 0.0)


def test_retry_after_is_what_the_queue_needs_at_its_pace() -> None:
    waiting = queue(1, 100)
    for number in range(101):
        waiting.enter(b"a", str(number), 0.0)
    for step in range(1, 61):
        waiting.leave(step * 0.1)
        waiting.next()
    assert waiting.num_waiting == 40
    assert waiting.retry_after_s in (4, 5)
    for _ in range(60):
        waiting.leave(1e6)
    assert waiting.retry_after_s <= 60


def test_a_raised_limit_lets_more_ahead() -> None:
    waiting = queue()
    for item in ("a", "b", "c"):
        waiting.enter(b"k", item, 0.0)
    waiting.set_limit(3)
    assert [waiting.next(), waiting.next(), waiting.next()] == ["b", "c", None]


class Turns(RuleBasedStateMachine):
    """Random comings and goings against a model that rescans everything."""

    def __init__(self) -> None:
        super().__init__()
        self.num_items = 0
        self.inflight: list[int] = []
        self.lines: dict[bytes, deque[int]] = defaultdict(deque)
        self.num_displaced = 0
        self.ended: Counter[str] = Counter()
        self.limit, self.max_waiting = 3, 6
        self.queue: FairQueue[int] = FairQueue(self.limit, self.max_waiting, self.displaced)
        self.passed_over: dict[int, Counter[bytes]] = {}

    def displaced(self, item: int, error: QueueFullError) -> None:
        assert 1 <= error.retry_after_s <= 60
        line = next(line for line in self.lines.values() if item in line)
        assert line[-1] == item
        assert len(line) == max(len(other) for other in self.lines.values()) or len(line) > 1
        line.pop()
        self.ended["displaced"] += 1

    @rule(key=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def enter(self, key: bytes) -> None:
        self.num_items += 1
        item = self.num_items
        try:
            goes = self.queue.enter(key, item, float(item))
        except QueueFullError:
            assert sum(map(len, self.lines.values())) == self.max_waiting
            self.ended["refused"] += 1
            return
        if goes:
            assert not any(self.lines.values())
            self.inflight.append(item)
        else:
            self.lines[key].append(item)
            self.passed_over[item] = Counter()

    @precondition(lambda self: self.inflight)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.inflight.pop(data.draw(st.integers(0, len(self.inflight) - 1)))
        self.ended["done"] += 1
        self.queue.leave(float(self.num_items))
        item = self.queue.next()
        if not any(self.lines.values()):
            assert item is None
            return
        assert item is not None
        key = next(key for key, line in self.lines.items() if line and line[0] == item)
        self.lines[key].popleft()
        self.inflight.append(item)
        for line in self.lines.values():
            if line:
                self.passed_over[line[0]][key] += 1

    @precondition(lambda self: any(self.lines.values()))
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(sorted(item for line in self.lines.values() for item in line)))
        assert self.queue.withdraw(item)
        assert not self.queue.withdraw(item)
        for line in self.lines.values():
            if item in line:
                line.remove(item)
        self.ended["withdrawn"] += 1

    @invariant()
    def sums_agree(self) -> None:
        num_waiting = sum(map(len, self.lines.values()))
        assert 1 <= self.queue.retry_after_s <= 60
        assert self.queue.num_inflight == len(self.inflight) <= self.limit
        assert self.queue.num_waiting == num_waiting <= self.max_waiting
        assert num_waiting == 0 or len(self.inflight) == self.limit
        assert self.num_items == len(self.inflight) + num_waiting + sum(self.ended.values())

    @invariant()
    def the_first_in_line_is_passed_over_by_no_key_twice(self) -> None:
        for line in self.lines.values():
            if line:
                assert max(self.passed_over[line[0]].values(), default=0) <= 2


Turns.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
test_turns = Turns.TestCase
