"""One lean decoder for the llama-shaped families: fused projections, tokens packed in one axis.

Shapes: T tokens, E hidden size, H heads, Hkv KV heads, D head dimension, I intermediate size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from equipoise.errors import CheckpointError
from equipoise.exec.torch.attention import attend
from equipoise.exec.torch.ops import AttentionSpec
from equipoise.exec.torch.pages import KVShape

if TYPE_CHECKING:
    from torch import Tensor

    from equipoise.exec.torch.batch import Batch
    from equipoise.exec.torch.models.spec import DecoderSpec
    from equipoise.exec.torch.ops import Ops
    from equipoise.exec.torch.pages import LayerPages
    from equipoise.exec.torch.weights import Weights


@dataclass(frozen=True, eq=False)
class Layer:
    """Weights of one layer; a linear's weight is (out, in), its bias None when it has none."""

    attention: AttentionSpec
    input_norm: Tensor
    qkv: Tensor  # ((H + 2 Hkv) D, E): queries, keys, values
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # (D,)
    k_norm: Tensor | None
    o: Tensor  # (E, H D)
    o_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor  # (2 I, E): gates, ups
    gate_up_bias: Tensor | None
    down: Tensor  # (E, I)
    down_bias: Tensor | None


class Decoder:
    """A llama-shaped decoder, its weights read from a checkpoint."""

    def __init__(
        self, spec: DecoderSpec, weights: Weights, max_model_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raises CheckpointError when the weights do not fit the spec."""
        reader = _Reader(spec, weights, dtype, device)
        self._spec = spec
        self._embedding = reader.read("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
        self._layers = tuple(reader.layer(i, window) for i, window in enumerate(spec.windows))
        self._norm = reader.read("model.norm.weight", spec.hidden_size)
        self._head = (
            self._embedding if spec.is_tied else reader.read("lm_head.weight", spec.vocab_size, spec.hidden_size)
        )
        self._rope_tables = spec.rope.tables(max_model_len, device, dtype)
        reader.refuse_unread()

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        return (KVShape(self._spec.num_kv_heads, self._spec.head_dim),) * len(self._layers)

    def bind(self, pages: tuple[LayerPages, ...], ops: Ops) -> None:
        self._pages = pages
        self._ops = ops

    def forward(self, token_ids: Tensor, batch: Batch) -> Tensor:
        ops, eps = self._ops, self._spec.norm_eps
        hidden = F.embedding(token_ids, self._embedding)  # (T, E)
        for layer, pages in zip(self._layers, self._pages, strict=True):
            attended = self._attend(layer, pages, ops.rms_norm(hidden, layer.input_norm, eps), batch)
            ops.linear(attended, layer.o, layer.o_bias, add_to=hidden)
            gate_up = ops.linear(ops.rms_norm(hidden, layer.mlp_norm, eps), layer.gate_up, layer.gate_up_bias)
            ops.linear(ops.silu_mul(gate_up), layer.down, layer.down_bias, add_to=hidden)
        wanted = ops.rms_norm(hidden[batch.logit_rows], self._norm, eps)
        return ops.linear(wanted, self._head).float()

    def _attend(self, layer: Layer, pages: LayerPages, x: Tensor, batch: Batch) -> Tensor:
        """x: (T, E), normed -> (T, H D)."""
        spec, ops = self._spec, self._ops
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        qkv = ops.linear(x, layer.qkv, layer.qkv_bias).view(len(x), heads + 2 * kv_heads, spec.head_dim)
        queries, keys, values = torch.split(qkv, [heads, kv_heads, kv_heads], 1)
        if layer.q_norm is None:
            ops.rotate(qkv[:, : heads + kv_heads], batch.positions, self._rope_tables)
        else:
            ops.rotate(queries, batch.positions, self._rope_tables, layer.q_norm, spec.norm_eps)
            ops.rotate(keys, batch.positions, self._rope_tables, layer.k_norm, spec.norm_eps)
        out = attend(ops, layer.attention, pages, queries, keys, values, batch)
        return out.view(len(x), heads * spec.head_dim)


class _Reader:
    """Reads the tensors of one checkpoint under the names that all llama-shaped families use."""

    def __init__(self, spec: DecoderSpec, weights: Weights, dtype: torch.dtype, device: torch.device) -> None:
        self._spec = spec
        self._weights = weights
        self._dtype = dtype
        self._device = device

    def read(self, name: str, *shape: int) -> Tensor:
        return self._weights.read(name, shape, self._dtype, self._device)

    def layer(self, index: int, window: int | None) -> Layer:
        spec, prefix = self._spec, f"model.layers.{index}."
        width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        hidden, inner = spec.hidden_size, spec.intermediate_size
        qkv = {f"{prefix}self_attn.{x}_proj": n for x, n in (("q", width), ("k", kv_width), ("v", kv_width))}
        gate_up = {f"{prefix}mlp.{x}_proj": inner for x in ("gate", "up")}
        return Layer(
            attention=AttentionSpec(spec.head_dim**-0.5, window),
            input_norm=self.read(f"{prefix}input_layernorm.weight", hidden),
            qkv=self._fused(qkv, hidden),
            qkv_bias=self._fused_bias(qkv) if spec.qkv_bias else None,
            q_norm=self.read(f"{prefix}self_attn.q_norm.weight", spec.head_dim) if spec.qk_norm else None,
            k_norm=self.read(f"{prefix}self_attn.k_norm.weight", spec.head_dim) if spec.qk_norm else None,
            o=self.read(f"{prefix}self_attn.o_proj.weight", hidden, width),
            o_bias=self.read(f"{prefix}self_attn.o_proj.bias", hidden) if spec.o_bias else None,
            mlp_norm=self.read(f"{prefix}post_attention_layernorm.weight", hidden),
            gate_up=self._fused(gate_up, hidden),
            gate_up_bias=self._fused_bias(gate_up) if spec.mlp_bias else None,
            down=self.read(f"{prefix}mlp.down_proj.weight", hidden, inner),
            down_bias=self.read(f"{prefix}mlp.down_proj.bias", hidden) if spec.mlp_bias else None,
        )

    def refuse_unread(self) -> None:
        """A tensor of the layers that nothing used is a feature left out: the tokens would be silently wrong."""
        unread = [n for n in self._weights.unread if n.startswith("model.") and not n.endswith("rotary_emb.inv_freq")]
        if unread:
            raise CheckpointError(
                f"the checkpoint has {len(unread)} tensors that {self._spec.model_type} does not use, as {unread[0]}"
            )

    def _fused(self, parts: dict[str, int], width: int) -> Tensor:
        names, shapes = [f"{name}.weight" for name in parts], [(n, width) for n in parts.values()]
        return self._weights.read_fused(names, shapes, self._dtype, self._device)

    def _fused_bias(self, parts: dict[str, int]) -> Tensor:
        names, shapes = [f"{name}.bias" for name in parts], [(n,) for n in parts.values()]
        return self._weights.read_fused(names, shapes, self._dtype, self._device)
