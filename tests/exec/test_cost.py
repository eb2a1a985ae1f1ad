"""Cost models: terms, tables and rooflines; a run of decode steps costs to the last bit what its steps do."""

from __future__ import annotations

import csv
import gzip
import logging
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.errors import ConfigError
from equipoise.exec.cost import LinearCost, StepLoad, load_of, step_s
from equipoise.exec.cost_roofline import GPUS, LAYER_S, REQUEST_S, STEP_S, ModelShape, RooflineCost
from equipoise.exec.cost_table import Curve, TableCost
from equipoise.request import Request, SamplingParams
from equipoise.sched.plan import PrefillRow, StepPlan

if TYPE_CHECKING:
    from pathlib import Path

    from equipoise.exec.cost import CostModel


def plan(chunks: list[tuple[int, int]], decode_starts: list[int]) -> StepPlan:
    request = Request(0, "r", np.zeros(9000, np.int32), SamplingParams(), max_model_len=10_000)
    step = StepPlan(0)
    step.decode_seats = np.arange(len(decode_starts), dtype=np.int64)
    step.decode_starts = np.array(decode_starts, np.int64)
    step.prefills = [PrefillRow(request, 0, start, n, samples=False) for start, n in chunks]
    step.num_tokens = sum(n for _, n in chunks) + len(decode_starts)
    return step


def test_the_load_of_a_plan() -> None:
    assert load_of(plan([], [4, 9])) == StepLoad(0, 0, 0, 2, 5 + 10)
    keys_seen = [10 + 1, 10 + 2, 10 + 3, 1, 2]
    assert load_of(plan([(10, 3), (0, 2)], [7])) == StepLoad(5, sum(keys_seen), 2, 1, 8)


@pytest.mark.parametrize(
    ("chunks", "starts", "seconds"),
    [
        ([], [0], 1 + 10 + 100 * 1),
        ([(0, 7)], [], 5 + 7 * 2 + 28 * 1000),
        ([(2, 3)], [4, 9], 5 + 3 * 2 + 2 * 10 + 100 * (5 + 10) + 12 * 1000),
    ],
)
def test_linear_terms_add_up(chunks: list[tuple[int, int]], starts: list[int], seconds: float) -> None:
    cost = LinearCost(step_s=1, prefill_token_s=2, decode_row_s=10, kv_token_s=100, eager_step_s=5, prefill_pair_s=1000)
    assert step_s(cost, load_of(plan(chunks, starts))) == pytest.approx(seconds)


# ---------------------------------------------------------------- tables

US_PER_LAYER_TOKEN = 3.0


def attention_us(chunk: int, history: int, rows: int, kv: int) -> float:
    return 1 + 0.5 * chunk + 0.01 * history + 2 * rows + 0.25 * kv


def write_csv(path: Path, header: str, rows: list[tuple[object, ...]]) -> None:
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
        writer = csv.writer(file)
        writer.writerow(header.split(","))
        writer.writerows(rows)


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """Tables of a made-up GPU on which all is linear."""
    start = tmp_path / "gpu_model"
    dense = [("qkv_proj", n, US_PER_LAYER_TOKEN * n) for n in (1, 8, 64)]
    dense += [("layernorm", n, 1.0) for n in (1, 64)] + [("embedding", n, 7.0) for n in (1, 64)]
    write_csv(tmp_path / "gpu_model_dense.csv", "layer,tokens,time_us", dense)
    heads = [("lm_head", n, 10.0 * n) for n in (1, 16)] + [("sampler", n, 5.0) for n in (1, 16)]
    write_csv(tmp_path / "gpu_model_per_sequence.csv.gz", "layer,sequences,time_us", heads)
    grid = [(0, 0, rows, kv) for rows in (1, 4, 16) for kv in (16, 64, 256)]
    grid += [(chunk, history, 0, 0) for chunk in (16, 32) for history in (0, 128)]
    grid += [(c, h, r, k) for c in (16, 32) for h in (0, 128) for r in (1, 4, 16) for k in (16, 64, 256)]
    write_csv(
        tmp_path / "gpu_model_attention.csv",
        "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us",
        [(*point, attention_us(*point)) for point in grid],
    )
    return start


