"""How many rows a product needs for each row to be batch-invariant: the same bits whatever the other rows are."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from rlkit.backends.local.gemm.prepacked import Prepacked, Weight, matmul

__all__ = ["MAX_ROWS", "invariant_row_multiple", "padding_unit"]

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
