"""Micro-batches: datums that are computed together, with their common beginnings computed once.

The tokens of a micro-batch lie one after the other. A datum that begins as another one of the batch does adds only what
comes after, a run, which sees its own sequence alone and has its positions there; so a group reads
its prompt once, and so do the turns of an episode what they share. Batches are cut where least is computed twice.
Tokens after the last one that is scored are left out: nothing depends on them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import attrs
import numpy as np

from rlkit.backends.local.attention.tree import Segment, positions
from rlkit.types import Datum

__all__ = ["MicroBatch", "pack"]

# A prompt is computed again for each further batch of its group; so at most about half of the work is.
LONGER = 2.0  # times the tokens of a datum beyond the budget, with those that share them
BATCHES = 32  # one more batch is worth it where it saves a 32nd of the budget
_LOOK_BACK = 4  # in sorted order a datum has most in common with the one before it; pairs break the order
_HALVINGS = 8  # of the budget, to find the least one

Costs: TypeAlias = Callable[[int, int], np.ndarray]  # first unit, budget -> tokens with one unit, two, ...; enough


def _cuts(units: int, costs: Costs, budget: int, long: float = math.inf) -> list[slice]:
    """Return where to begin a new batch, so that the fewest tokens are computed in all.

    Args:
        units: of datums, in an order that is kept.
        costs: of batches that begin with a unit.
        budget: tokens of a batch, if it is more than one unit.
        long: a batch whose first unit alone has more tokens than that may have ``LONGER`` times that unit's.

    >>> _cuts(4, lambda first, _: np.array([6, 11, 16, 21])[: 4 - first], 16)
    [slice(0, 1, None), slice(1, 4, None)]
    """
    best = np.full(units + 1, np.inf)
    best[0] = 0
    come_from = np.zeros(units + 1, int)
    for i in range(units):
        cost = costs(i, budget)
        limit = int(LONGER * cost[0]) if cost[0] > long else budget
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


def _even_cuts(units: int, costs: Costs, budget: int, long: float, among: int) -> list[slice]:
    """Return cuts for processes that take a batch each in every round: in as many rounds, batches of about one size.

    >>> _even_cuts(4, lambda first, _: np.array([6, 11, 16, 21])[: 4 - first], 100, 100, 2)
    [slice(0, 2, None), slice(2, 4, None)]
    """
    slices = _cuts(units, costs, budget, long)
    most, low = among * -(-len(slices) // among), 0
    for _ in range(_HALVINGS):
        middle = (low + budget) // 2
        tried = _cuts(units, costs, middle, long)
        if len(tried) <= most:
            slices, budget = tried, middle
        else:
            low = middle
    return slices


def _tree_costs(members: Sequence[np.ndarray], firsts: np.ndarray) -> Costs:
    """Return the costs of prefix trees: what one of the ``_LOOK_BACK`` members before has as well is computed once."""
    common = np.zeros((len(members), _LOOK_BACK + 1), int)  # at most with so many members before in the batch
    for m in range(len(members)):
        for d in range(1, _LOOK_BACK + 1):
            here = _in_common(members[m], members[m - d]) if m >= d else 0
            common[m, d] = max(common[m, d - 1], here)
    added = np.array([x.size for x in members], int) - common[:, -1]
    before = np.concatenate([[0], np.cumsum(added)])

    def costs(unit: int, budget: int) -> np.ndarray:
        first = int(firsts[unit])
        few = np.arange(min(_LOOK_BACK, len(members) - first))
        more = np.cumsum(common[first + few, -1] - common[first + few, few])  # the first ones have less before them
        last = np.searchsorted(before, before[first] + budget, "right")
        ends = firsts[unit + 1 : np.searchsorted(firsts, last, "right") + 1]
        tokens: np.ndarray = before[ends] - before[first] + more[np.minimum(ends - first, few.size) - 1]
        return tokens

    return costs


def _row_costs(members: Sequence[np.ndarray], firsts: np.ndarray) -> Costs:
    """Return the costs of rows that are padded to the longest, which is the last."""
    sizes = np.array([x.size for x in members], int)

    def costs(unit: int, budget: int) -> np.ndarray:
        first = int(firsts[unit])
        rows = firsts[unit + 1 : unit + 2 + budget // int(sizes[first])] - first
        tokens: np.ndarray = rows * np.maximum.accumulate(sizes[first : first + rows[-1]])[rows - 1]
        return tokens

    return costs


def _in_common(a: np.ndarray, b: np.ndarray) -> int:
    """Return how many tokens both begin with.

    >>> _in_common(np.arange(9), np.array([0, 1, 2, 3, 5]))
    4
    """
    n = min(a.size, b.size)
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if differ.size else n


@attrs.frozen(eq=False)
class MicroBatch:
    """One forward and backward.

    Attributes:
        members: indices of datums, in the order of the outputs.
        tokens: int64 [N].
        positions: int64 [N], of each token in its own sequence.
        runs: which tokens see which.
        index: int64 [n], the places that predict the members' masked-in tokens, in order.
    """

    members: list[int]
    tokens: np.ndarray
    positions: np.ndarray
    runs: list[Segment]
    index: np.ndarray

    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Return every run as a row: tokens [B, L], padded on the right, and ``index`` as places of those."""
        lengths = [run.end - run.begin for run in self.runs]
        places = np.concatenate([r * max(lengths) + np.arange(n) for r, n in enumerate(lengths)])
        tokens = np.zeros(len(lengths) * max(lengths), np.int64)
        tokens[places] = self.tokens
        return tokens.reshape(len(lengths), -1), places[self.index]


