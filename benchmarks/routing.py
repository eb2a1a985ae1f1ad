"""Routing policies on a small model of workers, in virtual time: what the defaults of `equipoise.route` rest on.

    python benchmarks/routing.py [--seeds N]

load:     which sum of a rank's account balances best: reports of 1 s and 5 s, ranks in lockstep or not
affinity: prefix_tokens by its `load_weight`, beside the other worker policies, on sessions with shared beginnings

A rank's step lasts A + B * prefill tokens + C * running + D * KV tokens; it prefills at most a chunk per step, first
come first served, and admits while prompts and outputs so far fit. Deterministic by seed; nothing is timed.
"""

from __future__ import annotations

import argparse
import bisect
import heapq
import itertools
import random
import statistics
import sys
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from equipoise.route.account import Charge, RankAccount, RankReport, WorkerLoad
from equipoise.route.catalog import rank_policy, worker_policy
from equipoise.route.lengths import Lengths
from equipoise.route.policy import Ask
from equipoise.route.prefix import ENDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Choose = Callable[[Ask], tuple[WorkerLoad, int]]

A, B, C, D = 0.015, 6e-5, 1e-4, 2e-7
"""Seconds: of a 70B-class model on one accelerator group; a rank with 34 requests of 3,000 tokens steps in 40 ms."""
CHUNK = 8192
CAPACITY = 200_000
BYTES_PER_TOKEN = 4


@dataclass
class Job:
    """One request. `keys`: of its prompt's prefixes, as `prefix_keys` makes them."""

    arrival: float
    prompt: int
    output: int
    keys: tuple[int, ...] = ()
    session: bytes | None = None
    uncached: int = 0
    first_at: float = 0.0
    ended_at: float = 0.0
    charge: Charge | None = None


@dataclass
class Rank:
    """A rank that runs steps. `finishing`: (step, sequence, job) of those that decode."""

    waiting: deque[Job] = field(default_factory=deque)
    finishing: list[tuple[int, int, Job]] = field(default_factory=list)
    cache: OrderedDict[int, int] = field(default_factory=OrderedDict)  # key -> tokens
    kv: int = 0
    num_cached: int = 0
    step: int = 0
    sequence: int = 0
    num_hit: int = 0
    admitted: list[Job] = field(default_factory=list)
    left: int = 0

    def plan(self) -> float:
        """Choose this step's prefills; its duration."""
        budget = CHUNK
        while budget > 0 and self.waiting:
            job = self.waiting[0]
            if not self.left:
                if self.kv + job.prompt > CAPACITY:
                    break
                self.kv += job.prompt
                self.left = max(1, job.prompt - self.hit(job))
            n = min(budget, self.left)
            budget -= n
            self.left -= n
            if not self.left:
                self.admitted.append(self.waiting.popleft())
        if budget == CHUNK and not self.finishing:
            return 0.0
        return A + B * (CHUNK - budget) + C * len(self.finishing) + D * self.kv

    def hit(self, job: Job) -> int:
        """Tokens of the prompt that are cached; from now on all of it is."""
        depth = 0
        for key in job.keys:
            if key not in self.cache:
                break
            depth += 1
        num_hit = ENDS[depth - 1] // BYTES_PER_TOKEN if depth else 0
        begin = 0
        for key, end in zip(job.keys, ENDS, strict=False):
            if key not in self.cache:
                self.num_cached += (end - begin) // BYTES_PER_TOKEN
                self.cache[key] = (end - begin) // BYTES_PER_TOKEN
            self.cache.move_to_end(key)
            begin = end
        while self.num_cached > CAPACITY - self.kv and self.cache:
            self.num_cached -= self.cache.popitem(last=False)[1]
        self.num_hit += num_hit
        return num_hit

    def finish_step(self, now: float) -> Iterable[Job]:
        """The step is over: those that end with it."""
        self.step += 1
        self.kv += len(self.finishing)
        for job in self.admitted:
            job.first_at = now
            self.sequence += 1
            heapq.heappush(self.finishing, (self.step + job.output - 1, self.sequence, job))
        self.admitted = []
        while self.finishing and self.finishing[0][0] <= self.step:
            job = heapq.heappop(self.finishing)[2]
            self.kv -= job.prompt + job.output - 1
            job.ended_at = now
            yield job

    @property
    def tokens(self) -> int:
        """Used and waiting."""
        return self.kv + sum(job.prompt for job in self.waiting) - (self.waiting[0].prompt if self.left else 0)


