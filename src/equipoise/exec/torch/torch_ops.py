"""`Ops` in torch: on any device and type."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor

    from equipoise.exec.torch.batch import Singles
    from equipoise.exec.torch.ops import AttentionSpec
    from equipoise.exec.torch.pages import LayerPages

GATHER_BYTES = 2**28
"""Keys gathered at once by `attend_singles`."""


class TorchOps:
    """`Ops` on any device and type."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, add_to: Tensor | None = None) -> Tensor:
        return torch_linear(x, weight, bias, add_to)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    def rotate(
        self, heads: Tensor, positions: Tensor, tables: Tensor, norm: Tensor | None = None, eps: float = 0.0
    ) -> None:
        if norm is not None:
            heads.copy_(F.rms_norm(heads, norm.shape, norm, eps))
        half = tables.shape[1] // 2
        cosines, sines = tables[positions].unsqueeze(1).chunk(2, -1)  # (T, 1, half) each
        low, high = heads[..., :half], heads[..., half : 2 * half]
        rotated = torch.cat((low * cosines - high * sines, high * cosines + low * sines), -1)
        heads[..., : 2 * half] = rotated

    def store_kv(self, pages: LayerPages, keys: Tensor, values: Tensor, page_ids: Tensor, offsets: Tensor) -> None:
        pages.keys[page_ids, :, offsets] = keys
        pages.values[page_ids, :, offsets] = values

    def attend_singles(
        self, spec: AttentionSpec, pages: LayerPages, queries: Tensor, singles: Singles, out: Tensor
    ) -> None:
        _, num_kv_heads, page_size, dim = pages.keys.shape
        width = -(-singles.max_len // page_size)
        page_bytes = num_kv_heads * page_size * dim * pages.keys.element_size()
        step = max(1, GATHER_BYTES // (width * page_bytes))
        for first in range(0, singles.count, step):
            part = slice(first, first + step)
            rows, lens, tokens = singles.rows[part], singles.lens[part], singles.tokens[part]
            table = singles.tables[rows, :width]
            keys, values = (gather(kv, table) for kv in (pages.keys, pages.values))
            positions = torch.arange(keys.shape[2], device=keys.device)
            visible = positions < lens[:, None]
            if spec.window is not None:
                visible &= positions >= lens[:, None] - spec.window
            query = queries[tokens].unsqueeze(2)  # (rows, heads, 1, dim)
            out[tokens] = softmax_attention(spec, query, keys, values, visible[:, None, None]).squeeze(2)


def gather(pages: Tensor, table: Tensor) -> Tensor:
    """pages (num_pages, H, page_size, D) of table (rows, width) -> (rows, H, width * page_size, D)."""
    rows, width = table.shape
    _, num_kv_heads, page_size, dim = pages.shape
    return pages[table].transpose(1, 2).reshape(rows, num_kv_heads, width * page_size, dim)


def softmax_attention(spec: AttentionSpec, query: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """query (rows, H, n, D), keys and values (rows, Hkv, len, D), visible: bool, broadcast to
    (rows, H, n, len) -> (rows, H, n, D)."""
    if spec.softcap is None and spec.sinks is None:
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=visible, scale=spec.scale, enable_gqa=query.shape[1] != keys.shape[1]
        )
    group = query.shape[1] // keys.shape[1]
    scores = query.float() @ keys.repeat_interleave(group, 1).float().transpose(2, 3) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if spec.sinks is not None:
        sinks = spec.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), -1)
    weights = scores.softmax(-1)[..., : keys.shape[2]]
    return (weights @ values.repeat_interleave(group, 1).float()).to(query.dtype)


def torch_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, add_to: Tensor | None = None) -> Tensor:
    """`Ops.linear` in torch."""
    if add_to is None:
        return F.linear(x, weight, bias)
    if bias is not None:
        add_to += bias
    return add_to.addmm_(x, weight.t())
