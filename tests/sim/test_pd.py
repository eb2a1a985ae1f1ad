"""Prefill and decode workers: pairs lose nothing, whatever the ranks lack, and stages take what they cost."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.errors import ConfigError
from equipoise.sim.pd import STAGES
from equipoise.sim.run import Simulation, simulate
from equipoise.sim.scenario import as_table, make_scenario

if TYPE_CHECKING:
    from equipoise.sim.run import Results

PIECE_LEN = 512
TRANSFERS = [{"transfer_gbps": 400.0}, {"transfer_gbps": 0.5, "transfer_ms": 0.0}, {"transfer_ms": 300.0}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recorded requests: bursts that share prefixes, some of one token, some longer than a rank can hold."""
    path = tmp_path_factory.mktemp("traces")
    draw = random.Random(5)
    time_ms = 0
    with (path / "trace.jsonl").open("w", encoding="utf-8") as file:
        for number in range(30):
            time_ms += draw.choice((0, 0, 125, 750))
            prompt_len = draw.choice((3, 90, 600, 1300, 2600))
            ids = [100 * draw.randrange(3), *(1000 * number + piece for piece in range(1, -(-prompt_len // PIECE_LEN)))]
            row = {"timestamp": time_ms, "input_length": prompt_len, "output_length": draw.choice((1, 2, 40, 150))}
            file.write(json.dumps(row | {"hash_ids": ids}) + "\n")
    return path


def lengths(mean: int) -> dict[str, Any]:
    return {"mean": mean, "spread": 0.6, "shape": "lognormal"}


workloads = st.one_of(
    st.fixed_dictionaries(
        {
            "num_requests": st.integers(1, 20),
            "prompt": st.builds(lengths, st.integers(1, 120)),
            "output": st.builds(lengths, st.integers(1, 60)),
            "concurrency": st.integers(1, 12),
        }
    ),
    st.fixed_dictionaries(
        {"kind": st.just("file"), "path": st.just("trace.jsonl"), "rate_scale": st.sampled_from([0.5, 4.0])}
    ),
    st.fixed_dictionaries(
        {
            "kind": st.just("sessions"),
            "num_requests": st.integers(1, 4),
            "rate": st.just(5.0),
            "think_s": st.sampled_from([0, 0.5]),
            "prompt": st.just(lengths(30)),
            "output": st.just(lengths(30)),
        }
    ),
)


def role(**settings_of: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    scheduler = {"max_running": st.integers(1, 6), "depth": st.integers(0, 2), **settings_of}
    cache = {"num_pages": st.sampled_from([12, 60, 170]), "page_size": st.sampled_from([4, 16])}
    return st.fixed_dictionaries({"scheduler": st.fixed_dictionaries(scheduler), "cache": st.fixed_dictionaries(cache)})


tables = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 3),
        "workload": workloads,
        "fleet": st.builds(
            dict,
            st.sampled_from(TRANSFERS),
            workers=st.integers(0, 1),
            prefill_workers=st.integers(1, 2),
            prefill_ranks=st.integers(1, 2),
            decode_workers=st.integers(1, 2),
            decode_ranks=st.integers(1, 2),
            lockstep=st.booleans(),
        ),
        "prefill": role(max_step_tokens=st.sampled_from([16, 300])),
        "decode": role(
            max_step_tokens=st.sampled_from([7, 300]),
            watermark=st.sampled_from([0.0, 0.2]),
            max_bypass=st.integers(0, 1),
        ),
        "cache": st.fixed_dictionaries({"prefix_cache": st.booleans()}),
        "cost": st.fixed_dictionaries({"kv_token_us": st.just(3.3), "eager_step_ms": st.sampled_from([None, 31.0])}),
        "routing": st.fixed_dictionaries(
            {
                "worker_policy": st.sampled_from(["prefix_tokens", "random"]),
                "rank_policy": st.sampled_from(["minimum_tokens", "none", "follow_room"]),
                "report_interval_s": st.sampled_from([0.0, 0.05, 1.0]),
                "report_delay_s": st.sampled_from([0.0, 0.3]),
                "charges": st.booleans(),
            }
        ),
    }
)


def bits(results: Results) -> dict[str, bytes]:
    """Everything that came of a simulation, to the last bit."""
    found = {name: column.tobytes() for name, column in results.columns().items()}
    return found | {name: np.float64(value).tobytes() for name, value in results.summary().items()}


@settings(deadline=None, max_examples=25)
@given(tables)
def test_every_request_ends_once_and_nothing_is_left_over(folder: Path, table: dict[str, Any]) -> None:
    simulation = Simulation(make_scenario(table), folder)
    ended: list[int] = []

    def look(num_ended: int, now: float) -> None:
        ended.append(num_ended)
        if num_ended % 4 == 1:
            for scheduler in simulation.schedulers():  # the ledger equals a rescan, and pages add up
                scheduler.check()

    simulation.on_progress = look
    simulation.run()
    columns = simulation.results().columns()
    is_done = ~np.isnan(columns["last_s"])
    assert ended == list(range(1, int(is_done.sum()) + 1))
    order = ["arrival_s", "admitted_s", "first_s", "last_s"]
    is_pair = is_done & (columns["prefill_worker"] >= 0)
    for earlier, later in pairwise(order):
        assert (columns[earlier] <= columns[later])[is_done].all()
    stages = ["arrival_s", "reserved_s", "admitted_s", "computed_s", "sent_s", "received_s", "first_s"]
    for earlier, later in pairwise(stages):
        assert (columns[earlier] <= columns[later])[is_pair].all()
    assert (columns["num_cached"] < columns["prompt_len"]).all()
    for scheduler in simulation.schedulers():
        scheduler.check()
        assert not scheduler.has_work
        assert scheduler.num_requests == 0
        assert scheduler.kv.num_free == scheduler.kv.num_pages
    for load in simulation.front.loads:
        assert all((rank.num_active, rank.active) == (0, 0) for rank in load.ranks)
    gaps = simulation.results().steps.gaps
    assert gaps.num == (columns["output_len"][is_done] - 1).sum()
    between_s = (columns["last_s"] - columns["first_s"])[is_done].sum()
    assert gaps.sum_ps / 1e12 == pytest.approx(between_s, rel=1e-9, abs=1e-9)


@settings(deadline=None, max_examples=20)
@given(tables)
def test_leaps_change_nothing(folder: Path, table: dict[str, Any]) -> None:
    scenario = make_scenario(table)
    leapt, stepped = (simulate(scenario, folder=folder, leaps=leaps) for leaps in (True, False))
    assert bits(leapt) == bits(stepped)


def one_pair(num_requests: int = 1, **sections: Any) -> dict[str, Any]:
    """A prefill and a decode rank; requests of 100 and 4 tokens, all there at once."""
    table: dict[str, Any] = {
        "fleet": {
            "prefill_workers": 1,
            "decode_workers": 1,
            "transfer_gbps": 8.0,  # 1,000 bytes in 1 us
            "transfer_ms": 5.0,
            "kv_bytes_per_token": 1e5,
        },
        "workload": {
            "num_requests": num_requests,
            "concurrency": num_requests,
            "prompt": {"mean": 100},
            "output": {"mean": 4},
        },
        "scheduler": {"depth": 0},
        "cost": {"step_ms": 10, "eager_step_ms": 50, "prefill_token_ms": 1, "decode_row_ms": 2},
    }
    for name, section in sections.items():
        table[name] = table.get(name, {}) | section
    return table


def test_a_lone_request_takes_its_prefill_its_transfer_and_its_decodes() -> None:
    columns = simulate(make_scenario(one_pair())).columns()
    # 150 ms of prefill, 10 ms for 10 MB and 5 ms of way; three decodes of 12 ms, none of them at the eager price.
    assert columns["computed_s"][0] == pytest.approx(0.150)
    assert columns["sent_s"][0] == pytest.approx(0.150)
    assert columns["received_s"][0] == pytest.approx(0.165)
    assert columns["first_s"][0] == pytest.approx(0.165)
    assert columns["last_s"][0] == pytest.approx(0.165 + 3 * 0.012)


def test_stages_add_up_to_the_first_token() -> None:
    summary = simulate(make_scenario(one_pair(9, decode={"scheduler": {"max_running": 2}}))).summary()
    assert sum(summary[f"{stage}_mean_ms"] for stage in STAGES) == pytest.approx(summary["ttft_mean_ms"])
    assert summary["prefill_busy_share"] == pytest.approx(9 * 0.150 / summary["duration_s"])
    assert "transfer_mean_ms" not in simulate(make_scenario({"workload": {"num_requests": 1, "rate": 1}})).summary()


def test_links_carry_one_prompt_at_a_time() -> None:
    table = one_pair(2, fleet={"prefill_workers": 2, "decode_workers": 1, "transfer_gbps": 0.08})
    table["routing"] = {"worker_policy": "round_robin"}
    columns = simulate(make_scenario(table)).columns()
    # Both prompts are computed at once, on two workers; a second for each to the one decode rank.
    assert columns["computed_s"].tolist() == pytest.approx([0.150, 0.150])
    assert columns["sent_s"].tolist() == pytest.approx([0.150, 1.150])


def test_a_full_decode_rank_holds_prompts_back() -> None:
    columns = simulate(make_scenario(one_pair(3, decode={"scheduler": {"max_running": 1}}))).columns()
    # Whoever has the only seat ends before the next prompt is begun.
    assert columns["admitted_s"][1:].tolist() == pytest.approx(columns["last_s"][:-1].tolist())
    assert columns["reserved_s"].tolist() == columns["admitted_s"].tolist()
    by_pages = simulate(make_scenario(one_pair(3, decode={"cache": {"num_pages": 7, "page_size": 16}}))).columns()
    assert by_pages["reserved_s"].tolist() == columns["reserved_s"].tolist()


def test_pages_of_a_prefill_rank_are_held_until_the_kv_is_there() -> None:
    table = one_pair(2, prefill={"cache": {"num_pages": 7}})
    columns = simulate(make_scenario(table)).columns()
    assert columns["admitted_s"][1] == pytest.approx(columns["received_s"][0])


def test_decode_ranks_that_lack_pages_retract_and_compute_again() -> None:
    sections = {"cache": {"num_pages": 16, "page_size": 16, "prefix_cache": False}, "scheduler": {"max_running": 2}}
    table = one_pair(4, decode=sections)
    table["workload"] |= {"output": {"mean": 60}}
    results = simulate(make_scenario(table))
    columns = results.columns()
    assert columns["num_preemptions"].sum() > 0
    assert not np.isnan(columns["last_s"]).any()
    # Each prompt is computed on the prefill rank once; what was retracted, on the decode rank.
    assert results.steps.num_prefill_steps == 4 + columns["num_preemptions"].sum()


def test_prefixes_are_hits_on_the_prefill_rank_and_save_bytes_on_the_decode_rank(folder: Path) -> None:
    table = {"workload": {"kind": "file", "path": "trace.jsonl"}, "fleet": {"prefill_workers": 1, "decode_workers": 1}}
    columns = simulate(make_scenario(table), folder=folder).columns()
    assert set(columns["num_cached"].tolist()) == {0, 80, 512}
    assert set((columns["prompt_len"] - columns["sent_len"]).tolist()) >= {0, 80, 512}


def test_requests_that_one_leg_cannot_serve_are_refused() -> None:
    for role_name in ("prefill", "decode"):
        table = one_pair(2, **{role_name: {"cache": {"num_pages": 5}}})
        simulation = Simulation(make_scenario(table), Path())
        simulation.run()
        assert simulation.results().summary()["num_refused"] == 2
        assert all(scheduler.num_requests == 0 for scheduler in simulation.schedulers())


def test_requests_go_where_ranks_carry_less() -> None:
    fleet = {"workers": 1, "prefill_workers": 1, "decode_workers": 1}
    columns = simulate(make_scenario(one_pair(8, fleet=fleet))).columns()
    assert 2 <= (columns["prefill_worker"] >= 0).sum() <= 6


def test_sections_of_a_role_say_only_what_differs() -> None:
    table = {"fleet": {"prefill_workers": 1, "decode_workers": 2}, "decode": {"scheduler": {"max-running": 3}}}
    scenario = make_scenario(table, ["scheduler.max_step_tokens=512", "prefill.cost.step_ms=3"])
    assert scenario.fleet.workers == 0
    assert scenario.prefill is not None
    assert scenario.decode is not None
    assert (scenario.decode.scheduler.max_running, scenario.decode.scheduler.max_step_tokens) == (3, 512)
    assert (scenario.prefill.cost.step_ms, scenario.cost.step_ms) == (3, 20)
    assert make_scenario(as_table(scenario)) == scenario


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"fleet": {"prefill_workers": 1}}, "fleet.prefill-workers: 1 beside 0 decode-workers, a request needs one of"),
        ({"fleet": {"workers": 0}}, "fleet.workers: 0 is too few"),
        ({"fleet": {"transfer_gbps": 0}}, "fleet.transfer-gbps: 0.0 must be at least 0.001"),
        ({"prefill": {"cache": {"num_pages": None}}}, "prefill.cache.num-pages: it must be given"),
        ({"decode": {"schedule": {}}}, "decode.schedule is not a setting, did you mean decode.scheduler?"),
        ({"decode": 3}, "decode: 3 must be a table of settings"),
    ],
)
def test_what_cannot_be_is_refused(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        make_scenario(table)


@pytest.mark.parametrize(("prompt_len", "output_len"), [(32, 1), (31, 2), (30, 3)])
def test_a_request_that_takes_all_pages_is_served(prompt_len: int, output_len: int) -> None:
    table = {
        "fleet": {"prefill_workers": 1, "decode_workers": 1},
        "cache": {"page_size": 4, "num_pages": 8},
        "workload": {
            "num_requests": 3, "concurrency": 2, "prompt": {"mean": prompt_len}, "output": {"mean": output_len},
        },
    }  # fmt: skip
    assert simulate(make_scenario(table)).summary()["num_finished"] == 3
