"""Micro-batches: which datums are computed together, with the prompt that a group shares computed once.

A row of a batch is a prefix followed by the rest of one datum after the other. Every rest sees the prefix and itself,
and stands at the positions that it has in its own datum, so that it computes what it would compute alone. Tokens after
the last one that is scored are left out: nothing depends on them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import numpy as np

from rlkit.types import Datum

__all__ = ["Batch", "pack"]

KEYS = 2000  # attending to so many keys costs what the rest of a layer does, for a model of width 576


@attrs.frozen(eq=False)
class Batch:
    """One forward and backward.

    Attributes:
        members: indices of datums, in the order of the outputs.
        tokens: int64 [B, L], padded on the right.
        positions: int64 [B, L], or None where every row is one datum.
        visible: bool [B, L, L], which keys each query sees, or None for plain causal attention.
        index: int64 [n], the flat positions whose logits predict the members' masked-in tokens, in order.
    """

    members: list[int]
    tokens: np.ndarray
    positions: np.ndarray | None
    visible: np.ndarray | None
    index: np.ndarray


@attrs.define
class _Row:
    prefix: bytes
    start: int  # length of the prefix
    length: int
    parts: list[tuple[int, int]] = attrs.field(factory=list)  # (datum, where its rest begins)


@attrs.frozen
class _Extent:
    first: int  # the first masked-in token; what is before it is the prefix
    last: int  # the last masked-in token; it is predicted, not read

    @property
    def rest(self) -> int:
        return self.last - self.first


def pack(data: Sequence[Datum], budget: int, *, pairs: bool = False, share: bool = True) -> list[Batch]:
    """Batches of at most ``budget`` tokens, padding included, of all datums with a masked-in token.

    Args:
        data: the datums.
        budget: a datum longer than that is a batch by itself.
        pairs: datums 2k and 2k + 1 stay in one batch, in that order.
        share: compute common prefixes once; otherwise every row is one datum.
    """
    extents = {i: _extent(datum) for i, datum in enumerate(data) if datum.mask.any()}
    width = 2 if pairs else 1
    units = [[i for i in range(k, min(k + width, len(data))) if i in extents] for k in range(0, len(data), width)]
    prefixes = {i: data[i].tokens[: extent.first].tobytes() if share else b"%d" % i for i, extent in extents.items()}
    units = [unit for unit in units if unit]
    if share:
        units.sort(key=lambda u: (extents[u[0]].first, prefixes[u[0]], extents[u[0]].last))
    else:
        units.sort(key=lambda u: max(extents[i].last for i in u))
    limits = _limits(prefixes, extents, budget)
    batches: list[list[int]] = []
    rows: list[_Row] = []
    packed: list[list[_Row]] = []
    for unit in units:
        grown = [attrs.evolve(row, parts=list(row.parts)) for row in rows]
        for i in unit:
            _place(grown, i, extents[i], prefixes[i], limits)
        if batches and len(grown) * max(row.length for row in grown) <= budget:
            batches[-1] += unit
            packed[-1] = rows = grown
        else:
            rows = []
            for i in unit:
                _place(rows, i, extents[i], prefixes[i], limits)
            batches.append(list(unit))
            packed.append(rows)
    return [_batch(data, members, rows, extents) for members, rows in zip(batches, packed, strict=True)]


def _extent(datum: Datum) -> _Extent:
    places = np.flatnonzero(datum.mask)
    return _Extent(int(places[0]), int(places[-1]))


def _limits(prefixes: dict[int, bytes], extents: dict[int, _Extent], budget: int) -> dict[bytes, int]:
    """How long the rows of each prefix may be: about equal ones, with little padding, as many as cost least.

    k rows of a prefix of P tokens, with R others in all, cost k P KEYS + k (P + R / k) ** 2: what is repeated, and
    attention. That is least at k = R / sqrt(P (P + KEYS)).
    """
    rests: dict[bytes, list[int]] = {}
    starts = {prefixes[i]: extent.first for i, extent in extents.items()}
    for i, extent in extents.items():
        rests.setdefault(prefixes[i], []).append(extent.rest)
    limits = {}
    for prefix, lengths in rests.items():
        start, total = starts[prefix], sum(lengths)
        cheapest = int(total / math.sqrt(start * (start + KEYS)))
        count = max(1, cheapest, -(-total // max(1, budget - start)))
        limits[prefix] = min(budget, start + -(-total // count) + max(lengths) - 1)
    return limits


def _place(rows: list[_Row], i: int, extent: _Extent, prefix: bytes, limits: dict[bytes, int]) -> None:
    """Appends datum ``i`` to the last row if that has its prefix and room, else begins a row."""
    row = rows[-1] if rows else None
    if row is None or row.prefix != prefix or row.start != extent.first or row.length + extent.rest > limits[prefix]:
        row = _Row(prefix, extent.first, extent.first)
        rows.append(row)
    row.parts.append((i, row.length))
    row.length += extent.rest


def _batch(data: Sequence[Datum], members: list[int], rows: list[_Row], extents: dict[int, _Extent]) -> Batch:
    length = max(row.length for row in rows)
    tokens = np.zeros((len(rows), length), np.int64)
    positions = np.tile(np.arange(length), (len(rows), 1))
    segments = np.full((len(rows), length), -1)  # -1: the prefix, or padding, which nothing scored looks at
    index: dict[int, np.ndarray] = {}
    for r, row in enumerate(rows):
        tokens[r, : row.start] = data[row.parts[0][0]].tokens[: row.start]
        for i, begin in row.parts:
            extent = extents[i]
            end = begin + extent.rest
            tokens[r, begin:end] = data[i].tokens[extent.first : extent.last]
            positions[r, begin:end] = np.arange(extent.first, extent.last)
            segments[r, begin:end] = i
            before = np.flatnonzero(data[i].mask) - 1
            index[i] = r * length + np.where(before < extent.first, before, before - extent.first + begin)
    shared = any(len(row.parts) > 1 for row in rows)
    flat = np.concatenate([index[i] for i in members])
    if not shared:
        return Batch(members, tokens, None, None, flat)
    positions = np.minimum(positions, max(extent.last for extent in extents.values()))
    causal = np.tril(np.ones((length, length), bool))
    visible = causal & ((segments[:, None, :] == -1) | (segments[:, None, :] == segments[:, :, None]))
    return Batch(members, tokens, positions, visible, flat)
