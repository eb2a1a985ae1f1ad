"""Tables and charts of the routing experiment: ranks by tokens against two other ways, seed by seed."""

from __future__ import annotations

from statistics import mean
from typing import TYPE_CHECKING, NamedTuple

from equipoise.sim.experiment.rows import Table, name_of, points_of
from equipoise.sim.experiment.show import number, percent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from equipoise.sim.experiment.rows import Point, Row
    from equipoise.sim.report.charts import Row as Drawn
    from equipoise.sim.report.look import Chart

WORKERS = ("random", "round_robin", "cache_aware", "prefix_tokens", "least_tokens")
"""The three that were published, and two of ours."""
RANKS = {"random rooms": "follow_room", "round robin": "round_robin", "tokens": "minimum_tokens"}
"""Rank policies by what they go by."""
TTFT, TPOT = "ttft_mean_ms", "tpot_mean_ms"
PUBLISHED = {"random": (-0.145, -0.099), "round_robin": (-0.182, -0.116), "cache_aware": (-0.148, -0.080)}
"""Change of TTFT and TPOT by ranks chosen by tokens, by worker policy: sgl-project/sglang#20435."""
LEAST, MOST = (-0.182, -0.116), (-0.145, -0.080)
"""The ends of those."""


class Change(NamedTuple):
    """Relative changes, one for each seed."""

    by_seed: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Over seeds."""
        return mean(self.by_seed)

    def __str__(self) -> str:
        if len(self.by_seed) == 1:
            return percent(self.mean)
        return f"{percent(self.mean)} ({percent(min(self.by_seed))} to {percent(max(self.by_seed))})"


class Found:
    """Rows by point, policy and seed."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.points: Mapping[str, Point] = points_of(rows)
        self._rows: dict[tuple[str, str], dict[int, Row]] = {}
        for row in rows:
            self._rows.setdefault((name_of(row.point), row.policy), {})[row.seed] = row

    def part(self, name: str) -> list[str]:
        """The names of the points of a part, in the order of the rows."""
        return [point for point, axes in self.points.items() if axes["part"] == name]

    def has(self, point: str, policy: str) -> bool:
        """Whether there are rows of `policy` at `point`."""
        return (point, policy) in self._rows

    def mean(self, point: str, policy: str, metric: str) -> float:
        """Over seeds."""
        return mean(row[metric] for row in self._rows[point, policy].values())

    def change(self, policy: str, over: str, metric: str, point: str, over_point: str | None = None) -> Change:
        """What `policy` changes of what `over` comes to, there or at `over_point`, on the same seeds."""
        theirs = self._rows[over_point or point, over]
        return Change(tuple(row[metric] / theirs[seed][metric] - 1 for seed, row in self._rows[point, policy].items()))


def tables(rows: Sequence[Row]) -> list[Table]:
    """Worker policies, the map, and how old loads may be."""
    found = Found(rows)
    return [_policies_table(found), _map_table(found), _where_table(found), _stale_table(found)]


def _policies_table(found: Found) -> Table:
    (point,) = found.part("policies")
    lines = []
    for worker in (worker for worker in WORKERS if found.has(point, f"{worker} / tokens")):
        tokens, rooms, turns = (f"{worker} / {ranks}" for ranks in ("tokens", "random rooms", "round robin"))
        published = ", ".join(percent(each) for each in PUBLISHED[worker]) if worker in PUBLISHED else "-"
        changes = (str(found.change(tokens, over, metric, point)) for over in (rooms, turns) for metric in (TTFT, TPOT))
        times = (number(found.mean(point, rooms, metric)) for metric in (TTFT, TPOT))
        lines.append((worker, *times, *changes, published))
    header = (
        "worker policy", "TTFT ms", "TPOT ms", "TTFT vs rooms", "TPOT vs rooms", "TTFT vs turns", "TPOT vs turns",
        "published",
    )  # fmt: skip
    notes = (
        "TTFT and TPOT with random rooms; then what ranks by tokens change of that, and of round robin's (turns).",
        "Published (SGLang, P/D): TTFT and TPOT against random rooms.",
    )
    return Table(f"Worker policies, {_where(found.points[point])}", header, lines, notes)


