"""What a sweep's words mean: values, ranges, axes, policies, seeds; and what is refused before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from equipoise.errors import ConfigError
from equipoise.sim.sweep.files import as_table
from equipoise.sim.sweep.read import make_sweep, read_sweep, with_axes
from equipoise.sim.sweep.values import axis_of, policy_of, values_of

if TYPE_CHECKING:
    from equipoise.sim.sweep.spec import Sweep
    from equipoise.sim.sweep.values import Json

BASE = {"workload": {"concurrency": 4, "num_requests": 8}}
EXAMPLES = sorted((Path(__file__).parents[3] / "src/equipoise/sim/sweep/examples").glob("*.yaml"))


@pytest.mark.parametrize(
    ("given", "values"),
    [
        ("2,4,8", [2, 4, 8]),
        ("2", [2]),
        (7, [7]),
        ("true,False", [True, False]),
        ("none, minimum_tokens", ["none", "minimum_tokens"]),
        ("null,5", [None, 5]),
        ("0..0.3:0.1", [0, 0.1, 0.2, 0.3]),
        ("2..5", [2, 3, 4, 5]),
        ("1..10:4", [1, 5, 9]),
        ("1..64:x4", [1, 4, 16, 64]),
        ("0.5..4:x2,100", [0.5, 1, 2, 4, 100]),
        ("-1..1", [-1, 0, 1]),
        ("1e2..3e2:1e2", [100, 200, 300]),
        (["2..4", 8], [2, 3, 4, 8]),
        ([{"mean": 5}, {"mean": 6}], [{"mean": 5}, {"mean": 6}]),
        ("../a.csv,own.rules:gate", ["../a.csv", "own.rules:gate"]),
    ],
)
def test_values(given: Json, values: list[Json]) -> None:
    found = values_of("f", given)
    assert found == values
    assert [type(value) for value in found] == [type(value) for value in values]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", "vary: f has an empty value"),
        ("1,,2", "vary: f has an empty value"),
        ([], "vary: f has no values"),
        ("1,2,1", "vary: f has 1 twice"),
        ("1..3,2", "vary: f has 2 twice"),
        ("5..2", "vary: f: '5..2' must go from a number up to a larger one"),
        ("1..2:0", "never ends, its step must be more than 0"),
        ("1..8:x1", "a factor more than 1"),
        ("0..8:x2", "never ends"),
        ("0..1:0.00001", "has more than 10000 values"),
    ],
)
def test_wrong_values(given: Json, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        values_of("f", given)
    assert message in str(error.value)


def test_flags_in_words() -> None:
    assert axis_of("fleet.ranks=2,4") == {"fleet.ranks": "2,4"}
    joined = axis_of("fleet.ranks=2,4+scheduler.max-running=1e+2,32")
    assert joined == {"fleet.ranks": "2,4", "scheduler.max-running": "1e+2,32"}
    assert policy_of("gate=scheduler.balance=true,scheduler.balance-margin=1") == (
        "gate",
        {"scheduler.balance": True, "scheduler.balance_margin": 1},
    )
    assert policy_of("plain") == policy_of("plain=") == ("plain", {})


def points(sweep: Sweep) -> list[dict[str, Json]]:
    return [dict(point) for point in sweep.points()]


def test_points_are_all_combinations_of_the_axes() -> None:
    sweep = make_sweep(BASE, vary={"fleet.ranks": [1, 2], "scheduler.max-running": "4,8"}, seeds=3)
    assert points(sweep) == [
        {"fleet.ranks": ranks, "scheduler.max_running": seats} for ranks in (1, 2) for seats in (4, 8)
    ]
    assert [job.key for job in sweep.jobs()][:2] == [
        "fleet.ranks=1 scheduler.max_running=4 / base / seed 0",
        "fleet.ranks=1 scheduler.max_running=4 / base / seed 1",
    ]
    assert sweep.num_runs == len(sweep.jobs()) == 12


def test_fields_of_one_axis_vary_together() -> None:
    sweep = make_sweep(BASE, vary=[{"fleet.ranks": "1,2", "scheduler.max_running": [8, 4]}, {"cost.step_ms": "5"}])
    assert points(sweep) == [
        {"fleet.ranks": 1, "scheduler.max_running": 8, "cost.step_ms": 5},
        {"fleet.ranks": 2, "scheduler.max_running": 4, "cost.step_ms": 5},
    ]


def test_a_run_is_the_scenario_with_set_point_policy_and_seed() -> None:
    policies: dict[str, dict[str, Json]] = {"a": {}, "b": {"scheduler.balance": True, "name": "2"}}
    fixed: dict[str, Json] = {"cost.step-ms": 5.0, "seed": 7, "workload.prompt": {"mean": 9}}
    sweep = make_sweep({**BASE, "seed": 3}, set=fixed, vary={"fleet.ranks": "2"}, policies=policies, seeds=2)
    assert (list(sweep.seeds), sweep.baseline) == ([7, 8], "a")
    scenario = sweep.jobs()[3].scenario
    assert (scenario.seed, scenario.fleet.ranks, scenario.cost.step_ms) == (8, 2, 5)
    assert (scenario.scheduler.balance, scenario.name, scenario.workload.prompt.mean) == (True, "2", 9)
    assert not sweep.jobs()[0].scenario.scheduler.balance


def test_one_policy_is_compared_with_none_at_all() -> None:
    alone = make_sweep(BASE, policies={"gate": {"scheduler.balance": True}})
    assert list(alone.policies) == ["base", "gate"]
    assert list(make_sweep(BASE).policies) == ["base"]
    assert list(make_sweep(BASE, policies={"a": {}, "b": {"cost.step_ms": 5}}).policies) == ["a", "b"]


def test_flags_replace_the_files_values_of_a_field() -> None:
    file: list[dict[str, Json]] = [{"fleet.ranks": [1], "scheduler.max-running": [4]}, {"seedless": 1}]
    assert with_axes(file, [axis_of("scheduler.max_running=8,9")]) == [
        {"fleet.ranks": [1]},
        {"seedless": 1},
        {"scheduler.max_running": "8,9"},
    ]
    assert with_axes({"fleet.ranks": 1}, [axis_of("fleet.ranks=3")]) == [{"fleet.ranks": "3"}]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"vary": {"fleet.rank": "2"}}, "fleet.rank is not a setting, did you mean fleet.ranks? (at fleet.rank=2 / base"),
    ({"vary": {"fleet.ranks": "2,0"}}, "fleet.ranks: 0 must be at least 1 (at fleet.ranks=0 / base / seed 0)"),
    ({"vary": {"fleet.ranks": "two"}}, "fleet.ranks: Expected int"),
    ({"vary": {"workload.kind": "file"}}, "workload.path: a workload of kind file needs one (at"),
    ({"vary": {"routing.rank_policy": "fair"}}, "rank policy: 'fair' is not known"),
    ({"vary": {"cost.config": "none.json"}, "set": {"cost.model": "roofline"}}, "none.json: No such file"),
    ({"policies": {"a": {"scheduler.balanced": True}}}, "scheduler.balanced is not a setting"),
    ({"policies": {"a": {"routing.worker_policy": "x"}}}, "'x' is not known"),
    ({"policies": {"a": 3}}, "policies.a: 3 must be settings"),
    (
        {"policies": {"a": {"fleet.ranks": 3}}, "vary": {"fleet.ranks": 2}},
        "policies: a sets fleet.ranks, which is varied",
    ),
    ({"vary": {"seed": "1,2"}}, "vary: seed is told by seeds"),
    ({"vary": [{"fleet.ranks": 1}, {"fleet.ranks": 2}]}, "vary: fleet.ranks is there twice"),
    ({"vary": [{"fleet.ranks": "1,2", "cost.step_ms": "1,2,3"}]}, "fleet.ranks has 2, cost.step_ms has 3"),
    ({"vary": ["fleet.ranks"]}, "vary: 'fleet.ranks' must be like fleet.ranks: [2, 4]"),
    ({"baseline": "c"}, "baseline: 'c' must be one of base"),
    ({"metrics": ["ttft"]}, "metrics: 'ttft' must be one of num_requests"),
    ({"pareto": "ttft_mean_ms"}, "pareto: ttft_mean_ms must be two numbers' names"),
    ({"pareto": "ttft_mean_ms,x"}, "metrics: 'x' must be one of"),
    ({"seeds": 0}, "seeds: 0 must be at least 1"),
    ({"seeds": [1, 1]}, "seeds: [1, 1] must be how many, or a list of different ones"),
    (
        {"vary": {"cost.step_ms": "1..5000", "fleet.ranks": "1..500"}},
        "vary: points x policies x seeds: 2500000 must be",
    ),
]


@pytest.mark.parametrize(("told", "message"), WRONG, ids=lambda value: str(value)[:60])
def test_what_is_wrong_fails_before_anything_runs(told: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_sweep(BASE, **told).jobs()
    assert message in str(error.value)


def test_a_file_is_a_scenario_or_a_sweep(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/scenario.yaml").write_bytes(msgspec.yaml.encode(BASE))
    (tmp_path / "sweep.yaml").write_text("scenario: deep/scenario.yaml\nvary: {fleet.ranks: 1..2}\n", encoding="utf-8")
    assert read_sweep(tmp_path / "deep/scenario.yaml") == {"scenario": BASE, "folder": tmp_path / "deep"}
    found = read_sweep(tmp_path / "sweep.yaml")
    assert (found["scenario"], found["folder"]) == (BASE, tmp_path / "deep")
    assert len(make_sweep(**found).points()) == 2
    (tmp_path / "sweep.yaml").write_text("scenario: {}\nvaries: {}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"sweep.yaml: varies is not a setting of a sweep, there are scenario, "):
        read_sweep(tmp_path / "sweep.yaml")


def test_what_was_swept_is_written_as_a_file_that_sweeps_the_same(tmp_path: Path) -> None:
    policies: dict[str, dict[str, Json]] = {"a": {}, "b": {"cost.step_ms": 3}}
    sweep = make_sweep(
        BASE, folder=tmp_path, vary={"fleet.ranks": "1,2"}, policies=policies, seeds=[4, 2], baseline="b"
    )
    (tmp_path / "sweep.yaml").write_bytes(msgspec.yaml.encode(as_table(sweep)))
    again = make_sweep(**read_sweep(tmp_path / "sweep.yaml"))
    assert [job.key for job in again.jobs()] == [job.key for job in sweep.jobs()]
    assert [job.scenario for job in again.jobs()] == [job.scenario for job in sweep.jobs()]
    assert (again.folder, again.baseline) == (tmp_path, "b")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.stem))
def test_examples_are_sweeps_with_comments(path: Path) -> None:
    sweep = make_sweep(**read_sweep(path))
    assert sweep.name == path.stem
    assert path.read_text(encoding="utf-8").startswith("# ")
    assert len(sweep.jobs()) == sweep.num_runs > 1
