"""From a checkpoint's folder to a model that runs on pages: the lean form where there is one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from equipoise.errors import CheckpointError, ConfigError
from equipoise.exec.torch.models.decoder import Decoder
from equipoise.exec.torch.models.spec import FAMILIES, read_spec
from equipoise.exec.torch.weights import CONFIG, Weights, find_model, read_eos_ids, read_fields, refuse_quantized

if TYPE_CHECKING:
    from pathlib import Path

    from equipoise.config import ModelConfig
    from equipoise.exec.torch.models.protocol import Model
    from equipoise.exec.torch.weights import Fields

BORROWED = frozenset(
    {
        *("cohere", "cohere2", "ernie4_5", "gemma", "gemma2", "gemma3_text", "glm4", "gpt2", "gpt_neox", "gpt_oss"),
        *("granite", "mixtral", "olmo2", "olmo3", "olmoe", "opt", "phi", "phi3", "qwen2_moe", "qwen3_moe"),
        *("smollm3", "starcoder2"),
    }
)
"""Families that run in transformers' modules (borrowed.py), each shown token-exact by the tests."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model with what the engine must know of it."""

    model: Model
    model_type: str
    vocab_size: int
    max_model_len: int
    eos_ids: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def load_model(settings: ModelConfig) -> LoadedModel:
    """Raises CheckpointError for a folder that cannot be served, ConfigError for settings that cannot."""
    folder = find_model(settings.model)
    config = read_fields(folder / CONFIG)
    model_type = config.text("model_type")
    if model_type not in FAMILIES and model_type not in BORROWED:
        supported = ", ".join(sorted({*FAMILIES, *BORROWED}))
        raise CheckpointError(f"model_type: {model_type} is not supported; supported are {supported}")
    refuse_quantized(config)
    weights = Weights(folder)
    device = choose_device(settings)
    dtype = _choose_dtype(settings, weights, device)
    make = _make_lean if model_type in FAMILIES else _make_borrowed
    try:
        model, vocab_size, max_model_len = make(folder, config, weights, settings, dtype, device)
    except (MemoryError, RuntimeError) as error:
        if not is_lack_of_memory(error):
            raise
        raise ConfigError(
            f"model: no memory on {device} for {folder} in {str(dtype).removeprefix('torch.')} "
            f"with its max_position_embeddings; a smaller max-model-len may help"
        ) from error
    return LoadedModel(
        model=model,
        model_type=model_type,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        eos_ids=read_eos_ids(folder, config),
        dtype=dtype,
        device=device,
    )


def _make_lean(
    folder: Path,
    config: Fields,
    weights: Weights,
    settings: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Model, int, int]:
    spec = read_spec(config)
    max_model_len = _choose_max_model_len(settings, spec.max_position)
    return Decoder(spec, weights, max_model_len, dtype, device), spec.vocab_size, max_model_len


def _make_borrowed(
    folder: Path,
    config: Fields,
    weights: Weights,
    settings: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Model, int, int]:
    from equipoise.exec.torch.models.borrowed import BorrowedModel

    model = BorrowedModel(folder, dtype, device)
    return model, model.vocab_size, _choose_max_model_len(settings, model.max_position)


def is_lack_of_memory(error: MemoryError | RuntimeError) -> bool:
    """torch has a class of its own for a GPU's memory alone."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def choose_device(settings: ModelConfig) -> torch.device:
    """Raises ConfigError when a GPU is asked for and there is none."""
    has_gpu = torch.cuda.is_available()
    if settings.device == "cuda" and not has_gpu:
        raise ConfigError("device: cuda is asked for, but torch sees no GPU; cpu and auto are allowed")
    return torch.device("cuda" if has_gpu and settings.device != "cpu" else "cpu")


def _choose_dtype(settings: ModelConfig, weights: Weights, device: torch.device) -> torch.dtype:
    if settings.dtype != "auto":
        return DTYPES[settings.dtype]
    return torch.float32 if device.type == "cpu" else weights.dtype()


def _choose_max_model_len(settings: ModelConfig, max_position: int) -> int:
    if settings.max_model_len is None:
        return max_position
    if settings.max_model_len > max_position:
        raise ConfigError(f"max-model-len: {settings.max_model_len} is more than the model's own {max_position}")
    return settings.max_model_len
