"""What the balance experiment tells: the published table, gains over the map, the bars."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equipoise.sim.experiment.gains import Compared, has, spread_of
from equipoise.sim.experiment.rows import Table, by_point, name_of
from equipoise.sim.experiment.show import number, percent
from equipoise.sim.report.charts import Axis, bars, intervals, pareto

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from equipoise.sim.experiment.rows import Point, Row
    from equipoise.sim.report.charts import Row as Drawn
    from equipoise.sim.report.look import Chart

BASELINE, OURS = "none", "rent or buy"
TOK_S, TTFT = "throughput_tok_s", "ttft_mean_ms"
AXES = ("cost", "ranks", "spread", "concurrency", "shape", "filled")
PUBLISHED = (("published: none", 591.9, 6600.0, 86.85), ("published: balance", 501.7, 7012.0, 70.63))
"""Seconds, mean TTFT and TPOT in milliseconds: vllm-project/vllm-ascend#5212."""
MOST_BELOW = 0.02
"""Points of gain that ours may be below the best of the others, or below no gate, at any point."""
LEAST_ABOVE = 0.08
"""Points of gain that it is above the best of the others, in the median."""
MOST_TTFT = 1.25
"""Times the ungated mean TTFT, in the median."""
ROUNDING = 1e-9
"""What is on a bar meets it."""


def tables(rows: Sequence[Row]) -> list[Table]:
    """The answer in a screen."""
    published = [row for row in rows if row.point["part"] == "published"]
    compared = Compared([row for row in rows if row.point["part"] == "map"], BASELINE)
    found = [published_table(published)] if published else []
    if len(compared):
        found += [gains_table(compared), axes_table(compared), extremes_table(compared)]
        if OURS in compared.policies:
            found.append(bars_table(compared))
    return found


def published_table(rows: Sequence[Row]) -> Table:
    """What was published, and what comes out in its setting."""
    lines = [[name, number(duration), number(ttft), number(tpot), ""] for name, duration, ttft, tpot in PUBLISHED]
    lines[1][-1] = percent(PUBLISHED[0][1] / PUBLISHED[1][1] - 1)
    costs = {name_of(row.point): str(row.point["cost"]) for row in rows}
    for point, policies in by_point(rows).items():
        for policy, found in policies.items():
            gain = found[TOK_S] / policies[BASELINE][TOK_S] - 1
            cells = (number(found[name]) for name in ("duration_s", TTFT, "tpot_mean_ms"))
            lines.append([f"{costs[point]}: {policy}", *cells, "" if policy == BASELINE else percent(gain)])
    return Table(
        "The published setting: 3,500 in, 1,500 out, 512 requests, 128 at a time",
        ("", "seconds", "TTFT ms", "TPOT ms", "tok/s"),
        lines,
        ("dp4 and dp2 are cost models fitted to the row without a gate (calibration); the other rows follow.",),
    )


def gains_table(compared: Compared) -> Table:
    """Every policy over the whole map."""
    others = _others(compared)
    lines = []
    for policy in compared.policies:
        gain = spread_of(list(compared.gains(policy, TOK_S).values()))
        above = spread_of(list(compared.over_best(policy, others, TOK_S).values()))
        ttft = spread_of(list(compared.ratios(policy, TTFT).values()))
        cells = (*map(percent, gain), percent(above.median), percent(above.worst))
        lines.append((policy, *cells, f"{ttft.median:.2f}x", f"{ttft.best:.2f}x"))
    return Table(
        f"Throughput over no gate, {len(compared)} points of the map",
        ("", "median", "worst", "best", "vs best", "worst", "TTFT", "highest"),
        lines,
        ("vs best: points of gain above the best of the other gates and none, median and worst; TTFT over ungated.",),
    )


