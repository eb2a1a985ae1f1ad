"""How `--help` looks: flags on the left, what they mean beside them, wrapped to the terminal."""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING

from cyclopts.help import PlainFormatter

from equipoise.cli.settings import flag_name

if TYPE_CHECKING:
    from cyclopts.help import HelpEntry, HelpPanel
    from rich.console import Console, ConsoleOptions

INDENT = "  "
COLUMN = 30
"""Where descriptions begin; a longer flag has its description on the next line."""
NARROWEST = 30
"""Columns that a description has at least."""
UNWRAPPED = 10_000
_FIELD = re.compile(r"`(\w+)`")


class TwoColumns(PlainFormatter):
    """Plain text in two columns; usage and description are the plain formatter's."""

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        """Print one group of flags or commands; nothing when it is empty."""
        if not panel.entries:
            return
        lines = [f"{panel.title}:"] if panel.title else []
        for entry in panel.entries:
            labels = ", ".join(entry.display_labels_with_metavar)
            lines += two_columns(labels, _description(entry, console), options.max_width)
        for line in [*lines, ""]:
            console.print(line, highlight=False, markup=False, soft_wrap=True)


def two_columns(label: str, text: str, width: int) -> list[str]:
    """`label` and the lines of `text` beside it, none longer than `width` columns where words allow it."""
    lines = textwrap.wrap(text, max(width - COLUMN, NARROWEST), break_long_words=False, break_on_hyphens=False)
    left = INDENT + label
    if len(left) + len(INDENT) <= COLUMN and lines:
        left = left.ljust(COLUMN) + lines.pop(0)
    return [left, *(" " * COLUMN + line for line in lines)]


def _description(entry: HelpEntry, console: Console) -> str:
    rendered = console.render(entry.description or "", console.options.update(width=UNWRAPPED))
    text = " ".join("".join(segment.text for segment in rendered).split())
    text = _FIELD.sub(lambda found: f"--{flag_name(found[1])}", text)
    if entry.choices:
        text += f" [{', '.join(entry.choices)}]"
    if entry.default not in (None, "()"):
        text += f" [default: {entry.default}]"
    return text.strip()
