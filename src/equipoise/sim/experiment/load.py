"""What does a load report cost, by the length of the queue, from counters and by counting anew?

Nothing is simulated: the scheduler's own `load()` is timed beside a count over all requests, in turns, with so many
requests waiting. SGLang's counters (sgl-project/sglang#13203) were removed again, because they drifted; ours keep what
each request was charged, which costs something at every move of a request: that is timed too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from equipoise.clock import VirtualClock
from equipoise.config import CacheConfig, SchedulerConfig
from equipoise.exec.protocol import ExecutorInfo
from equipoise.request import Request, SamplingParams
from equipoise.sched.assemble import build_scheduler
from equipoise.sched.ledger import Ledger
from equipoise.sim.experiment.measure import MOST_CALLS, in_turns, machine
from equipoise.sim.experiment.rows import Experiment, Options, Row, Table, by_point, points_of
from equipoise.sim.experiment.show import number
from equipoise.sim.report.charts import Axis, lines

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from equipoise.sched.scheduler import Scheduler
    from equipoise.sim.report.charts import Row as Drawn
    from equipoise.sim.report.look import Chart

QUESTION = "What does a load report cost, by the length of the queue, from counters and by counting anew?"
COUNTERS, ONE_SUM, RESCAN, MOVES = "counters", "one sum", "all sums", "upkeep"
QUEUES = (1, 10, 100, 1_000, 10_000, 100_000)
QUICK_QUEUES = (1, 100, 10_000)
NUM_WINDOWS, QUICK_WINDOWS = 40, 10
LIFE = ("prefilling", "decoding", "draining", "ended")
"""Places that a request goes through once it waits: four moves, and one into the queue."""
PROMPT_LEN, MAX_MODEL_LEN = 8, 64


def experiment(options: Options) -> Experiment:
    """Queues of 1 to 100,000 requests. Quick: of 1 to 10,000, in fewer windows."""
    queues, num_windows = (QUICK_QUEUES, QUICK_WINDOWS) if options.quick else (QUEUES, NUM_WINDOWS)

    def measured() -> list[Row]:
        return [row for num_waiting in queues for row in measure(num_waiting, num_windows)]

    return Experiment("load", QUESTION, (), tables, charts, measured)


def measure(num_waiting: int, num_windows: int) -> list[Row]:
    """A row for each way to report the load of a rank with `num_waiting` requests in its queue, and one for the
    five moves of a request that keep the counters."""
    scheduler, ledger = _scheduler(num_waiting), Ledger()
    requests = [_request(handle) for handle in range(num_waiting)]
    for request in requests:
        ledger.move(request, "waiting")

    def one_sum() -> int:
        return sum([request.num_known for request in scheduler.requests() if request.place == "waiting"])

    def rescan() -> dict[str, int]:
        return ledger.rescan(requests, lambda request: request.stop_len)

    def live() -> None:
        request = fresh.pop()
        ledger.move(request, "waiting")
        for place in LIFE:
            ledger.move(request, place)

    calls = {COUNTERS: scheduler.load, ONE_SUM: one_sum, RESCAN: rescan, MOVES: live}
    fresh = [_request(num_waiting + spare) for spare in range((num_windows + 1) * MOST_CALLS)]
    times = in_turns(calls, num_windows)
    return [Row({"num_waiting": num_waiting}, name, found.values()) for name, found in times.items()]


def tables(rows: Sequence[Row]) -> list[Table]:
    """Microseconds by queue length."""
    points, found = points_of(rows), by_point(rows)
    lines = []
    for name, policies in found.items():
        times = [policies[policy]["least_us"] for policy in (COUNTERS, ONE_SUM, RESCAN, MOVES)]
        ratio = times[1] / times[0]
        cells = [number(us, digits=2) for us in times]
        lines.append((f"{points[name]['num_waiting']:,}", *cells[:3], f"{number(ratio)}x", cells[3]))
    return [
        Table(
            "Microseconds of a load report, least of the windows",
            ("waiting", "counters", "waiting tokens by a sum", "all sums", "sum / counters", "upkeep of a request"),
            lines,
            (
                f"{machine()}; CPU time of the thread, ways in turns.",
                "counters: Scheduler.load(), thirteen numbers. A sum: one of them counted over the queue, as an engine "
                "without counters does. All sums: Ledger.rescan, which the tests hold the counters against. Upkeep: "
                "all the moves of a request from arrival to end, once in its life.",
            ),
        )
    ]


def charts(rows: Sequence[Row]) -> Mapping[str, Chart]:
    """Microseconds against queue length."""
    drawn: list[Drawn] = [
        {"waiting": int(row.point["num_waiting"]), "us": row["least_us"], "way": row.policy}
        for row in rows
        if row.policy != MOVES
    ]
    waiting, us = Axis("waiting", "requests waiting", log=True), Axis("us", "microseconds of a report", log=True)
    return {"cost": lines(drawn, waiting, us, by="way", dots=True)}


def _scheduler(num_waiting: int) -> Scheduler:
    """One with so many requests in its queue."""
    info = ExecutorInfo("none", 1000, MAX_MODEL_LEN, 16, 1024, (), "none", "none")
    settings = SchedulerConfig(max_waiting_reqs=num_waiting)
    scheduler = build_scheduler(settings, CacheConfig(page_size=16), info, VirtualClock())
    for handle in range(num_waiting):
        scheduler.add(_request(handle))
    return scheduler


def _request(handle: int) -> Request:
    prompt = np.zeros(PROMPT_LEN, np.int32)
    return Request(handle, f"request-{handle}", prompt, SamplingParams(), max_model_len=MAX_MODEL_LEN)
