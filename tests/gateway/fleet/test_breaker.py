"""The breaker: its states by tables, its promises on random rows of events."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.gateway.fleet.breaker import Breaker, BreakerLimits

LIMITS = BreakerLimits(max_failures=3, window_s=10.0, min_failure_share=0.5, open_s=4.0, max_open_s=10.0,
                       max_probes=2, num_successes=2)  # fmt: skip


def opened(now: float = 0.0) -> Breaker:
    """A breaker that has just opened."""
    breaker = Breaker(LIMITS)
    for _ in range(3):
        breaker.failed(breaker.epoch, now)
    assert breaker.state == "open"
    return breaker


def half_opened() -> Breaker:
    """A breaker that is half open since second 4."""
    breaker = opened()
    breaker.tick(4.0)
    assert breaker.state == "half_open"
    return breaker


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ("f0 f1", "closed"),
        ("f0 f1 f2", "open"),
        ("f0 f1 f10", "open"),  # the window is closed on both sides
        ("f0 f1 f11", "closed"),  # the first one is too long ago
        ("f0 f1 f11 f11.5", "closed"),
        ("f0 f9 f11 f12", "open"),
        ("s s s s s s f0 f1 f2", "open"),  # successes before the first failure say nothing of now
        ("f0 s f1 s f2 s f3", "open"),
        ("f0 s s f1 s s f2", "closed"),  # 3 failures of 7 tries
        ("f0 r r r r f1 f2", "open"),  # refusals and cancelled tries are no tries
    ],
)
def test_opens_by_number_window_and_share(events: str, state: str) -> None:
    breaker = Breaker(LIMITS)
    for event in events.split():
        breaker.began()
        if event[0] == "f":
            breaker.failed(breaker.epoch, float(event[1:]))
        elif event[0] == "s":
            breaker.succeeded(breaker.epoch)
        else:
            breaker.ended(breaker.epoch)
    assert breaker.state == state
    assert breaker.allows == (state == "closed")


def test_half_opens_when_its_time_is_over_and_not_before() -> None:
    breaker = opened(now=1.0)
    assert breaker.next_change_at == 5.0
    assert not breaker.tick(4.99)
    assert not breaker.allows
    assert breaker.tick(5.0)
    assert breaker.state == "half_open"
    assert breaker.next_change_at == inf


def test_half_open_lets_a_bounded_number_of_probes_through() -> None:
    breaker = half_opened()
    assert not breaker.began()
    assert breaker.allows
    assert breaker.began()
    assert not breaker.allows
    assert breaker.ended(breaker.epoch)  # one was cancelled: its place is free again
    assert breaker.allows


def test_closes_after_successes_in_a_row() -> None:
    breaker = half_opened()
    breaker.began()
    breaker.succeeded(breaker.epoch)
    assert breaker.state == "half_open"
    breaker.began()
    breaker.succeeded(breaker.epoch)
    assert breaker.state == "closed"


def test_stays_open_longer_each_time_a_probe_fails_and_forgets_that_once_closed() -> None:
    breaker, now, lasted = opened(), 0.0, []
    for _ in range(4):
        lasted.append(breaker.next_change_at - now)
        now = breaker.next_change_at
        breaker.tick(now)
        breaker.began()
        breaker.failed(breaker.epoch, now)
    assert lasted == [4.0, 8.0, 10.0, 10.0]
    breaker.tick(breaker.next_change_at)
    for _ in range(2):
        breaker.began()
        breaker.succeeded(breaker.epoch)
    for _ in range(3):
        breaker.failed(breaker.epoch, 100.0)
    assert breaker.next_change_at == 104.0


@pytest.mark.parametrize("how", ["failed", "succeeded", "ended"])
def test_what_began_before_the_last_change_says_nothing(how: str) -> None:
    breaker = half_opened()
    breaker.began()
    for _ in range(3):
        assert not (breaker.failed(0, 5.0) if how == "failed" else getattr(breaker, how)(0))
    assert (breaker.state, breaker.num_probes) == ("half_open", 1)


def test_reset_closes_it() -> None:
    breaker = opened()
    assert breaker.reset()
    assert breaker.allows
    assert not breaker.reset()


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["begin", "ok", "fail", "end"]), st.floats(0.0, 5.0)), max_size=200))
def test_probes_are_bounded_and_all_ends(events: list[tuple[str, float]]) -> None:
    breaker, now, running = Breaker(LIMITS), 0.0, list[int]()
    for event, step in events:
        now += step
        breaker.tick(now)
        before = breaker.allows
        if event == "begin":
            if not breaker.allows:
                continue
            changed = breaker.began()
            running.append(breaker.epoch)
        elif running:
            epoch = running.pop(0)
            if event == "fail":
                changed = breaker.failed(epoch, now)
            else:
                changed = breaker.succeeded(epoch) if event == "ok" else breaker.ended(epoch)
        else:
            continue
        assert changed or breaker.allows == before
        assert 0 <= breaker.num_probes <= LIMITS.max_probes
        assert (breaker.state == "open") == (breaker.next_change_at < inf)
        assert breaker.num_probes == (running.count(breaker.epoch) if breaker.state == "half_open" else 0)
