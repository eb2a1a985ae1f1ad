"""Which tokens stay in the draw (top_k, top_p, min_p), and the draw itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

_HEAD = 1024  # up to this top_k a partial sort on a GPU is cheaper than a whole one


def draw(scores: Tensor, uniforms: Tensor, floor: Tensor | None = None) -> Tensor:
    """Draw one token per row with probability proportional to exp(score), by inverse CDF in float64.

    scores: (n, V) float32, at most 0, -inf where a token may not be drawn; overwritten.
    uniforms: (n,) float64 in [0, 1); floor: (n,), scores below it are not drawn.
    Returns (n,) int64. Each row depends on its own numbers alone."""
    # a product, for masked_fill takes five times as long on a CPU
    kept = None if floor is None else (scores >= floor[:, None]).float()
    weights = scores.exp_()
    if kept is not None:
        weights.mul_(kept)
    mass = torch.cumsum(weights, dim=-1, dtype=torch.float64)  # (n, V)
    targets = uniforms[:, None] * mass[:, -1:]
    # `right`: the first token whose mass passes the target, so one of probability 0 is never drawn
    return torch.searchsorted(mass, targets, right=True).squeeze(1).clamp_(max=scores.shape[1] - 1)


def floors(scores: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float64]) -> Tensor:
    """The lowest score that stays in each row's draw: first the `top_k` likeliest, then, of their mass, `top_p`.

    scores: (n, V) float32, at most 0; top_k: (n,), V for no limit; top_p: (n,) in (0, 1]. Returns (n,) float32.
    Tokens exactly as likely as the last one that stays, stay too: equals are treated alike, and the
    answer does not depend on how a sort breaks ties."""
    result = scores.new_empty(scores.shape[0])
    for rows in (np.flatnonzero(top_k <= _HEAD), np.flatnonzero(top_k > _HEAD)):
        if rows.size:
            index = torch.from_numpy(rows).to(scores.device)
            part = scores if len(rows) == len(scores) else scores[index]
            result[index] = _head_floors(_likeliest(part, int(top_k[rows].max())), top_k[rows], top_p[rows])
    return result


def _likeliest(scores: Tensor, most: int) -> Tensor:
    """The `most` highest scores of each row, (n, most), in descending order."""
    if scores.device.type == "cpu":
        # numpy sorts values with SIMD: 32 rows of 32,000 take 2 ms, with torch.sort 120 ms (one thread, AVX2)
        return torch.from_numpy(np.sort(scores.numpy(), axis=1)[:, : -most - 1 : -1].copy())
    if most <= _HEAD:
        return scores.topk(most, dim=-1).values
    return scores.sort(dim=-1, descending=True).values[:, :most]


def _head_floors(head: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float64]) -> Tensor:
    """Floors (n,). head: (n, k) scores in descending order, k >= every top_k."""
    upto = torch.cumsum(head.exp(), dim=-1, dtype=torch.float64)  # mass of the tokens up to and with each
    last = _column(top_k, head) - 1
    wanted = _column(top_p, head) * upto.gather(1, last)
    # the first token that brings the mass to what is wanted is the last to stay
    return head.gather(1, torch.searchsorted(upto, wanted).minimum(last)).squeeze(1)


def _column(values: NDArray[np.int64] | NDArray[np.float64], like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)[:, None]
