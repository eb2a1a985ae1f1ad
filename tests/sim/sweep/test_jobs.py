"""Jobs in parallel and in turn, kept and gone on with, failing, killed."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from equipoise.errors import ConfigError, EquipoiseError
from equipoise.sim.scenario import make_scenario
from equipoise.sim.sweep.digest import digest
from equipoise.sim.sweep.jobs import Job, run_jobs
from equipoise.sim.sweep.kept import Kept

if TYPE_CHECKING:
    from collections.abc import Sequence

SMALL = {"workload": {"num_requests": 8, "concurrency": 4, "prompt": {"mean": 50}, "output": {"mean": 5}}}
POLICIES = """
import os, signal
import logging
def warns():
    from equipoise.route.ranks import RoundRobin
    logging.getLogger("equipoise.own").warning("beyond what was measured")
    return RoundRobin()
def dies(seed=0): os.kill(os.getpid(), signal.SIGKILL)
def breaks(seed=0): raise LookupError("no such thing")
"""


def job(key: str, *changes: str, folder: Path | None = None) -> Job:
    return Job(key, make_scenario(SMALL, changes), folder or Path())


def three(*, bad: str | None = None, change: str = "") -> list[Job]:
    """Jobs a, b, c with seeds 0, 1, 2; the one called `bad` with `change` as well."""
    return [job(key, f"seed={i}", *([change] if key == bad else [])) for i, key in enumerate("abc")]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with policies of a user in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(POLICIES, encoding="utf-8")
    return tmp_path


def test_in_parallel_as_in_turn_as_kept(tmp_path: Path) -> None:
    jobs = three()
    told: list[tuple[int, int]] = []
    in_turn = run_jobs(jobs, num_processes=1)
    in_parallel = run_jobs(
        jobs, num_processes=2, kept=tmp_path / "kept.jsonl", on_progress=lambda *now: told.append(now)
    )
    again = run_jobs(jobs, num_processes=1, kept=tmp_path / "kept.jsonl")
    assert list(in_parallel) == list(again) == ["a", "b", "c"]
    assert repr(in_turn) == repr(in_parallel) == repr(again)  # NaN is not equal to itself
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_nan_survives(tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    jobs = [job("one", "workload.output.mean=1")]
    fresh = run_jobs(jobs, num_processes=1, kept=kept)
    assert math.isnan(fresh["one"]["itl_mean_ms"])
    assert repr(run_jobs(jobs, num_processes=1, kept=kept)) == repr(fresh)


def test_what_is_kept_is_not_run_again_whatever_its_key(tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    run_jobs(three()[:2], num_processes=1, kept=kept)
    told: list[tuple[int, int]] = []
    renamed = [job("z", "seed=1", "name=other"), job("new", "seed=9")]
    run_jobs(renamed, num_processes=1, kept=kept, on_progress=lambda *now: told.append(now))
    assert told == [(1, 2), (2, 2)]
    assert kept.read_bytes().count(b"\n") == 3


def test_the_same_simulation_is_run_once(tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    found = run_jobs([job("a"), job("b", "name=other"), job("c")], num_processes=1, kept=kept)
    assert repr(found["a"]) == repr(found["b"]) == repr(found["c"])
    assert kept.read_bytes().count(b"\n") == 1


def test_a_half_written_last_line_is_passed_over(tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    whole = run_jobs(three(), num_processes=1, kept=kept)
    raw = kept.read_bytes()
    for cut in (1, 40, len(raw.splitlines()[-1])):
        kept.write_bytes(raw[:-cut])
        assert repr(run_jobs(three(), num_processes=1, kept=kept)) == repr(whole)
        with Kept(kept) as file:
            assert len(file.summaries) == 3
    kept.write_bytes(b"\xff{]\n" + raw)
    with Kept(kept) as file:
        assert len(file.summaries) == 3


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_job_that_fails_ends_no_other(tmp_path: Path, num_processes: int) -> None:
    jobs, kept = three(bad="a", change="routing.rank_policy=fair"), tmp_path / "kept.jsonl"
    with pytest.raises(EquipoiseError, match="1 of 3 simulations failed: a: rank policy: 'fair' is not known"):
        run_jobs(jobs, num_processes=num_processes, kept=kept)
    told: list[tuple[str, str]] = []
    found = run_jobs(jobs, num_processes=1, kept=kept, on_failure=lambda job, text: told.append((job.key, text)))
    assert list(found) == ["b", "c"]
    assert [key for key, _ in told] == ["a"]
    assert kept.read_bytes().count(b"\n") == 2


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("own:dies", "its process was killed, perhaps for want of memory"),
        ("own:breaks", "no such thing"),
    ],
)
def test_a_process_that_dies_fails_its_job_alone(here: Path, policy: str, message: str) -> None:
    failed: list[tuple[str, str]] = []
    jobs = [*three(bad="a", change=f"routing.rank_policy={policy}"), job("d", f"routing.worker_policy={policy}")]
    found = run_jobs(jobs, num_processes=2, on_failure=lambda job, text: failed.append((job.key, text)))
    assert list(found) == ["b", "c"]
    assert sorted(key for key, _ in failed) == ["a", "d"]
    assert all(message in text for _, text in failed)


def test_every_key_of_a_failed_simulation_is_told() -> None:
    failed: list[str] = []
    alike = [job(key, "routing.rank_policy=fair") for key in "ab"]
    assert run_jobs(alike, num_processes=1, on_failure=lambda job, _: failed.append(job.key)) == {}
    assert failed == ["a", "b"]


def test_keys_are_unique() -> None:
    with pytest.raises(ValueError, match="'a' is the key of two"):
        run_jobs([job("a"), job("a", "seed=1")], num_processes=1)


def test_where_nothing_can_be_kept_nothing_is_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Is a directory"):
        run_jobs(three(), num_processes=1, kept=tmp_path)


def test_a_warning_of_many_processes_is_logged_once(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_jobs([job(str(i), f"seed={i}", "routing.rank_policy=own:warns") for i in range(3)], num_processes=2)
    assert [record.getMessage() for record in caplog.records] == ["beyond what was measured"]


SCRIPT = """
from pathlib import Path
from tests.sim.sweep.test_jobs import job
from equipoise.sim.sweep.jobs import run_jobs
{guard}
    jobs = [job(str(i), f"seed={{i}}", "workload.num_requests={num}") for i in range(6)]
    run_jobs(jobs, num_processes=2, kept=Path("kept.jsonl"), on_progress=lambda *now: print(*now, flush=True))
