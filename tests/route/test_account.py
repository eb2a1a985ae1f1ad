"""Charges and reports: tables, and a random life of a worker against a rescan of all that happened."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.route.rig import report, worker

from equipoise.route.account import REPORT_LAG_S, WorkerLoad


def account(num_ranks=1):
    return WorkerLoad("w", num_ranks).ranks[0]


def test_without_a_feed_all_charges_count_until_they_end():
    rank = account()
    first, second = rank.charge(100, 20, 0.0), rank.charge(50, 5, 1.0)
    assert (rank.load(), rank.active, rank.num_active, rank.worker.load()) == (175, 175, 2, 175)
    second.end(2.0)
    first.end(3.0, 7)
    assert (rank.load(), rank.active, rank.num_active, rank.worker.load()) == (0, 0, 0, 0)


def test_a_report_includes_what_had_time_to_arrive_and_nothing_younger():
    rank = account()
    rank.charge(100, 20, 0.0)
    young = rank.charge(50, 5, 1.0)
    rank.report(report(tokens=90, taken_at=1.0 + REPORT_LAG_S / 2))
    assert (rank.pending, rank.load()) == (55, 145)
    assert not young.is_seen
    rank.report(report(tokens=150, taken_at=1.0 + REPORT_LAG_S))
    assert (rank.pending, rank.load()) == (0, 150)
    assert young.is_seen


def test_what_ended_since_the_report_is_taken_off_until_the_next():
    rank = account()
    charge = rank.charge(100, 20, 0.0)
    rank.report(report(tokens=500, taken_at=1.0))
    charge.end(1.5, 30)
    assert (rank.gone, rank.load()) == (130, 370)
    rank.report(report(tokens=370, taken_at=1.4))  # still includes it
    assert (rank.gone, rank.load()) == (130, 240)
    rank.report(report(tokens=370, taken_at=1.6))
    assert (rank.gone, rank.load()) == (0, 370)


def test_a_report_that_is_late_may_include_what_has_ended_already():
    rank = account()
    rank.report(report(taken_at=0.5))
    rank.charge(100, 20, 1.0).end(2.1, 5)
    rank.report(report(tokens=105, taken_at=2.0))
    assert (rank.gone, rank.load()) == (105, 0)


def test_a_report_of_the_moment_at_which_a_request_ended_does_not_include_it():
    rank = account()
    first, second = rank.charge(100, 20, 0.0), rank.charge(50, 5, 0.0)
    rank.report(report(tokens=155, taken_at=1.0))
    first.end(2.0, 20)
    rank.report(report(tokens=55, taken_at=2.0))
    second.end(2.0, 5)
    assert (rank.gone, rank.load()) == (0, 55)


def test_of_a_request_whose_output_is_unknown_the_prompt_is_taken_off():
    rank = account()
    charge = rank.charge(100, 2000, 0.0)
    rank.report(report(tokens=110, taken_at=1.0))
    charge.end(1.1)
    assert rank.load() == 10


def test_load_is_never_below_zero():
    rank = account()
    charge = rank.charge(100, 0, 0.0)
    rank.report(report(tokens=40, taken_at=1.0))
    charge.end(1.1, 10)
    assert rank.load() == rank.worker.load() == 0


def test_what_went_never_hides_what_is_pending():
    rank = account()
    charge = rank.charge(100, 0, 0.0)
    rank.report(report(tokens=40, taken_at=1.0))
    charge.end(1.1, 10**12)  # as a wrong usage says
    rank.charge(300, 50, 1.2)
    assert rank.load() == rank.worker.load() == 350


@pytest.mark.parametrize("taken_at", [1.0, 0.5])
def test_the_same_report_again_and_an_older_one_change_nothing(taken_at):
    rank = account()
    rank.report(report(tokens=40, taken_at=1.0))
    rank.report(report(tokens=90, taken_at=taken_at, capacity=5))
    assert (rank.load(), rank.reported_at, rank.max_total_tokens) == (40, 1.0, None)


def test_a_charge_ends_once():
    rank = account()
    charge = rank.charge(100, 0, 0.0)
    charge.end(1.0, 5)
    charge.end(2.0, 500)
    assert (rank.active, rank.num_active, rank.pending, charge.ended_at) == (0, 0, 0, 1.0)


def test_a_feed_that_breaks_leaves_charges_alone_and_comes_back():
    load = WorkerLoad("w", 2)
    load.report([report(0, 500, 1.0), report(1, 700, 1.0)])
    load.check_ages(2.0, 5.0)
    load.charge(1, 60, 4, 2.0)
    assert (load.load(), load.feed_ok) == (1264, True)
    load.check_ages(9.0, 5.0)
    assert (load.load(), load.feed_ok) == (64, False)
    assert all(rank.is_live for rank in load.ranks)
    load.report([report(0, 300, 10.0), report(1, 100, 10.0)])
    load.check_ages(10.0, 5.0)
    assert (load.load(), load.feed_ok) == (400, True)


def test_what_ended_before_a_feed_broke_is_not_taken_off_when_it_is_back():
    load = WorkerLoad("w")
    charge = load.charge(0, 60, 4, 0.0)
    load.report([report(0, 60, 1.0)])
    charge.end(6.0, 4)
    load.check_ages(9.0, 5.0)
    load.report([report(0, 500, 5.5)])
    assert load.load() == 500


def test_one_stale_rank_is_left_out_until_it_reports_again():
    load = WorkerLoad("w", 2)
    load.report([report(0, 500, 1.0, capacity=1000), report(1, 700, 9.0, capacity=1000)])
    load.check_ages(9.0, 5.0)
    assert [rank.is_live for rank in load.ranks] == [False, True]
    assert (load.load(), load.num_live, load.capacity, load.feed_ok) == (700, 1, 1000, True)
    load.report([report(0, 400, 10.0, capacity=1000)])
    load.check_ages(10.0, 5.0)
    assert (load.load(), load.num_live, load.capacity) == (1100, 2, 2000)


def test_a_rank_that_never_reported_is_stale_beside_one_that_does():
    load = WorkerLoad("w", 2)
    load.report([report(0, 500, 1.0)])
    load.check_ages(1.0, 5.0)
    assert [rank.is_stale for rank in load.ranks] == [False, True]


def test_ranks_that_the_worker_does_not_have_are_ignored():
    load = WorkerLoad("w", 1)
    load.report([report(7, 500, 1.0)])
    assert load.load() == 0


@pytest.mark.parametrize("rank", [None, 5, -1])
def test_a_request_of_unknown_rank_is_charged_to_the_least_loaded_live_one(rank):
    load = worker("w", 500, 100, 50)
    load.ranks[2].is_dead = True
    assert load.charge(rank, 10, 0, 2.0).account is load.ranks[1]
    assert load.load() == 610


def test_when_no_rank_is_live_all_count():
    load = worker("w", 500, 100)
    load.ranks[0].is_dead = load.ranks[1].is_dead = True
    load.charge(None, 10, 0, 2.0)
    assert (load.load(), load.num_live) == (610, 2)


def test_queue_is_what_waits_and_what_no_report_includes():
    load = worker("w", 500, 100, waiting=3)
    assert load.queue() == 6
    load.charge(0, 10, 0, 2.0)
    assert load.queue() == 7
    load.check_ages(100.0, 5.0)
    assert load.queue() == 1


def test_throughput_remembers_what_the_worker_can_do():
    load = worker("w", 500, throughput=1000.0)
    assert load.throughput() == 1000.0
    load.report([report(0, 0, 2.0, throughput=3.0)])
    assert 900 < load.throughput() < 1000
    assert worker("w", 1).throughput() == 0.0


def test_throughput_is_of_live_ranks():
    load = worker("w", 500, 500, throughput=1000.0)
    assert load.throughput() == 2000.0
    load.ranks[0].is_dead = True
    assert load.throughput() == 1000.0


def test_memory_without_a_feed_is_bounded_though_the_first_request_never_ends():
    rank = account()
    rank.charge(1, 1, 0.0)
    for i in range(10_000):
        rank.charge(1, 1, float(i)).end(i + 0.5)
    assert len(rank._unseen) < 200


class Life(RuleBasedStateMachine):
    """A worker of three ranks. `records`: [charge, rank, tokens, epoch in which it ended with a feed]."""

    def __init__(self):
        super().__init__()
        self.load = WorkerLoad("w", 3)
        self.now = 10.0
        self.records = []
        self.taken_at = [None] * 3
        self.reported = [0] * 3
        self.has_feed = [False] * 3
        self.epoch = [0] * 3

    @rule(rank=st.integers(0, 2), prompt=st.integers(1, 5000), output=st.integers(0, 4000))
    def charge(self, rank, prompt, output):
        self.records.append([self.load.charge(rank, prompt, output, self.now), rank, prompt, output, None, None])

    @precondition(lambda self: self.records)
    @rule(data=st.data(), num_output=st.none() | st.integers(0, 5000))
    def end(self, data, num_output):
        record = data.draw(st.sampled_from(self.records))
        charge, rank, prompt = record[:3]
        if record[4] is None:
            record[4] = self.now
            if self.has_feed[rank]:
                record[5] = (self.epoch[rank], prompt + (num_output or 0))
        charge.end(self.now, num_output)

    @rule(seconds=st.sampled_from([0.01, 0.05, 0.3, 2.0]))
    def wait(self, seconds):
        self.now += seconds

    @rule(rank=st.integers(0, 2), tokens=st.integers(0, 50_000), age=st.sampled_from([0.0, 0.06, 0.2, 1.0, 3.0]))
    def report(self, rank, tokens, age):
        taken_at = self.now - age
        self.load.report([report(rank, tokens, taken_at, capacity=100_000, waiting=2)])
        if self.taken_at[rank] is None or taken_at > self.taken_at[rank]:
            self.taken_at[rank], self.reported[rank], self.has_feed[rank] = taken_at, tokens, True

    @rule()
    def check(self):
        self.load.check_ages(self.now, 2.0)
        for rank in range(3):
            taken_at = self.taken_at[rank]
            if self.has_feed[rank] and self.now - taken_at > 2.0:
                self.has_feed[rank] = False
                self.epoch[rank] += 1

    @rule(rank=st.integers(0, 2), is_dead=st.booleans())
    def die(self, rank, is_dead):
        self.load.ranks[rank].is_dead = is_dead

    @invariant()
    def equals_a_rescan(self):
        for rank, account in enumerate(self.load.ranks):
            own = [record for record in self.records if record[1] == rank]
            running = [record for record in own if record[4] is None]
            pending = [record for record in running if not self.includes(rank, record)]
            assert account.active == sum(record[2] + record[3] for record in running)
            assert account.num_active == len(running)
            assert account.pending == sum(record[2] + record[3] for record in pending)
            assert account.num_pending == len(pending)
            assert account.gone == sum(record[5][1] for record in own if self.is_gone(rank, record))
            believed = max(0, self.reported[rank] - account.gone) + account.pending
            assert account.load() == (believed if self.has_feed[rank] else account.active)

    def includes(self, rank, record):
        return self.taken_at[rank] is not None and record[0].taken_at + REPORT_LAG_S <= self.taken_at[rank]

    def is_gone(self, rank, record):
        with_feed = record[5] is not None and self.has_feed[rank] and record[5][0] == self.epoch[rank]
        return with_feed and self.includes(rank, record) and record[4] > self.taken_at[rank]

    @invariant()
    def worker_is_the_sum_of_its_live_ranks(self):
        ranks = self.load.ranks
        live = [each for each in ranks if each.is_live] or ranks
        assert self.load.load() == sum(each.load() for each in live)
        assert self.load.num_active == sum(each.num_active for each in ranks)
        waiting = [each.num_waiting + each.num_pending if each.has_feed else each.num_active for each in live]
        assert self.load.queue() == sum(waiting)
        known = all(each.max_total_tokens for each in live)
        assert self.load.capacity == (sum(each.max_total_tokens for each in live) if known else None)

    def teardown(self):
        for record in self.records:
            record[0].end(self.now, 3)
        for account in self.load.ranks:
            assert (account.active, account.num_active, account.pending, account.num_pending) == (0, 0, 0, 0)
        self.load.report(report(rank, 0, self.now + 1.0) for rank in range(3))
        assert [(account.gone, account.load()) for account in self.load.ranks] == [(0, 0)] * 3


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
