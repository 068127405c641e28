"""How many rows a product needs for each of them to come out the same whatever the others are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["LEAST", "MOST", "rows_alike"]

LEAST = 8
MOST = 128  # rows computed at once on a CPU; more gain nothing there


_known: dict[tuple[Any, ...], int] = {}


@torch.no_grad()
def rows_alike(weights: Iterable[torch.Tensor]) -> int:
    """The least R for which x W^T has the same bits in a row at every multiple of R rows up to 128.

    Libraries choose by shape, processor and number of threads how a product is cut and in which order it is summed.
    So that is measured, once in a process for each shape: it is 8, 16, 32, 64, or 128, which is alike by itself. On a
    GPU and for other dtypes than float32, where nothing is promised, it is 8.

    Args:
        weights: [out, in], laid out in memory as they are used.

    >>> import torch
    >>> rows_alike([torch.zeros(8, 8, dtype=torch.bfloat16)])
    8
    """
    return max((_measured(weight) for weight in weights), default=LEAST)


def _measured(weight: torch.Tensor) -> int:
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return LEAST
    key = (tuple(weight.shape), weight.stride(), torch.get_num_threads())
    if key not in _known:
        x = torch.rand(MOST, weight.shape[1], generator=torch.Generator().manual_seed(0)) - 0.5
        whole = x @ weight.t()
        same = {n: torch.equal(x[:n] @ weight.t(), whole[:n]) for n in range(LEAST, MOST, LEAST)}
        found = LEAST
        while found < MOST and not all(same[n] for n in range(found, MOST, found)):
            found *= 2
        _known[key] = found
    return _known[key]
