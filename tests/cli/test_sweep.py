"""`equipoise sweep` as its user meets it: words, files, a run that was ended and goes on, errors in one line."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pyarrow import parquet
from tests.sim.sweep.test_jobs import wait_until_empty

from equipoise.cli import main
from equipoise.sim.sweep.files import flat_rows, results_json
from equipoise.sim.sweep.read import make_sweep, read_sweep
from equipoise.sim.sweep.run import run_sweep
from equipoise.sim.sweep.table import table

ROOT = Path(__file__).parent.parent.parent
SMALL = """
name: small
workload: {num_requests: 8, concurrency: 4, prompt: {mean: 50, spread: 0.5}, output: {mean: 5}}
"""
WORDS = ("small.yaml", "--vary", "fleet.ranks=1,2", "--policy", "plain", "--policy", "quick=cost.step-ms=5")


def start(*words: str, cwd: Path) -> subprocess.Popen[str]:
    """`equipoise sweep WORDS`, in a process group of its own."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "equipoise", "sweep", *words]
    return subprocess.Popen(command, cwd=cwd, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def run(*words: str, cwd: Path) -> tuple[int, str, str]:
    """Its exit code, stdout and stderr; in this process, which is quicker."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.chdir(cwd), contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = main(["sweep", *words])
    return code, out.getvalue(), errors.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "small.yaml").write_text(SMALL, encoding="utf-8")
    return tmp_path


def test_a_sweep_tells_its_size_first_and_a_table_last(folder: Path) -> None:
    code, out, errors = run(*WORDS, "--seeds", "2", "--processes", "1", cwd=folder)
    assert code == 0, errors
    first, second = errors.splitlines()
    assert first == "8 runs (2 points x 2 policies x 2 seeds)"
    assert second.startswith("they take about ")
    lines = out.splitlines()
    assert lines[0] == "small: 2 points, 2 policies, 2 seeds from 0 to 1"
    for label in ("throughput_tok_s", "ttft_mean_ms", "tpot_mean_ms", "ranks=1", "all 2 points"):
        assert any(line.startswith(label) for line in lines), label


def test_the_same_command_goes_on_where_it_was_killed(folder: Path) -> None:
    words = (*WORDS, "--seeds", "3", "--set", "workload.num-requests=150", "--processes", "2")
    running = start(*words, "--out", "killed", cwd=folder)
    runs = folder / "killed/runs.jsonl"
    while not (runs.is_file() and runs.read_bytes().count(b"\n") >= 2):
        assert running.poll() is None
    os.kill(running.pid, signal.SIGKILL)
    running.communicate(timeout=30)
    num_kept = runs.read_bytes().count(b"\n")
    assert 2 <= num_kept < 12
    running = start(*words, "--out", "killed", cwd=folder)
    out, errors = running.communicate(timeout=120)
    assert running.returncode == 0
    assert errors.startswith(f"12 runs (2 points x 2 policies x 3 seeds), {12 - num_kept} of them still to do")
    assert sorted(path.name for path in (folder / "killed").iterdir()) == [
        "rows.csv",
        "rows.parquet",
        "runs.jsonl",
        "sweep.html",
        "sweep.json",
        "sweep.yaml",
    ]
    spec = make_sweep(**read_sweep(folder / "killed/sweep.yaml"))
    whole = run_sweep(spec, spec.jobs(), num_processes=1)
    assert out == table(whole) + "\n"
    assert (folder / "killed/sweep.json").read_bytes() == results_json(whole)
    rows = parquet.read_table(folder / "killed/rows.parquet").to_pylist()
    assert repr(rows) == repr(flat_rows(whole))


def test_interrupted_it_says_what_is_kept(folder: Path) -> None:
    running = start(*WORDS, "--seeds", "9", "--set", "workload.num-requests=900", "--out", "o", cwd=folder)
    runs = folder / "o/runs.jsonl"
    while not (runs.is_file() and runs.read_bytes().count(b"\n") >= 1):
        assert running.poll() is None
    os.killpg(running.pid, signal.SIGINT)
    out, errors = running.communicate(timeout=30)
    assert (running.returncode, out) == (130, "")
    assert errors.splitlines()[-1].startswith("equipoise: interrupted, ")
    assert errors.splitlines()[-1].endswith(" of 36 runs are in o, the same command goes on with them")
    assert "Traceback" not in errors
    wait_until_empty(running.pid)


def test_a_run_that_fails_is_told_and_the_others_count(folder: Path) -> None:
    words = ("small.yaml", "--vary", "routing.rank-policy=none,own:breaks", "--processes", "1", "--json")
    (folder / "own.py").write_text("from pathlib import Path\n" + OK_ONCE, encoding="utf-8")
    running = start(*words, cwd=folder)
    told = json.loads(running.communicate(timeout=60)[0])
    assert (running.returncode, told["num_failed"]) == (1, 1)
    assert "no such thing" in told["failed"][0]["error"]
    assert [each["mean"] is None for each in told["points"]] == [False, True] * 3


OK_ONCE = """
def breaks():
    marker = Path("checked")
    if marker.exists():
        raise LookupError("no such thing")
    marker.touch()
    from equipoise.route.ranks import RoundRobin
    return RoundRobin()
"""
"""A policy that is well when it is checked."""


def test_a_dry_run_lists_what_would_run(folder: Path) -> None:
    code, out, errors = run(*WORDS, "--seeds", "2", "--dry-run", cwd=folder)
    assert (code, errors) == (0, "")
    points = ["points", "  fleet.ranks=1", "  fleet.ranks=2"]
    policies = ["policies", "  plain: sets nothing", "  quick: cost.step_ms=5", "seeds", "  0, 1"]
    assert out.splitlines() == [*points, *policies, "8 runs (2 points x 2 policies x 2 seeds)"]


def test_policies_that_come_to_the_same_are_warned_of(folder: Path) -> None:
    code, _, errors = run(*WORDS, "--policy", "slow=cost.step-ms=20", "--dry-run", cwd=folder)
    assert (code, errors) == (0, "equipoise: warning: policies plain and slow have the same settings\n")


def test_a_file_and_flags_on_top(folder: Path) -> None:
    text = "scenario: small.yaml\nvary: {fleet.ranks: '1..3'}\npolicies: {a: {}, b: {cost.step_ms: 5}}\nseeds: 2\n"
    (folder / "sweep.yaml").write_text(text, encoding="utf-8")
    assert run("sweep.yaml", "--dry-run", cwd=folder)[1].endswith("\n12 runs (3 points x 2 policies x 2 seeds)\n")
    more = ("--vary", "fleet.ranks=4", "--policy", "c=cost.step-ms=1", "--seeds", "1", "--set", "seed=7")
    told = run("sweep.yaml", *more, "--dry-run", cwd=folder)[1].splitlines()
    assert told[:2] == ["points", "  fleet.ranks=4"]
    assert [line[:4] for line in told[3:6]] == ["  a:", "  b:", "  c:"]
    assert told[6:] == ["seeds", "  7", "3 runs (1 points x 3 policies x 1 seeds)"]


def test_the_example_is_printed(folder: Path) -> None:
    code, out, _ = run("--example", "balance", cwd=folder)
    assert (code, out) == (0, (ROOT / "src/equipoise/sim/sweep/examples/balance.yaml").read_text(encoding="utf-8"))
    assert run("--example", "list", cwd=folder)[1].startswith("balance  ")


def test_the_commands_of_the_guide_run(tmp_path: Path) -> None:
    guide = (ROOT / "docs/sweep.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```bash\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)
    script = f'equipoise() {{ {shlex.quote(sys.executable)} -m equipoise "$@"; }}\n{block}'
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "results/sweep.html").is_file()
    for name in re.findall(r"`([a-z]+\.(?:html|parquet|csv|jsonl?|yaml))`", guide):
        assert (tmp_path / "results" / name).is_file(), name


def test_flags_of_the_guide_exist(tmp_path: Path) -> None:
    guide = (ROOT / "docs/sweep.md").read_text(encoding="utf-8")
    _, known, _ = run("--help", cwd=tmp_path)
    for flag in re.findall(r"--[a-z][a-z-]+", guide):
        assert flag in known.split(), flag


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "sweep: there is none: name a file, or see --example list"),
        (("none.yaml",), "sweep: none.yaml: No such file or directory"),
        (("small.yaml", "--vary", "fleet.rank=2"), "fleet.rank is not a setting, did you mean fleet.ranks?"),
        (("small.yaml", "--vary", "fleet.ranks"), "vary: 'fleet.ranks' must be like fleet.ranks=2,4,8"),
        (("small.yaml", "--policy", "a=b"), "policy: 'b' must be like scheduler.balance=true"),
        (("small.yaml", "--set", "cost"), "set: 'cost' must be like scheduler.balance=true"),
        (("small.yaml", "--set", "fleet.ranks=0"), "fleet.ranks: 0 must be at least 1 (at base / seed 0)"),
        (("small.yaml", "--baseline", "x"), "baseline: 'x' must be one of base"),
        (("small.yaml", "--metrics", "ttft"), "metrics: 'ttft' must be one of num_requests"),
        (("small.yaml", "--pareto", "ttft_mean_ms"), "pareto: ttft_mean_ms must be two numbers' names"),
        (("small.yaml", "--processes", "0"), "processes: 0 must be at least 1"),
        (("small.yaml", "--seeds", "0"), "seeds: 0 must be at least 1"),
        (("small.yaml", "--out", "small.yaml"), "out: small.yaml: File exists"),
        (("small.yaml", "other.yaml"), "other.yaml: not understood, FILE is the only word"),
        (("--example", "moon"), "example: 'moon' is not known, there are balance"),
    ],
)
def test_wrong_words_end_the_command_in_one_line(folder: Path, words: tuple[str, ...], message: str) -> None:
    code, out, errors = run(*words, cwd=folder)
    assert (code, out) == (2, "")
    assert errors.startswith("equipoise: ")
    assert errors.count("\n") == 1, errors
    assert message in errors


def test_neither_torch_nor_a_server_nor_charts_are_imported_without_need(folder: Path) -> None:
    code = (
        "import sys; from equipoise.cli import main; main(['sweep', 'small.yaml', '--processes', '1']);"
        "heavy = {'torch', 'transformers', 'starlette', 'uvicorn', 'zmq', 'pyarrow', 'altair'} & set(sys.modules);"
        "sys.exit(f'{heavy} imported' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=folder)
    assert done.returncode == 0, done.stderr
