"""One HTML file with text, tables and charts, which opens offline: Vega is in it (0.9 MB) and nothing is fetched."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from equipoise.sim.report.look import Chart, config

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    Part: TypeAlias = "Plot | Table | Figures | Folded | str | tuple[Plot | Table, ...]"


@dataclass(frozen=True)
class Plot:
    """A chart under its title, with a sentence that tells what it shows in numbers, for who cannot see it too."""

    title: str
    sentence: str
    chart: Chart


@dataclass(frozen=True)
class Table:
    """Rows of cells under `head`; numbers are set to the right. The first cell of a row names it."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Figures:
    """Large numbers in a line: what each is, the number with its unit, and a remark."""

    figures: Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class Folded:
    """Text as it is, of which only the title shows at first."""

    title: str
    text: str


@dataclass(frozen=True)
class Section:
    """Parts in order under a heading; a string is a paragraph, what is in a tuple stands side by side."""

    title: str
    parts: Sequence[Part]


def save_page(path: Path, title: str, sections: Sequence[Section], *, subtitle: str = "") -> None:
    """Write the page. Raises OSError."""
    path.write_text("".join(_page(title, subtitle, sections)), encoding="utf-8")


def _page(title: str, subtitle: str, sections: Sequence[Section]) -> Iterator[str]:
    import altair
    import vl_convert

    charts: list[Plot] = []
    body = "".join(_section(section, charts) for section in sections)
    yield _HEAD.format(title=escape(title), style=(files(__package__) / "page.css").read_text(encoding="utf-8"))
    yield f'<header>{_MARK}<div><h1>{escape(title)}</h1><p class="subtitle">{escape(subtitle)}</p></div></header>\n'
    yield f"<main>{body}</main>\n"
    version = ".".join(altair.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
    yield f"<script>{vl_convert.javascript_bundle('window.vegaEmbed = vegaEmbed;', version)}</script>\n"
    specs = ",\n".join(_json(plot.chart.to_dict()) for plot in charts)
    yield _SCRIPT.format(specs=specs, dark=_json(config(dark=True)), light=_json(config(dark=False)))
    yield "</body></html>\n"


def _section(section: Section, charts: list[Plot]) -> str:
    parts = "".join(_part(part, charts) for part in section.parts)
    return f"<section><h2>{escape(section.title)}</h2>{parts}</section>\n"


def _part(part: Part, charts: list[Plot]) -> str:
    match part:
        case str():
            return f"<p>{escape(part)}</p>"
        case tuple():
            kind = "tables" if all(isinstance(each, Table) for each in part) else "beside"
            return f'<div class="{kind}">{"".join(_part(each, charts) for each in part)}</div>'
        case Plot():
            return _plot(part, charts)
        case Table():
            return _table(part)
        case Figures():
            return f'<div class="figures">{"".join(map(_figure, part.figures))}</div>'
        case Folded():
            return f"<details><summary>{escape(part.title)}</summary><pre>{escape(part.text)}</pre></details>"


def _plot(plot: Plot, charts: list[Plot]) -> str:
    charts.append(plot)
    number = len(charts)
    return (
        f'<figure aria-labelledby="title{number}" aria-describedby="text{number}">'
        f'<h3 id="title{number}">{escape(plot.title)}</h3><div class="chart" id="chart{number}"></div>'
        f'<figcaption id="text{number}">{escape(plot.sentence)}</figcaption></figure>'
    )


def _figure(figure: tuple[str, str, str]) -> str:
    what, value, remark = map(escape, figure)
    return f'<div><div class="number">{value}</div><div>{what}</div><div class="remark">{remark}</div></div>'


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in table.head)
    rows = "".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in rest)}</tr>'
        for first, *rest in table.rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _json(value: object) -> str:
    """JSON that may stand in a script."""
    return msgspec.json.encode(value).decode().replace("</", "<\\/").replace("<!--", "<\\!--")


_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}</style></head><body>
"""
_MARK = (
    '<svg viewBox="0 0 58 44" aria-hidden="true"><path d="M6 14h46M29 14l-9 26h18z"/>'
    '<circle cx="11" cy="6" r="6"/><circle cx="47" cy="6" r="6" class="amber"/></svg>'
)
# Colours are chosen when the page is drawn, since a canvas takes none from CSS.
_SCRIPT = """<script>
const dark = matchMedia("(prefers-color-scheme: dark)");
const look = {{ true: {dark}, false: {light} }};
const specs = [
{specs}
];
const draw = () => specs.forEach((spec, i) => vegaEmbed(`#chart${{i + 1}}`, spec,
  {{ actions: false, renderer: "svg", config: look[dark.matches],
     tooltip: {{ theme: dark.matches ? "dark" : "light" }} }}));
dark.addEventListener("change", draw);
draw();
</script>
"""
