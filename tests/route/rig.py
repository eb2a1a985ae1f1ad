"""Fleets for tests of routing."""

from __future__ import annotations

from equipoise.route.account import RankReport, WorkerLoad


def report(rank=0, tokens=0, taken_at=0.0, *, running=0, waiting=0, capacity=None, throughput=None):
    return RankReport(rank, tokens, running, waiting, capacity, throughput, taken_at)


def worker(name, *tokens, capacity=None, weight=1.0, waiting=0, throughput=None):
    """A worker whose ranks report `tokens`, one each."""
    load = WorkerLoad(name, len(tokens))
    load.report(
        report(rank, num, 1.0, capacity=capacity, waiting=waiting, throughput=throughput)
        for rank, num in enumerate(tokens)
    )
    load.check_ages(1.0, 10.0)
    load.weight = weight
    return load


def idle(num_workers, num_ranks=1):
    return [WorkerLoad(f"w{i}", num_ranks) for i in range(num_workers)]
