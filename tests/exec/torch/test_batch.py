"""What a step's tensors hold, and that they are copies."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import numpy as np
import pytest
import torch

from equipoise.exec.torch.batch import SHORT_CHUNK, Chunk, gather_batch, prompt_spans
from equipoise.request import Request, SamplingParams
from equipoise.sched.columns import Columns
from equipoise.sched.plan import PrefillRow, StepPlan

CPU = torch.device("cpu")
PAGE_SIZE = 4


def request_of(handle: int, num_prompt: int, **params: object) -> Request:
    prompt = np.arange(num_prompt, dtype=np.int32) + 100 * handle
    made = SamplingParams(temperature=0.0, **params)  # type: ignore[arg-type]
    return Request(handle, f"r{handle}", prompt, made, max_model_len=64)


def seated(columns: Columns, request: Request, seat: int, pages: list[int]) -> Request:
    request.pages = pages
    columns.seat(request, seat)
    return request


@pytest.fixture
def columns() -> Columns:
    return Columns(5, 64, PAGE_SIZE)


@pytest.fixture
def plan(columns: Columns) -> StepPlan:
    """Seat 3 decodes position 5; seat 1 prefills [2, 4); seat 4 prefills [3, 13) and samples."""
    seated(columns, request_of(1, 6), 3, [7, 8])
    short = seated(columns, request_of(2, 9), 1, [1, 2])
    long = seated(columns, request_of(3, 13), 4, [9, 6, 5, 4])
    plan = StepPlan(0)
    plan.decode_seats, plan.decode_starts = np.array([3], np.int32), np.array([5])
    plan.prefills = [PrefillRow(short, 1, 2, 2, False), PrefillRow(long, 4, 3, 10, True)]
    plan.sampled_seats, plan.sampled_at = np.array([3, 4], np.int32), np.array([6, 13])
    plan.seated = [long]
    plan.num_tokens = 13
    return plan


def test_layout(columns: Columns, plan: StepPlan) -> None:
    batch = gather_batch(columns, plan, CPU)
    assert batch.decode_seats.tolist() == [3]
    assert batch.token_ids.tolist() == [0, 202, 203, *range(303, 313)]
    assert batch.positions.tolist() == [5, 2, 3, *range(3, 13)]
    assert batch.page_ids.tolist() == [8, 1, 1, 9, 6, 6, 6, 6, 5, 5, 5, 5, 4]
    assert batch.offsets.tolist() == [1, 2, 3, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert batch.logit_rows.tolist() == [0, 12]
    assert SHORT_CHUNK == 8
    assert batch.chunks == (Chunk(first=3, n=10, start=3, row=2),)
    singles = batch.singles
    assert (singles.tokens.tolist(), singles.rows.tolist(), singles.lens.tolist()) == ([0, 1, 2], [0, 1, 1], [6, 3, 4])
    assert (singles.count, singles.max_len) == (3, 6)
    assert singles.tables.shape == (3, 4)
    assert [(s.seat, s.request.handle, s.known.tolist()) for s in batch.seatings] == [(4, 3, list(range(300, 313)))]


def test_nothing_is_shared_with_columns_or_plan(columns: Columns, plan: StepPlan) -> None:
    plan.prefills[1].request.params = SamplingParams(prompt_logprobs=0)
    batch = gather_batch(columns, plan, CPU, prompt_spans(columns, plan, {}))
    before = values_of(batch)
    for array in (*vars(columns).values(), plan.decode_seats, plan.decode_starts, plan.sampled_seats, plan.sampled_at):
        if isinstance(array, np.ndarray):
            array += 1
    assert values_of(batch) == before
    assert len(before) > 12


def values_of(value: object) -> list[object]:
    """Every array in a batch, as lists."""
    if isinstance(value, np.ndarray | torch.Tensor):
        return [value.tolist()]
    if isinstance(value, tuple):
        return [item for part in value for item in values_of(part)]
    if is_dataclass(value):
        return [item for field in fields(value) for item in values_of(getattr(value, field.name))]
    return []


def test_decodes_alone(columns: Columns) -> None:
    seated(columns, request_of(1, 4), 0, [3])
    plan = StepPlan(0)
    plan.decode_seats, plan.decode_starts = np.array([0], np.int32), np.array([3])
    plan.sampled_seats, plan.sampled_at = plan.decode_seats, np.array([4])
    batch = gather_batch(columns, plan, CPU)
    assert (batch.chunks, batch.page_ids.tolist(), batch.offsets.tolist()) == ((), [3], [3])
    assert batch.logit_rows.tolist() == [0]


def test_prompt_spans_report_each_position_once(columns: Columns) -> None:
    request = seated(columns, request_of(7, 10, prompt_logprobs=2), 2, [0, 1, 2])
    reported: dict[int, int] = {}

    def spans_of(start: int, n: int) -> list[tuple[int, int, list[int]]]:
        plan = StepPlan(0)
        plan.decode_seats = np.zeros(3, np.int32)  # three tokens come before the chunk's
        plan.prefills = [PrefillRow(request, 2, start, n, start + n == 10)]
        return [(s.first, s.num_top, s.targets.tolist()) for s in prompt_spans(columns, plan, reported)]

    assert spans_of(0, 4) == [(3, 2, [701, 702, 703, 704])]
    assert spans_of(4, 5) == [(3, 2, [705, 706, 707, 708, 709])]
    assert spans_of(9, 1) == []  # the token it draws is an output
    assert spans_of(0, 6) == []  # computed again after a preemption
    assert reported == {7: 10}
    reported[7] = 3
    assert spans_of(0, 6) == [(5, 2, [703, 704, 705, 706])]


def test_no_span_without_the_wish(columns: Columns) -> None:
    request = seated(columns, request_of(7, 10), 2, [0, 1, 2])
    plan = StepPlan(0)
    plan.prefills = [PrefillRow(request, 2, 0, 4, False)]
    assert prompt_spans(columns, plan, {}) == ()
