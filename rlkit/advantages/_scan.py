"""The recursion behind every return: y[t] = x[t] + a[t] y[t + 1], for all rows at once."""

from __future__ import annotations

import itertools

import numpy as np

_CHUNK = 1 << 16  # entries worked on together, so that they stay in the cache


def reverse_scan(x: np.ndarray, a: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """y[t] = x[t] + a[t] y[t + 1] over flat rows, where ``a`` is 0 at the last entry of each row; overwrites both.

    By doubling: after each pass y[t] covers twice as many steps, and ``a`` what lies between. That takes about
    log2(longest row) passes, only sums and products, and gives a row the same bits whatever stands beside it.

    >>> reverse_scan(np.array([0.0, 0.0, 1.0]), np.array([0.5, 0.5, 0.0]), np.array([0]))
    array([0.25, 0.5 , 1.  ])
    """
    for begin, end in _chunks(starts, x.size):
        part, factor = x[begin:end], a[begin:end]
        step = 1
        while factor.any():  # which ends, since each row ends with a 0
            part[:-step] += factor[:-step] * part[step:]
            factor[:-step] *= factor[step:]
            step *= 2
    return x


def window_sum(x: np.ndarray, gamma: float, n: int, left: np.ndarray) -> np.ndarray:
    """Return the sum over k < n of gamma^k x[t + k] within the row; ``left`` counts the entries from t to its end.

    Windows of 1, 2, 4, ... entries are put together by the binary digits of n, so nothing is ever subtracted.
    """
    block, size = x.copy(), 1
    total, covered = np.zeros_like(x), 0
    n = min(n, x.size)
    while n:
        if n & 1:
            total += gamma**covered * ahead(block, covered, left)
            covered += size
        n >>= 1
        if n:
            block += gamma**size * ahead(block, size, left)
            size *= 2
    return total


def ahead(x: np.ndarray, steps: int, left: np.ndarray) -> np.ndarray:
    """x[t + steps], or 0 beyond the end of the row."""
    if steps == 0:
        return x
    result = np.zeros_like(x)
    result[:-steps] = np.where(left[:-steps] > steps, x[steps:], 0.0)
    return result


def _chunks(starts: np.ndarray, size: int) -> list[tuple[int, int]]:
    """Consecutive whole rows, about ``_CHUNK`` entries at a time."""
    bounds = starts[np.searchsorted(starts, np.arange(0, size, _CHUNK), side="right") - 1]
    edges = np.unique(np.append(bounds, size)).tolist()
    return list(itertools.pairwise(edges))
