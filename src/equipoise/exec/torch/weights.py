"""A Hugging Face model folder: its config, its stop tokens and its safetensors. Every fault is a CheckpointError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from equipoise.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_INTEGER = 2**31 - 1

_T = TypeVar("_T", int, float, str, bool)


class Fields:
    """A JSON object read field by field; a wrong or missing one is a CheckpointError that names it."""

    def __init__(self, values: dict[str, object], source: str) -> None:
        self._values = values
        self._source = source

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def says(self, name: str) -> bool:
        """True when the field is there, be it null."""
        return name in self._values

    def integer(self, name: str, default: int | None = None, *, low: int = 1) -> int:
        """A whole number of at least `low`."""
        value = self._get(name, int, default)
        if value < low:
            raise CheckpointError(f"{self._source}: {name} is {value}, it must be at least {low}")
        if value > MAX_INTEGER:
            raise CheckpointError(f"{self._source}: {name} is {value}, it must be at most {MAX_INTEGER}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A float; whole numbers are taken too."""
        value = self._values.get(name)
        return float(value) if type(value) is int else self._get(name, float, default)

    def text(self, name: str, default: str | None = None) -> str:
        return self._get(name, str, default)

    def flag(self, name: str, default: bool | None = None) -> bool:
        return self._get(name, bool, default)

    def texts(self, name: str) -> list[str] | None:
        """A list of strings, None when it is not given."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise CheckpointError(f"{self._source}: {name} must be a list of strings")
        return value

    def integers(self, name: str) -> tuple[int, ...] | None:
        """One whole number or a list of them, None when it is not given."""
        value = self._values.get(name)
        if value is None:
            return None
        items = value if isinstance(value, list) else [value]
        if not all(type(item) is int for item in items):
            raise CheckpointError(f"{self._source}: {name} is {value!r}, it must be a token id or a list of them")
        return tuple(items)

    def part(self, name: str) -> Fields | None:
        """A JSON object inside this one, None when it is not given."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise CheckpointError(f"{self._source}: {name} must be an object")
        return Fields(value, f"{self._source}: {name}")

    def _get(self, name: str, kind: type[_T], default: _T | None) -> _T:
        value = self._values.get(name)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self._source}: {name} is missing")
        if type(value) is not kind:
            raise CheckpointError(f"{self._source}: {name} is {value!r}, it must be of type {kind.__name__}")
        return value


def find_model(model: str) -> Path:
    """The folder `model`. Raises CheckpointError when it is none or holds no checkpoint."""
    folder = Path(model)
    if not folder.is_dir():
        raise CheckpointError(f"model: {model} is not a folder; the folder of a Hugging Face checkpoint is needed")
    if not (folder / CONFIG).is_file():
        raise CheckpointError(f"model: {folder} has no {CONFIG}")
    return folder


def read_fields(path: Path) -> Fields:
    """The JSON object in `path`."""
    return Fields(_read_object(path), str(path))


def read_eos_ids(folder: Path, config: Fields) -> tuple[int, ...]:
    """Stop tokens: of generation_config.json, else of config.json."""
    path = folder / "generation_config.json"
    found = read_fields(path).integers("eos_token_id") if path.is_file() else None
    if found is None:
        found = config.integers("eos_token_id")
    return tuple(token for token in found or () if token >= 0)  # some checkpoints say -1 for "none"


def refuse_quantized(config: Fields) -> None:
    """Raise CheckpointError for weights that are not plain floats."""
    quantization = config.part("quantization_config")
    if quantization is not None:
        method = quantization.text("quant_method", "unknown")
        raise CheckpointError(f"quantization_config: {method} weights are not supported, give the model in float")


class Weights:
    """The tensors of a checkpoint by name, each read from its file when it is asked for."""

    def __init__(self, folder: Path) -> None:
        """Open the files' headers. Raises CheckpointError when one is missing or corrupt."""
        self._folder = folder
        self._files: dict[str, safe_open] = {}
        self._where: dict[str, str] = {}
        for name in _shards(folder):
            opened = self._open(name)
            self._files[name] = opened
            self._where.update(dict.fromkeys(opened.keys(), name))
        self._unread = set(self._where)

    def __contains__(self, name: str) -> bool:
        return name in self._where

    @property
    def unread(self) -> list[str]:
        """Names that were never asked for."""
        return sorted(self._unread)

    def read(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor of just this `shape`. Raises CheckpointError when it is missing or of another."""
        if name not in self._where:
            raise CheckpointError(f"{self._folder}: the checkpoint has no tensor {name}")
        file = self._where[name]
        try:
            found = self._files[file].get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(f"{self._folder / file}: {name} cannot be read: {error}") from error
        self._unread.discard(name)
        if found.shape != torch.Size(shape):
            raise CheckpointError(
                f"{self._folder / file}: {name} has shape {tuple(found.shape)}, {CONFIG} asks for {tuple(shape)}"
            )
        if not found.is_floating_point():
            raise CheckpointError(f"{self._folder / file}: {name} is of type {found.dtype}, it must be a float")
        # a copy: the tensor lies in the mapped file
        return torch.empty(found.shape, dtype=dtype, device=device).copy_(found)

    def read_fused(
        self, names: Sequence[str], shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Tensors one below the other, as one."""
        return torch.cat([self.read(n, s, dtype, device) for n, s in zip(names, shapes, strict=True)])

    def dtype(self) -> torch.dtype:
        """The type that the first tensor is stored in."""
        name = next(iter(self._where))
        tensor: Tensor = self._files[self._where[name]].get_tensor(name)
        return tensor.dtype

    def _open(self, name: str) -> safe_open:
        path = self._folder / name
        if not path.is_file():
            raise CheckpointError(f"{path}: the file is missing")
        try:
            return safe_open(path, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: not a whole safetensors file: {error}") from error


def _shards(folder: Path) -> list[str]:
    if (folder / SINGLE).is_file():
        return [SINGLE]
    if not (folder / INDEX).is_file():
        raise CheckpointError(f"model: {folder} has neither {SINGLE} nor {INDEX}")
    weight_map = _read_object(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder / INDEX}: weight_map must be an object that is not empty")
    return sorted({str(name) for name in weight_map.values()})


def _read_object(path: Path) -> dict[str, object]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: must be a JSON object")
    return found
