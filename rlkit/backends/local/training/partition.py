"""Where to cut sorted datums into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

__all__ = ["LOOK_BACK", "cuts", "in_common", "row_costs", "tree_costs"]

BATCHES = 32  # one more batch is worth it where it saves a 32nd of the budget
LOOK_BACK = 4  # in sorted order what a datum has most in common with is the one before it; pairs break the order

Costs: TypeAlias = Callable[[int, int], np.ndarray]  # first unit, budget -> tokens with one unit, two, ...; enough


def cuts(units: int, costs: Costs, budget: int, longer: float = 1.0) -> list[slice]:
    """Return where to begin a new batch, so that the fewest tokens are computed in all.

    Args:
        units: of datums, in an order that is kept.
        costs: of batches that begin with a unit.
        budget: tokens of a batch, if it is more than one unit.
        longer: a batch whose first unit has more than those by itself may have so many times as many as that.

    >>> cuts(4, lambda first, _: np.array([6, 11, 16, 21])[: 4 - first], 16)
    [slice(0, 1, None), slice(1, 4, None)]
    """
    best = np.full(units + 1, np.inf)
    best[0] = 0
    come_from = np.zeros(units + 1, int)
    for i in range(units):
        cost = costs(i, budget)
        limit = int(longer * cost[0]) if longer > 1.0 and cost[0] > budget else budget
        cost = costs(i, limit) if limit > budget else cost
        cost = cost[: max(1, np.searchsorted(cost, limit, "right"))]
        ends = np.arange(i + 1, i + 1 + cost.size)
        total = best[i] + cost + budget / BATCHES
        better = ends[total < best[ends]]
        best[better], come_from[better] = total[better - i - 1], i
    slices, end = [], units
    while end:
        slices.append(slice(int(come_from[end]), end))
        end = int(come_from[end])
    return slices[::-1]


def tree_costs(members: Sequence[np.ndarray], firsts: np.ndarray, block: int = 1) -> Costs:
    """Return the costs of prefix trees: what one of the ``LOOK_BACK`` members before has as well is computed once."""
    common = np.zeros((len(members), LOOK_BACK + 1), int)  # at most with so many members before in the batch
    for m in range(len(members)):
        for d in range(1, LOOK_BACK + 1):
            here = in_common(members[m], members[m - d], block) if m >= d else 0
            common[m, d] = max(common[m, d - 1], here)
    added = np.array([x.size for x in members], int) - common[:, -1]
    before = np.concatenate([[0], np.cumsum(added)])

    def costs(unit: int, budget: int) -> np.ndarray:
        first = int(firsts[unit])
        few = np.arange(min(LOOK_BACK, len(members) - first))
        more = np.cumsum(common[first + few, -1] - common[first + few, few])  # the first ones have less before them
        last = np.searchsorted(before, before[first] + budget, "right")
        ends = firsts[unit + 1 : np.searchsorted(firsts, last, "right") + 1]
        tokens: np.ndarray = before[ends] - before[first] + more[np.minimum(ends - first, few.size) - 1]
        return tokens

    return costs


def row_costs(members: Sequence[np.ndarray], firsts: np.ndarray) -> Costs:
    """Return the costs of rows that are padded to the longest, which is the last."""
    sizes = np.array([x.size for x in members], int)

    def costs(unit: int, budget: int) -> np.ndarray:
        first = int(firsts[unit])
        rows = firsts[unit + 1 : unit + 2 + budget // int(sizes[first])] - first
        tokens: np.ndarray = rows * np.maximum.accumulate(sizes[first : first + rows[-1]])[rows - 1]
        return tokens

    return costs


def in_common(a: np.ndarray, b: np.ndarray, block: int = 1) -> int:
    """Return how many tokens both begin with, in whole blocks.

    >>> in_common(np.arange(9), np.array([0, 1, 2, 3, 5])), in_common(np.arange(9), np.arange(9), 4)
    (4, 8)
    """
    n = min(a.size, b.size)
    differ = np.flatnonzero(a[:n] != b[:n])
    n = int(differ[0]) if differ.size else n
    return n - n % block
