"""The llama-shaped families: what tells one from another, read from config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from equipoise.errors import CheckpointError
from equipoise.exec.torch.models.rope import Rope, read_rope

if TYPE_CHECKING:
    from equipoise.exec.torch.weights import Fields


MAX_WINDOW_LAYERS = 28
"""Of the families that have it, when config.json does not say."""


@dataclass(frozen=True)
class Family:
    """What config.json leaves unsaid. A bias of None is the config's own flag (attention_bias, mlp_bias)."""

    qkv_bias: bool | None = None
    o_bias: bool | None = None
    mlp_bias: bool | None = False
    qk_norm: bool = False
    num_kv_heads: int | None = None
    head_dim: int | None = None
    has_windows: bool = False
    """Reads sliding_window."""
    window: int | None = None
    """sliding_window, unless config.json says another or null."""
    asks_for_window: bool = False
    """A window holds only with use_sliding_window, and from layer max_window_layers on."""


FAMILIES: dict[str, Family] = {
    "llama": Family(mlp_bias=None),
    "mistral": Family(qkv_bias=False, o_bias=False, num_kv_heads=8, has_windows=True, window=4096),
    "qwen2": Family(qkv_bias=True, o_bias=False, has_windows=True, asks_for_window=True),
    "qwen3": Family(qk_norm=True, head_dim=128, has_windows=True, asks_for_window=True),
}


@dataclass(frozen=True)
class DecoderSpec:
    """Sizes and switches of a llama-shaped decoder. windows: one per layer, None sees everything."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    is_tied: bool
    windows: tuple[int | None, ...]
    rope: Rope
    max_position: int


def read_spec(config: Fields) -> DecoderSpec:
    """The spec of a config whose model_type is one of FAMILIES. Raises CheckpointError."""
    model_type = config.text("model_type")
    family = FAMILIES[model_type]
    activation = config.text("hidden_act", "silu")
    if activation != "silu":
        raise CheckpointError(f"hidden_act: {activation} is not supported for {model_type}, it must be silu")
    hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", family.num_kv_heads or num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(f"num_attention_heads: {num_heads} is not a multiple of {num_kv_heads} KV heads")
    head_dim = config.integer("head_dim", family.head_dim or hidden_size // num_heads)
    attention_bias = config.flag("attention_bias", False)
    max_position = config.integer("max_position_embeddings")
    return DecoderSpec(
        model_type=model_type,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=config.number("rms_norm_eps", 1e-6),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=config.flag("mlp_bias", False) if family.mlp_bias is None else family.mlp_bias,
        qk_norm=family.qk_norm,
        is_tied=config.flag("tie_word_embeddings", False),
        windows=_windows(config, family),
        rope=read_rope(config, head_dim, max_position),
        max_position=max_position,
    )


def _windows(config: Fields, family: Family) -> tuple[int | None, ...]:
    num_layers = config.integer("num_hidden_layers")
    has_window = config.flag("use_sliding_window", False) if family.asks_for_window else family.has_windows
    window: int | None = None
    if has_window and "sliding_window" in config:
        window = config.integer("sliding_window")
    elif has_window and not config.says("sliding_window"):
        window = family.window
    kinds = config.texts("layer_types")
    if kinds is not None:
        return tuple(_window_of(kind, window) for kind in _exactly(kinds, num_layers))
    first = config.integer("max_window_layers", MAX_WINDOW_LAYERS, low=0) if family.asks_for_window else 0
    return tuple(window if layer >= first else None for layer in range(num_layers))


def _exactly(kinds: list[str], num_layers: int) -> list[str]:
    if len(kinds) != num_layers:
        raise CheckpointError(f"layer_types: {len(kinds)} entries for {num_layers} layers")
    return kinds


def _window_of(kind: str, window: int | None) -> int | None:
    if kind == "full_attention":
        return None
    if kind == "sliding_attention" and window is not None:
        return window
    raise CheckpointError(
        f"layer_types: {kind} is not supported here; allowed are full_attention, and with a window sliding_attention"
    )
