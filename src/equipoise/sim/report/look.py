"""How the house's charts look, on a page and as SVG."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pathlib import Path


SVG_WIDTH = 640


class Chart(Protocol):
    """Any chart of altair."""

    def to_dict(self) -> dict[str, object]:
        """Its specification in Vega-Lite."""
        ...


CATEGORY = ("#0f8a76", "#d08a1d", "#5a6fc0", "#c0513a", "#7f5aa8", "#5b8f2e", "#b8568f", "#6c7270")
"""Colours of series that read on light and on dark paper."""
DIVERGING = ("#b0502f", "#ece7db", "#0f7d6c")


def config(*, dark: bool) -> dict[str, object]:
    """The house's look, as a config of Vega-Lite."""
    ink, soft, line = ("#e8e4d9", "#97a09d", "#2c3538") if dark else ("#20272a", "#6c7270", "#e4dfd3")
    ramp = (
        ["#182226", "#145c52", "#2aa18a", "#c9d36f", "#fff4c2"]
        if dark
        else (["#f4f1e8", "#b5dccf", "#4fa893", "#146a5c", "#0b2f33"])
    )
    sans = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
    return {
        "background": "transparent",
        "font": sans,
        "view": {"stroke": None},
        "axis": {
            "labelColor": soft,
            "titleColor": soft,
            "titleFontWeight": "normal",
            "titleFontSize": 12,
            "labelFontSize": 11,
            "gridColor": line,
            "domainColor": soft,
            "tickColor": soft,
            "domain": False,
            "ticks": False,
            "labelPadding": 6,
        },
        "axisX": {"grid": False, "domain": True, "ticks": True, "tickSize": 4},
        "legend": {
            "labelColor": ink,
            "titleColor": soft,
            "titleFontWeight": "normal",
            "labelFontSize": 12,
            "orient": "top",
            "direction": "horizontal",
            "symbolType": "circle",
            "gradientLength": 180,
            "gradientThickness": 9,
        },
        "line": {"strokeWidth": 1.8, "strokeJoin": "round", "color": CATEGORY[0]},
        "area": {"color": CATEGORY[0]},
        "bar": {"color": CATEGORY[0]},
        "circle": {"color": CATEGORY[0]},
        "rule": {"color": soft},
        "text": {"color": ink},
        "range": {"category": list(CATEGORY), "heatmap": ramp, "ramp": ramp},
    }


def save_svg(path: Path, chart: Chart, *, width: int = SVG_WIDTH) -> None:
    """Write `chart` as an SVG on white, for a committed document; its text is text. Raises OSError."""
    import vl_convert

    spec = {**chart.to_dict(), "width": width}
    look = {**config(dark=False), "background": "white", "font": "sans-serif"}
    path.write_text(vl_convert.vegalite_to_svg(spec, config=look), encoding="utf-8")
