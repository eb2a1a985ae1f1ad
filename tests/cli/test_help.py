"""`--help` as a terminal shows it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from equipoise.cli import main
from equipoise.cli.help import COLUMN, two_columns


@pytest.mark.parametrize("columns", [80, 120])
def test_help_fits_the_terminal(columns: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "equipoise", "serve", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "COLUMNS": str(columns)},
    )
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= columns
    assert "  --port INT                  Port to listen on; 0 takes a free one and prints" in done.stdout
    assert "as many as --kv-memory-gb holds" in done.stdout, "a field is named as its flag"
    assert "[default: ()]" not in done.stdout
    for line in lines:
        indent = len(line) - len(line.lstrip())
        assert indent in (0, 2, COLUMN), f"wrapped out of its column: {line!r}"


@pytest.mark.parametrize("command", ["", "serve", "gateway", "simulate", "sweep", "experiment"])
def test_the_environment_is_told_where_it_counts(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*filter(None, [command]), "--help"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert ("EQUIPOISE_MAX_RUNNING" in told) == (command in ("", "serve", "gateway"))
    assert "Exit codes: 0 " in told


def test_a_long_flag_has_its_words_below() -> None:
    assert two_columns("--a", "one two", 80) == ["  --a".ljust(COLUMN) + "one two"]
    long = "--" + "a" * 40
    assert two_columns(long, "one two", 80) == [f"  {long}", " " * COLUMN + "one two"]
    assert two_columns("--a", "", 80) == ["  --a"]
    assert two_columns("--a", "one " * 8, 20) == ["  --a".ljust(COLUMN) + "one " * 6 + "one", " " * COLUMN + "one"]


def test_a_word_too_many_is_named() -> None:
    words = ["serve", "some/model", "another"]
    done = subprocess.run([sys.executable, "-m", "equipoise", *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "equipoise: another: not understood, DIR is the only word, every other setting is a flag\n"
