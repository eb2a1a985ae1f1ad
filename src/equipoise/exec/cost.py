"""Linear cost of a step: the model of time behind the sim executor and the simulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equipoise.config.engine import SimExecutorConfig
    from equipoise.sched.plan import StepPlan


@dataclass(frozen=True)
class LinearCost:
    """Seconds of a step = step_s + prefill_token_s * prefill tokens + decode_row_s * decode rows
    + kv_token_s * KV tokens that the decode rows read."""

    step_s: float
    prefill_token_s: float = 0.0
    decode_row_s: float = 0.0
    kv_token_s: float = 0.0

    @classmethod
    def of(cls, config: SimExecutorConfig) -> LinearCost:
        """The cost that the settings describe, in milliseconds there."""
        return cls(
            step_s=config.step_ms / 1e3,
            prefill_token_s=config.prefill_token_ms / 1e3,
            decode_row_s=config.decode_row_ms / 1e3,
            kv_token_s=config.kv_token_ms / 1e3,
        )

    def __call__(self, plan: StepPlan) -> float:
        """Seconds that `plan` takes. A decode at position p reads p + 1 KV tokens, its own included."""
        num_decodes = len(plan.decode_seats)
        seconds = self.step_s + self.prefill_token_s * plan.num_prefill_tokens + self.decode_row_s * num_decodes
        if self.kv_token_s and num_decodes:
            seconds += self.kv_token_s * (int(plan.decode_starts.sum()) + num_decodes)
        return seconds