def test_a_table_adds_layers_heads_and_attention(prefix: Path) -> None:
    cost = TableCost(prefix, 3, overhead_s=100e-6)
    decode = step_s(cost, StepLoad(decode_rows=2, kv_tokens=200))
    layer = US_PER_LAYER_TOKEN * 2 + 2 * 1.0 + attention_us(0, 0, 2, 100)
    assert decode * 1e6 == pytest.approx(100 + 3 * layer + 7 + 10 * 2 + 5)


def test_each_request_of_a_step_has_an_overhead(prefix: Path) -> None:
    plain, dear = TableCost(prefix, 3), TableCost(prefix, 3, row_overhead_s=7e-6)
    load = StepLoad(20, 300, 2, 5, 640)
    assert dear.rank_s(load) - plain.rank_s(load) == pytest.approx(7 * 7e-6)
    kv_tokens = np.array([640, 645])
    assert dear.decode_s(5, kv_tokens) - plain.decode_s(5, kv_tokens) == pytest.approx([5 * 7e-6] * 2)


def test_chunks_and_their_history_are_interpolated(prefix: Path) -> None:
    cost = TableCost(prefix, 3)
    chunk, history, rows = 20, 64, 4
    pairs = chunk * history + chunk * (chunk + 1) // 2
    seconds = step_s(cost, StepLoad(chunk, pairs, 1, rows, rows * 128))
    layer = US_PER_LAYER_TOKEN * (chunk + rows) + 2 * 1.0 + attention_us(chunk, history, rows, 128)
    assert seconds * 1e6 == pytest.approx(3 * layer + 7 + 10 * (rows + 1) + 5)
    alone = step_s(cost, StepLoad(16, 16 * 17 // 2, 1, 0, 0))
    layer = US_PER_LAYER_TOKEN * 16 + 2 * 1.0 + attention_us(16, 0, 0, 0)
    assert alone * 1e6 == pytest.approx(3 * layer + 7 + 10 * 1 + 5)


def test_a_table_warns_once_when_it_goes_beyond_its_points(prefix: Path, caplog: pytest.LogCaptureFixture) -> None:
    cost = TableCost(prefix, 3)
    with caplog.at_level(logging.WARNING):
        cost.rank_s(StepLoad(decode_rows=4, kv_tokens=4 * 100))
        assert not caplog.records
        first = cost.rank_s(StepLoad(decode_rows=4, kv_tokens=4 * 1000))
        cost.decode_s(100, np.array([100 * 500]))
    assert len(caplog.records) == 1
    assert "beyond what was measured" in caplog.text
    layer = US_PER_LAYER_TOKEN * 4 + 2 * 1.0 + attention_us(0, 0, 4, 1000)
    assert first * 1e6 == pytest.approx(3 * layer + 7 + 10 * 4 + 5)


def test_experts_cost_by_how_many_are_visited(prefix: Path, tmp_path: Path) -> None:
    moe = [(tokens, experts, 2.0 * experts + tokens) for tokens in (1, 64) for experts in (2, 8)]
    write_csv(tmp_path / "gpu_model_moe.csv", "tokens,activated_experts,time_us", moe)
    plain = TableCost(prefix, 3, experts=(8, 2))
    one = step_s(plain, StepLoad(decode_rows=1, kv_tokens=16))
    layer = US_PER_LAYER_TOKEN * 1 + 2 * 1.0 + attention_us(0, 0, 1, 16) + 2.0 * 2 + 1
    assert one * 1e6 == pytest.approx(3 * layer + 7 + 10 + 5)
    visited = 8 * (1 - (1 - 2 / 8) ** 16)
    many = step_s(plain, StepLoad(decode_rows=16, kv_tokens=16 * 16))
    layer = US_PER_LAYER_TOKEN * 16 + 2 * 1.0 + attention_us(0, 0, 16, 16) + 2.0 * visited + 16
    assert many * 1e6 == pytest.approx(3 * layer + 7 + 160 + 5)
    with pytest.raises(ConfigError, match="experts"):
        TableCost(prefix, 3)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("missing", "there is neither .*_dense.csv nor"),
        ("empty", "is empty"),
        ("text", "a row is broken"),
        ("header", "a row is broken"),
    ],
)
def test_broken_tables_are_named(prefix: Path, tmp_path: Path, spoil: str, message: str) -> None:
    dense = tmp_path / "gpu_model_dense.csv"
    if spoil == "missing":
        dense.unlink()
    else:
        dense.write_text({"empty": "", "text": "layer,tokens,time_us\na,b,c\n", "header": "x,y,z\n1,2,3\n"}[spoil])
    with pytest.raises(ConfigError, match=message):
        TableCost(prefix, 3)


