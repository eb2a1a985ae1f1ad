"""Rotary tables against those of transformers, in the new and the old spelling of config.json."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from equipoise.exec.torch.models.rope import read_rope
from equipoise.exec.torch.weights import Fields

LENGTH = 512
DIM = 32

LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize("is_old_spelling", [False, True])
@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        LINEAR,
        LLAMA3,
        YARN,
        {**YARN, "attention_factor": 0.7},
        {**YARN, "mscale": 0.8, "mscale_all_dim": 1.2},
        {**YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False},
    ],
)
def test_tables(scaling: dict[str, object], is_old_spelling: bool) -> None:
    theta = 5000.0
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
        rope_parameters={"rope_theta": theta, **scaling},
    )
    cosines, sines = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(LENGTH)[None])
    if is_old_spelling:
        fields = Fields({"rope_theta": theta, "rope_scaling": scaling}, "config")
    else:
        fields = Fields({"rope_parameters": {"rope_theta": theta, **scaling}}, "config")
    tables = read_rope(fields, DIM, LENGTH).tables(LENGTH, torch.device("cpu"), torch.float32)
    half = DIM // 2
    torch.testing.assert_close(tables[:, :half], cosines[0, :, :half], atol=2e-5, rtol=0)
    torch.testing.assert_close(tables[:, half:], sines[0, :, :half], atol=2e-5, rtol=0)


def test_plain_old_spelling() -> None:
    rope = read_rope(Fields({"rope_theta": 100, "rope_scaling": None}, "config"), 4, 8)
    torch.testing.assert_close(rope.inverse_frequencies, torch.tensor([1.0, 0.1]))
