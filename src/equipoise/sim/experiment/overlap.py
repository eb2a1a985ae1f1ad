"""What does planning the next step while this one runs gain, by what planning costs?

A step of the model takes `step_ms`, planning it takes the host `host`: one after the other at depth 0, side by side at
depth 1. The costs of planning are measured (benchmarks/results/step_cost.md, and facts of vLLM 0.33 elsewhere), or a
share of the step's time, to see the whole curve.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from equipoise.sim.experiment.rows import Experiment, Options, Table, Trial, by_point, points_of
from equipoise.sim.experiment.show import number, percent
from equipoise.sim.report.charts import Axis, lines
from equipoise.sim.scenario import make_scenario

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from equipoise.sim.experiment.rows import Point, Row, Value
    from equipoise.sim.report.charts import Row as Drawn
    from equipoise.sim.report.look import Chart
    from equipoise.sim.scenario import Scenario

QUESTION = "What does planning the next step while this one runs gain, by what planning costs?"
DEPTHS = {"depth 0": 0, "depth 1": 1}
SEATS = (16, 64, 256, 1024)
STEPS_MS = (3.0, 10.0, 30.0)
"""About a 1B, an 8B and a 70B model on the GPUs that serve them."""
SHARES = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0)
"""Planning over step time, of the curve; seats and step as in the middle of the map."""
SHARE, CURVE_SEATS, CURVE_STEP_MS = "a share", 64, 10.0
PUBLISHED = (0.03, 0.15)
"""Throughput gained by asynchronous scheduling: vllm-project/vllm#19970."""
PROMPT, OUTPUT, WAVES = 512, 256, 6


class Planner(NamedTuple):
    """Microseconds of planning a decode step: of any, and by seats for each row."""

    step_us: float
    row_us: Mapping[int, float]

    def us(self, seats: int) -> float:
        """Of a step with all seats taken."""
        return self.step_us + self.row_us[seats] * seats


PLANNERS = {
    "equipoise": Planner(16.0, dict.fromkeys(SEATS, 0.17)),
    "vLLM, same machine": Planner(0.0, {16: 178.9 / 16, 64: 613.0 / 64, 256: 2752.1 / 256, 1024: 14458.1 / 1024}),
    "vLLM, elsewhere": Planner(0.0, {16: 390 / 16, 64: 1400 / 64, 256: 7500 / 256, 1024: 29000 / 1024}),
}
"""Ours and vLLM 0.33 in one run on one machine (benchmarks/results/step_cost.md: 18 / 24 / 66 / 188 us of ours for 16
to 1,024 rows), and vLLM 0.33 on another (0.39 / 1.4 / 6 to 9 / 29 ms)."""


def experiment(options: Options) -> Experiment:
    """Three planners, seats of 16 to 1,024, steps of 3 to 30 ms; and the curve. Quick: 16 and 64 seats at 10 ms, and
    six points of the curve."""
    points = list(_quick_points() if options.quick else _points())
    trials = [Trial(point, policy, scenario_of(point, depth)) for point in points for policy, depth in DEPTHS.items()]
    return Experiment("async", QUESTION, trials, tables, charts)


def _points() -> Iterator[Point]:
    for planner in PLANNERS:
        for seats in SEATS:
            for step_ms in STEPS_MS:
                yield _point(planner, seats, step_ms)
    for share in SHARES:
        yield _share_point(share)


def _quick_points() -> Iterator[Point]:
    for planner in PLANNERS:
        for seats in (16, 64):
            yield _point(planner, seats, 10.0)
    for share in (0.02, 0.05, 0.1, 0.2, 0.5, 1.0):
        yield _share_point(share)


def _point(planner: str, seats: int, step_ms: float) -> dict[str, Value]:
    host_us = round(PLANNERS[planner].us(seats), 1)
    return {"planner": planner, "seats": seats, "step_ms": step_ms, "host_us": host_us}


def _share_point(share: float) -> dict[str, Value]:
    host_us = round(share * CURVE_STEP_MS * 1e3, 1)
    return {"planner": SHARE, "seats": CURVE_SEATS, "step_ms": CURVE_STEP_MS, "host_us": host_us}


