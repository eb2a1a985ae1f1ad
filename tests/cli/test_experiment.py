"""`equipoise experiment` as its user meets it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def run(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`equipoise experiment WORDS`."""
    command = [sys.executable, "-m", "equipoise", "experiment", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=cwd)


def test_a_table_on_stdout_and_rows_in_a_file(tmp_path):
    done = run("load", "--quick", "--json", "rows.json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("What does a load report cost")
    assert re.search(r"^10,000 .*x +[\d.]+$", done.stdout, re.MULTILINE)
    rows = json.loads((tmp_path / "rows.json").read_bytes())
    assert {row["policy"] for row in rows} == {"counters", "one sum", "all sums", "upkeep"}
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "experiment: name one of balance,"),
        (("blance",), "experiment: 'blance' is not known, there are balance,"),
        (("load", "--seeds", "0"), "seeds: 0 must be at least 1"),
        (("load", "--processes", "0"), "processes: 0 must be at least 1"),
        (("load", "--json", "nowhere/rows.json"), "json: nowhere is no folder"),
        (("load", "--json", "."), "json: . is a folder"),
        (("together", "--traces", "nowhere"), "traces: nowhere has none of azure_llm_2023_conv.csv.gz"),
        (("load", "balance"), "balance: not understood, NAME is the only word"),
        (("load", "--fast"), "Unknown option: --fast."),
    ],
)
def test_what_is_wrong_is_said_in_a_line(words, message, tmp_path):
    done = run(*words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"equipoise: {message}")
    assert done.stderr.count("\n") == 1


def test_help_fits_a_screen_and_names_every_experiment():
    from equipoise.sim.experiment import EXPERIMENTS

    done = run("--help")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) <= 40
    for name in EXPERIMENTS:
        assert name in done.stdout


def test_every_experiment_has_a_page_with_results():
    from equipoise.sim.experiment import EXPERIMENTS
    from equipoise.sim.experiment.files import BEGIN, END

    index = (ROOT / "docs/experiments/README.md").read_text(encoding="utf-8")
    for name in EXPERIMENTS:
        assert f"({name}.md)" in index
        page = (ROOT / f"docs/experiments/{name}.md").read_text(encoding="utf-8")
        assert page.index(BEGIN) < page.index(END)
        for target in re.findall(r"\]\(([^)#:\s]+)\)", page):
            assert (ROOT / "docs/experiments" / target).exists(), f"{name}.md links to {target}"
