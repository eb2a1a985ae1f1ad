"""A sweep's results as files: rows, comparisons, and what was swept."""

from __future__ import annotations

import csv
import io
import math
from typing import TYPE_CHECKING

import msgspec

from equipoise.sim.sweep.table import gain_of
from equipoise.sim.sweep.values import Json, as_text

if TYPE_CHECKING:
    from pathlib import Path

    from equipoise.sim.sweep.results import Comparison, Overall, SweepResults
    from equipoise.sim.sweep.spec import Sweep

ROWS_PARQUET, ROWS_CSV, COMPARED, SWEPT = "rows.parquet", "rows.csv", "sweep.json", "sweep.yaml"

Cell = str | int | float | bool | None


def save(results: SweepResults, folder: Path) -> None:
    """Write all into `folder`, which exists. Needs pyarrow."""
    rows = flat_rows(results)
    _write_parquet(folder / ROWS_PARQUET, rows)
    (folder / ROWS_CSV).write_text(_csv(rows), encoding="utf-8")
    (folder / COMPARED).write_bytes(results_json(results))
    (folder / SWEPT).write_bytes(msgspec.yaml.encode(as_table(results.sweep)))


def flat_rows(results: SweepResults) -> list[dict[str, Cell]]:
    """A row for each run: its point's fields, policy, seed, all numbers of a summary (NaN for what it lacks), error."""
    names = dict.fromkeys(name for row in results.rows for name in row.numbers)
    return [
        {name: _cell(value) for name, value in row.point.items()}
        | {"policy": row.policy, "seed": row.seed}
        | {name: row.number(name) for name in names}
        | {"error": row.error}
        for row in results.rows
    ]


def as_table(sweep: Sweep) -> dict[str, Json]:
    """What a file would say of it: the scenario as it was given, and where its relative paths are."""
    return {
        "scenario": dict(sweep.base),
        "folder": str(sweep.folder.absolute()),
        "set": dict(sweep.fixed),
        "vary": [{name: [row[name] for row in axis] for name in axis[0]} for axis in sweep.axes],
        "policies": {name: dict(settings) for name, settings in sweep.policies.items()},
        "baseline": sweep.baseline,
        "seeds": list(sweep.seeds),
        "metrics": list(sweep.metrics),
        "pareto": list(sweep.pareto),
    }


def results_json(results: SweepResults) -> bytes:
    """What was swept, every comparison and those over all points, as one object; null for what is no number."""
    sweep = results.sweep
    found = {
        "name": sweep.name,
        "baseline": sweep.baseline,
        "seeds": list(sweep.seeds),
        "num_failed": len(results.failures),
        "points": [_compared(each) for metric in sweep.metrics for each in results.compare(metric)],
        "overall": [_overall(each) for metric in sweep.metrics for each in results.overall(metric)],
        "failed": [
            {"point": dict(row.point), "policy": row.policy, "seed": row.seed, "error": row.error}
            for row in results.failures
        ],
    }
    return msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n"


def _compared(each: Comparison) -> dict[str, Json]:
    found: dict[str, Json] = {
        "point": dict(each.point),
        "policy": each.policy,
        "metric": each.metric,
        "mean": _or_null(each.mean.mean),
        "mean_interval": [_or_null(each.mean.low), _or_null(each.mean.high)],
    }
    against = each.against
    if against is not None:
        found |= {
            "gain": _or_null(against.gain),
            "gain_interval": [_or_null(against.low), _or_null(against.high)],
            "is_significant": against.is_significant,
            "num_pairs": against.num_pairs,
            "method": against.method,
        }
    return found


def _overall(each: Overall) -> dict[str, Json]:
    return {
        "policy": each.policy,
        "metric": each.metric,
        "median_gain": each.median,
        "worst_gain": gain_of(each.worst),
        "worst_at": dict(each.worst.point),
        "best_gain": gain_of(each.best),
        "best_at": dict(each.best.point),
        "num_better": each.num_better,
        "num_worse": each.num_worse,
    }


def _or_null(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _cell(value: Json) -> Cell:
    return value if isinstance(value, bool | int | float | str | None) else as_text(value)


def _csv(rows: list[dict[str, Cell]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: "" if _is_nan(value) else value for name, value in row.items()} for row in rows)
    return text.getvalue()


def _is_nan(value: Cell) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _write_parquet(path: Path, rows: list[dict[str, Cell]]) -> None:
    import pyarrow
    from pyarrow import parquet

    columns = {name: _column([row[name] for row in rows]) for name in rows[0]}
    parquet.write_table(pyarrow.table({name: pyarrow.array(column) for name, column in columns.items()}), path)


def _column(cells: list[Cell]) -> list[Cell]:
    """Of one type: as they are when they share one, all numbers as floats, else as text."""
    kinds = {type(cell) for cell in cells if cell is not None}
    if len(kinds) <= 1:
        return cells
    if kinds == {int, float}:
        return [None if cell is None else float(cell) for cell in cells]
    return [None if cell is None else as_text(cell) for cell in cells]