def scenario_of(point: Point, depth: int) -> Scenario:
    """A closed loop that keeps every seat taken; `host_us` is that of a full step, and grows with its rows."""
    seats, host_us = int(point["seats"]), float(point["host_us"])
    step_us = PLANNERS[str(point["planner"])].step_us if point["planner"] != SHARE else 0.0
    return make_scenario(
        {
            "workload": {
                "num_requests": WAVES * seats,
                "concurrency": seats,
                "prompt": {"mean": PROMPT},
                "output": {"mean": OUTPUT, "spread": 0.3},
            },
            "scheduler": {"max_running": seats, "max_step_tokens": 2048 + seats, "depth": depth},
            "cache": {"page_size": 16, "num_pages": seats * (PROMPT + 3 * OUTPUT) // 16, "prefix_cache": False},
            "cost": {"step_ms": point["step_ms"], "prefill_token_ms": 0.0, "decode_row_ms": 0.0, "source": "settings"},
            "host": {"step_us": step_us, "row_us": (host_us - step_us) / seats},
        }
    )


def gain_of(policies: Mapping[str, Mapping[str, float]]) -> float:
    """Throughput at depth 1 over that at depth 0, less one."""
    return policies["depth 1"]["throughput_tok_s"] / policies["depth 0"]["throughput_tok_s"] - 1


def bound_of(point: Point) -> float:
    """The most that hiding the shorter of the two behind the longer can gain."""
    step_us, host_us = float(point["step_ms"]) * 1e3, float(point["host_us"])
    return (step_us + host_us) / max(step_us, host_us) - 1


def curve_of(rows: Sequence[Row]) -> list[tuple[float, float, float]]:
    """(planning over step time, gain, bound) of the curve's points, by the first."""
    points, found = points_of(rows), by_point(rows)
    return sorted(
        (float(point["host_us"]) / float(point["step_ms"]) / 1e3, gain_of(found[name]), bound_of(point))
        for name, point in points.items()
        if point["planner"] == SHARE
    )


def share_at(curve: Sequence[tuple[float, float, float]], gain: float) -> float | None:
    """The share of planning at which the curve first reaches `gain`, between its points on a line; None if never."""
    before = (0.0, 0.0)
    for share, reached, _ in curve:
        if reached >= gain:
            return before[0] + (share - before[0]) * (gain - before[1]) / (reached - before[1])
        before = (share, reached)
    return None


def tables(rows: Sequence[Row]) -> list[Table]:
    """The curve, and where measured planners lie on it."""
    curve = curve_of(rows)
    return [_curve_table(curve), _planners_table(rows, curve)]


def _curve_table(curve: Sequence[tuple[float, float, float]]) -> Table:
    low, high = (share_at(curve, gain) for gain in PUBLISHED)
    notes = [f"Published: {percent(PUBLISHED[0], digits=0)} to {percent(PUBLISHED[1], digits=0)}"]
    if low is not None and high is not None:
        notes[0] += f": planning takes {low:.1%} to {high:.1%} of a step's time there."
    lines = [(f"{share:.0%}", percent(gain), percent(bound)) for share, gain, bound in curve]
    return Table("Gain of depth 1, by planning over step time", ("planning / step", "gain", "at most"), lines, notes)


def _planners_table(rows: Sequence[Row], curve: Sequence[tuple[float, float, float]]) -> Table:
    points, found = points_of(rows), by_point(rows)
    own = {name: point for name, point in points.items() if point["planner"] != SHARE}
    steps = sorted({float(point["step_ms"]) for point in own.values()})
    gains = {(p["planner"], p["seats"], float(p["step_ms"])): gain_of(found[name]) for name, p in own.items()}
    low, high = (share_at(curve, gain) for gain in PUBLISHED)
    lines = []
    for planner, seats in dict.fromkeys((point["planner"], int(point["seats"])) for point in own.values()):
        host_ms = PLANNERS[str(planner)].us(seats) / 1e3
        where = f"{number(host_ms / high)} to {number(host_ms / low)} ms" if low and high else "-"
        lines.append(
            (
                f"{planner}, {seats} rows",
                number(host_ms, digits=3),
                *(percent(gains[planner, seats, step_ms]) for step_ms in steps),
                where,
            )
        )
    header = ("planner", "planning ms", *(f"{step_ms:g} ms step" for step_ms in steps), "published gain at steps of")
    return Table("Gain of depth 1 with measured costs of planning", header, lines)


def charts(rows: Sequence[Row]) -> Mapping[str, Chart]:
    """The curve, with the published gains on it."""
    curve = curve_of(rows)
    drawn: list[Drawn] = [
        {"share": 100 * share, "gain": 100 * value, "what": what}
        for share, gain, bound in curve
        for what, value in (("at most", bound), ("simulated", gain))
    ]
    published = {percent(gain, digits=0): share_at(curve, gain) for gain in PUBLISHED}
    marked = {f"published {gain}": 100 * share for gain, share in published.items() if share is not None}
    share, gain = Axis("share", "planning over step time, %", log=True), Axis("gain", "gain of depth 1, %")
    return {"gain": lines(drawn, share, gain, by="what", dots=True, marked=marked)}
