"""The C kernels of kernels.c: compiled once per machine with the system's compiler, called through ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from equipoise.exec.torch.torch_ops import TorchOps, torch_linear

if TYPE_CHECKING:
    from torch import Tensor

    from equipoise.exec.torch.batch import Singles
    from equipoise.exec.torch.ops import AttentionSpec, Ops
    from equipoise.exec.torch.pages import KVShape, LayerPages

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.c")
# Compiled and linked apart: linking with -ffast-math would flush denormals in the whole process.
COMPILE_FLAGS = ("-O3", "-march=native", "-ffast-math", "-fopenmp", "-fPIC", "-std=c11")
LINK_FLAGS = ("-shared", "-fopenmp")
COMPILE_TIMEOUT_S = 120
MAX_HEAD_DIM = 256
LINEAR_MOST_TOKENS = 64
"""Linear layers of more tokens go to torch, whose MKL is the faster one then. Not on AMD processors, where MKL
makes no use of AVX-512: there ours is 1.3 to 3.3 times as fast at every size (benchmarks/linear_cpu.py)."""

_I = ctypes.c_int64
_P = ctypes.c_void_p
_F = ctypes.c_float
_SIGNATURES: dict[str, list[type]] = {
    "paged_attention": [_P, _I, _P, _P, _P, _P, _I, _P, _I, _I, _P, _I],
    "store_kv": [_P, _P, _I, _I, _I, _I, _P, _P, _P, _P, _I, _I],
    "rotate": [_P, _I, _I, _I, _I, _P, _P, _I, _P, _F, _I],
    "rms_norm": [_P, _P, _P, _I, _I, _F, _I],
    "silu_mul": [_P, _P, _I, _I, _I],
    "linear": [_P, _P, _P, _P, _I, _I, _I, _I, _I],
}


class _Layer(ctypes.Structure):
    _fields_ = (
        ("keys", _P),
        ("values", _P),
        ("num_kv_heads", _I),
        ("group", _I),
        ("head_dim", _I),
        ("page_size", _I),
        ("window", _I),
        ("scale", _F),
        ("softcap", _F),
        ("sinks", _P),
    )


def choose_ops(device: torch.device, dtype: torch.dtype, shapes: tuple[KVShape, ...], num_threads: int) -> Ops:
    """The C kernels on a CPU in float32, torch otherwise and where they do not compile."""
    if device.type != "cpu" or dtype != torch.float32 or any(s.head_dim > MAX_HEAD_DIM for s in shapes):
        return TorchOps()
    try:
        return NativeOps(num_threads)
    except CompileError as error:
        logger.warning("no C kernels, decoding runs in torch and is slower: %s", error)
        return TorchOps()


class CompileError(Exception):
    """The kernels could not be compiled or loaded; the message is the compiler's."""


