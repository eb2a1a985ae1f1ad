"""Step times from a model's shape and a GPU's numbers: each part takes as long as its arithmetic or its memory traffic.

Efficiencies and overheads are BLIS's (inference-sim, Apache-2.0): shares of the peak that real kernels reach, 32.1 us
per layer, 4.42 us per request and 126 us per step. An estimate for hardware that nobody has measured yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from equipoise.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from equipoise.exec.cost import StepLoad

LAYER_S = 32.1e-6
REQUEST_S = 4.42e-6
STEP_S = 126e-6


@dataclass(frozen=True)
class Gpu:
    """Peak dense arithmetic (FLOP/s, 16 bit), memory (bytes/s), and the shares of the peak that prefill and decode
    reach."""

    name: str
    peak_flops: float
    bandwidth: float
    prefill_share: float
    decode_share: float


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("H100", 989e12, 3.35e12, 0.45, 0.30),
        Gpu("H200", 989e12, 4.8e12, 0.45, 0.30),
        Gpu("A100", 312e12, 2.04e12, 0.38, 0.18),
        Gpu("L40S", 362e12, 0.864e12, 0.32, 0.08),
    )
}
"""Data-sheet peaks; shares from BLIS, the H200's taken from the H100."""


@dataclass(frozen=True)
class ModelShape:
    """What a step's arithmetic and traffic depend on; counts, and bytes per number."""

    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab_size: int
    num_experts: int = 0
    experts_per_token: int = 0
    bytes_per_number: int = 2

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelShape:
        """The shape that a Hugging Face config.json tells. Raises ConfigError when a number is missing."""
        try:
            hidden, num_heads = int(config["hidden_size"]), int(config["num_attention_heads"])
            num_experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
            return cls(
                hidden=hidden,
                num_layers=int(config["num_hidden_layers"]),
                num_heads=num_heads,
                num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
                head_dim=int(config.get("head_dim") or hidden // num_heads),
                intermediate=int((num_experts and config.get("moe_intermediate_size")) or config["intermediate_size"]),
                vocab_size=int(config["vocab_size"]),
                num_experts=num_experts,
                experts_per_token=int(config.get("num_experts_per_tok") or 0),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"cost: config.json lacks a number or has a wrong one: {error!r}") from None

    @property
    def attention_params(self) -> int:
        """Parameters of one layer's projections."""
        return self.hidden * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)

    @property
    def expert_params(self) -> int:
        """Parameters of one expert, or of the one feed-forward part of a dense layer."""
        return 3 * self.hidden * self.intermediate

    def params_used(self, num_tokens: int) -> float:
        """Parameters of one layer that a step of `num_tokens` reads: experts are visited by chance."""
        if not self.num_experts:
            return self.attention_params + self.expert_params
        missed = (1 - self.experts_per_token / self.num_experts) ** num_tokens
        return self.attention_params + self.expert_params * self.num_experts * (1 - missed)

    @property
    def params_per_token(self) -> int:
        """Parameters of one layer that a token is multiplied with."""
        return self.attention_params + self.expert_params * (self.experts_per_token if self.num_experts else 1)

    @property
    def kv_bytes(self) -> int:
        """Bytes that a token's KV takes in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.bytes_per_number


class RooflineCost:
    """A `CostModel` from shapes alone; the weights are split over `tp_size` GPUs, communication is left out."""

    def __init__(self, shape: ModelShape, gpu: Gpu, tp_size: int = 1) -> None:
        """Raises ConfigError when `tp_size` is below 1."""
        if tp_size < 1:
            raise ConfigError(f"tp-size: {tp_size} must be at least 1")
        self.source = f"roofline of {gpu.name} x {tp_size} with BLIS efficiencies"
        self._shape = shape
        self._gpu = gpu
        self._tp_size = tp_size

    def shared_s(self, *, any_prefill: bool) -> float:
        return STEP_S + LAYER_S * self._shape.num_layers

    def rank_s(self, load: StepLoad) -> float:
        num_rows = load.decode_rows + load.num_chunks
        if not num_rows:
            return 0.0
        share = self._gpu.prefill_share if load.prefill_tokens else self._gpu.decode_share
        kv_tokens = load.kv_tokens + (load.prefill_pairs / load.prefill_tokens if load.prefill_tokens else 0.0)
        weights_s = self._weights_s(load.prefill_tokens + load.decode_rows, num_rows, share)
        return weights_s + self._attention_s(load.prefill_pairs + load.kv_tokens, kv_tokens, share)

    def decode_s(self, rows: int, kv_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        share = self._gpu.decode_share
        weights_s = self._weights_s(rows, rows, share)
        shape, gpu = self._shape, self._gpu
        flops, read = self._pair_flops * kv_tokens, float(shape.kv_bytes * shape.num_layers) * (kv_tokens + 0.0)
        peak, bandwidth = gpu.peak_flops * share * self._tp_size, gpu.bandwidth * self._tp_size
        result: NDArray[np.float64] = weights_s + np.maximum(flops / peak, read / bandwidth)
        return result

    def _weights_s(self, num_tokens: int, num_rows: int, share: float) -> float:
        shape, gpu = self._shape, self._gpu
        head = shape.hidden * shape.vocab_size
        flops = 2.0 * (num_tokens * shape.params_per_token * shape.num_layers + num_rows * head)
        read = shape.bytes_per_number * (shape.params_used(num_tokens) * shape.num_layers + head)
        compute_s = flops / (gpu.peak_flops * share * self._tp_size)
        return max(compute_s, read / (gpu.bandwidth * self._tp_size)) + REQUEST_S * num_rows

    def _attention_s(self, pairs: int, kv_tokens: float, share: float) -> float:
        shape, gpu = self._shape, self._gpu
        flops, read = self._pair_flops * pairs, float(shape.kv_bytes * shape.num_layers) * (kv_tokens + 0.0)
        peak, bandwidth = gpu.peak_flops * share * self._tp_size, gpu.bandwidth * self._tp_size
        return max(flops / peak, read / bandwidth)

    @property
    def _pair_flops(self) -> float:
        """Arithmetic of one (query, key) pair over all layers and heads."""
        return 4.0 * self._shape.num_heads * self._shape.head_dim * self._shape.num_layers
