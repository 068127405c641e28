"""How many rows a product needs for each of them to come out the same whatever the others are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["MOST", "multiple", "rows_alike"]

FEW = 32  # up to here every even number of rows is tried, beyond it multiples of 8
LARGE = 2**24  # of weights with so many elements only multiples of 16, or trying would take seconds
MOST = (128, 64)  # rows computed at once on a CPU, the better ones first; more gain nothing there

_known: dict[tuple[Any, ...], int] = {}


def multiple(rows: int, alike: int) -> int:
    """Of what to make the number of rows a multiple, so that it is one that ``rows_alike`` has tried.

    >>> multiple(3, 2), multiple(33, 2), multiple(33, 16), multiple(33, 1)
    (2, 8, 16, 1)
    """
    return alike if rows <= FEW or alike == 1 else max(alike, 8)


@torch.no_grad()
def rows_alike(weights: Iterable[torch.Tensor], most: int) -> int:
    """The least R for which x W^T has the same bits in a row at every tried multiple of R rows up to ``most``.

    Libraries choose by shape, processor and number of threads how a product is cut and in which order it is summed.
    So that is measured, once in a process for each shape: it is 2, 4, 8, ..., or ``most``, which is alike by itself.
    Tried are even numbers up to 32 and multiples of 8 beyond, of large weights multiples of 16. On a GPU, where
    nothing is promised, it is 1.

    Args:
        weights: [out, in], laid out in memory as they are used.
        most: rows that are ever computed at once, a power of 2.

    >>> import torch
    >>> rows_alike([torch.zeros(8, 8, device="meta")], 64)
    1
    """
    return max((_measured(weight, most) for weight in weights), default=1)


def _measured(weight: torch.Tensor, most: int) -> int:
    if weight.device.type != "cpu":
        return 1
    key = (tuple(weight.shape), weight.stride(), torch.get_num_threads(), most)
    if key not in _known:
        x = torch.rand(most, weight.shape[1], generator=torch.Generator().manual_seed(0)) - 0.5
        whole = x @ weight.t()
        small = weight.numel() < LARGE
        found, numbers = (2, (*range(2, FEW, 2), *range(FEW, most, 8))) if small else (16, (*range(16, most, 16),))
        tried = {n: torch.equal(x[:n] @ weight.t(), whole[:n]) for n in numbers}
        while not all(same for n, same in tried.items() if n % found == 0):
            found *= 2
        _known[key] = found
    return _known[key]