class NativeOps:
    """The operations of `equipoise.exec.torch.ops.Ops` on contiguous float32 CPU tensors."""

    def __init__(self, num_threads: int, cache_dir: Path | None = None) -> None:
        """Compile, unless `cache_dir` (by default one in the user's home) holds the library. Raises CompileError."""
        self._num_threads = num_threads
        library = _load(cache_dir)
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
        self._paged_attention = library.paged_attention
        self._store_kv = library.store_kv
        self._rotate = library.rotate
        self._rms_norm = library.rms_norm
        self._silu_mul = library.silu_mul
        self._linear = library.linear
        self._linear_most_tokens = _linear_most_tokens() if library.has_linear() else 0
        self._layers: dict[LayerPages, _Layer] = {}

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        self._rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.shape[0], x.shape[1], eps, self._num_threads)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        num_tokens, width = gate_up.shape
        out = gate_up.new_empty(num_tokens, width // 2)
        self._silu_mul(gate_up.data_ptr(), out.data_ptr(), num_tokens, width // 2, self._num_threads)
        return out

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, add_to: Tensor | None = None) -> Tensor:
        num_tokens, size = x.shape
        if num_tokens > self._linear_most_tokens:
            return torch_linear(x, weight, bias, add_to)
        num_rows = weight.shape[0]
        out = x.new_empty(num_tokens, num_rows) if add_to is None else add_to
        self._linear(
            x.data_ptr(),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            num_tokens,
            num_rows,
            size,
            add_to is not None,
            self._num_threads,
        )
        return out

    def rotate(
        self, heads: Tensor, positions: Tensor, tables: Tensor, norm: Tensor | None = None, eps: float = 0.0
    ) -> None:
        num_tokens, num_heads, dim = heads.shape
        self._rotate(
            heads.data_ptr(),
            num_tokens,
            heads.stride(0),
            num_heads,
            dim,
            positions.data_ptr(),
            tables.data_ptr(),
            tables.shape[1],
            None if norm is None else norm.data_ptr(),
            eps,
            self._num_threads,
        )

    def store_kv(self, pages: LayerPages, keys: Tensor, values: Tensor, page_ids: Tensor, offsets: Tensor) -> None:
        if keys.stride() != values.stride() or keys.stride(2) != 1:
            keys, values = keys.contiguous(), values.contiguous()
        num_tokens, num_kv_heads, dim = keys.shape
        self._store_kv(
            pages.keys.data_ptr(),
            pages.values.data_ptr(),
            num_tokens,
            num_kv_heads,
            pages.keys.shape[2],
            dim,
            page_ids.data_ptr(),
            offsets.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            keys.stride(0),
            keys.stride(1),
        )

    def attend_singles(
        self, spec: AttentionSpec, pages: LayerPages, queries: Tensor, singles: Singles, out: Tensor
    ) -> None:
        if queries.stride(2) != 1:
            queries = queries.contiguous()
        self._paged_attention(
            ctypes.addressof(self._layer(spec, pages, queries.shape[1])),
            singles.count,
            singles.tokens.data_ptr(),
            singles.rows.data_ptr(),
            singles.lens.data_ptr(),
            singles.tables.data_ptr(),
            singles.tables.shape[1],
            queries.data_ptr(),
            queries.stride(0),
            queries.stride(1),
            out.data_ptr(),
            self._num_threads,
        )

    def _layer(self, spec: AttentionSpec, pages: LayerPages, num_heads: int) -> _Layer:
        layer = self._layers.get(pages)
        if layer is None:
            _, num_kv_heads, page_size, dim = pages.keys.shape
            layer = _Layer(
                pages.keys.data_ptr(),
                pages.values.data_ptr(),
                num_kv_heads,
                num_heads // num_kv_heads,
                dim,
                page_size,
                spec.window or 0,
                spec.scale,
                spec.softcap or 0.0,
                None if spec.sinks is None else spec.sinks.data_ptr(),
            )
            self._layers[pages] = layer
        return layer


def _load(cache_dir: Path | None) -> ctypes.CDLL:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise CompileError("no C compiler (cc, gcc or clang) on the path")
    folder = cache_dir if cache_dir is not None else _user_cache()
    if folder is not None:
        return _load_from(folder, compiler)
    with tempfile.TemporaryDirectory() as private:  # the library stays mapped after its file is gone
        return _load_from(Path(private), compiler)


def _load_from(folder: Path, compiler: str) -> ctypes.CDLL:
    path = folder / f"kernels-{_fingerprint(compiler)}.so"
    if path.exists():
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            logger.warning("the compiled kernels do not load and are compiled anew: %s", error)
    _compile(compiler, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise CompileError(f"{path} does not load: {error}") from error


def _user_cache() -> Path | None:
    """A folder of the user's own to keep the library in, None when there is no home to write to."""
    try:
        folder = Path.home() / ".cache" / "equipoise" / "kernels"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    return folder if os.access(folder, os.W_OK) else None


def _fingerprint(compiler: str) -> str:
    """Differs whenever a library compiled before might not fit: source, flags, compiler, processor."""
    digest = hashlib.sha256(SOURCE.read_bytes())
    digest.update(" ".join((compiler, *COMPILE_FLAGS, *LINK_FLAGS, platform.machine(), platform.processor())).encode())
    digest.update(_cpuinfo("flags", "Features").encode())
    return digest.hexdigest()[:16]


def _linear_most_tokens() -> int:
    return sys.maxsize if "AuthenticAMD" in _cpuinfo("vendor_id") else LINEAR_MOST_TOKENS


def _cpuinfo(*fields: str) -> str:
    """The first line of /proc/cpuinfo that starts with one of `fields`; empty where there is none."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line for line in lines if line.startswith(fields)), "")


def _compile(compiler: str, path: Path) -> None:
    """Into a folder of its own, then renamed: processes that compile at once do not meet."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            compiled, linked = Path(folder) / "kernels.o", Path(folder) / "kernels.so"
            _call([compiler, *COMPILE_FLAGS, "-c", str(SOURCE), "-o", str(compiled)])
            _call([compiler, *LINK_FLAGS, str(compiled), "-o", str(linked), "-lm"])
            os.replace(linked, path)
    except OSError as error:
        raise CompileError(f"{path.parent}: {error}") from error
    logger.info("compiled the CPU kernels into %s", path)


def _call(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise CompileError(f"{command[0]} took more than {COMPILE_TIMEOUT_S} s") from error
    if done.returncode != 0:
        raise CompileError(f"{command[0]}: {done.stderr.strip()[:500]}")
