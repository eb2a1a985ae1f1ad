"""The cost model that the settings name: of a scenario, of a sim executor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from equipoise.errors import ConfigError
from equipoise.exec.cost import LinearCost
from equipoise.exec.cost_roofline import GPUS, ModelShape, RooflineCost
from equipoise.exec.cost_table import TableCost

if TYPE_CHECKING:
    from pathlib import Path

    from equipoise.config.cost import CostConfig
    from equipoise.exec.cost import CostModel


def build_cost(config: CostConfig, folder: Path) -> CostModel:
    """The model; relative paths are under `folder`. Raises ConfigError when a file is missing or broken."""
    if config.model == "table":
        assert config.tables is not None
        assert config.num_layers is not None
        return TableCost(
            folder / config.tables,
            config.num_layers,
            overhead_s=config.overhead_ms / 1e3,
            row_overhead_s=config.row_overhead_us / 1e6,
            experts=(config.num_experts, config.experts_per_token),
        )
    if config.model == "roofline":
        assert config.config is not None
        return RooflineCost(_shape(folder / config.config), GPUS[config.gpu], config.tp_size)
    return LinearCost(
        step_s=config.step_ms / 1e3,
        prefill_token_s=config.prefill_token_ms / 1e3,
        decode_row_s=config.decode_row_ms / 1e3,
        kv_token_s=config.kv_token_us / 1e6,
        eager_step_s=None if config.eager_step_ms is None else config.eager_step_ms / 1e3,
        prefill_pair_s=config.prefill_pair_ns / 1e9,
        source=config.source,
    )


def _shape(path: Path) -> ModelShape:
    try:
        return ModelShape.of(msgspec.json.decode(path.read_bytes(), type=dict))
    except OSError as error:
        raise ConfigError(f"cost: {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"cost: {path} is not a JSON object: {error}") from None
