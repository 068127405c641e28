"""Matrix products: prepacked weights on a CPU, weights as they lie, and how many rows make a product batch-invariant.

A product with a plain weight matrix rearranges it first, every time; for a few rows that takes as long as the product.
oneDNN can keep the rearranged weight (``Prepacked``). In float32 this also makes products batch-invariant: a row has
the same bits however many rows the batch has.

On GPUs, products of bfloat16 weights have results in float32: sums in float32 are not rounded again. The output head is
computed in float32, but its weight is a model's, in bfloat16. ``wide_matmul`` needs no float32 copy of it and no
products in float32, which are slow there. A float32 number with its 24 bits is the sum of three in bfloat16 with 8 bits
each, so that x W^T = x1 W^T + x2 W^T + x3 W^T, with an error as of a product in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

import torch
import torch.nn.functional as F

from rlkit._fallback import NotSupportedHere, Outcome, try_path

__all__ = [
    "MAX_ROWS",
    "Prepacked",
    "PrepackedCopies",
    "Weight",
    "add_product",
    "invariant_row_multiple",
    "keep_address",
    "matmul",
    "padding_unit",
    "plain_matmul",
    "prepack",
    "product",
    "upcast",
    "wide_matmul",
    "works",
]

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


class Prepacked:
    """x [N, in] -> x W^T [N, out] without a gradient. The weight itself need not be kept.

    Args:
        weight: [out, in] on the CPU, float32 or bfloat16.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.shape = weight.shape
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS)  # noqa: SLF001  # no public name

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Map [..., in] to [..., out]; ``bias`` [out] is added."""
        return _plain_onednn(x, self._packed, bias)


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


def matmul(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x W^T + bias, without a gradient; in float32 where x is, also with a weight in bfloat16."""
    if isinstance(weight, Prepacked):
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
    packed = Prepacked(weight)
    products = {rows: packed(x[:rows]) for rows in (1, 2, ROWS, 200)}
    off = float(torch.stack([(y.double() - expected[:rows]).abs().max() for rows, y in products.items()]).max())
    return Outcome(off < bound, f"off by {off:.2g}, at most {bound:.2g}")


def upcast(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` in float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def keep_address(new: torch.Tensor, old: torch.Tensor | None) -> torch.Tensor:
    """Copy ``new`` into the old buffer where it fits, so that recorded CUDA graphs stay valid."""
    fits = old is not None and old.shape == new.shape and old.dtype == new.dtype
    return old.copy_(new) if fits and old is not None else new


DENSE_PROBE_ROWS = 32  # up to here every even number of rows is tried, beyond it multiples of 16, or it takes seconds
MAX_ROWS = (256, 128, 64)  # rows computed at once on a CPU, the better ones first; more gain nothing there

_measurements: dict[tuple[tuple[int, ...], tuple[int, ...] | None, int, int], int] = {}


def padding_unit(rows: int, multiple: int) -> int:
    """Return the unit to pad ``rows`` to, so that their number is one that was compared.

    Args:
        rows: how many are computed.
        multiple: what ``invariant_row_multiple`` returned; 0 where nothing is promised.

    >>> padding_unit(1, 1), padding_unit(3, 1), padding_unit(3, 4), padding_unit(33, 2), padding_unit(33, 0)
    (1, 2, 4, 16, 1)
    """
    if multiple == 0 or multiple == rows == 1:
        return 1
    return max(multiple, 2 if rows <= DENSE_PROBE_ROWS else 16)


@torch.no_grad()
def invariant_row_multiple(weights: Iterable[Weight], max_rows: int) -> int:
    """Return the least R such that a row of x W^T has the same bits at every compared multiple of R rows.

    Libraries choose by shape, processor and number of threads how a product is cut and in which order it is summed.
    So this is measured, once in a process for each shape. R is 1, 2, 4, ..., or ``max_rows``, which is invariant by
    itself. Compared are one row, even numbers up to 32 and multiples of 16 beyond; no other number is ever computed.

    Args:
        weights: [out, in], on a CPU, as they are used; on "meta" those that are not in memory. Values count where they
            are prepacked alone.
        max_rows: rows that are ever computed at once, a power of 2.

    >>> 64 % invariant_row_multiple([torch.zeros(8, 8)], 64)
    0
    """
    return max((_measure(weight, max_rows) for weight in weights), default=1)


def _measure(weight: Weight, max_rows: int) -> int:
    layout = None if isinstance(weight, Prepacked) else weight.stride()
    key = (tuple(weight.shape), layout, torch.get_num_threads(), max_rows)
    if key not in _measurements:
        generator = torch.Generator().manual_seed(0)
        made = {"dtype": torch.float32, "device": "cpu"}  # transformers changes all threads' defaults while it loads
        x = torch.rand(max_rows, weight.shape[1], generator=generator, **made) - 0.5
        if isinstance(weight, torch.Tensor):  # its shape and layout count: zeros of a fresh adapter tell nothing apart
            memory = torch.empty_strided(weight.shape, weight.stride(), **made)
            weight = memory.uniform_(-1.0, 1.0, generator=generator)
        expected = matmul(x, weight)
        compared = [1, *range(2, DENSE_PROBE_ROWS, 2), *range(DENSE_PROBE_ROWS, max_rows, 16)]
        same = {rows: torch.equal(matmul(x[:rows], weight), expected[:rows]) for rows in compared}
        multiple = 1
        while not all(equal for rows, equal in same.items() if rows % multiple == 0):
            multiple *= 2
        _measurements[key] = multiple
    return _measurements[key]
