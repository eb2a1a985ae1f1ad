"""A sweep as one page of plots that opens offline."""

from __future__ import annotations

import math
from itertools import pairwise, product
from statistics import median
from typing import TYPE_CHECKING

import msgspec

from equipoise.sim.report.charts import Axis, Folded, Plot, Section, Table, frontier, heat, intervals, save_page
from equipoise.sim.sweep.files import as_table
from equipoise.sim.sweep.plots import Best, banded_lines, fronts, with_long_words
from equipoise.sim.sweep.results import Comparison, SweepResults, more_is_better
from equipoise.sim.sweep.table import gain_of, label, number, percent, short_names, table
from equipoise.sim.sweep.values import Json, as_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from equipoise.sim.report.charts import Row

PAGE = "sweep.html"
MOST_PLOTS, MOST_POINTS = 12, 40
"""Of lines for a number: other fields at so many of their values. Points of a plot of gains."""
LEAST_RATIO = 1.5
"""Of neighbouring values that a logarithmic axis suits."""


def save_report(results: SweepResults, folder: Path) -> None:
    """Write sweep.html into `folder`: gains, each number over the varied fields, and the front of two of them."""
    sweep = results.sweep
    subtitle = f"{len(sweep.points())} points, {len(sweep.policies)} policies, {len(sweep.seeds)} seeds"
    save_page(folder / PAGE, f"Sweep: {sweep.name}", list(sections(results)), subtitle=subtitle)


def sections(results: SweepResults) -> Iterator[Section]:
    """The parts of the page."""
    sweep = results.sweep
    if len(sweep.policies) > 1:
        gains = [part for metric in sweep.metrics for part in _gains(results, metric)]
        yield Section(f"Against {sweep.baseline}, on the same seeds", [_overall(results), *gains])
    if sweep.fields:
        lines = [part for metric in sweep.metrics for part in _beside(_lines(results, metric))]
        yield Section("Over the varied fields", lines)
    yield Section("What is traded for what", [_front(results)])
    swept = msgspec.yaml.encode(as_table(sweep)).decode()
    yield Section("In numbers", [Folded("All numbers", table(results)), Folded("What was swept", swept)])


def _beside(plots: Iterable[Plot]) -> Iterator[Plot | tuple[Plot, ...]]:
    """Two a line; the last by itself when their number is odd."""
    pair: tuple[Plot, ...] = ()
    for plot in plots:
        pair = (*pair, plot)
        if len(pair) == 2:
            yield pair
            pair = ()
    yield from pair


def _overall(results: SweepResults) -> Table:
    names = short_names(results.sweep)
    head = ("number", "policy", "median", "worst", "best", "better *", "worse *", "worst at")
    rows = [
        (
            metric,
            each.policy,
            percent(each.median),
            percent(gain_of(each.worst)),
            percent(gain_of(each.best)),
            str(each.num_better),
            str(each.num_worse),
            label(each.worst.point, names),
        )
        for metric in results.sweep.metrics
        for each in results.overall(metric)
    ]
    return Table(head, rows)


# -------------------------------------------------------------------- gains


def _gains(results: SweepResults, metric: str) -> Iterator[Plot | tuple[Plot, ...]]:
    """Intervals point by point while they are few, and a heat map for each policy over two fields."""
    compared = [each for each in results.compare(metric) if math.isfinite(gain_of(each))]
    if not compared:
        return
    if len(results.sweep.points()) <= MOST_POINTS:
        yield _intervals(results, metric, compared)
    varied = [number for number, axis in enumerate(results.sweep.axes) if len(axis) > 1]
    if len(varied) >= 2:
        policies = dict.fromkeys(each.policy for each in compared)
        yield from _beside(_heat(results, metric, policy, compared, varied) for policy in policies)


def _intervals(results: SweepResults, metric: str, compared: Sequence[Comparison]) -> Plot:
    names = short_names(results.sweep)
    first = [next(iter(axis[0])) for axis in results.sweep.axes]  # the others of an axis follow from it
    rows: list[Row] = [
        {
            "point": label({name: each.point[name] for name in first}, names),
            "policy": each.policy,
            "gain": 100 * gain_of(each),
            "low": 100 * _finite(each.against.low, gain_of(each)),
            "high": 100 * _finite(each.against.high, gain_of(each)),
        }
        for each in compared
        if each.against is not None
    ]
    axis = Axis("gain", f"{metric}, % against {results.sweep.baseline}", format="+.1f")
    chart = with_long_words(intervals(rows, axis, Axis("point", ""), "low", "high", by="policy"))
    told = "; ".join(
        f"{each.policy}: median {percent(each.median)}, "
        f"from {percent(gain_of(each.worst))} to {percent(gain_of(each.best))}"
        for each in results.overall(metric)
    )
    better = "more" if more_is_better(metric) else "less"
    return Plot(metric, f"{told}. {better.capitalize()} is better; bars are 95% intervals.", chart)


