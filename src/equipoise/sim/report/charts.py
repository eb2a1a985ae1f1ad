"""Charts from plain rows, the house's look, and SVG for documents.

    rows = [{"rate": 8, "policy": "none", "ttft_ms": 210.0}, ...]
    chart = lines(rows, Axis("rate", "requests per second"), Axis("ttft_ms", "mean TTFT, ms"), by="policy")
    save_svg(Path("docs/ttft.svg"), chart)
    save_page(Path("report.html"), "Rates", [Section("Latency", [Plot("TTFT", "At 8 requests/s ...", chart)])])

A row maps names to numbers or words; NaN and None are gaps. Series and words keep the order in which rows name them,
and with it their colours. Pages are in `equipoise.sim.report.page`, whose names are here too. Needs altair and
vl-convert: call `check_can_draw` before hours are spent on rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from equipoise.errors import ConfigError
from equipoise.sim.report.look import DIVERGING, save_svg
from equipoise.sim.report.page import Figures, Folded, Plot, Section, Table, save_page
from equipoise.sim.report.pareto import frontier

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import altair as alt
    import numpy as np
    from numpy.typing import NDArray

    from equipoise.sim.report.look import Chart

    Value = str | float | None
    Row = Mapping[str, Value]

__all__ = [
    "Axis",
    "Figures",
    "Folded",
    "Plot",
    "Section",
    "Table",
    "bars",
    "check_can_draw",
    "frontier",
    "grid",
    "heat",
    "intervals",
    "lines",
    "pareto",
    "points",
    "save_page",
    "save_svg",
]

HEIGHT = 260
"""Pixels; charts are as wide as the page."""
OVERLAP = 0.05
"""Of a cell with its neighbours: without it seams show between them."""


@dataclass(frozen=True)
class Axis:
    """What an axis or a colour shows: the field of the rows and its title, with the unit.

    log: a logarithmic scale, which has no zero; zero: the scale begins at zero; format: of numbers in tooltips and
    cells, as d3 has it."""

    field: str
    title: str
    log: bool = False
    zero: bool = True
    format: str = ",.4~r"


def check_can_draw(option: str = "report") -> None:
    """Raises ConfigError, naming `option`, when the libraries that draw are not installed."""
    missing = [name for name in ("altair", "vl_convert") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"{option}: charts need altair and vl-convert-python: install equipoise[sim]")


# -------------------------------------------------------------------- kinds of charts


def lines(
    rows: Iterable[Row],
    x: Axis,
    y: Axis,
    *,
    by: str | None = None,
    stacked: bool = False,
    dots: bool = False,
    interpolate: Literal["linear", "step-before"] = "linear",
    marked: Mapping[str, float] | None = None,
) -> Chart:
    """A line for each value of `by`; or areas, `stacked`. `dots` marks each row. `marked` draws vertical lines at
    places of `x`, by their labels."""
    import altair as alt

    rows = list(rows)
    data, names = _data(rows)
    base = alt.Chart(data).encode(x=_quantitative(alt.X, x), tooltip=_tooltips(names, (x, y), by), **_color(rows, by))
    if stacked:
        drawn = base.mark_area(line={"strokeWidth": 1}, fillOpacity=0.55, interpolate=interpolate).encode(
            y=_quantitative(alt.Y, y)
        )
    else:
        drawn = base.mark_line(point={"size": 34} if dots else False, interpolate=interpolate).encode(
            y=_quantitative(alt.Y, y)
        )
    return _with_rules(drawn, x, marked) if marked else _sized(drawn)


def bars(rows: Iterable[Row], x: Axis, y: Axis, *, by: str | None = None, stacked: bool = False) -> Chart:
    """A bar for each word of `x`; those of `by` side by side, or `stacked`."""
    import altair as alt

    rows = list(rows)
    data, names = _data(rows)
    beside = {"xOffset": alt.XOffset(by, type="nominal", sort=None)} if by and not stacked else {}
    drawn = (
        alt.Chart(data)
        .mark_bar(cornerRadiusEnd=1)
        .encode(
            x=_nominal(alt.X, x),
            y=_quantitative(alt.Y, y),
            tooltip=_tooltips(names, (x, y), by),
            **beside,
            **_color(rows, by),
        )
    )
    return _sized(drawn)


def points(
    rows: Iterable[Row],
    x: Axis,
    y: Axis,
    *,
    by: str | None = None,
    order: Sequence[str] = (),
    size: int = 22,
    opacity: float = 0.55,
) -> Chart:
    """A scatter plot; tooltips tell all fields of a row. `order`: of the colours of `by`, by default that of rows."""
    import altair as alt

    rows = list(rows)
    data, names = _data(rows)
    drawn = (
        alt.Chart(data)
        .mark_circle(size=size, opacity=opacity)
        .encode(
            x=_quantitative(alt.X, x),
            y=_quantitative(alt.Y, y),
            tooltip=_tooltips(names, (x, y), by),
            **_color(rows, by, order),
        )
    )
    return _sized(drawn)


def pareto(
    rows: Iterable[Row],
    x: Axis,
    y: Axis,
    *,
    by: str | None = None,
    label: str | None = None,
    best: tuple[Literal["min", "max"], Literal["min", "max"]] = ("min", "max"),
) -> Chart:
    """A scatter plot with a line through the rows that no other beats in both `x` and `y`; `best` of each.

    `label`: a field that is written beside those rows."""
    import altair as alt

    rows = [row for row in rows if _is_number(row.get(x.field)) and _is_number(row.get(y.field))]
    front = frontier(rows, x.field, y.field, best)
    cloud = points(rows, x, y, by=by, size=60, opacity=0.85)
    base = alt.Chart(_data(front)[0]).encode(x=_quantitative(alt.X, x), y=_quantitative(alt.Y, y))
    layers = [base.mark_line(strokeDash=[4, 3], strokeWidth=1.2, color="#8a8f8d", interpolate="linear"), cloud]
    if label:
        layers.append(
            base.mark_text(align="left", dx=7, dy=-7, fontSize=11).encode(text=alt.Text(label, type="nominal"))
        )
    return _sized(alt.layer(*layers), HEIGHT + 60)


def intervals(rows: Iterable[Row], x: Axis, y: Axis, low: str, high: str, *, by: str | None = None) -> Chart:
    """A dot for each word of `y` at `x`, in a bar from the fields `low` to `high`; a line at zero."""
    import altair as alt

    rows = list(rows)
    data, names = _data(rows)
    beside = {"yOffset": alt.YOffset(by, type="nominal", sort=None)} if by else {}
    base = alt.Chart(data).encode(
        y=_nominal(alt.Y, y), tooltip=_tooltips(names, (x,), by), **beside, **_color(rows, by)
    )
    span = base.mark_rule(strokeWidth=2).encode(
        x=alt.X(low, type="quantitative", title=x.title, axis=_ticks()), x2=alt.X2(high)
    )
    dot = base.mark_circle(size=64, opacity=1).encode(x=alt.X(x.field, type="quantitative"))
    zero = alt.Chart(alt.Data(values=[{"at": 0}])).mark_rule(color="#8a8f8d", strokeDash=[3, 3]).encode(x="at:Q")
    num_words = len({str(row.get(y.field)) for row in rows}) * (len({str(row.get(by)) for row in rows}) if by else 1)
    return _sized(alt.layer(zero, span, dot), max(90, 26 * num_words))


def heat(rows: Iterable[Row], x: Axis, y: Axis, value: Axis, *, middle: float | None = None) -> Chart:
    """A cell for each pair of words of `x` and `y`, with its value in it; those below and above `middle` differ in
    hue."""
    import altair as alt

    rows = list(rows)
    data, names = _data(rows)
    found = [float(row[value.field] or 0) for row in rows if _is_number(row.get(value.field))]
    base = alt.Chart(data).encode(x=_nominal(alt.X, x), y=_nominal(alt.Y, y))
    if middle is None:
        scale = alt.Scale(zero=value.zero)
        dark = f"datum[{value.field!r}] > {_span(found)[0] + 0.55 * (_span(found)[1] - _span(found)[0])}"
    else:
        reach = max((abs(each - middle) for each in found), default=1.0) or 1.0
        scale = alt.Scale(domain=[middle - reach, middle, middle + reach], range=list(DIVERGING), interpolate="lab")
        dark = f"abs(datum[{value.field!r}] - {middle}) > {0.55 * reach}"
    cells = base.mark_rect().encode(
        color=alt.Color(value.field, type="quantitative", title=value.title, scale=scale, legend=_legend()),
        tooltip=_tooltips(names, (x, y, value), None),
    )
    text = base.mark_text(fontSize=11).encode(
        text=alt.Text(value.field, type="quantitative", format=value.format),
        color=alt.condition(dark, alt.value("#ffffff"), alt.value("#20272a")),
    )
    num_words = len({str(row.get(y.field)) for row in rows})
    layers = [cells, text] if middle is not None else [cells]
    return _sized(alt.layer(*layers), max(90, 30 * num_words))


def grid(
    values: NDArray[np.floating[Any]],
    x: Axis,
    y: Axis,
    value: Axis,
    *,
    x_step: float,
    y_step: float = 1,
    digits: int = 3,
) -> Chart:
    """A heat map of a dense (rows, columns) array, row 0 on top: cells `x_step` wide, `y_step` high, from zero on.

    The array travels as bare numbers of `digits` digits, at most 7 bytes a cell: 512 x 200 cells are fine."""
    import altair as alt

    num_rows, num_columns = values.shape
    # As text: the library would look at every one of a hundred thousand numbers, several times.
    flat = ",".join([_short(each, digits) for each in values.ravel().tolist()])
    place = f"floor((datum.i - 1) / {num_columns})", f"((datum.i - 1) % {num_columns})"
    height = min(max(num_rows * 22, 90), max(300, min(num_rows, 560)))
    scale = alt.Scale(zero=value.zero, nice=True)
    cells = (
        alt.Chart(alt.InlineData(values=f"[{flat}]", format=alt.JsonDataFormat(type="json")))
        .transform_window(i="row_number()")
        .transform_calculate(
            **{
                "row": f"{place[0]} * {y_step}",
                "top": f"{place[0]} * {y_step} - 0.5",
                "bottom": f"min({place[0]} + 1 + {OVERLAP}, {num_rows}) * {y_step} - 0.5",
                "from": f"{place[1]} * {x_step!r}",
                "to": f"min({place[1]} + 1 + {OVERLAP}, {num_columns}) * {x_step!r}",
            }
        )
        .mark_rect()
        .encode(
            x=alt.X("from", type="quantitative", title=x.title, scale=alt.Scale(nice=False, zero=False), axis=_ticks()),
            x2=alt.X2("to"),
            y=alt.Y(
                "top",
                type="quantitative",
                title=y.title,
                scale=alt.Scale(reverse=True, nice=False, domain=[-0.5, num_rows * y_step - 0.5]),
                axis=alt.Axis(tickMinStep=1, grid=False, format="d", offset=3),
            ),
            y2=alt.Y2("bottom"),
            color=alt.Color("data", type="quantitative", title=value.title, scale=scale, legend=_legend()),
            tooltip=[
                alt.Tooltip("row", type="quantitative", title=y.title, format="d"),
                alt.Tooltip("from", type="quantitative", title=x.title, format=x.format),
                alt.Tooltip("data", type="quantitative", title=value.title, format=value.format),
            ],
        )
        .properties(usermeta={"embedOptions": {"renderer": "canvas"}})
    )
    return _sized(cells, height)


# -------------------------------------------------------------------- parts of charts


def _sized(chart: alt.Chart, height: int = HEIGHT) -> Chart:
    sized: Chart = chart.properties(height=height, width="container")
    return sized


def _data(rows: Iterable[Row]) -> tuple[alt.InlineData, dict[str, bool]]:
    """The rows as data, and its fields: whether they are numbers."""
    import altair as alt

    found = [{name: _clean(value) for name, value in row.items()} for row in rows]
    names = dict.fromkeys((name for row in found for name in row), True)
    for row in found:
        for name, value in row.items():
            names[name] &= not isinstance(value, str)
    return alt.InlineData(values=found), names


def _clean(value: Value) -> Value:
    """Numbers that JSON knows, with 6 digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def _short(value: float, digits: int) -> str:
    """`value` as JSON in a few bytes; an object without a number for what is none."""
    return f"{float(f'{value:.{digits}g}'):g}" if math.isfinite(value) else "{}"