def _map_table(found: Found) -> Table:
    lines = []
    for name in found.part("map") + found.part("full"):
        cells = (
            str(found.change(f"round_robin / {ranks}", "round_robin / random rooms", metric, name))
            for ranks in ("tokens", "round robin")
            for metric in (TTFT, TPOT)
        )
        lines.append((_where(found.points[name]), *cells))
    header = ("", "TTFT by tokens", "TPOT by tokens", "TTFT by turns", "TPOT by turns")
    notes = ("Worker policy round_robin; changes of what random rooms come to, on the same seeds.",)
    return Table("Ranks by tokens, and by turns (round robin), against random rooms", header, lines, notes)


def _where_table(found: Found) -> Table:
    names = found.part("map") + found.part("full")
    changes = {name: tuple(change.mean for change in _by_tokens(found, name)) for name in names}

    def within(metric: int) -> list[str]:
        return [name for name in names if LEAST[metric] <= changes[name][metric] <= MOST[metric]]

    both = [name for name in within(0) if name in within(1)]
    lines = [
        (what, "; ".join(_where(found.points[name]) for name in where) or "nowhere")
        for what, where in (("TTFT", within(0)), ("TPOT", within(1)), ("both", both))
    ]
    return Table("Where the published changes against random rooms lie", ("", "at"), lines)


def _by_tokens(found: Found, point: str) -> Iterator[Change]:
    for metric in (TTFT, TPOT):
        yield found.change("round_robin / tokens", "round_robin / random rooms", metric, point)


def _stale_table(found: Found) -> Table:
    (base,) = found.part("policies")
    lines = [
        (f"{age_s:g}", *(str(change) for change in changes))
        for age_s, changes in _stale(found, base, "random rooms").items()
    ]
    header = ("seconds between reports", "TTFT, charges", "TPOT, charges", "TTFT, none", "TPOT, none")
    notes = ("Changes of what random rooms come to, which look at no load; 0: a fresh report for each choice.",)
    return Table(f"Ranks by tokens with old loads, {_where(found.points[base])}", header, lines, notes)


def _stale(found: Found, base: str, over: str) -> dict[float, list[Change]]:
    """By age: TTFT and TPOT with charges, then without."""
    changes: dict[float, list[Change]] = {}
    for name in found.part("stale"):
        for metric in (TTFT, TPOT):
            change = found.change("round_robin / tokens", f"round_robin / {over}", metric, name, base)
            changes.setdefault(float(found.points[name]["age_s"]), []).append(change)
    return changes


def _where(point: Point) -> str:
    filled = f", {point['filled']:.0%} full" if point["part"] == "full" else ""
    return f"{point['topology']}, KV {point['kv']:.0%}, load {point['load']:.0%}{filled}"


def charts(rows: Sequence[Row]) -> Mapping[str, Chart]:
    """The map with the published changes on it, TTFT by load, and what old loads do; percent."""
    from equipoise.sim.report.charts import Axis, lines, points

    found = Found(rows)
    ttft, tpot = Axis("ttft", "change of TTFT, %"), Axis("tpot", "change of TPOT, %")
    drawn: list[Drawn] = [
        {"ttft": 100 * x.mean, "tpot": 100 * y.mean, "topology": str(found.points[name]["topology"]), "at": name}
        for name in found.part("map")
        for x, y in [tuple(_by_tokens(found, name))]
    ]
    drawn += [
        {"ttft": 100 * x, "tpot": 100 * y, "topology": "published", "at": worker}
        for worker, (x, y) in PUBLISHED.items()
    ]
    age = Axis("age", "seconds between load reports")
    return {
        "map": points(drawn, ttft, tpot, by="topology", size=70, opacity=0.85),
        "load": lines(
            list(_by_load(found)), Axis("load", "load of the prefill ranks", zero=False), ttft, by="topology", dots=True
        ),
        "stale": lines(list(_by_age(found)), age, Axis("ttft", "TTFT over random rooms, %"), by="with", dots=True),
    }


def _by_load(found: Found) -> Iterator[Drawn]:
    for name in found.part("map"):
        point = found.points[name]
        if point["kv"] == 0.8:
            ttft, _ = _by_tokens(found, name)
            yield {"load": float(point["load"]), "ttft": 100 * ttft.mean, "topology": str(point["topology"])}


def _by_age(found: Found) -> Iterator[Drawn]:
    (base,) = found.part("policies")
    for age_s, (charged, _, uncharged, _) in _stale(found, base, "random rooms").items():
        yield {"age": age_s, "ttft": 100 * charged.mean, "with": "charges"}
        yield {"age": age_s, "ttft": 100 * uncharged.mean, "with": "no charges"}
