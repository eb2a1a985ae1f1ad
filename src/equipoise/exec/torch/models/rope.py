"""Rotary embedding: the angles of every position, as tables that are right whatever a step mixes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from equipoise.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

    from equipoise.exec.torch.weights import Fields

DEFAULT_THETA = 10000.0


@dataclass(frozen=True)
class Rope:
    """inverse_frequencies: (rotary_dim / 2,) float32; the cosines and sines are multiplied by `amplitude`."""

    inverse_frequencies: Tensor
    amplitude: float = 1.0

    def tables(self, num_positions: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """(num_positions, rotary_dim): cosines, then sines."""
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), self.inverse_frequencies)
        return (torch.cat((angles.cos(), angles.sin()), -1) * self.amplitude).to(device, dtype)


def read_rope(config: Fields, head_dim: int, max_position: int) -> Rope:
    """The rotary embedding that a config asks for, in the old and the new spelling.

    Types whose frequencies depend on the length of the sequence (dynamic, longrope) are not among them.
    Raises CheckpointError on a type that is not supported."""
    fields = config.part("rope_parameters") or config.part("rope_scaling")
    theta = config.number("rope_theta", DEFAULT_THETA)
    if fields is None:
        return Rope(_plain(theta, head_dim))
    theta = fields.number("rope_theta", theta)
    kind = fields.text("rope_type", fields.text("type", "default"))
    plain = _plain(theta, head_dim)
    if kind == "default":
        return Rope(plain)
    if kind == "linear":
        return Rope(plain / fields.number("factor"))
    if kind == "llama3":
        return Rope(_llama3(plain, fields, max_position))
    if kind == "yarn":
        return _yarn(plain, theta, head_dim, fields, max_position)
    raise CheckpointError(f"rope_type: {kind} is not supported; supported are default, linear, llama3, yarn")


def _plain(theta: float, dim: int) -> Tensor:
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def _llama3(plain: Tensor, fields: Fields, max_position: int) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended (Llama 3.1)."""
    factor = fields.number("factor")
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    original = fields.integer("original_max_position_embeddings", max_position)
    wavelengths = 2 * math.pi / plain
    blend = ((original / wavelengths - low) / (high - low)).clamp(0, 1)  # 0: stretched, 1: kept
    return (1 - blend) * plain / factor + blend * plain


def _yarn(plain: Tensor, theta: float, dim: int, fields: Fields, max_position: int) -> Rope:
    """YaRN, arXiv:2309.00071: dimensions that turn often in the original length are kept, slow ones stretched."""
    original = fields.integer("original_max_position_embeddings", max_position)
    factor = fields.number("factor", max_position / original)

    def dimension_of(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension_of(fields.number("beta_fast", 32.0))
    high = dimension_of(fields.number("beta_slow", 1.0))
    if fields.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return Rope(plain / factor * (1 - kept) + plain * kept, _yarn_amplitude(fields, factor))


def _yarn_amplitude(fields: Fields, factor: float) -> float:
    if "attention_factor" in fields:
        return fields.number("attention_factor")

    def grown(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if "mscale" in fields and "mscale_all_dim" in fields:
        return grown(fields.number("mscale")) / grown(fields.number("mscale_all_dim"))
    return grown(1.0)
