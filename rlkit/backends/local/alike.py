"""How many rows a product needs for each of them to come out the same whatever the others are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["MOST", "multiple", "rows_alike"]

FEW = 32  # up to here every even number of rows is tried, beyond it multiples of 8
LARGE = 2**24  # of weights with so many elements only multiples of 16, or trying would take seconds
MOST = 128  # rows computed at once on a CPU; more gain nothing there

_known: dict[tuple[Any, ...], int] = {}


def multiple(rows: int, alike: int) -> int:
    """Of what to make the number of rows a multiple, so that it is one that ``rows_alike`` has tried.

    >>> multiple(3, 2), multiple(33, 2), multiple(33, 16)
    (2, 8, 16)
    """
    return alike if rows <= FEW else max(alike, 8)


@torch.no_grad()
def rows_alike(weights: Iterable[torch.Tensor]) -> int:
    """The least R for which x W^T has the same bits in a row at every multiple of R rows up to 128.

    Libraries choose by shape, processor and number of threads how a product is cut and in which order it is summed.
    So that is measured, once in a process for each shape: it is 2, 4, 8, 16, 32, 64, or 128, which is alike by itself.
    On a GPU and for other dtypes than float32, where nothing is promised, it is 1.

    Args:
        weights: [out, in], laid out in memory as they are used.

    >>> import torch
    >>> rows_alike([torch.zeros(8, 8, dtype=torch.bfloat16)])
    1
    """
    return max((_measured(weight) for weight in weights), default=1)


def _measured(weight: torch.Tensor) -> int:
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return 1
    key = (tuple(weight.shape), weight.stride(), torch.get_num_threads())
    if key not in _known:
        x = torch.rand(MOST, weight.shape[1], generator=torch.Generator().manual_seed(0)) - 0.5
        whole = x @ weight.t()
        small = weight.numel() < LARGE
        found, numbers = (2, (*range(2, FEW, 2), *range(FEW, MOST, 8))) if small else (16, (*range(16, MOST, 16),))
        tried = {n: torch.equal(x[:n] @ weight.t(), whole[:n]) for n in numbers}
        while not all(same for n, same in tried.items() if n % found == 0):
            found *= 2
        _known[key] = found
    return _known[key]
