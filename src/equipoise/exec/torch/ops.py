"""The operations of a step that have a C kernel (`native`) and the same in torch (`torch_ops`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from equipoise.exec.torch.batch import Singles
    from equipoise.exec.torch.pages import LayerPages


@dataclass(frozen=True, eq=False)
class AttentionSpec:
    """How a layer attends: a query at position p sees keys (p - window, p], all of [0, p] without a window.

    scale multiplies the scores; softcap c turns a score s into c * tanh(s / c); sinks (num_heads,) join each
    head's softmax as one more score with no value. Native kernels read float32, contiguous sinks."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


class Ops(Protocol):
    """Operations of a step. T tokens, H heads, D floats a head."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x: (T, size), weight: (size,) -> (T, size)."""
        ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, add_to: Tensor | None = None) -> Tensor:
        """x (T, in), contiguous, weight (out, in), bias (out,) -> x weight^T + bias, (T, out); added to `add_to`
        in place when that is given."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """(T, 2 * size): gates, then ups -> silu(gate) * up, (T, size)."""
        ...

    def rotate(
        self, heads: Tensor, positions: Tensor, tables: Tensor, norm: Tensor | None = None, eps: float = 0.0
    ) -> None:
        """Rotate `heads` (T, H, D) in place, after an RMS norm of each head when `norm` (D,) is given.

        positions: (T,) int64. tables: (max_model_len, rotary_dim), cosines then sines; floats past
        rotary_dim are left as they are."""
        ...

    def store_kv(self, pages: LayerPages, keys: Tensor, values: Tensor, page_ids: Tensor, offsets: Tensor) -> None:
        """Write keys and values (T, H, D) at page_ids, offsets: (T,) int64."""
        ...

    def attend_singles(
        self, spec: AttentionSpec, pages: LayerPages, queries: Tensor, singles: Singles, out: Tensor
    ) -> None:
        """Attention of the single query tokens. queries, out: (T, H, D) of the whole batch; writes out[tokens]."""
        ...
