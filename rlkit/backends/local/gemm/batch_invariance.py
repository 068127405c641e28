"""How many rows a product needs for each of them to come out the same whatever the others are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from rlkit.backends.local.gemm.prepacked import Packed, Product, product

__all__ = ["MOST", "multiple", "rows_alike"]

FEW = 32  # up to here every even number of rows is tried, beyond it multiples of 16, or trying would take seconds
MOST = (256, 128, 64)  # rows computed at once on a CPU, the better ones first; more gain nothing there

_known: dict[tuple[Any, ...], int] = {}


def multiple(rows: int, alike: int) -> int:
    """Of what to make the number of rows a multiple, so that it is one that ``rows_alike`` has tried.

    >>> multiple(1, 1), multiple(3, 1), multiple(3, 4), multiple(33, 2), multiple(33, 16), multiple(33, 0)
    (1, 2, 4, 16, 16, 1)
    """
    if alike == 0 or alike == rows == 1:
        return 1
    return max(alike, 2 if rows <= FEW else 16)


@torch.no_grad()
def rows_alike(factors: Iterable[Product], most: int) -> int:
    """The least R for which x W^T has the same bits in a row at every tried multiple of R rows up to ``most``.

    Libraries choose by shape, processor and number of threads how a product is cut and in which order it is summed.
    So that is measured, once in a process for each shape: it is 1, 2, 4, ..., or ``most``, which is alike by itself.
    Tried are one row, even numbers up to 32 and multiples of 16 beyond; no other number is ever computed.

    Args:
        factors: [out, in], on a CPU, as they are used.
        most: rows that are ever computed at once, a power of 2.

    >>> rows_alike([torch.zeros(8, 8)], 64)
    1
    """
    return max((_measured(factor, most) for factor in factors), default=1)


def _measured(factor: Product, most: int) -> int:
    layout = None if isinstance(factor, Packed) else factor.stride()
    key = (tuple(factor.shape), layout, torch.get_num_threads(), most)
    if key not in _known:
        x = torch.rand(most, factor.shape[1], generator=torch.Generator().manual_seed(0)) - 0.5
        whole = product(x, factor)
        tried = [1, *range(2, FEW, 2), *range(FEW, most, 16)]
        alike = {n: torch.equal(product(x[:n], factor), whole[:n]) for n in tried}
        found = 1
        while not all(same for n, same in alike.items() if n % found == 0):
            found *= 2
        _known[key] = found
    return _known[key]
