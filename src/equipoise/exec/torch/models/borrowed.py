"""Families that run in transformers' own modules, with our paged attention put in their place.

Only families whose every layer is full or sliding attention, and which hand all that shapes attention to the
attention function, are right here; each one in FAMILIES is shown token-exact by the tests. A recurrent or a
convolutional layer would be silently wrong.

Imports transformers, which takes seconds: load.py imports this module only for such a checkpoint.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Protocol, cast

import torch
import transformers
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from equipoise.errors import CheckpointError, InvariantError
from equipoise.exec.torch.attention import attend
from equipoise.exec.torch.ops import AttentionSpec
from equipoise.exec.torch.pages import KVShape

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

    from equipoise.exec.torch.batch import Batch
    from equipoise.exec.torch.ops import Ops
    from equipoise.exec.torch.pages import LayerPages

# Frequencies of these do not depend on the length of the sequence; longrope's do beyond the original length,
# to which a model that uses it is held.
STATIC_ROPES = frozenset({"default", "linear", "llama3", "yarn"})
BOUNDED_ROPES = frozenset({"dynamic", "longrope"})

_names = (f"equipoise_paged_{i}" for i in itertools.count())


class _Config(Protocol):
    """What is read of a transformers config."""

    vocab_size: int
    max_position_embeddings: int
    num_hidden_layers: int


class BorrowedModel:
    """A transformers model whose attention is `attend`."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        """Raises CheckpointError when transformers cannot load the folder, or attends in a way that pages cannot."""
        self._batch: Batch | None = None
        self._pages: tuple[LayerPages, ...] = ()
        self._ops: Ops | None = None
        self._specs: dict[int, AttentionSpec] = {}
        self._probed: dict[int, KVShape] = {}
        name = next(_names)
        AttentionInterface.register(name, self._attention)
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        config = _read_config(folder)
        self.vocab_size = config.vocab_size
        self.max_position = _max_position(config)
        self._module = _load(folder, config, name, dtype).to(device)
        self._probe(config.num_hidden_layers, device)

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        return tuple(self._probed[layer] for layer in range(len(self._probed)))

    def bind(self, pages: tuple[LayerPages, ...], ops: Ops) -> None:
        self._pages = pages
        self._ops = ops

    def forward(self, token_ids: Tensor, batch: Batch) -> Tensor:
        self._batch = batch
        return self._logits(token_ids, batch.positions, batch.logit_rows)

    def _logits(self, token_ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        out = self._module(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=rows
        )
        return cast("Tensor", out.logits)[0].float()

    @torch.inference_mode()
    def _probe(self, num_layers: int, device: torch.device) -> None:
        """Run one token, to see what each layer hands to attention."""
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        self._logits(zero, zero, zero)
        if sorted(self._probed) != list(range(num_layers)):
            raise CheckpointError(
                f"only {len(self._probed)} of {num_layers} layers attend over the sequence; all must, to run on pages"
            )

    def _attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **settings: object,
    ) -> tuple[Tensor, None]:
        """transformers' attention function. query (1, H, T, D), key and value (1, Hkv, T, D) -> (1, T, H, D)."""
        layer = cast("int", module.layer_idx)
        queries, keys, values = (x[0].transpose(0, 1) for x in (query, key, value))
        if self._ops is None:
            self._note(layer, keys, values, attention_mask, _spec_of(query, settings))
            return torch.zeros_like(queries)[None], None
        if self._batch is None:
            raise InvariantError("attention ran outside of a step")
        spec, pages = self._specs[layer], self._pages[layer]
        return attend(self._ops, spec, pages, queries, keys, values, self._batch)[None], None

    def _note(self, layer: int, keys: Tensor, values: Tensor, mask: Tensor | None, spec: AttentionSpec) -> None:
        if mask is not None:
            raise CheckpointError(f"layer {layer} attends under a mask of its own, which pages do not carry")
        if keys.shape != values.shape:
            raise CheckpointError(f"layer {layer} has keys and values of different sizes, which pages do not hold")
        self._probed[layer] = KVShape(keys.shape[1], keys.shape[2])
        self._specs[layer] = spec


def _spec_of(query: Tensor, settings: dict[str, object]) -> AttentionSpec:
    """How a layer attends, by the arguments of its attention function; None there stands for the usual."""
    sinks = cast("Tensor | None", settings.get("s_aux"))
    scale = cast("float | None", settings.get("scaling"))
    return AttentionSpec(
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        window=cast("int | None", settings.get("sliding_window")),
        softcap=cast("float | None", settings.get("softcap")),
        sinks=None if sinks is None else sinks.detach().float().contiguous(),
    )


def _read_config(folder: Path) -> _Config:
    try:
        return cast("_Config", AutoConfig.from_pretrained(folder, local_files_only=True))
    except Exception as error:
        raise CheckpointError(f"{folder}: transformers cannot read the config: {_one_line(error)}") from error


def _load(folder: Path, config: _Config, attention: str, dtype: torch.dtype) -> nn.Module:
    try:
        module, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            attn_implementation=attention,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they come back in the report, which names them
            output_loading_info=True,
        )
    except Exception as error:
        raise CheckpointError(f"{folder}: transformers cannot load the model: {_one_line(error)}") from error
    for name, found, asked in sorted(report["mismatched_keys"]):
        raise CheckpointError(f"{folder}: {name} has shape {tuple(found)}, config.json asks for {tuple(asked)}")
    for name in sorted(report["missing_keys"]):
        raise CheckpointError(f"{folder}: the checkpoint has no tensor {name}")
    return cast("nn.Module", module.eval())


def _max_position(config: _Config) -> int:
    """The longest sequence whose rotary embedding is the same whatever else is in the step."""
    longest = config.max_position_embeddings
    for rope in _ropes(config):
        kind = rope.get("rope_type", "default")
        if kind in BOUNDED_ROPES:
            original = rope.get("original_max_position_embeddings") or longest
            longest = min(longest, cast("int", original))
        elif kind not in STATIC_ROPES:
            allowed = ", ".join(sorted(STATIC_ROPES | BOUNDED_ROPES))
            raise CheckpointError(f"rope_type: {kind} is not supported; supported are {allowed}")
    return longest


def _ropes(config: _Config) -> list[dict[str, object]]:
    """The rope parameters: one set, or one per type of layer."""
    found = vars(config).get("rope_parameters")
    if not isinstance(found, dict):
        return []
    nested = [value for value in found.values() if isinstance(value, dict)]
    return nested or [found]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]
