"""`equipoise simulate` as its user meets it: scenarios, overrides, tables, files, and what it imports."""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.obs.trace_rules import read, total

from equipoise.sim.scenario import as_table, make_scenario, read_scenario

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = sorted((ROOT / "src/equipoise/sim/examples").glob("*.yaml"))
SMALL = """
name: small
fleet: {workers: 2, ranks: 2, lockstep: true}
workload: {num_requests: 20, rate: 4, prompt: {mean: 300, spread: 0.5}, output: {mean: 30}}
"""


def run(*words: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """`equipoise simulate WORDS`."""
    return subprocess.run(
        [sys.executable, "-m", "equipoise", "simulate", *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=cwd,
        env={**os.environ, **env},
    )


def summary(*words: str, cwd: Path) -> dict[str, float]:
    """What --json prints, and nothing else."""
    done = run(*words, "--json", cwd=cwd)
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, float] = json.loads(done.stdout)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "small.yaml").write_text(SMALL, encoding="utf-8")
    return tmp_path


def test_a_table_tells_the_results(folder: Path) -> None:
    done = run("small.yaml", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[:2] == ["small: 2 workers of 2 ranks, in lockstep, seed 0", "cost: linear, prices as configured"]
    for label in ("time to first token", "between tokens (ITL)", "end to end", "lost to the slowest rank"):
        assert any(line.startswith(label) for line in lines), label
    assert max(map(len, lines)) <= 100


def test_flags_and_settings_override_the_file(folder: Path) -> None:
    words = ("--workers", "3", "--seed", "5", "--num-requests", "7", "--concurrency", "2", "--set", "cost.step-ms=1")
    changed = summary("small.yaml", *words, "--set", "fleet.lockstep=false", "--set", "name=other", cwd=folder)
    assert (changed["scenario"], changed["seed"], changed["num_requests"]) == ("other", 5, 7)
    assert changed["lost_share"] == 0


def test_no_file_is_needed(tmp_path: Path) -> None:
    assert summary("--rate", "5", "--num-requests", "3", cwd=tmp_path)["num_finished"] == 3


def test_the_same_scenario_gives_the_same_files(folder: Path) -> None:
    for out in ("first", "second"):
        assert run("small.yaml", "--out", out, "--steps", cwd=folder).returncode == 0
    names = sorted(path.name for path in (folder / "first").iterdir())
    assert names == ["report.html", "requests.parquet", "scenario.yaml", "steps.parquet", "summary.json"]
    for name in names:
        assert (folder / "first" / name).read_bytes() == (folder / "second" / name).read_bytes()


def test_files_hold_what_was_run(folder: Path) -> None:
    from pyarrow import parquet

    assert run("small.yaml", "--out", "deep/results", "--steps", "--seed", "3", cwd=folder).returncode == 0
    out = folder / "deep/results"
    assert read_scenario(out / "scenario.yaml") == read_scenario(folder / "small.yaml", ["seed=3"])
    told = json.loads((out / "summary.json").read_bytes())
    requests = parquet.read_table(out / "requests.parquet")
    assert requests.num_rows == told["num_requests"] == 20
    ttft_ms = (requests["first_s"].to_numpy() - requests["arrival_s"].to_numpy()) * 1e3
    assert ttft_ms.mean() == pytest.approx(told["ttft_mean_ms"])
    steps = parquet.read_table(out / "steps.parquet")
    assert steps["prefill_tokens"].to_numpy().sum() == requests["prompt_len"].to_numpy().sum()
    first_tokens = requests.num_rows
    assert steps["decode_rows"].to_numpy().sum() == requests["output_len"].to_numpy().sum() - first_tokens
    assert set(steps["worker"].to_pylist()) == set(steps["rank"].to_pylist()) == {0, 1}
    assert (np.diff(steps["ends_s"].to_numpy()) >= 0).all()


def test_paths_are_under_the_scenarios_folder_and_traces_under_ones_own(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    scenario = "workload: {kind: file, path: trace.csv}\n"
    (tmp_path / "a/scenario.yaml").write_text(scenario, encoding="utf-8")
    (tmp_path / "a/trace.csv").write_text("arrival_s,input_tokens,output_tokens\n0,9,3\n", encoding="utf-8")
    name = 'quo"te\\n.csv'
    (tmp_path / name).write_text("arrival_s,input_tokens,output_tokens\n0,9,3\n1,9,3\n", encoding="utf-8")
    assert summary("a/scenario.yaml", cwd=tmp_path)["num_requests"] == 1
    assert summary("a/scenario.yaml", "--trace", name, cwd=tmp_path)["num_requests"] == 2


def test_the_environment_changes_nothing(folder: Path) -> None:
    plain = run("small.yaml", "--json", cwd=folder)
    assert run("small.yaml", "--json", cwd=folder, EQUIPOISE_MAX_RUNNING="1").stdout == plain.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.stem))