def test_a_curve_of_one_point_is_a_constant() -> None:
    assert Curve([5], [7.0]).at(1) == Curve([5], [7.0]).at(100) == 7.0


# ---------------------------------------------------------------- roofline

LLAMA_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}


def test_decode_of_one_row_reads_the_weights() -> None:
    cost = RooflineCost(ModelShape.of(LLAMA_8B), GPUS["H100"])
    num_params = 32 * (4096 * 128 * 2 * 40 + 3 * 4096 * 14336) + 4096 * 128256
    seconds = step_s(cost, StepLoad(decode_rows=1, kv_tokens=0))
    assert seconds == pytest.approx(STEP_S + 32 * LAYER_S + REQUEST_S + 2 * num_params / 3.35e12)


def test_a_long_prefill_is_bound_by_arithmetic() -> None:
    cost = RooflineCost(ModelShape.of(LLAMA_8B), GPUS["H100"])
    short, long = (cost.rank_s(StepLoad(n, n * (n + 1) // 2, 1)) for n in (4096, 8192))
    assert 2 < long / short < 2.3


def test_experts_are_read_only_when_visited() -> None:
    moe = LLAMA_8B | {"num_experts": 64, "num_experts_per_tok": 2, "moe_intermediate_size": 1024}
    shape = ModelShape.of(moe)
    assert shape.params_used(1) == pytest.approx(shape.attention_params + 2 * shape.expert_params)
    assert shape.params_used(10_000) == pytest.approx(shape.attention_params + 64 * shape.expert_params)


def test_a_config_that_lacks_a_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="vocab_size"):
        ModelShape.of({key: value for key, value in LLAMA_8B.items() if key != "vocab_size"})
    with pytest.raises(ConfigError, match="tp-size: 0"):
        RooflineCost(ModelShape.of(LLAMA_8B), GPUS["A100"], 0)


# ---------------------------------------------------------------- runs of steps


@given(st.integers(1, 300), st.lists(st.integers(0, 2000), min_size=1, max_size=20))
def test_a_run_of_decode_steps_costs_what_its_steps_do(rows: int, kv_each: list[int]) -> None:
    kv_tokens = np.array(kv_each) * rows + rows
    models: list[CostModel] = [
        LinearCost(0.01, 2e-5, 3e-6, 7e-9),
        RooflineCost(ModelShape.of(LLAMA_8B), GPUS["H200"], 2),
    ]
    for cost in models:
        steps = [cost.rank_s(StepLoad(decode_rows=rows, kv_tokens=kv)) for kv in kv_tokens.tolist()]
        assert cost.decode_s(rows, kv_tokens).tolist() == steps


def test_a_run_of_decode_steps_costs_what_its_steps_do_by_table(prefix: Path) -> None:
    cost = TableCost(prefix, 3)
    for rows in range(1, 40):
        kv_tokens = np.arange(rows, 700 * rows, 37)
        steps = [cost.rank_s(StepLoad(decode_rows=rows, kv_tokens=kv)) for kv in kv_tokens.tolist()]
        assert cost.decode_s(rows, kv_tokens).tolist() == steps
