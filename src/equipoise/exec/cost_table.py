"""Step times put together from measured latencies of a model's layers.

Tables are CSV files (gzipped or not) that share a beginning, PREFIX_dense.csv and so on, times in microseconds:

    dense         layer,tokens                                        matrices and norms, by tokens of the step
    attention     prefill_chunk,kv_prefill,n_decode,kv_decode         one layer: a chunk over its history, and decode
                                                                      rows that read kv_decode tokens each
    per_sequence  layer,sequences                                     head and sampler, by rows that draw a token
    moe           tokens,activated_experts                            experts of one layer; not in dense models

Such tables come from LLMServingSim (KAIST, github.com/casys-kaist/LLMServingSim, MIT licence). Between measured
points the time is interpolated; beyond them it goes on along the last slope, and a warning says so once.
"""

from __future__ import annotations

import csv
import gzip
import logging
from bisect import bisect_right
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from equipoise.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from equipoise.exec.cost import StepLoad

    Row = dict[str, str]

log = logging.getLogger(__name__)

US = 1e-6
LAYER_PARTS = {"layernorm": 2}
"""How often a part stands in one transformer layer, where not once."""
ONCE = ("embedding", "final_layernorm")
"""Dense parts outside the layers."""
AXES = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")


class Curve:
    """A function through measured points, straight between them and beyond the last."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        """`xs` ascend. A single point makes a constant."""
        points = list(zip(xs, ys, strict=True))
        if len(points) == 1:
            points.append((points[0][0] + 1, points[0][1]))
        self.xs = [x for x, _ in points]
        self.ys = [y for _, y in points]
        self._slopes = [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in pairwise(points)]

    def at(self, x: float) -> float:
        """The value at `x`."""
        i = min(max(bisect_right(self.xs, x) - 1, 0), len(self._slopes) - 1)
        return self.ys[i] + self._slopes[i] * (x - self.xs[i])

    def at_each(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """The same for each of `x`, to the last bit."""
        i = np.clip(np.searchsorted(self._x, x, side="right") - 1, 0, len(self._slopes) - 1)
        return self._y[i] + self._slope[i] * (x - self._x[i])

    @cached_property
    def _x(self) -> NDArray[np.float64]:
        return np.array(self.xs)

    @cached_property
    def _y(self) -> NDArray[np.float64]:
        return np.array(self.ys)

    @cached_property
    def _slope(self) -> NDArray[np.float64]:
        return np.array(self._slopes)


class AttentionTable:
    """Seconds of attention in one layer over the grid (chunk, its history, decode rows, KV tokens of each row)."""

    def __init__(self, rows: Iterable[Row]) -> None:
        points = {tuple(int(float(row[axis])) for axis in AXES): float(row["time_us"]) * US for row in rows}
        self.axes = [sorted({point[axis] for point in points}) for axis in range(len(AXES))]
        grid = np.full([len(axis) for axis in self.axes], np.nan)
        for point, seconds in points.items():
            grid[tuple(axis.index(value) for axis, value in zip(self.axes, point, strict=True))] = seconds
        self._grid = _without_gaps(grid)
        self._by_rows: dict[int, Curve] = {}

    def curve(self, chunk: float, history: float, rows: int) -> Curve:
        """Seconds by KV tokens per decode row. Those of steps without a chunk are kept."""
        if chunk:
            return self._curve(chunk, history, rows)
        found = self._by_rows.get(rows)
        if found is None:
            found = self._by_rows[rows] = self._curve(0.0, 0.0, rows)
        return found

    def _curve(self, chunk: float, history: float, rows: int) -> Curve:
        plane = self._grid
        for axis, value in zip(self.axes, (chunk, history, float(rows)), strict=False):
            plane = _between(plane, axis, value)
        return Curve(self.axes[3], plane.tolist())


def _between(grid: NDArray[np.float64], axis: list[int], value: float) -> NDArray[np.float64]:
    """`grid` at `value` of its first axis."""
    if len(axis) == 1:
        first: NDArray[np.float64] = grid[0]
        return first
    i = min(max(bisect_right(axis, value) - 1, 0), len(axis) - 2)
    share = (value - axis[i]) / (axis[i + 1] - axis[i])
    between: NDArray[np.float64] = grid[i] + share * (grid[i + 1] - grid[i])
    return between


def _without_gaps(grid: NDArray[np.float64]) -> NDArray[np.float64]:
    """`grid` with points that make no sense or were not measured (a history of no chunk) taken from the nearest that
    was, along one axis after the other, the last axis first."""
    for axis in reversed(range(grid.ndim)):
        grid = np.apply_along_axis(_fill_line, axis, grid)
    return grid


def _fill_line(line: NDArray[np.float64]) -> NDArray[np.float64]:
    known = np.flatnonzero(~np.isnan(line))
    if not len(known) or len(known) == len(line):
        return line
    nearest = np.abs(np.arange(len(line))[:, None] - known[None, :]).argmin(axis=1)
    return np.asarray(line[known[nearest]])


class TableCost:
    """A `CostModel` out of measured tables. `overhead_s` is what a step costs beside its kernels, `row_overhead_s`
    what each of its requests does."""

    def __init__(
        self,
        prefix: Path,
        num_layers: int,
        *,
        overhead_s: float = 0.0,
        row_overhead_s: float = 0.0,
        experts: tuple[int, int] = (0, 0),
    ) -> None:
        """`experts`: how many there are and how many a token visits; only of models with a table of experts.

        Raises ConfigError when a table is missing or broken."""
        self.source = f"measured layer times, {prefix}"
        self._num_layers = num_layers
        self._overhead_s = overhead_s
        self._row_overhead_s = row_overhead_s
        self._experts = experts
        self.attention = _attention(prefix)
        dense = _curves(_rows(prefix, "dense"), "layer", "tokens")
        self._once = [curve for name, curve in sorted(dense.items()) if name in ONCE]
        self._each = [(LAYER_PARTS.get(name, 1), curve) for name, curve in sorted(dense.items()) if name not in ONCE]
        self._heads = list(_curves(_rows(prefix, "per_sequence"), "layer", "sequences").values())
        self._experts_s = _experts(prefix, experts)
        self.most_tokens = max(curve.xs[-1] for curve in dense.values())
        self._dense_memo: dict[int, float] = {}
        self._heads_memo: dict[int, float] = {}
        self._has_warned = False

    def shared_s(self, *, any_prefill: bool) -> float:
        return self._overhead_s

    def rank_s(self, load: StepLoad) -> float:
        rows, chunk = load.decode_rows, load.prefill_tokens
        if not rows and not chunk:
            return 0.0
        history = 0.0
        if chunk:
            history = max(0.0, (load.prefill_pairs - chunk * (chunk / load.num_chunks + 1) / 2) / chunk)
        kv_each = load.kv_tokens / rows if rows else 0.0
        self._warn_beyond(chunk + rows, rows, kv_each)
        attention_s = self.attention.curve(chunk, history, rows).at(kv_each)
        return self._flat_s(chunk + rows, rows + load.num_chunks) + self._num_layers * attention_s

    def decode_s(self, rows: int, kv_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        kv_each = kv_tokens / rows
        self._warn_beyond(rows, rows, float(kv_each.max(initial=0.0)))
        attention_s = self.attention.curve(0, 0, rows).at_each(kv_each)
        return self._flat_s(rows, rows) + self._num_layers * attention_s

    def _flat_s(self, num_tokens: int, num_sequences: int) -> float:
        """All but attention."""
        dense_s = self._dense_memo.get(num_tokens)
        if dense_s is None:
            dense_s = self._dense_memo[num_tokens] = self._dense_s(num_tokens)
        heads_s = self._heads_memo.get(num_sequences)
        if heads_s is None:
            heads_s = sum(curve.at(num_sequences) for curve in self._heads) + self._row_overhead_s * num_sequences
            self._heads_memo[num_sequences] = heads_s
        return dense_s + heads_s

    def _dense_s(self, num_tokens: int) -> float:
        layer_s = sum(count * curve.at(num_tokens) for count, curve in self._each)
        if self._experts_s is not None:
            num_experts, per_token = self._experts
            activated = num_experts * (1 - (1 - per_token / num_experts) ** num_tokens)
            layer_s += _between_curves(self._experts_s, activated, num_tokens)
        return self._num_layers * layer_s + sum(curve.at(num_tokens) for curve in self._once)

    def _warn_beyond(self, num_tokens: int, rows: int, kv_each: float) -> None:
        _, _, most_rows, most_kv = (axis[-1] for axis in self.attention.axes)
        if self._has_warned or (num_tokens <= self.most_tokens and rows <= most_rows and kv_each <= most_kv):
            return
        self._has_warned = True
        log.warning(
            "cost: a step of %d tokens, %d decode rows of %.0f KV tokens is beyond what was measured (%d, %d, %d)"
            " and extrapolated; source: %s",
            *(num_tokens, rows, kv_each, self.most_tokens, most_rows, most_kv, self.source),
        )


def _attention(prefix: Path) -> AttentionTable:
    rows = _rows(prefix, "attention")
    try:
        return AttentionTable(rows)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"cost: {prefix}_attention.csv: a row is broken: {error!r}") from None


def _curves(rows: list[Row], name: str, axis: str) -> dict[str, Curve]:
    points: dict[str, dict[float, float]] = {}
    try:
        for row in rows:
            points.setdefault(row[name], {})[float(row[axis])] = float(row["time_us"]) * US
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"cost: a table of {axis}: a row is broken: {error!r}") from None
    return {key: Curve(sorted(values), [values[x] for x in sorted(values)]) for key, values in points.items()}


def _experts(prefix: Path, experts: tuple[int, int]) -> list[tuple[float, Curve]] | None:
    """Seconds by tokens, for each measured number of activated experts; None in dense models."""
    if _file(prefix, "moe") is None:
        return None
    if not 0 < experts[1] <= experts[0]:
        raise ConfigError(f"experts: {experts} must be how many there are and how many of them a token visits")
    curves = _curves(_rows(prefix, "moe"), "activated_experts", "tokens")
    return sorted(((float(count), curve) for count, curve in curves.items()), key=lambda item: item[0])


def _between_curves(curves: list[tuple[float, Curve]], x: float, at: float) -> float:
    return Curve([count for count, _ in curves], [curve.at(at) for _, curve in curves]).at(x)


def _file(prefix: Path, table: str) -> Path | None:
    for suffix in (".csv", ".csv.gz"):
        path = Path(f"{prefix}_{table}{suffix}")
        if path.is_file():
            return path
    return None


def _rows(prefix: Path, table: str) -> list[Row]:
    path = _file(prefix, table)
    if path is None:
        raise ConfigError(f"cost: there is neither {prefix}_{table}.csv nor {prefix}_{table}.csv.gz")
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"cost: {path} cannot be read: {error}") from None
    if not rows:
        raise ConfigError(f"cost: {path} is empty")
    return rows
