"""What an experiment leaves behind: rows as JSON, plots, and its part of a page of the docs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from equipoise.errors import ConfigError
from equipoise.sim.experiment.show import as_markdown
from equipoise.sim.report.charts import check_can_draw, save_svg

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from equipoise.sim.experiment.rows import Experiment, Row

BEGIN, END = "<!-- results: written by the command -->", "<!-- end of results -->"
"""Between them a page has the tables and plots of the last run; all else on it stays as it is."""


def check_can_save(folder: Path) -> None:
    """Make `folder` before an hour is spent on rows. Raises ConfigError when plots could not be written there."""
    check_can_draw("out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out: {folder}: {error.strerror}") from None


def save_rows(rows: Sequence[Row], path: Path) -> None:
    """Write `rows` as a list of JSON, one on a line. Raises ConfigError when `path` cannot be written."""
    lines = b",\n".join(msgspec.json.encode(row.as_json()) for row in rows)
    try:
        path.write_bytes(b"[\n" + lines + b"\n]\n")
    except OSError as error:
        raise ConfigError(f"json: {path}: {error.strerror}") from None


def save(experiment: Experiment, rows: Sequence[Row], folder: Path, command: str) -> None:
    """Write NAME.json, NAME-*.svg and the results on NAME.md into `folder`, which exists.

    `command` made them, and the page says so."""
    save_rows(rows, folder / f"{experiment.name}.json")
    plots = []
    for name, chart in experiment.charts(rows).items():
        file = f"{experiment.name}-{name}.svg"
        save_svg(folder / file, chart)
        plots.append(f"![{name}]({file})")
    made = f"By `{command}`, {len(rows)} rows, all in [{experiment.name}.json]({experiment.name}.json)."
    results = "\n\n".join((made, as_markdown(experiment.tables(rows)).rstrip("\n"), *plots))
    page = folder / f"{experiment.name}.md"
    page.write_text(_with_results(_page(page, experiment), results), encoding="utf-8")


def _page(path: Path, experiment: Experiment) -> str:
    """The page as it is, or a new one."""
    if path.exists():
        return path.read_text(encoding="utf-8")
    return f"# {experiment.question}\n\n## Results\n\n{BEGIN}\n{END}\n"


def _with_results(page: str, results: str) -> str:
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"out: the page has no place for results: {BEGIN} and {END}, each on a line")
    return f"{before}{BEGIN}\n\n{results}\n\n{END}{after}"
