"""The linear cost model."""

from __future__ import annotations

import numpy as np
import pytest

from equipoise.config import SimExecutorConfig
from equipoise.exec.cost import LinearCost
from equipoise.sched.plan import StepPlan


def plan(num_prefill_tokens: int, decode_starts: list[int]) -> StepPlan:
    step = StepPlan(0)
    step.decode_seats = np.arange(len(decode_starts), dtype=np.int32)
    step.decode_starts = np.array(decode_starts, np.int64)
    step.num_tokens = num_prefill_tokens + len(decode_starts)
    return step


@pytest.mark.parametrize(
    ("prefill", "starts", "seconds"),
    [
        (0, [0], 1 + 10 + 100 * 1),
        (7, [], 1 + 7 * 2),
        (3, [4, 9], 1 + 3 * 2 + 2 * 10 + 100 * (5 + 10)),
    ],
)
def test_terms_add_up(prefill: int, starts: list[int], seconds: float) -> None:
    cost = LinearCost(step_s=1, prefill_token_s=2, decode_row_s=10, kv_token_s=100)
    assert cost(plan(prefill, starts)) == pytest.approx(seconds)


def test_settings_are_milliseconds() -> None:
    config = SimExecutorConfig(step_ms=1, prefill_token_ms=2, decode_row_ms=3, kv_token_ms=4)
    assert LinearCost.of(config) == LinearCost(0.001, 0.002, 0.003, 0.004)
