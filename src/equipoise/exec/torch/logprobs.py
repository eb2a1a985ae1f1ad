"""Log probabilities as the API reports them: of the model's own distribution.

They are the log_softmax of the logits as the model gave them, before temperature, penalties, bias,
bans, grammar or any filter: so they say how likely the model found the token, not how likely the draw was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from equipoise.exec.protocol import TokenLogprobs

if TYPE_CHECKING:
    from torch import Tensor

LOWEST = -9999.0
"""Reported instead of minus infinity, which JSON cannot carry."""

_ROWS_AT_ONCE = 128  # bounds the (rows, vocab) temporaries of a long prompt


class PendingLogprobs:
    """Logprobs of a few rows, still on the device. Reading them (`read`) waits for it; making them does not.

    tokens: (n,) int64, chosen, ranks: (n,), top_ids, top_values: (n, k)
    """

    __slots__ = ("_chosen", "_num_top", "_ranks", "_tokens", "_top_ids", "_top_values")

    def __init__(self, logits: Tensor, tokens: Tensor, num_top: list[int]) -> None:
        """logits: (n, V) as the model gave them; tokens: (n,) int64; num_top: how many of the likeliest, per row."""
        logits = logits.float()
        self._num_top = num_top
        norm = torch.logsumexp(logits, dim=-1, keepdim=True)  # (n, 1)
        chosen = logits.gather(1, tokens[:, None])  # (n, 1)
        top = torch.topk(logits, min(max(num_top), logits.shape[1]), dim=-1)
        self._tokens = tokens
        self._chosen = (chosen - norm).squeeze(1).clamp(min=LOWEST)
        self._ranks = (logits > chosen).sum(dim=-1) + 1
        self._top_ids = top.indices
        self._top_values = (top.values - norm).clamp(min=LOWEST)

    def read(self) -> list[TokenLogprobs]:
        """One entry per row, in order. Equally likely tokens share the better rank."""
        columns = (self._tokens, self._chosen, self._ranks, self._top_ids, self._top_values)
        rows = zip(self._num_top, *(column.tolist() for column in columns), strict=True)
        return [TokenLogprobs(token, chosen, rank, ids[:n], values[:n]) for n, token, chosen, rank, ids, values in rows]


def prompt_logprobs(logits: Tensor, targets: Tensor, num_top: int) -> list[TokenLogprobs]:
    """Logprobs of prompt tokens: row i of `logits` predicts `targets[i]`.

    logits: (n, V); targets: (n,) int64 on the same device; `num_top` 0 reports the target alone."""
    if not len(targets):
        return []
    parts = zip(logits.split(_ROWS_AT_ONCE), targets.split(_ROWS_AT_ONCE), strict=True)
    return [entry for rows, tokens in parts for entry in PendingLogprobs(rows, tokens, [num_top] * len(rows)).read()]
