"""A sweep as text for a terminal: each number by point and policy, gains on the same seeds, and over all points."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from equipoise.sim.sweep.values import as_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from equipoise.sim.sweep.results import Comparison, SweepResults
    from equipoise.sim.sweep.spec import Settings, Sweep
    from equipoise.sim.sweep.stats import Paired

NUM_ERRORS = 5
"""Failed runs that are told one by one."""


def table(results: SweepResults) -> str:
    """Everything in a few screens at most: a part for each number, then all points together, then what failed."""
    return "\n".join(_lines(results))


def short_names(sweep: Sweep) -> dict[str, str]:
    """The varied fields by the last parts of their paths, as many as tell them apart."""
    found = {}
    for name in sweep.fields:
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            short = ".".join(parts[-count:])
            if sum(f".{other}".endswith(f".{short}") for other in sweep.fields) == 1:
                break
        found[name] = short
    return found


def label(point: Settings, names: dict[str, str]) -> str:
    """A point in short, "ranks=2 spread=0.1"."""
    return " ".join(f"{names[name]}={as_text(value)}" for name, value in point.items()) or "-"


def percent(gain: float) -> str:
    """A gain as "+5.3%"."""
    return "-" if math.isnan(gain) else f"{round(gain, 3) + 0.0:+.1%}"  # no -0.0%


def gain_of(each: Comparison) -> float:
    """NaN for the baseline itself."""
    return math.nan if each.against is None else each.against.gain


def number(value: float) -> str:
    """Four digits or all before the point."""
    if math.isnan(value):
        return "-"
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.4g}"


def _lines(results: SweepResults) -> Iterator[str]:
    sweep, names = results.sweep, short_names(results.sweep)
    num_points, seeds = len(sweep.points()), sweep.seeds
    told = f"seed {seeds[0]}" if len(seeds) == 1 else f"{len(seeds)} seeds from {seeds[0]} to {seeds[-1]}"
    yield f"{sweep.name}: {num_points} points, {len(sweep.policies)} policies, {told}"
    wide = max(map(len, (*(label(point, names) for point in sweep.points()), *sweep.metrics)))
    policy_wide = max(map(len, (*sweep.policies, "policy")))
    compares = len(sweep.policies) > 1
    for metric in sweep.metrics:
        yield ""
        head = f"{metric:<{wide}}  {'policy':<{policy_wide}} {'mean':>12}"
        yield head + (f"  {'on ' + sweep.baseline:>9}  95% interval" if compares else "")
        last: Settings | None = None
        for each in results.compare(metric):
            shown = "" if each.point is last else label(each.point, names)
            last = each.point
            row = f"{shown:<{wide}}  {each.policy:<{policy_wide}} {number(each.mean.mean):>12}"
            yield (row + _against(each)).rstrip()
    if compares and num_points > 1:
        yield from _overall(results, names, wide, policy_wide)
    if compares:
        yield from _notes(results)
    yield from _failures(results)


def _against(each: Comparison) -> str:
    if each.against is None:
        return ""
    return f"  {percent(each.against.gain):>9}  {_interval(each.against)}"


def _interval(against: Paired) -> str:
    if math.isnan(against.low):
        return ""
    return f"{percent(against.low)} to {percent(against.high)}{' *' if against.is_significant else ''}"


def _overall(results: SweepResults, names: dict[str, str], wide: int, policy_wide: int) -> Iterator[str]:
    yield ""
    title = f"all {len(results.sweep.points())} points"
    columns = "".join(f"{head:>10}" for head in ("median", "worst", "best", "better *", "worse *"))
    yield f"{title:<{wide}}  {'policy':<{policy_wide}}{columns}  worst at"
    for metric in results.sweep.metrics:
        for each in results.overall(metric):
            gains = "".join(f"{percent(gain):>10}" for gain in (each.median, gain_of(each.worst), gain_of(each.best)))
            counts = f"{each.num_better:>10}{each.num_worse:>10}"
            yield f"{metric:<{wide}}  {each.policy:<{policy_wide}}{gains}{counts}  {label(each.worst.point, names)}"


def _notes(results: SweepResults) -> Iterator[str]:
    yield ""
    if len(results.sweep.seeds) < 2:
        yield "One seed: no intervals. Give --seeds 5 to tell gains from chance."
        return
    yield "Gains are of pairs of runs on the same seeds, intervals Student's t. * leaves zero out, as 1 in 20 would by"
    yield "chance where nothing differs."
    if any(_is_of_one_draw(each) for metric in results.sweep.metrics for each in results.compare(metric)):
        yield "Where an interval has no width, seeds change nothing here: nothing is drawn that differs. No star then."


def _is_of_one_draw(each: Comparison) -> bool:
    """Several seeds, the same numbers of each."""
    return each.against is not None and each.against.num_pairs > 1 and not each.against.seeds_differ


def _failures(results: SweepResults) -> Iterator[str]:
    failed = results.failures
    if not failed:
        return
    yield ""
    yield f"{len(failed)} of {len(results.rows)} runs failed and are left out:"
    for row in failed[:NUM_ERRORS]:
        where = label(row.point, short_names(results.sweep))
        yield f"  {where} / {row.policy} / seed {row.seed}: {row.error}"
    if len(failed) > NUM_ERRORS:
        yield f"  and {len(failed) - NUM_ERRORS} more"
