"""Every fault of a model folder is one clear line."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoints import checkpoint, copy_checkpoint

from equipoise.errors import CheckpointError
from equipoise.exec.torch.weights import CONFIG, Fields, Weights, find_model, read_eos_ids, read_fields

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")
EMBEDDING = "model.embed_tokens.weight"


def shard(folder: Path) -> None:
    """Split a checkpoint's single file into two, with an index."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in parts.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "model.safetensors").unlink()


def test_reads_single_and_sharded_alike(tmp_path: Path) -> None:
    folder = copy_checkpoint("llama", tmp_path / "m")
    single = Weights(folder)
    shape = (259, 64)
    expected = single.read(EMBEDDING, shape, torch.float32, CPU)
    shard(folder)
    sharded = Weights(folder)
    assert sharded.unread == Weights(checkpoint("llama")).unread
    assert torch.equal(sharded.read(EMBEDDING, shape, torch.float32, CPU), expected)
    assert EMBEDDING not in sharded.unread
    assert sharded.read(EMBEDDING, shape, torch.bfloat16, CPU).dtype == torch.bfloat16


def test_missing_shard(tmp_path: Path) -> None:
    folder = copy_checkpoint("llama", tmp_path / "m")
    shard(folder)
    (folder / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"b\.safetensors: the file is missing"):
        Weights(folder)


def test_no_weights(tmp_path: Path) -> None:
    folder = copy_checkpoint("llama", tmp_path / "m")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        Weights(folder)


@pytest.mark.parametrize("keep", [0, 4, 200, 5000])
def test_truncated_file(tmp_path: Path, keep: int) -> None:
    folder = copy_checkpoint("llama", tmp_path / "m")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        Weights(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"weight_map": {}}', '{"weight_map": 3}'])
def test_broken_index(tmp_path: Path, text: str) -> None:
    folder = copy_checkpoint("llama", tmp_path / "m")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        Weights(folder)


def test_missing_tensor_and_wrong_shape() -> None:
    weights = Weights(checkpoint("llama"))
    with pytest.raises(CheckpointError, match="no tensor nowhere"):
        weights.read("nowhere", (1,), torch.float32, CPU)
    with pytest.raises(CheckpointError, match=r"shape \(259, 64\).*asks for \(259, 65\)"):
        weights.read(EMBEDDING, (259, 65), torch.float32, CPU)


def test_tensor_of_integers(tmp_path: Path) -> None:
    save_file({"x": torch.ones(2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"x is of type torch\.int8"):
        Weights(tmp_path).read("x", (2,), torch.float32, CPU)


def test_find_model(tmp_path: Path) -> None:
    assert find_model(str(checkpoint("llama"))) == checkpoint("llama")
    with pytest.raises(CheckpointError, match="nowhere is not a folder"):
        find_model("nowhere")
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        find_model(str(tmp_path))


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00", "[" * 100_000])
def test_broken_config(tmp_path: Path, text: str) -> None:
    (tmp_path / CONFIG).write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_fields(tmp_path / CONFIG)


def test_config_of_other_bytes(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_bytes(b"\xff\xfe{}")
    with pytest.raises(CheckpointError, match="not readable as JSON"):
        read_fields(tmp_path / CONFIG)


def test_fields_name_what_is_wrong() -> None:
    fields = Fields({"n": 3, "x": 1.5, "s": "a", "b": True, "none": None, "part": {"y": 2}, "ids": [1, 2]}, "here")
    assert (fields.integer("n"), fields.number("x"), fields.number("n"), fields.text("s")) == (3, 1.5, 3.0, "a")
    assert fields.flag("b") is True
    assert fields.integer("none", 7) == 7
    assert "none" not in fields
    assert fields.says("none")
    assert (fields.integers("n"), fields.integers("ids"), fields.integers("nothing")) == ((3,), (1, 2), None)
    part = fields.part("part")
    assert part is not None
    assert part.integer("y") == 2
    with pytest.raises(CheckpointError, match="here: z is missing"):
        fields.integer("z")
    with pytest.raises(CheckpointError, match="here: n is 3, it must be at least 4"):
        fields.integer("n", low=4)
    with pytest.raises(CheckpointError, match="here: huge is 1180591620717411303424, it must be at most"):
        Fields({"huge": 2**70}, "here").integer("huge")
    for read in (fields.integer, fields.text, fields.flag):
        with pytest.raises(CheckpointError, match=r"here: x is 1\.5, it must be of type"):
            read("x")
    with pytest.raises(CheckpointError, match="n must be an object"):
        fields.part("n")
    with pytest.raises(CheckpointError, match="must be a list of strings"):
        fields.texts("ids")
    with pytest.raises(CheckpointError, match="token id"):
        fields.integers("s")


def test_eos_ids(tmp_path: Path) -> None:
    config = Fields({"eos_token_id": 5}, CONFIG)
    assert read_eos_ids(tmp_path, config) == (5,)
    assert read_eos_ids(tmp_path, Fields({}, CONFIG)) == ()
    assert read_eos_ids(tmp_path, Fields({"eos_token_id": -1}, CONFIG)) == ()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert read_eos_ids(tmp_path, config) == (7, 8)
