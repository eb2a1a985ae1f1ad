"""Where models and tokenizers lie."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from equipoise.demo import demo_model_path
from equipoise.errors import CheckpointError

if TYPE_CHECKING:
    from equipoise.config.engine import ModelConfig

DEMO = "demo"


def resolve_folders(config: ModelConfig) -> ModelConfig:
    """`config` with `model` and `tokenizer` as absolute paths. Raises CheckpointError when one is no folder.

    A sim executor reads no checkpoint: with a tokenizer of its own it needs no model folder."""
    tokenizer = _folder("tokenizer", config.tokenizer) if config.tokenizer else _folder("model", config.model)
    if config.executor == "sim" and config.tokenizer is not None:
        return replace(config, tokenizer=str(tokenizer))
    return replace(config, model=str(_folder("model", config.model)), tokenizer=str(tokenizer))


def _folder(setting: str, name: str) -> Path:
    """The folder that a setting means: "demo" is the embedded model, whatever folders there are ("./demo" is one)."""
    folder = demo_model_path() if name == DEMO else Path(name).expanduser().absolute()
    if not folder.is_dir():
        raise CheckpointError(
            f'{setting}: {folder} is not a folder; the folder of a Hugging Face checkpoint or "{DEMO}" is needed '
            "(`hf download NAME --local-dir FOLDER` makes one)"
        )
    return folder
