"""Which checkpoints are taken, and what is said of the others."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import checkpoints
from tests.checkpoints import EOS_ID, MAX_POSITION, VOCAB_SIZE, checkpoint, copy_checkpoint

from equipoise.config import ModelConfig
from equipoise.errors import CheckpointError, ConfigError
from equipoise.exec.torch.models.load import BORROWED, is_lack_of_memory, load_model
from equipoise.exec.torch.models.spec import FAMILIES

if TYPE_CHECKING:
    from pathlib import Path


def load(folder: Path | str, **settings: object) -> object:
    return load_model(ModelConfig(model=str(folder), device="cpu", **settings))  # type: ignore[arg-type]


def edit(folder: Path, **fields: object) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    return folder


def test_every_supported_family_has_a_checkpoint_in_the_tests() -> None:
    """So that the executor's tests show each one exact."""
    tested = {json.loads((checkpoint(f) / "config.json").read_text())["model_type"] for f in checkpoints.FAMILIES}
    assert tested == {*FAMILIES, *BORROWED}


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_what_is_known_of_a_model(family: str) -> None:
    loaded = load_model(ModelConfig(model=str(checkpoint(family)), device="cpu"))
    assert loaded.model_type == family
    assert (loaded.vocab_size, loaded.max_model_len, loaded.eos_ids) == (VOCAB_SIZE, MAX_POSITION, (EOS_ID,))
    assert loaded.dtype == torch.float32
    assert [(s.num_kv_heads, s.head_dim) for s in loaded.model.kv_shapes] == [(2, 16)] * 2


@pytest.mark.parametrize("model_type", ["qwen3_next", "falcon_h1", "mamba", "t5", "bert", "no_such"])
def test_other_types_are_refused_by_name(tmp_path: Path, model_type: str) -> None:
    folder = edit(copy_checkpoint("llama", tmp_path / "m"), model_type=model_type)
    with pytest.raises(
        CheckpointError, match=f"model_type: {model_type} is not supported; supported are .*llama.*qwen3"
    ):
        load(folder)


def test_quantized_weights_are_refused_by_name(tmp_path: Path) -> None:
    folder = edit(copy_checkpoint("llama", tmp_path / "m"), quantization_config={"quant_method": "awq"})
    with pytest.raises(CheckpointError, match="quantization_config: awq weights"):
        load(folder)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_missing_tensor(tmp_path: Path, family: str) -> None:
    folder = copy_checkpoint(family, tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.k_proj\.weight"):
        load(folder)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_shapes_that_do_not_fit_the_config(tmp_path: Path, family: str) -> None:
    folder = edit(copy_checkpoint(family, tmp_path / "m"), intermediate_size=100)
    with pytest.raises(CheckpointError, match="100"):
        load(folder)


def test_corrupt_weights_of_a_borrowed_family(tmp_path: Path) -> None:
    folder = copy_checkpoint("gemma2", tmp_path / "m")
    (folder / "model.safetensors").write_bytes(b"\x10\x00")
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        load(folder)


def test_tensors_that_the_family_does_not_use(tmp_path: Path) -> None:
    """A llama whose config lost its attention_bias would speak nonsense."""
    folder = edit(copy_checkpoint("llama_biases", tmp_path / "m"), attention_bias=False)
    with pytest.raises(CheckpointError, match="tensors that llama does not use"):
        load(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act: gelu"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": 3}, "num_attention_heads: 4"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type: dynamic"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor is missing"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types: linear_attention"),
        ({"layer_types": ["full_attention"]}, "layer_types: 1 entries for 2 layers"),
        ({"max_position_embeddings": -5}, "max_position_embeddings is -5"),
        ({"model_type": 3}, "model_type is 3"),
    ],
)
def test_broken_configs(tmp_path: Path, fields: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(edit(copy_checkpoint("llama", tmp_path / "m"), **fields))


def test_settings_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"max-model-len: 513 is more than the model's own {MAX_POSITION}"):
        load(checkpoint("llama"), max_model_len=513)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="device: cuda"):
            load_model(ModelConfig(model=str(checkpoint("llama")), device="cuda"))


def test_longrope_is_held_to_its_original_length(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 128,
    }
    folder = edit(copy_checkpoint("phi3", tmp_path / "m"), rope_parameters=rope, original_max_position_embeddings=128)
    assert load(folder).max_model_len == 128  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="max-model-len: 129"):
        load(folder, max_model_len=129)


def test_the_lean_path_does_not_import_transformers() -> None:
    """Its import takes longer than all the rest of the start."""
    code = (
        "import sys; from equipoise.config import *; from equipoise.exec.torch.executor import build_torch_executor\n"
        f"model = ModelConfig(model={str(checkpoint('llama'))!r}, device='cpu')\n"
        "build_torch_executor(model, CacheConfig(num_pages=8), SchedulerConfig()).close()\n"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_lack_of_memory_is_told_from_other_failures() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    assert is_lack_of_memory(caught.value)
    with pytest.raises(RuntimeError) as caught:
        torch.ones(2) @ torch.ones(3)
    assert not is_lack_of_memory(caught.value)
