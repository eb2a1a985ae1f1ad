"""Results on their way from the device to the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


class HostCopy:
    """Host copies of tensors on one device. Making them does not wait; `wait` does.

    On a GPU the copies are queued at once and an event marks them, so a later `wait` does not also wait
    for steps launched since. On a CPU nothing is copied: the tensors must not change any more."""

    __slots__ = ("_event", "_tensors")

    def __init__(self, *tensors: Tensor) -> None:
        self._tensors = tensors
        self._event: torch.cuda.Event | None = None
        if tensors[0].device.type == "cuda":
            self._tensors = tuple(_queue_copy(tensor) for tensor in tensors)
            self._event = torch.cuda.Event()
            self._event.record()

    def is_done(self) -> bool:
        """True when `wait` would not wait."""
        return self._event is None or self._event.query()

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors, on the host, in the order given."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


def _queue_copy(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
