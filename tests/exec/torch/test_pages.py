"""How many pages are made, and when there are none."""

from __future__ import annotations

import pytest
import torch

from equipoise.config import CacheConfig
from equipoise.errors import ConfigError
from equipoise.exec.torch.pages import GIB, RAM_MOST_BYTES, KVShape, count_pages, make_pages

CPU = torch.device("cpu")
SHAPES = (KVShape(2, 8), KVShape(4, 16))
TOKEN_BYTES = 2 * (2 * 8 + 4 * 16) * 4


def test_given_number() -> None:
    assert count_pages(SHAPES, CacheConfig(num_pages=5, page_size=4), 10**6, torch.float32, CPU) == (5, 4 * TOKEN_BYTES)


def test_given_memory() -> None:
    cache = CacheConfig(page_size=4, kv_memory_gb=10.5 * 4 * TOKEN_BYTES / GIB)
    assert count_pages(SHAPES, cache, 10**6, torch.float32, CPU)[0] == 10
    assert count_pages(SHAPES, cache, 10**6, torch.bfloat16, CPU)[0] == 21


def test_no_more_than_requests_can_fill_without_a_prefix_cache() -> None:
    assert count_pages(SHAPES, CacheConfig(prefix_cache=False), 33, torch.float32, CPU)[0] == 3
    assert count_pages(SHAPES, CacheConfig(prefix_cache=False, num_pages=9), 33, torch.float32, CPU)[0] == 9
    assert count_pages(SHAPES, CacheConfig(), 33, torch.float32, CPU)[0] > 3


def test_default_is_a_share_of_the_ram() -> None:
    num_pages, page_bytes = count_pages(SHAPES, CacheConfig(), 10**6, torch.float32, CPU)
    assert 0 < num_pages * page_bytes <= RAM_MOST_BYTES


def test_default_is_divided_among_those_who_share_the_memory() -> None:
    cache = CacheConfig(page_size=16)
    alone, page_bytes = count_pages(SHAPES, cache, 10**6, torch.float32, CPU)
    each, _ = count_pages(SHAPES, cache, 10**6, torch.float32, CPU, num_sharers=4)
    assert abs(each * 4 - alone) <= 0.2 * alone + 4  # free memory is measured twice
    given = CacheConfig(kv_memory_gb=10.5 * page_bytes / GIB)
    assert count_pages(SHAPES, given, 10**6, torch.float32, CPU, num_sharers=4)[0] == 10


def test_less_than_a_page() -> None:
    with pytest.raises(ConfigError, match=r"kv-memory-gb: 1e-09 is less than one KV page of 16 tokens \(10240 bytes\)"):
        count_pages(SHAPES, CacheConfig(kv_memory_gb=1e-9), 10**6, torch.float32, CPU)


def test_more_than_there_is() -> None:
    with pytest.raises(ConfigError, match="num-pages: no memory for 1000000000000"):
        make_pages(SHAPES, 10**12, 16, torch.float32, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shapes_and_zeros(dtype: torch.dtype) -> None:
    pages = make_pages(SHAPES, 3, 4, dtype, CPU)
    assert [tuple(layer.keys.shape) for layer in pages] == [(3, 2, 4, 8), (3, 4, 4, 16)]
    for layer in pages:
        for tensor in (layer.keys, layer.values):
            assert tensor.dtype == dtype
            assert tensor.is_contiguous()
            assert tensor.count_nonzero() == 0
    assert pages[0].keys.data_ptr() != pages[0].values.data_ptr()
