"""Log probabilities as the API reports them: of the model's own distribution.

They are the log_softmax of the logits as the model gave them, before temperature, penalties, bias,
bans, grammar or any filter: so they say how likely the model found the token, not how likely the draw was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from equipoise.exec.protocol import TokenLogprobs
from equipoise.exec.torch.hostcopy import HostCopy

if TYPE_CHECKING:
    from torch import Tensor

LOWEST = -9999.0
"""Reported instead of minus infinity, which JSON cannot carry."""

_ROWS_AT_ONCE = 128  # bounds the (rows, vocab) temporaries of a long prompt


class PendingLogprobs:
    """Logprobs of a few rows. Making them does not wait for the device; reading them (`read`) does."""

    __slots__ = ("_copy", "_num_top")

    def __init__(self, logits: Tensor, tokens: Tensor, num_top: list[int]) -> None:
        """logits: (n, V) as the model gave them; tokens: (n,) int64; num_top: how many of the likeliest, per row."""
        logits = logits.float()
        norm = torch.logsumexp(logits, dim=-1, keepdim=True)  # (n, 1)
        chosen = logits.gather(1, tokens[:, None])  # (n, 1)
        ranks = (logits > chosen).sum(dim=-1) + 1
        top = torch.topk(logits, min(max(num_top), logits.shape[1]), dim=-1)  # (n, k) each
        own, others = ((values - norm).clamp(min=LOWEST) for values in (chosen, top.values))
        self._num_top = num_top
        self._copy = HostCopy(tokens, own.squeeze(1), ranks, top.indices, others)

    def read(self) -> list[TokenLogprobs]:
        """One entry per row, in order. Equally likely tokens share the better rank."""
        rows = zip(self._num_top, *(column.tolist() for column in self._copy.wait()), strict=True)
        return [TokenLogprobs(token, own, rank, ids[:n], others[:n]) for n, token, own, rank, ids, others in rows]


def prompt_logprobs(logits: Tensor, targets: Tensor, num_top: int) -> list[TokenLogprobs]:
    """Logprobs of prompt tokens: row i of `logits` predicts `targets[i]`.

    logits: (n, V); targets: (n,) int64 on the same device; `num_top` 0 reports the target alone."""
    entries: list[TokenLogprobs] = []
    for start in range(0, len(targets), _ROWS_AT_ONCE):
        tokens = targets[start : start + _ROWS_AT_ONCE]
        rows = logits[start : start + _ROWS_AT_ONCE]
        entries += PendingLogprobs(rows, tokens, [num_top] * len(tokens)).read()
    return entries
