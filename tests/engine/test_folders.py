"""What the model and tokenizer settings mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from equipoise.config import ModelConfig
from equipoise.demo import demo_model_path
from equipoise.engine.folders import resolve_folders
from equipoise.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path


def test_relative_folders_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    config = resolve_folders(ModelConfig(model="m"))
    assert (config.model, config.tokenizer) == (str(tmp_path / "m"), str(tmp_path / "m"))
    assert resolve_folders(ModelConfig(model="m", tokenizer="demo")).tokenizer == str(demo_model_path())
    assert resolve_folders(ModelConfig(model="./demo")).model == str(tmp_path / "demo")


def test_missing_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer: .*gone is not a folder"):
        resolve_folders(ModelConfig(model=str(tmp_path), tokenizer=str(tmp_path / "gone")))
    with pytest.raises(CheckpointError, match=r"model: .*gone is not a folder"):
        resolve_folders(ModelConfig(model=str(tmp_path / "gone"), tokenizer=str(tmp_path)))
    with pytest.raises(CheckpointError, match=r"^model: .*gone is not a folder.*hf download"):
        resolve_folders(ModelConfig(model=str(tmp_path / "gone")))


def test_sim_with_a_tokenizer_needs_no_model(tmp_path: Path) -> None:
    config = resolve_folders(ModelConfig(model="any-name", tokenizer=str(tmp_path), executor="sim"))
    assert config.model == "any-name"
