"""Scenarios: what a file says, what overrides win, and what is refused with field, value and what is allowed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from equipoise.errors import ConfigError
from equipoise.sim.scenario import Scenario, as_table, make_scenario, read_scenario

if TYPE_CHECKING:
    from pathlib import Path


def test_a_file_says_what_differs_from_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text("fleet:\n  ranks: 8\n  lockstep: true\nworkload:\n  rate: 3\n", encoding="utf-8")
    scenario = read_scenario(path)
    assert (scenario.fleet.ranks, scenario.fleet.lockstep, scenario.fleet.workers) == (8, True, 1)
    assert (scenario.workload.rate, scenario.workload.concurrency) == (3, None)
    assert scenario.scheduler.max_running == 256


def test_toml_and_json_do_too(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("seed = 3\n[fleet]\nranks = 2\n", encoding="utf-8")
    (tmp_path / "a.json").write_text('{"seed": 3, "fleet": {"ranks": 2}}', encoding="utf-8")
    assert read_scenario(tmp_path / "a.toml") == read_scenario(tmp_path / "a.json")


def test_overrides_leave_the_table_as_it_is() -> None:
    table = {"fleet": {"ranks": 2}, "workload": {"rate": 2, "output": {"mean": 5}}}
    for mean in (6, 7):
        overrides = [f"workload.output.mean={mean}", "fleet.ranks=8", "workload.num_requests=3"]
        assert make_scenario(table, overrides).workload.output.mean == mean
    assert table == {"fleet": {"ranks": 2}, "workload": {"rate": 2, "output": {"mean": 5}}}


def test_overrides_win() -> None:
    overrides = [
        "fleet.ranks=8",
        "cost.eager-step-ms=30",
        "scheduler.balance=true",
        "name=a b",
        "cost.eager_step_ms=null",
    ]
    scenario = make_scenario({"fleet": {"ranks": 2}, "workload": {"rate": 2}}, overrides)
    assert (scenario.fleet.ranks, scenario.scheduler.balance, scenario.name) == (8, True, "a b")
    assert scenario.cost.eager_step_ms is None
    assert scenario.workload.rate == 2


def test_an_open_loop_may_be_closed_by_overrides() -> None:
    scenario = make_scenario({"workload": {"rate": 2}}, ["workload.rate=null", "workload.concurrency=4"])
    assert (scenario.workload.rate, scenario.workload.concurrency) == (None, 4)


def test_ranks_of_all_three_roles_may_be_given() -> None:
    fleet = {"workers": 1, "ranks": 8, "prefill_workers": 1, "prefill_ranks": 2, "decode_workers": 1}
    assert make_scenario({"fleet": fleet}).fleet.ranks == 8
    assert make_scenario({"fleet": {**fleet, "workers": 0, "ranks": 1}}).fleet.ranks == 1


def test_words_mean_what_they_mean_in_files() -> None:
    scenario = make_scenario({}, ["routing.rank_policy=none", "routing.charges=False", "scheduler.watermark=1e-2"])
    assert (scenario.routing.rank_policy, scenario.routing.charges) == ("none", False)
    assert scenario.scheduler.watermark == 0.01


def test_a_scenario_survives_being_written_out() -> None:
    scenario = make_scenario({"workload": {"rate": 2, "output": {"mean": 7}}, "scheduler": {"rules": []}})
    for codec in (msgspec.yaml, msgspec.json):
        assert make_scenario(codec.decode(codec.encode(as_table(scenario)))) == scenario


def test_no_table_is_the_default() -> None:
    assert make_scenario({}) == Scenario()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"fleets": {}}, "fleets is not a setting, did you mean fleet?"),
        ({"fleet": {"rank": 2}}, "fleet.rank is not a setting, did you mean fleet.ranks?"),
        ({"workload": {"rate": 1, "output": {"means": 2}}}, "workload.output.means is not a setting, did you mean"),
        ({"fleet": 3}, "fleet: 3 must be a table of settings"),
        ({"workload": 3}, "workload: 3 must be a table of settings"),
        ({"workload": {"rate": 1, "output": 3}}, "workload.output: 3 must be a table of settings"),
        ({"fleet": {"ranks": "two"}}, "fleet.ranks: Expected int, got str"),
        ({"seed": -1}, "seed: -1 must be at least 0"),
        ({"cost": {"num_experts": -1}}, "cost.num-experts: -1 must be at least 0"),
        ({"fleet": {"ranks": 0}}, "fleet.ranks: 0 must be at least 1"),
        ({"fleet": {"ranks": None}}, "fleet.ranks: Expected int, got null"),
        (
            {"fleet": {"ranks": 8, "prefill_workers": 1, "decode_workers": 1}},
            "fleet.ranks: 8 is for workers, and there are none beside prefill and decode workers: give prefill-ranks",
        ),
        ({"scheduler": {"max_running": 0}}, "scheduler.max-running: 0 must be at least 1"),
        ({"scheduler": {"num_drafts": 3}}, "scheduler.num-drafts: 3 must be 0"),
        ({"cache": {"num_pages": None}}, "cache.num-pages: it must be given"),
        ({"cache": {"page_size": 24}}, "cache.page-size: 24 is not a power of two"),
        ({"cost": {"step_ms": -1}}, "cost.step-ms: -1.0 must be at least 0"),
        ({"cost": {"step_ms": float("nan")}}, "cost.step-ms: nan must be at least 0"),
        ({"cost": {"eager_step_ms": -1}}, "cost.eager-step-ms: -1.0 must be at least 0"),
        ({"cost": {"model": "tables"}}, "cost.model: 'tables' must be one of linear, table, roofline"),
        ({"cost": {"model": "table"}}, "cost.model: cost by table needs tables and num-layers"),
        ({"cost": {"model": "roofline"}}, "cost.model: cost by roofline needs config"),
        ({"cost": {"gpu": "H1000"}}, "cost.gpu: 'H1000' must be one of"),
        ({"workload": {}}, "workload.rate: give either rate (an open loop) or concurrency (a closed one)"),
        ({"workload": {"rate": 0}}, "workload.rate: 0.0 must be more than 0"),
        ({"workload": {"kind": "file"}}, "workload.path: a workload of kind file needs one"),
        ({"workload": {"rate": 1, "path": "a.csv"}}, "workload.path: a.csv is for a workload of kind file"),
        ({"workload": {"kind": "sessions"}}, "workload.rate: sessions need one"),
        ({"workload": {"rate": 1, "prompt": {"mean": 0}}}, "workload.prompt.mean: 0.0 must be at least 1"),
        ({"workload": {"rate": 1, "prompt": {"spread": -1}}}, "workload.prompt.spread: -1.0 must be at least 0"),
        ({"objectives": {"ttft_ms": 0}}, "objectives.ttft-ms: 0.0 must be more than 0"),
        ({"routing": {"report_interval_s": -1}}, "routing.report-interval-s: -1.0 must be at least 0"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_scenario(table)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("fleet.ranks", "set: 'fleet.ranks' must be like fleet.ranks=8"),
        ("fleet.rnaks=8", "fleet.rnaks is not a setting, did you mean fleet.ranks?"),
        ("seed.ranks=8", "set: seed.ranks: seed is no section"),
        ("fleet.ranks=many", "fleet.ranks: Expected int, got str"),
        ("fleet=8", "fleet: 8 must be a table of settings"),
    ],
)
def test_wrong_overrides_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_scenario({}, [override])
    assert message in str(caught.value)
