"""Cost models from settings: units, files under a folder, GPUs that both sides know."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from equipoise.config.cost import CostConfig, GpuName
from equipoise.exec.cost import LinearCost
from equipoise.exec.cost_roofline import GPUS
from equipoise.exec.costs import build_cost


def test_linear_prices_have_their_units() -> None:
    config = CostConfig(
        step_ms=1, eager_step_ms=2, prefill_token_ms=3, prefill_pair_ns=4, decode_row_ms=5, kv_token_us=6, source="here"
    )
    assert build_cost(config, Path()) == LinearCost(0.001, 0.003, 0.005, 6e-6, 0.002, 4e-9, "here")


def test_settings_name_the_gpus_that_the_roofline_knows() -> None:
    assert get_args(GpuName) == tuple(GPUS)