def _heat(
    results: SweepResults, metric: str, policy: str, compared: Sequence[Comparison], varied: Sequence[int]
) -> Plot:
    """Over the first two fields; of others, the median."""
    names, axes = short_names(results.sweep), results.sweep.axes
    x_field, y_field = (next(iter(axes[number][0])) for number in varied[:2])
    sign = 1 if more_is_better(metric) else -1
    cells: dict[tuple[str, str], list[float]] = {}
    for each in (each for each in compared if each.policy == policy):
        place = as_text(each.point[x_field]), as_text(each.point[y_field])
        cells.setdefault(place, []).append(sign * gain_of(each))
    rows: list[Row] = [{"x": x, "y": y, "gain": 100 * median(gains)} for (x, y), gains in cells.items()]
    gain = Axis("gain", "% better (+) or worse (-)", format="+.1f")
    chart = heat(rows, Axis("x", names[x_field]), Axis("y", names[y_field]), gain, middle=0)
    least, most = (percent(pick(median(gains) for gains in cells.values())) for pick in (min, max))
    rest = ", the median over the other fields" if len(varied) > 2 else ""
    sentence = f"{policy} against {results.sweep.baseline}: from {least} to {most}, + is better{rest}."
    return Plot(f"{metric}: {policy}", sentence, chart)


def _finite(value: float, otherwise: float) -> float:
    return value if math.isfinite(value) else otherwise


# -------------------------------------------------------------------- lines


def _lines(results: SweepResults, metric: str) -> Iterator[Plot]:
    """Over the field with most values; a plot for each combination of the others, up to MOST_PLOTS."""
    sweep, names = results.sweep, short_names(results.sweep)
    along = max(sweep.axes, key=len)
    others = [axis for axis in sweep.axes if axis is not along]
    field = next(iter(along[0]))
    compared = results.compare(metric)
    for rest in list(product(*others))[:MOST_PLOTS]:
        at = {name: value for row in rest for name, value in row.items()}
        found = [each for each in compared if all(each.point[name] == value for name, value in at.items())]
        rows = [_row(each, field) for each in found if math.isfinite(each.mean.mean)]
        if rows:
            x = Axis("x", names[field], log=_is_geometric([row[field] for row in along]))
            chart = banded_lines(rows, x, Axis("mean", metric, zero=False), "low", "high")
            title = f"{metric}{' at ' + label(at, names) if at else ''}"
            yield Plot(title, f"{_told(found)}. Bands are 95% intervals of the mean over seeds.", chart)


def _row(each: Comparison, field: str) -> Row:
    value, mean = each.point[field], each.mean
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return {
        "x": value if is_number and isinstance(value, int | float) else as_text(value),
        "policy": each.policy,
        "mean": mean.mean,
        "low": mean.low,
        "high": mean.high,
    }


def _told(found: Sequence[Comparison]) -> str:
    means: dict[str, list[float]] = {}
    for each in found:
        means.setdefault(each.policy, []).append(each.mean.mean)
    return "; ".join(f"{policy} from {number(values[0])} to {number(values[-1])}" for policy, values in means.items())


def _is_geometric(values: Sequence[Json]) -> bool:
    """Whether numbers grow by factors, like 1, 2, 4."""
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) < max(3, len(values)) or numbers[0] <= 0:
        return False
    return all(after >= before * LEAST_RATIO for before, after in pairwise(numbers))


# -------------------------------------------------------------------- fronts


def _front(results: SweepResults) -> Plot:
    sweep, names = results.sweep, short_names(results.sweep)
    x, y = sweep.pareto
    rows: list[Row] = [
        {"policy": a.policy, "point": label(a.point, names), "x": a.mean.mean, "y": b.mean.mean}
        for a, b in zip(results.compare(x), results.compare(y), strict=True)
        if math.isfinite(a.mean.mean) and math.isfinite(b.mean.mean)
    ]
    best: Best = ("max" if more_is_better(x) else "min", "max" if more_is_better(y) else "min")
    front = frontier(rows, "x", "y", best)
    told = ", ".join(f"{row['policy']} at {row['point']}" if sweep.fields else str(row["policy"]) for row in front)
    chart = fronts(rows, Axis("x", x), Axis("y", y), "point" if sweep.fields else "policy", best)
    return Plot(f"{y} against {x}", f"No other run is better in both: {told}. The others are faded.", chart)
