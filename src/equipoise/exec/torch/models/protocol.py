"""What the runner asks of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from equipoise.exec.torch.batch import Batch
    from equipoise.exec.torch.ops import Ops
    from equipoise.exec.torch.pages import KVShape, LayerPages


class Model(Protocol):
    """A decoder whose attention reads and writes KV pages."""

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        """One per layer."""
        ...

    def bind(self, pages: tuple[LayerPages, ...], ops: Ops) -> None:
        """Called once, before the first forward."""
        ...

    def forward(self, token_ids: Tensor, batch: Batch) -> Tensor:
        """token_ids (T,) int64, in the layout of `batch` -> logits (len(batch.logit_rows), vocab) float32."""
        ...
