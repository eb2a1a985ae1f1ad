"""The KV pages in the device's memory: per layer one tensor of keys and one of values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from equipoise.errors import ConfigError
from equipoise.machine import free_ram_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from equipoise.config import CacheConfig

GIB = 2**30
GPU_SHARE = 0.9
RAM_SHARE = 0.25
RAM_MOST_BYTES = 4 * GIB


@dataclass(frozen=True)
class KVShape:
    """What a layer keeps per token: keys and values of (num_kv_heads, head_dim) each."""

    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, eq=False)
class LayerPages:
    """keys, values: (num_pages, num_kv_heads, page_size, head_dim)."""

    index: int
    keys: Tensor
    values: Tensor


def count_pages(
    shapes: tuple[KVShape, ...],
    cache: CacheConfig,
    most_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    num_sharers: int = 1,
) -> tuple[int, int]:
    """How many pages to make, and the bytes of one. Raises ConfigError when not even one fits.

    By default they take a `num_sharers`-th of what one process alone on the device would.

    `most_tokens`: of all requests that can run at once; what memory holds beyond them is for cached prefixes."""
    page_bytes = sum(2 * s.num_kv_heads * s.head_dim for s in shapes) * cache.page_size * dtype.itemsize
    if cache.num_pages is not None:
        return cache.num_pages, page_bytes
    if cache.kv_memory_gb is not None:
        have, source = int(cache.kv_memory_gb * GIB), f"kv-memory-gb: {cache.kv_memory_gb}"
    else:
        have = _default_bytes(device) // num_sharers
        source = f"kv-memory-gb: the default of {have / GIB:.3f} on this machine"
    if have < page_bytes:
        raise ConfigError(f"{source} is less than one KV page of {cache.page_size} tokens ({page_bytes} bytes)")
    num_pages = have // page_bytes
    return num_pages if cache.prefix_cache else min(num_pages, -(-most_tokens // cache.page_size)), page_bytes


def make_pages(
    shapes: tuple[KVShape, ...], num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[LayerPages, ...]:
    """Zeroed pages: what a page held is multiplied by zero weights, so it must be a number.

    Raises ConfigError when the memory is not there."""
    layers = []
    try:
        for index, shape in enumerate(shapes):
            size = (num_pages, shape.num_kv_heads, page_size, shape.head_dim)
            layers.append(LayerPages(index, _zeros(size, dtype, device), _zeros(size, dtype, device)))
    except (MemoryError, RuntimeError) as error:
        raise ConfigError(f"num-pages: no memory for {num_pages} KV pages of {page_size} tokens: {error}") from error
    return tuple(layers)


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    # numpy takes zero pages from the operating system: memory is used only once it is written
    num_bytes = int(np.prod(size)) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(size)


def _default_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * GPU_SHARE)
    free_ram = free_ram_bytes()
    if free_ram is None:
        raise ConfigError("kv-memory-gb: the free RAM of this machine is not known, give a value")
    return min(int(free_ram * RAM_SHARE), RAM_MOST_BYTES)
