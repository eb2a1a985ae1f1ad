"""What the experiment `together` tells: all features beside the best single one, and what each adds."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from equipoise.sim.experiment.gains import Compared, has, spread_of
from equipoise.sim.experiment.rows import Row, Table
from equipoise.sim.experiment.show import percent
from equipoise.sim.report.charts import Axis, bars

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from equipoise.sim.experiment.rows import Point
    from equipoise.sim.report.charts import Row as Drawn
    from equipoise.sim.report.look import Chart

PLAIN, ALL, LEFT_OUT = "plain", "all", "all but "
OVER, BELOW = "over capacity", "0.7 of capacity"
METRIC = {OVER: "throughput_tok_s", BELOW: "requests_per_s"}
"""What is compared at a load: output tokens of the fleet, or 1 over the mean time from arrival to end."""
SHOWN = {OVER: "throughput", BELOW: "1 / E2E time"}


def tables(rows: Sequence[Row]) -> list[Table]:
    """By fleet and by feature."""
    compared = Compared([_with_speed(row) for row in rows], PLAIN)
    return [by_fleet(compared), by_feature(compared)]


def _with_speed(row: Row) -> Row:
    return dataclasses.replace(row, values={**row.values, "requests_per_s": 1e3 / row["e2e_mean_ms"]})


def by_fleet(compared: Compared) -> Table:
    """For each trace, load and fleet: the best feature by itself, all, and what that adds."""
    lines = []
    for name, point in compared.points.items():
        metric = METRIC[str(point["load"])]
        gains = {policy: compared.gains(policy, metric)[name] for policy in singles(compared)}
        best = max(gains, key=gains.__getitem__)
        both = compared.gains(ALL, metric)[name]
        more = (1 + both) / (1 + gains[best]) - 1
        lines.append((_fleet(point), best, percent(gains[best]), percent(both), percent(more)))
    note = "Over capacity: tokens per second. At 0.7 of it: 1 over the mean time of a request from arrival to end."
    return Table("All features over the plain fleet", ("", "best alone", "gains", "all", "more"), lines, (note,))


def by_feature(compared: Compared) -> Table:
    """For each feature the median over fleets: by itself, and what all lose without it; by load."""
    loads = list(dict.fromkeys(str(point["load"]) for point in compared.points.values()))
    lines = []
    for policy in (*singles(compared), ALL):
        cells = []
        for load in loads:
            where, metric = has("load", load), METRIC[load]
            cells.append(percent(spread_of(list(compared.gains(policy, metric, where).values())).median))
            cells.append(_without(compared, policy, load))
        ttft = spread_of(list(compared.ratios(policy, "ttft_mean_ms").values())).median
        lines.append((policy, *cells, f"{ttft:.2f}x"))
    header = ["", *(cell for load in loads for cell in (f"{SHOWN[load]}, {load}", "left out of all")), "TTFT"]
    return Table("Features alone, and left out of all; medians", header, lines)


def singles(compared: Compared) -> list[str]:
    """Policies that are one feature."""
    return [policy for policy in compared.policies if policy != ALL and not policy.startswith(LEFT_OUT)]


def _without(compared: Compared, policy: str, load: str) -> str:
    """What all features lose when `policy` is left out, in the median; "-" when that was not tried."""
    left, where, metric = LEFT_OUT + policy, has("load", load), METRIC[load]
    if left not in compared.policies:
        return "-"
    lost = compared.ratios(left, metric, where)
    every = compared.ratios(ALL, metric, where)
    return percent(spread_of([lost[name] / every[name] - 1 for name in lost]).median) if lost else "-"


def _fleet(point: Point) -> str:
    return f"{point['trace']}, {point['ranks']} ranks, {point['load']}"


def charts(rows: Sequence[Row]) -> Mapping[str, Chart]:
    """For each load, the gain of the best feature alone and of all, by fleet."""
    compared = Compared([_with_speed(row) for row in rows], PLAIN)
    drawn: dict[str, list[Drawn]] = {}
    for name, point in compared.points.items():
        load = str(point["load"])
        gains = {policy: compared.gains(policy, METRIC[load])[name] for policy in (*singles(compared), ALL)}
        every = gains.pop(ALL)
        fleet = f"{point['trace']} {point['ranks']}"
        for what, gain in (("best alone", max(gains.values())), (ALL, every)):
            drawn.setdefault(load, []).append({"fleet": fleet, "what": what, "gain": 100 * gain})
    return {
        ("over" if load == OVER else "below"): bars(
            each, Axis("fleet", "trace and ranks"), Axis("gain", f"gain in {SHOWN[load]}, %"), by="what"
        )
        for load, each in drawn.items()
    }
