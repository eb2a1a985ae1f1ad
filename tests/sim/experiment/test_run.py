"""Experiments as a whole: rows of the right form, pages whose prose stays."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from equipoise.errors import ConfigError, EquipoiseError
from equipoise.sim.experiment import EXPERIMENTS, build_experiment
from equipoise.sim.experiment.files import BEGIN, END, save, save_rows
from equipoise.sim.experiment.rows import Experiment, Options, Row, Table, Trial
from equipoise.sim.experiment.run import run_experiment
from equipoise.sim.experiment.show import as_text
from equipoise.sim.scenario import make_scenario

NUM_REQUESTS = 12


def small(trial: Trial) -> Trial:
    """The same with few and short requests."""
    workload = trial.scenario.workload
    output = dataclasses.replace(workload.output, mean=min(workload.output.mean, 30))
    cut = dataclasses.replace(workload, num_requests=NUM_REQUESTS, output=output)
    return dataclasses.replace(trial, scenario=dataclasses.replace(trial.scenario, workload=cut))


def cut(name: str) -> Experiment:
    """The quick one on a few requests."""
    built = build_experiment(name, Options(quick=True))
    return dataclasses.replace(built, trials=[small(trial) for trial in built.trials])


@pytest.mark.parametrize("name", list(EXPERIMENTS))
def test_every_experiment_has_rows_tables_and_charts(name, tmp_path):
    experiment = cut(name)
    rows = run_experiment(experiment)
    assert len(rows) >= len(experiment.trials)
    assert {row.policy for row in rows} >= {trial.policy for trial in experiment.trials}
    for row, trial in zip(rows, experiment.trials, strict=False):
        assert (row.point, row.policy, set(row.values)) == (trial.point, trial.policy, set(experiment.metrics))
        assert row["throughput_tok_s"] > 0
    for table in experiment.tables(rows):
        assert all(len(line) == len(table.header) for line in table.rows), table.title
    assert experiment.question.endswith("?")
    save(experiment, rows, tmp_path, "a command")
    page = (tmp_path / f"{name}.md").read_text(encoding="utf-8")
    assert "`a command`" in page
    for plot in tmp_path.glob("*.svg"):
        assert f"({plot.name})" in page
    assert len(json.loads((tmp_path / f"{name}.json").read_bytes())) == len(rows)


@pytest.mark.parametrize("name", list(EXPERIMENTS))
def test_the_whole_one_has_more_points_and_every_trial_a_name(name):
    quick, whole = (build_experiment(name, Options(quick=quick)).trials for quick in (True, False))
    assert len(whole) > len(quick) or not whole
    assert len({(trial.key, trial.scenario.seed) for trial in whole}) == len(whole)


def test_seeds_differ_and_are_rows_of_their_own():
    rows = run_experiment(dataclasses.replace(cut("async"), trials=[TRIAL]), num_seeds=2)
    assert [row.seed for row in rows] == [5, 6]
    assert rows[0].values != rows[1].values


SCENARIO = make_scenario(
    {
        "seed": 5,
        "workload": {
            "num_requests": 5,
            "concurrency": 2,
            "prompt": {"mean": 50},
            "output": {"mean": 20, "spread": 0.5},
        },
    }
)
TRIAL = Trial({"axis": 1}, "none", SCENARIO)


def test_two_trials_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="two trials of async have one name"):
        run_experiment(dataclasses.replace(cut("async"), trials=[TRIAL, TRIAL]))


def test_a_failure_is_told_in_one_line():
    missing = make_scenario({"workload": {"kind": "file", "path": "nowhere.csv"}})
    trials = [Trial({"axis": number}, "none", missing) for number in range(3)]
    with pytest.raises(EquipoiseError, match=r"^3 of 3 simulations failed, the first is async: axis=0 / none"):
        run_experiment(dataclasses.replace(cut("async"), trials=trials))


def test_a_run_that_was_ended_goes_on_where_it_was(tmp_path):
    kept, told = tmp_path / "kept", []
    experiment = dataclasses.replace(cut("async"), trials=[TRIAL])
    rows = run_experiment(experiment, kept=kept)
    more = dataclasses.replace(experiment, trials=[TRIAL, dataclasses.replace(TRIAL, point={"axis": 2})])
    again = run_experiment(more, kept=kept, on_progress=lambda done, num: told.append((done, num)))
    assert again[0] == rows[0]
    assert told[0] == (2, 2)  # the second is the same simulation


def test_rows_are_json_with_null_for_what_did_not_happen(tmp_path):
    row = Row({"ranks": 4, "shape": "a/b"}, "none", {"throughput_tok_s": 123.4567891, "itl_p99_ms": math.nan}, seed=3)
    save_rows([row, row], tmp_path / "rows.json")
    found = json.loads((tmp_path / "rows.json").read_bytes())
    point = {"ranks": 4, "shape": "a/b"}
    assert found == [{"point": point, "policy": "none", "seed": 3, "throughput_tok_s": 123.457, "itl_p99_ms": None}] * 2


EXPERIMENT = Experiment(
    "tiny", "Is it?", (), lambda rows: [Table("Answer", ("", "n"), (("rows", str(len(rows))),))], lambda rows: {}
)


def test_prose_around_the_results_stays(tmp_path):
    page = tmp_path / "tiny.md"
    page.write_text(f"# Title\n\nBefore.\n\n{BEGIN}\nold\n{END}\n\nAfter.\n", encoding="utf-8")
    save(EXPERIMENT, [], tmp_path, "it")
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# Title\n\nBefore.\n")
    assert text.endswith(f"{END}\n\nAfter.\n")
    assert "old" not in text
    assert "| rows | 0 |" in text


def test_a_page_without_a_place_for_results_is_refused(tmp_path):
    (tmp_path / "tiny.md").write_text("# Mine\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="no place for results"):
        save(EXPERIMENT, [], tmp_path, "it")
    assert (tmp_path / "tiny.md").read_text(encoding="utf-8") == "# Mine\n"


def test_an_unknown_experiment_is_refused():
    with pytest.raises(ConfigError, match="'blance' is not known, there are balance"):
        build_experiment("blance", Options())


def test_text_fits_a_screen():
    rows = [Row({"num_waiting": n}, way, {"least_us": 1.0, "median_us": 2.0}) for n in (1, 10) for way in WAYS]
    assert max(map(len, as_text(build_experiment("load", Options()).tables(rows)[:1]).splitlines()[:4])) <= 120


WAYS = ("counters", "one sum", "all sums", "upkeep")


def test_traces_must_be_in_their_folder(tmp_path):
    with pytest.raises(ConfigError, match=r"traces: .* has none of azure_llm_2023_conv.csv.gz"):
        build_experiment("together", Options(traces=tmp_path))


def test_whole_traces_are_taken_by_any_of_their_names(tmp_path):
    for name in ("AzureLLMInferenceTrace_conv.csv", "conversation_trace.jsonl"):
        (tmp_path / name).touch()
    trials = build_experiment("together", Options(traces=tmp_path)).trials
    assert {trial.scenario.workload.path for trial in trials} == {path.name for path in tmp_path.iterdir()}
    assert {trial.point["ranks"] for trial in trials} == {8, 32, 128, 512}


def test_the_heads_of_traces_serve_fleets_that_they_are_long_enough_for():
    trials = build_experiment("together", Options()).trials
    assert {(trial.point["trace"], trial.point["ranks"]) for trial in trials} == {
        (name, ranks) for name in ("azure", "mooncake") for ranks in (8, 32)
    }


def test_the_heads_of_traces_that_ship_are_as_long_as_said():
    from equipoise.sim.experiment.together import HEADS, TRACES
    from equipoise.sim.workload.files import read_requests

    for trace in TRACES.values():
        assert sum(1 for _ in read_requests(Path(HEADS / trace.head))) == trace.head_len
