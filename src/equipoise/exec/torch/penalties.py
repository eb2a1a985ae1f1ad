"""Repetition, presence and frequency penalties over counts that stay on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

_FIRST_SLOTS = 4


class TokenCounts:
    """What each penalised request has said so far; nothing is allocated until the first one.

    A penalised seat owns a *slot*, a row of these tensors, which grow by doubling:

    outputs: (num_slots, V) int32, times each token was drawn
    seen: (num_slots, V) bool, the token is in the prompt or was drawn
    """

    def __init__(self, num_seats: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._outputs = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._seen = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        self._slots = np.full(num_seats, -1, np.int64)
        self._free: list[int] = []

    @property
    def num_slots(self) -> int:
        """Slots allocated so far."""
        return self._outputs.shape[0]

    def start(self, seat: int, prompt: NDArray[np.int32], outputs: NDArray[np.int32]) -> None:
        """Count anew for the request that took `seat`: its prompt and the outputs that it has already."""
        if self._slots[seat] < 0:
            self._slots[seat] = self._free_slot()
        slot = int(self._slots[seat])
        drawn = self._inside(outputs)
        self._outputs[slot] = torch.bincount(drawn, minlength=self._vocab_size)
        self._seen[slot] = False
        self._seen[slot, self._inside(prompt)] = True
        self._seen[slot, drawn] = True

    def stop(self, seat: int) -> None:
        """`seat` was taken by a request without penalties: its slot is free for another."""
        if self._slots[seat] >= 0:
            self._free.append(int(self._slots[seat]))
            self._slots[seat] = -1

    def add(self, seats: NDArray[np.int64], tokens: Tensor) -> None:
        """Count one drawn token per seat. seats: (n,), all penalised; tokens: (n,) int64 on the device."""
        slots = self._slots_of(seats)
        self._outputs[slots, tokens] += 1
        self._seen[slots, tokens] = True

    def penalise(
        self,
        logits: Tensor,
        seats: NDArray[np.int64],
        repetition: NDArray[np.float32],
        presence: NDArray[np.float32],
        frequency: NDArray[np.float32],
    ) -> Tensor:
        """The logits (n, V) of `seats` with penalties taken off; each penalty is (n,).

        Repetition divides positive logits of seen tokens and multiplies negative ones (Keskar et al.,
        CTRL, 2019); then frequency is charged per time drawn and presence once, as the OpenAI API says."""
        slots = self._slots_of(seats)
        if (repetition != 1).any():
            factor = self._column(repetition)
            repeated = torch.where(logits > 0, logits / factor, logits * factor)
            logits = torch.where(self._seen[slots], repeated, logits)
        if frequency.any() or presence.any():
            counts = self._outputs[slots]
            logits = logits - self._column(frequency) * counts - self._column(presence) * (counts > 0)
        return logits

    def _column(self, values: NDArray[np.float32]) -> Tensor:
        return torch.from_numpy(values).to(self._device)[:, None]

    def _slots_of(self, seats: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(self._slots[seats]).to(self._device)

    def _inside(self, tokens: NDArray[np.int32]) -> Tensor:
        """Tokens as indices; ids that no logit belongs to are left out, for on a GPU they would end the process."""
        inside = tokens[(tokens >= 0) & (tokens < self._vocab_size)]
        return torch.from_numpy(inside.astype(np.int64)).to(self._device)

    def _free_slot(self) -> int:
        if not self._free:
            have = self.num_slots
            more = max(_FIRST_SLOTS, have)
            self._outputs = torch.cat((self._outputs, self._outputs.new_zeros((more, self._vocab_size))))
            self._seen = torch.cat((self._seen, self._seen.new_zeros((more, self._vocab_size))))
            self._free = list(range(have + more - 1, have - 1, -1))
        return self._free.pop()
