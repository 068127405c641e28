"""Matrix products: prepacked weights on a CPU, weights as they lie, and float32 beside weights in bfloat16.

A product with a plain weight matrix rearranges it first, every time; for a few rows that takes as long as the product.
oneDNN can keep the rearranged weight (``OneDNNWeight``). In float32 its products are batch-invariant, rearranged or
not: a row has the same bits in any multiple of ``ROW_UNIT`` rows. MKL's are not.

On GPUs, products of bfloat16 weights have results in float32: sums in float32 are not rounded again. The output head is
computed in float32, but its weight is a model's, in bfloat16. ``wide_matmul`` needs no float32 copy of it and no
products in float32, which are slow there. A float32 number with its 24 bits is the sum of three in bfloat16 with 8 bits
each, so that x W^T = x1 W^T + x2 W^T + x3 W^T, with an error as of a product in float32.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TypeAlias

import torch
import torch.nn.functional as F

from rlkit._fallback import NotSupportedHere, Outcome, try_path

__all__ = [
    "ROW_UNIT",
    "OneDNNWeight",
    "PrepackedCopies",
    "Weight",
    "add_product",
    "can_prepack",
    "keep_address",
    "matmul",
    "plain_matmul",
    "prepack",
    "product",
    "upcast",
    "wide_matmul",
    "works",
]

ROW_UNIT = 4
ROWS = 64  # that a weight is packed for; any number can be computed


def plain_matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x W^T + bias, without a gradient.

    In float32 on a CPU that MKL is not written for, oneDNN computes 1.05 to 1.5 times as much in the same time, with
    weights of either layout.

    Args:
        x: [..., in].
        weight: [out, in], of any strides, in the same dtype.
        bias: [out].

    >>> plain_matmul(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]), torch.tensor([1.0]))
    tensor([[12.]])
    """
    if x.dtype == torch.float32 and x.device.type == "cpu" and x.numel() and _preferred():
        return _plain_onednn(x, weight, bias)
    return F.linear(x, weight, bias)


def _plain_onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    # torch.compile computes linear layers with it; it has no public name.
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")  # noqa: SLF001
    return out if bias is None else out.add_(bias)


@functools.cache
def _preferred() -> bool:
    """Return whether this build of torch has oneDNN's products, they are right, and MKL's are not the better ones."""
    if _made_by_intel() or not torch.backends.mkldnn.is_available():
        return False
    return try_path("oneDNN's product", _compare_plain, "MKL computes it", refusals=(AttributeError, RuntimeError))


def _made_by_intel() -> bool:
    info = Path("/proc/cpuinfo")
    return info.exists() and "GenuineIntel" in info.read_text()


def _compare_plain() -> Outcome:
    generator = torch.Generator().manual_seed(0)
    weight, x, other = (torch.randn(size, generator=generator) for size in ((48, 80), (200, 80), (200, 48)))
    offs = []
    for a, b in ((x, weight), (x[:1], weight), (other, weight.t()), (other[:, 8:], weight.t()[:, 8:])):
        expected = a.double() @ b.double().t()
        offs.append((_plain_onednn(a, b, None).double() - expected).abs().max() / expected.abs().max())
    off = float(torch.stack(offs).max())
    return Outcome(off <= 1e-5, f"off by {off:.2g} > 1e-5")


FEW = 64  # up to as many rows the three products are one, which reads the weight once


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Map [n, k] and [k, m] in bfloat16 to [n, m] in float32."""
    return torch.mm(x, w, out_dtype=torch.float32)


def add_product(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return y + x w, of [n, m] in float32 and [n, k], [k, m] in bfloat16."""
    return torch.addmm(y, x, w, out_dtype=torch.float32)