def _is_number(value: Value | object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _span(values: Sequence[float]) -> tuple[float, float]:
    return (min(values), max(values)) if values else (0.0, 1.0)


def _quantitative(channel: type[alt.X] | type[alt.Y], axis: Axis) -> alt.X | alt.Y:
    import altair as alt

    scale = alt.Scale(type="log", nice=False) if axis.log else alt.Scale(zero=axis.zero)
    return channel(axis.field, type="quantitative", title=axis.title, scale=scale, axis=_ticks(log=axis.log))


def _ticks(*, log: bool = False) -> alt.Axis:
    import altair as alt

    return alt.Axis(labelExpr=_LOG_LABEL) if log else alt.Axis(tickCount=6, labelExpr=_LABEL, labelOverlap=True)


def _legend() -> alt.Legend:
    import altair as alt

    return alt.Legend(labelExpr=_LABEL, type="gradient")


def _nominal(channel: type[alt.X] | type[alt.Y], axis: Axis) -> alt.X | alt.Y:
    import altair as alt

    return channel(axis.field, type="nominal", title=axis.title, sort=None, axis=alt.Axis(labelAngle=0))


def _color(rows: Iterable[Row], by: str | None, order: Sequence[str] = ()) -> dict[str, alt.Color]:
    """Colours by `by`, in the order in which rows name its values, or in this one."""
    import altair as alt

    if by is None:
        return {}
    domain = [*order] or list(dict.fromkeys(str(row[by]) for row in rows))
    return {"color": alt.Color(by, type="nominal", title=None, sort=domain, scale=alt.Scale(domain=domain))}


_LABEL = "abs(datum.value) >= 10000 ? format(datum.value, '.3~s') : format(datum.value, ',.4~r')"
# Of a logarithmic scale every tenth is a tick: 1, 2 and 5 have labels.
_LOG_LABEL = f"indexof('125', format(datum.value, '.0e')[0]) >= 0 ? {_LABEL} : ''"


def _tooltips(names: Mapping[str, bool], axes: Sequence[Axis], by: str | None) -> list[alt.Tooltip]:
    """All fields of a row: first the series, then those that the axes show."""
    import altair as alt

    shown = {axis.field: axis for axis in axes}
    found = []
    for name in dict.fromkeys([*([by] if by else []), *shown, *names]):
        axis = shown.get(name, Axis(name, name))
        if names.get(name):
            found.append(alt.Tooltip(name, type="quantitative", title=axis.title, format=axis.format))
        else:
            found.append(alt.Tooltip(name, type="nominal", title=axis.title))
    return found


def _with_rules(drawn: alt.Chart, x: Axis, marked: Mapping[str, float]) -> Chart:
    import altair as alt

    rows = [{x.field: at, "marked": label} for label, at in marked.items()]
    base = alt.Chart(alt.InlineData(values=rows)).encode(x=alt.X(x.field, type="quantitative"))
    rule = base.mark_rule(strokeDash=[4, 3])
    text = base.mark_text(align="left", baseline="top", dx=5, fontSize=11).encode(y=alt.value(2), text="marked:N")
    return _sized(alt.layer(drawn, rule, text))
