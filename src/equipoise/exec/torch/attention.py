"""Paged attention of a step: one call per layer, the same for every model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from equipoise.exec.torch.torch_ops import gather, softmax_attention

if TYPE_CHECKING:
    from torch import Tensor

    from equipoise.exec.torch.batch import Batch, Chunk
    from equipoise.exec.torch.ops import AttentionSpec, Ops
    from equipoise.exec.torch.pages import LayerPages

QUERY_BLOCK = 512
"""Queries of a chunk that attend at once when a mask is needed: bounds the mask, and for a sliding window the keys."""


def attend(
    ops: Ops, spec: AttentionSpec, pages: LayerPages, queries: Tensor, keys: Tensor, values: Tensor, batch: Batch
) -> Tensor:
    """Store the step's keys and values (T, Hkv, D), then attend queries (T, H, D) -> (T, H, D).

    All are stored before any is read: a row may share a page that another row of this step fills."""
    ops.store_kv(pages, keys, values, batch.page_ids, batch.offsets)
    out = queries.new_empty(queries.shape)
    if batch.singles.count:
        ops.attend_singles(spec, pages, queries, batch.singles, out)
    for chunk in batch.chunks:
        part = slice(chunk.first, chunk.first + chunk.n)
        if chunk.start == 0 and _is_plain(spec, chunk.n):
            out[part] = _attend_fresh(spec, queries[part], keys[part], values[part])
        else:
            _attend_history(spec, pages, queries[part], batch.singles.tables[chunk.row], chunk, out[part])
    return out


def _is_plain(spec: AttentionSpec, length: int) -> bool:
    return spec.softcap is None and spec.sinks is None and (spec.window is None or length <= spec.window)


def _attend_fresh(spec: AttentionSpec, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """A chunk without history: no mask is built. All (n, heads, D)."""
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (queries, keys, values))
    out = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=spec.scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out.squeeze(0).transpose(0, 1)


def _attend_history(
    spec: AttentionSpec, pages: LayerPages, queries: Tensor, table: Tensor, chunk: Chunk, out: Tensor
) -> None:
    """A chunk over its pages, by blocks of queries; a block's mask is causal from the lower right corner.

    queries, out: (n, H, D). table: (width,), the chunk's row."""
    page_size = pages.keys.shape[2]
    for first in range(0, chunk.n, QUERY_BLOCK):
        last = min(first + QUERY_BLOCK, chunk.n)
        begin, end = chunk.start + first, chunk.start + last
        lowest = 0 if spec.window is None else max(0, begin - spec.window + 1) // page_size
        row = table[None, lowest : -(-end // page_size)]
        keys, values = (gather(kv, row)[:, :, : end - lowest * page_size] for kv in (pages.keys, pages.values))
        query_at = torch.arange(begin, end, device=queries.device)[:, None]
        key_at = torch.arange(lowest * page_size, end, device=queries.device)
        visible = key_at <= query_at
        if spec.window is not None:
            visible &= key_at > query_at - spec.window
        query = queries[first:last].transpose(0, 1).unsqueeze(0)
        out[first:last] = softmax_attention(spec, query, keys, values, visible).squeeze(0).transpose(0, 1)
