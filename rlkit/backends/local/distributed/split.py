"""Which rank computes which datums."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlkit.backends.local.training.partition import Costs, tree_costs
from rlkit.types import Datum

__all__ = ["shares_of"]


def shares_of(data: Sequence[Datum], ranks: int, *, pairs: bool, share: int) -> list[list[int]]:
    """Return the indices of each rank's datums, so that the rank that computes the most tokens computes the fewest.

    In sorted order, in which those that begin alike stand together, each rank gets a stretch. A prompt that several
    datums have in common counts once for a rank, so that a group is only cut where that pays for computing it twice.

    Args:
        data: the datums; those without a masked-in token, of which nothing is computed, are rank 0's.
        ranks: how many there are.
        pairs: datums 2k and 2k + 1 stay together.
        share: blocks in which what datums begin with is computed once, 0 for not at all.

    >>> data = [Datum([1, 2, 3, k], [0, 0, 0, 1]) for k in (5, 6)] + [Datum([4, 5, 6, 7, 8], [0, 0, 0, 0, 1])]
    >>> shares_of(data, 2, pairs=False, share=1)
    [[0, 1], [2]]
    """
    width = 2 if pairs else 1
    units = [range(k, min(k + width, len(data))) for k in range(0, len(data), width)]
    read = {i: datum.tokens[: np.flatnonzero(datum.mask)[-1]] for i, datum in enumerate(data) if datum.mask.any()}
    chosen = [unit for unit in units if any(i in read for i in unit)]
    chosen.sort(key=lambda unit: next(read[i] for i in unit if i in read).tobytes())
    members = [[read[i] for i in unit if i in read] for unit in chosen]
    firsts = np.cumsum([0, *map(len, members)])
    flat = [x for unit in members for x in unit]
    costs = tree_costs(flat, firsts, share) if share else _sums(flat, firsts)
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for rank, stretch in enumerate(_stretches(len(chosen), costs, ranks)):
        shares[rank] = sorted(i for unit in chosen[stretch] for i in unit)
    shares[0] = sorted([*shares[0], *(i for unit in units if not any(i in read for i in unit) for i in unit)])
    return shares


def _stretches(units: int, costs: Costs, ranks: int) -> list[slice]:
    """Return at most ``ranks`` slices of units whose largest cost is the smallest, found by bisection."""
    if units == 0:
        return []
    most = 1 << 62
    low, high = 1, int(costs(0, most)[units - 1])
    best = [slice(0, units)]
    while low < high:
        middle = (low + high) // 2
        cut = _filled(units, costs, middle, ranks)
        if cut is None:
            low = middle + 1
        else:
            high, best = middle, cut
    return best


def _filled(units: int, costs: Costs, budget: int, ranks: int) -> list[slice] | None:
    """Return slices of at most ``budget`` tokens, or None where those are more than ``ranks``."""
    slices: list[slice] = []
    begin = 0
    while begin < units:
        cost = costs(begin, budget)
        count = int(np.searchsorted(cost, budget, "right"))
        if count == 0 or len(slices) == ranks:
            return None
        slices.append(slice(begin, begin + count))
        begin += count
    return slices


def _sums(members: Sequence[np.ndarray], firsts: np.ndarray) -> Costs:
    before = np.concatenate([[0], np.cumsum([x.size for x in members], dtype=int)])[firsts]

    def costs(unit: int, budget: int) -> np.ndarray:
        del budget
        tokens: np.ndarray = before[unit + 1 :] - before[unit]
        return tokens

    return costs