@dataclass
class Fleet:
    """Workers of ranks, their accounts, and the events that drive them."""

    num_workers: int
    num_ranks: int
    is_lockstep: bool
    report_s: float
    learns: bool = True

    def __post_init__(self) -> None:
        self.loads = [WorkerLoad(f"worker-{i}", self.num_ranks) for i in range(self.num_workers)]
        self.ranks = {(w.name, r): Rank() for w in self.loads for r in range(self.num_ranks)}
        self.lengths = Lengths()
        self.skews: list[float] = []
        self.last_arrival = 0.0

    def run(self, jobs: list[Job], choose: Choose) -> None:
        """Serve `jobs` and note when each began and ended, and how uneven ranks were."""
        groups = self.groups()
        events: list[tuple[float, int, int]] = [(job.arrival, 0, i) for i, job in enumerate(jobs)]
        events.append((self.report_s, 1, 0))
        heapq.heapify(events)
        is_busy = [False] * len(groups)
        group_of = {key: i for i, group in enumerate(groups) for key in group}
        num_left = len(jobs)
        self.last_arrival = jobs[-1].arrival
        while num_left:
            now, kind, i = heapq.heappop(events)
            if kind == 1:
                self.report(now)
                heapq.heappush(events, (now + self.report_s, 1, 0))
                continue
            if kind == 0:
                i = group_of[self.place(jobs[i], now, choose)]
                if is_busy[i]:
                    continue
            elif kind == 2:
                for key in groups[i]:
                    for job in self.ranks[key].finish_step(now):
                        self.end(job, now)
                        num_left -= 1
            step_s = max(self.ranks[key].plan() for key in groups[i])
            is_busy[i] = step_s > 0
            if is_busy[i]:
                heapq.heappush(events, (now + step_s, 2, i))

    def groups(self) -> list[list[tuple[str, int]]]:
        """Ranks that step together."""
        if not self.is_lockstep:
            return [[key] for key in self.ranks]
        return [[(w.name, r) for r in range(self.num_ranks)] for w in self.loads]

    def place(self, job: Job, now: float, choose: Choose) -> tuple[str, int]:
        output = self.lengths.num_output(None, 4096) if self.learns else job.output
        ask = Ask(job.prompt, output, job.keys, job.session)
        worker, rank = choose(ask)
        job.charge = worker.charge(rank, ask.prompt, ask.output, now)
        self.ranks[worker.name, rank].waiting.append(job)
        return worker.name, rank

    def end(self, job: Job, now: float) -> None:
        assert job.charge is not None
        job.charge.end(now, job.output)
        self.lengths.learn(None, job.prompt * BYTES_PER_TOKEN, job.prompt, job.output)

    def report(self, now: float) -> None:
        for worker in self.loads:
            ranks = [self.ranks[worker.name, r] for r in range(self.num_ranks)]
            worker.report(
                RankReport(r, rank.tokens, len(rank.finishing), len(rank.waiting), CAPACITY, None, now)
                for r, rank in enumerate(ranks)
            )
            worker.check_ages(now, 60.0)
        if now > self.last_arrival:
            return  # the tail says nothing of the policy
        tokens = [rank.tokens for rank in self.ranks.values()]
        self.skews.append(max(tokens) / max(1.0, statistics.mean(tokens)))


def seed_lengths(rng: random.Random) -> tuple[int, int]:
    """Prompts of 1,481 to 4,120, mean 2,560; outputs of 187 to 4,068, mean 1,160, median 715."""
    return int(rng.triangular(1481, 4120, 2079)), min(4068, max(187, int(rng.lognormvariate(6.6, 0.95))))


def measure(fleet: Fleet, jobs: list[Job]) -> list[float]:
    """Mean TTFT and TPOT (ms), mean of max/mean tokens, share of prompt tokens that were cached."""
    ttft = statistics.mean(job.first_at - job.arrival for job in jobs)
    tpot = statistics.mean((job.ended_at - job.first_at) / max(1, job.output - 1) for job in jobs)
    hits = sum(rank.num_hit for rank in fleet.ranks.values()) / sum(job.prompt for job in jobs)
    return [ttft * 1e3, tpot * 1e3, statistics.mean(fleet.skews), hits]


SUMS: dict[str, Callable[[RankAccount], float]] = {
    "reported + pending - gone": lambda a: a.reported + a.pending - a.gone if a.has_feed else a.active,
    "max(that, active)": lambda a: max(a.reported - a.gone, a.active - a.pending) + a.pending,
    "active": lambda a: a.active,
    "requests": lambda a: a.num_active,
    "reported": lambda a: a.reported,
}


def least(fleet: Fleet, value: Callable[[RankAccount], float], rng: random.Random) -> Choose:
    """The rank with the smallest `value`, any of equals."""
    accounts = [account for worker in fleet.loads for account in worker.ranks]

    def choose(ask: Ask) -> tuple[WorkerLoad, int]:
        account = min(accounts, key=lambda each: (value(each), rng.random()))
        return account.worker, account.rank

    return choose