def wide_matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x W^T in float32, of x [..., in] in float32 and W [out, in] in bfloat16, without a gradient."""
    if x.ndim > 2:
        return wide_matmul(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])
    first = x.to(torch.bfloat16)
    rest = x - first
    second = rest.to(torch.bfloat16)
    third = (rest - second).to(torch.bfloat16)
    w = weight.t()
    if len(x) <= FEW:
        return product(torch.cat([first, second, third]), w).view(3, len(x), -1).sum(0)
    return add_product(add_product(product(third, w), second, w), first, w)  # the smallest first


def works(device: torch.device) -> bool:
    """Return whether these products can be computed on ``device``, and are right."""
    return device.type == "meta" or (device.type == "cuda" and _right(device))


@functools.cache
def _right(device: torch.device) -> bool:
    slower = "the output head has a copy in float32"
    return try_path(f"products of bfloat16 in float32 on {device}", lambda: _compare_mixed(device), slower)


def _compare_mixed(device: torch.device) -> Outcome:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 80, generator=generator).to(torch.bfloat16)
    try:
        product(weight.to(device), weight.t().to(device))
    except (RuntimeError, TypeError) as error:  # torch before 2.8, or a device without them
        raise NotSupportedHere(str(error)) from error
    offs = []
    for rows in (1, 2, FEW, 2 * FEW):
        x = torch.randn(rows, 80, generator=generator)
        expected = x.double() @ weight.double().t()
        y = wide_matmul(x.to(device), weight.to(device)).cpu()
        added = add_product(y.to(device), x.to(device, torch.bfloat16), weight.t().to(device)).cpu()
        both = expected + x.to(torch.bfloat16).double() @ weight.double().t()
        offs += [(a - b).abs().max() for a, b in ((y, expected), (added, both))]
    off = float(torch.stack(offs).max())
    return Outcome(off < 1e-4, f"off by {off:.2g}, at most 1e-4")


class OneDNNWeight:
    """A weight that oneDNN multiplies by, without a gradient: x [..., in] -> x W^T [..., out].

    Args:
        weight: [out, in] on the CPU, float32 or bfloat16.
        copy: into the order that is read fastest; the weight itself need not be kept then.
    """

    def __init__(self, weight: torch.Tensor, *, copy: bool = True) -> None:
        self.shape, self._read = weight.shape, weight
        if copy:  # torch has no public name for it
            self._read = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS)  # noqa: SLF001

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Map [..., in] to [..., out]; ``bias`` [out] is added."""
        return _plain_onednn(x, self._read, bias)


Weight: TypeAlias = torch.Tensor | OneDNNWeight  # [out, in]


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
        if not can_prepack(weight):
            return weight
        key = (weight.data_ptr(), *weight.shape, *weight.stride())
        if key not in self._copies:
            self._copies[key] = weight, OneDNNWeight(weight)
        return self._copies[key][1]


def can_prepack(weight: torch.Tensor) -> bool:
    """Return whether oneDNN multiplies by ``weight`` here."""
    return weight.device.type == "cpu" and _works(weight.dtype)


@torch.no_grad()
def prepack(weight: torch.Tensor, place: Weight | None = None) -> Weight:
    """Return ``weight`` [out, in] in the layout that ``matmul`` reads fastest.

    On a CPU that is a prepacked copy; where there is none, it is stored as [in, out], with which some tens of rows take
    a quarter less time. On a GPU it is the weight itself, written to ``place`` if that fits.

    >>> w = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    >>> matmul(torch.tensor([[1.0, 0.0]]), prepack(w))
    tensor([[1., 3., 5.]])
    """
    if weight.device.type != "cpu":
        return keep_address(weight, place)
    return OneDNNWeight(weight) if can_prepack(weight) else weight.T.contiguous().T


def matmul(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x W^T + bias, without a gradient; in float32 where x is, also with a weight in bfloat16."""
    if isinstance(weight, OneDNNWeight):
        return weight(x, bias)
    if x.dtype == weight.dtype:
        return plain_matmul(x, weight, bias)
    y = wide_matmul(x, weight)
    return y if bias is None else y + bias


@functools.cache
def _works(dtype: torch.dtype) -> bool:
    """Return whether this build of torch can prepack weights of ``dtype``, and their products are right."""
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    refusals = AttributeError, RuntimeError  # torch without oneDNN, a processor without bfloat16
    path, slower = f"prepacked weights in {dtype}", "products of few rows take longer"
    return try_path(path, lambda: _compare(dtype), slower, refusals=refusals)


def _compare(dtype: torch.dtype) -> Outcome:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 80, generator=generator).to(dtype)
    x = torch.randn(200, 80, generator=generator).to(dtype)
    expected = x.double() @ weight.double().t()
    bound = float(expected.abs().max()) * (1e-5 if dtype == torch.float32 else 1e-2)
    packed = OneDNNWeight(weight)
    products = {rows: packed(x[:rows]) for rows in (1, 2, ROWS, 200)}
    off = float(torch.stack([(y.double() - expected[:rows]).abs().max() for rows, y in products.items()]).max())
    return Outcome(off < bound, f"off by {off:.2g}, at most {bound:.2g}")


def upcast(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` in float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def keep_address(new: torch.Tensor, old: Weight | None) -> torch.Tensor:
    """Copy ``new`` into the old buffer where it fits, so that recorded CUDA graphs stay valid."""
    if isinstance(old, torch.Tensor) and old.shape == new.shape and old.dtype == new.dtype:
        return old.copy_(new)
    return new
