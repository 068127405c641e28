"""Frozen weights in the order in which the CPU's products read them.

A product that is given its weight as a plain matrix rearranges it first, every time; for a few rows that takes as long
as the product. MKL (float32) and oneDNN (bfloat16) can keep the rearranged weight. In float32 that has a second good
side: a row then comes out the same to the bit however many others there are.
"""

from __future__ import annotations

import functools
from typing import Any, TypeAlias

import torch

from rlkit.backends.local.gemm import mkl

__all__ = ["Packed", "Product", "packed", "product"]


class Packed:
    """x [N, in] -> x W^T [N, out] without a gradient, of a weight that was rearranged and need not be kept itself.

    Args:
        weight: [out, in] on the CPU, float32 or bfloat16.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.shape = weight.shape
        self._product = mkl.Arranged(weight) if weight.dtype == torch.float32 else _onednn(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in] -> [N, out]."""
        out: torch.Tensor = self._product(x)
        return out


Product: TypeAlias = torch.Tensor | Packed  # a weight [out, in], as it is or rearranged


@torch.no_grad()
def packed(weight: torch.Tensor, place: Product | None = None) -> Product:
    """``weight`` [out, in] as products read it fastest.

    On a CPU that is a copy; where rearranged weights are not to be had, it is stored as [in, out], with which some tens
    of rows take a quarter less time. On a GPU it is the weight itself, written to ``place`` if that is given.

    >>> w = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    >>> product(torch.tensor([[1.0, 0.0]]), packed(w))
    tensor([[1., 3., 5.]])
    """
    if weight.device.type != "cpu":
        return place.copy_(weight) if isinstance(place, torch.Tensor) else weight
    return Packed(weight) if _works(weight.dtype) else weight.T.contiguous().T


def product(x: torch.Tensor, weight: Product) -> torch.Tensor:
    """The product x W^T."""
    return weight(x) if isinstance(weight, Packed) else x @ weight.t()


def _onednn(weight: torch.Tensor) -> Any:
    ops: Any = torch.ops.mkldnn  # what torch.compile uses when it freezes weights has no public name
    arranged = ops._reorder_linear_weight(weight.contiguous(), mkl.ROWS)  # noqa: SLF001
    return lambda x: ops._linear_pointwise(x, arranged, None, "none", [], "")  # noqa: SLF001


@functools.cache
def _works(dtype: torch.dtype) -> bool:
    """Whether this build of torch has rearranged weights of ``dtype``, and their products are right."""
    if dtype not in (torch.float32, torch.bfloat16) or (dtype == torch.float32 and not mkl.available()):
        return False
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 80, generator=generator).to(dtype)
    x = torch.randn(200, 80, generator=generator).to(dtype)
    expected = x.double() @ weight.double().t()
    bound = float(expected.abs().max()) * (1e-5 if dtype == torch.float32 else 1e-2)
    try:
        arranged = Packed(weight)
        found = {rows: arranged(x[:rows]) for rows in (1, 2, mkl.ROWS, 200)}
    except (AttributeError, RuntimeError, TypeError, NotImplementedError, OSError):
        return False
    return all(bool((y.double() - expected[:rows]).abs().max() < bound) for rows, y in found.items())
