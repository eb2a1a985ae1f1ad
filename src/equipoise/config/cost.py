"""Settings of the cost model, which says how long a step takes: the simulator's and the sim executor's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from equipoise.config.checks import at_least, one_of, within
from equipoise.errors import ConfigError

CostKind = Literal["linear", "table", "roofline"]
GpuName = Literal["H100", "H200", "A100", "L40S"]
"""Those that `equipoise.exec.cost_roofline` knows."""
MAX_PRICE = 1e9
LINEAR = frozenset({"step_ms", "eager_step_ms", "prefill_token_ms", "prefill_pair_ns", "decode_row_ms", "kv_token_us"})


@dataclass(frozen=True)
class CostConfig:
    """Seconds of a step."""

    model: CostKind = "linear"
    """"linear" by the prices below, "table" from measured layer times, "roofline" from a model's shape and a GPU."""

    step_ms: float = 20.0
    """linear: milliseconds of every step."""

    eager_step_ms: float | None = None
    """linear: milliseconds of a step with a prefill in it, instead of `step_ms`, when not the same."""

    prefill_token_ms: float = 0.1
    """linear: milliseconds per prefill token."""

    prefill_pair_ns: float = 0.0
    """linear: nanoseconds per (query, key) pair that prefill tokens attend to."""

    decode_row_ms: float = 0.05
    """linear: milliseconds per decode row."""

    kv_token_us: float = 0.0
    """linear: microseconds per KV token that a decode row reads."""

    source: str = "linear, prices as configured"
    """linear: where the prices come from, for the report."""

    tables: str | None = None
    """table: beginning of the paths of the CSV files, without _dense.csv and so on."""

    num_layers: int | None = None
    """table: transformer layers of the model."""

    overhead_ms: float = 0.0
    """table: milliseconds of a step beside its kernels."""

    row_overhead_us: float = 0.0
    """table: microseconds of each request of a step beside its kernels."""

    num_experts: int = 0
    """table: experts of a layer, of a mixture-of-experts model."""

    experts_per_token: int = 0
    """table: experts that a token visits."""

    config: str | None = None
    """roofline: the model's config.json."""

    gpu: GpuName = "H100"
    """roofline: the GPU's name."""

    tp_size: int = 1
    """roofline: GPUs that a rank is split over."""

    def __post_init__(self) -> None:
        one_of("model", self.model, get_args(CostKind))
        one_of("gpu", self.gpu, get_args(GpuName))
        for name, price in vars(self).items():
            if isinstance(price, float):
                within(name.replace("_", "-"), price, 0, MAX_PRICE)
        at_least("num-layers", self.num_layers, 1)
        at_least("num-experts", self.num_experts, 0)
        at_least("experts-per-token", self.experts_per_token, 0)
        at_least("tp-size", self.tp_size, 1)
        if self.model == "table" and (self.tables is None or self.num_layers is None):
            raise ConfigError("model: cost by table needs tables and num-layers")
        if self.model == "roofline" and self.config is None:
            raise ConfigError("model: cost by roofline needs config, the model's config.json")


def setting_name(field: str) -> str:
    """What `field` is called where it stands among other settings: the linear prices as they are, "cost_gpu"."""
    return field if field in LINEAR else f"cost_{field}"