def test_examples_are_scenarios_with_comments(path: Path) -> None:
    done = run("--example", path.stem)
    assert (done.returncode, done.stdout) == (0, path.read_text(encoding="utf-8"))
    scenario = make_scenario(msgspec.yaml.decode(done.stdout))
    assert scenario.name == path.stem
    assert done.stdout.startswith("# ")
    assert (ROOT / "examples" / path.name).read_bytes() == path.read_bytes()
    assert f"{path.stem} " in run("--example", "list").stdout


def test_examples_that_need_no_trace_run(tmp_path: Path) -> None:
    sessions = summary(str(ROOT / "examples/sessions.yaml"), "--num-requests", "20", cwd=tmp_path)
    assert sessions["prefix_hit_share"] > 0.5
    balance = str(ROOT / "examples/balance_deepseek.yaml")
    free = summary(balance, cwd=tmp_path)
    held = summary(balance, "--set", "scheduler.balance=true", cwd=tmp_path)
    # The published gain is 18%; the fit without the gate is within 3% of the published duration.
    assert free["duration_s"] == pytest.approx(591.9, rel=0.03)
    assert 1.1 < free["duration_s"] / held["duration_s"] < 1.3


def test_the_commands_of_the_guide_run(tmp_path: Path) -> None:
    guide = (ROOT / "docs/simulator.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(equipoise simulate.*?)^```", guide, re.MULTILINE | re.DOTALL)
    assert blocks
    python = shlex.quote(sys.executable)
    for block in blocks:
        script = f'equipoise() {{ {python} -m equipoise "$@"; }}\n{block}'
        done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, timeout=120, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "results/steps.parquet").is_file()