def load_experiment(num_seeds: int) -> None:
    print("load: 8 ranks, 800 requests; mean of seeds: TTFT ms, TPOT ms, max/mean tokens")
    for is_lockstep, report_s, rate in itertools.product((False, True), (1.0, 5.0), (3.5, 5.0)):
        print(f"\n{'lockstep' if is_lockstep else 'independent'}, report every {report_s} s, {rate} requests/s")
        for name, learns in [*((name, True) for name in SUMS), *((name, False) for name in list(SUMS)[:3])]:
            rows = []
            for seed in range(num_seeds):
                rng = random.Random(seed)
                jobs = poisson(rng, rate)
                fleet = Fleet(1, 8, is_lockstep, report_s, learns)
                fleet.run(jobs, least(fleet, SUMS[name], rng))
                rows.append(measure(fleet, jobs))
            show(name + ("" if learns else ", outputs known"), rows)


def poisson(rng: random.Random, rate: float) -> list[Job]:
    """800 requests of `seed_lengths`."""
    at, jobs = 0.0, []
    for _ in range(800):
        at += rng.expovariate(rate)
        jobs.append(Job(at, *seed_lengths(rng)))
    return jobs


def num_keys_of(num_tokens: int) -> int:
    """Keys that `prefix_keys` makes of so long a prompt."""
    return bisect.bisect_right(ENDS, num_tokens * BYTES_PER_TOKEN)


def sessions(rng: random.Random, num_sessions: int, rate: float) -> list[Job]:
    """Conversations of up to 8 turns under one of 12 system prompts, whose use is skewed."""
    jobs = []
    at = 0.0
    for session in range(num_sessions):
        at += rng.expovariate(rate)
        system = min(11, int(rng.expovariate(0.4)))
        turn_at, prompt = at, 600 + 300 * system
        num_shared = num_keys_of(prompt)
        for _ in range(rng.randint(1, 8)):
            prompt += rng.randint(50, 1500)
            output = min(2000, max(20, int(rng.lognormvariate(5.3, 0.9))))
            owners = [system] * num_shared + [1000 + session] * (num_keys_of(prompt) - num_shared)
            keys = tuple(hash((owner, i)) & 0xFFFFFFFF for i, owner in enumerate(owners))
            jobs.append(Job(turn_at, prompt, output, keys, f"{session}".encode()))
            prompt += output
            turn_at += output * 0.04 + rng.expovariate(0.1)
    return sorted(jobs, key=lambda job: job.arrival)


def affinity_experiment(num_seeds: int) -> None:
    print("\naffinity: sessions of 1 to 8 turns; mean of seeds: TTFT ms, TPOT ms, max/mean tokens, cached share")
    asked = [("prefix_tokens", {"load_weight": weight}) for weight in (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)]
    asked += [(name, {}) for name in ("cache_aware", "consistent_hashing", "least_tokens", "power_of_two", "random")]
    for num_workers, num_ranks in ((4, 1), (8, 1), (4, 4)):
        for rank_rate in (0.5, 0.7):
            print(f"\n{num_workers} workers of {num_ranks}, {rank_rate} sessions/s per rank")
            rate = rank_rate * num_workers * num_ranks
            for name, options in asked:
                rows = []
                for seed in range(num_seeds):
                    jobs = sessions(random.Random(seed), int(rate * 120), rate)
                    fleet = Fleet(num_workers, num_ranks, False, 1.0)
                    fleet.run(jobs, by_policy(fleet, name, seed, options))
                    rows.append(measure(fleet, jobs))
                show(f"{name} {options or ''}", rows)


def by_policy(fleet: Fleet, name: str, seed: int, options: dict[str, object]) -> Choose:
    """The production policies."""
    workers, ranks = worker_policy(name, seed=seed, options=options), rank_policy("minimum_tokens")

    def choose(ask: Ask) -> tuple[WorkerLoad, int]:
        worker = workers.choose(ask, fleet.loads)
        workers.routed(ask, worker)
        return worker, ranks.choose(ask, worker) or 0

    return choose


def show(name: str, rows: list[list[float]]) -> None:
    ttft, tpot, skew, hits = (statistics.mean(column) for column in zip(*rows, strict=True))
    print(f"  {name:45} {ttft:8.0f} {tpot:7.2f} {skew:6.3f} {hits:6.3f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", choices=("load", "affinity"))
    arguments = parser.parse_args()
    if arguments.only != "affinity":
        load_experiment(arguments.seeds)
    if arguments.only != "load":
        affinity_experiment(arguments.seeds)