"""
GUARD = "if __name__ == '__main__':"


def start(folder: Path, num: int, guard: str = GUARD) -> subprocess.Popen[str]:
    """Six jobs of `num` requests each, in a process of its own."""
    (folder / "script.py").write_text(SCRIPT.format(num=num, guard=guard), encoding="utf-8")
    root = Path(__file__).parents[3]
    pipe = subprocess.PIPE
    env = {**os.environ, "PYTHONPATH": f"{root}/src:{root}"}
    words = [sys.executable, "script.py"]
    return subprocess.Popen(words, cwd=folder, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def members(group: int) -> list[int]:
    """Processes of a group that are alive."""
    found = subprocess.run(["ps", "-eo", "pid,pgid,stat"], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in found.splitlines()[1:]]
    return [int(pid) for pid, pgid, stat in rows if int(pgid) == group and not stat.startswith("Z")]


def test_killed_in_the_middle_it_goes_on_and_leaves_no_process(tmp_path: Path) -> None:
    running = start(tmp_path, 200)
    assert running.stdout is not None
    while running.stdout.readline() != "2 6\n":
        assert running.poll() is None
    os.kill(running.pid, signal.SIGKILL)
    running.communicate(timeout=30)
    wait_until_empty(running.pid)
    kept = tmp_path / "kept.jsonl"
    assert 2 <= kept.read_bytes().count(b"\n") < 6
    told: list[tuple[int, int]] = []
    jobs = [job(str(i), f"seed={i}", "workload.num_requests=200") for i in range(6)]
    found = run_jobs(jobs, num_processes=1, kept=kept, on_progress=lambda *now: told.append(now))
    assert told[0][0] >= 2
    assert repr(found) == repr(run_jobs(jobs, num_processes=1))


def wait_until_empty(group: int) -> None:
    for _ in range(200):
        if not members(group):
            return
        time.sleep(0.05)
    raise AssertionError(f"processes are left: {members(group)}")


def test_a_script_without_a_guard_is_told(tmp_path: Path) -> None:
    running = start(tmp_path, 8, guard="if True:")
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 1
    assert "if __name__ == '__main__':" in errors.splitlines()[-1]


TRACE = "arrival_s,input_tokens,output_tokens\n0,9,3\n"


def test_a_digest_follows_what_results_depend_on(here: Path) -> None:
    for name in ("trace.csv", "m_dense.csv", "config.json"):
        (here / name).write_text(TRACE, encoding="utf-8")
    own = {
        "workload": {"kind": "file", "path": "trace.csv"},
        "cost": {"model": "table", "tables": "m", "num_layers": 2, "config": "config.json"},
        "routing": {"rank_policy": "own:breaks"},
    }

    def now(*changes: str, **more: Any) -> str:
        return digest(make_scenario({**own, **more}, changes), here)

    first = now()
    assert now("name=other") == first
    changed = [now("seed=1"), now("fleet.ranks=2"), now("workload.path=none.csv"), now("routing.rank_policy=none")]
    for name in ("trace.csv", "m_dense.csv", "m_moe.csv", "config.json", "own.py"):
        (here / name).write_text("something else", encoding="utf-8")
        changed.append(now())
    assert len({first, *changed}) == 1 + len(changed)


def test_the_code_that_simulates_is_in_the_digest() -> None:
    """Single workers and pairs of them: each module that this imports."""
    code = """
import sys
from pathlib import Path
from equipoise.sim.run import simulate
from equipoise.sim.scenario import make_scenario
for fleet in ({}, {"prefill_workers": 1, "decode_workers": 1}):
    simulate(make_scenario({"fleet": fleet}, ["workload.num_requests=3"]))
loaded = [Path(module.__file__) for name, module in sys.modules.items() if name.split(".")[0] == "equipoise"]
from equipoise.sim.sweep.digest import SIMULATED_BY
root = Path(sys.modules["equipoise"].__file__).parent
print(*({*loaded} - {path for pattern in SIMULATED_BY for path in root.glob(pattern)}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("\n", "")


def test_the_digest_does_not_depend_on_where_the_folder_is(tmp_path: Path) -> None:
    folders: Sequence[Path] = [tmp_path / "a", tmp_path / "b"]
    scenario = make_scenario({"workload": {"kind": "file", "path": "trace.csv"}})
    for folder in folders:
        folder.mkdir()
        (folder / "trace.csv").write_text(TRACE, encoding="utf-8")
    assert digest(scenario, folders[0]) == digest(scenario, folders[1])