def pack(
    data: Sequence[Datum], budget: int, *, pairs: bool = False, share: bool = True, among: int = 1
) -> list[MicroBatch]:
    """Return batches of at most ``budget`` tokens of all datums with a masked-in token.

    Args:
        data: the datums.
        budget: a unit (a datum, or a pair of them) longer than that is a batch with those alone that share tokens with
            it, ``LONGER`` times its own at most.
        pairs: datums 2k and 2k + 1 stay in one batch, in that order.
        share: compute once what sequences begin with. Else every datum is a run by itself, the padding of
            ``MicroBatch.rows`` counts, and a unit longer than the budget is a batch alone.
        among: so many processes compute one each in every round: there are no more rounds than ``budget`` asks for.
    """
    width = 2 if pairs else 1
    units = [range(k, min(k + width, len(data))) for k in range(0, len(data), width)]
    read = {i: d.tokens[: np.flatnonzero(d.mask)[-1]] for i, d in enumerate(data) if d.mask.any()}
    chosen = [scored for unit in units if (scored := [i for i in unit if i in read])]
    if share:
        chosen.sort(key=lambda unit: read[unit[0]].tobytes())
    else:
        chosen.sort(key=lambda unit: max(read[i].size for i in unit))
    members = [read[i] for unit in chosen for i in unit]
    firsts = np.cumsum([0, *map(len, chosen)])
    costs = _tree_costs(members, firsts) if share else _row_costs(members, firsts)
    long = budget if share else math.inf
    if among == 1:
        parts = _cuts(len(chosen), costs, budget, long)
    else:
        parts = _even_cuts(len(chosen), costs, min(budget, sum(x.size for x in members)), long, among)
    batches = []
    for part in parts:
        batch = _Filling(share)
        for i in itertools.chain(*chosen[part]):
            batch.take(i, read)
        batches.append(batch.done(data))
    return batches if among == 1 else sorted(batches, key=lambda batch: batch.tokens.size)


@attrs.define
class _Filling:
    """A batch on its way."""

    share: bool
    members: list[int] = attrs.field(factory=list)
    places: dict[int, np.ndarray] = attrs.field(factory=dict)  # datum -> the places of its tokens
    parts: list[np.ndarray] = attrs.field(factory=list)
    runs: list[Segment] = attrs.field(factory=list)
    size: int = 0

    def take(self, i: int, read: dict[int, np.ndarray]) -> None:
        """Append a datum."""
        tokens = read[i]
        earlier = self.members[-_LOOK_BACK:] if self.share else []
        n, like = max(((_in_common(tokens, read[j]), j) for j in earlier), default=(0, i))
        before = self.places[like][:n] if n else np.zeros(0, np.int64)
        end = self.size + tokens.size - n
        self.members.append(i)
        self.places[i] = np.concatenate([before, np.arange(self.size, end)])
        if end > self.size:
            self.parts.append(tokens[n:])
            self.runs.append(Segment(self.size, end, _slices(before)))
        self.size = end

    def done(self, data: Sequence[Datum]) -> MicroBatch:
        index = [self.places[i][np.flatnonzero(data[i].mask) - 1] for i in self.members]
        tokens = np.concatenate(self.parts).astype(np.int64)
        return MicroBatch(self.members, tokens, positions(self.runs), self.runs, np.concatenate(index))


def _slices(places: np.ndarray) -> tuple[slice, ...]:
    """Return ascending places as slices."""
    cuts = np.flatnonzero(np.diff(places) != 1) + 1
    return tuple(slice(int(p[0]), int(p[-1]) + 1) for p in np.split(places, cuts) if p.size)
