"""The C kernels against torch."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import pytest
import torch

from equipoise.exec.torch import native
from equipoise.exec.torch.native import CompileError, NativeOps, choose_ops
from equipoise.exec.torch.pages import KVShape, make_pages
from equipoise.exec.torch.torch_ops import TorchOps

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")
NATIVE = NativeOps(2)
TORCH = TorchOps()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(3)


@pytest.mark.parametrize("size", [(1, 7), (3, 64), (200, 300)])
def test_rms_norm(size: tuple[int, int]) -> None:
    x, weight = torch.randn(size), torch.randn(size[1])
    torch.testing.assert_close(NATIVE.rms_norm(x, weight, 1e-5), TORCH.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("size", [(1, 6), (5, 64), (100, 2000)])
def test_silu_mul(size: tuple[int, int]) -> None:
    gate_up = torch.randn(size) * 20
    torch.testing.assert_close(NATIVE.silu_mul(gate_up), TORCH.silu_mul(gate_up))


def test_silu_of_extremes() -> None:
    gates = torch.tensor([-1e4, -200.0, -89.0, -80.0, 0.0, 80.0, 200.0, 1e4])
    gate_up = torch.cat((gates, torch.ones(8)))[None]
    torch.testing.assert_close(NATIVE.silu_mul(gate_up), TORCH.silu_mul(gate_up))


def test_not_a_number_is_not_hidden() -> None:
    """The sampler ends a request whose logits are not finite: kernels must hand such numbers on."""
    bad = torch.full((1, 32), math.nan)
    good = torch.ones(1, 32)
    assert NATIVE.silu_mul(torch.cat((bad, good), 1)).isnan().all()
    assert NATIVE.rms_norm(bad, torch.ones(32), 1e-6).isnan().all()
    assert NATIVE.linear(bad, torch.ones(4, 32)).isnan().all()


@pytest.mark.parametrize("rotary_dim", [16, 12])
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 80])
def test_rotate(rotary_dim: int, with_norm: bool, num_tokens: int) -> None:
    packed = torch.randn(num_tokens, 5, 16)
    tables, positions = torch.randn(50, rotary_dim), torch.randint(50, (num_tokens,))
    norm = torch.randn(16) if with_norm else None
    ours, theirs = packed.clone(), packed.clone()
    NATIVE.rotate(ours[:, 1:4], positions, tables, norm, 1e-6)
    TORCH.rotate(theirs[:, 1:4], positions, tables, norm, 1e-6)
    torch.testing.assert_close(ours, theirs)
    assert torch.equal(ours[:, 0], packed[:, 0])
    assert torch.equal(ours[:, 4], packed[:, 4])
    assert not torch.equal(ours[:, 1:4], packed[:, 1:4])


@pytest.mark.parametrize("strides_differ", [False, True])
def test_store_kv(strides_differ: bool) -> None:
    shape = KVShape(2, 8)
    packed = torch.randn(6, 4, 8)
    keys, values = packed[:, :2], packed[:, 2:]
    if strides_differ:
        values = values.clone()
    page_ids, offsets = torch.tensor([3, 3, 0, 1, 1, 2]), torch.tensor([0, 1, 3, 2, 3, 0])
    stored = []
    for ops in (NATIVE, TORCH):
        (pages,) = make_pages((shape,), 5, 4, torch.float32, CPU)
        ops.store_kv(pages, keys, values, page_ids, offsets)
        stored.append(pages)
    assert torch.equal(stored[0].keys, stored[1].keys)
    assert torch.equal(stored[0].values, stored[1].values)
    assert torch.equal(stored[0].keys[3, :, 1], keys[1])
    assert stored[0].values[4].count_nonzero() == 0


def test_compiled_once(tmp_path: Path) -> None:
    NativeOps(1, tmp_path)
    (first,) = tmp_path.iterdir()
    stamp = first.stat().st_mtime_ns
    NativeOps(1, tmp_path)
    assert [path.stat().st_mtime_ns for path in tmp_path.iterdir()] == [stamp]


@pytest.mark.parametrize("home", ["is-a-file", "nowhere-that-can-be/made"])
def test_without_a_home_the_kernels_are_compiled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    (tmp_path / "is-a-file").write_text("")
    (tmp_path / "nowhere-that-can-be").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / home))
    ops = NativeOps(1)
    assert ops.rms_norm(torch.ones(1, 4), torch.ones(4), 1e-6).tolist() == [pytest.approx([1.0] * 4)]


def test_corrupt_library_is_compiled_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    NativeOps(1, tmp_path / "good")
    (library,) = (tmp_path / "good").iterdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / library.name).write_bytes(b"not a library")
    ops = NativeOps(1, tmp_path / "bad")
    assert ops.rms_norm(torch.ones(1, 4), torch.ones(4), 1e-6).tolist() == [pytest.approx([1.0] * 4)]
    assert "compiled anew" in caplog.text


def test_source_that_does_not_compile_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "broken.c"
    source.write_text("int f( {")
    monkeypatch.setattr(native, "SOURCE", source)
    with pytest.raises(CompileError, match="error"):
        NativeOps(1, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_without_a_compiler_torch_serves_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        ops = choose_ops(CPU, torch.float32, (KVShape(1, 64),), 1)
    assert isinstance(ops, TorchOps)
    assert "no C compiler" in caplog.text


def test_choice() -> None:
    assert isinstance(choose_ops(CPU, torch.float32, (KVShape(1, 64),), 1), NativeOps)
    assert isinstance(choose_ops(CPU, torch.bfloat16, (KVShape(1, 64),), 1), TorchOps)
    assert isinstance(choose_ops(CPU, torch.float32, (KVShape(1, 512),), 1), TorchOps)


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 6, 7, 13, 64])
@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (7, 15), (4, 16), (97, 40), (300, 768), (5, 70000)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(num_tokens: int, num_rows: int, size: int, with_bias: bool) -> None:
    x, weight = torch.randn(num_tokens, size), torch.randn(num_rows, size) * size**-0.5
    bias = torch.randn(num_rows) if with_bias else None
    torch.testing.assert_close(NATIVE.linear(x, weight, bias), TORCH.linear(x, weight, bias), atol=2e-5, rtol=1e-4)
    start = torch.randn(num_tokens, num_rows)
    ours, theirs = start.clone(), start.clone()
    assert NATIVE.linear(x, weight, bias, add_to=ours) is ours
    assert TORCH.linear(x, weight, bias, add_to=theirs) is theirs
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


def test_linear_of_many_tokens_is_right_whoever_computes_it() -> None:
    x, weight = torch.randn(300, 32), torch.randn(50, 32)
    torch.testing.assert_close(NATIVE.linear(x, weight), TORCH.linear(x, weight))
