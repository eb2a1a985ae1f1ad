"""The operations that have a C kernel, and the same in torch: what the lean models and attention call."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F

from equipoise.exec.torch.native import MAX_HEAD_DIM, CompileError, NativeOps, torch_linear

if TYPE_CHECKING:
    from torch import Tensor

    from equipoise.exec.torch.attention import AttentionSpec
    from equipoise.exec.torch.batch import Singles
    from equipoise.exec.torch.pages import KVShape, LayerPages

logger = logging.getLogger(__name__)

GATHER_BYTES = 2**28
"""Keys gathered at once by the torch form of `attend_singles`."""


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


def choose_ops(device: torch.device, dtype: torch.dtype, shapes: tuple[KVShape, ...], num_threads: int) -> Ops:
    """The C kernels on a CPU in float32, torch otherwise and where they do not compile."""
    if device.type != "cpu" or dtype != torch.float32 or any(s.head_dim > MAX_HEAD_DIM for s in shapes):
        return TorchOps()
    try:
        return NativeOps(num_threads)
    except CompileError as error:
        logger.warning("no C kernels, decoding runs in torch and is slower: %s", error)
        return TorchOps()


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
