"""What config.json leaves unsaid, family by family."""

from __future__ import annotations

import pytest

from equipoise.exec.torch.models.spec import DecoderSpec, read_spec
from equipoise.exec.torch.weights import Fields

COMMON: dict[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}


def spec_of(model_type: str, **fields: object) -> DecoderSpec:
    return read_spec(Fields({"model_type": model_type, **COMMON, **fields}, "config.json"))


@pytest.mark.parametrize(
    ("model_type", "num_kv_heads", "head_dim"), [("llama", 8, 8), ("mistral", 8, 8), ("qwen2", 8, 8), ("qwen3", 8, 128)]
)
def test_default_heads(model_type: str, num_kv_heads: int, head_dim: int) -> None:
    spec = spec_of(model_type)
    assert (spec.num_kv_heads, spec.head_dim, spec.norm_eps, spec.is_tied) == (num_kv_heads, head_dim, 1e-6, False)


@pytest.mark.parametrize(
    ("model_type", "fields", "windows"),
    [
        ("llama", {}, (None, None, None)),
        ("llama", {"sliding_window": 7}, (None, None, None)),
        ("mistral", {}, (4096, 4096, 4096)),
        ("mistral", {"sliding_window": None}, (None, None, None)),
        ("mistral", {"sliding_window": 7}, (7, 7, 7)),
        ("qwen2", {"sliding_window": 7}, (None, None, None)),
        ("qwen2", {"sliding_window": 7, "use_sliding_window": True}, (None, None, None)),
        ("qwen2", {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1}, (None, 7, 7)),
        (
            "qwen3",
            {
                "sliding_window": 7,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (7, None, 7),
        ),
    ],
)
def test_windows(model_type: str, fields: dict[str, object], windows: tuple[int | None, ...]) -> None:
    assert spec_of(model_type, **fields).windows == windows


@pytest.mark.parametrize(
    ("model_type", "fields", "biases"),
    [
        ("llama", {}, (False, False, False)),
        ("llama", {"attention_bias": True}, (True, True, False)),
        ("llama", {"mlp_bias": True}, (False, False, True)),
        ("mistral", {}, (False, False, False)),
        ("qwen2", {}, (True, False, False)),
        ("qwen3", {"attention_bias": True}, (True, True, False)),
    ],
)
def test_biases(model_type: str, fields: dict[str, object], biases: tuple[bool, bool, bool]) -> None:
    spec = spec_of(model_type, **fields)
    assert (spec.qkv_bias, spec.o_bias, spec.mlp_bias) == biases