def axes_table(compared: Compared) -> Table:
    """The median gain for every value of every axis."""
    policies = compared.policies
    lines = []
    for axis in AXES:
        values = compared.values_of(axis)
        for value in values if len(values) > 1 else ():
            gains = (list(compared.gains(policy, TOK_S, has(axis, value)).values()) for policy in policies)
            lines.append((f"{axis} {value}", *(percent(spread_of(found).median) for found in gains)))
    return Table("Median gain by axis", ("", *policies), lines)


def extremes_table(compared: Compared) -> Table:
    """Where each policy helps and hurts most."""
    lines = []
    for policy in compared.policies:
        gains = compared.gains(policy, TOK_S)
        most, least = max(gains, key=gains.__getitem__), min(gains, key=gains.__getitem__)
        lines += [(policy, _where(compared.points[name]), percent(gains[name])) for name in (most, least)]
    return Table("Most and least gain of each", ("", "at", "tok/s"), lines)


def bars_table(compared: Compared) -> Table:
    """What was asked of ours, and what came."""
    lines = [(name, bar, value, "met" if is_met else "missed") for name, bar, value, is_met in reached(compared)]
    return Table(f"Bars for {OURS}", ("", "bar", "is", ""), lines)


def reached(compared: Compared) -> Iterator[tuple[str, str, str, bool]]:
    """Each bar: what, its value, what was reached, whether that meets it."""
    above = compared.over_best(OURS, _others(compared), TOK_S)
    spread = spread_of(list(above.values()))
    num_below = sum(value < -MOST_BELOW - ROUNDING for value in above.values())
    ttft = spread_of(list(compared.ratios(OURS, TTFT).values())).median
    yield (
        f"never further below the best other, none included ({num_below} of {len(above)} points are)",
        percent(-MOST_BELOW),
        percent(spread.worst),
        spread.worst >= -MOST_BELOW - ROUNDING,
    )
    yield (
        "above the best other in the median",
        percent(LEAST_ABOVE),
        percent(spread.median),
        spread.median >= LEAST_ABOVE - ROUNDING,
    )
    yield "mean TTFT over ungated in the median", f"{MOST_TTFT:.2f}x", f"{ttft:.2f}x", ttft <= MOST_TTFT


def charts(rows: Sequence[Row]) -> Mapping[str, Chart]:
    """Gains of each policy: their range, against TTFT, by ranks and by spread; percent over no gate."""
    compared = Compared([row for row in rows if row.point["part"] == "map"], BASELINE)
    ranges = [_range(compared, policy) for policy in compared.policies]
    gain, policy = Axis("gain", "median gain in throughput over no gate, %"), Axis("policy", "")
    return {
        "range": intervals(ranges, Axis("gain", "gain in throughput, %: median, worst to best"), policy, "low", "high"),
        "ttft": pareto(
            ranges, Axis("ttft", "median of mean TTFT over ungated", zero=False), gain, by="policy", label="policy"
        ),
        "ranks": bars(_median_gains(compared, "ranks"), Axis("ranks", "ranks"), gain, by="policy"),
        "spread": bars(
            _median_gains(compared, "spread"), Axis("spread", "spread of output lengths"), gain, by="policy"
        ),
    }


def _range(compared: Compared, policy: str) -> Drawn:
    gain = spread_of([100 * each for each in compared.gains(policy, TOK_S).values()])
    ttft = spread_of(list(compared.ratios(policy, TTFT).values())).median
    return {"policy": policy, "gain": gain.median, "low": gain.worst, "high": gain.best, "ttft": ttft}


def _median_gains(compared: Compared, axis: str) -> list[Drawn]:
    return [
        {axis: str(value), "policy": policy, "gain": 100 * spread_of(gains).median}
        for value in compared.values_of(axis)
        for policy in compared.policies
        if (gains := list(compared.gains(policy, TOK_S, has(axis, value)).values()))
    ]


def _others(compared: Compared) -> list[str]:
    return [policy for policy in compared.policies if policy != OURS]


def _where(point: Point) -> str:
    return ", ".join(f"{axis} {point[axis]}" for axis in AXES)
