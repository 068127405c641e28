"""Prepacked GEMM weights for CPUs: oneDNN's, on Intel's processors in float32 MKL's.

A product with a plain weight matrix rearranges it first, every time; for a few rows that takes as long as the product.
Both libraries can keep the rearranged weight. In float32 this also makes products batch-invariant: a row has the same
bits however many rows are beside it. MKL is written for its maker's processors; on others oneDNN is faster, by a third
for 64 rows and twice for 8.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeAlias

import torch

from rlkit.backends.local.gemm import mixed, mkl

__all__ = ["Prepacked", "PrepackedCopies", "Weight", "matmul", "prepack"]


class Prepacked:
    """x [N, in] -> x W^T [N, out] without a gradient. The weight itself need not be kept.

    Args:
        weight: [out, in] on the CPU, float32 or bfloat16.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.shape = weight.shape
        self._matmul = mkl.PackedGemm(weight) if _by_mkl(weight.dtype) else _onednn(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in] -> [N, out]."""
        return self._matmul(x)


Weight: TypeAlias = torch.Tensor | Prepacked  # [out, in]


class PrepackedCopies:
    """Prepacked copies of weights that are never written: one of each, for all who multiply by it.

    >>> w, copies = torch.eye(3), PrepackedCopies()
    >>> copies.of(w) is copies.of(w)
    True
    """

    def __init__(self) -> None:
        self._copies: dict[tuple[int, ...], tuple[torch.Tensor, Weight]] = {}  # by address, so the weights have to stay

    def of(self, weight: torch.Tensor) -> Weight:
        """Return the copy of ``weight`` [out, in], or itself where there is nothing to prepack for."""
        if weight.device.type != "cpu" or not _works(weight.dtype):
            return weight
        key = (weight.data_ptr(), *weight.shape, *weight.stride())
        if key not in self._copies:
            self._copies[key] = weight, Prepacked(weight)
        return self._copies[key][1]


@torch.no_grad()
def prepack(weight: torch.Tensor, place: Weight | None = None) -> Weight:
    """Return ``weight`` [out, in] in the layout that ``matmul`` reads fastest.

    On a CPU that is a prepacked copy; where there is none, it is stored as [in, out], with which some tens of rows take
    a quarter less time. On a GPU it is the weight itself, written to ``place`` if that is a tensor.

    >>> w = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    >>> matmul(torch.tensor([[1.0, 0.0]]), prepack(w))
    tensor([[1., 3., 5.]])
    """
    if weight.device.type != "cpu":
        return place.copy_(weight) if isinstance(place, torch.Tensor) else weight
    return Prepacked(weight) if _works(weight.dtype) else weight.T.contiguous().T


def matmul(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Return x W^T; in float32 where x is, also with a weight in bfloat16."""
    if isinstance(weight, Prepacked):
        return weight(x)
    if x.dtype == torch.float32 and weight.dtype == torch.bfloat16:
        return mixed.wide_matmul(x, weight)
    return x @ weight.t()


def _by_mkl(dtype: torch.dtype) -> bool:
    return dtype == torch.float32 and mkl.preferred()


def _onednn(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    ops = torch.ops.mkldnn  # what torch.compile uses when it freezes weights has no public name
    packed = ops._reorder_linear_weight(weight.contiguous(), mkl.ROWS)  # noqa: SLF001

    def multiply(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = ops._linear_pointwise(x, packed, None, "none", [], "")  # noqa: SLF001
        return out

    return multiply


@functools.cache
def _works(dtype: torch.dtype) -> bool:
    """Return whether this build of torch can prepack weights of ``dtype``, and their products are right."""
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 80, generator=generator).to(dtype)
    x = torch.randn(200, 80, generator=generator).to(dtype)
    expected = x.double() @ weight.double().t()
    bound = float(expected.abs().max()) * (1e-5 if dtype == torch.float32 else 1e-2)
    try:
        packed = Prepacked(weight)
        products = {rows: packed(x[:rows]) for rows in (1, 2, mkl.ROWS, 200)}
    except (AttributeError, RuntimeError, TypeError, NotImplementedError, OSError):
        return False
    return all(bool((y.double() - expected[:rows]).abs().max() < bound) for rows, y in products.items())
