"""Which tokens stay in the draw (top_k, top_p, min_p), and the draw itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

_HEAD = 1024  # likeliest tokens looked at before a whole vocabulary is sorted


def draw(scores: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one token per row with probability proportional to exp(score), by inverse CDF in float64.

    scores: (n, V) float32, at most 0, -inf where a token may not be drawn; overwritten.
    uniforms: (n,) float64 in [0, 1). Returns (n,) int64. Each row depends on its own numbers alone."""
    mass = torch.cumsum(scores.exp_(), dim=-1, dtype=torch.float64)  # (n, V)
    targets = uniforms[:, None] * mass[:, -1:]
    # `right`: the first token whose mass passes the target, so one of probability 0 is never drawn
    return torch.searchsorted(mass, targets, right=True).squeeze(1).clamp_(max=scores.shape[1] - 1)


def floors(scores: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float64]) -> Tensor:
    """The lowest score that stays in each row's draw: first the `top_k` likeliest, then, of their mass, `top_p`.

    scores: (n, V) float32, at most 0; top_k: (n,), V for no limit; top_p: (n,) in (0, 1]. Returns (n,) float32.
    Tokens exactly as likely as the last one that stays, stay too: equals are treated alike, and the
    answer does not depend on how a sort breaks ties."""
    result = scores.new_empty(scores.shape[0])
    width = scores.shape[1]
    short = np.flatnonzero(top_k <= _HEAD)
    if short.size:
        head = _take(scores, short).topk(min(int(top_k[short].max()), width), dim=-1).values
        result[_index(short, scores)] = _head_floors(head, None, top_k[short], top_p[short])[0]
    long = np.flatnonzero(top_k > _HEAD)
    if long.size and scores.device.type == "cpu" and width > _HEAD:
        long = _settle_by_head(scores, long, top_k, top_p, result)
    if long.size:
        ordered = _take(scores, long).sort(dim=-1, descending=True).values
        result[_index(long, scores)] = _head_floors(ordered, None, top_k[long], top_p[long])[0]
    return result


def _settle_by_head(
    scores: Tensor, rows: NDArray[np.int64], top_k: NDArray[np.int64], top_p: NDArray[np.float64], result: Tensor
) -> NDArray[np.int64]:
    """Write the floors of those `rows` whose nucleus lies within the head; returns the other rows.

    Only worth it where reading a flag back is free (a CPU) and where no top_k cuts the mass."""
    uncut = rows[top_k[rows] >= scores.shape[1]]
    if not uncut.size:
        return rows
    part = _take(scores, uncut)
    total = torch.cumsum(part.exp(), dim=-1, dtype=torch.float64)[:, -1]
    found, settled = _head_floors(part.topk(_HEAD, dim=-1).values, total, top_k[uncut], top_p[uncut])
    done = settled.numpy()
    result[_index(uncut[done], scores)] = found[settled]
    return np.setdiff1d(rows, uncut[done], assume_unique=True)


def _head_floors(
    head: Tensor, total: Tensor | None, top_k: NDArray[np.int64], top_p: NDArray[np.float64]
) -> tuple[Tensor, Tensor]:
    """Floors (n,), and whether the head held enough mass to tell (n,).

    head: (n, k) scores in descending order; total: (n,) float64 mass of the whole row, None for the head's own."""
    limit = _column(np.minimum(top_k, head.shape[1]), head)
    share = _column(top_p, head)
    inside = torch.arange(head.shape[1], device=head.device) < limit
    mass = head.exp().to(torch.float64).masked_fill_(~inside, 0.0)
    upto = mass.cumsum(dim=-1)
    wanted = share * (upto[:, -1:] if total is None else total[:, None])
    # a token stays while the mass before it is short of what is wanted: the likeliest always stays
    kept = ((upto - mass < wanted) & inside).sum(dim=-1, keepdim=True).clamp_(min=1)
    return head.gather(1, kept - 1).squeeze(1), (upto[:, -1:] >= wanted).squeeze(1)


def _column(values: NDArray[np.int64] | NDArray[np.float64], like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)[:, None]


def _index(rows: NDArray[np.int64], like: Tensor) -> Tensor:
    return torch.from_numpy(rows).to(like.device)


def _take(scores: Tensor, rows: NDArray[np.int64]) -> Tensor:
    return scores if len(rows) == len(scores) else scores[_index(rows, scores)]
