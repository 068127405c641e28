"""Matrix products: prepacked weights on a CPU, weights as they lie, and how many rows make a product batch-invariant.

A product with a plain weight matrix rearranges it first, every time; for a few rows that takes as long as the product.
oneDNN and MKL can keep the rearranged weight (``Prepacked``). In float32 this also makes products batch-invariant: a
row has the same bits however many rows the batch has. MKL is written for its maker's processors; on others oneDNN is
faster, by a third for 64 rows and twice for 8.

Torch has MKL's packed product as ``torch.ops.mkl``, but with memory of malloc's: MKL asks for up to nine times as much
as it writes, and where malloc gives memory that was used before, all of it stays in use. ``PackedGemm`` calls it in the
library that torch brings along, with its own pages, of which those that are never written to take no memory.

On GPUs, products of bfloat16 weights have results in float32: sums in float32 are not rounded again. The output head is
computed in float32, but its weight is a model's, in bfloat16. ``wide_matmul`` needs no float32 copy of it and no
products in float32, which are slow there. A float32 number with its 24 bits is the sum of three in bfloat16 with 8 bits
each, so that x W^T = x1 W^T + x2 W^T + x3 W^T, with an error as of a product in float32.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch
from torch import nn

from rlkit._fallback import NotSupportedHere, Outcome, try_path

__all__ = [
    "MAX_ROWS",
    "PackedGemm",
    "PackedLinear",
    "Prepacked",
    "PrepackedCopies",
    "Weight",
    "add_product",
    "available",
    "invariant_row_multiple",
    "matmul",
    "padding_unit",
    "plain_matmul",
    "preferred",
    "prepack",
    "product",
    "torch_matmul",
    "wide_matmul",
    "works",
]

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
        """Map [N, in] to [N, out]."""
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
    return try_path("MKL's packed product", lambda: Outcome(bool(_library())), "oneDNN computes it")


@functools.cache
def preferred() -> bool:
    """Return whether MKL is there, and this processor one that it is written for."""
    info = Path("/proc/cpuinfo")
    return available() and info.exists() and "GenuineIntel" in info.read_text()


@functools.cache
def _library() -> ctypes.CDLL:
    integer, address, number = ctypes.c_int, ctypes.c_void_p, ctypes.c_float
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        size, pack, compute = (getattr(library, f"cblas_sgemm_{x}") for x in ("pack_get_size", "pack", "compute"))
    except (OSError, AttributeError) as error:  # a build without this file, or without one of these names
        raise NotSupportedHere(str(error)) from error
    size.argtypes, size.restype = [integer] * 4, ctypes.c_size_t
    pack.argtypes, pack.restype = [*[integer] * 6, number, address, integer, address], None
    matrices = [address, integer, address, integer, number, address, integer]
    compute.argtypes, compute.restype = [*[integer] * 6, *matrices], None
    return library


def plain_matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x W^T + bias, without a gradient.

    In float32 on a CPU that MKL is not written for, oneDNN computes 1.05 to 1.5 times as much in the same time, with
    weights of either layout.

    Args:
        x: [N, in].
        weight: [out, in], of any strides, in the same dtype.
        bias: [out].

    >>> plain_matmul(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]), torch.tensor([1.0]))
    tensor([[12.]])
    """
    if x.dtype == torch.float32 and x.device.type == "cpu" and x.numel() and _preferred():
        return _plain_onednn(x, weight, bias)
    return torch_matmul(x, weight, bias)


def torch_matmul(x: torch.Tensor, weight: torch.Tensor, summand: torch.Tensor | None = None) -> torch.Tensor:
    """Return x W^T + summand as torch's modules compute it, and as ``batch_invariance`` measures it: for sampling."""
    return x @ weight.t() if summand is None else torch.addmm(summand, x, weight.t())


def _plain_onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    # torch.compile computes linear layers with it; it has no public name.
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")  # noqa: SLF001
    return out if bias is None else out.add_(bias)


@functools.cache
def _preferred() -> bool:
    """Return whether this build of torch has oneDNN's products, they are right, and MKL's are not the better ones."""
    if preferred() or not torch.backends.mkldnn.is_available():
        return False
    return try_path("oneDNN's product", _compare_plain, "MKL computes it", refusals=(AttributeError, RuntimeError))


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
    """Return x W^T in float32, of x [n, in] in float32 and W [out, in] in bfloat16, without a gradient."""
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
        self._multiply: Callable[[torch.Tensor], torch.Tensor]
        if weight.dtype == torch.float32 and preferred():
            self._multiply = PackedGemm(weight)
        else:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS)  # noqa: SLF001  # no public name
            self._multiply = partial(_plain_onednn, weight=packed, bias=None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map [N, in] to [N, out]."""
        return self._multiply(x)


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
        return wide_matmul(x, weight)
    return x @ weight.t()


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


class PackedLinear:
    """The forward of a linear module, without a gradient, by a prepacked weight.

    Args:
        module: the module, which computes so until ``remove``.
        weight: [out, in], another one than its own; the module's is then not a number, so that no one reads the wrong
            one past its forward. Without one, its own is prepacked when it is first called.
        prepack_own: how.
    """

    def __init__(
        self,
        module: nn.Linear,
        weight: torch.Tensor | None = None,
        prepack_own: Callable[[torch.Tensor], Weight] = prepack,
    ) -> None:
        self._module, self._own, self._prepack_own = module, module.weight, prepack_own
        self._packed = None if weight is None else prepack(weight)
        if weight is not None:
            nothing = torch.full((1, 1), torch.nan, dtype=weight.dtype, device=weight.device)
            module.weight = nn.Parameter(nothing.expand(weight.shape), requires_grad=False)
        module.forward = self

    @property
    def weight(self) -> Weight:
        """Return the weight [out, in] of the product."""
        if self._packed is None:
            self._packed = self._prepack_own(self._own.detach())
        return self._packed

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., in] to [..., out]."""
        out = matmul(x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)
        return out if self._module.bias is None else out.add_(self._module.bias)

    def remove(self) -> None:
        """Restore the module's own computation."""
        del self._module.forward
        self._module.weight = self._own


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