def test_flags_and_settings_of_the_guide_exist() -> None:
    guide = (ROOT / "docs/simulator.md").read_text(encoding="utf-8")
    known = run("--help", COLUMNS="200").stdout
    of_it = "\n".join(
        line for line in guide.splitlines() if not line.startswith(("equipoise serve", "equipoise sweep"))
    )
    for flag in re.findall(r"--[a-z][a-z-]+", of_it):
        assert flag in (*known.split(), "--help"), flag
    for section, field in re.findall(r"`(fleet|scheduler|cache|cost|workload|routing)\.([a-z_]+)`", guide):
        assert field in as_table(make_scenario({}))[section], field


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "scenario: there is none: name a file, or see --example list"),
        (("none.yaml",), "scenario: none.yaml: No such file or directory"),
        (("small.yaml", "other.yaml"), "other.yaml: not understood, SCENARIO is the only word"),
        (("small.yaml", "--set", "fleet.rank=3"), "fleet.rank is not a setting, did you mean fleet.ranks?"),
        (("small.yaml", "--set", "fleet.ranks"), "set: 'fleet.ranks' must be like fleet.ranks=8"),
        (("small.yaml", "--ranks", "0"), "fleet.ranks: 0 must be at least 1"),
        (("small.yaml", "--ranks", "two"), "--ranks"),
        (("small.yaml", "--rank-policy", "fair"), "rank policy: 'fair' is not known, allowed are minimum_tokens"),
        (("small.yaml", "--rate", "3", "--concurrency", "3"), "a loop is open or closed, give one of them"),
        (("small.yaml", "--trace", "x.csv", "--set", "workload.kind=file"), "x.csv is not a file"),
        (("small.yaml", "--steps"), "steps: they are written to a folder, name it with --out"),
        (("small.yaml", "--out", "small.yaml"), "out: small.yaml: File exists"),
        (("small.yaml", "--report", "small.yaml/report.html"), "report: small.yaml/report.html: File exists"),
        (("small.yaml", "--timeline", "."), "timeline: .: Is a directory"),
        (("small.yaml", "--report", "same", "--timeline", "./same"), "timeline: same is the report's file too"),
        (("small.yaml", "--out", "/proc"), "out: /proc: "),
        (("small.yaml", "--ranks", "2.5"), "--ranks: 2.5 is not a whole number"),
        (("small.yaml", "--seed=1e3"), "--seed: 1e3 is not a whole number"),
        (("--example", "moon"), "example: 'moon' is not known, there are azure, balance_deepseek"),
    ],
)
def test_wrong_words_end_the_command_in_one_line(folder: Path, words: tuple[str, ...], message: str) -> None:
    done = run(*words, cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("equipoise: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert message in done.stderr


def test_neither_torch_nor_a_server_is_imported(folder: Path) -> None:
    code = (
        "import sys; from equipoise.cli import main; main(['simulate', 'small.yaml', '--json']);"
        "heavy = {'torch', 'transformers', 'starlette', 'uvicorn', 'zmq', 'tokenizers', 'pyarrow', 'altair'};"
        "heavy &= set(sys.modules);"
        "sys.exit(f'{heavy} imported' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=folder)
    assert done.returncode == 0, done.stderr


def test_a_timeline_opens_in_perfetto_compressed_or_not(folder: Path) -> None:
    plain, packed = folder / "deep/trace.json", folder / "trace.json.gz"
    for path in (plain, packed):
        assert run("small.yaml", "--timeline", str(path), cwd=folder).returncode == 0
    text = plain.read_text(encoding="utf-8")
    assert gzip.decompress(packed.read_bytes()).decode() == text
    events = read(text)
    found = summary("small.yaml", cwd=folder)
    assert total(events, "prefill_tokens") == round(found["total_throughput_tok_s"] * found["duration_s"]) - round(
        found["throughput_tok_s"] * found["duration_s"]
    )
    assert sum(event["name"].startswith("request ") for event in events) == 2 * found["num_finished"]


def test_without_altair_the_error_says_what_to_install(folder: Path) -> None:
    blocked = "import sys; sys.modules['altair'] = None; from equipoise.cli import main;"
    code = f"{blocked} sys.exit(main(['simulate', 'small.yaml', '--report', 'page.html']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=folder)
    assert done.returncode == 2
    assert "report: charts need altair and vl-convert-python: install equipoise[sim]" in done.stderr
    assert not (folder / "page.html").exists()


def test_without_pyarrow_the_error_says_what_to_install(folder: Path) -> None:
    blocked = "import sys; sys.modules['pyarrow'] = None; from equipoise.cli import main;"
    code = f"{blocked} sys.exit(main(['simulate', 'small.yaml', '--out', 'results']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=folder)
    assert done.returncode == 2
    assert "out: Parquet needs pyarrow: install equipoise[sim]" in done.stderr
    assert not (folder / "results").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no file that is always full")
def test_a_full_disk_ends_the_command_in_one_line(folder: Path) -> None:
    done = run("small.yaml", "--timeline", "/dev/full", cwd=folder)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "equipoise: No space left on device\n")
