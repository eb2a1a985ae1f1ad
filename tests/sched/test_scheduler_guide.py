"""The example of the scheduler's guide runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from equipoise.testing.scenarios import Case, run_case

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def test_the_policy_in_30_lines_runs():
    (example,) = blocks("scheduler.md", "python")
    exec(compile(example, "scheduler.md", "exec"), {"__name__": "example"})


def test_the_example_scenario_agrees():
    (example,) = blocks("scenarios.md", "json")
    (case,) = msgspec.json.decode(example, type=list[Case])
    assert run_case(case).notes == []
