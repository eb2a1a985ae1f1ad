"""Charts that only sweeps have: lines in the bands of their intervals, and a front with what it beats faded."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from equipoise.sim.report.charts import frontier

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import altair as alt

    from equipoise.sim.report.charts import Axis, Row
    from equipoise.sim.report.look import Chart

HEIGHT, TALL = 240, 340
"""Pixels."""
LONG_WORD = 420
MOST_TICKS = 12
BAND, FADED = 0.16, 0.22
"""Opacities."""
POLICY = "policy"

Best = tuple[Literal["min", "max"], Literal["min", "max"]]


def banded_lines(rows: Sequence[Row], x: Axis, y: Axis, low: str, high: str) -> Chart:
    """A line for each policy through the rows, in a band between their fields `low` and `high`; NaN: no band there.

    Where `x` has words instead of numbers the rows' order is kept."""
    import altair as alt

    is_word = any(isinstance(row[x.field], str) for row in rows)
    scale = alt.Scale(type="log") if x.log else alt.Scale(zero=False)
    along = (
        alt.X(x.field, type="ordinal", title=x.title, sort=None, axis=alt.Axis(labelAngle=0))
        if is_word
        else alt.X(x.field, type="quantitative", title=x.title, scale=scale, axis=_ticks_at(rows, x))
    )
    base = alt.Chart(_data(rows)).encode(x=along, color=_colors(rows))
    band = base.mark_area(opacity=BAND).encode(y=alt.Y(low, type="quantitative", title=y.title), y2=alt.Y2(high))
    line = base.mark_line(point={"size": 34}).encode(
        y=alt.Y(y.field, type="quantitative", title=y.title, scale=alt.Scale(zero=y.zero)),
        tooltip=[_tip(POLICY), _tip(x.field, x.title), _tip(y.field, y.title, y.format)],
    )
    chart: Chart = alt.layer(band, line).properties(height=HEIGHT, width="container")
    return chart


def fronts(rows: Sequence[Row], x: Axis, y: Axis, label: str, best: Best) -> Chart:
    """A dot for each row: those that no other beats in both `x` and `y` on a line, with the field `label`; the others
    faded."""
    import altair as alt

    rows = [row for row in rows if _is_number(row[x.field]) and _is_number(row[y.field])]
    front = frontier(rows, x.field, y.field, best)
    best_places = {(row[x.field], row[y.field]) for row in front}
    marked = [
        {**row, "stands": "on the front" if (row[x.field], row[y.field]) in best_places else "beaten"} for row in rows
    ]
    base = alt.Chart(_data(front)).encode(
        x=alt.X(x.field, type="quantitative", title=x.title, scale=alt.Scale(zero=False, padding=30)),
        y=alt.Y(y.field, type="quantitative", title=y.title, scale=alt.Scale(zero=False, padding=20)),
    )
    faded = alt.Scale(domain=["on the front", "beaten"], range=[1, FADED])
    cloud = (
        alt.Chart(_data(marked))
        .mark_circle(size=70)
        .encode(
            x=x.field + ":Q",
            y=y.field + ":Q",
            color=_colors(rows),
            opacity=alt.Opacity("stands", type="nominal", scale=faded, legend=None),
            tooltip=[_tip(POLICY), _tip(label), _tip("stands"), _tip(x.field, x.title), _tip(y.field, y.title)],
        )
    )
    line = base.mark_line(strokeDash=[4, 3], strokeWidth=1.2, color="#8a8f8d", interpolate="linear")
    text = base.mark_text(align="left", dx=7, dy=-7, fontSize=11).encode(text=alt.Text(label, type="nominal"))
    chart: Chart = alt.layer(line, cloud, text).properties(height=TALL, width="container")
    return chart


def with_long_words(chart: Chart) -> Chart:
    """`chart` with the words of its y axis in full."""
    import altair as alt

    assert isinstance(chart, alt.LayerChart)
    found: Chart = chart.configure_axisY(labelLimit=LONG_WORD)
    return found


def _ticks_at(rows: Sequence[Row], x: Axis) -> alt.Axis:
    """Where there are rows, while these are few."""
    import altair as alt

    values = list(dict.fromkeys(row[x.field] for row in rows))
    return alt.Axis(values=values, format="~g") if len(values) <= MOST_TICKS else alt.Axis()


def _data(rows: Sequence[Mapping[str, object]]) -> alt.InlineData:
    """Numbers that JSON knows."""
    import altair as alt

    clean = [
        {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()}
        for row in rows
    ]
    return alt.InlineData(values=clean)


def _colors(rows: Sequence[Row]) -> alt.Color:
    """By policy, in the order in which rows name them."""
    import altair as alt

    domain = list(dict.fromkeys(str(row[POLICY]) for row in rows))
    legend = alt.Legend(symbolOpacity=1)
    return alt.Color(POLICY, type="nominal", title=None, sort=domain, scale=alt.Scale(domain=domain), legend=legend)


def _tip(field: str, title: str | None = None, form: str = ",.4~r") -> alt.Tooltip:
    import altair as alt

    if title is None:
        return alt.Tooltip(field, type="nominal")
    return alt.Tooltip(field, type="quantitative", title=title, format=form)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
