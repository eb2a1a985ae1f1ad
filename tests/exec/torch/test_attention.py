"""Paged attention, in C and in torch, against a reference that writes out the formula token by token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from equipoise.exec.torch import attention
from equipoise.exec.torch.attention import attend
from equipoise.exec.torch.batch import gather_batch
from equipoise.exec.torch.native import NativeOps
from equipoise.exec.torch.ops import AttentionSpec
from equipoise.exec.torch.pages import KVShape, make_pages
from equipoise.exec.torch.torch_ops import TorchOps
from equipoise.request import Request, SamplingParams
from equipoise.sched.columns import Columns
from equipoise.sched.plan import PrefillRow, StepPlan

if TYPE_CHECKING:
    from torch import Tensor

    from equipoise.exec.torch.batch import Batch
    from equipoise.exec.torch.ops import Ops
    from equipoise.exec.torch.pages import LayerPages

CPU = torch.device("cpu")
NUM_PAGES = 64

OPS: dict[str, Ops] = {"native": NativeOps(2), "torch": TorchOps()}
SPECS = {
    "plain": AttentionSpec(0.25),
    "window": AttentionSpec(0.25, window=9),
    "softcap": AttentionSpec(0.5, softcap=3.0),
    "sinks": AttentionSpec(0.25, sinks=torch.linspace(-1, 3, 24)),
    "all": AttentionSpec(0.3, window=20, softcap=5.0, sinks=torch.linspace(-2, 2, 24)),
}


@dataclass
class Step:
    """A step of rows (start, n), each over pages of its own in a shuffled order, and the history before it."""

    batch: Batch
    pages: LayerPages
    history: list[tuple[Tensor, Tensor]]  # per row: keys and values (start, Hkv, D)
    counts: list[int]  # per row: tokens


def make_step(decodes: list[int], chunks: list[tuple[int, int]], shape: KVShape, page_size: int, seed: int = 0) -> Step:
    """decodes: positions of the decodes' tokens. chunks: (start, n) of the prefills."""
    generator = torch.Generator().manual_seed(seed)
    rows = [*((start, 1) for start in decodes), *chunks]
    columns = Columns(len(rows), 1024, page_size)
    columns.page_table[:] = NUM_PAGES  # past a row's pages lie old numbers: here those of a page of stale values
    free = torch.randperm(NUM_PAGES, generator=generator).tolist()
    (pages,) = make_pages((shape,), NUM_PAGES + 1, page_size, torch.float32, CPU)
    pages.keys.fill_(50)
    pages.values.fill_(50)
    history = []
    for seat, (start, n) in enumerate(rows):
        count = -(-(start + n) // page_size)
        columns.page_table[seat, :count] = own = [free.pop() for _ in range(count)]
        keys, values = torch.randn(2, start, shape.num_kv_heads, shape.head_dim, generator=generator)
        at = torch.arange(start)
        where = torch.tensor(own)[at // page_size]
        pages.keys[where, :, at % page_size] = keys
        pages.values[where, :, at % page_size] = values
        history.append((keys, values))
    plan = StepPlan(0)
    plan.decode_seats = np.arange(len(decodes), dtype=np.int32)
    plan.decode_starts = np.array(decodes, np.int64)
    request = Request(1, "r", np.ones(1, np.int32), SamplingParams(), max_model_len=1024)
    plan.prefills = [PrefillRow(request, len(decodes) + i, start, n, False) for i, (start, n) in enumerate(chunks)]
    plan.sampled_seats = plan.decode_seats
    return Step(gather_batch(columns, plan, CPU), pages, history, [n for _, n in rows])


def naive(spec: AttentionSpec, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One query head (D,) over the keys and values (len, D) up to and with its own."""
    if spec.window is not None:
        keys, values = keys[-spec.window :], values[-spec.window :]
    scores = (keys.double() @ query.double()) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    return scores.softmax(0) @ values.double()


def naive_step(spec: AttentionSpec, step: Step, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    out = torch.zeros(queries.shape, dtype=torch.float64)
    group, first = queries.shape[1] // keys.shape[1], 0
    for (past_keys, past_values), count in zip(step.history, step.counts, strict=True):
        for token in range(first, first + count):
            all_keys = torch.cat((past_keys, keys[first : token + 1]))
            all_values = torch.cat((past_values, values[first : token + 1]))
            for head in range(queries.shape[1]):
                kv = head // group
                out[token, head] = naive(spec, queries[token, head], all_keys[:, kv], all_values[:, kv])
                if spec.sinks is not None:
                    out[token, head] *= 1 - sink_share(spec, head, queries[token, head], all_keys[:, kv])
        first += count
    return out


def sink_share(spec: AttentionSpec, head: int, query: Tensor, keys: Tensor) -> Tensor:
    """The part of a head's softmax that falls on its sink."""
    assert spec.sinks is not None
    keys = keys if spec.window is None else keys[-spec.window :]
    scores = (keys.double() @ query.double()) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    sink = spec.sinks[head].double()
    return torch.exp(sink - torch.logsumexp(torch.cat((scores, sink[None])), 0))


def qkv(step: Step, num_heads: int, shape: KVShape) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of the step's tokens, as slices of one tensor, as the lean models give them."""
    num_tokens = len(step.batch.positions)
    generator = torch.Generator().manual_seed(99)
    packed = torch.randn(num_tokens, num_heads + 2 * shape.num_kv_heads, shape.head_dim, generator=generator)
    return torch.split(packed, [num_heads, shape.num_kv_heads, shape.num_kv_heads], 1)  # type: ignore[return-value]


ROWS: dict[str, tuple[list[int], list[tuple[int, int]]]] = {
    "decodes": ([0, 1, 15, 16, 17, 40, 130], []),
    "fresh": ([], [(0, 1), (0, 9), (0, 33)]),
    "history": ([], [(3, 1), (16, 8), (21, 30), (64, 16)]),
    "mixed": ([70, 5], [(0, 40), (30, 20), (9, 4)]),
}


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("rows", ROWS)
def test_attend_matches_the_formula(ops: str, spec: str, rows: str) -> None:
    shape = KVShape(2, 24)
    step = make_step(*ROWS[rows], shape, page_size=8)
    queries, keys, values = qkv(step, 24, shape)  # 12 heads to a KV head: more than the kernel's block of 8
    out = attend(OPS[ops], SPECS[spec], step.pages, queries, keys, values, step.batch)
    torch.testing.assert_close(out.double(), naive_step(SPECS[spec], step, queries, keys, values), atol=2e-5, rtol=0)


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize(
    ("num_heads", "shape", "page_size"),
    [
        (1, KVShape(1, 64), 1),
        (4, KVShape(4, 128), 16),
        (8, KVShape(2, 64), 256),
        (3, KVShape(1, 8), 32),
        (2, KVShape(1, 256), 4),
    ],
)
def test_shapes(ops: str, num_heads: int, shape: KVShape, page_size: int) -> None:
    step = (
        make_step([20, 0], [(10, 12)], shape, page_size) if page_size > 1 else make_step([20, 0], [(3, 12)], shape, 1)
    )
    queries, keys, values = qkv(step, num_heads, shape)
    spec = AttentionSpec(0.2)
    out = attend(OPS[ops], spec, step.pages, queries, keys, values, step.batch)
    torch.testing.assert_close(out.double(), naive_step(spec, step, queries, keys, values), atol=2e-5, rtol=0)


@pytest.mark.parametrize("ops", OPS)
def test_heads_outermost_in_memory(ops: str) -> None:
    """transformers' modules give (H, T, D) in memory."""
    shape = KVShape(2, 16)
    step = make_step([30], [(5, 20)], shape, 8)
    plain = qkv(step, 4, shape)
    turned = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in plain]
    spec = AttentionSpec(0.2)
    expected = attend(OPS[ops], spec, step.pages, *plain, step.batch)
    assert torch.equal(attend(OPS[ops], spec, step.pages, *turned, step.batch), expected)


@pytest.mark.parametrize("window", [None, 50])
def test_long_chunk_attends_by_blocks_of_queries(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    shape, spec = KVShape(1, 16), AttentionSpec(0.2, window=window)
    step = make_step([], [(30, 150)], shape, 8)
    queries, keys, values = qkv(step, 2, shape)
    whole = attend(TorchOps(), spec, step.pages, queries, keys, values, step.batch)
    monkeypatch.setattr(attention, "QUERY_BLOCK", 37)
    torch.testing.assert_close(attend(TorchOps(), spec, step.pages, queries, keys, values, step.batch), whole)


def test_gathering_in_parts_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, spec = KVShape(2, 16), AttentionSpec(0.2, window=11)
    step = make_step([3, 50, 17, 9, 30], [], shape, 8)
    queries, keys, values = qkv(step, 4, shape)
    whole = attend(TorchOps(), spec, step.pages, queries, keys, values, step.batch)
    monkeypatch.setattr("equipoise.exec.torch.torch_ops.GATHER_BYTES", 2 * 7 * 2 * 8 * 16 * 4)
    torch.testing.assert_close(attend(TorchOps(), spec, step.pages, queries, keys, values, step.batch), whole)


def test_large_scores_stay_finite() -> None:
    shape, spec = KVShape(1, 16), AttentionSpec(100.0)
    step = make_step([40], [], shape, 8)
    queries, keys, values = qkv(step, 1, shape)
    out = attend(OPS["native"], spec, step.pages, queries, keys, values, step.batch)
    torch.testing.assert_close(out.double(), naive_step(spec, step, queries, keys, values), atol=1e-4, rtol=0)


@pytest.mark.parametrize("ops", OPS)
def test_a_sink_above_every_score_takes_all(ops: str) -> None:
    shape, spec = KVShape(1, 16), AttentionSpec(0.2, sinks=torch.tensor([300.0, -300.0]))
    step = make_step([40], [], shape, 8)
    queries, keys, values = qkv(step, 2, shape)
    out = attend(OPS[ops], spec, step.pages, queries, keys, values, step.batch)
    assert out[0, 0].abs().max() < 1e-30
    plain = attend(OPS[ops], AttentionSpec(0.2), step.pages, queries, keys, values, step.batch)
    torch.testing.assert_close(out[0, 1], plain[0, 1])


@pytest.mark.parametrize("ops", OPS)
def test_not_a_number_is_not_hidden(ops: str) -> None:
    shape = KVShape(1, 16)
    step = make_step([40], [], shape, 8)
    queries, keys, values = qkv(step, 1, shape)
    for bad in (queries, keys, values):
        kept = bad.clone()
        bad.fill_(math.nan)
        assert attend(OPS[ops], AttentionSpec(0.2), step.pages, queries, keys, values, step.batch).isnan().all()
        bad.copy_(kept)
