"""MKL's packed GEMM, called in the library that torch brings along.

Torch has it as ``torch.ops.mkl``, but with memory of malloc's: MKL asks for up to nine times as much as it writes, and
where malloc gives memory that was used before, all of it stays in use. Here it lies in pages of its own, of which those
that are never written to take no memory.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from pathlib import Path
from typing import Any

import torch

__all__ = ["PackedGemm", "available", "preferred"]

ROWS = 64  # that a weight is packed for; any number can be computed
ROW_MAJOR, PLAIN, TRANSPOSED, PACKED, SECOND = 101, 111, 112, 151, 162  # of mkl_cblas.h


class PackedGemm:
    """x [N, in] -> x W^T [N, out] in float32, without a gradient.

    Args:
        weight: float32 [out, in] on the CPU; it is copied.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        weight = weight.float().contiguous()
        self._mkl = _library()
        self._outputs, self._inputs = weight.shape
        size = self._mkl.cblas_sgemm_pack_get_size(SECOND, ROWS, self._outputs, self._inputs)
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        shape = (ROWS, self._outputs, self._inputs)
        self._mkl.cblas_sgemm_pack(
            ROW_MAJOR, SECOND, TRANSPOSED, *shape, 1.0, weight.data_ptr(), self._inputs, self._address
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in] -> [N, out]."""
        if x.dtype != torch.float32 or x.device.type != "cpu" or x.shape[1:] != (self._inputs,):
            raise TypeError(f"got {x.dtype} {tuple(x.shape)} on {x.device}; expected float32 [N, {self._inputs}], cpu")
        x = x.contiguous()
        out = x.new_empty(x.shape[0], self._outputs)
        shape = (x.shape[0], self._outputs, self._inputs)
        self._mkl.cblas_sgemm_compute(
            ROW_MAJOR, PLAIN, PACKED, *shape, x.data_ptr(), self._inputs, self._address, self._outputs, 0.0,
            out.data_ptr(), self._outputs,
        )  # fmt: skip
        return out


def available() -> bool:
    """Return whether this build of torch brings MKL, with the names that are needed."""
    if not torch.backends.mkl.is_available() or sys.platform != "linux":
        return False
    try:
        return bool(_library())
    except (OSError, AttributeError):
        return False


@functools.cache
def preferred() -> bool:
    """Return whether MKL is there, and this processor one that it is written for."""
    info = Path("/proc/cpuinfo")
    return available() and info.exists() and "GenuineIntel" in info.read_text()


@functools.cache
def _library() -> ctypes.CDLL:
    integer: Any = ctypes.c_int
    address, number = ctypes.c_void_p, ctypes.c_float
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    library.cblas_sgemm_pack_get_size.argtypes = [integer] * 4
    library.cblas_sgemm_pack_get_size.restype = ctypes.c_size_t
    library.cblas_sgemm_pack.argtypes = [*[integer] * 6, number, address, integer, address]
    library.cblas_sgemm_pack.restype = None
    matrices = [address, integer, address, integer, number, address, integer]
    library.cblas_sgemm_compute.argtypes = [*[integer] * 6, *matrices]
    library.cblas_sgemm_compute.restype = None
    return library
